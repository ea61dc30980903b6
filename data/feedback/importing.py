"""Rankings of any format that the toolkit reads, put into a feedback store as those of a rater named after them."""

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rlhf.data.errors import SettingsError
from rlhf.data.examples import Ranking
from rlhf.data.feedback.checks import MAX_NAME
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.resolve import dense
from rlhf.data.feedback.store import Store
from rlhf.data.messages import prompt_key
from rlhf.data.report import Report
from rlhf.data.rows import iterate, refuse_losses
from rlhf.data.sources import Source

BATCH = 200  # rankings in one transaction: others that write wait a fraction of a second
_NAMESPACE = uuid.UUID("6d1f3f0a-5a0b-4b7e-9a55-5e1c8f3d9c11")  # of request ids, so that a ranking comes in once


@dataclass
class Imported:
    """What came into the store."""

    report: Report
    """What reading found: rows kept and dropped, with reasons."""
    num_rankings: int = 0
    """Rankings that were not there before."""
    num_known: int = 0
    """Rankings that were: the same rows had been imported."""
    num_replaced: int = 0
    """Rankings that took the place of another one by the same rater."""
    num_prompts: int = 0
    """Different prompts among all these."""
    num_new_rounds: int = 0
    """Prompts that were there with other answers; the imported ones are a round of their own, now the one to rate."""
    num_equal_answers: int = 0
    """Answers left out because another of the same ranking has the same text."""
    raters: list[str] = field(default_factory=list)
    """Whose they are: `name`, or `name: annotator` where the source names annotators; and where the source ranks the
    same answers again `name (2)` and so on."""


Ranked = tuple[str, str, frozenset[str]]
"""A rater's name, and the prompt and answers that they ranked."""
Said = dict[str, tuple[int, float | None]]
"""Rank and score by the answers' texts."""


