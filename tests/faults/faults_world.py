"""A whole tiny pipeline that can be killed a hundred times: its data, and processes that start in a moment.

    Server(folder).rlhf("run", "recipe.yaml")    a process of its own, forked: rlhf.pipeline.cli.main

It can be killed by its parent after some time, or kill itself at a `Point`: before, in the middle of or after the n-th
call of a function that changes files. SIGKILL, both.
"""

import json
import os
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from forking import become, fork
from points import OUTSIDE, Point, instrument

import rlhf.pipeline.report
from rlhf.recipes import demo_world

RECIPE = """
judge: rlhf.recipes.demo_world:judge
eval_share: 0.3
pretrain:
  data: documents.jsonl
  vocab_size: 300
  hidden_size: 16
  num_layers: 1
  num_heads: 2
  intermediate_size: 32
  context_length: 64
  dropout: 0.1
  num_steps: 7
  global_batch_size: 4
  eval_every: 2
  save_every: 2
  log_every: 1
  sample_prompts: [The brave]
  sample_length: 4
  report_to: []
sft:
  data: demonstrations.jsonl
  max_length: 64
  num_epochs: 1.5
  global_batch_size: 4
  learning_rate: 1e-3
  save_every: 1
  log_every: 1
  report_to: []
reward:
  data: rankings.jsonl
  max_length: 64
  max_new_tokens: 8
  num_sampled_answers: 1
  num_epochs: 2
  global_batch_size: 4
  learning_rate: 1e-3
  eval_every: 2
  save_every: 2
  log_every: 1
  report_to: []
ppo:
  data: prompts.jsonl
  max_prompt_length: 48
  max_new_tokens: 8
  num_iterations: 5
  rollout_batch_size: 4
  num_epochs: 2
  num_minibatches: 2
  kl_target: 1.0
  eval_every: 2
  save_every: 1
  report_to: []
"""


def write_world(folder: Path) -> None:
    """recipe.yaml and its four small data files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "documents.jsonl", [{"text": text} for text in demo_world.documents(num=60)])
    write_rows(folder / "demonstrations.jsonl", demo_world.demonstrations(num=24))
    write_rows(folder / "rankings.jsonl", demo_world.rankings(num=16, answers=3))
    write_rows(folder / "prompts.jsonl", islice(demo_world.prompts(), 16))
    (folder / "recipe.yaml").write_text(RECIPE)


def write_rows(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit code; −9 for one that was killed."""
    said: str
    """stdout and stderr together."""
    stage: str
    """Which stage it was in."""
    seconds: float
    calls: dict[tuple[str, str], int]
    """How often each function of a `Point` was called in each stage."""

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Server:
    """Starts `rlhf` in processes forked from one that has imported all it needs."""

    def __init__(self, home: Path, report: bool = False) -> None:
        self.home = home
        """Their working directory."""
        self.report = report
        """Whether they draw the report, which takes longer than the four stages."""

    def rlhf(self, *words: str, point: Point | None = None, kill_after: float | None = None) -> Ended:
        """One process to its end."""
        with tempfile.TemporaryDirectory() as folder:
            said, trace = (Path(folder) / name for name in ("said", "trace"))
            trace.touch()  # it may be killed before it is itself
            said.touch()
            began = time.monotonic()
            process = fork(_rlhf, words, self.home, said, trace, point, self.report)
            process.join(kill_after)
            process.kill()
            process.join()
            seconds = time.monotonic() - began
            calls: Counter[tuple[str, str]] = Counter()
            stage = OUTSIDE
            for line in trace.read_text().splitlines():
                kind, _, what = line.partition(" ")
                if kind == "stage":
                    stage = what
                else:
                    calls[stage, what] += 1
            assert process.exitcode is not None
            return Ended(process.exitcode, said.read_text(errors="replace"), stage, seconds, dict(calls))


def _rlhf(words: tuple[str, ...], home: Path, said: Path, trace: Path, point: Point | None, report: bool) -> NoReturn:
    os.chdir(home)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    instrument(os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), point)
    if not report:
        rlhf.pipeline.report.render = lambda run_dir: run_dir / "report.html"
    become(words)
