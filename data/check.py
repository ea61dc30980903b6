"""What `rlhf data check` tells about a source: what would be kept, what would be dropped and why."""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import combinations, islice
from math import comb
from typing import Any

from rlhf.data.convert import own_row
from rlhf.data.errors import DataError, SettingsError
from rlhf.data.examples import Prompt, Ranking
from rlhf.data.lengths import Lengths, Measure, characters, tokens
from rlhf.data.messages import Messages
from rlhf.data.normal_forms import NormalForms
from rlhf.data.own import cure
from rlhf.data.report import DUPLICATE, FIRST_FEW, Dropped, Report
from rlhf.data.rows import numbered, prompt_key, prompt_text
from rlhf.data.sources import Source

BATCH = 500  # examples measured at once
NUM_SAMPLES = 3
SAMPLE_ANSWERS = 10  # of a ranking
SAMPLE_HEAD, SAMPLE_TAIL = 160, 60  # characters of a text that a sample shows
NOTHING_LEFT = "nothing usable is left"


def check(
    source: Source,
    kind: str,
    tokenizer: str | None = None,
    max_length: int | None = None,
    against: Source | None = None,
    against_kind: str | None = None,
    tell: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """Counts for one source, as JSON. Unusable rows are counted and never raise.

    `kind` is text, demonstrations, preferences or prompts. `pairs` counts better/worse pairs over all
    rankings, `ties` the unordered equal ones, those of dropped rankings too. `contradictions` are pairs of answers to
    one prompt that are ranked both ways round, with the two rows of each. `longer_wins` is the share of pairs whose
    better answer is the longer one (equal lengths count one half), in characters, or in tokens if `tokenizer` (a
    folder or a hub id) is given, which also gives `lengths`; `max_length` asks what would not fit. `shared_prompts`
    are those that the rows of `against` hold too. `parts` is what was left out of rows that were kept, `details` what
    the first row of a reason adds to it. Reads row by row: memory grows with their number, not their size. `tell` is
    told how many rows have been read. Raises DataError for a source that cannot be read at all.
    """
    if max_length is not None and (tokenizer is None or kind == "text"):
        cure = "documents are cut into blocks, none is too long" if kind == "text" else "give --tokenizer too"
        raise SettingsError(f"--max-length {max_length}: it is counted in tokens of prompts and answers; {cure}")
    elsewhere = None
    if against is not None:
        if "text" in (kind, against_kind):
            raise SettingsError(f"--against {against.path}: text has no prompts to compare")
        elsewhere = _prompts_of(against, against_kind or kind)
    report = Report(kind)
    lengths = Lengths(max_length) if tokenizer else None
    tally = Tally(tokens(tokenizer) if tokenizer else characters, lengths, elsewhere or set())
    examples = numbered(source, kind, report)
    while batch := list(islice(examples, BATCH)):
        tally.add(batch)
        tell(report.rows)
    repeated = report.dropped.get(DUPLICATE, Dropped()).count  # prompts are read once each
    return {
        "kind": kind,
        "format": report.format,
        "rows": report.rows,
        "kept": report.kept,
        "dropped": _as_json(report.dropped),
        "prompts": len(tally.prompts),
        "pairs": tally.pairs,
        "ties": tally.ties + report.dropped_ties,
        "duplicates": repeated if kind == "prompts" else tally.repeats,
        "warnings": [*_warnings(report, source), *tally.forms.warnings(tally.prompts)],
        "parts": _as_json(report.parts),
        "details": {why: drop.detail for why, drop in (report.dropped | report.parts).items() if drop.detail},
        "contradictions": tally.contradictions(),
        "longer_wins": tally.longer / tally.pairs if tally.pairs else None,
        "lengths": lengths.as_json() if lengths else None,
        "shared_prompts": None if elsewhere is None else {"count": len(tally.shared), "rows": tally.shared[:FIRST_FEW]},
        "samples": tally.samples,
    }


def _warnings(report: Report, source: Source) -> list[str]:
    warnings = list(report.warnings)
    if report.kept == 0:
        row, why = report.first_bad()
        warnings.append(f"{NOTHING_LEFT}; row {row}: {why}{cure(source, report.kind, why)}")
    elif report.bad:
        warnings.append(f"{report.bad} of {report.rows} rows are unusable; a run refuses unless max_dropped allows it")
    return warnings


def _as_json(drops: dict[str, Dropped]) -> dict[str, dict[str, Any]]:
    return {reason: {"count": drop.count, "rows": drop.rows} for reason, drop in drops.items()}


def _prompts_of(source: Source, kind: str) -> set[int]:
    """Hashes of the prompts of a source; none at all would make every answer about them untrue."""
    report = Report(kind)
    found = {hash(prompt_key(_prompt(example))) for _, example in numbered(source, kind, report)}
    if not found:
        why = "row {}: {}".format(*report.first_bad())
        raise DataError(f"--against {source.path}: no prompts to compare with, read as {kind}; {why}")
    return found


def _prompt(example: Any) -> Messages:
    return example.messages if isinstance(example, Prompt) else example.prompt


def _responses(example: Any) -> list[str]:
    if isinstance(example, Ranking):
        return example.responses
    if isinstance(example, Prompt):
        return []
    return [example if isinstance(example, str) else example.response]


class Tally:
    """What is counted over the examples of a source. Texts are kept as hashes only."""

    def __init__(self, measure: Measure, lengths: Lengths | None, elsewhere: set[int]) -> None:
        self.prompts: dict[int, int] = {}
        """The row that brings each first, by the hash of its key."""
        self.forms = NormalForms()
        self.pairs = self.ties = self.repeats = 0
        self.longer = 0.0
        self.shared: list[int] = []
        """Numbers of rows that bring a prompt of `elsewhere` first."""
        self.samples: list[dict[str, Any]] = []
        self._measure = measure
        self._lengths = lengths
        self._elsewhere = elsewhere
        self._seen: set[int] = set()
        self._verdicts: dict[int, list[tuple[int, list[int], list[float]]]] = {}

    def add(self, batch: list[tuple[int, Any]]) -> None:
        """Count some examples, each with its row number."""
        texts = [text for _, example in batch for text in _texts(example)]
        lengths = iter(self._measure(texts))
        for number, example in batch:
            prompt = None if isinstance(example, str) else next(lengths)
            responses = list(islice(lengths, len(_responses(example))))
            if self._lengths is not None:
                self._lengths.add(prompt, responses)
            if len(self.samples) < NUM_SAMPLES:
                self.samples.append(_sample(number, example))
            if not isinstance(example, Prompt):
                self._add_repeat(example)
            if not isinstance(example, str):
                self._add_prompt(number, example)
            if isinstance(example, Ranking):
                self._add_pairs(example.ranks, responses)

    def _add_repeat(self, example: Any) -> None:
        """Count an example that is equal to an earlier one."""
        same: Hashable = example if isinstance(example, str) else json.dumps(example, default=vars, sort_keys=True)
        before = len(self._seen)
        self._seen.add(hash(same))
        self.repeats += len(self._seen) == before

    def _add_prompt(self, number: int, example: Any) -> None:
        text = prompt_key(_prompt(example))
        self.forms.add(text, _prompt(example))
        key = hash(text)
        if key in self._elsewhere and key not in self.prompts:
            self.shared.append(number)
        self.prompts.setdefault(key, number)
        if isinstance(example, Ranking):
            answers = [hash(response.strip()) for response in example.responses]
            self._verdicts.setdefault(key, []).append((number, answers, example.ranks))

    def _add_pairs(self, ranks: list[float], lengths: list[int]) -> None:
        ties = sum(comb(count, 2) for count in Counter(ranks).values())
        self.ties += ties
        self.pairs += comb(len(ranks), 2) - ties
        for (rank, length), (other_rank, other) in combinations(zip(ranks, lengths, strict=True), 2):
            if rank != other_rank:
                self.longer += 0.5 if length == other else (length > other) == (rank < other_rank)

    def contradictions(self) -> dict[str, Any]:
        """How many pairs of answers to one prompt are ranked both ways round, and the two rows of the first few."""
        rows = sorted(
            (later, earlier)
            for verdicts in self._verdicts.values()
            if len(verdicts) > 1
            for earlier, later in _contradicting(verdicts)
        )
        return {"count": len(rows), "rows": [[earlier, later] for later, earlier in rows[:FIRST_FEW]]}


def _contradicting(verdicts: list[tuple[int, list[int], list[float]]]) -> Iterator[tuple[int, int]]:
    """For each pair of answers that the rankings of one prompt order both ways, the first row of either way."""
    first: dict[tuple[int, int], int] = {}
    for number, answers, ranks in verdicts:
        for (one, rank), (other, other_rank) in combinations(zip(answers, ranks, strict=True), 2):
            if rank == other_rank:
                continue
            verdict = (one, other) if rank < other_rank else (other, one)
            if verdict not in first and verdict[::-1] in first:
                yield first[verdict[::-1]], number
            first.setdefault(verdict, number)


def _texts(example: Any) -> list[str]:
    """The texts whose lengths count: the prompt as one, then each response."""
    if isinstance(example, str):
        return [example]
    return ["\n".join(message["content"] for message in _prompt(example)), *_responses(example)]


def _sample(number: int, example: Any) -> dict[str, Any]:
    """An example as it was read, long texts without their middle, many answers without the last (`more_answers`)."""
    row: dict[str, Any] = {} if isinstance(example, Prompt) else own_row(example)
    if not isinstance(example, str):
        row["prompt"] = prompt_text(_prompt(example))
    for name, value in row.items():
        if isinstance(value, list):
            row[name] = [_cut(v) if isinstance(v, str) else v for v in value[:SAMPLE_ANSWERS]]
        else:
            row[name] = _cut(value)
    more = len(_responses(example)) - SAMPLE_ANSWERS
    return {"row": number} | row | ({"more_answers": more} if more > 0 else {})


def _cut(text: str) -> str:
    if len(text) <= SAMPLE_HEAD + SAMPLE_TAIL:
        return text
    return f"{text[:SAMPLE_HEAD]} … {text[-SAMPLE_TAIL:]}"
