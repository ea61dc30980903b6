"""What a training loop needs around it: processes, seeds, metrics, progress, checkpoints, signals, the seal.

Only the main process writes and talks; every process reaches every barrier.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, set_seed

from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages import logs, out_of_memory, profile, random_states, sharding, stopping, training_state, watchdog
from rlhf.stages.artifact import identify, refuse_damaged_model, refuse_finished, remove_temporaries, seal
from rlhf.stages.checkpoints import (
    CannotWrite,
    Checkpoint,
    clear,
    newest_checkpoint,
    saying_what_cannot_be_written,
    swap_in,
)
from rlhf.stages.precision import choose_precision, use_precision
from rlhf.stages.processes import DDP, Processes
from rlhf.stages.settings import AnyStage, why_uneven

PATIENCE = timedelta(hours=6)
"""How long processes wait for one that is at work: it may be making tokens of a large text, or judging answers."""


class Runtime(Processes, Generic[AnyStage]):
    """One stage's run in its folder."""

    def __init__(self, settings: AnyStage, folder: Path) -> None:
        refuse_finished(folder, settings.stage)
        self.settings, self.folder = settings, folder
        self.num_steps = 0
        """Set by the stage as soon as it knows."""
        for model in filter(None, settings.inputs().values()):
            refuse_damaged_model(Path(model))
        self.identity = identify(settings)  # now, since files may change while the stage trains
        logs.be_quiet()
        # Stages that share a process may differ in precision; accelerate keeps one state per process.
        AcceleratorState._reset_state()
        sharding.asked_for()  # before Accelerate looks
        accelerator = Accelerator(
            mixed_precision=choose_precision(settings.precision, settings.stage),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        accelerator.ddp_handler = DDP()
        super().__init__(accelerator)
        self.check(settings)
        self.refuse_unlike(settings.stage, self.identity.inputs | self.identity.data)
        self.precision = use_precision(settings.precision, self.accelerator.mixed_precision)
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        self.flops_per_token = 0.0
        """Set by a stage that wants its share of the device's peak in the log."""
        self.state: dict[str, Any] = {}
        """JSON values that belong to the training state (the best loss so far, …)."""
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        """Tensors that belong to it beside models and optimizers, in groups."""
        self.rows: dict[str, dict[str, Any]] = {}
        """Of each source what was kept of its rows, and what left out and why; the manifest has it. Set by a stage that
        has read them."""
        self.in_memory = ""
        """What models need all the time, in words; set by a stage that has loaded them."""
        self.phases = profile.Phases(self.device, profile.limits(self.device_name, self.precision))
        self._started, self._tokens, self._tokens_since = time.monotonic(), 0, time.monotonic()
        self._first_step, self._told_step, self._stop_code = 0, 0, 0
        self._terminal = logs.Terminal(settings.stage, quiet=not self.is_main)
        self._trackers = logs.Trackers(settings, folder, self.say)
        wanted = self.is_main and "RLHF_PROFILE" in os.environ
        self._trace = profile.Trace(folder, settings.stage, self.phases, self.say) if wanted else None
        dog = watchdog.Watchdog(folder, self.rank, self.num_processes, settings.stop_hung_after)
        self.stopping = stopping.Stopping(
            folder, settings.stop_within, self.say, self._tell, self.others(), dog if self.num_processes > 1 else None
        )
        self.write_status("running", 0)
        self.stopping.start()
        self.say(f"{self.in_words}; {self.precision} on {self.device_name}")
        self.seed()
        out_of_memory.begin(self)

    # -- talking ------------------------------------------------------------------------------------------

    def say(self, text: str, now_and_then: bool = False) -> None:
        """One line for a person; with `now_and_then` only if the last such line is some seconds old."""
        self._terminal.say(text, now_and_then)

    def count_tokens(self, number: int) -> None:
        """Tokens that this process worked through since the last call; for the log's tokens per second."""
        self._tokens += number

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What is done inside, an evaluation say, does not count in the log's tokens per second."""
        began = time.monotonic()
        yield
        self._tokens_since += time.monotonic() - began

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, before training, all processes get on with pieces of work, and one that hangs is told."""
        self.stopping.watched = True
        yield
        self.stopping.watched = False

    def log(self, step: int, metrics: dict[str, float], force: bool = False) -> None:
        """Write a row of metrics.jsonl every `log_every` steps (or now), to the trackers too; show the progress.

        `step` counts from 1. All processes log together.
        """
        logs.check_finite(metrics, self.settings.stage)
        if not force and step % self.settings.log_every and step != self.num_steps:
            return
        now = time.monotonic()
        tokens = self.sum(torch.tensor(float(self._tokens), dtype=torch.float64)).item()
        peak = self._peak_gib()
        rate = tokens / max(now - self._tokens_since, 1e-9)
        of_phases = self.phases.row(max(step - self._told_step, 1), self.sum)
        self._tokens, self._tokens_since, self._told_step = 0, now, step
        if not self.is_main:
            return
        row: dict[str, Any] = {"step": step, **logs.plain(metrics)}
        if self.state.get("num_skipped"):
            row["num_skipped"] = self.state["num_skipped"]
        if tokens:
            row["tokens_per_second"] = round(rate, 1)
            if self.flops_per_token and (flops := self.phases.limits.flops):
                row["mfu"] = round(rate * self.flops_per_token / (flops * self.num_processes), 4)
        row |= of_phases
        row["peak_gib"] = peak
        with saying_what_cannot_be_written(self.folder, "metrics.jsonl or status.json"):
            logs.write_row(self.folder, row)
            self.write_status("running", step)
        self._trackers.log(row)
        self._terminal.show(row, self.num_steps, (now - self._started) / max(step - self._first_step, 1))

    def _peak_gib(self) -> float:
        """Memory of the process that took most so far."""
        peak = torch.tensor([logs.peak_memory(self.device)], dtype=torch.float64)
        return round(self.max(peak).item() / 2**30, 3)

    def write_status(self, state: str, step: int, message: str = "") -> None:
        """status.json: what the orchestrator and `rlhf status` read while the stage runs."""
        if self.is_main:
            self._tell(state, step, message)

    def _tell(self, state: str, step: int, message: str, code: int | None = None) -> None:
        """The same from any process: one that leaves alone."""
        logs.write_status(self.folder, state, step, self.num_steps, message, code)

    # -- rows -----------------------------------------------------------------------------------------------

    def batch_size(self, name: str, size: int, num_rows: int, each: int = 1, also: int = 1) -> int:
        """The global batch `size`, or `num_rows` where there are fewer; refuses what processes cannot share evenly.
        `each` and `also` as in `why_uneven`."""
        number = self.num_processes
        if problem := why_uneven(f"{self.settings.stage}.{name}", size, number, each, also):
            raise RefusedError(problem)
        if num_rows < size:
            if num_rows % number:
                even = num_rows - num_rows % number
                setting = f"{self.settings.stage}.{name.split()[0]}"
                cure = f"set {setting}={even * each}" if even else f"use {num_rows} of them at most"
                raise RefusedError(
                    f"{self.settings.stage}.{name}: there are {num_rows} rows for a step of {size}, which {number} "
                    f"processes cannot share evenly; {cure}"
                )
            self.say(f"only {num_rows} rows for a {name} of {size}; each step takes all of them")
            size = num_rows
        return size

    @property
    def microbatch_size(self) -> int | None:
        """Rows per forward pass on this device: the setting, or what `auto_microbatch` has come down to; None: all."""
        return out_of_memory.at_once(self, "microbatch_size")

    def chunks(self, num_rows: int, batch_size: int) -> Iterator[list[int]]:
        """This process's share of an evaluation's rows, in pieces no larger than its training microbatches."""
        mine = self.shard(list(range(num_rows)))
        size = self.microbatch_size or max(batch_size // self.num_processes, 1)
        for start in range(0, len(mine), size):
            yield mine[start : start + size]

    def microbatches(self, rows: list[int], *models: torch.nn.Module) -> Iterator[list[int]]:
        """Cut this process's `rows` of a step into microbatches of `microbatch_size`, and `accumulate` over them."""
        size = self.microbatch_size or len(rows)
        yield from self.accumulate([rows[start : start + size] for start in range(0, len(rows), size)], *models)

    def on_main(self, action: Callable[[], Any], what: str | None = None) -> None:
        """Let the main process act, most often write `what`, while the others wait."""
        out_of_memory.doing("saving")
        with self.stopping.saving():
            if self.is_main:
                with saying_what_cannot_be_written(self.folder, what):
                    action()
            self.wait_for_all()

    def seed(self, per_process: bool = False, step: int = 0) -> None:
        """Restart the random streams: equal everywhere for new weights, one per process for sampling (and `step`)."""
        stream = f"{self.settings.seed} {self.rank if per_process else 'weights'}" + (f" {step}" if step else "")
        set_seed(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4], "big"))

    # -- checkpoints --------------------------------------------------------------------------------------

    def step_is_done(self, step: int) -> None:
        """`step` steps are behind: for the watchdog, and for the trace, if one is wanted."""
        watchdog.moved(step=step)
        if self._trace is not None:
            with self.clock_stopped(), saying_what_cannot_be_written(self.folder, "profile"):
                self._trace.at(step)

    def checkpoint(self, step: int, good: bool = True) -> None:
        """Save every `save_every` steps if the step was `good`; save and stop if a signal came. `step` steps are
        done."""
        self.step_is_done(step)
        stop = self.stop_requested()
        last = step == self.num_steps
        if stop or (good and step % self.settings.save_every == 0 and not last):
            self.save(step)
        if stop and not last:
            self.stop(step)

    def save(self, step: int) -> None:
        """Write the full training state as a checkpoint."""
        with self.saving(step) as folder:
            training_state.save(folder, *self._learners(), self.tensors, self.is_main)
            random_states.save(folder, self.accelerator)

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """An empty folder for the files of a checkpoint, which is completed and swapped in when all are written."""
        what, failures = f"the checkpoint of step {step}", []
        self.on_main(lambda: clear(self.folder), what)
        try:
            with self.stopping.saving(), saying_what_cannot_be_written(self.folder, what, keep=True):
                yield self.folder / "checkpoints" / ".writing"
        except CannotWrite as error:
            failures.append(f"rank {self.rank}: {error}" if self.num_processes > 1 else str(error))
        if failures := self.gather_objects(failures):  # of any process; none of them is writing any more
            if self.is_main:
                remove_temporaries(self.folder)
            raise CannotWrite(failures[0])
        self.on_main(lambda: swap_in(self.folder, step, self.num_processes, self.device.type, self.state), what)

    def resume(self) -> int:
        """Load the newest complete checkpoint, if there is one; the number of steps that it has behind it."""
        step = self._load_newest() or 0
        self.begin(step)
        return step

    def go_back(self) -> int | None:
        """Load the newest complete checkpoint in the middle of training; its step, None if there is none."""
        step = self._load_newest()
        if step is not None:
            watchdog.moved(step=step)
            if self.is_main:
                logs.forget_rows_after(self.folder, step)
        self._told_step = self._told_step if step is None else step
        return step

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint, `state` taken from it; which ones were passed over is said."""

        def find() -> Checkpoint | None:
            said: list[str] = []
            found = newest_checkpoint(self.folder, hashes=True, passed_over=said.append)
            for text in said:
                self.say(f"warning: {text}")
            if said and found is None:
                self.say("warning: no complete checkpoint is left to go on from")
            return found

        found = self.from_main(find)
        if found is not None:
            self.state |= found.state
        return found

    def new_streams(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint's random states cannot be used here; then the streams are new ones, and that is said.

        Which rows a step takes does not depend on them.
        """
        then, now = (checkpoint.processes, checkpoint.device), (self.num_processes, self.device.type)
        if then == now:
            return False
        self.say(
            f"step {checkpoint.step} was saved by {then[0]} process(es) on {then[1]} and goes on with {now[0]} on "
            f"{now[1]}: each step takes the rows that it would have taken, random numbers (sampling, dropout) differ"
        )
        self.seed(per_process=True, step=checkpoint.step)
        return True

    def _load_newest(self) -> int | None:
        checkpoint = self.newest_checkpoint()
        if checkpoint is None:
            return None
        training_state.load(checkpoint.folder, *self._learners(), self.tensors)
        random_states.load(checkpoint.folder, self.accelerator)
        if not self.new_streams(checkpoint):
            random_states.check(checkpoint.folder, self.accelerator)
        return checkpoint.step

    def _learners(self) -> tuple[list[torch.nn.Module], list[Any]]:
        """Models and optimizers, as they were prepared."""
        return [self.unwrap(model) for model in self.accelerator._models], self.accelerator._optimizers

    def begin(self, step: int) -> None:
        """Start clock and trackers with `step` steps behind; rows that a lost stretch wrote are dropped."""
        if step:
            self.say(f"resuming from step {step} of {self.num_steps}")
        if self.is_main:
            remove_temporaries(self.folder)  # of an attempt that was killed
            logs.forget_rows_after(self.folder, step)
            self._trackers.start(step)
        self.write_status("running", step)
        self._first_step, self._started, self._tokens_since = step, time.monotonic(), time.monotonic()
        self._told_step = step
        self.phases.forget()
        if self._trace is not None:
            self._trace.begin(step, self.num_steps)
        watchdog.moved(step=step)
        self.stopping.training = True

    # -- the end ------------------------------------------------------------------------------------------

    def stop(self, step: int) -> None:
        """End after a signal; the state is saved."""
        if self.is_main:
            self._tell("stopped", step, "", self._stop_code)
        self.say(
            f"stopped at step {step} of {self.num_steps}; state is kept in {self.folder}; run again to go on from there"
        )
        self.wait_for_all()  # a launcher ends the others once one has ended, and this was to be said
        self.close()
        raise Stopped(self._stop_code)

    def stop_requested(self) -> bool:
        """Whether a signal asked any of the processes to end; all of them must ask together."""
        self._stop_code = int(self.max(torch.tensor([float(self.stopping.code)])).item())
        return self._stop_code > 0

    def finish(self, metrics: dict[str, Any], hand_over: dict[str, Any]) -> dict[str, Any]:
        """Seal the artifact and drop the checkpoints; returns the final metrics."""
        metrics = logs.plain(metrics) | {"num_skipped": self.state.get("num_skipped", 0)}
        logs.check_finite(metrics, self.settings.stage)
        if self.settings.auto_microbatch and self.microbatch_size:
            metrics["microbatch_size"] = self.microbatch_size
        metrics["peak_gib"] = self._peak_gib()
        self.wait_for_all()
        with self.stopping.saving():
            if self.is_main:
                with saying_what_cannot_be_written(self.folder, "manifest.json"):
                    seal(self.folder, self.identity, metrics, self.num_processes, hand_over, self.rows)
                shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
                self.write_status("done", self.num_steps)
            stop = self.stop_requested()
            self.close()
        if stop:  # it came too late to interrupt this stage, but the next one must not start
            raise Stopped(self._stop_code)
        return metrics

    def close(self) -> None:
        """Give the terminal, the signals and the memory back; let the trackers finish."""
        if self._trace is not None:
            self._trace.write()
        self._terminal.close()
        self._trackers.close()
        self.stopping.close()
        self.accelerator.free_memory()
