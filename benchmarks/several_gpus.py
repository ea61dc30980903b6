"""Stages on 1, 2, 4 … GPUs of one machine: weak scaling, equal curves, a 7B model spread over the cards, second GPUs.

    python benchmarks/several_gpus.py scaling             pretrain 124m and PPO 1b, a copy of the model on each GPU
    python benchmarks/several_gpus.py sharded             PPO of the 7B shape, spread over all GPUs (FSDP2)
    python benchmarks/several_gpus.py curves [--plot SVG] the same steps on each number of GPUs: training losses
    python benchmarks/several_gpus.py placement [1b]      scoring models on a second GPU, and sampling one step off
    python benchmarks/several_gpus.py memory              on one GPU: what one process of many takes, and the plan of it
    python benchmarks/several_gpus.py … --small           tiny models, and on CPUs where there is no GPU, to try it
                                                          (not placement, which wants two)

`--processes 1 2 4` says on how many; by default all of these that are there. `--settings` are further ones of PPO, as
JSON, such as {"weights": "bf16", "compile": true}. Each line is a launch of its own, by
`accelerate launch` with a shipped config, of a stage's own `train`, which is left after some steps. In weak scaling
each process has the same share of a batch whatever their number; `efficiency` is the rate of a process over that of one
alone. Rates are medians over the steps that are logged, the first left out; GiB is the highest of any process, and
`planned` is what `rlhf estimate` says of that.

For `memory` the other processes are played: what they would send is left out, or is what this one sends. Its numbers
are not those of a training, but it allocates what it would. (On a CPU, GiB has all in it that Python and its libraries
take: next to tiny models that is most of it.)
"""

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from ppo_step import LLAMA3, SIZES, make_world
from worlds import planned

