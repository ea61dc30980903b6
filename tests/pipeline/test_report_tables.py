"""The tables of report.html: rounds, data, costs, phases and the sweep, with the digits and the columns they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_world import METRICS, ROWS, SAMPLE, WORST, make_graded, make_run, page, set_metrics, words, write_lines

from rlhf.pipeline.report import render
from rlhf.pipeline.summary import duration


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")


def test_a_share_has_the_same_digits_everywhere_and_says_on_how_many_prompts(tmp_path: Path) -> None:
    """0.8525 is 0.85 in the verdict, among the figures below it, on the tile, in the legend and in the table."""
    run_dir = make_graded(tmp_path / "run", [WORST])
    set_metrics(run_dir, "reward", accuracy=0.8525, num_eval_prompts=250)
    path = run_dir / "reward-0123abcd" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["metrics"] |= {"accuracy": 0.8525}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    write_lines(run_dir / "reward-0123abcd" / "metrics.jsonl", [{"step": 1, "accuracy": 0.8525}])
    shown = words(page(run_dir))
    assert shown.count("0.85 ") + shown.count("0.85,") >= 5
    assert not re.search(r"0\.85\d|85\.\d ?%", shown)
    assert "0.57 → 0.85 held-out ranking accuracy, against “longer wins” (in tokens); 250 prompts" in shown
    of_ppo = make_run(tmp_path / "ppo", ["ppo"], [SAMPLE])
    shown = words(page(set_metrics(of_ppo, "ppo", win_rate=0.8525, num_eval_prompts=119)))
    assert "by the judge 0.85 (119 prompts, 95" in shown
    assert "win rate over SFT by the judge 0.85 ties count half" in shown
    assert "all figures of this list: 119 prompts, at the end of the ppo stage" in shown
    assert not re.search(r"0\.85\d", shown)


FEEDBACK, REWARD_OF_ROUND = {"num_rankings": 12}, {"accuracy": 0.75}


def with_rounds(folder: Path, *of_ppo: dict[str, float]) -> str:
    """What is shown of rounds with these final metrics of PPO."""
    run_dir = make_run(folder, ["sft", "ppo"])
    stages = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["stages"]
    rounds: list[dict[str, Any]] = [
        {
            name: stages["ppo"] | {"metrics": metrics}
            for name, metrics in (("feedback", FEEDBACK), ("reward", REWARD_OF_ROUND), ("ppo", found))
        }
        for found in of_ppo
    ]
    rounds[0]["sft"] = stages["sft"]
    (run_dir / "summary.json").write_text(json.dumps({"stages": stages, "rounds": rounds}), encoding="utf-8")
    shown = words(page(run_dir))
    return shown[shown.index("Rounds In each round") : shown.index("Accuracies are each")]


def test_rounds_are_held_against_the_round_before_where_a_judge_gives_qualities(tmp_path: Path) -> None:
    one = {"sft_true_quality": 0.4, "true_quality": 0.5, "win_rate": 0.6, "kl": 2.0}
    shown = with_rounds(tmp_path, one, {"sft_true_quality": 0.5, "true_quality": 0.75, "win_rate": 0.7, "kl": 3.0})
    assert "round rankings accuracy of the reward model quality by the judge its gain win rate by the judge KL" in shown
    assert "1 12 0.75 0.500 +0.100 0.60 2.00 2 12 0.75 0.750 +0.250 0.70 3.00" in shown
    assert "A gain in quality is over the round before" in shown


def test_rounds_that_people_rate_show_what_can_be_said(tmp_path: Path) -> None:
    one = {"score": 0.5, "sft_score": 0.25, "score_win_rate": 0.6, "kl": 2.0}
    shown = with_rounds(tmp_path, one, one | {"score": 1.0})
    assert "round rankings accuracy of the reward model gain in score win rate by the score KL" in shown
    assert "1 12 0.75 +0.250 0.60 2.00 2 12 0.75 +0.750 0.60 2.00" in shown
    assert "No judge says how good the answers are" in shown
    assert "–" not in shown


def test_data_that_was_left_out_is_told_with_its_reason(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "reward"])
    source = {
        "name": "web", "path": "web.jsonl", "documents": 90, "unusable_rows": {"no text": 3},
        "left_out": {"too short": 7}, "tokens": 12345, "held_out_tokens": 678,
    }  # fmt: skip
    (run_dir / "pretrain-0123abcd" / "corpus.json").write_text(json.dumps({"sources": [source]}), encoding="utf-8")
    set_metrics(run_dir, "reward", num_prompts=800, num_eval_prompts=200)
    shown = words(page(run_dir))
    assert "Pretraining web.jsonl 90 100 3 × no text; 7 × too short ; 12,345 tokens, 678 held out" in shown
    assert "Reward model 800 prompts to train on, 200 prompts held out" in shown


def test_a_price_is_shown_only_where_somebody_names_one(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["sft", "ppo"])
    for stage in ("sft", "ppo"):
        path = run_dir / f"{stage}-0123abcd" / "manifest.json"
        made = json.loads(path.read_text(encoding="utf-8"))
        made["made_with"]["processes"] = 8
        path.write_text(json.dumps(made | {"metrics": {}}), encoding="utf-8")
    set_metrics(run_dir, "ppo", peak_gib=1.5)
    assert "SFT 12.5 s 8 0.0278 – PPO 12.5 s 8 0.0278 1.50 Time is" in words(page(run_dir))  # 12.5 · 8 / 3600
    assert "price</th>" not in page(run_dir)
    render(run_dir, price_per_hour=36.0)
    shown = words((run_dir / "report.html").read_text(encoding="utf-8"))
    assert "peak memory, GiB price SFT" in shown
    assert shown.count(" 0.12 ") >= 2  # 12.5 s of 36 an hour are 0.125; rounded to even


def make_sweep(folder: Path, losses: list[float], scaling: bool = False) -> Path:
    """A run whose pretraining was swept; a variant without a loss failed. Each has a curve of three evaluations."""
    run_dir = make_run(folder, ["pretrain"])
    rows: list[dict[str, Any]] = []
    for number, loss in enumerate(losses):
        artifact = run_dir / f"pretrain-{number}"
        artifact.mkdir()
        evaluations = [{"step": 10 * n, "num_tokens": 100 * n, "val_loss": loss + 3 - n} for n in (1, 2, 3)]
        write_lines(artifact / "metrics.jsonl", evaluations if loss else [])
        rows.append({
            "name": f"<v{number}>", "settings": {"num_layers": number}, "folder": artifact.name, "num_tokens": 300,
            "num_parameters": 2000 + number, "num_non_embedding_parameters": 1000 + number, "vocab_size": 512,
            "val_loss": loss or None, "best_step": 30, "seconds": 61.0, "error": None if loss else "it diverged",
        })  # fmt: skip
    part = {"points": [[1e3, 4.0], [1e4, 2.0], [1e5, 1.0]], "fit": None}
    fit = {"exponent": 0.30103, "log10_constant": 5.0, "r_squared": 0.98765}
    study = {"parameters": part | {"fit": fit}, "tokens": part, "compute": {"points": [], "fit": None}}
    content = {"rows": rows, "scaling": study if scaling else None}
    (run_dir / "sweep.json").write_text(json.dumps(content), encoding="utf-8")
    return run_dir


def test_a_sweep_is_a_table_of_its_variants_and_their_curves(tmp_path: Path) -> None:
    html = page(make_sweep(tmp_path / "run", [2.5, 2.25, 2.75, 3.0, 0]))
    shown = words(html)
    assert "5 variants of pretraining, the best first" in shown
    assert "variant num layers parameters not embeddings tokens val loss behind best best step time folder" in shown
    assert "&lt;v1&gt; 1 2,001 1,001 300 2.2500 30 1:01 min pretrain-1 &lt;v0&gt;" in shown
    assert "2.5000 +0.2500" in shown
    assert "⚠ &lt;v4&gt;: it diverged" in shown
    assert "&lt;v1&gt; 2.25 &lt;v3&gt; 3.00 the 2 between" in shown  # the best and the worst are told apart
    assert "log axes" not in shown


def test_up_to_three_variants_have_a_line_of_their_own(tmp_path: Path) -> None:
    shown = words(page(make_sweep(tmp_path / "run", [2.5, 2.25, 2.75])))
    assert "&lt;v1&gt; 2.25 &lt;v0&gt; 2.50 &lt;v2&gt; 2.75" in shown
    assert "between" not in shown.partition("Sweep")[2].partition("How it was made")[0]


def test_a_scaling_study_shows_each_law_with_its_points(tmp_path: Path) -> None:
    html = page(make_sweep(tmp_path / "run", [2.5, 2.25, 2.75], scaling=True))
    assert "L(N) = (1.00·10<sup>5</sup> / N)<sup>0.301</sup>" in html
    assert "R² 0.988, 3 points" in html
    assert html.count("no line: it takes three points, and a loss that falls") == 2
    assert "form of Kaplan et al. (2020)" in html
    drawn = html.partition("over parameters N")[2].partition("</figure>")[0]
    assert all(power in drawn for power in ("10³", "10⁴", "10⁵"))


def test_a_run_without_a_sweep_says_nothing_of_one(tmp_path: Path) -> None:
    assert "Sweep" not in page(make_run(tmp_path / "run", ["pretrain"]))


def timed(step: int, **seconds: float) -> dict[str, Any]:
    return {"step": step, "score": 0.5, **{f"seconds_{name}": value for name, value in seconds.items()}}


def test_phases_are_means_over_steps_without_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        timed(1, rollout=90, update=90),  # compiles
        timed(2, rollout=1, update=2) | {"tokens_per_second_rollout": 1000.0, "bandwidth_share_rollout": 0.1},
        timed(5, rollout=3, update=2, evaluation=4) | {"tokens_per_second_rollout": 2000.0},  # three steps at once
    ]
    monkeypatch.setitem(ROWS, "ppo", rows)
    shown = words(page(make_run(tmp_path, ["ppo"])))
    # rollout (1 + 3 · 3) / 4, update 2, evaluation 3 · 4 / 4; rates weigh by time: (1 · 1000 + 9 · 2000) / 10
    assert "PPO seconds share tokens/s of the bound" in shown
    assert "rollout sampling answers 2.50 33.3% 1,900 10.0% bandwidth" in shown
    assert "update forward and backward passes, optimiser 2.00 26.7% – –" in shown
    assert "A phase's bound is" in shown
    assert "evaluation on held-out data 3.00 40.0% – –" in shown


def test_one_row_is_all_there_is_of_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "ppo", [timed(1, update=0.5) | {"flops_share_update": 0.375}])
    shown = words(page(make_run(tmp_path, ["ppo"])))
    assert "seconds share of the bound update forward and backward passes, optimiser 0.500 100.0% 37.5% FLOP/s" in shown


def test_columns_that_hold_nothing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, whose bounds are not known and whose memory is not measured."""
    monkeypatch.setitem(ROWS, "ppo", [timed(1, update=0.5)])
    shown = words(page(make_run(tmp_path, ["ppo"])))
    assert "PPO seconds share update forward and backward passes, optimiser 0.500 100.0% Lineage" in shown
    assert "bound is" not in shown
    assert "stage time processes process hours PPO 12.5 s 1 0.00347 Time is" in shown


