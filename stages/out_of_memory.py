"""When memory runs out: one message that a person can act on, and `auto_microbatch`, which tries with less.

The idea of the latter is Accelerate's `find_executable_batch_size`; here the global batch stays what it is. It is for
one process: where there are several, one that runs out of memory leaves the others waiting in a reduction of
gradients that it never reaches, and nothing can be agreed upon from there.
"""

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlhf.data.errors import first_line
from rlhf.stages import logs, watchdog

if TYPE_CHECKING:
    from rlhf.stages.runtime import Runtime

T = TypeVar("T")
GIB = 2**30

_TELLS = ("can't allocate memory", "out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What other RuntimeErrors say: torch's allocators, also on a CPU, and CUDA's libraries."""

_SMALLER_STEPS = {
    "pretrain": ("microbatch_size", "gradient_checkpointing", "block_size", "hidden_size", "num_layers"),
    "sft": ("microbatch_size", "args", "max_length", "lora", "model"),
    "reward": ("microbatch_size", "max_length", "lora", "model"),
    "ppo": ("microbatch_size", "gradient_checkpointing", "layout", "offload", "max_new_tokens", "max_prompt_length"),
}
"""Settings that may be lowered, those first that cost least."""
_SMALLER_SAMPLES = {
    "pretrain": ("sample_length", "context_length", "hidden_size"),
    "reward": ("max_new_tokens", "max_length", "model"),
    "ppo": ("generation_batch_size", "layout", "offload", "max_new_tokens", "max_prompt_length", "model"),
}
_SMALLER_MODELS = {
    "pretrain": ("hidden_size", "num_layers", "vocab_size"),
    "sft": ("lora", "model", "max_length", "microbatch_size"),
    "reward": ("lora", "model", "max_length", "microbatch_size"),
    "ppo": ("layout", "offload", "model", "reward_model", "max_new_tokens"),
}
_HOW = {
    "gradient_checkpointing": "(true)", "args": "(activation_checkpointing: true)", "lora": "(trains adapters only)",
    "layout": "(adapters)", "offload": "(true)", "model": "(a smaller one)", "reward_model": "(a smaller one)",
}  # fmt: skip


class OutOfMemory(RuntimeError):
    """The text says where, how much was asked for, and what to lower."""


@dataclass
class _Now:
    """What is being done. One stage runs at a time in a process."""

    phase: str = "loading"
    shape: tuple[int, ...] = ()
    num_rows: int = 0
    """That are read together, in the unit of `microbatch_size`; 0 where that is not said."""
    run: "Runtime[Any] | None" = None


_now = _Now()


def begin(run: "Runtime[Any]") -> None:
    """A stage begins: it loads its data and models."""
    _now.phase, _now.shape, _now.num_rows, _now.run = "loading", (), 0, run


def doing(phase: str, ids: torch.Tensor | None = None, num_rows: int = 0) -> None:
    """Note what begins now, for the message and the clock of phases; `ids` [rows, tokens] are what is read, of
    `num_rows` in a forward pass."""
    _now.phase, _now.shape, _now.num_rows = phase, () if ids is None else tuple(ids.shape), num_rows
    watchdog.moved(phase)
    if _now.run is not None:
        _now.run.phases.begin(phase)


def explained(train: Callable[..., T]) -> Callable[..., T]:
    """Of a stage's `train`: an error of memory in it, wherever, becomes an OutOfMemory."""

    @functools.wraps(train)
    def train_explained(*arguments: Any, **named: Any) -> T:
        _now.run = None
        try:
            return train(*arguments, **named)
        except Exception as error:
            if _now.run is None or not is_out_of_memory(error):
                raise
            raise OutOfMemory(_message(_now.run, first_line(error))) from error
        finally:
            _now.run = None

    return train_explained


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it came of, is about memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TELLS):
            return True
        error = error.__cause__
    return False


def within_memory(run: "Runtime[Any]", num_rows: int, make: Callable[[], T], *models: torch.nn.Module) -> T:
    """What `make` returns; with `auto_microbatch` it is called again with half the microbatch when memory runs out.

    `make` reads `num_rows` in microbatches of `run.microbatch_size`, or samples them as many at a time as `at_once`
    says, and changes nothing but gradients of the `models`, which are dropped before it is tried again from the same
    random state: the result is what it would have been.
    """
    if not run.settings.auto_microbatch:
        return make()
    while True:
        before = _random_states(run.device)
        try:
            return make()
        except Exception as error:
            if not is_out_of_memory(error) or not halve(run, num_rows):
                raise
        from rlhf.stages.lora_layers import forget  # PEFT takes a second to import

        for model in models:  # not before the handler is left: until then the error holds what the failed pass made
            model.zero_grad(set_to_none=True)
            forget(model)
        let_go(run.device)
        _restore(before, run.device)


