"""A run on two machines of a Ray cluster with eight GPUs each, as a job of Ray Train: `ray job submit -- python …`.

One worker per machine, since the stages start processes of their own and handle signals, which a worker cannot.
"""

import os
import subprocess

from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

GPUS = 8
FOLDER = "/runs"  # a disk that all machines see, with machine.sh and the recipe


def machine() -> None:
    """This machine's part."""
    here = train.get_context()
    words = [f"{FOLDER}/machine.sh", f"{FOLDER}/mine.yaml", f"{FOLDER}/mine", str(here.get_world_rank())]
    words += [str(here.get_world_size()), str(GPUS), os.environ["MASTER_ADDR"], "stop_within=20"]
    subprocess.run(words, check=True)


TorchTrainer(
    machine,
    scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": GPUS}),
    torch_config=TorchConfig(backend="gloo"),  # the group of the workers themselves, of which nothing is asked
    run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
).fit()