def test_a_phase_table_leaves_out_what_only_other_stages_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "sft", [{"step": 1, "loss": 2.0, "seconds_update": 0.5}])
    of_ppo = timed(1, update=0.5) | {"tokens_per_second_update": 70.0, "flops_share_update": 0.375}
    monkeypatch.setitem(ROWS, "ppo", [of_ppo])
    html = page(make_run(tmp_path, ["sft", "ppo"]))
    assert "SFT seconds share update forward and backward passes, optimiser 0.500 100.0% PPO" in words(html)
    assert "PPO seconds share tokens/s of the bound update" in words(html)


def test_no_table_has_a_column_that_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a run of all stages, nor of one that records little of its data."""
    monkeypatch.setitem(ROWS, "reward", [{"step": 1, "seconds_update": 0.5}])
    monkeypatch.setitem(ROWS, "ppo", [timed(1, update=0.5) | {"tokens_per_second_update": 70.0}])
    run_dir = make_run(tmp_path, list(METRICS), [SAMPLE])
    set_metrics(run_dir, "reward", num_prompts=800)
    tables = re.findall(r"<table.*?</table>", page(run_dir))
    assert len(tables) > 6
    for table in tables:
        rows = [[words(cell) for cell in re.findall(r"<td.*?</td>", row)] for row in table.split("<tr>")]
        for column in zip(*[row for row in rows if len(row) > 1], strict=True):
            assert set(column) - {"", "–"}, table


def test_phases_are_in_their_table_and_not_among_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [timed(step, rollout=1) | {"tokens_per_second_rollout": 7.0, "peak_gib": 1.0} for step in (1, 2)]
    monkeypatch.setitem(ROWS, "ppo", rows)
    shown = words(page(make_run(tmp_path, ["ppo"])))
    assert "1 more curve: peak gib peak gib most memory that was in use, GiB" in shown
    assert "seconds rollout" not in shown


def test_a_run_without_phases_has_no_table_of_them(tmp_path: Path) -> None:
    assert "Where the time went" not in page(make_run(tmp_path, ["sft", "ppo"]))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, ""), (0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1:00 min"), (3599, "59:59 min"), (3600, "1:00:00"),
        (172_799, "47:59:59"), (172_800, "2 days 0 h"), (131_470_516, "1,521 days 15 h"),
    ],
)  # fmt: skip
def test_times_are_told_as_people_read_them(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said
