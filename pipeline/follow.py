"""`rlhf follow`, on the other machines of a run: starts this one's part of each stage that `rlhf run` starts on the
first. All of them see the run folder, and have the same working directory and packages.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from rlhf.pipeline.errors import begun
from rlhf.pipeline.launch import LOST, ORDER, to_its_end
from rlhf.pipeline.lock import Holder, holder_of
from rlhf.pipeline.summary import read_summary
from rlhf.stages.disk import replace_text
from rlhf.stages.signals import exit_code

SECONDS_TO_BEGIN = 600.0
"""How long the run may take to begin: its machine may come up later than this one."""
SECONDS_BETWEEN_LOOKS = 1.0
"""How often the run's lock is looked at, whose disk all machines share."""


class Run:
    """The run on the first machine."""

    def __init__(self, run_dir: Path, holder: Holder) -> None:
        self.run_dir, self.holder = run_dir, holder
        self._looked, self._missed = monotonic(), 0

    def is_over(self) -> bool:
        """Whether it has let its folder go. Looks twice before it believes that."""
        if monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = monotonic()
            self._missed = 0 if holder_of(self.run_dir) == self.holder else self._missed + 1
        return self._missed > 1

    def order(self, followed: set[str]) -> dict[str, Any] | None:
        """What has to be started now and this machine has not started yet."""
        for path in self.run_dir.glob(f"*/{ORDER}"):
            try:
                order: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # gone meanwhile
                continue
            if (order["host"], order["pid"]) == (self.holder.host, self.holder.pid) and order["mark"] not in followed:
                return order
        return None


def follow(run_dir: Path, machine: int, say: Callable[[str], None] = print, patience: float = SECONDS_TO_BEGIN) -> int:
    """Start this machine's part of each stage until the run is over; the exit code."""
    until = monotonic() + patience
    while (holder := holder_of(run_dir)) is None:
        if monotonic() > until:
            say(f"{run_dir}: no run has begun here within {patience:g} s; start `rlhf run` on machine 0")
            return 1
        sleep(0.2)
    with begun():
        return _follow(Run(run_dir, holder), machine, say)


def _follow(run: Run, machine: int, say: Callable[[str], None]) -> int:
    followed = set[str]()
    while not run.is_over():
        order = run.order(followed)
        if order is None:
            sleep(0.2)
            continue
        followed.add(order["mark"])
        words: list[str] = order["words"]
        place = len(words) - 3  # before -m MODULE FOLDER
        words = [sys.executable, *words[:place], "--machine_rank", str(machine), *words[place:]]
        say(f"machine {machine}: {words[-2]} {words[-1]}")
        os.chdir(order["cwd"])
        ended = to_its_end(words, order["environment"], order["seconds"], None, run.is_over)
        if ended.received:
            return exit_code(ended.received[0])
        if ended.code and not run.is_over():  # the others may wait for what was here, and would not hear of it
            sys.stderr.write(ended.said)
            lost = Path(words[-1]) / LOST
            if lost.parent.is_dir():
                replace_text(lost, json.dumps({"mark": order["mark"], "machine": machine}), sync=False)
    return int(any(entry.status in ("failed", "stopped", "running") for entry in read_summary(run.run_dir).values()))
