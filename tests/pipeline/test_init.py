"""`rlhf init`: what it takes the files for, and what it says of those that it leaves out."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from init_world import BIRD, DEMONSTRATIONS, FISH, ONE_A_ROW, PROMPTS, RANKINGS, TEXT, recipe, sections
from pipeline_world import write_rows

from rlhf.pipeline import init as init_module
from rlhf.pipeline import text_files
from rlhf.pipeline.recipe import load_recipe

Call = Callable[..., tuple[int, str, str]]


def test_files_of_all_four_kinds_become_all_four_stages(here: Path, rlhf: Call) -> None:
    Path("story.txt").write_text(TEXT)
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    write_rows(here / "pairs.jsonl", RANKINGS)
    write_rows(here / "asked.jsonl", PROMPTS)
    code, out, err = rlhf("init", "mine")
    assert (code, err) == (0, "")
    found = sections()
    assert {stage: section.sources()["data"].path for stage, section in found.items()} == {
        "pretrain": "story.txt", "sft": "demos.jsonl", "reward": "pairs.jsonl", "ppo": "asked.jsonl",
    }  # fmt: skip
    assert {getattr(section, "model", None) for section in found.values()} == {None}
    assert "mine.yaml: pretrain, sft, reward, ppo" in out
    assert ["demos.jsonl", "demonstrations: 4 rows (prompt, response)", "sft.data"] in [
        [cell.strip() for cell in line.split("  ") if cell] for line in out.splitlines()
    ]


def test_what_is_read_as_nothing_is_named_with_the_cure(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    write_rows(here / "odd.jsonl", [{"foo": 1}])
    Path("empty.jsonl").write_text("")
    Path("sheet.xlsx").write_bytes(b"PK")
    write_rows(here / "both.jsonl", [{"question": "a", "answer": "b", "instruction": "c", "output": "d"}])
    code, out, _ = rlhf("init", "mine")
    assert code == 0
    told = {line.split(": ")[1]: line for line in out.splitlines() if line.startswith("left out: ")}
    assert "columns found: foo" in told["odd.jsonl"]
    assert told["odd.jsonl"].endswith("say which is which: --map prompt=foo …")
    assert "it is empty" in told["empty.jsonl"]
    assert told["sheet.xlsx"].endswith("a spreadsheet's own file; save the sheet as CSV (UTF-8)")
    assert "can be read in several ways" in told["both.jsonl"]
    assert "{path: both.jsonl, format: …}" in told["both.jsonl"]
    assert "#   odd.jsonl: no columns that are known" in Path("mine.yaml").read_text()
    assert recipe().stages == ["sft"]


def test_nothing_to_run_is_refused_and_nothing_is_written(here: Path, rlhf: Call) -> None:
    write_rows(here / "asked.jsonl", PROMPTS)
    code, out, err = rlhf("init", "mine")
    assert (code, out) == (2, "")
    assert "no stage can run from what lies here" in err
    assert "ppo: there is no reward" in err
    assert os.listdir(here) == ["asked.jsonl"]


def test_a_table_of_one_answer_a_row_is_rankings_and_nothing_to_imitate(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW)
    code, out, _ = rlhf("init", "mine")
    assert code == 0
    assert "preferences: 4 rows, 2 rankings (ranked_answers)" in out
    assert recipe().stages == ["reward", "ppo"]


def test_demonstrations_are_those_of_which_more_rows_can_be_learned_from(here: Path, rlhf: Call) -> None:
    """A file of thumbs up and down has answers in it that are not to be imitated, and no fault for that."""
    thumbs = [{"prompt": f"Is {n}?", "completion": "Yes.", "label": n % 2 == 0} for n in range(4)]
    write_rows(here / "a_thumbs.jsonl", thumbs)
    rlhf("init", "mine")
    assert (sections()["sft"].data.path, sections()["sft"].max_dropped) == ("a_thumbs.jsonl", 0.0)
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    Path("mine.yaml").unlink()
    rlhf("init", "mine")
    assert sections()["sft"].data.path == "demos.jsonl"


COMPARISONS = "prompt,answer_a,answer_b,{}\nName a bird.,Wren.,Bat.,{}\nName a fish.,Whale.,Cod.,{}\n"


def test_a_table_of_comparisons_is_rankings(here: Path, rlhf: Call) -> None:
    Path("ab.csv").write_text(COMPARISONS.format("winner", "a", "B"))
    code, out, _ = rlhf("init", "mine")
    assert code == 0
    assert "preferences: 2 rows (two_answers)" in out
    assert recipe().stages == ["reward", "ppo"]


def test_answers_that_stay_unused_are_warned_of_with_the_cure(here: Path, rlhf: Call) -> None:
    Path("ab.csv").write_text(COMPARISONS.format("won", "a", "b"))
    write_rows(here / "pairs.jsonl", RANKINGS)
    _, out, _ = rlhf("init", "mine")
    assert sections()["ppo"].data.path == "ab.csv"
    why = "as preferences row 1: answers without a winner: no column says which of answer_a, answer_b is better"
    assert f"warning: ab.csv: only prompts are read of it, though answer_a, answer_b look like answers; {why}" in out
    rlhf("init", "other", "ab.csv", "--map", "winner=won")
    assert load_recipe("other.yaml").stages == ["reward", "ppo"]
    code, _, err = rlhf("init", "alone", "ab.csv")
    assert (code, "there are no rankings (preferences); ab.csv row 1: answers without a winner" in err) == (2, True)


def test_ranks_that_cannot_be_read_are_told_before_bad_answers_are_imitated(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW.replace(",1", ",good").replace(",2", ",bad"))
    _, out, _ = rlhf("init", "mine")
    assert (
        "warning: table.csv: each row has one answer and how good it is (ranked_answers): all are learned from" in out
    )
    assert "but here row 1: a rank is not a finite number: 'good'" in out
    assert "left out: reward: there are no rankings (preferences); table.csv row 1: a rank is not a finite" in out


def test_a_file_that_is_not_there_is_all_that_is_told(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    for names in (["gone.csv"], ["demos.jsonl", "gone.csv"]):
        code, out, err = rlhf("init", "mine", *names)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: gone.csv: no such file or folder")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '{"prompt": "a", "response": ""}\n{"prompt": "", "response": "x"}\n',
            "as demonstrations: row 1: empty response; repair such rows",
        ),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "b"}\n' * 2,
            "as preferences: row 1: identical answers at different ranks: 'b'; repair such rows",
        ),
        (
            '{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "c"}\n{"prompt": \n',
            "one prompt alone; one to train on and one to evaluate on are needed; "
            "1 of 3 rows cannot be used, row 3: broken JSON, column 11: Expecting value",
        ),
        ("", "it is empty; at least one row is needed"),
    ],
)
def test_an_unusable_file_says_row_and_reason_and_nothing_else(here: Path, rlhf: Call, text: str, why: str) -> None:
    Path("bad.jsonl").write_text(text)
    assert rlhf("init", "mine", "bad.jsonl") == (2, "", f"error: bad.jsonl: {why}\n")


def test_a_text_beside_rankings_that_cannot_be_read_does_not_hide_them(here: Path, rlhf: Call) -> None:
    rows = [{"prompt": p, "responses": "['a', 'b']", "ranks": [1, 2], "text": TEXT} for p in (BIRD, FISH)]
    write_rows(here / "lists.jsonl", rows)
    _, out, _ = rlhf("init", "mine")
    assert recipe().stages == ["pretrain"]
    assert "there are no rankings (preferences); lists.jsonl row 1: responses is broken JSON, column 2" in out


@pytest.mark.parametrize("name", ["story.txt", "story.jsonl"])
def test_plain_text_is_not_told_to_be_bad_rankings(here: Path, rlhf: Call, name: str) -> None:
    Path(name).write_text(json.dumps(TEXT) + "\n")
    _, out, _ = rlhf("init", "mine")
    assert recipe().stages == ["pretrain"]
    assert "there are no rankings (preferences)\n" in out


def test_prompts_of_rows_that_should_be_more_say_why_they_are_not(here: Path, rlhf: Call) -> None:
    write_rows(here / "lists.jsonl", [{"prompt": p, "responses": "['a', 'b']", "ranks": [1, 2]} for p in (BIRD, FISH)])
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    _, out, _ = rlhf("init", "mine")
    assert "there are no rankings (preferences); lists.jsonl row 1: responses is broken JSON, column 2" in out


def test_without_a_data_file_it_says_what_would_be_one_and_where_some_may_lie(here: Path, rlhf: Call) -> None:
    assert rlhf("init", "mine")[2] == (
        "error: mine: there are no data files here (.jsonl, .json, .csv, .tsv, .parquet, .txt); name some, or folders "
        "or hub ids: rlhf init mine FILES …\n"
    )
    for name in ("texts", "code", ".hidden"):
        Path(name).mkdir()
    for name in ("texts/a.txt", ".hidden/a.txt", "code/a.py", "notes.md", "README.md"):
        Path(name).write_text(TEXT)
    assert [line.split(": rlhf")[0] for line in rlhf("init", "mine")[2].splitlines()[1:]] == [
        "notes.md: looked at only where it is named", "texts: looked at only where it is named"
    ]  # fmt: skip
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    assert "left out: texts: looked at only where it is named: rlhf init mine texts …" in rlhf("init", "mine")[1]
    assert recipe().stages == ["sft"]
    rlhf("init", "other", "texts", "notes.md", "demos.jsonl")
    assert load_recipe("other.yaml").stages == ["pretrain", "sft"]


def test_commands_to_copy_bear_names_with_spaces(here: Path, rlhf: Call) -> None:
    assert "or hub ids: rlhf init 'my run' FILES …" in rlhf("init", "my run")[2]
    Path("some texts").mkdir()
    Path("some texts/a.txt").write_text(TEXT)
    assert "rlhf init my-run 'some texts'" in rlhf("init", "some texts")[2]
    assert "rlhf init 'my run' 'some texts' …" in rlhf("init", "my run")[2]
    out = rlhf("init", "my run", "some texts")[1]
    assert out.splitlines()[-1] == "next: rlhf estimate 'my run.yaml' (memory and time), then rlhf run 'my run.yaml'"


def test_a_folder_of_one_kind_is_one_source_and_one_of_several_is_taken_apart(here: Path, rlhf: Call) -> None:
    for name in ("same", "mixed"):
        Path(name).mkdir()
        write_rows(here / name / "a.jsonl", DEMONSTRATIONS)
    write_rows(here / "same" / "b.jsonl", DEMONSTRATIONS)
    write_rows(here / "mixed" / "b.jsonl", RANKINGS)
    rlhf("init", "mine", "same")
    assert sections()["sft"].data.path == "same"
    rlhf("init", "other", "mixed")
    assert "data: mixed/a.jsonl" in Path("other.yaml").read_text()


def test_a_name_that_says_so_makes_a_file_the_evaluations(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    write_rows(here / "demos_test.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    found = sections()["sft"]
    assert (found.data.path, found.eval_data.path) == ("demos.jsonl", "demos_test.jsonl")
    rlhf("init", "alone", "demos_test.jsonl")
    assert "  data: demos_test.jsonl" in Path("alone.yaml").read_text()
    write_rows(here / "demos_dev.jsonl", [*DEMONSTRATIONS, {"prompt": "q"}])
    _, told, _ = rlhf("init", "both", "demos_dev.jsonl", "demos_test.jsonl", "demos.jsonl")
    text = Path("both.yaml").read_text()
    assert "  data: demos.jsonl" in text  # never one that is held out
    assert "  eval_data: demos_dev.jsonl" in text
    assert "max_dropped" in text  # which counts the rows that are held out too
    assert "left out: demos_test.jsonl: held-out demonstrations as in demos_dev.jsonl" in told


@pytest.mark.parametrize(
    ("name", "few", "enough"),
    [
        ("demos", DEMONSTRATIONS[:1] * 3, DEMONSTRATIONS),
        ("pairs", RANKINGS[:1] * 3, RANKINGS),
        ("asked", PROMPTS[:1], PROMPTS),
        ("story", [{"text": "Too short."}], [{"text": TEXT}]),
    ],
)
def test_what_is_held_out_of_too_little_is_left_out_with_it(
    here: Path, rlhf: Call, name: str, few: list[dict[str, str]], enough: list[dict[str, str]]
) -> None:
    main = RANKINGS if name == "demos" else DEMONSTRATIONS
    write_rows(here / "main.jsonl", main)
    write_rows(here / f"{name}.jsonl", few)
    write_rows(here / f"{name}_test.jsonl", enough)
    code, out, err = rlhf("init", "mine")
    assert (code, err) == (0, "")
    why = f"held out, and {name}.jsonl is too little to train on"
    assert f"left out: {name}_test.jsonl: {why}" in out
    [line] = [line for line in out.splitlines() if line.startswith(f"{name}_test.jsonl")]
    assert line.endswith("  not used")
    assert f"{name}_test" not in Path("mine.yaml").read_text().split("# Not in it:")[0]


def test_prompts_that_are_held_out_evaluate_a_policy_that_trains_on_those_of_rankings(here: Path, rlhf: Call) -> None:
    write_rows(here / "pairs.jsonl", RANKINGS)
    write_rows(here / "asked.jsonl", PROMPTS[:1])
    write_rows(here / "asked_test.jsonl", PROMPTS)
    _, out, _ = rlhf("init", "mine")
    ppo = sections()["ppo"]
    assert (ppo.data.path, ppo.eval_data.path) == ("pairs.jsonl", "asked_test.jsonl")
    assert "left out: asked_test.jsonl" not in out


def test_a_map_is_for_the_files_that_it_makes_more_of_and_stands_in_the_recipe(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", [{"Frage": row["prompt"], "Antwort": row["response"]} for row in DEMONSTRATIONS])
    write_rows(here / "pairs.jsonl", [row | {"Frage": 1} for row in RANKINGS])
    names = ("--map", "prompt=frage", "--map", "response=Antwort")
    assert rlhf("init", "mine", *names)[0] == 0
    found = sections()
    assert found["sft"].data.map == {"prompt": "frage", "response": "Antwort"}
    assert (found["reward"].data.path, found["reward"].data.map) == ("pairs.jsonl", {})
    told = rlhf("init", "other", "demos.jsonl", "--map", "prompt=Frgae")[2]
    assert told == "error: --map prompt=Frgae: no file has such a column and needs it; did you mean 'Frage'?\n"


def test_a_map_may_name_its_file(here: Path, rlhf: Call) -> None:
    write_rows(here / "both.jsonl", [row | {"Frage": f"{row['prompt']} Say."} for row in DEMONSTRATIONS])
    write_rows(here / "story.jsonl", [{"Frage": TEXT, "body": TEXT}])
    assert rlhf("init", "mine", "--map", "both.jsonl:prompt=Frage", "--map", "story.jsonl:text=body")[0] == 0
    found = sections()
    assert found["sft"].data.map == {"prompt": "Frage"}
    assert found["pretrain"].data[0].map == {"text": "body"}
    assert "  data: {path: both.jsonl, map: {prompt: Frage}}" in Path("mine.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("prompt", "write NAME=COLUMN or FILE:NAME=COLUMN"),
        ("promt=Frage", "no column of ours is called 'promt'; did you mean 'prompt'?"),
        ("gone.csv:prompt=Frage", "gone.csv is not among the files; there are demos.jsonl"),
    ],
)
def test_a_map_that_says_nothing_is_refused(here: Path, rlhf: Call, given: str, message: str) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    code, out, err = rlhf("init", "mine", "--map", given)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --map {given}: {message}")


def test_why_files_are_not_used_is_said_once_with_all_of_them(here: Path, rlhf: Call) -> None:
    for name in ("demos.jsonl", "later.jsonl", "more.jsonl"):
        write_rows(here / name, DEMONSTRATIONS)
    write_rows(here / "asked.jsonl", PROMPTS)
    out = rlhf("init", "mine")[1]
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert [lines[f"{name}.jsonl"].split("  ")[-1].strip() for name in ("asked", "later", "more")] == [
        "not used: ppo is left out", "not used", "not used"
    ]  # fmt: skip
    assert "left out: ppo: there is no reward: it takes rankings, ppo.reward_model or ppo.rewards\n" in out
    why = (
        "later.jsonl, more.jsonl: demonstrations as in demos.jsonl, and a stage has one source; name the files to use "
        "(parts of one table as one folder; of two versions of it one alone: rows in both would count twice)"
    )
    assert out.count("demonstrations as in") == 1
    assert f"left out: {why}\n" in out
    text = " ".join(Path("mine.yaml").read_text().replace("#", "").split())
    assert text.count("demonstrations as in") == 1
    assert why in text


@pytest.mark.parametrize(
    ("name", "text"),
    [("prompts.txt", "Tell me of a fox.\n"), ("eval_questions.txt", "A fox.\n"), ("a.txt", "What?\n\nWho is it?\nSo.")],
)
def test_a_text_file_of_prompts_is_not_trained_on_as_raw_text(here: Path, rlhf: Call, name: str, text: str) -> None:
    Path("story.txt").write_text(TEXT)
    Path(name).write_text(text)
    out = rlhf("init", "mine")[1]
    assert sections()["pretrain"].sources().keys() == {"data"}
    assert (
        f"left out: {name}: looks like prompts, but a text file is raw text to pretrain on; as prompts they need a"
        in out
    )


def test_a_text_with_some_questions_is_raw_text(here: Path, rlhf: Call) -> None:
    Path("play.txt").write_text(f"Who is there?\n{TEXT}\nNay, answer me.\nStand!\n")
    assert rlhf("init", "mine")[0] == 0
    assert recipe().stages == ["pretrain"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_of_a_long_text_the_beginning_alone_is_read(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(text_files, "LONG", 20_000)
    monkeypatch.setattr(init_module, "recognise", lambda *_: pytest.fail("it was read whole"))
    Path("texts").mkdir()
    for name in ("one.txt", "two.txt"):
        Path("texts", name).write_text("Ein Bär brüllt. " * 2000, encoding=encoding)
    assert rlhf("init", "mine", "texts/one.txt")[0] == 0
    found = init_module.sort_files(["texts/one.txt"], lambda _: None, {}).train["text"]
    assert [(path, one.rows, one.length) for path, one in found] == [
        ("texts/one.txt", 1, pytest.approx(32_000, rel=1e-3))
    ]
    found = init_module.sort_files(["texts"], lambda _: None, {}).train["text"]
    assert [(path, one.rows, one.length) for path, one in found] == [("texts", 2, pytest.approx(64_000, rel=1e-3))]
    Path("asked.txt").write_text("Who is it?\n" * 3000, encoding=encoding)
    assert "asked.txt: looks like prompts" in rlhf("init", "other", "asked.txt")[2]


@pytest.mark.parametrize(
    ("beginning", "told"), [(b"caf\xe9", "byte 3 is not UTF-8"), (b"\0", "it is not text (byte 0 is zero)")]
)
def test_a_long_file_that_is_no_text_is_told_of(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch, beginning: bytes, told: str
) -> None:
    monkeypatch.setattr(text_files, "LONG", 1000)
    Path("long.txt").write_bytes(beginning + TEXT.encode())
    assert f"long.txt: {told}" in rlhf("init", "mine", "long.txt")[2]


def test_a_table_without_its_header_is_asked_after_it(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW.split("\n", 1)[1])
    err = rlhf("init", "mine")[2]
    assert (
        "say which is which: --map prompt='Name a bird.' …; or is the line with the names of the columns missing?"
        in err
    )
