"""Pretraining: a tokenizer and a decoder from random weights, or a decoder trained further, on blocks of raw text.

Run by hand: `accelerate launch -m rlhf.stages.pretrain FOLDER`, where FOLDER holds a settings.yaml.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from rlhf.data.collate import Blocks, document_mask
from rlhf.data.errors import Diverged, SettingsError
from rlhf.stages.bad_numbers import how_to_go_on
from rlhf.stages.checkpoints import newest_checkpoint
from rlhf.stages.disk import copy_folder
from rlhf.stages.models import compile_layers, hand_over, save_folder
from rlhf.stages.optimizers import adamw, learning_rate_at, scaled_step, set_learning_rate, trained
from rlhf.stages.out_of_memory import doing, explained, weights_in_memory, within_memory
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.corpus import prepare
from rlhf.stages.pretrain.health import Health
from rlhf.stages.pretrain.model import flops_per_token, make_model, non_embedding_parameters
from rlhf.stages.pretrain.muon import Muon
from rlhf.stages.pretrain.objective import NextTokenLoss
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sharding import gathered
from rlhf.stages.text_limits import num_positions, stops_of


@explained
def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, PretrainSettings)
    run = Runtime(settings, folder)
    run.num_steps = settings.num_steps
    corpus = prepare(run)
    tokenizer, eos = corpus.tokenizer, corpus.tokenizer.eos_token_id
    name, size, each = settings.global_batch(corpus.block_size)
    batch_size = run.batch_size(name, size, len(corpus.rows), each)
    model = make_model(settings, tokenizer, spread=run.sharding is not None)
    prompts = sample_prompts(settings, model, tokenizer)
    run.flops_per_token = flops_per_token(model, corpus.block_size)
    run.in_memory = weights_in_memory(model)
    compiled = settings.compile and run.device.type == "cuda"
    if compiled and run.sharding:  # layers, for their weights come and go
        compile_layers(model)
    loss_of = run.spread(NextTokenLoss(model, compiled and not run.sharding))
    loss_of, *optimizers = run.accelerator.prepare(loss_of, *make_optimizers(model, settings))
    held_out = corpus.eval_rows
    run.say(
        f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer):,}, {corpus.rows.num_tokens:,} training "
        f"tokens, {held_out.num_tokens:,} held out (measured on {len(held_out):,} whole blocks of {held_out.length:,})"
    )
    run.seed(per_process=True)  # dropout differs between processes
    step, health = run.resume(), Health(settings, run.state)
    while step < settings.num_steps:
        rates = set_learning_rates(optimizers, settings, model.config.hidden_size, step)
        batch = corpus.rows.batch(step + health.state["data_offset"], batch_size, settings.seed)
        stats = optimise(run, loss_of, optimizers, batch, health.limit, eos)
        step += 1
        run.step_is_done(step)
        health.add(step, stats)
        is_last, stop = step == settings.num_steps, run.stop_requested()
        evaluate_now = is_last or step % settings.eval_every == 0
        told_now = evaluate_now or stop or step % settings.log_every == 0 or step % settings.save_every == 0
        fault = health.read(all_steps=told_now)
        if fault:
            run.say(f"skipped {fault}")
        if health.is_lost:
            step = go_back(run, health, fault)
            continue
        if not told_now:
            continue
        row: dict[str, Any] = {"num_tokens": step * batch_size * corpus.block_size, **rates}
        if health.is_well:
            row |= {"loss": health.loss}
            if math.isfinite(health.grad_norm):  # a scaler of float16 looks for its scale by overflowing
                row |= {"grad_norm": health.grad_norm}
        if evaluate_now:
            with run.clock_stopped(), run.phases.evaluation():
                row["val_loss"] = validation_loss(run, run.unwrap(loss_of), corpus.eval_rows, eos)
                if prompts:
                    with run.whole(loss_of, to_sample=True) as whole:
                        show_samples(run, whole.model, tokenizer, prompts, step)
            if row["val_loss"] < run.state.get("best_val_loss", math.inf):
                run.state |= {"best_val_loss": row["val_loss"], "best_step": step, "num_tokens": row["num_tokens"]}
                with run.whole(loss_of) as whole:
                    run.on_main(partial(save_folder, folder / "checkpoints" / "best", whole.model, tokenizer))
        run.log(step, row, force=evaluate_now)
        run.checkpoint(step, good=health.is_well)
        if evaluate_now and has_stalled(run, step):
            break
    run.on_main(lambda: copy_folder(folder / "checkpoints" / "best", folder / "model"))
    return run.finish(final_metrics(run, model, tokenizer), hand_over(tokenizer, model))


def make_optimizers(model: PreTrainedModel, settings: PretrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for all weights, or Muon for the matrices of the blocks and AdamW for the others."""
    weights = trained(model)
    matrices: list[torch.nn.Parameter] = []
    turned: set[int] = set()
    if settings.optimizer == "muon":
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        embeddings.add(id(model.get_output_embeddings().weight))
        matrices = [p for p in weights.values() if p.ndim == 2 and id(p) not in embeddings]
        turned = {id(m.weight) for m in model.modules() if isinstance(m, Conv1D)}  # GPT-2's, of inputs × outputs
    taken = {id(p) for p in matrices}
    others = [p for p in weights.values() if id(p) not in taken]
    found: list[torch.optim.Optimizer] = [adamw(others, 0.0, settings.weight_decay, settings.adam_beta2)]
    if matrices:
        plain, across = ([p for p in matrices if (id(p) in turned) == is_turned] for is_turned in (False, True))
        found.append(Muon(plain, 0.0, settings.weight_decay, turned=across))
    return found


