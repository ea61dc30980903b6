"""`rlhf init`: which recipe comes of which files, and what is said of the others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import write_rows

from rlhf.data.errors import SettingsError
from rlhf.pipeline import init as init_module
from rlhf.pipeline import text_files
from rlhf.pipeline.recipe import Recipe, load_recipe

Call = Callable[..., tuple[int, str, str]]
NAMES = ("fox", "cat", "dog", "bear")
DEMONSTRATIONS = [{"prompt": f"Who is {name}?", "response": f"A {name}."} for name in NAMES]
RANKINGS = [{"prompt": f"Who is {name}?", "chosen": f"A {name}.", "rejected": "No."} for name in NAMES]
PROMPTS = [{"prompt": f"Where is {name}?"} for name in NAMES]
TEXT = "To be, or not to be: that is the question. " * 60


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory of a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_module, "visible_gpus", lambda: 0)
    return tmp_path


def recipe() -> Recipe:
    return load_recipe("mine.yaml")


def sections() -> dict[str, Any]:
    loaded = recipe()
    return {stage: loaded.section(stage) for stage in loaded.stages}


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


def test_every_setting_that_it_writes_stands_below_what_it_means(here: Path, rlhf: Call) -> None:
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine")
    lines = Path("mine.yaml").read_text().splitlines()
    settings = [number for number, line in enumerate(lines) if ": " in line and not line.lstrip().startswith("#")]
    assert len(settings) > 15
    assert all(lines[number - 1].lstrip().startswith("# ") for number in settings)
    assert lines[lines.index("  kl_coef: 0.05") - 1] == "  # Weight of the KL to the reference."


def test_without_raw_text_the_first_stage_starts_from_a_model_and_rankings_give_the_prompts(
    here: Path, rlhf: Call
) -> None:
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine")
    found = recipe()
    assert found.stages == ["reward", "ppo"]
    assert found.reward is not None
    assert found.ppo is not None
    assert found.reward.model == found.ppo.model == init_module.START_MODELS[False]
    assert found.ppo.data.path == "pairs.jsonl"
    rlhf("init", "other", "pairs.jsonl", "--model", "owner/name")
    assert "model: owner/name" in Path("other.yaml").read_text()


def test_a_gpu_gives_larger_sizes_and_another_model(here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_module, "visible_gpus", lambda: 2)
    Path("story.txt").write_text(TEXT)
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    found = recipe()
    assert found.pretrain is not None
    assert (found.pretrain.hidden_size, found.pretrain.compile) == (768, True)
    rlhf("init", "other", "demos.jsonl")
    assert "model: Qwen/Qwen3-0.6B" in Path("other.yaml").read_text()


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


BIRD, FISH = "Name a bird.", "Name a fish."
ONE_A_ROW = "prompt,response,rank\n" + "".join(
    f"{prompt},{answer},{rank}\n" for rank, answer in enumerate(("This.", "That."), 1) for prompt in (BIRD, FISH)
)


def test_a_table_of_one_answer_a_row_is_rankings_and_nothing_to_imitate(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW)
    code, out, _ = rlhf("init", "mine")
    assert code == 0
    assert "preferences: 4 rows, 2 rankings (ranked_answers)" in out
    assert recipe().stages == ["reward", "ppo"]


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


def test_nothing_is_written_over(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    Path("mine.yaml").write_text("mine")
    Path("folder").mkdir()
    assert "mine.yaml: is there already" in rlhf("init", "mine")[2]
    assert "rlhf init my-run folder" in rlhf("init", "folder")[2]
    assert Path("mine.yaml").read_text() == "mine"


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_read(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_module, "sort_files", lambda *_: pytest.fail("it read the files"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != here)
    code, _, err = rlhf("init", "mine")
    cure = "change its mode, or name another place"
    assert (code, err) == (2, f"error: mine.yaml: {here} cannot be written to; {cure}\n")


def test_a_recipe_that_cannot_be_put_in_its_place_is_named_by_its_own_name(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    monkeypatch.setattr(os, "replace", denied)
    code, _, err = rlhf("init", "mine")
    assert (code, err.startswith("error: mine.yaml: Permission denied; ")) == (2, True)
    assert [path.name for path in here.iterdir()] == ["demos.jsonl"]


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


def test_nothing_lies_there_where_telling_of_it_fails(here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)

    def fails(*_: Any) -> Any:
        raise SettingsError("no such use")

    monkeypatch.setattr(init_module, "_uses", fails)
    assert rlhf("init", "mine") == (2, "", "error: no such use\n")
    assert os.listdir(here) == ["demos.jsonl"]


def test_unusable_rows_are_allowed_for_aloud(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", [*DEMONSTRATIONS * 6, {"prompt": "unanswered"}])
    _, out, _ = rlhf("init", "mine")
    assert "25 rows, 1 of them unusable" in out
    assert (
        "warning: demos.jsonl: 1 of its 25 rows cannot be used, row 25: empty response: no column 'response' (columns "
        "found: prompt); with sft.max_dropped: 0.09 the run goes on without them; better mend them and take it out\n"
    ) in out
    assert sections()["sft"].max_dropped == pytest.approx(0.09)  # twice 1 of 25, rounded up


def test_lengths_follow_the_rows(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    long = [row | {"response": "many words " * 60} for row in DEMONSTRATIONS]
    write_rows(here / "long.jsonl", long)
    rlhf("init", "other", "long.jsonl")
    assert sections()["sft"].max_length == 64
    assert "max_length: 256" in Path("other.yaml").read_text()  # 660 characters, three to a token


def test_the_schema_that_the_recipe_names_lies_beside_it(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    first = Path("mine.yaml").read_text().splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(Path(name).read_text())["title"] == "A recipe of RLHF Toolkit"


def test_odd_names_of_files_survive(here: Path, rlhf: Call) -> None:
    for name in ("a: b #1.jsonl", "${seed}.jsonl", "狐狸 'x'.jsonl"):
        write_rows(here / name, DEMONSTRATIONS)
        Path("mine.yaml").unlink(missing_ok=True)
        assert rlhf("init", "mine", name)[0] == 0
        assert sections()["sft"].data.path == name


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


def many(num: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(num)]


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"),
    [
        (60, 4, 5),  # 54 to train on are 14 steps of 4, so that 5 passes make 70
        (300, 8, 2),  # 270 are 34 of 8, and 2 passes 68
        (2000, 16, 2),  # 1800 are 113 of 16
        (10, 4, 10),  # 9 are 3 of 4, and more than 10 passes learn them by heart
    ],
)
def test_few_rows_are_gone_through_in_small_batches_until_there_are_enough_steps(
    here: Path, rlhf: Call, rows: int, batch: int, epochs: int
) -> None:
    Path("story.txt").write_text(TEXT)
    write_rows(here / "demos.jsonl", many(rows))
    rlhf("init", "mine")
    sft = sections()["sft"]
    assert (sft.global_batch_size, sft.num_epochs) == (batch, epochs)


def test_the_recipe_says_why_it_takes_so_many_steps(here: Path, rlhf: Call) -> None:
    Path("story.txt").write_text("To be or not to be. " * 500)
    write_rows(here / "demos.jsonl", many(60))
    write_rows(here / "pairs.jsonl", [{"prompt": r["prompt"], "chosen": "a", "rejected": "b"} for r in many(60)])
    write_rows(here / "asked.jsonl", PROMPTS)
    rlhf("init", "mine")
    text = " ".join(Path("mine.yaml").read_text().replace("#", "").split())
    assert "70 optimiser steps: 54 rows to train on, 4 a step, 5 times over." in text
    # 10,000 characters, of which 9,000 are trained on: 4,500 tokens, 40 times over, in steps of 16 blocks of 64.
    assert "So many, 16 blocks of 64 tokens each, go through the text some 16 times. num_steps: 70" in text
    assert "With 4 to train on, a prompt is answered up to 4 times in each. rollout_batch_size: 16" in text


def test_what_is_held_out_of_a_few_rows_is_warned_of(here: Path, rlhf: Call) -> None:
    write_rows(here / "few.jsonl", many(10))
    assert "warning: sft: of the 10 prompts of few.jsonl about 1 is held out" in rlhf("init", "mine", "few.jsonl")[1]
    write_rows(here / "few_test.jsonl", many(10))
    write_rows(here / "many.jsonl", many(100))
    assert "warning" not in rlhf("init", "own", "few.jsonl", "few_test.jsonl")[1]
    assert "warning" not in rlhf("init", "more", "many.jsonl")[1]
    pairs = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(500)]
    write_rows(here / "pairs.jsonl", pairs[:490])
    assert (
        "warning: reward and ppo: of the 490 prompts of pairs.jsonl about 49 are" in rlhf("init", "p", "pairs.jsonl")[1]
    )
    write_rows(here / "pairs.jsonl", pairs)
    assert "are held out" not in rlhf("init", "all", "pairs.jsonl")[1]


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


def test_a_table_of_one_answer_a_row_is_named_in_the_recipe(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW)
    write_rows(here / "pairs.jsonl", RANKINGS)
    told = "Here one answer a row, with its rank (1 is best) or its score (higher is better)."
    rlhf("init", "mine", "table.csv")
    assert told in " ".join(Path("mine.yaml").read_text().replace("#", "").split())
    rlhf("init", "other", "pairs.jsonl")
    assert told not in " ".join(Path("other.yaml").read_text().replace("#", "").split())


def test_a_table_without_its_header_is_asked_after_it(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW.split("\n", 1)[1])
    err = rlhf("init", "mine")[2]
    assert (
        "say which is which: --map prompt='Name a bird.' …; or is the line with the names of the columns missing?"
        in err
    )
