"""What leaves a feedback store and what comes into it."""

import json
from pathlib import Path
from typing import Any

import pytest
from feedback_world import asked, new, rank

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.examples import Ranking
from rlhf.data.feedback.export import FORMS, Exported, export
from rlhf.data.feedback.importing import import_gold, import_rankings
from rlhf.data.feedback.resolve import dense
from rlhf.data.feedback.store import Store
from rlhf.data.rows import load
from rlhf.data.sources import Source

SYSTEM = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hé\u2028?"}]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Three raters: of one mind about the first prompt, split about the second; the third was ranked by the judge."""
    with Store.create(tmp_path / "f.sqlite") as store:
        one, ids = asked(store, "q", "x ", "y", "z", "<b>")
        two, others = asked(store, SYSTEM, "x", "y")
        three, last = asked(store, "r", "x", "y", "z")
        odd, _ = asked(store, "odd", "x", "y")
        anna, bob, rm = store.add_rater("anna"), store.add_rater("bob"), store.add_rater("rm", "judge")
        rank(store, one, anna, ids, [2, 1, 2, 3], strength=6)
        rank(store, one, bob, ids, [2, 1, 2, 3], strength=2)
        rank(store, two, anna, others, [1, 2])
        rank(store, two, bob, others, [2, 1], all_bad=True)
        rank(store, two, rm, others, [1, 2])
        rank(store, three, rm, last, [1, 3, 2], scores=dict(zip(last, (0.5, -1, 0), strict=True)))
        store.skip(new(), three, anna)
        store.flag(new(), odd, anna, "odd")
        yield store


def read(path: Path) -> list[Ranking]:
    loaded = load(Source(path=str(path)), "preferences", keep_ties=True)
    assert loaded.report.bad == 0
    return list(loaded.rows)


def test_the_export_says_what_became_of_disagreement_skips_and_flags(store: Store, tmp_path: Path) -> None:
    found = export(store, tmp_path / "o.jsonl", "rankings")
    assert found == Exported(
        rows=3,
        num_prompts=3,
        num_rankings=5,
        num_single=1,
        num_agreed=1,
        num_disagreed=1,
        num_tied=1,
        num_tied_pairs=2,
        num_all_bad=1,
        num_flagged=1,
        num_skipped=1,
        num_left_out=1,
    )
    assert read(tmp_path / "o.jsonl") == [
        Ranking([{"role": "user", "content": "q"}], ["x ", "y", "z", "<b>"], [2, 1, 2, 3], [2, 4, 2, 0], "people"),
        Ranking(SYSTEM, ["x", "y"], [1, 1], None, "people"),
        Ranking([{"role": "user", "content": "r"}], ["x", "y", "z"], [1, 3, 2], [0.5, -1, 0], "judges"),
    ]


def test_every_rater_may_count_or_some(store: Store, tmp_path: Path) -> None:
    everybody = export(store, tmp_path / "all.jsonl", "rankings", who="all")
    assert (everybody.num_rankings, everybody.num_disagreed) == (6, 1)
    assert read(tmp_path / "all.jsonl")[1] == Ranking(SYSTEM, ["x", "y"], [1, 2], None, "people and judges")
    people = export(store, tmp_path / "people.jsonl", "rankings", who="people")
    assert (people.num_prompts, people.num_left_out) == (2, 2)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_as_the_same_rankings(store: Store, tmp_path: Path, form: Any) -> None:
    own, out = tmp_path / "own.jsonl", tmp_path / ("o.jsonl" if form in ("rankings", "pairs") else "o.json")
    export(store, own, "rankings", "mean_rank")
    export(store, out, form, "mean_rank")
    rows = read(out)
    if form == "pairs":
        assert [(row.prompt[-1]["content"], *row.responses) for row in rows] == [
            ("q", "y", "x "),
            ("q", "x ", "<b>"),
            ("q", "y", "z"),
            ("q", "y", "<b>"),
            ("q", "z", "<b>"),
            ("r", "x", "y"),
            ("r", "x", "z"),
            ("r", "z", "y"),
        ]
        assert [row.strengths for row in rows][-3:] == [[0.5, -1], [0.5, 0], [0, -1]]
        return

    def said(ranking: Ranking) -> tuple[Any, dict[str, int]]:
        return ranking.prompt, dict(zip(ranking.responses, dense(ranking.ranks), strict=True))

    assert [said(row) for row in rows] == [said(row) for row in read(own)]


