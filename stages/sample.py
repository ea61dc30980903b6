"""Several answers to each prompt into a feedback store: `python -m rlhf.stages.sample MODEL … --prompts P --store S`.

Prompts are taken in pieces of fixed size, and all answers of a piece are stored together: what a kill leaves are whole
pieces, and those that are there are passed over by the next run. Which number of the random stream a piece gets depends
on its place alone, so that the answers are the same whether there was a kill or not, and in any number of processes.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch

from rlhf.data.errors import DataError, RefusedError, SettingsError
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store
from rlhf.data.messages import Messages
from rlhf.data.rows import Prompt, read_prompts
from rlhf.data.sources import Source
from rlhf.data.tokens import answer_texts, encode_prompt
from rlhf.stages.arguments import Arguments
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.logs import be_quiet
from rlhf.stages.models import load_policy, load_tokenizer
from rlhf.stages.precision import half
from rlhf.stages.signals import exit_on_signal, handled
from rlhf.stages.text_limits import num_positions, stops_of

AT_ONCE = 128  # answers of a piece
ADDED_AT_ONCE = 500  # prompts in one transaction
TRIES = 4  # how often an answer that says nothing, or what another one says, is drawn again


class Writer:
    """A checkpoint that writes answers, recorded in the store under `name`."""

    def __init__(
        self,
        reference: str,
        name: str,
        device: torch.device,
        max_new_tokens: int,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = load_tokenizer(reference)
        model = load_policy(reference, self.tokenizer).to(device).eval()
        self.max_new_tokens, self.num_positions = max_new_tokens, num_positions(model)
        self.room = min(max_length or self.num_positions, self.num_positions) - max_new_tokens
        if self.room < 1:
            raise SettingsError(
                f"{name}: {max_new_tokens} new tokens leave no room for a prompt in its {self.num_positions} "
                "positions; give fewer (--max-new-tokens, in a recipe feedback.max_new_tokens)"
            )
        self._stops = stops_of(model, self.tokenizer)
        self._engine = make_engine(model, dtype=dtype, compiled=True)

    def cuts(self, prompt: Messages) -> bool:
        """Whether it has no room for all of a prompt, of which it reads the end alone."""
        return len(encode_prompt(self.tokenizer, prompt)) > self.room

    def answers(self, prompts: Sequence[Messages], temperature: float) -> list[str]:
        """One text per prompt, as `answer_texts` has it."""
        ids = [encode_prompt(self.tokenizer, prompt, max_length=self.room) for prompt in prompts]
        law = self.max_new_tokens, temperature, self._stops, self.tokenizer.pad_token_id
        return answer_texts(self.tokenizer, self._engine.generate(ids, *law).tokens.tolist(), self._stops)


@dataclass(frozen=True)
class Law:
    """How many answers a prompt gets, and of which kinds."""

    num_answers: int
    temperatures: tuple[float, ...]
    seed: int
    round: int

    def kinds(self, num_writers: int) -> list[tuple[float, int]]:
        """(temperature, number of the writer) of all kinds of answers; prompts go through them in turn."""
        return list(product(self.temperatures, range(num_writers)))

    def pieces(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Sequence[Prompt]]]:
        """Prompts in pieces, each with the number of its first one."""
        size = max(AT_ONCE // self.num_answers, 1)
        for start in range(0, len(prompts), size):
            yield start, prompts[start : start + size]


@dataclass
class Filled:
    """What became of a piece's prompts, or of all."""

    num_prompts: int = 0
    """That got answers now."""
    num_answers: int = 0
    num_before: int = 0
    """Prompts that had answers of this round already."""
    num_missing: int = 0
    """Answers left out: every try said nothing, or what another answer says."""
    num_single: int = 0
    """Prompts with fewer than two different answers, so that there is nothing to rank."""
    num_cut: int = 0
    """Prompts that are too long for a writer, which read their end alone."""

    def add(self, other: "Filled") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def add_prompts(store: Store, prompts: Sequence[Prompt], overlap: int, seed: int) -> None:
    """All prompts in their order, of which so many, drawn by chance, are for all raters."""
    for_all = set(random.Random(f"overlap {seed}").sample(range(len(prompts)), min(overlap, len(prompts))))
    for start in range(0, len(prompts), ADDED_AT_ONCE):
        with store.batch():
            for place, prompt in enumerate(prompts[start : start + ADDED_AT_ONCE], start):
                store.add_prompt(prompt.messages, overlap=place in for_all)


def fill(
    store: Store, writers: Callable[[], Sequence[Writer]], law: Law, start: int, piece: Sequence[Prompt]
) -> Filled:
    """Sample the answers of one piece, whose first prompt is number `start`, and store them all together.

    Prompts that have answers of this round stay as they are; `writers` are asked for only if there are others. Raises
    DataError where a prompt has answers of a later round.
    """
    told = Filled()
    with store.batch():
        ids = [store.add_prompt(prompt.messages) for prompt in piece]
    waiting = _waiting(store, law, ids)
    told.num_before = len(ids) - len(waiting)
    if not waiting:
        return told
    made = writers()
    texts = _distinct_texts(made, law, start, {place: piece[place].messages for place in waiting})
    kinds = law.kinds(len(made))
    with store.batch():
        waiting = _waiting(store, law, ids)  # another `rlhf sample` may have been quicker
        told.num_before = len(ids) - len(waiting)
        for place in waiting:
            answers = [
                Answer(text, made[writer].name, temperature, law.round)
                for number, text in texts[place].items()
                for temperature, writer in [kinds[_kind(law, start + place, number, len(kinds))]]
            ]
            store.add_answers(ids[place], answers)
            told.num_prompts += bool(answers)
            told.num_answers += len(answers)
            told.num_missing += law.num_answers - len(answers)
            told.num_single += len(answers) < 2
            told.num_cut += any(writer.cuts(piece[place].messages) for writer in made)
    return told


