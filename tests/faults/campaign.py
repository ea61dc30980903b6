"""Kill the tiny pipeline again and again, let it finish, and compare with one that nobody disturbed."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults_world import Ended, Server
from points import OUTSIDE, STAGES, random_point

_OF_TIME = re.compile("second|^peak_gib$|^mfu$")
"""In the names of figures that no two runs share."""


@dataclass(frozen=True)
class Kill:
    """One kill, and what became of it."""

    stage: str
    kind: str
    """The function at which it fell, or `time`."""
    how: str
    resumed: bool
    """A later process said that it goes on from a step or over a finished stage, or there was nothing to go on from."""
    lost: str
    """What was lost of what had to be kept; empty if nothing."""


@dataclass(frozen=True)
class Outcome:
    kills: list[Kill]
    differences: list[str]
    """Between the finished run and the undisturbed one."""


def undisturbed(server: Server) -> dict[tuple[str, str], int]:
    """Run the pipeline once, in the folder `whole`; how often each stage calls what one may be killed at."""
    ended = server.rlhf("run", "recipe.yaml", "--run-dir", "whole")
    if ended.code:
        raise SystemExit(f"the undisturbed run ended with {ended.code}:\n{ended.said}")
    return ended.calls


def campaign(
    server: Server,
    calls: dict[tuple[str, str], int],
    rng: random.Random,
    wanted: Counter[str],
    name: str,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Kill one run until each stage has the kills that are `wanted` (counted down) or is finished; then let it end."""
    run = server.home / name
    kills: list[Kill] = []
    waiting: list[tuple[Ended, str, str, dict[str, int]]] = []
    """Kills that no later process has told anything about: it was killed too early."""

    def judge(ended: Ended) -> None:
        for each in list(waiting):
            if tells(ended, each[-1]):
                waiting.remove(each)
                kills.append(judged(*each, ended))

    for stage in [stage for part in STAGES for stage in (OUTSIDE, part)] + [OUTSIDE]:
        for turn in range(wanted[stage] if stage != OUTSIDE else min(wanted[stage], 1)):
            following = next_stage(run)
            order = [*STAGES, OUTSIDE]
            if stage != OUTSIDE and order.index(following) > order.index(stage):
                break  # it is sealed
            words = ["run", "recipe.yaml", "--run-dir", name]
            if stage != OUTSIDE:  # a point that is not reached shall not end the whole run
                words += ["--to", stage]
            if turn % 2 == 0:
                # outside of stages only the few calls before the next one starts, unless all are finished
                few = {key: min(count, 4) if following != OUTSIDE else count for key, count in calls.items()}
                point = random_point(rng, few if stage == OUTSIDE else calls, stage)
                kind, how = point.function, str(point)
                ended = server.rlhf(*words, point=point)
            else:
                after = 0.05 + 0.45 * rng.random() ** 2  # rather early: a quick machine soon has it behind it
                kind, how = "time", f"after {after:.2f} s"
                ended = server.rlhf(*words, kill_after=after)
            judge(ended)
            if not ended.killed:
                if ended.code:
                    return Outcome(kills, [f"a process ended by itself with {ended.code}: {ended.said}"])
                break  # it came to its end before the point
            wanted[ended.stage] -= 1
            tell(f"{name}: killed {how}, in {ended.stage} after {ended.seconds:.1f} s")
            waiting.append((ended, kind, how, whole_steps(run)))
    ended = server.rlhf("run", "recipe.yaml", "--run-dir", name)
    judge(ended)
    if ended.code:
        return Outcome(kills, [f"the last process ended with {ended.code}: {ended.said}"])
    found = list(differences(run, server.home / "whole"))
    if not found:
        shutil.rmtree(run)
    return Outcome(kills, found)


def next_stage(run: Path) -> str:
    """The first stage that is not sealed."""
    return next((stage for stage in STAGES if not list(run.glob(f"{stage}-*/manifest.json"))), OUTSIDE)


