"""Talk to a model of any stage, line by line: `python -m rlhf.stages.chat MODEL`."""

import argparse
import sys
from collections.abc import Iterator

import torch

from rlhf.data.errors import RefusedError
from rlhf.data.tokens import encode_prompt
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.models import load_policy, load_tokenizer, num_positions
from rlhf.stages.runtime import be_quiet


def main(arguments: list[str]) -> None:
    """Read a line, print an answer, until the input ends; each line opens a new conversation unless --multi-turn."""
    parser = argparse.ArgumentParser(prog="rlhf chat", description="Talk to a model, line by line.")
    parser.add_argument("model", help="folder or hub id of a causal language model")
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature (above 0)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer in tokens")
    parser.add_argument("--multi-turn", action="store_true", help="let the model see the earlier turns")
    parser.add_argument("--seed", type=int, default=None, help="for the same answers again")
    options = parser.parse_args(arguments)
    if options.temperature <= 0 or options.max_new_tokens < 1:
        parser.error("--temperature must be above 0 and --max-new-tokens at least 1")
    be_quiet()
    tokenizer = load_tokenizer(options.model)
    model = load_policy(options.model, tokenizer).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    context = num_positions(model)
    length = min(options.max_new_tokens, context // 2)
    engine = make_engine(model)
    history: list[dict[str, str]] = []
    for line in _lines():
        history = [*(history if options.multi_turn else []), {"role": "user", "content": line}]
        ids = encode_prompt(tokenizer, history, max_length=context - length)
        stops, pad = [tokenizer.eos_token_id], tokenizer.pad_token_id
        response = engine.generate([ids], length, options.temperature, stops, pad).tokens
        text = tokenizer.decode(response[0], skip_special_tokens=True).strip()
        print(text, flush=True)
        history.append({"role": "assistant", "content": text})


def _lines() -> Iterator[str]:
    """Lines typed at a terminal until ctrl-d, or piped in."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RefusedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