def _waiting(store: Store, law: Law, ids: Sequence[int]) -> list[int]:
    """The places of prompts that have no answers of this round, nor of a later one."""
    waiting = []
    for place, prompt_id in enumerate(ids):
        newest = max((answer.round for answer in store.answers(prompt_id)), default=0)
        if newest > law.round:
            raise DataError(
                f"{store.path}: prompt {prompt_id} has answers of round {newest}; give --round {newest + 1} for new "
                f"ones, since those of round {law.round} would never be rated"
            )
        if newest < law.round:
            waiting.append(place)
    return waiting


def _kind(law: Law, prompt: int, number: int, num_kinds: int) -> int:
    """Which kind a prompt's answer is of: each prompt goes on where the one before it ended."""
    return (prompt * law.num_answers + number) % num_kinds


def _distinct_texts(
    writers: Sequence[Writer], law: Law, start: int, prompts: dict[int, Messages]
) -> dict[int, dict[int, str]]:
    """For each place its answers by their numbers, no two alike and none empty; fewer than wanted if need be."""
    kinds = law.kinds(len(writers))
    found: dict[int, dict[int, str]] = {place: {} for place in prompts}
    for attempt in range(1 + TRIES):
        for kind, (temperature, writer) in enumerate(kinds):
            slots = [
                (place, number)
                for place in prompts
                for number in range(law.num_answers)
                if number not in found[place] and _kind(law, start + place, number, len(kinds)) == kind
            ]
            if slots:
                _seed(law, start, kind, attempt)
                texts = writers[writer].answers([prompts[place] for place, _ in slots], temperature)
                for (place, number), text in zip(slots, texts, strict=True):
                    if text and text not in found[place].values():
                        found[place][number] = text
    return {place: dict(sorted(texts.items())) for place, texts in found.items()}


def _seed(law: Law, *place: int) -> None:
    stream = f"answers {law.seed} {law.round} {place}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4], "big"))


def main(arguments: list[str]) -> None:
    """Sample into a store, which is made if it is not there, and say what came of it."""
    parser = Arguments(prog="rlhf sample", description="Sample answers to rank.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder or hub id of a causal language model")
    parser.add_argument("--prompts", required=True, help="file, folder, hub id or module:function, or a source as JSON")
    parser.add_argument("--store", required=True, type=Path, help="the feedback store")
    parser.add_argument("--num-answers", type=int, default=4, help="answers per prompt")
    parser.add_argument("--temperature", type=_temperatures, default=(1.0,), help="one or several, with commas")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer in tokens")
    parser.add_argument("--seed", type=int, default=0, help="for the same answers again")
    parser.add_argument("--overlap", type=int, default=0, help="so many prompts are for all raters")
    parser.add_argument("--round", type=int, default=1, help="round of the answers, from 1")
    parser.add_argument("--max-dropped", type=float, default=0.0, help="share of unusable prompts to go on without")
    options = parser.parse_args(arguments)
    if options.num_answers < 2 or min(options.max_new_tokens, options.round) < 1 or options.overlap < 0:
        parser.error("--num-answers must be at least 2, --max-new-tokens and --round 1, --overlap 0")
    be_quiet()
    source = json.loads(options.prompts) if options.prompts.startswith("{") else options.prompts
    loaded = read_prompts(Source.model_validate(source), options.max_dropped)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    law = Law(options.num_answers, options.temperature, options.seed, options.round)

    @cache
    def writers() -> list[Writer]:
        return [Writer(m, m, device, options.max_new_tokens, dtype=half(device)) for m in options.models]

    if not options.store.exists():
        writers()  # first: a model that cannot be loaded leaves no empty store behind
    told = Filled()
    with Store.open(options.store) if options.store.exists() else Store.create(options.store) as store:
        add_prompts(store, loaded.rows, options.overlap, options.seed)
        for start, piece in law.pieces(loaded.rows):
            told.add(fill(store, writers, law, start, piece))
            if (done := start + len(piece)) < len(loaded.rows):
                print(f"{done} of {len(loaded.rows)} prompts have answers", flush=True)
    for line in lines(told, law):
        print(f"{options.store}: {line}")


def lines(told: Filled, law: Law) -> list[str]:
    """What came of it, for people."""
    found = [f"{told.num_answers} answers to {told.num_prompts} prompts added, round {law.round}"]
    for num, what in (
        (told.num_before, "prompts had answers of this round already, and keep them"),
        (told.num_missing, f"answers fewer than wanted: {1 + TRIES} tries said nothing, or what others say"),
        (told.num_single, "prompts have fewer than two different answers: nothing to rank there"),
        (told.num_cut, "prompts were cut on the left: with an answer they are longer than a model's positions"),
    ):
        if num:
            found.append(f"{num} {what}")
    return found


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0.7,1.0") from None
    if not all(0 < temperature < 100 for temperature in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: temperatures are above 0; at 0 all answers of a model would be the same"
        )
    return found


if __name__ == "__main__":
    try:
        with handled(exit_on_signal):
            main(sys.argv[1:])
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
