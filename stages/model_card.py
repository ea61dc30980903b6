"""The README.md of a model that is handed to others: what it was made from, as the manifests say. No torch."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf.data.files import suffixes
from rlhf.stages.artifact import Artifact
from rlhf.stages.metric_names import NAMES, between, metric, number, of_share

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_OF_PROMPTS = ("win_rate", "score_win_rate", "prompt_accuracy")  # means over prompts, told with an interval
_DOES = {
    "pretrain": "A base model, trained on raw text",
    "sft": "A language model, fine-tuned on demonstrations",
    "reward": "A reward model, trained on ranked answers",
    "ppo": "A language model, improved with PPO against a reward model",
}


@dataclass(frozen=True)
class Made:
    """One stage of a model's past."""

    folder: Path
    manifest: dict[str, Any]
    settings: dict[str, Any]

    @property
    def stage(self) -> str:
        stage: str = self.manifest["stage"]
        return stage

    def before(self, name: str) -> Path:
        """Where the `model` or `reward_model` that it started from lies: in its own run, which may have been moved or
        copied as a whole, if it is there."""
        given = Path(self.settings.get(name) or "")
        own = self.folder.parent / given.parent.name / given.name
        return own if own.is_dir() else given

    @property
    def origin(self) -> str:
        """What it started from, and for PPO the reward model."""
        models = [str(self.settings.get(name) or "") for name in ("model", "reward_model")]
        return ", ".join(called(model) for model in models if model) or "new"

    @property
    def figures(self) -> dict[str, float]:
        """Its final metrics, those that are numbers."""
        found: dict[str, Any] = self.manifest["metrics"]
        return {n: v for n, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    @property
    def measured(self) -> str:
        """Where PPO's figures come from, in sentences."""
        settings, num = self.settings, self.figures.get("num_eval_prompts")
        each = settings.get("num_eval_samples") or 1
        prompts = f", on {number(num)} held-out prompts (answers to each: {number(each)})" if num else ""
        told = f"PPO was compared with SFT at the end of the ppo stage{prompts}; in win rates ties count half."
        if judge := settings.get("judge"):
            told += f" The judge is `{judge}`."
        rewards = [spec.get("model") or spec.get("function") for spec in settings.get("rewards") or []]
        if by := [called(model) for model in (settings.get("reward_model"), *rewards) if model]:
            told += f" The score is by {', '.join(f'`{one}`' for one in by)}."
        return told

    @property
    def data(self) -> list[str]:
        """What its rows were read from: hub ids and functions as they are, of what lies here the name alone."""
        given = self.settings.get("data") or []
        return [_told(source["path"]) for source in (given if isinstance(given, list) else [given])]


def past(model: Path) -> list[Made]:
    """The stages that made a model, the last one first; none where its folder is no stage's."""
    found: list[Made] = []
    while model.name == "model" and (artifact := Artifact(model.parent)).sealed:
        settings: Any = OmegaConf.to_container(OmegaConf.load(artifact.folder / "settings.yaml"))
        found.append(Made(artifact.folder, artifact.manifest, settings))
        model = found[-1].before("model")
    return found


def whole_past(model: Path) -> list[Made]:
    """The same stages, the first one first, and before PPO those of its reward model; each once."""
    found: dict[str, Made] = {}
    for made in reversed(past(model)):
        of_reward = whole_past(made.before("reward_model"))
        found |= {one.manifest["key"]: one for one in [*of_reward, made]}
    return list(found.values())


def base_of(stages: list[Made], reference: str) -> str | None:
    """The hub id that a model was made from, if it was."""
    named = str(stages[-1].settings.get("model") or "") if stages else reference
    return named if is_hub_id(named) else None


def is_hub_id(reference: str) -> bool:
    """Whether it can be an id of the hub, and is nothing that lies here."""
    known = suffixes(Path(reference))[0] != ""
    return _HUB_ID.fullmatch(reference) is not None and not known and not Path(reference).exists()


def card(
    name: str, reference: str, is_reward: bool, is_adapter: bool, notes: list[str], brings_code: bool = False
) -> str:
    """The card of the model at `reference`, called `name`; `notes` are sentences on how it is loaded. `brings_code`
    says that transformers does not know its architecture."""
    stages, took_part = past(Path(reference)), whole_past(Path(reference))
    base = base_of(stages, reference)
    stage = stages[0].stage if stages else None
    sets = sorted({told for made in took_part for told in made.data if is_hub_id(told)})
    tags = ["rlhf", "rlhf-toolkit", *([stage] if stage else []), *(["lora"] if is_adapter else [])]
    about: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if is_reward else "text-generation",
        "tags": tags,
    }
    about |= {"base_model": base} if base else {}
    about |= {"datasets": sets} if sets else {}
    about["rlhf_toolkit"] = {"version": _version()}
    if stages:
        about["rlhf_toolkit"] |= {"stage": stage, "key": stages[0].manifest["key"], "metrics": stages[0].figures}
    lines = [
        "---",
        OmegaConf.to_yaml(OmegaConf.create(about)).rstrip(),
        "# license: for you to choose, as the base model and the data allow",
        "---",
        "",
        f"# {name}",
        "",
        f"{_DOES.get(stage or '', 'A model')}, exported with RLHF Toolkit {_version()}.",
        *(f"\n{note}" for note in notes),
    ]
    if not is_adapter:
        lines += ["", "## How to load it", "", "```python", *_example(name, is_reward, brings_code), "```"]
    if stages:
        lines += ["", "## How it was made", "", "| stage | key | from | data |", "|---|---|---|---|"]
        for made in took_part:
            key, data = made.manifest["key"][:8], ", ".join(made.data)
            lines.append(f"| {made.stage} | `{key}` | {made.origin} | {data} |")
        versions = stages[0].manifest["made_with"]["versions"]
        lines += ["", f"With {', '.join(f'{library} {release}' for library, release in versions.items())}."]
        lines += ["", "## Figures", "", "| figure | value |", "|---|---|"]
        lines += [
            f"| {_called(name)} | {_shown(name, value, stages[0].figures)} |"
            for name, value in stages[0].figures.items()
        ]
        if stage == "ppo":
            lines += ["", stages[0].measured]
    lines += [
        "",
        "## License",
        "",
        "None yet. Whoever publishes this model chooses one that the licenses of its base model and data allow.",
        "",
    ]
    return "\n".join(lines)