def whole_steps(run: Path) -> dict[str, int]:
    """The step to which each unfinished stage has surely saved: that of its last row of metrics less `save_every`."""
    found = {}
    for stage, save_every in zip(STAGES, (2, 1, 2, 1), strict=True):
        for path in run.glob(f"{stage}-*/metrics.jsonl"):
            steps = [json.loads(line)["step"] for line in path.read_text().split("\n") if line.endswith("}")]
            if steps and steps[-1] > save_every and not (path.parent / "manifest.json").exists():
                found[stage] = (steps[-1] - 1) // save_every * save_every
    return found


def tells(after: Ended, saved: dict[str, int]) -> bool:
    """Whether a process came far enough to say what it made of the unfinished stages."""
    words = "(resuming|step|done|reuse)"
    return not after.killed or all(re.search(rf"^{stage}: {words} ", after.said, re.M) for stage in saved)


def judged(killed: Ended, kind: str, how: str, saved: dict[str, int], after: Ended) -> Kill:
    """What a later process made of a kill."""
    came_back = {stage: int(step) for stage, step in re.findall(r"^(\w+): resuming from step (\d+)", after.said, re.M)}
    lost = ""
    for stage, step in saved.items():
        if came_back.get(stage, 0) < step and f"{stage}: reuse " not in after.said:
            lost = f"{stage} was saved at step {step} and went on from {came_back.get(stage, 0)}"
    if not after.killed and after.code:
        lost = f"the next process ended with {after.code}: {after.said}"
    return Kill(killed.stage, kind, how, not saved or bool(came_back) or ": reuse " in after.said, lost)


def differences(ours: Path, theirs: Path) -> Iterator[str]:
    """What is not the same in two finished runs: manifests, hashes of all files, rows of metrics, names of files."""
    for stage in STAGES:
        folders = [sorted(path.parent for path in run.glob(f"{stage}-*/manifest.json")) for run in (ours, theirs)]
        names = [[folder.name for folder in found] for found in folders]
        if names[0] != names[1] or len(names[0]) != 1:
            yield f"{stage}: {names[0]}, not {names[1]}"
            continue
        mine, other = (found[0] for found in folders)
        manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (mine, other)]
        for part in ("stage", "key", "inputs", "data", "settings", "hand_over", "metrics"):
            one, two = (_timeless(manifest[part]) for manifest in manifests)
            if one != two:
                yield f"{stage}: {part} of the manifest: {one}, not {two}"
        for name in sorted(manifests[0]["files"].keys() | manifests[1]["files"].keys()):
            one, two = (manifest["files"].get(name) for manifest in manifests)
            if one is None or two is None:
                yield f"{stage}: {name} is sealed in {'one' if two is None else 'the undisturbed run'} alone"
            elif one != two and (found := _file_differs(mine / name, other / name)):
                yield f"{stage}: {name} {found}"
    one, two = ({path.relative_to(run).as_posix() for path in run.rglob("*")} for run in (ours, theirs))
    for name in sorted(one ^ two):
        yield f"{name}: is in {'the killed' if name in one else 'the undisturbed'} run alone"


def _timeless(values: Any) -> Any:
    return {k: v for k, v in values.items() if not _OF_TIME.search(k)} if isinstance(values, dict) else values


def _file_differs(ours: Path, theirs: Path) -> str:
    """How, if not in seconds and in the name of the run folder alone."""
    one, two = (path.read_text(errors="replace").replace(str(path.parents[1]), "RUN") for path in (ours, theirs))
    if ours.suffix == ".jsonl":
        rows = [[_timeless(json.loads(line)) for line in text.splitlines()] for text in (one, two)]
        if rows[0] == rows[1]:
            return ""
        steps = [[row.get("step") for row in found] for found in rows]
        if steps[0] != steps[1]:
            return f"has rows of steps {steps[0]}, not {steps[1]}"
        return f"differs: {next((a, b) for a, b in zip(*rows, strict=True) if a != b)}"
    if ours.suffix in (".yaml", ".json") and one == two:
        return ""
    return "has other bytes"