def test_pairs_are_messages_as_trl_reads_them(store: Store, tmp_path: Path) -> None:
    export(store, tmp_path / "o.jsonl", "pairs", who="judges")
    first = json.loads((tmp_path / "o.jsonl").read_text().split("\n")[0])
    assert first == {
        "prompt": SYSTEM,
        "chosen": [{"role": "assistant", "content": "x"}],
        "rejected": [{"role": "assistant", "content": "y"}],
        "source": "judges",
    }


def test_an_export_that_cannot_be_written_leaves_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    for name, form, error in (
        ("there.jsonl", "rankings", "already there; give another name, or --force"),
        ("o.json", "pairs", r"pairs are written to a name that ends in \.jsonl"),
        ("o.jsonl", "argilla", r"argilla are written to a name that ends in \.json"),
        ("none/o.jsonl", "rankings", "no folder"),
        ("o.jsonl", "csv", "--as csv: choose from rankings, pairs, argilla, label-studio"),
    ):
        with pytest.raises(SettingsError, match=error):
            export(store, tmp_path / name, form)  # type: ignore[arg-type]
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    with Store.create(tmp_path / "empty.sqlite") as empty:
        with pytest.raises(SettingsError, match="nobody has ranked anything"):
            export(empty, tmp_path / "o.jsonl", "rankings")
        prompt, ids = asked(empty, "q", "x", "y")
        rank(empty, prompt, empty.add_rater("anna"), ids, [1, 1])
        with pytest.raises(SettingsError, match="all answers of its 1 prompts are tied, and pairs hold none"):
            export(empty, tmp_path / "o.jsonl", "pairs")
    assert not list(tmp_path.glob("*o.json*"))
    assert not list(tmp_path.glob(".*"))
    assert export(store, tmp_path / "there.jsonl", "rankings", force=True).rows == 3


@pytest.mark.parametrize("form", ["rankings", "argilla", "label-studio"])
def test_what_was_exported_can_be_imported_and_a_second_time_adds_nothing(
    store: Store, tmp_path: Path, form: Any
) -> None:
    out = tmp_path / ("o.jsonl" if form == "rankings" else "o.json")
    export(store, out, form)
    with Store.create(tmp_path / "copy.sqlite") as copy:
        told = import_rankings(copy, Source(path=str(out)))
        assert (told.num_rankings, told.num_known, told.num_prompts, told.raters) == (3, 0, 3, [out.name])
        again = import_rankings(copy, Source(path=str(out)))
        assert (again.num_rankings, again.num_known) == (0, 3)
        [one, two, three] = copy.rankings()
        ranks = dict(zip((answer.text for answer in one.answers), one.votes[0].ranks, strict=True))
        assert ranks == {"x ": 2, "y": 1, "z": 2, "<b>": 3}
        assert two.messages == SYSTEM
        assert three.votes[0].scores == ([0.5, -1, 0] if form == "rankings" else None)


