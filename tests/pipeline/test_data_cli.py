"""`rlhf data check` and `rlhf data convert`: what they print, and where."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

Call = Callable[..., tuple[int, str, str]]

RANKINGS = [
    {"prompt": "a", "responses": ["one two", "x\n", "y"], "ranks": [1, 2, 2], "strengths": [4, 1, 1], "source": "s"},
    {"prompt": "a", "chosen": "x", "rejected": "one two"},
    {"prompt": "b", "chosen": "x", "rejected": " x"},
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RANKINGS))
    Path("held_out.jsonl").write_text('{"prompt": "a"}\n')
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save("tokenizer.json")


def test_check_tells_people_all_that_it_found(rlhf: Call) -> None:
    words = ("--tokenizer", ".", "--max-length", "3", "--against", "held_out.jsonl", "--against-as", "prompts")
    code, out, err = rlhf("data", "check", "r.jsonl", "--as", "preferences", *words)
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line] == [
        "r.jsonl as preferences (prompt, responses, ranks; prompt, chosen, rejected)",
        "rows 3  kept 2  prompts 1  pairs 3  ties 1  duplicates 0",
        "dropped  why                                        where",
        "1        identical answers at different ranks: 'x'  (row 3)",
        "the better answer is the longer one (in tokens) in 66.7% of pairs",
        "contradictions 1: the same two answers, ranked both ways (rows 1 and 2)",
        "prompts that held_out.jsonl holds too 1 (row 1)",
        "prompt tokens: min 1, p50 1, p90 1, p99 1, max 1",
        "  to      16         2 " + "█" * 40,
        "response tokens: min 1, p50 1, p90 2, p99 2, max 2",
        "  to      16         5 " + "█" * 40,
        "max_length 3: 0.0% would be truncated, 40.0% left out",
        "warning: rows of 2 shapes in one source: prompt, responses, ranks; prompt, chosen, rejected",
        "warning: 1 of 3 rows are unusable; a run refuses unless max_dropped allows it",
        "as read, row 1",
        '  prompt: "a"',
        '  rank 1 (strength 4): "one two"',
        '  rank 2 (strength 1): "x\\n"',
        '  rank 2 (strength 1): "y"',
        '  source: "s"',
        "as read, row 2",
        '  prompt: "a"',
        '  rank 1: "x"',
        '  rank 2: "one two"',
    ]


@pytest.mark.parametrize(
    ("kind", "row", "counts"),
    [
        ("text", {"text": "a"}, "rows 1  kept 1  duplicates 0"),
        ("prompts", {"prompt": "a"}, "rows 1  kept 1  prompts 1  duplicates 0"),
        ("demonstrations", {"prompt": "a", "response": "b"}, "rows 1  kept 1  prompts 1  duplicates 0"),
    ],
)
def test_check_counts_what_a_kind_has_and_leaves_one_blank_line(
    rlhf: Call, kind: str, row: dict[str, str], counts: str
) -> None:
    Path("k.jsonl").write_text(json.dumps(row) + "\n")
    out = rlhf("data", "check", "k.jsonl", "--as", kind)[1]
    assert out.splitlines()[1:4] == [counts, "", "as read, row 1"]
    Path("k.jsonl").write_text((json.dumps(row) + "\n") * 2 + "{\n")
    assert "\n\n\n" not in rlhf("data", "check", "k.jsonl", "--as", kind)[1]


def test_check_says_that_duplicates_of_text_are_trained_on(rlhf: Call) -> None:
    told = "duplicates are trained on too, unless pretrain.deduplicate is set (exact, or minhash)"
    Path("k.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert told not in rlhf("data", "check", "k.jsonl", "--as", "text")[1]
    Path("k.jsonl").write_text('{"text": "a"}\n{"text": "a"}\n')
    assert rlhf("data", "check", "k.jsonl", "--as", "text")[1].splitlines()[1:4] == [
        "rows 2  kept 2  duplicates 1", "", told
    ]  # fmt: skip


def test_a_table_of_comparisons_is_checked_by_any_names_that_a_map_gives_it(rlhf: Call) -> None:
    Path("ab.csv").write_text("prompt,answer_a,answer_b,winner\nQ,x,y,a\nR,x,y,B\n")
    told = "rows 2  kept 2  prompts 2  pairs 2  ties 0  duplicates 0"
    assert told in rlhf("data", "check", "ab.csv", "--as", "preferences")[1]
    Path("ab.csv").write_text("prompt,left,right,won\nQ,x,y,a\nR,x,y,B\n")
    names = ("--map", "response_a=left", "--map", "response_b=right", "--map", "winner=won")
    assert told in rlhf("data", "check", "ab.csv", "--as", "preferences", *names)[1]


def test_a_table_of_unknown_columns_is_asked_for_its_header(rlhf: Call) -> None:
    Path("w.csv").write_text("Who?,Me.,1\nWho?,You.,2\n")
    err = rlhf("data", "check", "w.csv", "--as", "preferences")[2]
    missing = "or is the line with the names of the columns missing?\n"
    assert err.endswith(f"name yours with map: {{prompt: YOURS}} (`rlhf data`: --map prompt=YOURS); {missing}")
    Path("p.csv").write_text("prompt\nWho?\n")
    assert "missing?" not in rlhf("data", "check", "p.csv", "--as", "preferences")[2]
    err = rlhf("data", "check", "w.csv", "--as", "text")[2]
    assert err.endswith(f"column: YOURS (`rlhf data`: --map text=YOURS); {missing}")


def test_check_shows_the_first_of_many_answers_and_counts_the_others(rlhf: Call) -> None:
    Path("k.csv").write_text("prompt,response,rank\n" + "".join(f"a,b{n},{n}\n" for n in range(1, 13)))
    out = rlhf("data", "check", "k.csv", "--as", "preferences")[1]
    assert out.splitlines()[-2:] == ['  rank 10: "b10"', "  … and 2 more"]


def test_check_draws_tables_on_a_terminal(rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # without colours
    code, out, _ = rlhf("data", "check", "r.jsonl", "--as", "preferences")
    assert code == 0
    assert " rows  kept  prompts " in out
    assert " 1        identical answers at different ranks: 'x'  (row 3) " in out


def test_json_is_all_that_is_printed_if_asked_for(rlhf: Call) -> None:
    code, out, err = rlhf("data", "check", "r.jsonl", "--as", "preferences", "--against", "r.jsonl", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["contradictions"] == {"count": 1, "rows": [[1, 2]]}
    assert (found["shared_prompts"], found["lengths"]) == ({"count": 1, "rows": [1]}, None)


def test_convert_writes_what_can_be_used_and_tells_the_rest_on_stderr(rlhf: Call) -> None:
    words = ("data", "convert", "r.jsonl", "--as", "preferences", "out.jsonl")
    code, out, err = rlhf(*words)
    assert (code, out, Path("out.jsonl").exists()) == (2, "", False)
    assert "r.jsonl row 3: identical answers" in err
    code, out, err = rlhf(*words, "--max-dropped", "0.34")
    assert code == 0
    assert out.startswith("out.jsonl: 2 of 3 rows of r.jsonl as preferences")
    assert err.splitlines() == [
        "dropped 1: identical answers (row 3)",
        "warning: rows of 2 shapes in one source: prompt, responses, ranks; prompt, chosen, rejected",
    ]
    assert json.loads(Path("out.jsonl").read_text().splitlines()[0]) == RANKINGS[0]
    code, _, err = rlhf(*words)
    assert (code, err) == (2, "error: out.jsonl: already there; give another name, or --force\n")
    code, _, _ = rlhf("data", "convert", "held_out.jsonl", "--as", "prompts", "out.jsonl", "--force")
    assert (code, Path("out.jsonl").read_text()) == (0, '{"prompt": "a"}\n')


def test_a_format_can_be_named(rlhf: Call) -> None:
    Path("n.jsonl").write_text(
        json.dumps({"prompt": "q", "answers": [{"answer": "x", "rank": 1}, {"answer": "y", "rank": 2}]}) + "\n"
    )
    code, out, _ = rlhf("data", "check", "n.jsonl", "--as", "preferences", "--format", "nectar", "--json")
    assert (code, json.loads(out)["format"]) == (0, "nectar")
    code, out, _ = rlhf("data", "check", "r.jsonl", "--as", "preferences", "--format", "nectar")
    assert code == 2
    assert "the row is not of the format nectar" in out
    code, _, _ = rlhf("data", "convert", "n.jsonl", "--as", "preferences", "out.jsonl", "--format", "nectar")
    assert code == 0
    assert json.loads(Path("out.jsonl").read_text()) == {"prompt": "q", "responses": ["x", "y"], "ranks": [1, 2]}


def test_rows_of_which_none_can_be_used_are_an_error_and_its_columns_are_told_once(rlhf: Call) -> None:
    Path("w.jsonl").write_text('{"question": "a", "reply": "b"}\n')
    code, out, err = rlhf("data", "check", "w.jsonl", "--as", "demonstrations")
    assert (code, out.count("question"), "warning" in out) == (2, 1, False)
    assert err == (
        "error: w.jsonl: nothing usable is left; demonstrations need prompt and response, or messages; name yours with "
        "map: {prompt: YOURS} (`rlhf data`: --map prompt=YOURS)\n"
    )
    assert rlhf("data", "check", "w.jsonl", "--as", "demonstrations", "--json")[::2] == (2, err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-length", "8"), "--max-length 8: "),
        (("--against-as", "prompts"), "--against-as prompts: say with --against PATH"),
        (("--against", "gone.jsonl"), "gone.jsonl: no such file"),
        (("--format", "nektar"), "r.jsonl: format: no format of preferences is called 'nektar'; did you mean"),
        (("--tokenizer", "/proc"), "--tokenizer /proc: no tokenizer.json in this folder"),
    ],
)
def test_options_that_say_nothing_are_refused(rlhf: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = rlhf("data", "check", "r.jsonl", "--as", "preferences", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_lengths_are_measured_without_torch_or_transformers() -> None:
    words = ["data", "check", "r.jsonl", "--as", "preferences", "--tokenizer", ".", "--json"]
    heavy = {"torch", "transformers", "datasets"}
    code = f"from rlhf.pipeline.commands import app; import sys; app({words}, standalone_mode=False); "
    code += f"sys.exit(str(sys.modules.keys() & {heavy}) if sys.modules.keys() & {heavy} else 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
