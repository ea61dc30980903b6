"""Rankings of any format that the toolkit reads, put into a feedback store as those of a rater named after them."""

import json
import uuid
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rlhf.data.examples import Ranking
from rlhf.data.feedback.checks import MAX_NAME
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.resolve import dense
from rlhf.data.feedback.store import Store
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
    num_prompts: int = 0
    """Different prompts among all these."""
    num_new_rounds: int = 0
    """Prompts that were there with other answers; the imported ones are a round of their own, now the one to rate."""
    num_equal_answers: int = 0
    """Answers left out because another of the same ranking has the same text."""
    raters: list[str] = field(default_factory=list)
    """Whose they are: `name`, and where the source ranks the same answers again `name (2)` and so on."""


def import_rankings(
    store: Store, source: Source, rater: str | None = None, kind: str = "person", max_dropped: float = 0.0
) -> Imported:
    """Put the rankings of a source into a store; the rater's name is by default that of its file.

    A prompt that is there keeps its answers: rankings of other ones go into a new round of it. Of numbers that say how
    good each answer is (`strengths`) the scores are made. The source is read twice, first to see that no more than the
    share `max_dropped` of its rows is unusable. Importing again, also after a kill, adds what is missing. Raises
    DataError and SettingsError as reading does.
    """
    report = Report("preferences")
    for _ in iterate(source, "preferences", report, keep_ties=True):
        pass
    refuse_losses(report, source, max_dropped)
    told = Imported(report)
    name = (rater or Path(source.path).name)[: MAX_NAME - 10].strip()
    rankings = iterate(source, "preferences", Report("preferences"), keep_ties=True)
    seen: Counter[tuple[int, int]] = Counter()
    raters: dict[str, int] = {}
    while batch := list(islice(rankings, BATCH)):
        with store.batch():
            for ranking in batch:
                _add(store, ranking, name, kind, seen, raters, told)
    told.num_prompts = len({prompt for prompt, _ in seen})
    told.raters = list(raters)
    return told


def _add(
    store: Store,
    ranking: Ranking,
    name: str,
    kind: str,
    seen: Counter[tuple[int, int]],
    raters: dict[str, int],
    told: Imported,
) -> None:
    first = {text.strip(): place for place, text in reversed(list(enumerate(ranking.responses)))}
    kept = sorted(first.values())
    told.num_equal_answers += len(ranking.responses) - len(kept)
    prompt = store.add_prompt(ranking.prompt)
    round_, ids, is_new = _answers(store, prompt, [ranking.responses[place] for place in kept], ranking.source or name)
    told.num_new_rounds += is_new and round_ > 1
    seen[prompt, round_] += 1
    rater = name if seen[prompt, round_] == 1 else f"{name} ({seen[prompt, round_]})"
    if rater not in raters:
        raters[rater] = store.add_rater(rater, kind)
    ranks = dict(zip(ids, dense([ranking.ranks[place] for place in kept]), strict=True))
    scores = (
        None if ranking.strengths is None else {id_: ranking.strengths[p] for id_, p in zip(ids, kept, strict=True)}
    )
    said = json.dumps([rater, prompt, sorted(ranks.items()), None if scores is None else sorted(scores.items())])
    request = str(uuid.uuid5(_NAMESPACE, said))
    if store.has_act(request):
        told.num_known += 1
    else:
        store.rank(request, prompt, raters[rater], ranks, scores=scores)
        told.num_rankings += 1


def _answers(store: Store, prompt: int, texts: list[str], model: str) -> tuple[int, list[int], bool]:
    """The round of the prompt that has these very answers, their ids, and whether it was made now."""
    rounds: dict[int, dict[str, int]] = {}
    for answer in store.answers(prompt):
        rounds.setdefault(answer.round, {})[answer.text.strip()] = answer.id
    wanted = [text.strip() for text in texts]
    for round_, ids in rounds.items():
        if ids.keys() == set(wanted):
            return round_, [ids[text] for text in wanted], False
    new = max(rounds, default=0) + 1
    return new, store.add_answers(prompt, [Answer(text, model, round=new) for text in texts]), True
