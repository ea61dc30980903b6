"""A recipe: one YAML that describes a whole run, typed, with dotted overrides from the command line."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, field_validator
from yaml import MarkedYAMLError, YAMLError

from rlhf.data.errors import SettingsError, first_line, is_utf8
from rlhf.stages.artifact import STEPS
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import Settings, StageSettings, nearest
from rlhf.stages.settings_file import yaml_text
from rlhf.stages.sft.config import SFTSettings


class Shared(Settings):
    """Settings at the top of a recipe that every section takes over where it does not set its own."""

    seed: int = Field(0, ge=0)
    """Seed of weights, order of the data and sampling."""
    eval_share: float = Field(0.1, gt=0, lt=1)
    """Share of the prompts (documents, for text) held out for evaluation."""
    judge: str | None = None
    """module:function (prompts, responses) -> true qualities, for the stages that take a judge."""
    stop_within: float = Field(30.0, gt=0)
    """Seconds after a signal until a stage is gone."""
    stop_hung_after: float = Field(1800.0, gt=0)
    """Seconds in which no process of a stage moves, until they end themselves."""


class Recipe(Shared):
    """A whole run. A section that is not there is a stage that is not run."""

    num_processes: int | dict[str, int] | None = None
    """Processes of each stage, or a number per stage, {pretrain: 8, reward: 1}; by default one for each GPU here."""
    accelerate_config: str | dict[str, str] | None = None
    """What the stages are launched with: a file that `accelerate config` wrote, or ddp, fsdp2, zero2 or cpu2, which are
    shipped; or one per stage, {pretrain: fsdp2, ppo: mine.yaml}. [Accelerate]"""
    pretrain: PretrainSettings | None = None
    """The base model from raw text."""
    sft: SFTSettings | None = None
    """Supervised fine-tuning on demonstrations."""
    feedback: FeedbackSettings | None = None
    """Answers of the model, ranked by people or by a judge."""
    reward: RewardSettings | None = None
    """The reward model on ranked answers."""
    ppo: PPOSettings | None = None
    """PPO against the reward model."""
    rounds: int = Field(1, ge=1)
    """How often feedback, reward and ppo are gone through. From the second time on the newest policy answers, and the
    reward model learns from the rankings of all rounds."""
    ppo_from: Literal["sft", "ppo"] = "sft"
    """Where ppo of later rounds starts: from the sft stage's model again, or from the policy of the round before."""
    evaluate: bool = True
    """Measure the models after each stage, briefly: perplexities, and answers to a few held-out prompts. `rlhf eval`
    measures more."""

    def section(self, stage: str) -> StageSettings | None:
        """Settings of a stage, None if it is not part of the run."""
        settings: StageSettings | None = getattr(self, stage)
        return settings

    @field_validator("num_processes", mode="before")
    @classmethod
    def _is_a_number(cls, value: Any) -> Any:
        for where, number in _by_stage(value):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{where}{number!r} is no number of processes; give a whole number from 1 on")
        return value

    @field_validator("accelerate_config", mode="before")
    @classmethod
    def _is_a_name(cls, value: Any) -> Any:
        for where, name in _by_stage(value):
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"{where}{name!r} names no accelerate config; give a file, or the name of a shipped one"
                )
        return value

    def processes_of(self, stage: str) -> int | None:
        """How many processes the recipe wants for a stage; None where it leaves that open."""
        return self.num_processes.get(stage) if isinstance(self.num_processes, dict) else self.num_processes

    def config_of(self, stage: str) -> str | None:
        """Path or shipped name of the accelerate config of a stage, if it has one."""
        found = self.accelerate_config
        return found.get(stage) if isinstance(found, dict) else found

    @property
    def stages(self) -> list[str]:
        """Stages of this run (feedback is one here), in order and each once."""
        return [stage for stage in STEPS if self.section(stage) is not None]


def _by_stage(value: Any) -> Iterator[tuple[str, Any]]:
    """The value of each stage with its name before it, or the one value of all; refuses what is no stage."""
    if not isinstance(value, dict):
        yield from [] if value is None else [("", value)]
        return
    for stage, found in value.items():
        if stage not in STEPS:
            raise ValueError(f"no stage '{stage}'; {nearest(str(stage), list(STEPS))}")
        yield f"{stage}: ", found


