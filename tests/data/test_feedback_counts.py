"""What a feedback store counts as it goes is what is there."""

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from feedback_world import asked, new, rank

from rlhf.data.feedback import schema
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store


def counted(store: Store) -> tuple[set[Any], set[Any]]:
    """What the store counts as it goes, and the same counted anew."""
    kept = "SELECT 0, '', * FROM counts WHERE num UNION ALL SELECT * FROM dealt WHERE num"
    sort = "p.round, p.overlap, p.num_people, p.num_judges"
    anew = f"""SELECT 0, '', {sort}, count(*) FROM prompts p WHERE ready GROUP BY {sort}
        UNION ALL SELECT a.rater_id, a.kind, {sort}, count(*) FROM acts a
        JOIN prompts p ON p.id = a.prompt_id AND p.round = a.round
        WHERE a.undone_at IS NULL AND ready GROUP BY a.rater_id, a.kind, {sort}"""
    return set(store._db.execute(kept)), set(store._db.execute(anew))


def test_what_is_counted_as_it_happens_is_what_is_there(store: Store) -> None:
    """Three raters do what they can, by chance, while rounds and answers come."""
    chance = Random(0)
    raters = [store.add_rater(name, kind) for name, kind in (("anna", "person"), ("bob", "person"), ("rm", "judge"))]
    prompts = [asked(store, str(number), "a", "b", overlap=number < 2)[0] for number in range(5)]
    seen = set()
    for _ in range(150):
        rater, prompt = chance.choice(raters), chance.choice(prompts)
        newest = max(answer.round for answer in store.answers(prompt))
        round_ = chance.randint(1, newest)
        what = chance.choices(("rank", "skip", "flag", "undo", "round"), (6, 2, 2, 3, 1))[0]
        if what == "rank":
            rank(store, prompt, rater, [answer.id for answer in store.answers(prompt, round_)], [1, 2])
        elif what == "skip":
            store.skip(new(), prompt, rater, round=round_)
        elif what == "flag":
            store.flag(new(), prompt, rater, "x", round=round_)
        elif what == "undo":
            store.undo(rater)
        else:
            store.add_answers(prompt, [Answer(text, "m", round=newest + 1) for text in "ab"])
        kept, anew = counted(store)
        assert kept == anew
        seen |= kept
    assert len(seen) > 100
    before = counted(store)[0]
    with suppress(KeyError), store.batch():
        rank(store, prompts[0], raters[0], [answer.id for answer in store.answers(prompts[0], 1)], [1, 2])
        store.undo(raters[1])
        raise KeyError
    assert counted(store)[0] == before


def test_a_store_of_the_first_version_is_counted_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.sqlite"
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        with Store.create(path) as store:
            made = [asked(store, str(number), "a", "b", overlap=number == 0) for number in range(3)]
            asked(store, "one answer", "a")
            anna, bob = map(store.add_rater, ("anna", "bob"))
            rank(store, *made[0][:1], anna, made[0][1], [1, 2])
            store.skip(new(), made[1][0], bob)
            rank(store, made[2][0], bob, made[2][1], [1, 2])
            store.undo(bob)
    with Store.open(path) as store:
        kept, anew = counted(store)
        assert kept == anew
        assert [(own.num_rated, own.num_skipped, own.num_left) for own in store.progress().raters] == [
            (1, 0, 2), (0, 1, 2),
        ]  # fmt: skip
        rank(store, made[1][0], anna, made[1][1], [1, 2])
        kept, anew = counted(store)
        assert kept == anew
