"""`rlhf report A B`: what differs between runs, on a page and on the terminal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_world import METRICS, SAMPLE, make_run, set_metrics, together, words, write_lines

from rlhf.pipeline.report.compare import Comparison, names

Rlhf = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.compare.draw_lines", lambda *_: "")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two runs that share their SFT stage, in the working directory."""
    monkeypatch.chdir(tmp_path)
    judged = SAMPLE | {"sft_quality": 0.1, "ppo_quality": 0.5}
    first = make_run(tmp_path / "a", ["sft", "ppo"], [judged, judged | {"prompt": "only here"}])
    second = make_run(tmp_path / "b", ["sft", "ppo"], [judged | {"ppo": "A fox eats birds.", "ppo_quality": 0.9}])
    for run_dir in (first, second):
        path = run_dir / "sft-0123abcd" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"key": "c0de"}), encoding="utf-8")
    (first / "recipe.yaml").write_text("seed: 7\nppo: {kl_coef: 0.05, rewards: [{weight: 1.0}]}\n", encoding="utf-8")
    (second / "recipe.yaml").write_text("seed: 7\nppo: {kl_coef: 0.1, rewards: [{weight: 2.0}]}\n", encoding="utf-8")
    set_metrics(second, "ppo", kl=9.2, true_quality=0.5)
    return first, second


def test_settings_that_differ_are_told_by_their_dotted_names(runs: tuple[Path, Path]) -> None:
    assert Comparison(runs).settings == [("ppo.kl_coef", ["0.05", "0.1"]), ("ppo.rewards.0.weight", ["1.0", "2.0"])]


def test_contents_of_data_and_versions_are_told_too(runs: tuple[Path, Path]) -> None:
    path = runs[1] / "ppo-0123abcd" / "manifest.json"
    made = json.loads(path.read_text(encoding="utf-8"))
    made["made_with"]["versions"]["torch"] = "2.14.0"
    path.write_text(json.dumps(made | {"data": {"data": "feedbeeffeedbeef"}}), encoding="utf-8")
    differing = dict(Comparison(runs).settings)
    assert differing["ppo.data, contents"] == ["–", "feedbeeffeed"]
    assert differing["version of torch"] == ["2.13.0", "2.14.0"]