PRETRAIN = {"preset": ["gpt3-125m", "llama"], "context_length": 1024, "compile": True}
SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "context_length": 64}
ROWS = {False: 32, True: 4}
"""Blocks of a process in a pretraining step: at full size, and of `--small`."""
VOCABULARY = {False: 50304, True: 500}
ROWS_LOGGED = 5
SIZES["7b"] = {
    "shape": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 1024,
    },
    "prompts": 16, "prompt_tokens": 128, "new_tokens": 256, "microbatch": 4, "half": True, "reward": "whole",
}  # fmt: skip
SIZES["tiny"] = {
    "shape": {**LLAMA3, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "prompts": 8, "prompt_tokens": 8, "new_tokens": 16, "microbatch": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A line of a table: a stage with settings, on so many processes."""

    stage: str
    settings: dict[str, Any]
    processes: int
    config: str = "ddp"
    rows: int = ROWS_LOGGED
    """Lines of metrics after which it is left."""
    played: bool = False
    """Whether all processes but the first are played."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("what", nargs="?", choices=("scaling", "sharded", "curves", "placement", "memory"))
    parser.add_argument("size", nargs="?", default="1b", choices=sorted(SIZES), help="of PPO's models (placement)")
    parser.add_argument("--processes", nargs="+", type=int, help="by default 1, 2, 4 and 8, as many as there are GPUs")
    parser.add_argument("--small", action="store_true", help="tiny models, to try it")
    parser.add_argument("--only", choices=("pretrain", "ppo"), help="of scaling: this stage alone")
    parser.add_argument("--settings", type=json.loads, default={}, help="further settings of PPO, as JSON")
    parser.add_argument("--plot", type=Path, help="of curves: draw them into this SVG")
    parser.add_argument("--child", nargs=4, metavar=("STAGE", "FOLDER", "ROWS", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child[0], *map(Path, options.child[1::2]), num_rows=int(options.child[2]))
        return
    if options.what is None:
        parser.error("say what: scaling, sharded, curves, placement or memory")
    import torch

    num_gpus = torch.cuda.device_count()
    processes = options.processes or [n for n in (1, 2, 4, 8) if n <= max(num_gpus, 1)]
    name = torch.cuda.get_device_name() if num_gpus else f"{platform.machine()}, {os.cpu_count()} cores, gloo"
    print(f"{date.today()}, {max(num_gpus, 1)} x {name}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tables = {"scaling": scaling, "sharded": sharded, "curves": curves, "placement": placement, "memory": memory}
        if options.what == "memory":
            processes = options.processes or [2, 4, 8]
        tables[options.what](options, Path(folder), processes)


def scaling(options: argparse.Namespace, home: Path, processes: list[int]) -> None:
    """A table per stage: the rate of each number of processes, and what share of their sum it is."""
    if options.only != "ppo":
        table(
            f"pretrain {'tiny' if options.small else '124m'}, tokens/s",
            [(n, measure(pretrain(home, n, options.small))) for n in processes],
        )
    if options.only != "pretrain":
        size = "tiny" if options.small else "1b"
        make_world(home / "world", size)
        table(f"PPO {size}, samples/s", [(n, measure(ppo(home, size, n, options.settings))) for n in processes])


def table(title: str, found: list[tuple[int, dict[str, Any]]]) -> None:
    columns = f"{'processes':>10}{'rate':>14}{'s/row':>10}{'efficiency':>12}{'GiB each':>10}{'planned':>10}"
    print(f"{title}\n{columns}", flush=True)
    alone = found[0][1]["rate"] / found[0][0]
    for number, one in found:
        efficiency = one["rate"] / number / alone
        print(
            f"{number:10}{one['rate']:14,.1f}{one['seconds']:10.3f}{efficiency:12.3f}{one['gib']:10.2f}"
            f"{one['planned']:10.2f}", flush=True,
        )  # fmt: skip


def sharded(options: argparse.Namespace, home: Path, processes: list[int]) -> None:
    """One PPO iteration and the next of a model that one card cannot train."""
    size, number = ("tiny" if options.small else "7b"), processes[-1]
    make_world(home / "world", size)
    more = {"gradient_checkpointing": True, "weights": "bf16"} if size == "7b" else {}
    launch = ppo(home, size, number, more | options.settings)
    found = measure(Launch("ppo", launch.settings, number, "fsdp2", rows=2))
    print(
        f"PPO {size}, FSDP2 on {number}: {found['seconds']:.2f} s an iteration (the first {found['first']:.1f}), "
        f"{found['rate']:.2f} samples/s, {found['gib']:.2f} GiB on the fullest, {found['planned']:.2f} planned",
        flush=True,
    )  # fmt: skip


def placement(options: argparse.Namespace, home: Path, processes: list[int]) -> None:
    """An iteration with all roles together, with two of them on a second GPU, and with sampling one step off."""
    size = "tiny" if options.small else options.size
    make_world(home / "world", size)
    asked = {
        "together": {},
        "second_gpu": {"placement": "second_gpu"},
        "second_gpu, one_step_off": {"placement": "second_gpu", "rollout": {"one_step_off": True}},
    }
    print(f"PPO {size}\n{'':26}{'s/iteration':>12}{'rollout':>10}{'scoring':>10}{'update':>10}{'GiB':>8}", flush=True)
    for name, more in asked.items():
        one = measure(ppo(home, size, 1, more | options.settings))
        phases = "".join(f"{one['phases'].get(phase, 0.0):10.2f}" for phase in ("rollout", "scoring", "update"))
        print(f"{name:26}{one['seconds']:12.2f}{phases}{one['gib']:8.2f}", flush=True)


def memory(options: argparse.Namespace, home: Path, processes: list[int]) -> None:
    """GiB of a process of PPO, by layout and number of processes."""
    size = "tiny" if options.small else options.size
    make_world(home / "world", size)
    print(f"PPO {size}, one process of several\n{'processes':>10}{'layout':>10}{'GiB':>10}{'planned':>10}", flush=True)
    for number in processes:
        for layout in ("ddp", "zero2", "fsdp2") if size != "7b" else ("fsdp2",):
            more = {"gradient_checkpointing": True, "weights": "bf16"} if size == "7b" else {}
            launch = ppo(home, size, number, more | options.settings)
            found = measure(Launch("ppo", launch.settings, number, layout, rows=2, played=True))
            print(f"{number:10}{layout:>10}{found['gib']:10.2f}{found['planned']:10.2f}", flush=True)


def curves(options: argparse.Namespace, home: Path, processes: list[int]) -> None:
    """Losses of the same steps on each number of processes: how far they are from those on one, and a drawing.

    The text is Python's own library. How far rounding alone leads tells a second run on the first number of processes,
    which differs in its microbatches.
    """
    number, batch = (40 if options.small else 300), 64
    text = home / "library.jsonl"
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text.write_text("".join(json.dumps({"text": file.read_text("utf-8", "replace")}) + "\n" for file in files))
    settings = {
        "data": str(text), "vocab_size": 512,
        **(SMALL if options.small else {"hidden_size": 384, "num_layers": 6, "num_heads": 6, "context_length": 256}),
        "seed": 0, "global_batch_size": batch, "learning_rate": 1e-3, "num_steps": number + 1, "log_every": 1,
        "eval_every": 1000, "save_every": 1000, "report_to": [],
    }  # fmt: skip
    first = processes[0]
    asked = {f"{n} process" + "es" * (n > 1): (n, settings) for n in processes}
    asked[f"{first}, other microbatches"] = (first, settings | {"microbatch_size": batch // first // 4})
    found: dict[str, list[float]] = {}
    print(f"{'':24}{'loss of step ' + str(number):>20}{'apart at most':>16}{'at the median':>16}", flush=True)
    for name, (n, its) in asked.items():
        found[name] = measure(Launch("pretrain", its, n, rows=number))["losses"]
        apart = [abs(a - b) for a, b in zip(found[name], next(iter(found.values())), strict=True)]
        print(f"{name:24}{found[name][-1]:20.4f}{max(apart):16.1e}{statistics.median(apart):16.1e}", flush=True)
    if options.plot:
        draw(options.plot, found)


def draw(path: Path, found: dict[str, list[float]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2))
    for width, (name, losses) in zip((5, 3.5, 2, 1, 0.6), found.items(), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="training loss, nats per token")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def pretrain(home: Path, processes: int, small: bool) -> Launch:
    """Steps on a text of random words, which is tokenised once."""
    from worlds import numbered_words

    text, tokenizer = home / "text.jsonl", home / "words"
    if not text.exists():
        numbered_words(VOCABULARY[small]).save_pretrained(tokenizer)
        words, draw_word = ROWS[small] * 1024, random.Random(0)
        lines = (" ".join(f"w{draw_word.randrange(2, VOCABULARY[small])}" for _ in range(words)) for _ in range(60))
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    settings = {
        **(SMALL if small else PRETRAIN), "data": str(text), "tokenizer": str(tokenizer), "seed": 0,
        "global_batch_size": ROWS[small] * processes, "num_steps": 1000, "log_every": 10, "eval_every": 1000,
        "save_every": 1000, "report_to": [],
    }  # fmt: skip
    return Launch("pretrain", settings, processes)


def ppo(home: Path, size: str, processes: int, more: dict[str, Any] | None = None) -> Launch:
    """Iterations on random models; each process has as many prompts as one alone."""
    given, world = SIZES[size], home / "world"
    settings = {
        "model": str(world / "policy"), "reward_model": str(world / "reward"), "data": str(world / "prompts.jsonl"),
        "rollout_batch_size": given["prompts"] * processes, "num_iterations": 1000, "num_epochs": 4,
        "max_prompt_length": given["prompt_tokens"], "max_new_tokens": given["new_tokens"],
        "microbatch_size": given["microbatch"], "learning_rate": 1e-6, "critic_learning_rate": 1e-6,
        "eval_every": 1000, "save_every": 1000, "eval_share": 0.1, "log_every": 1, "report_to": [], **(more or {}),
    }  # fmt: skip
    return Launch("ppo", settings, processes)


def measure(launch: Launch) -> dict[str, Any]:
    """Run it; its rate in tokens (pretrain) or samples (ppo) a second, and so on."""
    import torch

    from rlhf.pipeline.accelerate_config import config_path

    on_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        folder, answer = Path(name) / "stage", Path(name) / "answer.json"
        folder.mkdir()
        write_stage(folder, launch)
        config = config_path(launch.config)
        words = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(config)]
        words += ["--num_processes", str(launch.processes), "--main_process_port", "0"]
        if launch.played or (launch.processes == 1 and launch.config == "ddp"):
            words = [sys.executable]
        environment = dict(os.environ) | ({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} if on_cpu else {})
        words += [__file__, "--child", launch.stage, str(folder), str(launch.rows), str(answer)]
        if launch.played:
            environment |= of_the_first(launch)
        said = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        if not answer.exists():
            sys.exit(f"{launch}: {said.stdout[-1000:]}{said.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
    settings, moments = launch.settings, found["moments"]
    lasted = [now - before for before, now in pairwise(moments)]
    seconds = statistics.median(lasted[1:] or lasted)
    of_a_row = {
        "pretrain": settings.get("log_every", 1) * settings.get("global_batch_size", 0)
        * settings.get("context_length", 0), "ppo": settings.get("rollout_batch_size", 0),
    }[launch.stage]  # fmt: skip
    return {
        **found, "seconds": seconds, "rate": of_a_row / seconds, "first": lasted[0],
        "planned": planned(launch.stage, settings, launch.processes, launch.config),
        "phases": {key[8:]: statistics.median(row[key] for row in found["rows"][1:] or found["rows"])
                   for key in found["rows"][0] if key.startswith("seconds_")},
        "losses": [row["loss"] for row in found["rows"] if "loss" in row],
    }  # fmt: skip


def of_the_first(launch: Launch) -> dict[str, str]:
    """What a launcher tells the first of several processes, and that the others are played."""
    number = str(launch.processes)
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "PLAYED": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    if launch.config == "ddp":
        return told
    reshards = str(launch.config == "fsdp2").lower()
    return told | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": reshards}


def play_the_others() -> None:
    """Be one process of a group whose others send what this one does, or nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlhf.stages import sharding
    from rlhf.stages.processes import Processes

    number = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)

    def gather(output: Any, input: Any, *_: Any, **__: Any) -> None:
        output.view(number, -1).copy_(input.detach().reshape(1, -1).expand(number, -1))

    def scatter(output: Any, input: Any, *_: Any, **__: Any) -> None:
        output.view(-1).copy_(input.detach().view(number, -1)[0])

    def full(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        part = tensor.to_local()
        if not tensor.ndim:
            return part
        whole = part.new_empty(number * len(part), *part.shape[1:])
        gather(whole, part)
        return whole[: len(tensor)]

    def send(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        sent.set_result(bucket.buffer())
        return sent

    def wrap(model: Any, *arguments: Any, **named: Any) -> None:
        made(model, *arguments, **named)
        model.register_comm_hook(None, send)

    made, DistributedDataParallel.__init__ = DistributedDataParallel.__init__, wrap  # type: ignore[method-assign]
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor, sharding.full = gather, scatter, full
    Processes.sum = Processes.max = Processes.gather_objects = lambda self, values: values  # type: ignore[method-assign,assignment]
    Processes.from_main = lambda self, make: make()  # type: ignore[method-assign]


def write_stage(folder: Path, launch: Launch) -> None:
    from rlhf.stages.ppo.config import PPOSettings
    from rlhf.stages.pretrain.config import PretrainSettings
    from rlhf.stages.settings_file import write_settings

    cls = {"pretrain": PretrainSettings, "ppo": PPOSettings}[launch.stage]
    write_settings(folder, cls.load(launch.settings, launch.stage))


def run_child(stage: str, folder: Path, answer: Path, num_rows: int) -> None:
    """Train until so many lines of metrics are logged, in each process; the first one answers."""
    import importlib

    from rlhf.stages.runtime import Runtime

    rows: list[dict[str, Any]] = []
    moments = []
    begin, log = Runtime.begin, Runtime.log
    runs: list[Any] = []

    class EnoughError(Exception):
        """Saving is not part of what is measured."""

    def timed_begin(run: Any, step: int) -> None:
        begin(run, step)
        runs.append(run)
        moments.append(time.perf_counter())

    def timed_log(run: Any, step: int, row: dict[str, Any], force: bool = False) -> None:
        log(run, step, row, force)
        moments.append(time.perf_counter())
        rows.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) if run.is_main else row)
        if len(rows) == num_rows:
            raise EnoughError

    if "PLAYED" in os.environ:
        play_the_others()
    Runtime.begin, Runtime.log = timed_begin, timed_log  # type: ignore[method-assign]
    with contextlib.suppress(EnoughError):
        importlib.import_module(f"rlhf.stages.{stage}.train").train(str(folder))
    [run] = runs
    run.wait_for_all()
    if run.is_main:
        answer.write_text(json.dumps({"rows": rows, "moments": moments, "gib": rows[-1]["peak_gib"]}))
    run.wait_for_all()
    os._exit(0)  # what runs beside the stage is left behind


if __name__ == "__main__":
    main()