def load_recipe(recipe: str, overrides: Iterable[str] = (), pretrain: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe (a path or a shipped name), apply `key=value` overrides, resolve, validate.

    `pretrain` is laid over the section of that name last, as a sweep does.
    Raises SettingsError naming the file, line or key and what would work.
    """
    config = read_yaml(recipe, shipped_recipes(), "recipe")
    if not OmegaConf.is_dict(config):
        raise SettingsError(f"{recipe}: not a recipe; it must be a mapping with sections {', '.join(STEPS)}")
    for override in overrides:
        _override(config, override)
    content = resolved(config, recipe)
    mapping = {str(key): value for key, value in content.items()}
    if pretrain:
        mapping["pretrain"] = mapping.get("pretrain", {}) | pretrain
    shared = {name: mapping[name] for name in Shared.model_fields if name in mapping}
    Shared.load(shared, "")  # on its own first, or a wrong value would be reported once per section
    for stage in STEPS:
        if isinstance(section := mapping.get(stage), dict):
            known = {name: value for name, value in shared.items() if name in section_class(stage).model_fields}
            if stage == "feedback":  # people rank, unless this section itself names a judge
                known.pop("judge", None)
            mapping[stage] = known | section
    loaded = Recipe.load(mapping, "")
    if not loaded.stages:
        raise SettingsError(f"{recipe}: no stage to run; a recipe has at least one section of {', '.join(STEPS)}")
    if problems := [
        *_without_a_section(loaded),
        *_uneven_shares(loaded),
        *_too_long(loaded),
        *_without_rankings(loaded),
    ]:
        raise SettingsError("\n".join(problems))
    return loaded


def _without_a_section(recipe: Recipe) -> Iterator[str]:
    """How stages are launched that the recipe does not have."""
    for name in ("num_processes", "accelerate_config"):
        found = getattr(recipe, name)
        for stage in found if isinstance(found, dict) else ():
            if recipe.section(stage) is None:
                yield f"{name}.{stage}: has no effect without a section {stage}; add the section, or take this out"


def _uneven_shares(recipe: Recipe) -> Iterator[str]:
    """Prompts are held out by one rule in all stages, or one would train on what another is judged by."""
    for stage in ("sft", "reward", "ppo"):  # documents of pretrain are no prompts
        section = recipe.section(stage)
        if section is not None and section.eval_share != recipe.eval_share:
            yield (
                f"{stage}.eval_share: {section.eval_share} differs from the recipe's {recipe.eval_share}, so prompts "
                "held out in one stage would be trained on in another; set eval_share once, at the top"
            )


def _too_long(recipe: Recipe) -> Iterator[str]:
    """Lengths that the model which this recipe pretrains has no positions for."""
    pretrain, sft, reward, ppo = recipe.pretrain, recipe.sft, recipe.reward, recipe.ppo
    if pretrain is None or (sft and sft.model):
        return
    lengths = {}
    if sft:
        lengths["sft.max_length"] = sft.max_length
    if recipe.feedback and recipe.feedback.model is None:
        lengths["feedback.max_length"] = recipe.feedback.max_length
    if reward and reward.model is None:
        lengths["reward.max_length"] = reward.max_length
    if ppo and None in (ppo.model, ppo.reward_model):
        lengths["ppo.max_prompt_length + ppo.max_new_tokens"] = ppo.max_prompt_length + ppo.max_new_tokens
    context = pretrain.context_length
    for name, length in lengths.items():
        if length > context:
            yield (
                f"{name}: {length} exceeds pretrain.context_length, which is {context}; "
                f"lower it, or raise pretrain.context_length to {length}"
            )


def _without_rankings(recipe: Recipe) -> Iterator[str]:
    """A reward stage with no rankings, or with two sources of them; rounds that could not be gone through."""
    feedback, reward, ppo = recipe.feedback, recipe.reward, recipe.ppo
    if reward and reward.data is None and feedback is None:
        yield "reward.data: not set; name rankings, or have them made by a section feedback"
    if reward and reward.data is not None and feedback is not None:
        yield (
            "reward.data: the rankings come from the feedback step; take reward.data out, or the section feedback "
            "(`rlhf data import` puts rankings that you have into a store)"
        )
    if recipe.rounds > 1:
        missing = [name for name in ("feedback", "reward", "ppo") if recipe.section(name) is None]
        if missing:
            yield f"rounds: {recipe.rounds} needs the sections feedback, reward and ppo; add {', '.join(missing)}"
        elif feedback and ppo and (feedback.model or ppo.reward_model):
            name = "feedback.model" if feedback.model else "ppo.reward_model"
            yield f"rounds: {recipe.rounds} has no use for a {name}, which is another one in each round; take it out"
        elif ppo and ppo.model and recipe.ppo_from == "ppo":
            yield "ppo_from: ppo has no effect beside ppo.model, from which every round starts; take one of them out"


def recipe_name(recipe: str) -> str:
    """What a recipe's run folder is called by default."""
    return Path(recipe).stem if Path(recipe).is_file() else recipe


def shipped_recipes() -> dict[str, Traversable]:
    """The recipes that come with the package, by name."""
    files = resources.files("rlhf.recipes").iterdir()
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe; loading it again gives the same recipe."""
    content = recipe.model_dump(mode="json")
    return yaml_text({k: v for k, v in content.items() if v is not None})


def read_yaml(name: str, shipped: Mapping[str, Traversable], kind: str) -> Any:
    """What a YAML file holds, given its path or the name under which it is shipped; not resolved yet."""
    path = Path(name)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{name}: cannot be read: {error}") from None
    else:
        if name not in shipped:
            found = f"a folder, not a {kind}" if path.is_dir() else f"no such {kind}"
            hint = f"did you mean '{near}'? " if (near := _nearest_file(path, shipped)) else ""
            raise SettingsError(
                f"{name}: {found}; {hint}give a YAML file or a shipped name: {', '.join(sorted(shipped))}"
            )
        text = shipped[name].read_text(encoding="utf-8")
    try:
        return OmegaConf.create(text)
    except OmegaConfBaseException as error:
        raise SettingsError(f"{name}: {first_line(error)}") from None
    except MarkedYAMLError as error:
        raise SettingsError(f"{name}: not valid YAML: {_where_in(text, error)}") from None
    except (YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise SettingsError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except AssertionError:  # what OmegaConf makes of a lone number
        raise SettingsError(f"{name}: not a {kind}; it holds one value alone") from None
    except RecursionError:
        raise SettingsError(f"{name}: nested too deeply for a {kind}") from None


def _where_in(text: str, error: MarkedYAMLError) -> str:
    """Line and fault of a text that is no YAML."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return " ".join(str(error).split())
    if mark.index < len(text) and text[mark.index] == "\t":
        return f"line {mark.line + 1} has a tab; YAML is set in with blanks"
    fault = "; ".join(" ".join(part.split()) for part in (error.context, error.problem) if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: {fault}"


def _nearest_file(path: Path, shipped: Iterable[str]) -> str | None:
    """The YAML file beside `path`, or the shipped name, that is called most like it; with an ending or without."""
    files = [file for file in sorted(path.parent.glob("*")) if file.suffix in (".yaml", ".yml") and file.is_file()]
    names = {name: name for name in shipped} | {file.stem: str(file) for file in files}
    close = difflib.get_close_matches(path.name.removesuffix(".yaml").removesuffix(".yml"), names, n=1)
    return names[close[0]] if close else None


def resolved(config: Any, name: str) -> Any:
    """Plain values, with interpolations filled in; `name` is the file's, for the error."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise SettingsError(f"{name}: {error.full_key}: {first_line(error)}") from None
    except RecursionError:
        raise SettingsError(f"{name}: nested too deeply") from None


def _override(config: Any, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise SettingsError(f"'{override}': not an override; write key=value, for example ppo.learning_rate=1e-5")
    if not is_utf8(override):
        raise SettingsError(
            f"override {key.strip()}={text!r}: not UTF-8, in which settings are written; "
            "rename the file or folder that it names"
        )
    parent = key.strip().rpartition(".")[0]
    try:
        _spell_out(config, key.strip().split("."))
        found = OmegaConf.select(config, parent) if parent else config
        if found is not None and not OmegaConf.is_config(found):
            raise ValueError(f"{parent} is {found!r}, which has no parts; give it whole: '{parent}={{…: …}}'")
        # Parsed exactly like a value in the file: numbers, lists, null, ${…}.
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[call-overload, index]
        OmegaConf.update(config, key.strip(), value, force_add=True)
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"override '{override}': {first_line(error)}") from None


def _spell_out(config: Any, parts: list[str]) -> None:
    """Where an override names a part of a source that is written in short, `data: rows.csv`, give it its long form."""
    for depth in range(1, len(parts)):
        place = ".".join(parts[:depth])
        found = OmegaConf.select(config, place)
        if isinstance(found, str) and parts[depth - 1].endswith("data"):
            OmegaConf.update(config, place, {"path": found})


def section_class(stage: str) -> type[StageSettings]:
    """The class of a stage's settings."""
    classes: dict[str, type[StageSettings]] = {
        "pretrain": PretrainSettings, "sft": SFTSettings, "feedback": FeedbackSettings, "reward": RewardSettings,
        "ppo": PPOSettings,
    }  # fmt: skip
    return classes[stage]
