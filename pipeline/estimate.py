"""`rlhf estimate`: asks a process that may import torch what a recipe needs, and shows what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

from rlhf.data.errors import DataError, RefusedError, SettingsError
from rlhf.data.hub import refuse_unknown
from rlhf.data.rows import read_demonstrations, read_rankings
from rlhf.pipeline.accelerate_config import num_processes, read_config
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.fits import uneven
from rlhf.pipeline.launch import visible_gpus
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.references import models_of, with_models
from rlhf.pipeline.summary import duration
from rlhf.pipeline.tables import show_table
from rlhf.stages.artifact import STAGES
from rlhf.stages.devices import named, several
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.sft.config import SFTSettings

SIZES = ("weights", "optimiser", "gradients", "activations", "cache", "logits")


def estimate(
    recipe: Recipe,
    device: str | None = None,
    devices: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What `rlhf.stages.estimate` answers about a recipe, on the device of that name or on the one that is here.

    `devices` are so many of one kind, 64xH100: every stage is planned with all of them. `tell` hears which stage it is
    about. Raises RefusedError for what it refuses, RunFailed where it breaks.
    """
    number = None
    if devices is not None:
        if device is not None:
            raise SettingsError("--device and --devices: give one of the two")
        number, kind = several(devices)
        device = kind.name
    elif device not in (None, "cpu"):
        named(str(device))  # refused at once where there is none of the name
    visible = visible_gpus() if device is None else 1
    stages = [stage for stage in recipe.stages if stage in STAGES]
    sections = {stage: with_models(section) for stage in stages if (section := recipe.section(stage)) is not None}
    for section in sections.values():
        for where, reference in models_of(section):
            refuse_unknown(reference, where)
    processes = {stage: number or num_processes(recipe, stage, visible) for stage in stages}
    if problems := [line for stage, section in sections.items() for line in uneven(section, processes[stage])]:
        raise SettingsError("\n".join(problems))
    request = {
        "stages": {stage: section.model_dump(mode="json", exclude_unset=True) for stage, section in sections.items()},
        "rows": {stage: counted(recipe, stage) for stage in ("sft", "reward")},
        "device": device,
        "num_processes": processes,
        "layouts": {stage: _layout(recipe, stage, "ddp" if number is None else None) for stage in stages},
    }
    process = _ask(request, tell)
    if os.environ.get(DEBUG):
        sys.stderr.write(process.stderr)
    said = process.stderr.strip()
    if process.returncode == 2:
        raise RefusedError(said)
    if process.returncode:
        raise RunFailed(said.splitlines()[-1] if said else f"the estimate ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found | {"left_out": list(_left_out(recipe))}


def _ask(request: dict[str, Any], tell: Callable[[str], None]) -> subprocess.CompletedProcess[str]:
    """The process that may import torch, at its end; `tell` hears in between which stage it is about."""
    words = [sys.executable, "-m", "rlhf.stages.estimate"]
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin:  # where it could not even start, it says why
                process.stdin.write(json.dumps(request))
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("estimating "):
                    tell(line.strip())
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        said.seek(0)
        return subprocess.CompletedProcess(words, code, "".join(lines), said.read())


def _left_out(recipe: Recipe) -> Iterator[str]:
    """What of a recipe is not estimated."""
    if (feedback := recipe.feedback) is not None:
        by = "people" if feedback.by_people else "a judge"
        yield f"feedback: {feedback.num_answers} answers to each prompt are sampled, and ranked by {by}"
    if recipe.rounds > 1:
        yield f"rounds: reward and ppo are counted once, and run {recipe.rounds} times"


def _layout(recipe: Recipe, stage: str, otherwise: str | None) -> str | None:
    """How a stage's accelerate config lets processes share its models; `otherwise` where it has none."""
    name = recipe.config_of(stage)
    if name is None:
        return otherwise
    config = read_config(name)
    kind, options = config.get("distributed_type"), config.get("fsdp_config") or {}
    if kind == "FSDP":
        return "fsdp2" if options.get("fsdp_reshard_after_forward", True) else "zero2"
    if kind == "NO" or str(kind).startswith("MULTI_"):
        return "ddp"
    raise SettingsError(
        f"accelerate_config {name}: distributed_type {kind} cannot be estimated; take ddp, fsdp2 or zero2"
    )


def counted(recipe: Recipe, stage: str) -> dict[str, int]:
    """Rows to train on and answers of a ranking, where the rows are here and can be read; the hub is not asked."""
    section = recipe.section(stage)
    if not isinstance(section, SFTSettings | RewardSettings):
        return {}
    source = section.data
    if source is None or (":" not in source.path and not source.local.exists()):
        return {}
    found = {}
    try:
        if isinstance(section, SFTSettings):
            num_rows = len(read_demonstrations(source, section.max_dropped).rows)
        else:
            rankings = read_rankings(source, section.max_dropped, keep_ties=True).rows
            num_rows, found["answers"] = len(rankings), max(len(row.responses) for row in rankings)
    except DataError:
        return {}  # `rlhf data check` says what is wrong
    share = 1.0 if section.eval_data is not None else 1.0 - section.eval_share
    return {"rows": max(round(share * num_rows), 1), **found}


def show(found: dict[str, Any]) -> None:
    """A table of the phases, and of each stage whether it fits."""
    several_processes = any(of_stage["num_processes"] > 1 for of_stage in found["stages"].values())
    rows = []
    for stage, of_stage in found["stages"].items():
        for phase in of_stage["phases"]:
            sizes = [_gib(phase["gib"][kind]) for kind in SIZES]
            times = "?" if phase["times"] is None else f"{phase['times']:g}"
            sending = [_short(phase["seconds_sending"])] if several_processes else []
            time = _short(phase["seconds"])
            rows.append((stage, phase["name"], *sizes, _gib(phase["total_gib"]), *sending, time, times))
    show_table(("stage", "phase", *SIZES, "GiB", *(["sending"] if several_processes else []), "time", "×"), rows)
    device = found["device"]
    print(f"{device['name']}: {device['gib']:.1f} GiB, {device['usable_gib']:.1f} of them counted on")
    for stage, of_stage in found["stages"].items():
        took = "rows not counted" if of_stage["seconds"] is None else f"about {duration(of_stage['seconds'])}"
        fits = "fits" if of_stage["fits"] else "does not fit"
        peak = f"{of_stage['peak_gib']:.2f} GiB in {of_stage['precision']}"
        print(f"{stage}: {_shared(of_stage)}{peak}, {fits}; {took}")
        for line in [*map(_change, of_stage["changes"]), *_not_enough(of_stage), *of_stage["notes"]]:
            print(f"  {line}")
    for line in found["left_out"]:
        print(f"left out: {line}")


def _shared(of_stage: dict[str, Any]) -> str:
    """By how many processes a stage is shared, and how."""
    if of_stage["num_processes"] == 1:
        return ""
    machines = f" on {of_stage['machines']} machines" if of_stage["machines"] > 1 else ""
    layout, peaks = of_stage["layout"], of_stage["peak_gib_in"]
    others = ", ".join(f"{name} would take {peak:.2f} GiB" for name, peak in peaks.items() if name != layout)
    return f"{of_stage['num_processes']} processes{machines}, {layout}{f' ({others})' if others else ''}; each "


def _not_enough(of_stage: dict[str, Any]) -> Iterator[str]:
    """What is left where no settings are known with which a stage fits."""
    if not of_stage["fits"] and not any(change["fits"] for change in of_stage["changes"]):
        what = "none of these is enough" if of_stage["changes"] else "no setting is known that would help"
        yield f"{what}; take a larger device, more of them (--devices NUMBERxNAME), or a smaller model"


def _change(change: dict[str, Any]) -> str:
    words = " ".join(word for name, value in change["settings"].items() for word in _words(name, value))
    return f"{words}: {change['peak_gib']:.2f} GiB{', fits' if change['fits'] else ''}"


def _words(name: str, value: Any) -> Iterator[str]:
    """A setting as a command line takes it: with quotes in it, a shell would take them away."""
    if isinstance(value, dict) and value:
        for part, of_part in value.items():
            yield from _words(f"{name}.{part}", of_part)
    else:
        yield f"{name}={_word(value)}"


def _word(value: Any) -> str:
    return json.dumps(value).replace(" ", "").strip('"')


def _gib(size: float) -> str:
    return f"{size:.2f}" if size >= 0.005 else ("0" if not size else "<.01")


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"
