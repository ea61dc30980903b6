"""A whole tiny pipeline that can be killed a hundred times: its data, and processes that start in a moment.

    server = Server()                    imports everything once, which takes ten times as long as the pipeline
    server.rlhf("run", "recipe.yaml")    a process of its own, forked from there: rlhf.pipeline.cli.main

`python faults_world.py` is the server. A forked process can be killed by its parent after some time, or kill itself
at a `Point`: before, in the middle of or after the n-th call of a function that changes files. SIGKILL, both.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from points import OUTSIDE, Point, instrument

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
        self._notes = tempfile.TemporaryDirectory()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def rlhf(self, *words: str, point: Point | None = None, kill_after: float | None = None) -> Ended:
        """One process to its end."""
        order = {
            "words": words,
            "home": str(self.home),
            "notes": self._notes.name,
            "point": point and asdict(point),
            "kill_after": kill_after,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order | {"report": self.report}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        calls: Counter[tuple[str, str]] = Counter()
        stage = OUTSIDE
        for line in answer["trace"].splitlines():
            kind, _, what = line.partition(" ")
            if kind == "stage":
                stage = what
            else:
                calls[stage, what] += 1
        return Ended(answer["code"], answer["said"], stage, answer["seconds"], dict(calls))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._notes.cleanup()


@contextlib.contextmanager
def serving(home: Path, report: bool = False) -> Iterator[Server]:
    server = Server(home, report)
    try:
        yield server
    finally:
        server.close()


def processes_of(run: Path, ranks_alone: bool = False) -> list[int]:
    """Processes that work on a stage in this run folder (absolute): launchers and ranks, or ranks alone."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        if any(word.startswith(os.fsencode(run) + b"/") for word in words) and (
            not ranks_alone or any(value.startswith(b"RANK=") for value in environment)
        ):
            found.append(int(path.name))
    return sorted(found)


# -- the server ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """Fork a process per line of stdin, wait for it, answer with a line."""
    import rlhf.pipeline.cli
    import rlhf.pipeline.report
    import rlhf.pipeline.runner
    import rlhf.stages.ppo.train
    import rlhf.stages.pretrain.train
    import rlhf.stages.reward.train
    import rlhf.stages.sft.train  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        said, trace = (Path(order["notes"]) / name for name in ("said", "trace"))
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(order, said, trace)
        if order["kill_after"] is not None:
            timer = threading.Timer(order["kill_after"], os.kill, (child, signal.SIGKILL))
            timer.start()
        # Not reaped before the timer is gone: its number could belong to another process by then.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        if order["kill_after"] is not None:
            timer.cancel()
            timer.join()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer = {"code": code, "seconds": time.monotonic() - began}
        answer |= {"said": said.read_text(errors="replace"), "trace": trace.read_text()}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # at once: it has nothing left to put away


def _child(order: dict[str, Any], said: Path, trace: Path) -> NoReturn:
    os.chdir(order["home"])
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    instrument(os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), order["point"] and Point(**order["point"]))
    if not order["report"]:
        import rlhf.pipeline.report

        rlhf.pipeline.report.render = lambda run_dir: run_dir / "report.html"
    from rlhf.pipeline.cli import main

    code = 1
    try:
        main(order["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
