"""The templates under docs/clusters: what they hand to machine.sh, and what that starts. No scheduler is here to try
them: their keys are held against those of the projects' own documentation."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from rlhf.pipeline.accelerate_config import refuse_bad_configs
from rlhf.pipeline.recipe import Recipe
from rlhf.stages.sft.config import SFTSettings

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "clusters"
MACHINE_1 = ["/runs/mine.yaml", "/runs/mine", "1", "2", "8", "10.0.0.1"]
"""What the second of two machines is told."""


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that are found first; `python` is this one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    write_command(folder / "python", f'exec {sys.executable} "$@"')
    return folder


def write_command(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def shell(script: str, cwd: Path, *words: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", "-c", script, *words], cwd=cwd, env=os.environ | variables, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(folder: Path, script: str, **variables: str) -> list[str]:
    """What a template's script gives to machine.sh."""
    for path in (folder / "runs" / "machine.sh", folder / "docs" / "clusters" / "machine.sh"):
        write_command(path, 'printf "%s\\n" "$@"')
    said = shell(script.replace("/runs/machine.sh", str(folder / "runs" / "machine.sh")), folder, **variables)
    return said.splitlines()


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def keys(content: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all that a document sets; items of a list have no name."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield f"{prefix}{key}"
            yield from keys(value, f"{prefix}{key}.")
    elif isinstance(content, list):
        for value in content:
            yield from keys(value, prefix)


@pytest.mark.parametrize("name", ["machine.sh", "slurm.sbatch"])
def test_scripts_are_valid_shell(name: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_the_first_machine_runs_the_recipe_with_a_config_for_all_machines(tmp_path: Path, bin_folder: Path) -> None:
    write_command(bin_folder / "rlhf", 'printf "%s\\n" "$@"')
    words = ["mine.yaml", "shared/mine", "0", "2", "8", "10.0.0.1", "stop_within=60"]
    said = shell(f'{FOLDER / "machine.sh"} "$@"', tmp_path, "bash", *words, PRESET="fsdp2", PORT="29999").splitlines()
    config = "shared/mine.machines.yaml"
    assert said == ["run", "mine.yaml", "--run-dir", "shared/mine", f"accelerate_config={config}", "stop_within=60"]
    found = load_config_from_file(str(tmp_path / config))
    assert (found.num_machines, found.num_processes, found.machine_rank) == (2, 16, 0)
    assert (found.main_process_ip, found.main_process_port) == ("10.0.0.1", 29999)
    assert (found.distributed_type.value, found.fsdp_config["fsdp_version"]) == ("FSDP", 2)
    recipe = Recipe(accelerate_config=str(tmp_path / config), sft=SFTSettings(data="d.jsonl"))
    refuse_bad_configs(recipe, ["sft"], 8, lambda _: pytest.fail("nothing in it is without effect"))


def test_the_other_machines_follow(tmp_path: Path, bin_folder: Path) -> None:
    write_command(bin_folder / "rlhf", 'printf "%s\\n" "$@"')
    said = shell(f'{FOLDER / "machine.sh"} "$@"', tmp_path, "bash", *MACHINE_1).splitlines()
    assert said == ["follow", "/runs/mine", "1"]


def test_slurm_starts_one_part_per_machine_and_queues_a_stopped_run_again(tmp_path: Path, bin_folder: Path) -> None:
    write_command(bin_folder / "scontrol", '[ "$1" = show ] && echo node7 && echo node8 || echo "$@"')
    write_command(bin_folder / "srun", 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID=1 "$@"; exit $CODE')
    write_command(tmp_path / "machine.sh", 'echo "$PORT $@"')
    slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "4711", "SLURM_NNODES": "2",
             "SLURM_SUBMIT_DIR": str(tmp_path)}  # fmt: skip
    script = f"bash {FOLDER / 'slurm.sbatch'} /runs/mine.yaml /runs/mine; echo $?"
    machine = "30211 /runs/mine.yaml /runs/mine 1 2 8 node7 stop_within=60"
    assert shell(script, tmp_path, CODE="0", **slurm).splitlines() == [machine, "0"]
    assert shell(script, tmp_path, CODE="143", **slurm).splitlines() == [machine, "requeue 4711", "143"]
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    options = {line.removeprefix("#SBATCH --").split("=")[0] for line in lines if line.startswith("#SBATCH")}
    assert options == {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue",
        "open-mode", "output",
    }  # fmt: skip


def test_a_signal_of_slurm_reaches_the_machines_and_the_job_is_queued_again(tmp_path: Path, bin_folder: Path) -> None:
    write_command(bin_folder / "scontrol", '[ "$1" = show ] && echo node7 || echo "$@"')
    write_command(bin_folder / "srun", "trap 'echo saved; exit 143' USR1; kill -USR1 $PPID; for i in {1..99}; do "
                  "sleep 0.1; done")  # fmt: skip
    said = shell(
        f"bash {FOLDER / 'slurm.sbatch'} r d; echo $?", tmp_path, SLURM_GPUS_ON_NODE="8", SLURM_JOB_NODELIST="n",
        SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_SUBMIT_DIR=".",
    )  # fmt: skip
    assert said.splitlines() == ["saved", "requeue 1", "143"]


def test_kubeflow_tells_each_machine_its_number(tmp_path: Path) -> None:
    runtime, job = documents("kubeflow.yaml")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["bash", "-c"]
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_NPROC_PER_NODE": "8"}
    assert told(tmp_path, trainer["args"][0], **pet) == [*MACHINE_1, "stop_within=60"]
    assert {document["apiVersion"] for document in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {
        "name": runtime["metadata"]["name"], "kind": runtime["kind"], "apiGroup": "trainer.kubeflow.org",
    }  # fmt: skip
    assert set(keys(job["spec"])) <= {
        "runtimeRef", "runtimeRef.name", "runtimeRef.kind", "runtimeRef.apiGroup", "trainer", "trainer.numNodes",
        "trainer.command", "trainer.args", "trainer.resourcesPerNode", "trainer.resourcesPerNode.limits",
        "trainer.resourcesPerNode.limits.nvidia.com/gpu",
    }  # fmt: skip
    assert set(keys(runtime["spec"])) >= {"mlPolicy.numNodes", "mlPolicy.torch", "template.spec.replicatedJobs.name"}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > 60  # stop_within and a little more


def test_skypilot_tells_each_machine_its_number(tmp_path: Path) -> None:
    [task] = documents("skypilot.yaml")
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    said = told(tmp_path, task["run"], SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", **sky)
    assert said == [*MACHINE_1, "stop_within=20"]
    assert set(keys(task)) == {
        "name", "num_nodes", "workdir", "resources", "resources.infra", "resources.accelerators",
        "resources.job_recovery", "resources.job_recovery.max_restarts_on_errors", "volumes", "volumes./runs", "setup",
        "run",
    }  # fmt: skip


def test_dstack_tells_each_machine_its_number(tmp_path: Path) -> None:
    [task] = documents("task.dstack.yml")
    [command] = task["commands"]
    dstack = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_GPUS_PER_NODE": "8"}
    assert told(tmp_path, command, DSTACK_MASTER_NODE_IP="10.0.0.1", **dstack) == [*MACHINE_1, "stop_within=20"]
    assert set(keys(task)) == {
        "type", "name", "nodes", "image", "shell", "commands", "volumes", "resources", "resources.gpu",
        "resources.shm_size", "retry", "retry.on_events", "retry.duration",
    }  # fmt: skip
    assert set(task["retry"]["on_events"]) <= {"no-capacity", "interruption", "error"}


def test_ray_starts_one_worker_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    context = SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 2)
    train, of_torch, ray = ModuleType("ray.train"), ModuleType("ray.train.torch"), ModuleType("ray")

    class Trainer:
        def __init__(self, machine: Any, scaling_config: dict[str, Any], **_: Any) -> None:
            assert scaling_config == {"num_workers": 2, "use_gpu": True, "resources_per_worker": {"GPU": 8}}
            self.fit = machine

    for name in ("FailureConfig", "RunConfig", "ScalingConfig"):
        setattr(train, name, dict)
    train.get_context = lambda: context  # type: ignore[attr-defined]
    of_torch.TorchConfig, of_torch.TorchTrainer = dict, Trainer  # type: ignore[attr-defined]
    ray.train = train  # type: ignore[attr-defined]
    for module in (ray, train, of_torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(subprocess, "run", lambda words, check: started.append(words))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    runpy.run_path(str(FOLDER / "ray_train.py"))
    assert started == [["/runs/machine.sh", *MACHINE_1, "stop_within=20"]]


def test_the_commands_in_the_documentation_are_ones_that_the_launchers_know() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["accelerate", "launch"]:
                options = launch_command_parser().parse_args(words[2:])
                found.append((options.training_script, options.num_machines, options.num_processes))
            elif words[:1] == ["torchrun"]:
                options = get_args_parser().parse_args(words[1:])
                found.append((options.training_script, options.nnodes, options.nproc_per_node))
                assert (options.rdzv_backend, options.max_restarts, options.module) == ("c10d", 10, True)
            elif words[:1] == ["machine.sh"]:
                found.append(("machine.sh", *words[3:5]))
    assert found == [
        ("rlhf.stages.sft", None, 8),
        ("machine.sh", "0", "2"),
        ("machine.sh", "1", "2"),
        ("rlhf.stages.pretrain", 2, 16),
        ("rlhf.stages.pretrain", "2:4", "8"),
    ]


def test_the_variables_that_the_documentation_names_are_ones_of_the_installed_torch() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"TORCH_(?:NCCL|FR)_[A-Z_]+", page))
    assert len(named) > 5
    headers = (Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d").glob("*.hpp")
    known = set(re.findall(r"TORCH_(?:NCCL|FR)_[A-Z_]+", " ".join(path.read_text() for path in headers)))
    # Where a recording is written is not in a header.
    assert named - known == {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}


def test_links_from_the_pages_of_clusters_lead_somewhere() -> None:
    for page in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[)#]", page.read_text(encoding="utf-8")):
            assert (FOLDER / target).exists(), f"{page.name} links to {target}"