def test_the_store_itself_is_not_written_over(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s.jsonl") as store:
        with pytest.raises(SettingsError, match="is the store itself"):
            export(store, tmp_path / "s.jsonl", "rankings", force=True)
        assert store.raters() == []


def pair(better: str) -> dict[str, Any]:
    return {"prompt": "q", "responses": ["x", "y"], "ranks": [1, 2] if better == "x" else [2, 1]}


def test_another_file_of_the_same_name_is_refused_and_a_named_rater_changes_their_mind(tmp_path: Path) -> None:
    sources = []
    for folder, better in (("anna", "x"), ("bob", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.jsonl").write_text(json.dumps(pair(better)))
        sources.append(Source(path=str(tmp_path / folder / "r.jsonl")))
    anna, bob = sources
    with Store.create(tmp_path / "f.sqlite") as store:
        import_rankings(store, anna)
        with pytest.raises(SettingsError, match=r"in which 1 rankings of .*bob/r.jsonl are others; say with --rater"):
            import_rankings(store, bob)
        assert import_rankings(store, anna).num_known == 1
        told = import_rankings(store, bob, rater="bob")
        assert (told.num_rankings, told.num_replaced) == (1, 0)
        told = import_rankings(store, anna, rater="bob")
        assert (told.num_rankings, told.num_replaced) == (1, 1)
        (found,) = store.rankings()
        assert [(vote.rater.name, vote.ranks) for vote in found.votes] == [("r.jsonl", [1, 2]), ("bob", [1, 2])]


def order(*places: int) -> list[dict[str, Any]]:
    return [{"value": f"response-{i}", "rank": place} for i, place in enumerate(places, 1)]


FIELDS = {"prompt": "q", "response-1": "x", "response-2": "y"}
SAID = {"u1": order(1, 2), "u2": order(2, 1)}
NESTED = {"best": [{"value": value, "status": "submitted", "user_id": user} for user, value in SAID.items()]}
SERVER = [
    {"user_id": user, "status": "submitted", "values": {"best": {"value": value}}} for user, value in SAID.items()
]
RANKER = [
    {"completed_by": who, "result": [{"value": {"ranker": {"rank": ids}}}]}
    for who, ids in (("u1", ["1", "2"]), ({"id": 7, "email": "u2"}, ["2", "1"]))
]
ITEMS = [{"id": "1", "body": "x"}, {"id": "2", "body": "y"}]


@pytest.mark.parametrize(
    "row",
    [
        {"fields": FIELDS, "responses": NESTED},
        {"fields": FIELDS, "responses": SERVER},
        FIELDS
        | {"id": "1", "_server_id": None, "best.responses": list(SAID.values()), "best.responses.users": list(SAID)},
        {"data": {"prompt": "q", "items": ITEMS}, "annotations": RANKER},
    ],
)
def test_annotators_whom_an_export_names_are_raters_of_their_own(store: Store, write: Any, row: dict[str, Any]) -> None:
    assert [ranking.ranks for ranking in load(write(row), "preferences", keep_ties=True).rows] in (
        [[1.5] * 2],
        [[1] * 2],
    )
    told = import_rankings(store, write(row), rater="team")
    assert (told.num_rankings, told.num_prompts, told.raters) == (2, 1, ["team: u1", "team: u2"])
    votes = [vote for found in store.rankings() for vote in found.votes if vote.rater.name.startswith("team")]
    assert [(vote.rater.name, vote.ranks) for vote in votes] == [("team: u1", [1, 2]), ("team: u2", [2, 1])]


def test_imported_rankings_join_a_prompt_with_the_same_answers_and_others_open_a_round(
    store: Store, write: Any
) -> None:
    source = write(
        {"prompt": "r", "responses": ["z", "x", "y", "z "], "ranks": [1, 2, 3, 1]},
        {"prompt": "r", "chosen": "x", "rejected": "w"},
        {"prompt": "r", "responses": ["x", "y", "z"], "ranks": [1, 2, 3]},
    )
    told = import_rankings(store, source, rater="crowd")
    assert (told.num_rankings, told.num_equal_answers, told.num_new_rounds) == (3, 1, 1)
    assert told.raters == ["crowd", "crowd (2)"]  # who ranks the same answers twice is taken for two
    found = [
        (one.round, [(v.rater.name, v.ranks) for v in one.votes]) for one in store.rankings() if one.prompt_id == 3
    ]
    assert found == [
        (1, [("rm", [1, 3, 2]), ("crowd", [2, 3, 1]), ("crowd (2)", [1, 2, 3])]),
        (2, [("crowd", [1, 2])]),
    ]


def test_gold_questions_are_for_all_and_nobodys_ranking(store: Store, write: Any) -> None:
    gold = write({"prompt": "r", "responses": ["z", "x", "y"], "ranks": [1, 2, 2]}, pair("x") | {"prompt": "new"})
    before = [len(found.votes) for found in store.rankings()]
    for _ in range(2):
        assert import_gold(store, gold).num_prompts == 2
    found = {judged.prompt_id: judged for judged in store.rankings()}
    assert [len(judged.votes) for judged in found.values()] == before
    assert (found[3].gold, found[3].overlap) == ([2, 2, 1], True)  # in the order of the store's answers: x, y, z
    anna = store.add_rater("anna")
    task = store.next_prompt(anna, target=0)  # what is for all is asked for whatever the target
    assert task is not None
    assert task.messages == [{"role": "user", "content": "new"}]


def test_rows_that_cannot_be_used_stop_the_import_before_anything_is_stored(tmp_path: Path, write: Any) -> None:
    rows = [{"prompt": "q", "chosen": "x", "rejected": "y"}, {"prompt": "q", "chosen": "", "rejected": "y"}]
    with Store.create(tmp_path / "f.sqlite") as store:
        with pytest.raises(DataError, match="row 2: empty response"):
            import_rankings(store, write(*rows))
        assert store.raters() == []
        told = import_rankings(store, write(*rows), kind="judge", max_dropped=0.5)
        assert (told.num_rankings, told.report.bad, store.raters()[0].kind) == (1, 1, "judge")