def halve(run: "Runtime[Any]", num_rows: int) -> bool:
    """Halve what `num_rows` are read or sampled in, say so and record it; False where it is one row already."""
    name = _bound(run)
    size = min(at_once(run, name) or num_rows, _now.num_rows or num_rows, num_rows)
    if size == 1:
        return False
    smaller = size // 2
    run.state[name] = smaller
    run.say(f"out of memory in {_where()}: {name} {size} → {smaller}, the global batch stays as it is")
    return True


def at_once(run: "Runtime[Any]", name: str) -> int | None:
    """Rows that are read (`microbatch_size`) or sampled (`generation_batch_size`) at a time: the setting, or what
    `auto_microbatch` has come down to; None: all."""
    sizes = (getattr(run.settings, name), run.state.get(name))
    return min((size for size in sizes if size), default=None)


def let_go(device: torch.device) -> None:
    """Give memory back that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def weights_in_memory(*models: torch.nn.Module) -> str:
    """What models need for the whole run, in words: weights, and of what is trained gradients and AdamW's moments."""
    weights = {id(p): p for model in models for p in model.parameters()}.values()
    trained = sum(p.numel() for p in weights if p.requires_grad)
    needed = sum(p.nbytes for p in weights) + 12 * trained
    number = sum(p.numel() for p in weights)
    return f"{number:,} weights, {trained:,} of them trained, with gradients and moments up to {needed / GIB:.2f} GiB"


def _random_states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def _where() -> str:
    if len(_now.shape) != 2:
        return _now.phase
    rows, tokens = _now.shape
    if rows == 1 and _now.num_rows > 1:
        return f"{_now.phase} of {_now.num_rows} rows packed into {tokens} tokens"
    return f"{_now.phase} of {rows} rows × {tokens} tokens"


def _bound(run: "Runtime[Any]") -> str:
    """The setting that says how much is done at a time in this phase."""
    name = "generation_batch_size"
    return name if _now.phase == "sampling" and hasattr(run.settings, name) else "microbatch_size"


def _message(run: "Runtime[Any]", said: str) -> str:
    name = _bound(run)
    limits = f"{name}: {at_once(run, name) or 'no limit'}"
    if name == "microbatch_size" and hasattr(run.settings, "microbatch_tokens"):
        limits += f", microbatch_tokens: {run.settings.microbatch_tokens}"
    needs = f"; needed all the time: {run.in_memory}" if run.in_memory else ""
    return f"out of memory in {_where()} ({limits}); {_memory(run.device)}{needs}; lower {_to_lower(run)} ({said})"


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"{torch.cuda.get_device_name(device)} has {total / GIB:.1f} GiB, {free / GIB:.1f} free; "
            f"tensors here take {held / GIB:.1f}, {reserved / GIB:.1f} with what torch keeps for new ones"
        )
    page = os.sysconf("SC_PAGE_SIZE") / GIB
    installed, unused = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    took = logs.peak_memory(device) / GIB
    return f"this machine has {installed:.1f} GiB, {unused:.1f} free; this process took {took:.1f} at most"


def _to_lower(run: "Runtime[Any]") -> str:
    """Three settings that are not at their end yet, first those that help most in this phase."""
    settings, stage = run.settings, run.settings.stage
    at_their_end = {
        "microbatch_size": at_once(run, "microbatch_size") == 1,
        "generation_batch_size": stage == "ppo" and at_once(run, "generation_batch_size") == 1,
        "gradient_checkpointing": getattr(settings, "gradient_checkpointing", False),
        "args": "activation_checkpointing" in getattr(settings, "args", {}),
        "lora": getattr(settings, "lora", None) is not None,
        "layout": getattr(settings, "layout", None) == "adapters",
        "offload": getattr(settings, "offload", False) or getattr(settings, "layout", None) == "adapters",
    }
    names = {"loading": _SMALLER_MODELS, "saving": _SMALLER_MODELS, "sampling": _SMALLER_SAMPLES}.get(
        _now.phase, _SMALLER_STEPS
    )[stage]
    words = [f"{stage}.{name} {_HOW.get(name, '')}".rstrip() for name in names if not at_their_end.get(name)]
    return ", ".join(words[:2]) + f" or {words[2]}"
