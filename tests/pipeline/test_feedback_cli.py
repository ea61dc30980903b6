"""`rlhf data agreement`, `export` and `import`: what they print, and where."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.create("f.sqlite") as store, store.batch():
        raters = [store.add_rater("anna"), store.add_rater("bob"), store.add_rater("rm", "judge")]
        for number in range(4):
            prompt = store.add_prompt(f"q{number}", gold_ranks={"a": 1, "c": 2} if number == 0 else None)
            ids = store.add_answers(prompt, [Answer(text, "m") for text in "abc"])
            for rater, ranks in zip(raters, ((1, 2, 3), (1, 3, 2), (3, 2, 1)), strict=True):
                said = dict(zip(ids, ranks, strict=True))
                store.rank(str(uuid.uuid4()), prompt, rater, said, seconds=10.0 * rater, shown=ids)
        Store.create("empty.sqlite").close()


def test_agreement_is_told_to_people(rlhf: Call) -> None:
    code, out, err = rlhf("data", "agreement", "f.sqlite")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:2] == ["f.sqlite: 12 rankings of 4 prompts", "4 prompts have several raters"]
    assert "anna bob 4 66.7 %" in lines
    assert "anna person 4 33.3 % 66.7 % 1 of 1 10.0 100.0 %" in lines
    assert "rm judge 4 16.7 % 16.7 % 0 of 1 30.0 0.0 %" in lines
    assert lines.index("anna rm 4 0.0 %") < lines.index("bob rm 4 33.3 %")  # who agree least come first
    assert "the answer shown first is best in 66.7 % (39.1 % to 86.2 %; by chance 33.3 %)" in lines[-8]
    assert lines[-8].endswith("not by chance: the order shown sways the raters")


def test_agreement_as_json_is_what_the_function_finds(rlhf: Call) -> None:
    code, out, _ = rlhf("data", "agreement", "f.sqlite", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == [
        "num_prompts",
        "num_shared_prompts",
        "num_rankings",
        "alpha",
        "alpha_interval",
        "agreement",
        "pairs",
        "raters",
        "position",
        "time",
    ]
    assert found["agreement"]["people"] == {"share": 2 / 3, "num_pairs": 12}


def test_export_tells_what_became_of_disagreement(rlhf: Call) -> None:
    code, out, err = rlhf("data", "export", "f.sqlite", "o.jsonl", "--as", "rankings", "--raters", "all")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "o.jsonl: 4 rows as rankings, of 4 prompts and 12 rankings",
        "  one rater: 0; several, all of one mind: 0",
        "  several that differ: 4, resolved by majority",
        "  all answers tied: 0; all bad, said a rater: 0",
        "  flagged: 0; skipped: 0; no ranking to write: 0",
    ]
    assert [json.loads(line)["ranks"] for line in Path("o.jsonl").read_text().splitlines()] == [[1, 3, 2]] * 4
    code, out, err = rlhf("data", "export", "f.sqlite", "o.jsonl", "--as", "rankings")
    assert (code, out) == (2, "")
    assert "already there; give another name, or --force" in err
    code, _, err = rlhf("data", "export", "f.sqlite", "o.json", "--as", "argilla", "--rule", "vote")
    assert code == 2
    assert "--rule vote: choose from majority, mean_rank, bradley_terry" in err


def test_import_makes_the_store_and_says_what_came_in(rlhf: Call) -> None:
    rlhf("data", "export", "f.sqlite", "o.json", "--as", "argilla", "--rule", "mean_rank")
    code, out, err = rlhf("data", "import", "o.json", "new.sqlite", "--rater", "crowd")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "new.sqlite: 4 rankings of 4 prompts from o.json (argilla)",
        "  raters: crowd; there before: 0",
    ]
    code, out, _ = rlhf("data", "import", "o.json", "new.sqlite", "--rater", "crowd")
    assert "0 rankings of 4 prompts" in out
    assert "there before: 4" in out
    with Store.open("new.sqlite") as store:
        assert [one.votes[0].ranks for one in store.rankings()] == [[1, 2, 2]] * 4


@pytest.mark.parametrize("more", [[], ["--gold"]])
def test_an_import_that_is_refused_leaves_no_store_behind_and_one_that_was_there_alone(
    rlhf: Call, more: list[str]
) -> None:
    Path("bad.jsonl").write_text('{"prompt": "q", "chosen": "a"}\n')
    assert rlhf("data", "import", "bad.jsonl", "new.sqlite", *more)[0] == 2
    assert rlhf("data", "import", "bad.jsonl", "empty.sqlite", *more)[0] == 2
    assert sorted(path.name for path in Path().glob("*.sqlite*")) == ["empty.sqlite", "f.sqlite"]


def test_a_raters_name_that_is_too_long_for_an_import_is_refused(rlhf: Call) -> None:
    Path("one.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    code, _, err = rlhf("data", "import", "one.jsonl", "f.sqlite", "--rater", "x" * 51)
    assert code == 2
    assert "'xxxxxxxxxxxxxxxxxxxx'…: has 51 characters; at most 50 here" in err


def test_gold_questions_are_imported_and_have_no_rater(rlhf: Call) -> None:
    rlhf("data", "export", "f.sqlite", "o.jsonl", "--as", "rankings", "--rule", "mean_rank")
    code, out, err = rlhf("data", "import", "o.jsonl", "new.sqlite", "--gold")
    assert (code, out, err) == (0, "new.sqlite: 4 gold questions from o.jsonl (prompt, responses, ranks)\n", "")
    code, _, err = rlhf("data", "import", "o.jsonl", "new.sqlite", "--gold", "--rater", "anna")
    assert code == 2
    assert "--rater: gold questions are nobody's rankings" in err


def test_what_is_no_store_or_an_empty_one_is_refused(rlhf: Call) -> None:
    Path("text.sqlite").write_text("not a store, by any means at all")
    for name, error in (
        ("text.sqlite", "text.sqlite: not a feedback store"),
        ("gone.sqlite", "gone.sqlite: no such file"),
        ("empty.sqlite", "empty.sqlite: nobody has ranked anything yet"),
    ):
        code, out, err = rlhf("data", "agreement", name)
        assert (code, out) == (2, "")
        assert error in err
