"""The text of a recipe for somebody's own files: important settings, each with what it means."""

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.data.recognise import Recognised
from rlhf.pipeline.recipe import Recipe, section_class
from rlhf.stages.settings import Settings, meaning

WIDTH = 110
ENOUGH_STEPS = 60
"""Optimiser steps that sft and reward should make; a handful teaches nothing, however many rows each takes."""
MOST_EPOCHS = 10
MOST_PASSES = 16
"""How often raw text is gone through at most. [Muennighoff et al. 2023: little is left to gain after so many]"""
EVAL_SHARE = 0.1
RATES = {
    "sft": {"learning_rate": (1e-3, 2e-5)},
    "reward": {"learning_rate": (1e-3, 9e-6)},
    "ppo": {"learning_rate": (2e-4, 3e-6), "critic_learning_rate": (5e-4, 9e-6)},
}
"""Learning rates of models with a million parameters, which the demo's are near, and of the papers' with a billion."""
PRETRAINED = {True: 1e6, False: 1.25e8}
"""About the parameters of a model that the recipe pretrains, on a CPU and on a GPU."""
MIN_ACCURACY = 0.6
ONE_ANSWER_A_ROW = ("ranked_answers", "scored_answers")
"""Formats, whose rows the meaning of reward.data does not tell of."""
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
    positions: int | None = None
    """Tokens that the model takes which the first stage starts from; None where it is pretrained or that is unknown."""
    parameters: float | None = None
    """How many that model has, about; None as above."""

    def read(self, stage: str) -> list[tuple[str, Recognised]]:
        """All sources that a stage reads."""
        return [*self.data[stage], *([self.held_out[stage]] if stage in self.held_out else [])]


def recipe_text(chosen: Chosen, left: Mapping[str, str], schema: str) -> str:
    """A recipe with comments; `left` is told at its end."""
    lines = [
        f"# yaml-language-server: $schema={schema}",
        *_comment("Written by `rlhf init` for the files that it names. A section that is taken out is a stage that "
                  "does not run. `rlhf schema` and docs/recipes.md tell all settings."),
        "",
        *_settings(Recipe, {"seed": 0, "eval_share": EVAL_SHARE}, {}),
    ]  # fmt: skip
    for stage, (settings, reasons) in sections(chosen).items():
        cls = section_class(stage)
        lines += ["", *_comment(meaning(Recipe.model_fields[stage])), f"{stage}:"]
        lines += (f"  {line}" for line in _settings(cls, settings, reasons))
    if left:
        lines += ["", "# Not in it:"]
        lines += (line for place, why in left.items() for line in _comment(f"{place}: {why}", "  "))
    return "\n".join(lines) + "\n"


