"""The report card's figures, worked out by hand."""

import math
from itertools import count
from typing import Any

import pytest
import torch

from rlhf.stages.reward.card import (
    Scored,
    accuracy_of,
    agreement,
    best_and_worst,
    by_length,
    by_margin,
    by_source,
    expected_calibration_error,
    fit_temperature,
    histogram,
    ordered_pairs,
    prompt_accuracy,
    reliability,
    report_card,
    worst_pairs,
)

# Pairs and by how much the better answer leads: 1 over 2 by 1, 1 over 3 by -1, 2 over 3 by -2; 1 over 2 by 0.
THREE = Scored(scores=[1.0, 0.0, 2.0], ranks=[1, 2, 3], lengths=[10, 20, 10], key="three")
EQUAL = Scored(scores=[5.0, 5.0], ranks=[1, 2], lengths=[8, 4], key="equal")
TIED = Scored(scores=[3.0, 1.0], ranks=[1, 1], lengths=[5, 5], key="tied")
PROMPTS = count()


def pair_of(
    lead: float, longer: int = 0, strengths: list[float] | None = None, source: str = "", prompt: str | None = None
) -> Scored:
    """A better answer of 100 + longer tokens, and a worse one of 100 whose score is `lead` lower; without a `prompt`,
    to one of their own."""
    key = f"prompt {next(PROMPTS)}" if prompt is None else prompt
    return Scored([lead, 0.0], [1, 2], [100 + longer, 100], strengths, source, key=key)


def group(name: str, pairs: int, accuracy: float) -> dict[str, Any]:
    """What a table says of pairs each of which has a prompt of its own."""
    return {"name": name, "pairs": pairs, "accuracy": accuracy, "prompts": pairs, "prompt_accuracy": accuracy}