def set_learning_rates(
    optimizers: list[torch.optim.Optimizer], settings: PretrainSettings, hidden_size: int, step: int
) -> dict[str, float]:
    """Set the rates of a step (from 0) in AdamW and, if it is there, Muon; returns them by name."""
    peak = settings.learning_rate
    if settings.schedule == "noam":
        peak = (1.0 if peak is None else peak) * hidden_size**-0.5
    peaks = {"learning_rate": 1e-3 if peak is None else peak, "muon_learning_rate": settings.muon_learning_rate}
    warmup = settings.warmup_steps
    warmup = round(warmup * settings.num_steps if warmup < 1 else warmup)
    if settings.schedule == "noam":  # whose highest rate is peak · warmup^-0.5
        peaks["muon_learning_rate"] *= max(warmup, 1) ** 0.5
    rates = {
        name: learning_rate_at(
            step, settings.num_steps, peak, warmup, settings.end_share, settings.schedule, settings.decay_share
        )
        for name, peak in list(peaks.items())[: len(optimizers)]
    }  # fmt: skip
    for optimizer, rate in zip(optimizers, rates.values(), strict=True):
        set_learning_rate(optimizer, rate)
    return rates


def optimise(
    run: Runtime[PretrainSettings],
    loss_of: torch.nn.Module,
    optimizers: list[AcceleratedOptimizer],
    batch: Tensor,
    limit: float,
    eos: int,
) -> Tensor:
    """One step on blocks [B, T + 1], unless its numbers are none or the loss is above `limit`.

    Returns [mean token loss, gradient norm, 1 if the step was skipped], still on the device.
    """
    rows = run.shard(list(range(len(batch))))
    num_tokens = batch[:, 1:].numel()  # of the whole step, all processes: each token weighs the same

    def gradients() -> Tensor:
        """Of this process's share; its loss."""
        total = torch.zeros((), device=run.device)
        for micro in run.microbatches(rows, loss_of):
            doing("the update", batch[micro])
            loss = loss_of(**inputs_of(run, batch[micro], eos)) / num_tokens
            run.backward(loss)
            total += loss.detach()
        return total

    total = within_memory(run, len(rows), gradients, loss_of)
    run.count_tokens(len(rows) * (batch.shape[1] - 1))
    norm = run.clip_gradients(loss_of, run.settings.max_grad_norm)
    loss, scaler = run.sum(total), run.accelerator.scaler
    if scaler is None:
        skipped = (~(torch.isfinite(loss + norm) & (loss <= limit))).float()
        for optimizer in optimizers:
            optimizer.optimizer.found_inf = skipped  # read on the device by torch's fused AdamW, and by our Muon
            optimizer.step()
            optimizer.zero_grad()
    else:
        skipped = (~(torch.isfinite(loss) & (loss <= limit))).float()
        scaled_step(scaler, [optimizer.optimizer for optimizer in optimizers], take=not skipped.item())
    return torch.stack([loss, norm, skipped])


