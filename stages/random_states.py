"""Random streams and fp16's loss scale in a checkpoint, a file for each process. Accelerate writes and reads them."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import load as load_file


def save(folder: Path, accelerator: Accelerator) -> None:
    """Write those of this process into `folder`."""
    save_accelerator_state(str(folder), [], [], [], [], accelerator.process_index, 0, accelerator.scaler)


def load(folder: Path, accelerator: Accelerator) -> None:
    """Go on with those that `save` wrote, as far as they can be used here."""
    load_accelerator_state(str(folder), [], [], [], [], accelerator.process_index, accelerator.scaler)


def check(folder: Path, accelerator: Accelerator) -> None:
    """Raise RuntimeError where `load` did not take them all: Accelerate passes silently over what it cannot restore."""
    saved = load_file(folder / f"random_states_{accelerator.process_index}.pkl")
    same, device = torch.equal(saved["torch_manual_seed"], torch.get_rng_state()), accelerator.device
    if device.type == "cuda":  # the last that accelerate restores
        same &= torch.equal(saved["torch_cuda_manual_seed"][device.index or 0], torch.cuda.get_rng_state(device))
    if not same:
        raise RuntimeError(f"{folder}: its random states could not be restored")
