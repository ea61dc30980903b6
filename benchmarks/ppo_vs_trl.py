"""Seconds per PPO iteration on a CPU: ours in two layouts beside TRL 1.12's PPOTrainer (its last release with PPO).

    python benchmarks/ppo_vs_trl.py             about a quarter of an hour on two cores

Equal random models of a Llama shape (5.3M parameters, vocabulary 4096), 64 prompts, up to 48 new tokens, 4 epochs of
one minibatch, no evaluation, no saving; the sides take turns. TRL 1.12 is installed into an environment of its own
that borrows the other packages. The first iteration of each run is not counted. "early": an answer ends after about
20 tokens; "full": no answer ever ends. At the end both train at learning rate 0, and the log-probabilities that
TRL's update saw are compared with ours of the same tokens.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from worlds import build_world

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5,
    "num_attention_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, EPOCHS = 64, 24, 48, 4
SIDES = ("trl", "separate", "shared_trunk")
EARLY = 22
"""Tokens after which an answer ends on average; cut off at NEW_TOKENS their mean is about 20."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--iterations", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="how often the sides take turns")
    parser.add_argument("--child", choices=[*SIDES, "compare"], help=argparse.SUPPRESS)
    parser.add_argument("--world", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--learning-rate", type=float, default=1e-6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "compare":
        print(json.dumps(logprob_difference(options.world)))
    elif options.child == "trl":
        print(json.dumps(run_trl(options.world, options.iterations, options.learning_rate)))
    elif options.child:
        print(json.dumps(run_ours(options.world, options.iterations, options.child)))
    else:
        measure(options.iterations, options.rounds)


def measure(iterations: int, rounds: int) -> None:
    """Print the table."""
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'seconds per iteration':24}{'TRL 1.12':>10}{'separate':>18}{'shared_trunk':>18}")
    with tempfile.TemporaryDirectory() as name:
        python = trl_environment(Path(name) / "trl")

        def child(side: str, world: Path, *words: str) -> Any:
            call = [python if side == "trl" else sys.executable, __file__, "--child", side, "--world", str(world)]
            answer = subprocess.run([*call, *words], capture_output=True, text=True, check=False, cwd=name)
            if answer.returncode:
                sys.exit(f"{side} failed:\n{answer.stderr[-3000:]}")
            return json.loads(answer.stdout.splitlines()[-1])

        for answers in ("early", "full"):
            world = Path(name) / answers
            build_world(world, SHAPE, 2 * PROMPTS, PROMPT_TOKENS, EARLY if answers == "early" else None)
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(rounds):
                for side in SIDES:
                    times[side] += child(side, world, "--iterations", str(iterations))
            trl, *ours = (statistics.median(times[side]) for side in SIDES)
            columns = "".join(f"{seconds:>10.2f}{trl / seconds:>7.2f}x" for seconds in ours)
            print(f"{answers:24}{trl:>10.2f}{columns}", flush=True)
        child("trl", world, "--iterations", "1", "--learning-rate", "0")
        print(f"largest difference of a log-probability at learning rate 0: {child('compare', world):.1e} nats")


def trl_environment(folder: Path) -> str:
    """An interpreter that sees TRL 1.12 and otherwise our packages."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "trl==1.12.0"]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    return python


def run_ours(world: Path, iterations: int, layout: str) -> list[float]:
    """Seconds of each iteration but the first and the last (which is evaluated)."""
    from rlhf.stages.artifact import write_settings
    from rlhf.stages.ppo.config import PPOSettings
    from rlhf.stages.ppo.train import train
    from rlhf.stages.runtime import Runtime

    settings = PPOSettings.load(
        {
            "model": str(world / "policy"), "reward_model": str(world / "reward"),
            "data": str(world / "prompts.jsonl"), "num_iterations": iterations + 1, "rollout_batch_size": PROMPTS,
            "num_epochs": EPOCHS, "max_prompt_length": PROMPT_TOKENS, "max_new_tokens": NEW_TOKENS,
            "learning_rate": 1e-6, "critic_learning_rate": 1e-6, "eval_every": 1000, "save_every": 1000,
            "eval_share": 0.02, "layout": layout, "report_to": [],
        },
        "ppo",
    )  # fmt: skip
    moments: list[float] = []
    log = Runtime.log

    def timed(self: Any, *arguments: Any, **options: Any) -> None:
        moments.append(time.monotonic())
        log(self, *arguments, **options)

    Runtime.log = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        write_settings(Path(folder), settings)
        train(folder)
    return [later - earlier for earlier, later in pairwise(moments[:-1])]


def run_trl(world: Path, iterations: int, learning_rate: float) -> list[float]:
    """Seconds of each iteration but the first; at learning rate 0, what the last update saw goes to `logprobs.pt`."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    tokenizer = AutoTokenizer.from_pretrained(world / "policy", padding_side="left")
    rows = [json.loads(line) for line in (world / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows])
    policy, reference = (AutoModelForCausalLM.from_pretrained(world / "policy") for _ in range(2))
    reward, value = (AutoModelForSequenceClassification.from_pretrained(world / "reward") for _ in range(2))
    moments: list[float] = []
    seen: dict[str, Any] = {}
    if learning_rate == 0:
        forward, log_softmax = ppo_trainer.forward, ppo_trainer.selective_log_softmax

        def watched_forward(model: Any, ids: Any, *more: Any) -> Any:
            seen["input_ids"] = ids
            return forward(model, ids, *more)

        def watched_log_softmax(logits: Any, tokens: Any) -> Any:
            seen["logprobs"] = log_softmax(logits, tokens)
            return seen["logprobs"]

        ppo_trainer.forward, ppo_trainer.selective_log_softmax = watched_forward, watched_log_softmax

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS, gradient_accumulation_steps=1, num_mini_batches=1,
            num_ppo_epochs=EPOCHS, response_length=NEW_TOKENS, stop_token="eos", temperature=1.0,
            learning_rate=learning_rate, total_episodes=PROMPTS * iterations, num_sample_generations=0,
            report_to="none", use_cpu=True, bf16=False,
            gradient_checkpointing=False, save_strategy="no",
        )  # fmt: skip
        PPOTrainer(
            args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
            value_model=value, train_dataset=data, callbacks=[Clock()],
        ).train()  # fmt: skip
    if seen:
        torch.save({name: tensor.detach() for name, tensor in seen.items()}, world / "logprobs.pt")
    return [later - earlier for earlier, later in pairwise(moments)]


def logprob_difference(world: Path) -> float:
    """Largest difference between TRL's log-probabilities and ours of the same responses, in nats."""
    import torch

    from rlhf.stages.models import PolicyModel, load_policy, load_tokenizer

    seen = torch.load(world / "logprobs.pt")
    ids, theirs = seen["input_ids"], seen["logprobs"]
    policy = PolicyModel(load_policy(str(world / "policy"), load_tokenizer(str(world / "policy")))).eval()
    with torch.no_grad():
        ours, _, _ = policy(ids, torch.ones_like(ids, dtype=torch.bool), theirs.shape[1], 1.0)
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    main()