def inputs_of(run: Runtime[PretrainSettings], blocks: Tensor, eos: int) -> dict[str, Tensor]:
    """Arguments of the loss, on the device: blocks [B, T + 1], and where asked, what keeps documents apart."""
    if run.device.type == "cuda":  # from memory that is not pinned, a copy waits until the device has done all before
        blocks = blocks.pin_memory()
    blocks = blocks.to(run.device, non_blocking=True)
    if run.settings.attend_across_documents:
        return {"blocks": blocks}
    position_ids, attention_mask = document_mask(blocks[:, :-1], eos)
    return {"blocks": blocks, "position_ids": position_ids, "attention_mask": attention_mask}


def go_back(run: Runtime[PretrainSettings], health: Health, fault: str | None) -> int:
    """Load the last checkpoint, data order moved on; returns its step. Raises Diverged when that was enough."""
    lost = dict(run.state)
    cure = "training diverged; lower pretrain.learning_rate"
    if len(lost["rollbacks"]) >= run.settings.max_rollbacks:
        newest = run.from_main(lambda: newest_checkpoint(run.folder))
        to_go_on = how_to_go_on(newest.step if newest else None)
        raise Diverged(f"{fault}, after going back {len(lost['rollbacks'])} times: {cure}. {to_go_on}")
    back = run.go_back()
    if back is None:
        raise RuntimeError(f"{fault}, and no checkpoint to go back to: {cure}, or pretrain.save_every")
    health.went_back(back, lost, str(fault))
    run.say(f"went back from step {health.step} to {back}; goes on with other data")
    return back


@torch.no_grad()
def validation_loss(run: Runtime[PretrainSettings], loss_of: NextTokenLoss, rows: Blocks, eos: int) -> float:
    """Mean token loss over all held-out blocks, each counted once whatever the number of processes."""
    loss_of.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with gathered(loss_of):
        for some in run.chunks(len(rows), run.settings.global_batch(rows.length)[1]):
            blocks = rows[some]
            doing("evaluation", blocks)
            with run.accelerator.autocast():
                loss = loss_of.losses(**inputs_of(run, blocks, eos))
            total += torch.tensor([loss.item(), blocks[:, 1:].numel()], dtype=torch.float64)
    loss_of.train()
    total = run.sum(total)
    return (total[0] / total[1]).item()


def sample_prompts(
    settings: PretrainSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Ids of the texts that samples go on with. Raises SettingsError for one that is empty or leaves no room."""
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in settings.sample_prompts]
    for text, ids in zip(settings.sample_prompts, prompts, strict=True):
        if not 0 < len(ids) < num_positions(model):
            raise SettingsError(
                f"pretrain.sample_prompts: {text!r} has {len(ids)} tokens; the model has {num_positions(model)} "
                "positions, and a sample needs one token at least to begin with and one more to go on"
            )
    return prompts


def show_samples(
    run: Runtime[PretrainSettings],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    step: int,
) -> None:
    """Let the model go on with the texts of `sample_prompts`; the training's random stream is left as it was."""
    settings = run.settings
    if not run.is_main:
        return
    from rlhf.stages.engines.choice import make_engine  # and PEFT with it, which takes seconds that no start should

    doing("sampling")
    model.eval()
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        room = num_positions(model) - max(map(len, prompts))
        length, stops = min(settings.sample_length, room), stops_of(model, tokenizer)
        engine = make_engine(model, dtype=run.low_precision)
        found = engine.generate(prompts, length, 1.0, stops, tokenizer.pad_token_id).tokens
    model.train()
    with (run.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        for prompt, ids in zip(settings.sample_prompts, found, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            run.say(f"step {step}:\n{prompt}{text}")
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")


def has_stalled(run: Runtime[PretrainSettings], step: int) -> bool:
    """Whether the last `early_stopping_patience` validation losses brought no new best one."""
    patience = run.settings.early_stopping_patience
    stalled = patience is not None and step - run.state["best_step"] >= patience * run.settings.eval_every
    if stalled and step < run.settings.num_steps:
        run.say(f"stops early at step {step}: no better validation loss since step {run.state['best_step']}")
    return stalled


def final_metrics(
    run: Runtime[PretrainSettings], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What the manifest says of the best checkpoint."""
    return {
        "val_loss": run.state["best_val_loss"],
        "best_step": run.state["best_step"],
        "num_tokens": run.state["num_tokens"],
        "vocab_size": len(tokenizer),
        "num_parameters": model.num_parameters(),
        "num_non_embedding_parameters": non_embedding_parameters(model),
        "rollbacks": run.state["rollbacks"],
    }
