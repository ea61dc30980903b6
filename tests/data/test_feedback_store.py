"""The feedback store: what goes in, who gets what to rate, and what counts."""

import sqlite3
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from feedback_world import asked, new, rank

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.feedback import assign, reading, schema
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.create(tmp_path / "f.sqlite") as store:
        yield store


# -- prompts, answers, raters ------------------------------------------------------------------------------


def test_the_same_messages_are_the_same_prompt(store: Store) -> None:
    first = store.add_prompt("Why?", meta={"topic": "why"})
    assert store.add_prompt([{"role": "user", "content": " Why?\n"}], overlap=True) == first
    assert store.add_prompt("Why not?") != first
    rank(store, *_one(store, "Why?"), [1, 2])
    [found] = store.rankings()
    assert (found.meta, found.overlap) == ({"topic": "why"}, True)  # what was not given again stayed


def _one(store: Store, prompt: str) -> tuple[int, int, list[int]]:
    id_, ids = asked(store, prompt, "a", "b")
    return id_, store.add_rater("anna"), ids


def test_prompts_that_do_not_leave_the_word_to_the_assistant_are_refused(store: Store) -> None:
    with pytest.raises(DataError, match="the last turn of the prompt is not the user's"):
        store.add_prompt([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    with pytest.raises(DataError, match="empty prompt"):
        store.add_prompt("  ")


def test_equal_answers_are_refused_and_then_none_is_added(store: Store) -> None:
    prompt, _ = asked(store, "q", "yes", "no")
    with pytest.raises(DataError, match="prompt 1, round 1: the answer 'yes' is there already"):
        store.add_answers(prompt, [Answer("maybe", "m"), Answer(" yes\n", "m")])
    assert [answer.text for answer in store.answers(prompt)] == ["yes", "no"]
    with pytest.raises(DataError, match="no prompt 7"):
        store.add_answers(7, [Answer("a", "m")])


def test_an_answer_keeps_where_it_came_from_but_raters_see_its_text_alone(store: Store) -> None:
    prompt = store.add_prompt("q")
    store.add_answers(prompt, [Answer("a", "runs/sft", 0.7), Answer("b", "runs/ppo", 1.0)])
    assert [(a.model, a.temperature, a.round) for a in store.answers(prompt)] == [
        ("runs/sft", 0.7, 1),
        ("runs/ppo", 1.0, 1),
    ]
    task = store.next_prompt(store.add_rater("anna"))
    assert "runs" not in repr(task)


def test_raters_have_a_name_a_kind_and_perhaps_a_token(store: Store, tmp_path: Path) -> None:
    anna = store.add_rater("anna", token="first")
    assert store.add_rater(" anna ", token="sesame") == anna
    assert store.rater_of_token("first") is None
    assert store.rater_of_token("sesame") == store.raters()[0]
    with pytest.raises(DataError, match="'anna' is there as person, not as judge"):
        store.add_rater("anna", "judge")
    with pytest.raises(DataError, match="another rater has this token"):
        store.add_rater("bob", token="sesame")
    for name in ("", "a\nb", "\u202eanna", "\u200d"):
        with pytest.raises(DataError, match="a rater's name has 1 to 100 characters"):
            store.add_rater(name)
    with pytest.raises(DataError, match="at most 100 characters, and 'xxxxxxxxxxxxxxxxxxxx'… has 101; shorten it"):
        store.add_rater("x" * 101)
    store.add_rater("محمد\u200cرضا")  # what parts letters in Persian is no letter, but belongs to the name
    assert [rater.name for rater in store.raters()] == ["anna", "محمد\u200cرضا"]
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"anna" in written
    assert b"sesame" not in written


# -- who gets what -----------------------------------------------------------------------------------------


def test_what_all_must_rate_comes_first_then_what_others_have_begun(store: Store) -> None:
    (new_, _), (begun, its), (all_, _) = (asked(store, q, "a", "b", overlap=q == "all") for q in ("1", "2", "all"))
    store.add_prompt("without answers")
    asked(store, "with one", "a")
    newer, _ = asked(store, "newer", "a", "b", round=2)
    anna, bob = map(store.add_rater, ("anna", "bob"))
    rank(store, begun, anna, its, [1, 2])
    given = []
    while (task := store.next_prompt(bob, target=2)) is not None:
        given.append(task.prompt_id)
        store.skip(new(), task.prompt_id, bob)
    assert given == [newer, all_, begun, new_]
    assert store.next_prompt(store.add_rater("cleo"), target=1).prompt_id == newer  # type: ignore[union-attr]


def test_raters_who_stop_halfway_have_rated_the_same_prompts(store: Store) -> None:
    for number in range(6):
        asked(store, str(number), "a", "b", overlap=number == 5)

    def rated(name: str, number: int, target: int) -> list[int]:
        rater, done = store.add_rater(name), []
        for _ in range(number):
            task = store.next_prompt(rater, target=target)
            assert task is not None
            rank(store, task.prompt_id, rater, [answer.id for answer in task.answers], [1, 2])
            done.append(task.prompt_id)
        return done

    assert rated("anna", 3, 2) == rated("bob", 3, 2) == [6, 1, 2]
    assert rated("cleo", 3, 3) == [6, 1, 2]  # for a third rating, what has two comes before what has none


def test_a_prompt_is_kept_from_others_only_where_those_who_have_it_in_hand_make_up_its_ratings(store: Store) -> None:
    asked(store, "q", "a", "b")
    anna, bob, cleo = map(store.add_rater, ("anna", "bob", "cleo"))
    judge = store.add_rater("rm", "judge")
    assert store.next_prompt(judge, target=2) is not None  # whose ratings are counted apart
    assert store.next_prompt(anna, target=2) is not None
    task = store.next_prompt(bob, target=2)
    assert task is not None
    assert store.next_prompt(cleo, target=2) is None
    rank(store, task.prompt_id, bob, [answer.id for answer in task.answers], [1, 2])
    assert store.next_prompt(cleo, target=2) is None  # one rating, and one in anna's hands
    assert store.next_prompt(cleo, target=3) is not None


def test_two_raters_at_once_get_different_prompts_until_one_has_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for question in ("1", "2"):
        asked(store, question, "a", "b")
    anna, bob, cleo = map(store.add_rater, ("anna", "bob", "cleo"))
    now = [1000.0]
    monkeypatch.setattr(assign.time, "time", lambda: now[0])
    assert [store.next_prompt(rater).prompt_id for rater in (anna, bob, anna)] == [1, 2, 1]  # type: ignore[union-attr]
    assert store.next_prompt(cleo) is None
    now[0] += assign.LEASE_SECONDS - 1
    assert store.next_prompt(cleo) is None
    now[0] += 2
    assert store.next_prompt(cleo).prompt_id == 1  # type: ignore[union-attr]
    assert store.next_prompt(anna).prompt_id == 2  # type: ignore[union-attr]
    store.rank(new(), 1, anna, {1: 1, 2: 2})  # late, but kept
    assert store.progress().num_rated == 1


def test_answers_come_in_an_order_of_each_raters_own_that_stays(store: Store, tmp_path: Path) -> None:
    asked(store, "q", *"abcdef", overlap=True)
    raters = [store.add_rater(f"rater {number}") for number in range(40)]
    orders = [[answer.text for answer in store.next_prompt(rater).answers] for rater in raters]  # type: ignore[union-attr]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) > 30
    firsts = [order[0] for order in orders]
    assert max(map(firsts.count, "abcdef")) < 20
    with Store.open(tmp_path / "f.sqlite") as again:
        assert [answer.text for answer in again.next_prompt(raters[0]).answers] == orders[0]  # type: ignore[union-attr]


def test_judges_do_not_use_up_what_people_shall_rate(store: Store) -> None:
    prompt, ids = asked(store, "q", "a", "b")
    judge, anna = store.add_rater("rm", "judge"), store.add_rater("anna")
    [task] = store.tasks(judge)
    rank(store, task.prompt_id, judge, ids, [1, 2])
    assert list(store.tasks(judge)) == []
    assert store.next_prompt(store.add_rater("api", "endpoint"), target=1) is None
    assert store.next_prompt(anna).prompt_id == prompt  # type: ignore[union-attr]
    found = store.progress()
    assert (found.num_rated, found.num_target, found.num_judged) == (1, 0, 1)


# -- ranking -----------------------------------------------------------------------------------------------


def test_a_ranking_sent_twice_is_stored_once(store: Store) -> None:
    prompt, anna, ids = _one(store, "q")
    request = new()
    act = store.rank(request, prompt, anna, {ids[0]: 1, ids[1]: 2}, seconds=3.5, shown=ids[::-1], strength=7, note="n")
    assert store.rank(request.upper(), prompt, anna, {ids[0]: 1, ids[1]: 2}) == act
    assert store.has_act(request)
    with pytest.raises(DataError, match="another act has it"):
        store.skip(request, prompt, anna)
    [found] = store.rankings()
    [vote] = found.votes
    assert (vote.ranks, vote.seconds, vote.shown, vote.strength, vote.note) == ([1, 2], 3.5, [1, 0], 7, "n")


def test_the_newest_ranking_of_a_rater_counts_and_gaps_in_ranks_are_closed(store: Store) -> None:
    prompt, ids = asked(store, "q", "a", "b", "c")
    anna, bob = map(store.add_rater, ("anna", "bob"))
    rank(store, prompt, anna, ids, [1, 2, 3])
    rank(store, prompt, bob, ids, [1, 1, 1], all_bad=True)
    rank(store, prompt, anna, ids, [9, 4, 4], scores={ids[0]: -1.5, ids[1]: 0, ids[2]: 0})
    [found] = store.rankings()
    assert [(v.rater.name, v.ranks, v.all_bad, v.scores) for v in found.votes] == [
        ("anna", [2, 1, 1], False, [-1.5, 0, 0]),
        ("bob", [1, 1, 1], True, None),
    ]
    assert store.progress(target=2).num_target == 1
    assert store.progress(target=3).num_target == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ranks": {1: 1}}, r"covers its two or more answers \[1, 2\]; found \[1\]"),
        ({"ranks": {1: 1, 2: 1, 3: 2}}, r"found \[1, 2, 3\]"),
        ({"ranks": {}}, "ranks are whole numbers from 1"),
        ({"ranks": {1: 0, 2: 1}}, "ranks are whole numbers from 1"),
        ({"ranks": {1: 1.5, 2: 1}}, "ranks are whole numbers from 1"),
        ({"ranks": {1: True, 2: 1}}, "ranks are whole numbers from 1"),
        ({"request_id": "1"}, "request_id is '1'; a UUID is wanted"),
        ({"rater_id": 9}, "no rater 9"),
        ({"prompt_id": 2**70}, "no prompt 1180591620717411303424"),
        ({"strength": 8}, "strength is 8; it goes from 1 to 7"),
        ({"note": "x" * 10_001}, "the note has 10001 characters; at most 10000"),
        ({"note": "\ud800"}, "half a character"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": -1}, "seconds is -1"),
        ({"shown": [1]}, r"shown holds each ranked answer once; found \[1\]"),
        ({"scores": {1: 1.0, 2: float("inf")}}, "scores are finite numbers"),
        ({"scores": {1: 10**400, 2: 1}}, "scores are finite numbers"),
    ],
)
def test_a_ranking_that_cannot_be_is_refused(store: Store, change: dict[str, Any], error: str) -> None:
    prompt, anna, ids = _one(store, "q")
    asked(store, "other", "c", "d")
    words = {"request_id": new(), "prompt_id": prompt, "rater_id": anna, "ranks": {ids[0]: 1, ids[1]: 2}} | change
    with pytest.raises(DataError, match=error):
        store.rank(**words)
    assert store.progress().num_rated == 0


def test_undo_takes_back_the_last_act_and_gives_its_prompt_again(store: Store) -> None:
    one, ids = asked(store, "1", "a", "b")
    two, _ = asked(store, "2", "a", "b")
    anna = store.add_rater("anna")
    act = rank(store, one, anna, ids, [2, 1])
    flagged = store.flag(new(), two, anna, "it is broken", 2.0)
    task = store.undo(anna, flagged)
    assert task is not None
    assert (task.prompt_id, task.ranks) == (two, {})
    assert store.undo(anna, flagged) == task  # the same request again takes nothing more back
    assert store.last_act(anna) == act
    assert store.undo(anna) == store.next_prompt(anna)
    assert store.next_prompt(anna).ranks == {ids[0]: 2, ids[1]: 1}  # type: ignore[union-attr]
    assert store.undo(anna) is None
    assert store.last_act(anna) is None
    assert store.progress().num_rated == 0
    assert rank(store, one, anna, ids, [1, 2]) > act
    assert [vote.ranks for found in store.rankings() for vote in found.votes] == [[1, 2]]


def test_skips_and_flags_take_a_prompt_off_one_raters_list(store: Store) -> None:
    one, _ = asked(store, "1", "a", "b")
    two, _ = asked(store, "2", "a", "b")
    anna, bob = map(store.add_rater, ("anna", "bob"))
    store.skip(new(), one, anna, 1.0)
    store.flag(new(), two, anna, "not a question", 1.0)
    with pytest.raises(DataError, match="the reason of a flag is empty"):
        store.flag(new(), two, anna, "  ")
    assert store.next_prompt(anna) is None
    assert store.next_prompt(bob) is not None
    [own] = store.progress(anna).raters
    assert (own.num_rated, own.num_skipped, own.num_flagged, own.num_left) == (0, 1, 1, 0)
    assert [(found.num_skips, found.flags) for found in store.rankings()] == [(1, []), (0, ["not a question"])]


def test_progress_counts_what_is_left_for_a_rater_and_the_median_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [asked(store, str(number), "a", "b", overlap=number == 0) for number in range(4)]
    asked(store, "one answer", "a")
    anna, bob = map(store.add_rater, ("anna", "bob"))
    for (prompt, ids), seconds in zip(made[:3], (1.0, 9.0, 2.0), strict=True):
        rank(store, prompt, anna, ids, [1, 2], seconds=seconds)
    found = store.progress()
    assert (found.num_prompts, found.num_rated, found.num_target, found.seconds) == (4, 3, 3, 2.0)
    assert [(own.num_rated, own.num_left) for own in found.raters] == [(3, 1), (0, 2)]  # bob: the overlap and the last
    assert [own.num_left for own in store.progress(target=2).raters] == [1, 4]
    assert store.progress(bob).seconds is None
    monkeypatch.setattr(reading, "RECENT", 2)
    assert store.progress(anna).seconds == 5.5  # of the last two


# -- rounds ------------------------------------------------------------------------------------------------


def test_undo_leaves_earlier_rounds_whose_answers_are_not_shown_any_more(store: Store) -> None:
    prompt, anna, ids = _one(store, "q")
    rank(store, prompt, anna, ids, [1, 2])
    asked(store, "q", "a", "d", round=2)
    assert store.last_act(anna) is None
    assert store.undo(anna) is None
    assert [(found.round, found.votes[0].ranks) for found in store.rankings()] == [(1, [1, 2])]


def test_answers_of_a_new_round_open_the_prompt_again_and_the_old_ranking_stays(store: Store) -> None:
    prompt, anna, ids = _one(store, "q")
    rank(store, prompt, anna, ids, [1, 2])
    with pytest.raises(DataError, match="prompt 1 was rated in round 1; give new answers a new round"):
        store.add_answers(prompt, [Answer("c", "m")])
    assert store.next_prompt(anna) is None
    _, newer = asked(store, "q", "a", "d", round=2)
    task = store.next_prompt(anna)
    assert task is not None
    assert (task.round, sorted(answer.text for answer in task.answers)) == (2, ["a", "d"])
    assert store.progress().num_rated == 0
    rank(store, prompt, anna, newer, [2, 1])
    rank(store, prompt, anna, ids, [1, 1])  # a late one of the first round
    assert [(found.round, found.votes[0].ranks) for found in store.rankings()] == [(1, [1, 1]), (2, [2, 1])]
    assert store.progress().num_rated == 1


def test_a_skip_is_of_the_round_that_the_rater_saw(store: Store) -> None:
    prompt, anna, _ = _one(store, "q")
    asked(store, "q", "a", "d", round=2)
    store.skip(new(), prompt, anna, round=1)
    assert store.next_prompt(anna).round == 2  # type: ignore[union-attr]
    store.flag(new(), prompt, anna, "no question")
    assert [(found.round, found.num_skips, found.flags) for found in store.rankings()] == [
        (1, 1, []),
        (2, 0, ["no question"]),
    ]
    for round_ in (0, 3, True):
        with pytest.raises(DataError, match=f"prompt 1: no round {round_}; the newest is 2"):
            store.skip(new(), prompt, anna, round=round_)


def test_gold_ranks_are_found_by_the_answers_texts(store: Store) -> None:
    prompt, ids = asked(store, "q", "bad", " good\n", "other", gold_ranks={"good": 1, "bad": 2})
    rank(store, prompt, store.add_rater("anna"), ids, [1, 2, 3])
    assert [found.gold for found in store.rankings()] == [[2, 1, None]]
    with pytest.raises(DataError, match="gold_ranks: two answers or more"):
        store.add_prompt("q", gold_ranks={"good": 1})


# -- the file ----------------------------------------------------------------------------------------------


def test_nothing_is_written_into_a_file_that_is_gone(store: Store, tmp_path: Path) -> None:
    prompt, anna, ids = _one(store, "q")
    store.path.rename(tmp_path / "away")
    with pytest.raises(DataError, match="the file was moved, replaced or deleted while it was open"):
        rank(store, prompt, anna, ids, [1, 2])
    (tmp_path / "away").rename(store.path)
    assert store.progress().num_rated == 0
    rank(store, prompt, anna, ids, [1, 2])


def test_what_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("hello " * 1000)
    (tmp_path / "empty.sqlite").touch()
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE things (id)")
    other.close()
    for name in ("text", "empty", "other"):
        with pytest.raises(DataError, match=f"{name}.sqlite: not a feedback store"):
            Store.open(tmp_path / f"{name}.sqlite")
    with pytest.raises(DataError, match=r"gone\.sqlite: no such file"):
        Store.open(tmp_path / "gone.sqlite")
    assert not (tmp_path / "gone.sqlite").exists()
    with pytest.raises(SettingsError, match=r"other\.sqlite: already there"):
        Store.create(tmp_path / "other.sqlite")
    with pytest.raises(SettingsError, match="no folder"):
        Store.create(tmp_path / "none" / "f.sqlite")


def test_create_goes_on_where_a_kill_left_an_empty_file_and_never_writes_over_a_store(tmp_path: Path) -> None:
    (tmp_path / "f.sqlite").touch()
    with Store.create(tmp_path / "f.sqlite") as store:
        store.add_prompt("q")
    with pytest.raises(SettingsError, match="already there"):
        Store.create(tmp_path / "f.sqlite")


def test_a_store_of_a_newer_release_is_refused_and_one_of_an_older_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.sqlite"
    with Store.create(path) as store:
        store.add_prompt("q")
    more = "ALTER TABLE prompts ADD COLUMN priority REAL NOT NULL DEFAULT 1;\nUPDATE prompts SET priority = 2;"
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, more])
        for _ in range(2):
            with Store.open(path) as store:
                assert store._db.execute("SELECT priority FROM prompts").fetchall() == [(2.0,)]
    with pytest.raises(DataError, match=r"written by a newer release \(its version is 3, known here are up to 2\)"):
        Store.open(path)


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


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.sqlite"
    Store.create(path).close()
    broken = "CREATE TABLE more (id);\nINSERT INTO nowhere VALUES (1);"
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, broken])
        with pytest.raises(DataError, match="no such table: nowhere"):
            Store.open(path)
    with Store.open(path) as store:
        assert store._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'more'").fetchone() == (0,)


