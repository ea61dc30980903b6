"""Supervised fine-tuning with TRL's SFTTrainer on rows that rlhf.data tokenised; the loss counts responses only.

Run by hand: `accelerate launch -m rlhf.stages.sft FOLDER`, where FOLDER holds a settings.yaml.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import SFTConfig

from rlhf.data.errors import DataError, RefusedError
from rlhf.data.rows import Demonstration, prompt_key, read_demonstrations
from rlhf.data.tokens import Encoded, encode_examples
from rlhf.stages.adapters import lora_config, save_adapter
from rlhf.stages.models import hand_over, load_policy, load_tokenizer, save_folder
from rlhf.stages.out_of_memory import doing, explained, weights_in_memory
from rlhf.stages.packing import as_written
from rlhf.stages.row_files import RowReader, rows_of
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sft.config import SFTSettings
from rlhf.stages.sft.objective import Reading, num_targets
from rlhf.stages.sft.trainer import CheckpointedTrainer, Reporter
from rlhf.stages.sharding import gathered
from rlhf.stages.text_limits import check_positions


@explained
def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, SFTSettings)
    assert settings.model is not None  # read_settings' caller filled it in; identify() refuses otherwise
    tokenizer = load_tokenizer(settings.model)
    run = Runtime(settings, folder)
    if problem := settings.why_no_liger(run.device.type == "cuda"):
        raise RefusedError(problem)
    encoded, eval_encoded, noted = rows_of(
        run,
        lambda reader: (encode_rows(reader, tokenizer, rows) for rows in read_rows(reader)),
        lambda row: Encoded(**row),
    )
    batch_size = run.batch_size("global_batch_size", settings.global_batch_size, len(encoded))
    num_steps = run.num_steps = math.ceil(settings.num_epochs * len(encoded) / batch_size)
    run.say(f"{len(encoded)} demonstrations, {len(eval_encoded)} held out")
    model = load_policy(settings.model, tokenizer, spread=run.sharding is not None)
    check_positions("sft.max_length", settings.max_length, model)
    trainer = build_trainer(run, model, tokenizer, encoded, batch_size, noted["longest"])
    trained, reading = trainer.model, trainer.reading
    if settings.packing and not reading.packed:
        run.say("sft.packing has no effect: this model, or its attention on this device, does not keep rows apart")
    if settings.args.get("use_liger_kernel") and not liger_knows(model):
        run.say(f"sft.args.use_liger_kernel has no effect: Liger has no kernels for {model.config.model_type} models")

    def evaluate() -> float:
        with gathered(trained):
            return held_out_loss(run, trained.get_base_model() if settings.lora else trained, eval_encoded, reading)

    with run.watched():
        base_eval_loss = evaluate()  # an adapter changes nothing yet
    if not math.isfinite(base_eval_loss):
        raise RuntimeError(f"sft.model: its held-out loss is {base_eval_loss} before any training; take another model")
    trainer.go_on_from(run.newest_checkpoint())
    if trainer.state.global_step < num_steps and run.stop_requested():
        run.stop(trainer.state.global_step)
    eval_loss = evaluate()
    run.log(num_steps, {"eval_loss": eval_loss}, force=True)
    with run.whole(trained) as whole:
        run.on_main(lambda: save(folder, whole, settings, tokenizer))
    metrics = {"eval_loss": eval_loss, "base_eval_loss": base_eval_loss, "num_demonstrations": len(encoded)}
    return run.finish(metrics, hand_over(tokenizer, model))


def save(folder: Path, model: Any, settings: SFTSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the model; an adapter is merged, and lies beside."""
    if settings.lora:
        save_adapter(folder / "adapter", model.get_base_model())
        model = model.merge_and_unload()
    save_folder(folder / "model", model, tokenizer)


