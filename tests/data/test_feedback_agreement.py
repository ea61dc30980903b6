"""How far raters agree, and what their rankings depend on besides."""

from dataclasses import replace
from typing import Any

import pytest
from feedback_world import judged, vote

from rlhf.data.feedback.agreement import agreed, agreement
from rlhf.data.feedback.alpha import MIN_GROUPS, alpha_interval, ordinal_alpha
from rlhf.data.feedback.bias import wilson

# Four observers and twelve units, of Krippendorff 2011, Computing Krippendorff's Alpha-Reliability, section D.
OBSERVERS = ["123321412...", "1233224125.3", ".3332342251.", "12332441251."]


def test_alpha_is_the_one_that_krippendorff_works_out() -> None:
    said = [(unit, int(value)) for row in OBSERVERS for unit, value in enumerate(row) if value != "."]
    assert ordinal_alpha(*zip(*said, strict=True)) == pytest.approx(0.815, abs=5e-4)


def test_alpha_of_agreement_chance_and_its_opposite() -> None:
    assert ordinal_alpha([0, 0, 1, 1], [1, 1, 2, 2]) == 1
    # 1, 2 against 2, 1: every pair within a unit differs (observed 1), of all 12 ordered pairs 8 do: 1 − 1 / (2/3)
    assert ordinal_alpha([0, 0, 1, 1], [1, 2, 2, 1]) == pytest.approx(-0.5)
    assert ordinal_alpha([0, 0, 1, 1], [1, 1, 1, 1]) is None
    assert ordinal_alpha([0, 1, 2], [1, 2, 3]) is None
    assert ordinal_alpha([], []) is None


