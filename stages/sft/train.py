"""Supervised fine-tuning with TRL's SFTTrainer on rows that rlhf.data tokenised; the loss counts responses only.

Run by hand: `accelerate launch -m rlhf.stages.sft FOLDER`, where FOLDER holds a settings.yaml.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl import SFTConfig, SFTTrainer

from rlhf.data.collate import IGNORED, batch_indices, labels, pad_right
from rlhf.data.errors import DataError, RefusedError
from rlhf.data.rows import Demonstration, prompt_key, read_demonstrations
from rlhf.data.tokens import Encoded, encode_example
from rlhf.stages.adapters import lora_config
from rlhf.stages.artifact import read_settings
from rlhf.stages.bad_numbers import count_step, leave_out_overflow
from rlhf.stages.checkpoints import Checkpoint
from rlhf.stages.models import check_positions, hand_over, load_policy, load_tokenizer, save_folder
from rlhf.stages.out_of_memory import doing, explained, halve, is_out_of_memory, let_go, weights_in_memory
from rlhf.stages.precision import choose_precision
from rlhf.stages.runtime import Runtime
from rlhf.stages.sft.config import SFTSettings


@explained
def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, SFTSettings)
    assert settings.model is not None  # read_settings' caller filled it in; identify() refuses otherwise
    tokenizer = load_tokenizer(settings.model)
    run = Runtime(settings, folder)
    rows, eval_rows = read_rows(run)
    encoded = encode_rows(run, tokenizer, rows)
    eval_encoded = encode_rows(run, tokenizer, eval_rows)
    batch_size = run.batch_size("global_batch_size", settings.global_batch_size, len(encoded))
    num_steps = run.num_steps = math.ceil(settings.num_epochs * len(encoded) / batch_size)
    run.say(f"{len(encoded)} demonstrations, {len(eval_encoded)} held out")
    model = load_policy(settings.model, tokenizer)
    check_positions("sft.max_length", settings.max_length, model)
    base_eval_loss = held_out_loss(run, model.to(run.device), eval_encoded, tokenizer.pad_token_id)
    if not math.isfinite(base_eval_loss):
        raise RuntimeError(f"sft.model: its held-out loss is {base_eval_loss} before any training; take another model")
    trainer = fit(run, model, tokenizer, encoded, batch_size)
    if trainer.state.global_step < num_steps and run.stop_requested():
        run.stop(trainer.state.global_step)
    trained = run.unwrap(trainer.model)
    if settings.lora:
        trained = trained.merge_and_unload()
    eval_loss = held_out_loss(run, trained, eval_encoded, tokenizer.pad_token_id)
    run.log(num_steps, {"eval_loss": eval_loss}, force=True)
    run.on_main(lambda: save_folder(folder / "model", trained, tokenizer))
    metrics = {"eval_loss": eval_loss, "base_eval_loss": base_eval_loss, "num_demonstrations": len(encoded)}
    return run.finish(metrics, hand_over(tokenizer, trained))


def read_rows(run: Runtime[SFTSettings]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Training and held-out demonstrations."""
    settings = run.settings
    rows = read_demonstrations(settings.data, settings.max_dropped).rows
    given = read_demonstrations(settings.eval_data, settings.max_dropped).rows if settings.eval_data else None
    return run.split(rows, given, lambda row: prompt_key(row.prompt))


def encode_rows(
    run: Runtime[SFTSettings], tokenizer: PreTrainedTokenizerBase, rows: list[Demonstration]
) -> list[Encoded]:
    """Token ids of the rows that fit; the others are counted aloud, and none left is an error."""
    max_length = run.settings.max_length
    found = [encode_example(tokenizer, row.prompt, row.response, max_length) for row in rows]
    kept = [row for row in found if row is not None]
    if len(kept) < len(rows):
        text = f"{len(rows) - len(kept)} of {len(rows)} responses are longer than max_length {max_length}"
        if not kept:
            raise DataError(f"sft.max_length: {text}; nothing is left to train on, raise it")
        run.say(f"{text} and are left out")
    return kept