def test_a_stage_that_a_run_does_not_have_is_told_of_once(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """And not as settings, data and processes that differ; those of the runs that have it are compared."""
    path = runs[1] / "ppo-0123abcd" / "manifest.json"
    made = json.loads(path.read_text(encoding="utf-8")) | {"data": {"data": "feedbeeffeedbeef"}}
    path.write_text(json.dumps(made), encoding="utf-8")
    third = make_run(tmp_path / "c", ["sft"])
    assert Comparison([runs[1], third]).settings == [("stage ppo", ["there", "no such stage"])]
    assert Comparison([*runs, third]).settings == [
        ("stage ppo", ["there", "there", "no such stage"]),
        ("ppo.kl_coef", ["0.05", "0.1", "–"]),
        ("ppo.rewards.0.weight", ["1.0", "2.0", "–"]),
        ("ppo.data, contents", ["–", "feedbeeffeed", "–"]),
    ]


def test_what_only_a_finished_stage_knows_is_not_compared_with_one_that_is_not(runs: tuple[Path, Path]) -> None:
    path = runs[1] / "ppo-0123abcd" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": {"data": "feed"}}), encoding="utf-8")
    (runs[0] / "ppo-0123abcd" / "manifest.json").unlink()
    assert [name for name, _ in Comparison(runs).settings] == ["ppo.kl_coef", "ppo.rewards.0.weight"]


def test_where_a_recipe_cannot_be_read_the_stages_tell_their_settings(runs: tuple[Path, Path]) -> None:
    (runs[1] / "recipe.yaml").write_text("ppo: [", encoding="utf-8")
    path = runs[1] / "ppo-0123abcd" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": {"learning_rate": 0.01}}), encoding="utf-8")
    comparison = Comparison(runs)
    assert comparison.settings == [("ppo.learning_rate", ["0.003", "0.01"])]
    assert "⚠ b/recipe.yaml : not valid YAML: line 2" in words(comparison.page())
    (runs[0] / "ppo-0123abcd" / "manifest.json").unlink()  # and then that one tells none
    assert Comparison(runs).settings == []


def test_metrics_stand_side_by_side_with_their_difference_from_the_first(runs: tuple[Path, Path]) -> None:
    lines = {line["name"]: line for line in Comparison(runs).metrics["ppo"]}
    assert lines["kl"]["values"] == [8.7, 9.2]
    assert lines["kl"]["differences"] == [None, pytest.approx(0.5)]
    assert lines["true_quality"]["main"] is True
    assert lines["sft_true_quality"]["main"] is False


def test_the_page_shows_verdicts_curves_and_common_prompts(runs: tuple[Path, Path]) -> None:
    html = Comparison(runs).page()
    shown = words(html)
    assert "ppo.kl_coef 0.05 0.1" in shown
    assert "quality by the judge 0.830 0.500 −0.330" in shown
    assert "SFT ✓ learned SFT learned: held-out loss 3.42 → 1.17. ✓ learned" in shown
    assert "The same in all of these runs, by their keys: SFT." in shown
    assert shown.count("Loss, nats per token") == 0  # so its curves say nothing
    assert "Score: training a 0.900 b 0.900" in shown
    assert together(html) == []
    assert "1 prompt. By the judge, b is better than a for 1 and worse for 0 ." in shown
    assert "+0.40 What does a fox eat? a quality by the judge 0.50 score 2.25 A fox eats mice. b" in shown
    assert "A fox eats <del>mice.</del>" in html
    assert "A fox eats <ins>birds.</ins>" in html
    assert "only here" not in shown


def test_scores_of_different_reward_models_are_not_compared(runs: tuple[Path, Path]) -> None:
    for run_dir in runs:
        write_lines(run_dir / "ppo-0123abcd" / "samples.jsonl", [SAMPLE | {"ppo": f"In {run_dir.name}."}])
    assert "scores are not all of one reward model, so they do not compare" in words(Comparison(runs).page())
    for run_dir in runs:
        path = run_dir / "ppo-0123abcd" / "manifest.json"
        made = json.loads(path.read_text(encoding="utf-8")) | {"inputs": {"reward_model": "beef"}}
        path.write_text(json.dumps(made), encoding="utf-8")
    assert "By the score of their common reward model" in words(Comparison(runs).page())


def test_answers_that_are_equal_are_counted_and_not_shown(runs: tuple[Path, Path]) -> None:
    rows = [SAMPLE | {"prompt": f"prompt {n}"} for n in range(3)]
    for run_dir in runs:
        write_lines(run_dir / "ppo-0123abcd" / "samples.jsonl", [*rows, SAMPLE | {"ppo": f"In {run_dir.name}."}])
    html = Comparison(runs).page()
    assert "4 prompts. The answers to 3 of them are equal in all runs; the others are below. The runs" in words(html)
    assert html.count('<article class="sample') == 1
    for run_dir in runs:
        write_lines(run_dir / "ppo-0123abcd" / "samples.jsonl", rows)
    html = Comparison(runs).page()
    assert words(html).endswith("All 3 answers are equal in all of these runs.")
    assert "<article" not in html
    for run_dir in runs:
        write_lines(run_dir / "ppo-0123abcd" / "samples.jsonl", rows[:1])
    assert "The one answer is equal in all of these runs." in words(Comparison(runs).page())


def test_shares_and_their_differences_have_two_digits(runs: tuple[Path, Path]) -> None:
    set_metrics(runs[0], "ppo", win_rate=0.8525)
    set_metrics(runs[1], "ppo", win_rate=0.7)
    assert "win rate over SFT by the judge 0.85 0.70 −0.15" in words(Comparison(runs).page())


def test_a_difference_that_would_be_shown_as_zero_is_left_out(runs: tuple[Path, Path]) -> None:
    set_metrics(runs[0], "ppo", win_rate=0.852)
    set_metrics(runs[1], "ppo", win_rate=0.854, kl=8.7, true_quality=0.83)
    comparison = Comparison(runs)
    assert "PPO a b quality by the judge" in words(comparison.page())  # without a column of differences
    assert ["ppo win_rate", "0.85", "0.85"] in comparison.table()[1]


def test_runs_that_do_not_differ_have_no_column_of_differences(runs: tuple[Path, Path]) -> None:
    assert "PPO a b difference quality by the judge" in words(Comparison(runs).page())
    set_metrics(runs[1], "ppo", kl=8.7, true_quality=0.83)
    assert "PPO a b quality by the judge" in words(Comparison(runs).page())


def test_runs_that_are_the_same_are_said_to_be(rlhf: Rlhf, runs: tuple[Path, Path]) -> None:
    (runs[1] / "recipe.yaml").write_bytes((runs[0] / "recipe.yaml").read_bytes())
    told = "Settings, contents of data and versions are the same in all of these runs,"
    assert f"{told} but not all figures are." in rlhf("report", "a", "b")[1]
    assert f"None. {told} but not all figures are." in words(Comparison(runs).page())
    set_metrics(runs[1], "ppo", kl=8.7, true_quality=0.83)
    assert rlhf("report", "a", "b")[1].startswith(f"{told} so are all figures.\n")
    (runs[1] / "recipe.yaml").write_text("seed: 8\n", encoding="utf-8")
    assert told not in rlhf("report", "a", "b")[1]


def test_text_of_people_cannot_become_markup(runs: tuple[Path, Path]) -> None:
    (runs[1] / "recipe.yaml").write_text("name: '<script>x</script>'\n", encoding="utf-8")
    html = Comparison(runs).page()
    assert html.count("<script") == 1
    assert "&lt;script&gt;x" in html


def test_runs_of_the_same_name_are_told_apart_by_their_paths() -> None:
    assert names([Path("x/run"), Path("y/run"), Path("z")]) == ["x/run", "y/run", f"{Path().resolve().name}/z"]
    assert names([Path("a"), Path("b")]) == ["a", "b"]


def test_the_command_writes_a_page_and_prints_a_table(rlhf: Rlhf, runs: tuple[Path, Path], tmp_path: Path) -> None:
    code, out, _ = rlhf("report", "a", "b")
    assert code == 0
    assert out.rstrip().endswith("comparison.html")
    assert (tmp_path / "comparison.html").is_file()
    rows = [line.split() for line in out.splitlines()]
    assert ["ppo.kl_coef", "0.05", "0.1"] in rows
    assert ["ppo", "kl", "8.70", "9.20", "(+0.500)"] in rows
    code, out, _ = rlhf("report", "a", "b", "--out", "x.html")
    assert (code, out.splitlines()[-1]) == (0, "x.html")


@pytest.mark.parametrize(("arguments", "said"), [
    (["a", "nowhere"], "nowhere: not a run folder"),
    (["a", "a"], "the same run is named twice"),
    (["a", "b"] * 3, "6 runs are too many for one page; compare at most 5"),
    (["a", "--out", "x.html"], "--out: goes with several runs"),
    (["a", "b", "--price-per-hour", "2"], "--price-per-hour: goes with one run"),
    (["a", "b", "--out", "none/x.html"], "none/x.html: cannot be written: No such file or directory"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    rlhf: Rlhf, runs: tuple[Path, Path], arguments: list[str], said: str
) -> None:
    code, _, err = rlhf("report", *arguments)
    assert code == 2
    assert said in err


def test_long_values_are_printed_whole_since_they_may_differ_in_the_end(rlhf: Rlhf, runs: tuple[Path, Path]) -> None:
    paths = [f"/data/projects/assistant/people/rankings-v{number}.jsonl" for number in (1, 2)]  # of 49 characters
    for run_dir, path in zip(runs, paths, strict=True):
        (run_dir / "recipe.yaml").write_text(f"ppo: {{data: {path}}}\n", encoding="utf-8")
    assert ["ppo.data", *paths] in [line.split() for line in rlhf("report", "a", "b")[1].splitlines()]


def test_three_runs_may_have_stages_that_others_lack(runs: tuple[Path, Path], tmp_path: Path) -> None:
    third = make_run(tmp_path / "c", list(METRICS))
    comparison = Comparison([*runs, third])
    found: dict[str, Any] = comparison.metrics
    assert found["pretrain"][0]["values"] == [None, None, 2.164]
    assert "held-out loss 2.16" in words(comparison.page())
    columns, rows = comparison.table()
    assert columns == ["", "a", "b", "c"]
    assert ["pretrain val_loss", "–", "–", "2.16"] in rows
