"""Pretraining: a BPE tokenizer and a Llama-shaped decoder from random weights, on packed blocks of raw text.

Run by hand: `accelerate launch -m rlhf.stages.pretrain FOLDER`, where FOLDER holds a settings.yaml.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from rlhf.data.collate import batch_indices, blocks
from rlhf.data.rows import read_text
from rlhf.data.tokens import ROLE_TOKENS, encode_documents, ensure_chat_template
from rlhf.stages.artifact import read_settings
from rlhf.stages.models import hand_over, save_folder
from rlhf.stages.optimizers import adamw, learning_rate_at, set_learning_rate
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.runtime import Runtime

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"


def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, PretrainSettings)
    run = Runtime(settings, folder)
    run.num_steps = settings.num_steps
    train_texts, eval_texts = read_documents(run)
    tokenizer = train_tokenizer(train_texts, settings)
    length = settings.block_size or settings.context_length
    rows = blocks(encode_documents(tokenizer, train_texts), length, "pretrain.data")
    held_out = encode_documents(tokenizer, eval_texts)
    # A small held-out text makes one block of its own length.
    eval_rows = blocks(held_out, max(min(length, len(held_out) - 1), 1), "pretrain.eval_data")
    batch_size = run.batch_size("global_batch_size", settings.global_batch_size, len(rows))
    model = build_model(settings, tokenizer)
    optimizer = adamw(model, settings.learning_rate, settings.weight_decay)
    model, optimizer = run.accelerator.prepare(model, optimizer)
    run.say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}, "
        f"{rows.numel():,} training tokens, {eval_rows.numel():,} held out"
    )
    best = folder / "checkpoints" / "best"
    start = run.resume()
    for step in range(start, settings.num_steps):
        learning_rate = learning_rate_at(
            step, settings.num_steps, settings.learning_rate, settings.warmup_steps, end_share=0.1
        )
        set_learning_rate(optimizer, learning_rate)
        batch = batch_indices(len(rows), batch_size, step, settings.seed)
        loss, grad_norm = optimise(run, model, optimizer, rows[batch])
        row = {"loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm}
        done = step + 1
        evaluate_now = done % settings.eval_every == 0 or done == settings.num_steps
        if evaluate_now:
            row["val_loss"] = validation_loss(run, run.unwrap(model), eval_rows)
            if row["val_loss"] < run.state.get("best_val_loss", math.inf):
                run.state |= {"best_val_loss": row["val_loss"], "best_step": done}
                run.on_main(lambda: save_folder(best, run.unwrap(model), tokenizer))
        run.log(done, row, force=evaluate_now)
        run.checkpoint(done)
    if "best_val_loss" not in run.state:
        raise RuntimeError("the validation loss was never a number; lower pretrain.learning_rate")
    run.on_main(lambda: shutil.copytree(best, folder / "model", dirs_exist_ok=True))
    metrics = {
        "val_loss": run.state["best_val_loss"],
        "best_step": run.state["best_step"],
        "vocab_size": len(tokenizer),
        "num_parameters": run.unwrap(model).num_parameters(),
    }
    return run.finish(metrics, hand_over(tokenizer, run.unwrap(model)))


def optimise(
    run: Runtime[PretrainSettings], model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> tuple[float, float]:
    """One optimiser step on blocks [B, T + 1]; returns the mean token loss and the gradient norm."""
    rows = run.shard(list(range(len(batch))))
    num_tokens = batch[:, 1:].numel()  # of the whole step, all processes: each token weighs the same
    total = torch.zeros((), device=run.device)
    for micro in run.microbatches(rows, model):
        losses = token_losses(model, batch[micro].to(run.device))
        loss = losses.sum() / num_tokens
        run.accelerator.backward(loss * run.num_processes)  # DDP averages gradients over processes
        total += loss.detach()
    run.count_tokens(len(rows) * (batch.shape[1] - 1))
    grad_norm = run.accelerator.clip_grad_norm_(model.parameters(), run.settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return run.sum(total).item(), float(grad_norm)


def token_losses(model: torch.nn.Module, blocks: Tensor) -> Tensor:
    """Cross entropy [B, T] of each next token, from blocks [B, T + 1]."""
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits.float()
    return cross_entropy(logits.transpose(1, 2), blocks[:, 1:], reduction="none")


@torch.no_grad()
def validation_loss(run: Runtime[PretrainSettings], model: torch.nn.Module, rows: Tensor) -> float:
    """Mean token loss over all held-out blocks, each counted once whatever the number of processes."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for some in run.chunks(len(rows), run.settings.global_batch_size):
        losses = token_losses(model, rows[some].to(run.device))
        total += torch.tensor([losses.sum().item(), losses.numel()], dtype=torch.float64)
    model.train()
    total = run.sum(total)
    return (total[0] / total[1]).item()


def read_documents(run: Runtime[PretrainSettings]) -> tuple[list[str], list[str]]:
    """Training and held-out texts. A single document is cut near its end, several are split by their hash."""
    settings = run.settings
    texts = read_text(settings.data, settings.max_dropped).rows
    if settings.eval_data is None and len(texts) == 1:
        border = int(len(texts[0]) * (1 - settings.eval_share))
        return [texts[0][:border]], [texts[0][border:]]
    given = read_text(settings.eval_data, settings.max_dropped).rows if settings.eval_data else None
    return run.split(texts, given, str)


def train_tokenizer(texts: list[str], settings: PretrainSettings) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the training texts, with one token per chat role; every text can be written in it."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END_OF_TEXT, PAD, *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS),
        model_max_length=settings.context_length,
        clean_up_tokenization_spaces=False,
    )
    ensure_chat_template(tokenizer)
    return tokenizer


def build_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Llama-shaped decoder (pre-norm RMSNorm, SwiGLU, RoPE, tied embeddings) with random weights."""
    width = settings.intermediate_size or -(-settings.hidden_size * 8 // 3 // 32) * 32
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=width,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads or settings.num_heads,
        max_position_embeddings=settings.context_length,
        initializer_range=settings.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_config(config)
