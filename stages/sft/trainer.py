"""TRL's SFTTrainer without what costs it time: rows are read in passes of our cut, the loss is ours where the model
allows it, and nothing waits for the device after a step. Checkpoints are like those of the other stages."""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState
from trl import SFTTrainer

from rlhf.data.collate import IGNORED, batch_indices, labels, pad_right
from rlhf.data.tokens import Encoded
from rlhf.stages import training_state
from rlhf.stages.bad_numbers import count_step, leave_out_overflow
from rlhf.stages.checkpoints import Checkpoint
from rlhf.stages.late import Late, decides_on_device, leave_out_if_bad
from rlhf.stages.models import compile_layers
from rlhf.stages.out_of_memory import doing, within_memory
from rlhf.stages.processes import DDP
from rlhf.stages.profile import cost_of
from rlhf.stages.runtime import Runtime
from rlhf.stages.sft.config import SFTSettings
from rlhf.stages.sft.objective import Passage, Reading, num_targets
from rlhf.stages.sharding import full, gathered

_SCHEDULER = "scheduler.json"


class CheckpointedTrainer(SFTTrainer):
    """What its data set gives it is the number of a step."""

    def __init__(
        self, run: Runtime[SFTSettings], rows: Sequence[Encoded], batch_size: int, longest: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self.run, self.rows, self.batch_size, settings = run, rows, batch_size, run.settings
        self.accelerator.ddp_handler = DDP()  # its accelerator is not the run's
        backward = self.accelerator.backward  # which the trainer calls itself, and which `run.backward` is not

        def marked(loss: Tensor, **named: Any) -> None:
            with run.reducing():
                backward(loss, **named)

        self.accelerator.backward = marked
        decoder = self.model.get_base_model() if settings.lora else self.model
        give_losses(decoder, self)
        self.cost = cost_of(decoder, 2)
        run.spread(self.model)
        # Layers that were gathered are in the type of autocast.
        with gathered(self.model), run.accelerator.autocast() if run.sharding else nullcontext():
            self.reading = Reading(
                decoder, longest, self.processing_class.pad_token_id, run.device, run.accelerator.mixed_precision,
                run.accelerator.autocast(), settings.packing, settings.compile,
            )  # fmt: skip
        plain = self.args.loss_type == "nll" and not self.args.label_smoothing_factor and not self.aux_loss_enabled
        self.ours = plain and self.reading.straight
        """Whether the loss is ours; else TRL's, which makes more kinds of it."""
        self.reading.packed &= self.ours
        if self.reading.compiled:
            compile_layers(self.model)
        self.checkpoint: Checkpoint | None = None
        """The one that training goes on from."""
        self.late = Late(run)
        self.made = torch.zeros(2)
        """Loss and token accuracy of this process's share of a step, as parts of those of the whole."""
        self.correct: list[Tensor] = []
        """Tokens of each pass of a step that the model takes to be the likeliest."""

    def _move_model_to_device(self, *_: Any) -> None:
        """Nothing: `spread` does it, and a model that is to be spread may be larger than the device."""

    def go_on_from(self, checkpoint: Checkpoint | None) -> None:
        """Train to the end, from a checkpoint if there is one."""
        self.checkpoint = checkpoint
        self.run.begin(checkpoint.step if checkpoint else 0)
        self.add_callback(Restorer(self))
        # The trainer writes into a folder that it names itself.
        self.train(str(checkpoint.folder / f"checkpoint-{checkpoint.step}") if checkpoint else None)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, int], *_: Any) -> Tensor:
        """Gradients of this process's share of a step; its loss gets into the log when the step is taken."""
        run, read = self.run, super().training_step
        places = batch_indices(len(self.rows), self.batch_size, inputs["step"], run.settings.seed)
        batch = [self.rows[i] for i in places]
        num_tokens = sum(map(num_targets, batch))  # over all processes: each weighs the same
        rows = run.shard(batch)

        def gradients() -> Tensor:
            losses, self.correct = [], []
            for cut in run.accumulate(self.cut(rows), model):
                losses.append(read(model, self.inputs_of([rows[i] for i in cut]), torch.tensor(num_tokens)))
            return torch.stack(losses).sum()

        loss = within_memory(run, len(rows), gradients, model)
        run.count_tokens(sum(len(row.input_ids) for row in rows))
        lengths = torch.tensor([(row.prompt_length, num_targets(row)) for row in rows], dtype=torch.float64)
        prompts, responses = lengths.reshape(-1, 2).unbind(1)
        run.phases.count("update", float(lengths.sum()), flops=self.cost.learning(prompts, responses))
        self.made = torch.stack(
            [loss / run.num_processes, torch.stack(self.correct).sum().to(loss.device) / num_tokens]
        )
        return torch.zeros_like(loss)

    def cut(self, rows: list[Encoded]) -> list[list[int]]:
        """Numbers of the rows of each pass. With TRL's loss, which counts over all processes in each of them, all
        processes make equally many."""
        size, tokens = self.run.microbatch_size, self.run.settings.microbatch_tokens
        if self.ours:
            return self.reading.cut(rows, size, tokens)
        size = min(size or len(rows), max(tokens // self.reading.longest, 1))
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]

    def inputs_of(self, rows: list[Encoded]) -> dict[str, Any]:
        """Of one forward pass."""
        if self.ours:
            passage = self.reading.passage(rows)
            doing("the update", passage.ids, len(rows))
            return {"passage": passage.to(self.run.device)}
        ids, mask = pad_right([row.input_ids for row in rows], self.reading.pad_token_id)
        doing("the update", ids, len(rows))
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels(rows)}

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Of a forward pass, per token of the whole step."""
        if not self.ours:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            share = self._metrics["train"].pop("mean_token_accuracy")[-1]  # over all processes
            self._metrics["train"].clear()
            self.correct.append(share * (inputs["labels"][:, 1:] != IGNORED).sum())
            return loss
        loss, correct = model(passage=inputs["passage"])
        self.correct.append(correct)
        return loss / num_items_in_batch.item() * self.run.num_processes  # DDP averages gradients over processes

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The last thing before the optimizer steps, which changes nothing where a number is none."""
        norm = full(torch.as_tensor(super()._get_grad_norm(model, grad_norm)))
        loss, accuracy = self.run.sum(self.made)
        numbers = {"loss": loss, "grad_norm": norm.to(loss.device)}
        self.late.add(self.state.global_step + 1, {**numbers, "accuracy": accuracy})
        if self.accelerator.scaler is None and decides_on_device(self.optimizer):
            leave_out_if_bad([self.optimizer], numbers)
        elif not self.settle(all_steps=True):
            model.zero_grad()  # without gradients, the step changes nothing
        return norm

    def settle(self, all_steps: bool) -> bool:
        """Read what became of the steps; whether the last one that was read was taken."""
        for step, numbers in self.late.read(all_steps):
            accuracy = numbers.pop("accuracy")
            leave_out_overflow(self.accelerator.scaler, numbers)
            if count_step(self.run, step, numbers):
                self._tr_loss += numbers["loss"]
                self._metrics["train"]["mean_token_accuracy"].append(accuracy)
            else:
                self._globalstep_last_logged += 1  # the next line of the log is a mean over the other steps
        return not self.run.state.get("skipped_in_a_row")

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        control = self.control
        taken = self.settle(control.should_log or control.should_save or control.should_training_stop)
        if self.late.must_end and not control.should_training_stop:
            control.should_save = control.should_training_stop = True
        if not taken and not control.should_training_stop:
            control.should_save = False  # a checkpoint is written after a step that was taken
        super()._maybe_log_save_evaluate(*arguments, **named)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # what the trainer would count nobody reads

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        step, output_dir = self.state.global_step, self.args.output_dir
        if step == self.state.max_steps:
            return  # the model itself comes next
        # What the next line of metrics is the mean of; the trainer forgets it.
        since = {name: list(values) for name, values in self._metrics["train"].items()}
        log = {"loss": self._tr_loss.item(), "since": self._globalstep_last_logged, "metrics": since}
        self.run.state["log"] = log
        with self.run.saving(step) as folder:
            self.args.output_dir = str(folder)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = output_dir

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing: in a checkpoint the weights are beside the optimizer's state."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing: it would be in a checkpoint, and takes as long as writing the rest of a small one."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        training_state.save(folder, [self.model], [self.optimizer], {}, self.run.is_main)
        if self.run.is_main:
            (folder / _SCHEDULER).write_text(json.dumps(self.lr_scheduler.state_dict()), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            training_state.load(Path(checkpoint), [self.model], [self.optimizer], {})
            self.lr_scheduler.load_state_dict(json.loads((Path(checkpoint) / _SCHEDULER).read_text(encoding="utf-8")))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.checkpoint and not self.run.new_streams(self.checkpoint):
            super()._load_rng_state(checkpoint)


def give_losses(model: PreTrainedModel, trainer: CheckpointedTrainer) -> None:
    """Let the model, called with a passage, return its losses: through its own forward, around which Accelerate puts
    precision and processes."""
    without = model.forward

    def forward(_: PreTrainedModel, *arguments: Any, passage: Passage | None = None, **named: Any) -> Any:
        return without(*arguments, **named) if passage is None else trainer.reading.losses(model, passage)

    model.forward = MethodType(forward, model)


class Restorer(TrainerCallback):
    """Puts back what the next line of metrics is the mean of."""

    def __init__(self, trainer: CheckpointedTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.trainer.checkpoint:
            log = self.trainer.run.state["log"]
            self.trainer._tr_loss.fill_(log["loss"])
            self.trainer._globalstep_last_logged = log["since"]
            self.trainer._metrics["train"].update(log["metrics"])


class Reporter(TrainerCallback):
    """Sends the trainer's log to ours."""

    def __init__(self, run: Runtime[SFTSettings]) -> None:
        self.run = run

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.run.step_is_done(state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        names = ("loss", "learning_rate", "grad_norm", "mean_token_accuracy")
        row = {name: float(logs[name]) for name in names if name in logs}
        if not math.isfinite(row.get("grad_norm", 0.0)):
            del row["grad_norm"]  # of a step that was not taken
        if "loss" in row:
            self.run.log(state.global_step, row, force=True)
