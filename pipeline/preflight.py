"""What can be found wrong before the first stage starts: rows, models, lengths and batches. No torch."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf.data import rows
from rlhf.data.documents import Documents, plain_documents
from rlhf.data.errors import DataError, SettingsError, TooManyUnusable
from rlhf.data.feedback.store import Store
from rlhf.data.hub import refuse_unknown
from rlhf.data.plain_rows import read_prompts_as_json
from rlhf.data.sources import Source, is_streamed
from rlhf.data.split import train_and_eval
from rlhf.pipeline.accelerate_config import refuse_bad_configs
from rlhf.pipeline.fits import misfits
from rlhf.pipeline.launch import visible_gpus
from rlhf.pipeline.plan import Step, upstreams_of
from rlhf.pipeline.recipe import Recipe, to_yaml
from rlhf.pipeline.references import models_of
from rlhf.stages.artifact import STORE, Artifact, refuse_damaged_model
from rlhf.stages.evaluation.records import ANSWERS, FIGURES
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import StageSettings
from rlhf.stages.sft.config import SFTSettings

Say = Callable[[str], None]


_OF_THE_TEXT = {*PretrainSettings.data_fields, "eval_share", "max_dropped", "deduplicate", "min_document_length",
                "max_document_length"}  # fmt: skip
"""What decides which documents pretrain reads and keeps."""


def refuse_foreign_files(run_dir: Path, recipe: Recipe, source: Path | None) -> None:
    """Refuse to write over a recipe, a report or an evaluation that no run of ours left here.

    `source` is the file that the recipe was read from, if it was one.
    """
    path = run_dir / "recipe.yaml"
    differs = path.is_file() and path.read_text(encoding="utf-8", errors="replace") != to_yaml(recipe)
    if differs and source is not None and source.is_file() and source.samefile(path):
        raise SettingsError(f"{path}: the run would write over the recipe that it reads; choose another --run-dir")
    if (run_dir / "summary.json").is_file():
        return
    for name, ours in (("recipe.yaml", not differs), ("report.html", False), (FIGURES, False), (ANSWERS, False)):
        path = run_dir / name
        if os.path.lexists(path) and not ours:
            raise SettingsError(f"{path}: is not of a run of ours and would be lost; choose another --run-dir")


def refuse_bad_input(steps: list[Step], recipe: Recipe, run_dir: Path, say: Say, verify: bool = False) -> None:
    """Read all rows, and look at all models that are there, of the stages that will run.

    With `verify` every file of what is reused or started from is hashed; without, models have their sizes compared.
    """
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingsError(f"--run-dir {run_dir}: {there} is not writable; choose another")
    to_run = [step.settings for step in steps if step.action in ("run", "resume") and step.settings is not None]
    gpus = visible_gpus()
    refuse_bad_configs(recipe, [settings.stage for settings in to_run], gpus, say)
    problems = [line for settings in to_run for line in misfits(settings, recipe, gpus)]
    problems += misused_models(steps, recipe)
    if problems:
        raise SettingsError("\n".join(problems))
    for settings in to_run:
        for where, reference in models_of(settings):
            refuse_unknown(reference, where)
    read: list[dict[str, Any]] = []
    for settings in to_run:
        if isinstance(settings, PPOSettings):
            settings.refuse_missing_bitsandbytes()
        text = settings.model_dump(include=_OF_THE_TEXT) if isinstance(settings, PretrainSettings) else None
        if text is None or text not in read:  # the variants of a sweep have one text
            try:
                _refuse_bad_rows(settings, say)
            except TooManyUnusable as error:
                raise TooManyUnusable(error.found, error.share, settings.stage) from None
        if text is not None:
            read.append(text)
    reused = {step.folder.absolute() for step in steps if verify and step.action == "reuse" and step.folder}
    for folder in sorted(reused):
        Artifact(folder).refuse_damage(hashes=True)
    models = {Path(model) for settings in to_run for model in settings.inputs().values() if model is not None}
    for model in sorted(model for model in models if model.parent not in reused):
        refuse_damaged_model(model, verify)


def misused_models(steps: list[Step], recipe: Recipe) -> Iterator[str]:
    """What stages cannot do with the models that they name, so far as the configs of those in local folders tell."""
    yield from _reward_models(steps)
    yield from _too_long(steps, recipe)


def _reward_models(steps: list[Step]) -> Iterator[str]:
    """Reward models where a language model is needed, which is everywhere but in the reward stage."""
    for step in steps:
        if step.settings is None or step.stage == "reward" or step.action not in ("run", "resume"):
            continue
        model = step.settings.inputs().get("model")
        kinds = (config_in(Path(model)) if model is not None else {}).get("architectures")
        if isinstance(kinds, list) and any("ForSequenceClassification" in str(kind) for kind in kinds):
            yield (
                f"{step.stage}.model: '{model}' is a reward model, not a language model; name the sft or ppo stage's "
                "model"
            )


def _too_long(steps: list[Step], recipe: Recipe) -> Iterator[str]:
    """Sequences that the model has no positions for. One that is still to be made has those of the model that it starts
    from; what is not in a local folder is the stage's to check."""
    made: dict[str, int | None] = {}
    for step in steps:
        settings = step.settings
        if settings is None:
            made[step.stage] = positions_in(Artifact(step.folder).model) if step.folder else None
            continue
        model = settings.inputs().get("model")
        upstream = upstreams_of(recipe, step.round).get((step.stage, "model"), "")
        positions = positions_in(Path(model)) if model is not None else made.get(upstream)
        made[step.stage] = positions
        if step.action not in ("run", "resume") or positions is None or _has_answers(step):
            continue
        longest = settings.longest()
        if longest is not None and longest[1] > positions:
            cure = " ".join(f"{step.stage}.{name}={value}" for name, value in _that_fit(settings, positions).items())
            yield f"{longest[0]} is {longest[1]}, but the model has {positions} positions; set {cure}"