def fit(
    run: Runtime[SFTSettings],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Encoded],
    batch_size: int,
) -> "CheckpointedTrainer":
    """Train from the newest complete checkpoint, if there is one; returns the trainer, which holds the model.

    With `auto_microbatch` a trainer that runs out of memory is followed by one with half the microbatch.
    """
    smaller = None
    while True:
        checkpoint = run.newest_checkpoint()
        if smaller is not None:  # than the checkpoint says
            run.state["microbatch_size"] = smaller
        trainer = build_trainer(run, model, tokenizer, rows, batch_size)
        try:
            trainer.go_on_from(checkpoint)
        except Exception as error:
            wanted = run.settings.auto_microbatch and is_out_of_memory(error)
            if not (wanted and halve(run, batch_size // run.num_processes, divides=True)):
                raise
        else:
            return trainer
        smaller, run.state = run.microbatch_size, {}
        del trainer
        model.to("meta")  # whoever still holds it holds no memory
        let_go(run.device)
        assert run.settings.model is not None
        model = load_policy(run.settings.model, tokenizer)


def build_trainer(
    run: Runtime[SFTSettings],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Encoded],
    batch_size: int,
) -> "CheckpointedTrainer":
    """TRL's trainer on tokenised rows, its batch derived from the global one, its talk sent to our log."""
    settings = run.settings
    share = batch_size // run.num_processes
    microbatch = min(run.microbatch_size or share, share)
    if share % microbatch:
        raise RefusedError(f"sft.microbatch_size: {microbatch} does not divide a device's share of {share} rows")
    precision = choose_precision(settings.precision, "sft")
    ours = {
        "output_dir": str(run.folder / "checkpoints"),
        "max_steps": run.num_steps,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": share // microbatch,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(settings.warmup_share * run.num_steps),
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed % 2**32,  # what numpy takes
        "train_sampling_strategy": "sequential",  # the rows are in our order
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": run.device.type == "cpu",
        "logging_steps": settings.log_every,
        "save_steps": settings.save_every,
        "gradient_checkpointing": None,  # TRL turns it on unasked; `args: {activation_checkpointing: true}` does it
        "max_length": None,  # the rows are cut already
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would put the mean of other steps in the place of a bad loss
        "report_to": "none",
    }
    lora = settings.lora and lora_config(model, settings.lora, task_type="CAUSAL_LM")

    def training_batch(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        run.count_tokens(sum(len(row["input_ids"]) for row in batch))
        return collate([Encoded(**row) for row in batch], tokenizer.pad_token_id)

    # The rows of every step in turn: whole batches, so that no process repeats a row to fill its last one.
    steps = [batch_indices(len(rows), batch_size, step, settings.seed) for step in range(run.num_steps)]
    data = Dataset.from_list([asdict(row) for row in rows]).select([i for step in steps for i in step])
    trainer = CheckpointedTrainer(
        run,
        model=model,
        args=SFTConfig(**{**ours, "remove_unused_columns": False, **settings.args}),
        train_dataset=data,
        data_collator=training_batch,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Reporter(run)],
    )
    trainer.remove_callback(PrinterCallback)
    run.in_memory = weights_in_memory(trainer.model)
    return trainer


def collate(rows: list[Encoded], pad_token_id: int) -> dict[str, torch.Tensor]:
    """ids, attention mask and labels [B,T], padded on the right."""
    ids, mask = pad_right([row.input_ids for row in rows], pad_token_id)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels(rows)}


