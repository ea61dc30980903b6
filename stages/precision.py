"""In which floating-point type a stage multiplies: what is asked for, and what the device can do."""

import torch

from rlhf.data.errors import RefusedError


def choose_precision(precision: str, stage: str) -> str:
    """Accelerate's name for the autocast type; refuses what the device cannot do."""
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto" and not bf16:  # PPO's ratios and scores are not tried in float16
        return "fp16" if stage == "pretrain" and torch.cuda.is_available() else "no"
    if precision == "auto":
        return "bf16"
    if precision == "tf32" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)):
        raise RefusedError(f"{stage}.precision: tf32 is not supported by this device; use auto or fp32")
    if precision == "fp16" and not torch.cuda.is_available():
        raise RefusedError(f"{stage}.precision: fp16 needs a GPU and there is none; use auto or fp32")
    if precision == "bf16" and not bf16:
        raise RefusedError(f"{stage}.precision: bf16 is not supported by this device; use auto or fp32")
    return {"fp32": "no", "tf32": "no"}.get(precision, precision)


def half(device: torch.device) -> torch.dtype:
    """What a model is read in where nothing is learned: bfloat16 where a GPU has it, else float32."""
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_it else torch.float32


def use_precision(setting: str, autocast: str) -> str:
    """Let matrices in float32 be multiplied in TF32 where that is precise enough; what is multiplied in, in words.

    Beside an autocast type it is: its own numbers are coarser, and sums are in float32 all the same.
    """
    torch.set_float32_matmul_precision("highest" if setting != "tf32" and autocast == "no" else "high")
    return setting if setting == "tf32" else {"no": "fp32"}.get(autocast, autocast)
