"""Seconds per PPO iteration on a CPU: ours and TRL 1.12's PPOTrainer (its last release with PPO), in turn A B A B.

    python benchmarks/ppo_vs_trl.py             about ten minutes on two cores

Equal random models of a Llama shape (5.3M parameters, vocabulary 4096), 64 prompts, up to 48 new tokens, 4 epochs of
one minibatch, no evaluation, no saving. TRL 1.12 is installed into an environment of its own that borrows the other
packages. The first iteration of each run is not counted. "early": the models are built so that an answer ends after
about 20 tokens; "full": no answer ever ends.
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

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5,
    "num_attention_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, EPOCHS = 64, 24, 48, 4
EOS, PAD = 0, 1
EARLY_LENGTH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--iterations", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="how often A and B take turns")
    parser.add_argument("--child", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--world", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        seconds = {"ours": run_ours, "trl": run_trl}[options.child](Path(options.world), options.iterations)
        print(json.dumps(seconds))
        return
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'seconds per iteration':24}{'TRL 1.12':>12}{'ours':>12}{'ratio':>10}")
    with tempfile.TemporaryDirectory() as name:
        python = trl_environment(Path(name) / "trl")
        for answers in ("early", "full"):
            world = Path(name) / answers
            build_world(world, answers == "early")
            times: dict[str, list[float]] = {"trl": [], "ours": []}
            for _ in range(options.rounds):
                for side, interpreter in (("trl", python), ("ours", sys.executable)):
                    words = [interpreter, __file__, "--child", side, "--world", str(world)]
                    words += ["--iterations", str(options.iterations)]
                    answer = subprocess.run(words, capture_output=True, text=True, check=False, cwd=name)
                    if answer.returncode:
                        sys.exit(f"{side} failed:\n{answer.stderr[-3000:]}")
                    times[side] += json.loads(answer.stdout.splitlines()[-1])
            trl, ours = (statistics.median(times[side]) for side in ("trl", "ours"))
            print(f"{answers:24}{trl:>12.2f}{ours:>12.2f}{trl / ours:>9.2f}x", flush=True)


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


def build_world(folder: Path, early: bool) -> None:
    """Policy, reward model and prompts; `early` tilts the policy's head so that eos has about one chance in twenty."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
    policy = LlamaForCausalLM(config)
    with torch.no_grad():
        # A direction that every state shares, and a head whose row for eos reads it.
        direction = torch.nn.functional.normalize(torch.randn(config.hidden_size), dim=0)
        policy.model.embed_tokens.weight += 10 * direction
        hidden = policy.model(torch.randint(2, config.vocab_size, (32, 64))).last_hidden_state.flatten(0, 1)
        rest = policy.lm_head(hidden).logsumexp(-1).mean()
        odds = torch.tensor(1 / (EARLY_LENGTH - 1)).log() if early else torch.tensor(-30.0)
        policy.lm_head.weight[EOS] = direction * (rest + odds) / (hidden @ direction).mean()
    words = {"<eos>": EOS, "<pad>": PAD, **{f"w{i}": i for i in range(2, config.vocab_size)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    reward = LlamaForSequenceClassification(LlamaConfig(**{**config.to_dict(), "num_labels": 1}))
    for name, model in (("policy", policy), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    numbers = torch.randint(2, config.vocab_size, (2 * PROMPTS, PROMPT_TOKENS)).tolist()
    lines = [json.dumps({"prompt": " ".join(f"w{n}" for n in row)}) + "\n" for row in numbers]
    (folder / "prompts.jsonl").write_text("".join(lines))


def run_ours(world: Path, iterations: int) -> list[float]:
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
            "eval_share": 0.02,
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


def run_trl(world: Path, iterations: int) -> list[float]:
    """Seconds of each iteration but the first."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(world / "policy", padding_side="left")
    rows = [json.loads(line) for line in (world / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows])
    policy, reference = (AutoModelForCausalLM.from_pretrained(world / "policy") for _ in range(2))
    reward, value = (AutoModelForSequenceClassification.from_pretrained(world / "reward") for _ in range(2))
    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS, gradient_accumulation_steps=1, num_mini_batches=1,
            num_ppo_epochs=EPOCHS, response_length=NEW_TOKENS, stop_token="eos", temperature=1.0, learning_rate=1e-6,
            total_episodes=PROMPTS * iterations, num_sample_generations=0, report_to="none", use_cpu=True, bf16=False,
            gradient_checkpointing=False, save_strategy="no",
        )  # fmt: skip
        PPOTrainer(
            args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
            value_model=value, train_dataset=data, callbacks=[Clock()],
        ).train()  # fmt: skip
    return [later - earlier for earlier, later in pairwise(moments)]


if __name__ == "__main__":
    main()
