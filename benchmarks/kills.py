"""Kill -9 over all four stages of a real, tiny pipeline, at chosen calls and at random times; run again; compare.

    python benchmarks/kills.py                        a hundred kills in one process, a few minutes on two cores
    python benchmarks/kills.py --kills 200 --seed 1   others
    python benchmarks/kills.py --processes 2          eight kills of two processes: of one of them, and of the run

Several runs are killed in turn, each many times, and each comes to its end at last. A kill counts as resumed if the
run went on from a step or over a finished stage, or if nothing had been saved yet; as lost if it went on from less than
the last checkpoint that was whole; and as different if its run ended with another manifest, another file, or other
metrics than the run that nobody disturbed. Prints a table; exits 1 if one of the last two is not zero.
"""

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

from campaign import Kill, campaign, differences, undisturbed
from faults_world import Server, write_world
from points import OUTSIDE, STAGES

RLHF = str(Path(sys.executable).parent / "rlhf")
Row = tuple[Kill, bool]
"""A kill, and whether its run ended differently."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=100, help="at least so many, shared by the stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="2: two kills of each stage, started by accelerate")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        write_world(home)
        if options.processes > 1:
            rows = kills_of_processes(home, options.processes, random.Random(options.seed))
        else:
            rows = kills(home, options.kills, random.Random(options.seed))
    good = table(rows)
    print(f"{len(rows)} kills in {time.monotonic() - began:.0f} s")
    sys.exit(0 if good else 1)


def kills(home: Path, number: int, rng: random.Random) -> list[Row]:
    """At least so many kills; runs of eight a stage, then the next run."""
    found: list[Row] = []
    wanted = Counter(dict.fromkeys((*STAGES, OUTSIDE), -(-number // 5)))
    server = Server(home, report=True)
    calls = undisturbed(server)
    for run in range(number):
        here = Counter({stage: min(left, 8) for stage, left in wanted.items() if left > 0})
        if len(found) >= number or not here:
            break
        left = wanted - here
        outcome = campaign(server, calls, rng, here, f"run-{run}", print)
        wanted = left + here  # less what was killed
        for difference in outcome.differences:
            print(f"run-{run}: {difference}")
        if outcome.differences and not outcome.kills:
            sys.exit("a run that nobody killed differs")
        for kill in outcome.kills:
            if kill.lost:
                print(f"run-{run}: {kill.how}: {kill.lost}")
        found += [(kill, bool(outcome.differences)) for kill in outcome.kills]
    return found


def kills_of_processes(home: Path, processes: int, rng: random.Random) -> list[Row]:
    """Two kills of each stage in a group of processes: one of them, and the `rlhf` that started them."""

    def start(run: Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([RLHF, "run", "recipe.yaml", f"num_processes={processes}", "--run-dir", run], cwd=home)

    whole, killed = home / "whole", home / "killed"
    if code := start(whole).wait():
        raise SystemExit(f"the undisturbed run ended with {code}")
    found: list[Kill] = []
    for stage in STAGES:
        for kind in ("one process", "rlhf"):
            run = start(killed)
            step = until_training(run, killed, stage, rng.randint(1, 2))
            if step is None:
                print(f"{stage}: was over before the kill")
                continue
            ranks = processes_of(killed, ranks_alone=True)
            os.kill(rng.choice(ranks) if kind == "one process" else run.pid, signal.SIGKILL)
            began = time.monotonic()
            run.wait()
            while (left := processes_of(killed)) and time.monotonic() - began < 60:
                time.sleep(0.05)
            seconds = time.monotonic() - began
            print(f"{stage}: killed {kind} at step {step}; all gone in {seconds:.1f} s")
            lost = f"processes were left after {seconds:.0f} s: {left}" if left else ""
            found.append(Kill(stage, kind, f"step {step}", not lost, lost))
    code = start(killed).wait()
    different = [f"the last run ended with {code}"] if code else list(differences(killed, whole))
    for difference in different:
        print(difference)
    return [(kill, bool(different)) for kill in found]


def until_training(run: "subprocess.Popen[bytes]", folder: Path, stage: str, step: int) -> int | None:
    """Wait until a stage has gone on by `step` rows of metrics; its last step, None if the run ended before."""
    rows = before = 0
    while run.poll() is None:
        time.sleep(0.01)
        for path in folder.glob(f"{stage}-*/metrics.jsonl"):
            rows = path.read_text().count("\n")
        if not processes_of(folder, ranks_alone=True):
            before = rows
        elif rows >= before + step:
            return rows
    return None


def processes_of(run: Path, ranks_alone: bool = False) -> list[int]:
    """Processes that work on a stage in this run folder (absolute): launchers and ranks, or ranks alone."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:  # gone meanwhile, or another user's
            continue
        is_rank = any(variable.startswith(b"RANK=") for variable in variables)
        if (is_rank or not ranks_alone) and any(word.startswith(os.fsencode(run) + b"/") for word in words):
            found.append(int(path.name))
    return sorted(found)


def table(rows: list[Row]) -> bool:
    """Kills by stage and by where they fell; True if none was lost and none made a difference."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for kill, different in rows:
        groups[kill.stage, kill.kind].append((kill, different))
    print(f"\n{'stage':12}{'killed at':18}{'kills':>7}{'resumed':>9}{'lost':>6}{'different':>11}")
    for (stage, kind), found in [*sorted(groups.items()), (("all", ""), rows)]:
        lost, different = sum(bool(kill.lost) for kill, _ in found), sum(differs for _, differs in found)
        resumed = sum(kill.resumed and not kill.lost for kill, _ in found)
        print(f"{stage:12}{kind:18}{len(found):7}{resumed:9}{lost:6}{different:11}")
    return bool(rows) and not any(kill.lost or different for kill, different in rows)


if __name__ == "__main__":
    main()
