"""What people and judges said, written down as rows to train on or for the tools of others.

Each prompt and round becomes one ranking by the rule that was asked for, and each form says that same ranking:

- `rankings`: the toolkit's own rows, `{prompt, responses, ranks}`, with `strengths` where there are any, and as
  `source` whose votes they are: people, judges, or people and judges. JSON Lines.
- `pairs`: a row `{prompt, chosen, rejected}` of messages, as TRL reads them, for every two answers of which one is
  better, with the two `strengths`. Tied answers make no pair. JSON Lines.
- `argilla`: records with a submitted response to a ranking question. A list in JSON.
- `label-studio`: tasks with a Ranker's annotation. It knows no ties: where some answers are tied, a second annotation
  has these the other way round, and of the two the mean places are equal. A list in JSON.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf.data.convert import own_row
from rlhf.data.errors import SettingsError
from rlhf.data.examples import Ranking
from rlhf.data.feedback.records import Judged, Vote
from rlhf.data.feedback.resolve import RULES, WHO, Rule, Who, resolve, votes_of
from rlhf.data.feedback.store import Store
from rlhf.data.files import new_file

Form = Literal["rankings", "pairs", "argilla", "label-studio"]
FORMS: tuple[str, ...] = get_args(Form)


@dataclass
class Exported:
    """What was written, what became of disagreement, and what there is that was not written."""

    rows: int = 0
    num_prompts: int = 0
    """Prompts (in one round each) whose ranking was written."""
    num_rankings: int = 0
    """Votes that were counted for them."""
    num_single: int = 0
    """Prompts with one vote."""
    num_agreed: int = 0
    """Prompts whose votes are the same."""
    num_disagreed: int = 0
    """Prompts whose votes differ, and were resolved by the rule."""
    num_circles: int = 0
    """Of these, prompts whose majority went round in a circle, which was tied."""
    num_tied: int = 0
    """Prompts whose answers are all tied, by the raters or by the rule."""
    num_tied_pairs: int = 0
    """Pairs of answers that are tied: `pairs` has no row for them."""
    num_all_bad: int = 0
    """Prompts that were written and of which some rater said that all answers are bad."""
    num_flagged: int = 0
    """Prompts that somebody flagged, whether they were written or not."""
    num_skipped: int = 0
    """Prompts that somebody skipped, whether they were written or not."""
    num_left_out: int = 0
    """Prompts that were only skipped or flagged, or ranked by others than those asked for, and not written."""
    num_scores_left_out: int = 0
    """Prompts with several votes, some with scores: each rater has a measure of their own, so none was written."""
    num_strengths_left_out: int = 0
    """Prompts whose strengths the form has no place for."""


def export(
    store: Store, out: Path, form: Form, rule: Rule = "majority", who: Who = "people-first", force: bool = False
) -> Exported:
    """Write all that counts in a store to `out`, whole or not at all.

    Raises SettingsError where `out` cannot be written, or is there already and `force` is not given, and where there
    is no ranking to write.
    """
    for name, value, known in (("--as", form, FORMS), ("--rule", rule, RULES), ("--raters", who, WHO)):
        if value not in known:
            raise SettingsError(f"{name} {value}: choose from {', '.join(known)}")
    suffix = ".jsonl" if form in ("rankings", "pairs") else ".json"
    if out.suffix != suffix:
        raise SettingsError(f"{out}: {form} are written to a name that ends in {suffix}")
    if out.exists() and out.samefile(store.path):
        raise SettingsError(f"{out}: is the store itself; give another name")
    told = Exported()
    before, between, after = ("", "\n", "\n") if suffix == ".jsonl" else ("[\n", ",\n", "\n]\n")
    with new_file(out, force) as file:
        for row in _rows(store, form, rule, who, told):
            file.write(((between if told.rows else before) + json.dumps(row, ensure_ascii=False)).encode())
            told.rows += 1
        if not told.rows:
            raise SettingsError(f"{store.path}: nothing to write as {form} of raters: {who}; {_why(told, form)}")
        file.write(after.encode())
    return told


def _why(told: Exported, form: str) -> str:
    if told.num_prompts:
        return f"all answers of its {told.num_prompts} prompts are tied, and {form} hold none"
    if told.num_left_out:
        return f"{told.num_left_out} prompts were only skipped or flagged, or ranked by others"
    return "nobody has ranked anything"


def _rows(store: Store, form: Form, rule: Rule, who: Who, told: Exported) -> Iterator[dict[str, Any]]:
    for judged in store.rankings():
        told.num_flagged += bool(judged.flags)
        told.num_skipped += bool(judged.num_skips)
        votes = votes_of(judged, who)
        if not votes:
            told.num_left_out += 1
            continue
        ranking = _resolved(judged, votes, rule, told)
        told.num_strengths_left_out += ranking.strengths is not None and form in ("argilla", "label-studio")
        yield from _FORMS[form](judged, ranking)


def _resolved(judged: Judged, votes: list[Vote], rule: Rule, told: Exported) -> Ranking:
    resolved = resolve(votes, rule)
    told.num_prompts += 1
    told.num_rankings += len(votes)
    told.num_single += len(votes) == 1
    told.num_agreed += len(votes) > 1 and not resolved.disagreed
    told.num_disagreed += resolved.disagreed
    told.num_circles += resolved.circle
    told.num_tied += max(resolved.ranks) == 1
    told.num_tied_pairs += sum(a == b for a, b in combinations(resolved.ranks, 2))
    told.num_all_bad += any(vote.all_bad for vote in votes)
    told.num_scores_left_out += len(votes) > 1 and any(vote.scores is not None for vote in votes)
    kinds = {vote.rater.kind == "person": None for vote in votes}
    source = " and ".join(name for person, name in ((True, "people"), (False, "judges")) if person in kinds)
    texts = [answer.text for answer in judged.answers]
    return Ranking(judged.messages, texts, list(map(float, resolved.ranks)), resolved.strengths, source)


def _ranking_row(judged: Judged, ranking: Ranking) -> Iterator[dict[str, Any]]:
    yield own_row(ranking)


def _pair_rows(judged: Judged, ranking: Ranking) -> Iterator[dict[str, Any]]:
    answers = [[{"role": "assistant", "content": text}] for text in ranking.responses]
    for a, b in combinations(range(len(answers)), 2):
        if ranking.ranks[a] == ranking.ranks[b]:
            continue
        better, worse = (a, b) if ranking.ranks[a] < ranking.ranks[b] else (b, a)
        row: dict[str, Any] = {"prompt": ranking.prompt, "chosen": answers[better], "rejected": answers[worse]}
        if ranking.strengths is not None:
            row["strengths"] = [ranking.strengths[better], ranking.strengths[worse]]
        yield row | {"source": ranking.source}


def _argilla_record(judged: Judged, ranking: Ranking) -> Iterator[dict[str, Any]]:
    row = own_row(ranking)
    names = [f"response-{place}" for place in range(1, len(ranking.responses) + 1)]
    value = [{"value": name, "rank": rank} for name, rank in zip(names, row["ranks"], strict=True)]
    yield {
        "id": _id(judged),
        "fields": {"prompt": row["prompt"]} | dict(zip(names, ranking.responses, strict=True)),
        "metadata": {"source": ranking.source},
        "suggestions": {},
        "responses": {"ranking": [{"value": value, "status": "submitted"}]},
    }


def _label_studio_task(judged: Judged, ranking: Ranking) -> Iterator[dict[str, Any]]:
    row = own_row(ranking)
    ids = [str(place) for place in range(1, len(ranking.responses) + 1)]
    rank = dict(zip(ids, ranking.ranks, strict=True))
    orders = [sorted(ids, key=rank.__getitem__)]
    if len(set(ranking.ranks)) < len(ids):
        orders.append(sorted(ids, key=lambda id_: (rank[id_], -int(id_))))
    yield {
        "id": _id(judged),
        "data": {
            "prompt": row["prompt"],
            "items": [{"id": id_, "body": text} for id_, text in zip(ids, ranking.responses, strict=True)],
            "source": ranking.source,
        },
        "annotations": [
            {
                "was_cancelled": False,
                "result": [
                    {"type": "ranker", "from_name": "rank", "to_name": "items", "value": {"ranker": {"rank": order}}}
                ],
            }
            for order in orders
        ],
    }


def _id(judged: Judged) -> str:
    return f"{judged.prompt_id}-{judged.round}"


_FORMS: dict[str, Callable[[Judged, Ranking], Iterator[dict[str, Any]]]] = {
    "rankings": _ranking_row,
    "pairs": _pair_rows,
    "argilla": _argilla_record,
    "label-studio": _label_studio_task,
}