def _that_fit(settings: StageSettings, positions: int) -> dict[str, int]:
    """Lengths that a model has positions for, of those that have to change. PPO's two share them: each keeps its own so
    far as that leaves half of them to the other."""
    if isinstance(settings, PPOSettings):
        prompt, new = settings.max_prompt_length, settings.max_new_tokens
        new = min(new, max(positions // 2, positions - prompt))
        found = {"max_prompt_length": min(prompt, positions - new), "max_new_tokens": new}
    else:
        found = dict.fromkeys(settings.length_fields, positions)
        sampled = settings.num_sampled_answers if isinstance(settings, RewardSettings) else 1
        if isinstance(settings, FeedbackSettings | RewardSettings) and sampled and settings.max_new_tokens >= positions:
            found["max_new_tokens"] = positions // 2  # which must leave room for a prompt
    return {name: value for name, value in found.items() if getattr(settings, name) != value}


def _has_answers(step: Step) -> bool:
    """Whether a feedback step has sampled, so that how long it samples matters no more: people may have ranked them."""
    store = step.folder and step.folder / STORE
    if step.stage != "feedback" or store is None or not store.is_file():
        return False
    with Store.open(store) as opened:
        return opened.progress(round=step.round).num_prompts > 0


def positions_in(model: Path) -> int | None:
    """Those of the model in a local folder; None where that cannot be read, or does not say."""
    text = text_config_in(model)
    found = text.get("max_position_embeddings", text.get("n_positions"))  # the latter in GPT-2's
    return found if isinstance(found, int) else None


def config_in(model: Path) -> dict[str, Any]:
    """The config of the model in a local folder; empty where that cannot be read: the stage will say what is wrong."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def text_config_in(model: Path) -> dict[str, Any]:
    """What the config says of the language model, whatever else belongs to it."""
    config = config_in(model)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _refuse_bad_rows(settings: StageSettings, say: Say) -> None:
    found: dict[str, list[Any]] = {}
    if isinstance(settings, PretrainSettings):
        if any(map(is_streamed, settings.sources().values())):
            return  # the stage downloads it, once
        for part in Documents(settings, settings.stage).survey():
            _tell(f"{settings.stage}.{part.name}", part.report, say)
        return
    given = settings.sources()
    text = given.pop("ptx_data", None)
    if isinstance(settings, PPOSettings) and text is not None and not is_streamed(text):
        documents = plain_documents(text, settings.eval_share, settings.max_dropped, settings.stage, "ptx_data")
        _tell(f"{settings.stage}.ptx_data", documents.survey()[0].report, say)
        _refuse_less_than_a_block(documents, settings.ptx_block_size)
    for name, source in given.items():
        loaded = _read(settings, name, source)
        _tell(f"{settings.stage}.{name}", loaded.report, say)
        found[name] = loaded.rows
    if isinstance(settings, FeedbackSettings) or "data" not in found:  # nothing to hold out, or not there yet
        return
    train, held_out, _ = train_and_eval(found["data"], found.get("eval_data"), _key, settings.eval_share)
    if not train or not held_out:
        raise DataError(
            f"{settings.stage}.data: {len(train)} rows to train on and {len(held_out)} to evaluate on; "
            "at least one of each is needed, with different prompts"
        )


def _refuse_less_than_a_block(documents: Documents, length: int) -> None:
    """Refuse a text for ppo.ptx_data that fills no block of so many tokens, unless its tokenizer makes texts longer
    first; the stage counts them. No more of the text is read than fills a block."""
    most = 0
    for text in documents.training():
        # A byte is a token at most. Beside the text there are eos and the space that some tokenizers put before it.
        most += len(text.encode("utf-8", "surrogatepass")) + 2
        if most > length:
            return
    raise DataError(
        f"{documents.where}: {documents.found[0].path}: without what is held out it gives {most} tokens at most, one a "
        f"byte, but a block needs {length + 1}; use more text, or a smaller ppo.ptx_block_size"
    )


def _tell(where: str, report: rows.Report, say: Say) -> None:
    for line in [*([report.summary()] if report.dropped else []), *report.warnings]:
        say(f"{where}: {line}")


def _read(settings: StageSettings, name: str, source: Source) -> rows.Loaded[Any]:
    """Rows as the stage itself will read them."""
    if isinstance(settings, RewardSettings):
        keep_ties = settings.ties == "soft" or settings.judge is not None  # a judge ranks anew
        return rows.read_rankings(source, settings.max_dropped, keep_ties)
    if isinstance(settings, SFTSettings):
        return rows.read_demonstrations(source, settings.max_dropped)
    if isinstance(settings, FeedbackSettings) and name == "earlier":
        return rows.read_rankings(source, settings.max_dropped, keep_ties=True)
    if isinstance(settings, PPOSettings) and settings.gives_rows:
        return read_prompts_as_json(source, settings.max_dropped)
    return rows.read_prompts(source, settings.max_dropped)


def _key(row: Any) -> str:
    """What a row is held out by: a text itself, else its prompt."""
    if isinstance(row, str):
        return row
    return rows.prompt_key(row.messages if isinstance(row, rows.Prompt) else row.prompt)