def import_rankings(
    store: Store, source: Source, rater: str | None = None, kind: str = "person", max_dropped: float = 0.0
) -> Imported:
    """Put the rankings of a source into a store; the rater's name is by default that of its file.

    A prompt that is there keeps its answers: rankings of other ones go into a new round of it. Of numbers that say how
    good each answer is (`strengths`) the scores are made. The source is read twice, first to see that no more than the
    share `max_dropped` of its rows is unusable. Importing again, also after a kill, adds what is missing.

    Raises DataError and SettingsError as reading does, and SettingsError where a rater who is named after the file
    alone has ranked something otherwise before, in another file of this name. A `rater` who is given may do so.
    """
    if rater is not None and len(rater) > MAX_NAME // 2:
        raise SettingsError(f"--rater {rater[:20]!r}…: has {len(rater)} characters; at most {MAX_NAME // 2} here")
    report, name = Report("preferences"), (rater or Path(source.path).name)[: MAX_NAME // 2].strip()
    before = _before(store, name)
    read = _named(iterate(source, "preferences", report, keep_ties=True, apart=True), name)
    otherwise = sum(ranked in before and before[ranked] != _said(ranking) for ranked, ranking in read)
    refuse_losses(report, source, max_dropped)
    if otherwise and rater is None:
        raise SettingsError(
            f"{store.path}: a file of this name has been imported, in which {otherwise} rankings of {source.path} are "
            f"others; say with --rater whose these are, or --rater {name!r} to replace those"
        )
    told = Imported(report)
    read = _named(iterate(source, "preferences", Report("preferences"), keep_ties=True, apart=True), name)
    raters: dict[str, int] = {}
    prompts: set[int] = set()
    while batch := list(islice(read, BATCH)):
        with store.batch():
            for ranked, ranking in batch:
                whose = ranked[0]
                if whose not in raters:
                    raters[whose] = store.add_rater(whose, kind)
                prompt, ids = _put(store, ranking, ranking.source or name, told)
                is_new = _rank(store, ranking, prompt, ids, whose, raters[whose], told)
                told.num_replaced += is_new and ranked in before
                prompts.add(prompt)
    told.num_prompts, told.raters = len(prompts), list(raters)
    return told


def _named(rankings: Iterable[Ranking], name: str) -> Iterator[tuple[Ranked, Ranking]]:
    """Each ranking, and whose it is: where a rater ranks the same answers again, that of one more rater."""
    seen: Counter[Ranked] = Counter()
    for ranking in rankings:
        whose = f"{name}: {ranking.rater}"[: MAX_NAME - 10] if ranking.rater else name
        what = prompt_key(ranking.prompt), frozenset(_said(ranking))
        seen[whose, *what] += 1
        again = seen[whose, *what]
        yield (whose if again == 1 else f"{whose} ({again})", *what), ranking


def _before(store: Store, name: str) -> dict[Ranked, Said]:
    """What raters of this name have said already."""
    names = {rater.name for rater in store.raters() if rater.name.startswith(name)}
    found: dict[Ranked, Said] = {}
    for judged in store.rankings() if names else ():
        texts = [answer.text for answer in judged.answers]
        for vote in judged.votes:
            if vote.rater.name in names:
                said = _said(Ranking(judged.messages, texts, list(map(float, vote.ranks)), vote.scores))
                found[vote.rater.name, prompt_key(judged.messages), frozenset(said)] = said
    return found


def _said(ranking: Ranking) -> Said:
    """Of equal answers the first counts."""
    scores: Sequence[float | None] = ranking.strengths or [None] * len(ranking.responses)
    rows = list(zip(ranking.responses, ranking.ranks, scores, strict=True))
    first = {text.strip(): (rank, score) for text, rank, score in reversed(rows)}
    ranks = dense([rank for rank, _ in first.values()])
    return {text: (rank, score) for rank, (text, (_, score)) in zip(ranks, first.items(), strict=True)}


def import_gold(store: Store, source: Source, max_dropped: float = 0.0) -> Imported:
    """Put the rankings of a source into a store as gold questions: their ranks are the right ones, and all raters get
    them. Nobody has ranked them yet. Raises as `import_rankings`."""
    report, name = Report("preferences"), Path(source.path).name
    for _ in iterate(source, "preferences", report, keep_ties=True):
        pass
    refuse_losses(report, source, max_dropped)
    told = Imported(report)
    read = iterate(source, "preferences", Report("preferences"), keep_ties=True)
    prompts: set[int] = set()
    while batch := list(islice(read, BATCH)):
        with store.batch():
            for ranking in batch:
                prompts.add(_put(store, ranking, ranking.source or name, told)[0])
                right = {text: rank for text, (rank, _) in _said(ranking).items()}
                store.add_prompt(ranking.prompt, gold_ranks=right, overlap=True)
    told.num_prompts = len(prompts)
    return told


def _put(store: Store, ranking: Ranking, model: str, told: Imported) -> tuple[int, dict[str, int]]:
    """A ranking's prompt and, by their texts, its answers: their ids in the store, which has them from now on."""
    told.num_equal_answers += len(ranking.responses) - len(_said(ranking))
    prompt = store.add_prompt(ranking.prompt)
    round_, ids, is_new = _answers(store, prompt, ranking.responses, model)
    told.num_new_rounds += is_new and round_ > 1
    return prompt, ids


def _rank(
    store: Store, ranking: Ranking, prompt: int, ids: dict[str, int], whose: str, rater: int, told: Imported
) -> bool:
    """Whether the ranking is new."""
    said = _said(ranking)
    ranks = {ids[text]: rank for text, (rank, _) in said.items()}
    scores = {ids[text]: score for text, (_, score) in said.items() if score is not None} or None
    key = json.dumps([whose, prompt, sorted(ranks.items()), None if scores is None else sorted(scores.items())])
    request = str(uuid.uuid5(_NAMESPACE, key))
    if store.has_act(request):
        told.num_known += 1
        return False
    store.rank(request, prompt, rater, ranks, scores=scores)
    told.num_rankings += 1
    return True


def _answers(store: Store, prompt: int, texts: list[str], model: str) -> tuple[int, dict[str, int], bool]:
    """The round of the prompt that has these very answers, their ids by texts, and whether it was made now."""
    different = {text.strip(): text for text in reversed(texts)}
    rounds: dict[int, dict[str, int]] = {}
    for answer in store.answers(prompt):
        rounds.setdefault(answer.round, {})[answer.text.strip()] = answer.id
    for round_, ids in rounds.items():
        if ids.keys() == different.keys():
            return round_, ids, False
    new = max(rounds, default=0) + 1
    wanted = list(dict.fromkeys(text.strip() for text in texts))
    added = store.add_answers(prompt, [Answer(different[text], model, round=new) for text in wanted])
    return new, dict(zip(wanted, added, strict=True)), True
