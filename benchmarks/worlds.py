"""Random models, a tokenizer of numbered words and prompts on disk: what the PPO benchmarks run on; and plans of it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

EOS, PAD = 0, 1


def build_world(
    folder: Path,
    shape: dict[str, Any],
    num_prompts: int,
    prompt_tokens: int,
    mean_length: int | None = None,
    half: bool = False,
    whole_reward: bool = True,
) -> None:
    """policy/, reward/ (a one-label classifier) and prompts.jsonl in `folder`, of a Llama `shape`.

    With a `mean_length` the policy's head is tilted so that eos has one chance in so many at each token; without,
    no answer ever ends. `half`: weights in bf16. Without `whole_reward`, of the reward model nothing but its config (a
    benchmark puts an adapter there).
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        policy = LlamaForCausalLM(config).eval()
        tilt(policy, mean_length)
        tokenizer = numbered_words(config.vocab_size)
        policy.save_pretrained(folder / "policy")
        tokenizer.save_pretrained(folder / "policy")
        del policy
        of_reward = LlamaConfig(**{**config.to_dict(), "num_labels": 1})
        reward = LlamaForSequenceClassification(of_reward) if whole_reward else of_reward
        reward.save_pretrained(folder / "reward")
        tokenizer.save_pretrained(folder / "reward")
    torch.set_default_dtype(before)
    numbers = torch.randint(2, config.vocab_size, (num_prompts, prompt_tokens)).tolist()
    lines = [json.dumps({"prompt": " ".join(f"w{n}" for n in row)}) + "\n" for row in numbers]
    (folder / "prompts.jsonl").write_text("".join(lines))


def tilt(policy: Any, mean_length: int | None) -> None:
    """Give every state a direction in common, and eos a row of the head that reads it."""
    import torch

    with torch.no_grad():
        size = policy.config.hidden_size
        direction = torch.nn.functional.normalize(torch.randn(size), dim=0)
        policy.model.embed_tokens.weight += 10 * direction
        hidden = policy.model(torch.randint(2, policy.config.vocab_size, (32, 64))).last_hidden_state.flatten(0, 1)
        rest = policy.lm_head(hidden[:256]).float().logsumexp(-1).mean()
        odds = -math.log(mean_length - 1) if mean_length else -30.0
        policy.lm_head.weight[EOS] = direction * (rest + odds) / (hidden @ direction).float().mean()


def numbered_words(vocab_size: int) -> Any:
    """A tokenizer whose words are w2, w3, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": EOS, "<pad>": PAD, **{f"w{i}": i for i in range(2, vocab_size)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def planned(stage: str, settings: dict[str, Any], processes: int = 1, layout: str = "ddp") -> float:
    """GiB that a process of a stage takes at most on the device that is here, as `rlhf estimate` says."""
    request = {"stages": {stage: settings}, "num_processes": {stage: processes}, "layouts": {stage: layout}}
    words = [sys.executable, "-m", "rlhf.stages.estimate"]
    said = subprocess.run(words, input=json.dumps(request), capture_output=True, text=True, check=True)
    peak: float = json.loads(said.stdout.splitlines()[-1])["stages"][stage]["peak_gib"]
    return peak