def test_alphas_interval_takes_what_belongs_to_one_prompt_for_one_observation() -> None:
    # 40 units, every fourth of them disputed, of forty prompts or four of each of ten
    units = [unit for unit in range(40) for _ in range(2)]
    values = [value for unit in range(40) for value in ((unit % 3, unit % 3) if unit % 4 else (0, 2))]
    alpha = ordinal_alpha(units, values)
    assert alpha is not None
    apart = alpha_interval(units, values, range(40))
    assert apart is not None
    assert apart[0] < alpha < apart[1]
    disputed_together = sorted(range(40), key=lambda unit: unit % 4)
    prompt_of = {unit: place // 4 for place, unit in enumerate(disputed_together)}
    together = alpha_interval(units, values, [prompt_of[unit] for unit in range(40)])
    assert together is not None
    assert together[1] - together[0] > 1.5 * (apart[1] - apart[0])  # twice as wide, were it a mean of independent ones


def test_alpha_has_no_interval_where_there_are_few_prompts_or_nothing_varies() -> None:
    def interval(num: int, *values: int) -> tuple[float, float] | None:
        return alpha_interval([unit for unit in range(num) for _ in values], list(values) * num, range(num))

    assert interval(MIN_GROUPS, 1, 2) is not None
    assert interval(MIN_GROUPS - 1, 1, 2) is None
    assert interval(MIN_GROUPS, 1, 1) is None
    agreed_on = [value for unit in range(MIN_GROUPS) for value in (unit, unit)]
    assert alpha_interval([u for u in range(MIN_GROUPS) for _ in "ab"], agreed_on, range(MIN_GROUPS)) == (1, 1)


def test_a_prompt_of_two_rounds_is_one_observation_of_alphas_interval() -> None:
    """Half as many prompts as an interval takes, each in two rounds, are too few."""
    rated = judged(vote("ann", 1, 2), vote("bob", 2, 1))
    prompts = range(MIN_GROUPS // 2)
    twice = [replace(rated, prompt_id=prompt, round=round_) for prompt in prompts for round_ in (1, 2)]
    assert agreement(twice)["alpha_interval"]["all"] is None
    apart = [replace(found, prompt_id=number) for number, found in enumerate(twice)]
    assert agreement(apart)["alpha_interval"]["all"] is not None


def test_rankings_agree_on_a_pair_wholly_by_half_or_not_at_all() -> None:
    assert agreed([1, 2, 3], [1, 2, 3]) == (3, 3)
    assert agreed([1, 2, 3], [3, 2, 1]) == (0, 3)
    assert agreed([1, 1, 2], [1, 1, 2]) == (3, 3)
    assert agreed([1, 2, 2], [1, 2, 3]) == (2.5, 3)
    assert agreed([1, 1], [1, 2]) == (0.5, 1)


def test_each_two_raters_are_compared_and_each_one_with_people_and_with_judges() -> None:
    found = agreement(
        [
            judged(vote("anna", 1, 2, 3), vote("bob", 1, 3, 2), vote("rm", 3, 2, 1, kind="judge")),
            judged(vote("anna", 1, 2), vote("rm", 1, 2, kind="judge")),
            judged(vote("bob", 1, 2)),
        ]
    )
    assert (found["num_prompts"], found["num_shared_prompts"], found["num_rankings"]) == (3, 2, 6)
    assert [(p["raters"], p["num_prompts"], p["share"], p["num_pairs"]) for p in found["pairs"]] == [
        (["anna", "bob"], 1, 2 / 3, 3),
        (["anna", "rm"], 2, 1 / 4, 4),
        (["bob", "rm"], 1, 1 / 3, 3),
    ]
    assert found["agreement"] == {
        "all": {"share": 4 / 10, "num_pairs": 10},
        "people": {"share": 2 / 3, "num_pairs": 3},
        "judges": {"share": None, "num_pairs": 0},
        "people_and_judges": {"share": 2 / 7, "num_pairs": 7},
    }
    [anna] = [row for row in found["raters"] if row["rater"] == "anna"]
    assert anna["num_rankings"] == 2
    assert anna["with_rest"] == {"share": 3 / 7, "num_pairs": 7}
    assert anna["with_people"] == {"share": 2 / 3, "num_pairs": 3}
    assert anna["with_judges"] == {"share": 1 / 4, "num_pairs": 4}


def test_alpha_compares_places_so_that_prompts_may_have_different_numbers_of_answers() -> None:
    people = [vote("anna", 1, 2, 3), vote("bob", 1, 2, 3)], [vote("anna", 1, 2), vote("bob", 1, 2)]
    judge = vote("rm", 2, 1, kind="judge")
    found = agreement([judged(*people[0]), judged(*people[1], judge)])["alpha"]
    assert found["people"] == 1
    assert found["judges"] is None
    # The values are 0 ½ 1 and 0 1, twice each, and the judge's 1 0: 5 zeros, 2 halves, 5 ones, of 12 in all.
    # Distances: 0 to ½ is 5/2 + 2/2 = 3.5, so is ½ to 1; 0 to 1 is 5/2 + 2 + 5/2 = 7. In the last two units one value
    # in three stands alone: 2 · 2 · 7² / 2 = 98 each; expected is 2 (5·2·3.5² · 2 + 5·5·7²) / 11.
    expected = 2 * (2 * 5 * 2 * 3.5**2 + 5 * 5 * 7**2) / 11
    assert found["all"] == pytest.approx(1 - 2 * 98 / expected)


def test_gold_questions_are_right_where_all_ordered_pairs_are() -> None:
    found = agreement(
        [
            judged(vote("anna", 1, 2, 3), vote("bob", 2, 1, 3), gold=[1, 2, None]),
            judged(vote("anna", 1, 2, 3), vote("bob", 1, 1, 2), gold=[1, 2, 2]),
        ]
    )
    gold = {row["rater"]: row["gold"] for row in found["raters"]}
    assert gold["anna"] == {"share": 1.0, "num_questions": 2, "pairs": {"share": 1.0, "num_pairs": 3}}
    # bob: a over b is wrong in both, a over c right in the second
    assert gold["bob"] == {"share": 0.0, "num_questions": 2, "pairs": {"share": 1 / 3, "num_pairs": 3}}


def test_the_answer_shown_first_is_best_by_chance_or_more_often() -> None:
    swayed = agreement([judged(vote("anna", 2, 1, shown=[1, 0]))] * 20)["position"]
    assert (swayed["first_is_best"], swayed["expected"], swayed["num_rankings"]) == (1.0, 0.5, 20)
    assert swayed["low"] > 0.8
    assert (swayed["as_shown"], swayed["expected_as_shown"]) == (1.0, 0.5)
    ranks: list[dict[str, Any]] = [{"ranks": (1, 1, 2), "shown": [0, 1, 2]}, {"ranks": (3, 2, 1), "shown": [0, 2, 1]}]
    found = agreement([judged(vote("anna", *r["ranks"], shown=r["shown"])) for r in ranks])
    assert found["position"]["first_is_best"] == 1 / 4  # it shares the best rank in one of two
    assert found["position"]["as_shown"] == 0
    assert found["raters"][0]["position"] == found["position"]
    assert agreement([judged(vote("anna", 1, 2))])["position"]["first_is_best"] is None


def test_wilsons_interval() -> None:
    # (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) with p = 0.5, n = 10, z = 1.96: 0.5 ± 0.3097/1.3842 …
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10)[0] == pytest.approx(0, abs=1e-12)


def test_quick_rankings_are_set_beside_slow_ones_and_fast_people_are_named() -> None:
    slow = [judged(vote("anna", 1, 2, seconds=30.0), vote("bob", 1, 2, seconds=40.0))] * 4
    quick = [judged(vote("anna", 1, 2, seconds=35.0), vote("cleo", 2, 1, seconds=2.0))] * 4
    judge = [judged(vote("anna", 1, 2, seconds=30.0), vote("rm", 1, 2, kind="judge", seconds=0.1))]
    found = agreement(slow + quick + judge)
    assert [(q["up_to_seconds"], q["num_rankings"]) for q in found["time"]] == [(2, 4), (30, 4), (35, 5), (40, 4)]
    assert [q["agreement"] for q in found["time"]] == [0, 1, 1 / 5, 1]
    told = {row["rater"]: (row["seconds"], row["fast"]) for row in found["raters"]}
    assert told == {"anna": (30.0, False), "bob": (40.0, False), "cleo": (2.0, True), "rm": (0.1, False)}


def test_of_nothing_nothing_is_said() -> None:
    found = agreement([])
    assert (found["num_rankings"], found["alpha"], found["time"]) == (0, dict.fromkeys(("all", "people", "judges")), [])
