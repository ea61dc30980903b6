"""What `rlhf estimate --devices` plans for models of 7B, 13B and 70B parameters on 8 and on 64 H100s. No GPU is needed.

    python benchmarks/planner.py

Shapes are those of Llama 2. In sft and ppo layers are computed again in the backward pass. The 70B model's answers come
from a server on other cards, since its weights do not fit on one: sampling them is not in its time. `sending` is what
communication takes by itself; what of it is hidden behind work is not in `seconds`, which are of a step or, for ppo, of
an iteration.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from rlhf.pipeline.estimate import estimate
from rlhf.pipeline.recipe import load_recipe

DEVICES = ("8xH100", "64xH100")
SHAPES: dict[str, dict[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
}  # fmt: skip
SERVER = {"rollout": {"engine": "vllm", "server_url": "http://127.0.0.1:8000"}}


def main() -> None:
    print(f"{'':5}{'devices':10}{'stage':8}{'layout':8}{'GiB':>8}  {'fits':6}{'seconds':>9}{'sending':>9}", flush=True)
    for size in SHAPES:
        with tempfile.TemporaryDirectory() as name:
            recipe = write_recipe(Path(name), size)
            for devices in DEVICES:
                found = estimate(load_recipe(str(recipe)), devices=devices)
                for stage, of_stage in found["stages"].items():
                    print(line(f"{size:5}{devices:10}{stage:8}", of_stage), flush=True)


def line(start: str, found: dict[str, Any]) -> str:
    seconds, sending = (sum(phase[name] for phase in found["phases"]) for name in ("seconds", "seconds_sending"))
    fits = "yes" if found["fits"] else "no"
    return f"{start}{found['layout']:8}{found['peak_gib']:8.1f}  {fits:6}{seconds:9.1f}{sending:9.1f}"


def write_recipe(folder: Path, size: str) -> Path:
    """A recipe of sft, reward and ppo, and the config of the model that it starts from."""
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **SHAPES[size]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    often: dict[str, Any] = {"model": str(folder), "report_to": []}
    recipe = {
        "sft": {
            **often, "data": "demonstrations.jsonl", "max_length": 2048, "global_batch_size": 128, "microbatch_size": 1,
            "args": {"activation_checkpointing": True},
        },
        "reward": {
            **often, "data": "rankings.jsonl", "max_length": 1024, "global_batch_size": 64, "microbatch_size": 1,
        },
        "ppo": {
            **often, "data": "prompts.jsonl", "rollout_batch_size": 512, "num_minibatches": 8, "num_epochs": 1,
            "max_prompt_length": 512, "max_new_tokens": 512, "microbatch_size": 1, "gradient_checkpointing": True,
            **(SERVER if size == "70B" else {"generation_batch_size": 32}),
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return folder / "recipe.yaml"


if __name__ == "__main__":
    main()