class CheckpointedTrainer(SFTTrainer):
    """TRL's trainer, whose checkpoints are like those of the other stages: written aside, whole, and with hashes."""

    def __init__(self, run: Runtime[SFTSettings], **options: Any) -> None:
        super().__init__(**options)
        self.run = run
        self.checkpoint: Checkpoint | None = None
        """The one that training goes on from."""
        self.losses: list[torch.Tensor] = []
        """Of the microbatches of a step, until it is known whether the step is taken."""
        self.metrics_before: dict[str, list[float]] = {}

    def go_on_from(self, checkpoint: Checkpoint | None) -> None:
        """Train to the end, from a checkpoint if there is one."""
        self.checkpoint = checkpoint
        self.run.begin(checkpoint.step if checkpoint else 0)
        self.add_callback(Restorer(self))
        # The trainer writes into a folder that it names itself.
        self.train(str(checkpoint.folder / f"checkpoint-{checkpoint.step}") if checkpoint else None)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *more: Any) -> torch.Tensor:
        """Gradients of a microbatch; its loss gets into the log when the step is taken."""
        doing("the update", inputs["input_ids"])
        if not self.losses:
            self.metrics_before = {name: list(values) for name, values in self._metrics["train"].items()}
        self.losses.append(super().training_step(model, inputs, *more))
        return torch.zeros_like(self.losses[-1])

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The last thing before the optimizer steps: without gradients, its step changes nothing."""
        norm = super()._get_grad_norm(model, grad_norm)
        loss = torch.stack(self.losses).sum()
        self.losses = []
        numbers = {"loss": self.run.sum(loss).item() / self.run.num_processes, "grad_norm": float(norm)}
        leave_out_overflow(self.accelerator.scaler, numbers)
        if count_step(self.run, self.state.global_step + 1, numbers):
            self._tr_loss += loss
        else:
            model.zero_grad()
            self._metrics["train"].clear()
            self._metrics["train"].update(self.metrics_before)
            self._globalstep_last_logged += 1  # the next line of the log is a mean over the other steps
        return norm

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        step, output_dir = self.state.global_step, self.args.output_dir
        if step == self.state.max_steps:
            return  # the model itself comes next
        # What the next line of metrics is the mean of; the trainer forgets it.
        loss = self.run.sum(self._tr_loss.double().cpu()).item() / self.run.num_processes
        since = {name: list(values) for name, values in self._metrics["train"].items()}
        self.run.state["log"] = {"loss": loss, "since": self._globalstep_last_logged, "metrics": since}
        with self.run.saving(step) as folder:
            self.args.output_dir = str(folder)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = output_dir

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.checkpoint and not self.run.new_streams(self.checkpoint):
            super()._load_rng_state(checkpoint)


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
    """Sends the trainer's log to ours and stops it, state saved, when a signal came."""

    def __init__(self, run: Runtime[SFTSettings]) -> None:
        self.run = run

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.run.state["skipped_in_a_row"]:
            control.should_save = False  # a checkpoint is written after a step that was taken
        if self.run.stop_requested():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        names = ("loss", "learning_rate", "grad_norm", "mean_token_accuracy")
        row = {name: float(logs[name]) for name in names if name in logs}
        if not math.isfinite(row.get("grad_norm", 0.0)):
            del row["grad_norm"]  # of a step that was not taken
        if "loss" in row:
            self.run.log(state.global_step, row, force=True)


@torch.no_grad()
def held_out_loss(run: Runtime[SFTSettings], model: PreTrainedModel, rows: list[Encoded], pad_token_id: int) -> float:
    """Mean loss per response token over all held-out rows, each counted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for mine in run.chunks(len(rows), run.settings.global_batch_size):
        batch = collate([rows[i] for i in mine], pad_token_id)
        doing("evaluation", batch["input_ids"])
        targets = batch.pop("labels")[:, 1:].to(run.device)
        with run.accelerator.autocast():
            logits = model(**{k: v.to(run.device) for k, v in batch.items()}, use_cache=False).logits[:, :-1]
        losses = cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="sum")
        total += torch.tensor([losses.item(), (targets != IGNORED).sum().item()], dtype=torch.float64)
    total = run.sum(total)
    return (total[0] / total[1]).item()