def read_rows(reader: RowReader[SFTSettings]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Training and held-out demonstrations."""
    settings = reader.settings
    loaded = read_demonstrations(settings.data, settings.max_dropped)
    reader.count_report("data", loaded.report)
    given = None
    if settings.eval_data:
        held_out = read_demonstrations(settings.eval_data, settings.max_dropped)
        reader.count_report("eval_data", held_out.report)
        given = held_out.rows
    return reader.split(loaded.rows, given, lambda row: prompt_key(row.prompt))


def encode_rows(
    reader: RowReader[SFTSettings], tokenizer: PreTrainedTokenizerBase, rows: list[Demonstration]
) -> Iterator[Encoded]:
    """Token ids of the rows that fit, of which the longest is noted; the others are counted aloud, and none left is an
    error."""
    max_length, num_kept = reader.settings.max_length, 0
    for encoded in encode_examples(tokenizer, ((row.prompt, row.response) for row in rows), max_length):
        if encoded is not None:
            num_kept += 1
            reader.noted["longest"] = max(reader.noted.get("longest", 0), len(encoded.input_ids))
            yield encoded
    too_long = len(rows) - num_kept
    reader.count("tokenised", num_kept, len(rows), {"longer than max_length": too_long})
    if too_long:
        text = f"{too_long} of {len(rows)} responses are longer than max_length {max_length}"
        if not num_kept:
            raise DataError(f"sft.max_length: {text}; nothing is left to train on, raise it")
        reader.say(f"{text} and are left out")


def liger_knows(model: PreTrainedModel) -> bool:
    """Whether Liger has kernels for the model's family; else it leaves the model as it is, in silence."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # of an extra

    return model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def build_trainer(
    run: Runtime[SFTSettings],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Encoded],
    batch_size: int,
    longest: int,
) -> CheckpointedTrainer:
    """TRL's trainer; what it takes for a batch is the number of a step, whose rows it reads in passes of our cut."""
    settings = run.settings
    precision = run.accelerator.mixed_precision
    ours = {
        "output_dir": str(run.folder / "checkpoints"),
        "max_steps": run.num_steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(settings.warmup_share * run.num_steps),
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed % 2**32,  # what numpy takes
        "train_sampling_strategy": "sequential",  # steps are in order
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
    steps = [step for step in range(run.num_steps) for _ in range(run.num_processes)]  # one of each for each process
    trainer = CheckpointedTrainer(
        run,
        rows,
        batch_size,
        longest,
        model=model,
        args=SFTConfig(**{**ours, "remove_unused_columns": False, **settings.args}),
        train_dataset=Dataset.from_dict({"step": steps}),
        data_collator=lambda batch: batch[0],
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Reporter(run)],
    )
    trainer.remove_callback(PrinterCallback)
    run.in_memory = weights_in_memory(trainer.model)
    return trainer


@torch.no_grad()
def held_out_loss(
    run: Runtime[SFTSettings], model: PreTrainedModel, rows: Sequence[Encoded], reading: Reading
) -> float:
    """Mean loss per response token over all held-out rows, each counted once."""
    model.eval()
    settings = run.settings
    mine = sorted((rows[i] for i in run.shard(list(range(len(rows))))), key=lambda row: len(row.input_ids))
    share = max(settings.global_batch_size // run.num_processes, 1)
    losses = [torch.zeros((), device=run.device)]  # a process may have no row
    with as_written(reading.compiled):
        for some in (mine[start : start + share] for start in range(0, len(mine), share)):
            for cut in reading.cut(some, run.microbatch_size, settings.microbatch_tokens):
                passage = reading.passage([some[i] for i in cut])
                doing("evaluation", passage.ids, len(cut))
                with run.accelerator.autocast():
                    loss, _ = reading.losses(model, passage.to(run.device))
                losses.append(loss)
    total = torch.stack(losses).cpu().double().sum()
    loss, number = run.sum(torch.stack([total, torch.tensor(float(sum(map(num_targets, mine)))).double()])).tolist()
    return float(loss / number)