def test_a_batch_is_all_or_none_and_a_part_of_it_may_fail_alone(store: Store) -> None:
    with store.batch():
        prompt, _ = asked(store, "q", "a", "b")
        with pytest.raises(DataError, match="is there already"):
            store.add_answers(prompt, [Answer("c", "m"), Answer("a", "m")])
    assert [answer.text for answer in store.answers(prompt)] == ["a", "b"]
    with suppress(KeyError), store.batch():
        store.add_answers(prompt, [Answer("c", "m")])
        raise KeyError
    assert [answer.text for answer in store.answers(prompt)] == ["a", "b"]


def test_rankings_show_one_state_while_others_go_on(store: Store) -> None:
    made = [asked(store, str(number), "a", "b") for number in range(3)]
    anna = store.add_rater("anna")
    rank(store, made[0][0], anna, made[0][1], [1, 2])
    found = store.rankings()
    first = next(found)
    rank(store, made[1][0], anna, made[1][1], [1, 2])
    assert [one.prompt_id for one in (first, *found)] == [made[0][0]]
    assert len(list(store.rankings())) == 2


def test_several_threads_may_use_one_store(store: Store) -> None:
    for number in range(24):
        asked(store, str(number), "a", "b")
    raters = [store.add_rater(f"rater {number}") for number in range(4)]

    def work(rater: int) -> None:
        while (task := store.next_prompt(rater)) is not None:
            rank(store, task.prompt_id, rater, [answer.id for answer in task.answers], [1, 2])

    threads = [Thread(target=work, args=(rater,)) for rater in raters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found.votes) for found in store.rankings()] == [1] * 24