def sections(chosen: Chosen) -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """The settings of each stage, of the demo's size on a CPU and of a small model's on a GPU, no larger than fits its
    rows and no longer than the model takes; and for some of them why."""
    small = not chosen.gpus
    scratch = chosen.start is None
    most, least = (512, 64) if small else (2048, 256)
    per_token = 2 if scratch and small else 3  # characters, which a small vocabulary has fewer of
    positions = chosen.positions or sys.maxsize
    parameters = PRETRAINED[small] if scratch else chosen.parameters

    def tokens(length: int) -> int:
        """The power of two that so many characters fit into, or all positions of the model."""
        return min(max(1 << max(length // per_token + 16, 1).bit_length(), least), most, positions)

    lengths = {stage: tokens(sources[0][1].length) for stage, sources in chosen.data.items() if stage != "pretrain"}
    new, prompt = min(64 if small else 256, positions // 2), 0
    if "ppo" in chosen.data:
        prompt = min(tokens(chosen.data["ppo"][0][1].prompt_length), positions - new)
        lengths["ppo"] = prompt + new
    found: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}
    for stage, sources in chosen.data.items():
        settings: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        found[stage] = settings, reasons
        share = 1.0 if stage in chosen.held_out else 1 - EVAL_SHARE
        if chosen.start is not None and stage != "pretrain" and (stage == "sft" or "sft" not in chosen.data):
            settings["model"] = chosen.start
        named = [_source(path, one) for path, one in sources]
        settings["data"] = named[0] if len(named) == 1 else named
        if stage in chosen.held_out:
            settings["eval_data"] = _source(*chosen.held_out[stage])
        if bad := max(one.bad / one.rows for _, one in chosen.read(stage)):
            settings["max_dropped"] = min(round(2 * bad + 0.005, 2), 0.99)
        one = sources[0][1]
        if stage == "pretrain":
            characters = sum(source.length for _, source in sources)
            text = share * characters if all(source.whole for _, source in sources) else None
            settings |= _pretrain(small, characters, max([256, *lengths.values()]), text, reasons)
        elif stage == "ppo":
            prompts = max(round(share * one.prompts), 1)
            settings |= _ppo(small, prompts, _rates(stage, parameters, reasons), reasons)
            settings |= {"max_prompt_length": prompt, "max_new_tokens": new}
        else:
            if stage == "reward" and one.format in ONE_ANSWER_A_ROW:
                reasons["data"] = "Here one answer a row, with its rank (1 is best) or its score (higher is better)."
            rows = max(round(share * one.examples), 1)
            rates = _rates(stage, parameters, reasons)
            settings |= _supervised(small, scratch, rows, chosen.gpus, reasons) | rates
            if not one.whole:
                reasons["num_epochs"] = f"At least {reasons['num_epochs']}"
            settings["max_length"] = lengths[stage]
            if stage == "reward" and "ppo" in chosen.data:
                settings["min_accuracy"] = MIN_ACCURACY
                reasons["min_accuracy"] = "Guessing gives 0.5."
        if chosen.gpus == 1:
            settings["auto_microbatch"] = True
    return found


def _source(path: str, found: Recognised) -> Any:
    """How a recipe names a source."""
    return {"path": path, "map": found.map} if found.map else path


def _pretrain(
    small: bool, characters: int, context: int, trained_on: float | None, reasons: dict[str, str]
) -> dict[str, Any]:
    """`trained_on`: characters of all the text without what is held out; None if there is more than was read."""
    block = min(128 if small else 1024, _blocks_of(characters))
    steps, batch = (300, 16) if small else (5000, 64)
    if trained_on is not None:
        in_blocks = trained_on / (2 if small else 4) / block  # characters to a token
        while batch > 16 and MOST_PASSES * in_blocks / batch < 1000:
            batch //= 2
        steps = min(steps, max(int(MOST_PASSES * in_blocks / batch), ENOUGH_STEPS))
        passes = float(f"{steps * batch / in_blocks:.2g}")
        blocks = f"{batch} blocks of {block} tokens each"
        reasons["num_steps"] = f"So many, {blocks}, go through the text some {passes:g} times."
    if not small:
        return {
            "preset": ["gpt3-125m", "llama"], "vocab_size": 32000, "context_length": max(context, 1024),
            "block_size": block, "num_steps": steps, "global_batch_size": batch,
            "learning_rate": 6e-4, "warmup_steps": min(200, steps // 10), "eval_every": min(250, steps // 3),
            "compile": True,
        }  # fmt: skip
    return {
        "hidden_size": 128, "num_layers": 4, "num_heads": 4, "initializer_range": 0.08,
        "vocab_size": 512 if characters < 1_000_000 else 4096, "context_length": context,
        "block_size": block, "num_steps": steps, "global_batch_size": batch,
        "learning_rate": 3e-3, "warmup_steps": steps // 10, "eval_every": steps // 3,
    }  # fmt: skip


def _blocks_of(characters: int) -> int:
    """The power of two that a tenth of so many characters fills several times."""
    return 1 << max((characters // 100).bit_length() - 1, 3)


def _rates(stage: str, parameters: float | None, reasons: dict[str, str]) -> dict[str, float]:
    """Learning rates for a model of about so many parameters; None for one whose size is unknown."""
    millions = (parameters or 1e9) / 1e6
    share = min(max(math.log10(millions) / 3, 0), 1)
    rates = RATES[stage]
    small, large = rates["learning_rate"]
    size = "unknown here, taken for a billion" if parameters is None else f"about {float(f'{millions:.3g}'):g} million"
    reasons["learning_rate"] = (
        f"By the model's parameters ({size}): {small:g} up to a million, {large:g} from a billion on, and between them "
        "evenly by powers of ten."
    )
    return {name: float(f"{small * (large / small) ** share:.0e}") for name, (small, large) in rates.items()}


def _supervised(small: bool, scratch: bool, rows: int, gpus: int, reasons: dict[str, str]) -> dict[str, Any]:
    """Of few rows smaller batches, and more passes over them, so that there are enough steps."""
    epochs = 2 if small and scratch else 1
    batch, least = 16 if small else 64, max(4 if small else 8, gpus)
    while batch > least and epochs * rows < ENOUGH_STEPS * batch:
        batch //= 2
    steps = math.ceil(rows / batch)  # of one pass
    epochs = min(max(epochs, math.ceil(ENOUGH_STEPS / steps)), MOST_EPOCHS)
    reasons["num_epochs"] = (
        f"{epochs * steps} optimiser steps: {rows} rows to train on, {batch} a step, {epochs} times over. "
        f"Fewer than {ENOUGH_STEPS} teach little, more than {MOST_EPOCHS} passes learn rows by heart."
    )
    return {"num_epochs": epochs, "global_batch_size": batch}


def _ppo(small: bool, prompts: int, rates: dict[str, float], reasons: dict[str, str]) -> dict[str, Any]:
    rollouts = 64 if small else 128
    while rollouts > 16 and rollouts > 4 * prompts:
        rollouts //= 2
    if rollouts > prompts:
        times = math.ceil(rollouts / prompts)
        reasons["rollout_batch_size"] = f"With {prompts} to train on, a prompt is answered up to {times} times in each."
    return {
        "num_iterations": 30 if small else 100, "rollout_batch_size": rollouts, "num_epochs": 2,
        "num_minibatches": 2, **rates, "kl_coef": 0.05, "missing_eos_penalty": 1.0, "eval_every": 10,
    }  # fmt: skip


def _settings(cls: type[Settings], values: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[str]:
    """The lines of some settings, each below what it means and why it is so."""
    for name, value in values.items():
        yield from _comment(f"{meaning(cls.model_fields[name])} {reasons.get(name, '')}")
        yield f"{name}: {_yaml(value)}"


def _comment(text: str, indent: str = "") -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent * 2,
                                                  break_long_words=False, break_on_hyphens=False)]  # fmt: skip


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_yaml(one)}' for name, one in value.items())}}}"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = value.replace("'", "''").replace("${", "\\${")
    return f"'{quoted}'"