def _example(name: str, is_reward: bool, brings_code: bool) -> list[str]:
    """Lines of Python that load the model from beside its folder, and have a language model answer."""
    loader = "AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM"
    lines = [
        f"from transformers import {loader}, AutoTokenizer",
        "",
        "# the folder, or owner/name on the hub",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = {loader}.from_pretrained("{name}"{", trust_remote_code=True" * brings_code})',
    ]
    if not is_reward:
        lines += [
            'messages = [{"role": "user", "content": "Who are you?"}]',
            "asked = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
            "answer = model.generate(**asked, max_new_tokens=64, do_sample=True)[0, asked.input_ids.shape[1] :]",
            "print(tokenizer.decode(answer, skip_special_tokens=True))",
        ]
    return lines


def _called(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def _shown(name: str, value: float, figures: dict[str, float]) -> str:
    """A figure of a table, with its interval where it is a share of so many prompts."""
    num = figures.get("num_eval_prompts")
    interval = f" ({number(num)} prompts, {between(of_share(value, int(num)))})" if num and name in _OF_PROMPTS else ""
    return metric(value, name) + interval


def called(reference: str) -> str:
    """What a model is called: a hub id or a function as it is, a folder of this machine by its name."""
    folder = Path(reference)
    local = (folder.parent.name if folder.name == "model" else "") or folder.name
    is_function = ":" in reference and "/" not in reference
    return reference if is_hub_id(reference) or is_function else local


def _told(path: str) -> str:
    return path if is_hub_id(path) or ":" in path else Path(path).name


def _version() -> str:
    try:
        return version("rlhf-toolkit")
    except PackageNotFoundError:
        return "(not installed)"
