"""The file of a feedback store: what is refused, brought up to date, and written whole or not at all."""

import sqlite3
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from feedback_world import asked, one, rank

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.feedback import schema
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store


def test_nothing_is_written_into_a_file_that_is_gone(store: Store, tmp_path: Path) -> None:
    prompt, anna, ids = one(store, "q")
    store.path.rename(tmp_path / "away")
    with pytest.raises(DataError, match="the file was moved, replaced or deleted while it was open"):
        rank(store, prompt, anna, ids, [1, 2])
    (tmp_path / "away").rename(store.path)
    assert store.progress().num_rated == 0
    rank(store, prompt, anna, ids, [1, 2])


def test_a_store_where_none_can_be_made_is_refused_with_the_cure(tmp_path: Path) -> None:
    said = r"s\.sqlite: unable to open database file; look at the modes of it and its folder, or name another place$"
    with pytest.raises(DataError, match=said), schema._connected(tmp_path / "none" / "s.sqlite", "rwc"):
        pass


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