def deltas(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def test_equal_scores_count_half_and_equal_ranks_make_no_pair() -> None:
    assert [pair.lead for pair in ordered_pairs([THREE, TIED, EQUAL])] == [1.0, -1.0, -2.0, 0.0]
    assert accuracy_of(ordered_pairs([THREE, EQUAL, TIED])) == (1 + 0 + 0 + 0.5) / 4


def test_over_prompts_each_weighs_the_same_however_many_answers_it_has() -> None:
    assert prompt_accuracy(ordered_pairs([THREE, EQUAL, TIED])) == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_rankings_of_the_same_prompt_count_as_one() -> None:
    """Three of `p`, all right, and one of `q`, wrong: 3 of 4 pairs, but one of two prompts."""
    rows = [*(pair_of(1.0, 50, prompt="p") for _ in range(3)), pair_of(-1.0, 60, prompt="q")]
    figures, card = report_card(rows)
    assert (figures["accuracy"], figures["prompt_accuracy"]) == (0.75, 0.5)
    assert (figures["num_eval_pairs"], figures["num_eval_prompts"], card["num_prompts"]) == (4, 2, 2)
    assert card["by_length"] == [
        {"name": "better answer longer", "pairs": 4, "accuracy": 0.75, "prompts": 2, "prompt_accuracy": 0.5}
    ]


def test_a_prompt_whose_answers_are_all_tied_is_not_among_those_measured() -> None:
    figures, card = report_card([THREE, TIED])
    assert (figures["num_eval_prompts"], card["num_prompts"]) == (1, 1)


def test_lengths_within_a_tenth_are_about_equal() -> None:
    rows = [pair_of(1.0, 50), pair_of(-1.0, 60), pair_of(1.0, -50), pair_of(1.0, 11), pair_of(-1.0, -10)]
    assert by_length(rows, ordered_pairs(rows)) == [
        group("better answer longer", 2, 0.5),
        group("about equal", 2, 0.5),  # 111 against 100, and 90
        group("better answer shorter", 1, 1.0),
    ]


def test_few_margins_are_groups_of_their_own() -> None:
    rows = [pair_of(-1.0, strengths=[0.3, 0.2]), pair_of(1.0, strengths=[0.5, 0.4]), pair_of(1.0, strengths=[3, 0])]
    assert by_margin([*rows, pair_of(1.0)], ordered_pairs([*rows, pair_of(1.0)])) == [
        group("0.1", 2, 0.5),
        group("3", 1, 1.0),
    ]
    assert by_margin([pair_of(1.0)], ordered_pairs([pair_of(1.0)])) == []


def test_many_margins_are_put_into_thirds() -> None:
    rows = [pair_of(1.0 if margin > 2 else -1.0, strengths=[margin, 0]) for margin in (6, 5, 4, 3, 2, 1)]
    assert by_margin(rows, ordered_pairs(rows)) == [
        group("small, below 3", 2, 0.0),
        group("medium, below 5", 2, 1.0),
        group("large, from 5", 2, 1.0),
    ]


def test_equal_margins_stay_in_one_third() -> None:
    rows = [pair_of(1.0, strengths=[margin, 0]) for margin in [1, 2, 2, 2, 2, 2, 3, 4, 5]]
    found = by_margin(rows, ordered_pairs(rows))
    assert [(part["name"], part["pairs"]) for part in found] == [
        ("small, below 2", 1), ("medium, below 3", 5), ("large, from 3", 3),
    ]  # fmt: skip


def test_sources_are_told_apart_where_there_are_several() -> None:
    rows = [pair_of(1.0), pair_of(1.0, source="forum"), pair_of(-1.0, source="forum")]
    assert by_source(rows, ordered_pairs(rows)) == [
        group("forum", 2, 0.5),
        group("not said", 1, 1.0),
    ]
    assert by_source(rows[1:], ordered_pairs(rows[1:])) == []


def test_calibration_compares_how_sure_with_how_often_right() -> None:
    # Four pairs at confidence 0.8, three of them right; one at 0.93, right; one at 0.5, of equal scores.
    found = reliability(deltas(*[logit(0.8)] * 3, -logit(0.8), logit(0.93), 0.0))
    assert [(bin["pairs"], round(bin["confidence"], 9), bin["accuracy"]) for bin in found] == [
        (1, 0.5, 0.5), (4, 0.8, 0.75), (1, 0.93, 1.0),
    ]  # fmt: skip
    assert expected_calibration_error(found) == pytest.approx((0 + 4 * 0.05 + 0.07) / 6)


def test_scores_beyond_all_doubt_stay_in_the_last_bin() -> None:
    assert reliability(deltas(1e4, -1e4)) == [{"confidence": 1.0, "accuracy": 0.5, "pairs": 2}]


def test_the_temperature_brings_confidence_down_to_how_often_it_is_right() -> None:
    # Δ = 2 and right in 3 of 4: σ(2/T) = 0.75, so T = 2 / ln 3.
    over_confident = deltas(2, 2, 2, -2)
    temperature = fit_temperature(over_confident)
    assert temperature == pytest.approx(2 / math.log(3), rel=1e-9)
    assert temperature is not None
    assert expected_calibration_error(reliability(over_confident / temperature)) == pytest.approx(0, abs=1e-9)


def test_there_is_no_temperature_where_none_is_best() -> None:
    """Never wrong, the lower the better; worse than chance, the higher. A bound of the search is no measurement."""
    for never in (deltas(1, 2), deltas(-1, 1, -2)):
        assert fit_temperature(never) is None
    figures, card = report_card([pair_of(0.5), pair_of(0.25)])
    assert not figures.keys() & {"temperature", "ece_after_temperature"}
    assert card["reliability_after_temperature"] == []


def test_a_card_measures_confidence_on_the_scale_that_was_trained_on() -> None:
    """Scores were divided by 4: Δ is 2 where they differ by 0.5."""
    rows = [pair_of(0.5), pair_of(0.5), pair_of(0.5), pair_of(-0.5)]
    figures, card = report_card(rows, scale=4.0)
    assert figures["temperature"] == pytest.approx(2 / math.log(3))
    assert figures["ece"] == pytest.approx(1 / (1 + math.exp(-2)) - 0.75)
    assert figures["ece_after_temperature"] == pytest.approx(0, abs=1e-9)
    assert (figures["accuracy"], figures["prompt_accuracy"], figures["num_eval_pairs"]) == (0.75, 0.75, 4)
    assert (figures["chosen_mean"], figures["rejected_mean"]) == (0.25, 0)
    assert figures["chosen_std"] == pytest.approx(math.sqrt(3) / 4)  # 0.5, 0.5, 0.5, -0.5
    assert (card["num_pairs"], card["num_prompts"]) == (4, 4)


def test_the_best_and_the_worst_of_each_prompt_share_their_bars() -> None:
    chosen, rejected = best_and_worst([THREE, EQUAL, TIED, Scored([0.0, 4.0, 2.0], [1, 1, 2], [1, 1, 1], key="best")])
    assert (chosen.tolist(), rejected.tolist()) == ([1.0, 5.0, 0.0, 4.0], [2.0, 5.0, 2.0])
    found = histogram(chosen, rejected)
    assert (found["edges"][0], found["edges"][-1], len(found["edges"])) == (0.0, 5.0, 25)
    assert (sum(found["chosen"]), sum(found["rejected"])) == (4, 3)
    assert (found["chosen"][0], found["chosen"][-1], found["rejected"][-1]) == (1, 1, 1)


def test_scores_that_are_all_the_same_still_have_a_histogram() -> None:
    figures, card = report_card([EQUAL])
    assert figures["accuracy"] == 0.5
    assert sum(card["histogram"]["chosen"]) == 1


def test_the_worst_pairs_come_first_and_are_cut_short() -> None:
    long = Scored([0.0, 3.0], [1, 2.5], [1, 1], prompt="p" * 600, responses=["good", "b" * 600], key="p")
    three = Scored(THREE.scores, THREE.ranks, THREE.lengths, prompt="q", responses=["one", "two", "three"], key="q")
    found = worst_pairs([three, long])
    assert found[0] == {
        "prompt": "p" * 500, "better": "good", "better_score": 0.0, "better_rank": 1,
        "worse": "b" * 500, "worse_score": 3.0, "worse_rank": 2.5,
    }  # fmt: skip
    assert [(line["better"], line["worse"]) for line in found[1:]] == [("two", "three"), ("one", "three")]


def test_no_more_than_ten_worst_pairs_are_kept() -> None:
    rows = [Scored([0.0, lead], [1, 2], [1, 1], responses=["a", "b"], key="p") for lead in range(1, 15)]
    assert [line["worse_score"] for line in worst_pairs(rows)] == list(range(14, 4, -1))


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="no two answers of different rank"):
        report_card([TIED])


def test_agreement_counts_the_pairs_that_models_order_alike() -> None:
    # Pairs of THREE: 1 over 2, 1 over 3, 2 over 3. The second model orders the last the other way, the third ties it.
    models = [[[1.0, 0.0, 2.0]], [[1.0, 0.0, -2.0]], [[4.0, 0.0, 0.0]]]
    found = agreement(models, ordered_pairs([THREE]))
    # Signs: + - -, + + +, + + 0. Two by two they agree in 1, 1 and 2 of 3.
    assert found["all_agree"] == pytest.approx(1 / 3)
    assert found["mean_pairwise"] == pytest.approx(4 / 9)


def test_scores_that_differ_in_scale_only_do_not_spread() -> None:
    same = agreement([[[1.0, 2.0, 3.0]], [[10.0, 20.0, 30.0]]], ordered_pairs([THREE]))
    assert same["score_std"] == pytest.approx(0, abs=1e-12)
    # Standardised -1, 1 and 1, -1: each answer has the standard deviation 1.
    opposed = agreement([[[1.0, 2.0]], [[2.0, 1.0]]], ordered_pairs([EQUAL]))
    assert opposed == {"all_agree": 0.0, "mean_pairwise": 0.0, "score_std": pytest.approx(1)}
