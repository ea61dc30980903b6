"""The text of a recipe for somebody's own files: important settings, each with what it means."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.data.recognise import Recognised
from rlhf.pipeline.recipe import Recipe, section_class
from rlhf.stages.settings import Settings, meaning

WIDTH = 110
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", ".", "..")


@dataclass(frozen=True)
class Chosen:
    """What a recipe is made of."""

    data: dict[str, list[tuple[str, Recognised]]]
    """By stage, in order, its sources."""
    held_out: dict[str, tuple[str, Recognised]]
    """By stage, a source for evaluation."""
    start: str | None
    """The model that the first stage starts from; None where the recipe pretrains one."""
    gpus: int


def recipe_text(chosen: Chosen, left: Mapping[str, str], schema: str) -> str:
    """A recipe with comments; `left` is told at its end."""
    lines = [
        f"# yaml-language-server: $schema={schema}",
        *_comment("Written by `rlhf init` for the files that it names. A section that is taken out is a stage that "
                  "does not run. `rlhf schema` and docs/recipes.md tell all settings."),
        "",
        *_settings(Recipe, {"seed": 0, "eval_share": 0.1}),
    ]  # fmt: skip
    for stage, settings in sections(chosen).items():
        cls = section_class(stage)
        lines += ["", *_comment(meaning(Recipe.model_fields[stage])), f"{stage}:"]
        lines += (f"  {line}" for line in _settings(cls, settings))
    if left:
        lines += ["", "# Not in it:"]
        lines += (line for place, why in left.items() for line in _comment(f"{place}: {why}", "  "))
    return "\n".join(lines) + "\n"


def sections(chosen: Chosen) -> dict[str, dict[str, Any]]:
    """The settings of each stage: of the demo's size on a CPU, and of a small model's on a GPU."""
    small = not chosen.gpus
    scratch = chosen.start is None
    most, least = (512, 64) if small else (2048, 256)
    per_token = 2 if scratch and small else 3  # characters, which a small vocabulary has fewer of

    def tokens(length: int) -> int:
        """The power of two that so many characters fit into."""
        return min(max(1 << max(length // per_token + 16, 1).bit_length(), least), most)

    lengths = {stage: tokens(sources[0][1].length) for stage, sources in chosen.data.items() if stage != "pretrain"}
    new, prompt = (64, 0) if small else (256, 0)
    if "ppo" in chosen.data:
        prompt = tokens(chosen.data["ppo"][0][1].prompt_length)
        lengths["ppo"] = prompt + new
    found: dict[str, dict[str, Any]] = {}
    for stage, sources in chosen.data.items():
        settings = found[stage] = {}
        if chosen.start is not None and stage != "pretrain" and (stage == "sft" or "sft" not in chosen.data):
            settings["model"] = chosen.start
        settings["data"] = sources[0][0] if len(sources) == 1 else [path for path, _ in sources]
        if stage in chosen.held_out:
            settings["eval_data"] = chosen.held_out[stage][0]
        read = [*sources, *([chosen.held_out[stage]] if stage in chosen.held_out else [])]
        if share := max(one.bad / one.rows for _, one in read):
            settings["max_dropped"] = min(round(2 * share + 0.005, 2), 0.99)
        if stage == "pretrain":
            characters = sum(one.length for _, one in sources)
            settings |= _pretrain(small, characters, max([256, *lengths.values()]))
        elif stage == "ppo":
            settings |= _ppo(small, scratch) | {"max_prompt_length": prompt, "max_new_tokens": new}
        else:
            settings |= _supervised(stage, small, scratch) | {"max_length": lengths[stage]}
        if chosen.gpus == 1:
            settings["auto_microbatch"] = True
    return found


def _pretrain(small: bool, characters: int, context: int) -> dict[str, Any]:
    if not small:
        return {
            "preset": ["gpt3-125m", "llama"], "vocab_size": 32000, "context_length": max(context, 1024),
            "block_size": min(1024, _blocks_of(characters)), "num_steps": 5000, "global_batch_size": 64,
            "learning_rate": 6e-4, "warmup_steps": 200, "eval_every": 250, "compile": True,
        }  # fmt: skip
    return {
        "hidden_size": 128, "num_layers": 4, "num_heads": 4, "initializer_range": 0.08,
        "vocab_size": 512 if characters < 1_000_000 else 4096, "context_length": context,
        "block_size": min(128, _blocks_of(characters)), "num_steps": 300, "global_batch_size": 16,
        "learning_rate": 3e-3, "warmup_steps": 30, "eval_every": 100,
    }  # fmt: skip


def _blocks_of(characters: int) -> int:
    """The power of two that a tenth of so many characters fills several times."""
    return 1 << max((characters // 100).bit_length() - 1, 3)


def _supervised(stage: str, small: bool, scratch: bool) -> dict[str, Any]:
    rates = {"sft": 2e-5, "reward": 9e-6} if not (small and scratch) else {"sft": 1e-3, "reward": 1e-3}
    passes = {"sft": 2 if small and scratch else 1, "reward": 2 if small and scratch else 1}
    batch = 16 if small else 64
    return {"num_epochs": passes[stage], "global_batch_size": batch, "learning_rate": rates[stage]}


def _ppo(small: bool, scratch: bool) -> dict[str, Any]:
    policy, critic = (2e-4, 5e-4) if small and scratch else (3e-6, 9e-6)
    return {
        "num_iterations": 30 if small else 100, "rollout_batch_size": 64 if small else 128, "num_epochs": 2,
        "num_minibatches": 2, "learning_rate": policy, "critic_learning_rate": critic, "kl_coef": 0.05,
        "missing_eos_penalty": 1.0, "eval_every": 10,
    }  # fmt: skip


def _settings(cls: type[Settings], values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of some settings, each below what it means."""
    for name, value in values.items():
        yield from _comment(meaning(cls.model_fields[name]))
        yield f"{name}: {_yaml(value)}"


def _comment(text: str, indent: str = "") -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent * 2,
                                                  break_long_words=False, break_on_hyphens=False)]  # fmt: skip


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = value.replace("'", "''").replace("${", "\\${")
    return f"'{quoted}'"
