"""Curves of the report: which metrics share a chart, and that a long line keeps its spikes."""

import re
from typing import Any

import pytest

from rlhf.pipeline.report.charts import draw_charts
from rlhf.pipeline.report.curves import MAX_POINTS, curves, start_and_end, thin
from rlhf.pipeline.report.drawing import DASHES, SERIES, draw_frontier, draw_lines


def test_a_long_line_keeps_every_spike_and_invents_nothing() -> None:
    line = [(float(step), float(step % 2)) for step in range(10_000)]
    line[4321], line[8765] = (4321.0, 50.0), (8765.0, -50.0)
    thinned = thin(line)
    assert len(thinned) <= MAX_POINTS
    assert set(thinned) <= set(line)
    assert {line[0], line[4321], line[8765], line[-1]} <= set(thinned)
    assert thinned == sorted(thinned)


def test_a_short_line_stays_as_it_is() -> None:
    line = [(float(step), 1.0) for step in range(MAX_POINTS)]
    assert thin(line) == line
    assert thin([(float(step), 1.0) for step in range(MAX_POINTS + 1)], 10)[-1] == (MAX_POINTS, 1.0)


def test_steps_logged_again_after_a_resume_count_once() -> None:
    assert curves([{"step": 1, "kl": 5.0}, {"step": 2, "kl": 6.0}, {"step": 2, "kl": 7.0}]) == {"kl": [(1, 5), (2, 7)]}


def test_values_that_are_no_numbers_are_left_out_of_curves() -> None:
    assert curves([{"step": 1, "kl": float("nan"), "note": "warm-up"}, {"step": 2, "kl": None}]) == {}


def test_an_evaluation_curve_begins_at_the_sft_model() -> None:
    found = curves([{"step": 5, "eval_true_quality": 0.5, "eval_sft_true_quality": 0.4, "eval_kl": 1.0}])
    assert found["eval_true_quality"] == [(0, 0.4), (5, 0.5)]
    assert found["eval_kl"] == [(5, 1.0)]


def test_start_and_end_are_means_over_a_tenth() -> None:
    assert start_and_end([(float(n), float(n)) for n in range(20)]) == (0.5, 18.5)
    assert start_and_end([(1.0, 3.0)]) == (3.0, 3.0)


def test_metrics_that_belong_together_share_a_chart_with_what_they_have_to_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the names that the ppo stage writes, finished or not."""
    drawn: list[Any] = []
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *given: drawn.append(given))
    rows = [
        {"step": 5, "score": 0.2, "kl": 1.0, "clip_fraction": 0.1, "policy_grad_norm": 2.0, "odd": 1.0},
        {"step": 5, "eval_score": 0.1, "eval_sft_score": -0.1, "eval_true_quality": 0.5, "eval_sft_true_quality": 0.4,
         "eval_win_rate": 0.6, "eval_kl": 1.5},
    ]  # fmt: skip
    for final in ({}, {"sft_true_quality": 0.4, "sft_score": -0.1}):
        found = draw_charts("ppo", curves(rows), final)
        told = {chart["title"]: (chart["last"], chart["level"]) for chart in found["charts"]}
        assert told == {
            "Quality by the judge": ({"eval_true_quality": 0.5}, 0.4),
            "Score": ({"score": 0.2, "eval_score": 0.1}, -0.1),
            "KL from SFT, nats per response": ({"kl": 1.0, "eval_kl": 1.5}, None),
            "Share of tokens whose ratio is clipped": ({"clip_fraction": 0.1}, None),
            "Gradient norms, before clipping": ({"policy_grad_norm": 2.0}, None),
        }
        assert [chart["names"] for chart in found["charts"]] == [
            {"eval_true_quality": "held out"}, {"score": "training", "eval_score": "held out"},
            {"kl": "training", "eval_kl": "held out"}, {"clip_fraction": "training"}, {"policy_grad_norm": "policy"},
        ]  # fmt: skip
        assert [chart["title"] for chart in found["more_charts"]] == ["eval win rate", "odd"]
    assert (
        drawn[0][2] == "Quality by the judge: held out from 0.400 at step 0 to 0.500 at step 5, between 0.400 and 0.500"
    )


def test_a_drawing_says_in_words_what_it_shows_and_takes_the_pages_colours() -> None:
    svg = str(draw_lines([[(1.0, 2.0), (2.0, 3.0)], [], [(1.0, 1.0), (2.0, 1.5)]], None, 'Loss: "a" < b'))
    assert svg.startswith("<svg")
    assert 'role="img" aria-label="Loss: &#34;a&#34; &lt; b"' in svg
    assert "var(--one)" in svg
    assert "var(--three)" in svg  # the empty line keeps its colour
    assert "var(--two)" not in svg
    assert not re.search(r"#0000\d\d", svg)


def test_a_line_of_ten_thousand_steps_is_small() -> None:
    line = [(float(step), (step * 7919 % 1000) / 1000) for step in range(10_000)]
    assert len(str(draw_lines([line], None, "noise"))) < 12_000


def test_the_frontier_draws_ppo_and_best_of_n() -> None:
    svg = str(draw_frontier({"PPO": [(0.0, 0.0), (1.0, 2.0)], "best of n": [(0.0, 0.0), (0.9, 1.0)]}, "Score"))
    assert "var(--one)" in svg
    assert "var(--two)" in svg
    assert len(SERIES) == len(DASHES) == 5
