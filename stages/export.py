"""Hand a model to others, adapters merged and with a card: `python -m rlhf.stages.export MODEL OUT`."""

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from rlhf.data.errors import RefusedError, SettingsError, first_line, of_file
from rlhf.stages import adapters, decoder
from rlhf.stages.arguments import Arguments
from rlhf.stages.disk import refuse_no_room_beside, replace_text, swap_folder
from rlhf.stages.logs import be_quiet
from rlhf.stages.model_card import base_of, called, card, is_hub_id, past
from rlhf.stages.models import (
    ScalarModel,
    load_policy,
    load_scalar,
    load_tokenizer,
    read_tokenizer,
    save_folder,
    why_not_loaded,
)
from rlhf.stages.streams import go_on_unread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTER = "adapter_config.json"


def export(reference: str, out: Path, dtype: str | None = None, name: str | None = None) -> list[str]:
    """Write the model of a folder or hub id to `out`, with tokenizer and card; returns what there is to know of it.

    A LoRA adapter is merged into the model that it names as its base. Numbers are kept in float32, or in `dtype`; a
    reward model's head stays in float32. Raises RefusedError.
    """
    _refuse_full(out)
    source = Path(reference)
    if (source / _ADAPTER).is_file() and not (source / "config.json").is_file():
        base = json.loads((source / _ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not base:
            raise RefusedError(
                f"{source}: {_ADAPTER} names no base; set base_model_name_or_path there to a folder or hub id"
            )
        tokenizer = load_tokenizer(base)
        model: PreTrainedModel | ScalarModel = adapters.merged(load_policy(base, tokenizer), source)
    else:
        tokenizer = load_tokenizer(reference)
        model = (load_scalar if is_reward_model(reference) else load_policy)(reference, tokenizer)
    inner = model.classifier if isinstance(model, ScalarModel) else model
    if dtype is not None:
        _to_type(inner, dtype)
    notes = _notes(model, inner)
    with _aside(out) as writing:
        save_folder(writing, model, tokenizer)
        text = card(name or out.name, reference, isinstance(model, ScalarModel), False, notes, _brings_code(inner))
        replace_text(writing / "README.md", text)
    return notes


def export_adapter(reference: str, out: Path, name: str | None = None) -> list[str]:
    """Write the adapter that a model was merged from to `out`, as PEFT has it. Raises RefusedError where there is none.

    The base that it names is a hub id or nothing: a path of this machine would be of no use elsewhere.
    """
    _refuse_full(out)
    source = Path(reference)
    places = [source, source / "adapter", *([source.parent / "adapter"] if source.name == "model" else [])]
    found = next((place for place in places if (place / _ADAPTER).is_file()), None)
    if found is None:
        raise RefusedError(
            f"{reference}: has no adapter; one is kept where a stage trained with lora (PPO: in layout adapters)"
        )
    stages = past(source)
    base = str(stages[0].settings["model"]) if stages else None
    hub = base_of(stages[:1], reference) if stages else None
    is_reward = bool(stages) and stages[0].stage == "reward"
    belongs_to = called(base) if base else "the model that it was trained on"
    notes = [f"It belongs to {belongs_to}: `PeftModel.from_pretrained(base, folder)` puts it on."]
    if (found / "value_head.safetensors").is_file():
        notes.append("Its head to one number lies in value_head.safetensors.")
    with _aside(out) as writing:
        shutil.copytree(found, writing)
        config = json.loads((writing / _ADAPTER).read_text(encoding="utf-8"))
        named = None if stages else config.get("base_model_name_or_path")
        config["base_model_name_or_path"] = hub or (named if named and is_hub_id(named) else None)
        replace_text(writing / _ADAPTER, json.dumps(config, indent=1))
        if found != source:
            read_tokenizer(reference).save_pretrained(writing)
        replace_text(writing / "README.md", card(name or out.name, reference, is_reward, True, notes))
    return notes


def push(out: Path, name: str) -> str:
    """Upload a folder to the hub; a repository that is not there is made, private. Returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=str(out), commit_message="Exported with RLHF Toolkit")
    except (OSError, ValueError) as error:  # whatever becomes of a request; HfHubHTTPError is an OSError
        raise RuntimeError(
            f"{out} is written, but could not be uploaded to {name}: {first_line(error)}; HF_TOKEN or `hf auth login` "
            "names who you are"
        ) from error
    return address


def is_reward_model(reference: str) -> bool:
    """Whether a model's config names a sequence classifier."""
    try:
        config = AutoConfig.from_pretrained(reference, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RefusedError(f"no model in '{reference}': {why_not_loaded(reference, error)}") from error
    return any("ForSequenceClassification" in name for name in config.architectures or [])


def _refuse_full(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"{out}: is there already, and is not written over; choose another folder")
    refuse_no_room_beside(out)


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder to write to beside `out`, which takes its place at the end; nothing of one that failed stays."""
    writing = out.with_name(f".{out.name}.exporting")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        yield writing
        swap_folder(writing, out)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _to_type(model: PreTrainedModel, dtype: str) -> None:
    """Round the weights, but not a head to one number: a score near 4 would have steps of 0.03 in bfloat16."""
    head = getattr(model, "score", None)
    exact = copy.deepcopy(head)
    model.to(DTYPES[dtype])
    if head is not None:
        model.score = exact
    wrong = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if wrong is not None:
        raise RefusedError(f"{wrong} holds numbers that {dtype} has no place for; export it as bf16 or fp32")


def _brings_code(inner: PreTrainedModel) -> bool:
    is_ours: bool = inner.config.model_type == decoder.DecoderConfig.model_type
    return is_ours


def _notes(model: PreTrainedModel | ScalarModel, inner: PreTrainedModel) -> list[str]:
    kept = str(inner.dtype).removeprefix("torch.")
    but = ", those of its head in float32" if isinstance(model, ScalarModel) and inner.dtype != torch.float32 else ""
    notes = [f"Its weights are in {kept}{but}."]
    if _brings_code(inner):
        notes.append(
            "Its architecture comes with it, in decoder.py: where RLHF Toolkit is not imported, load it with "
            "`trust_remote_code=True`."
        )
    if isinstance(model, ScalarModel):
        read = "the mean of its head's numbers over" if model.pooling == "mean" else "its head's number at the last of"
        less = f"{'+' if model.mean < 0 else '-'} {abs(model.mean):.6g}"
        notes.append(
            f"Its score is (x {less}) / {model.std:.6g}, where x is {read} the answer's tokens (`rlhf_score` in "
            "config.json); logits of transformers are not normalised."
        )
    return notes


def main(arguments: list[str]) -> None:
    """Export, and say what was written."""
    parser = Arguments(prog="rlhf export", description="Hand a model to others.")
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=list(DTYPES), help="type of the weights")
    parser.add_argument("--adapter-only", action="store_true", help="write the adapter alone")
    parser.add_argument("--push-to-hub", metavar="NAME", help="upload it to this repository")
    options = parser.parse_args(arguments)
    be_quiet()
    if options.adapter_only and options.dtype is not None:
        raise SettingsError(
            f"--dtype {options.dtype}: an adapter is written as it is; leave out --adapter-only or --dtype"
        )
    if options.push_to_hub is not None:
        _refuse_bad_name(options.push_to_hub)
    name = options.push_to_hub and options.push_to_hub.rpartition("/")[2]
    if options.adapter_only:
        notes = export_adapter(options.model, options.out, name)
    else:
        notes = export(options.model, options.out, options.dtype, name)
    print(f"{options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    for note in notes:
        print(note)
    if options.push_to_hub is not None:
        print(f"uploaded to {push(options.out, options.push_to_hub)}")


def _refuse_bad_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SettingsError(f"--push-to-hub {name}: {first_line(error)}") from error


if __name__ == "__main__":
    go_on_unread()
    try:
        main(sys.argv[1:])
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"error: {of_file(error)}", file=sys.stderr)
        raise SystemExit(1) from None
