"""PPO's verdict from figures that call for it, and which figures are the evidence."""

from dataclasses import replace
from typing import Any

import pytest
from verdicts_world import BY_SCORE, EVEN, JUDGED, LOSES, PPO, REWARD, WINS, curve, said

from rlhf.pipeline.report import ppo_verdict, verdicts
from rlhf.pipeline.report.figures import rank_correlation
from rlhf.pipeline.report.ppo_verdict import Evidence, gather
from rlhf.stages.evaluation.statistics import win_rate
from rlhf.stages.metric_names import of_share


def test_ppo_improved_where_the_judge_prefers_its_answers() -> None:
    assert said(ppo_verdict.ppo(PPO | JUDGED, {}, None, WINS), "improved", "good") == (
        "PPO improved: quality by the judge 0.400 → 0.700, win rate over SFT by the judge 0.80 (100 prompts, 95 % "
        "interval 0.72 to 0.86), KL 9.00 nats per response; at the end of the ppo stage."
    )


def test_a_rise_by_the_score_alone_is_no_proof() -> None:
    sentence = said(ppo_verdict.ppo(PPO, {}, None, BY_SCORE), "raised_the_score", "doubtful")
    assert "the score rose from -0.100 to 1.50, win rate over SFT by the reward model itself 0.80" in sentence


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"rewards": []}, "by the reward model itself 0.80"),
        (None, "by the reward model itself 0.80"),
        ({"rewards": ["mine:correct"]}, "by the reward model itself 0.80"),  # no recipe of ours
        ({"rewards": [{"function": "mine:correct"}]}, "by the rewards themselves, ppo.rewards (mine:correct), 0.80"),
        (
            {"reward_model": "models/kind", "rewards": [{"function": "mine:correct"}, {"model": "models/helpful"}]},
            "by the rewards themselves, ppo.reward_model and ppo.rewards (mine:correct, models/helpful), 0.80",
        ),
    ],
)
def test_the_score_is_told_with_what_gives_it(section: Any, words: str) -> None:
    found = replace(BY_SCORE, paid_by=ppo_verdict.paid_by(section))
    assert f"win rate over SFT {words}" in said(ppo_verdict.ppo(PPO, {}, None, found), "raised_the_score", "doubtful")


def test_few_prompts_are_too_few_to_tell_and_many_show_no_difference() -> None:
    assert said(ppo_verdict.ppo(PPO, {}, None, EVEN), "too_few_to_tell", "open") == (
        "Too few to tell whether PPO's answers are better than SFT's: win rate over SFT by the judge 0.55 (20 prompts, "
        "95 % interval 0.34 to 0.74), KL 9.00 nats per response; at the end of the ppo stage."
    )
    many = Evidence(0.5, (0.45, 0.55), judged=True, num_prompts=400)
    assert said(ppo_verdict.ppo(PPO, {}, None, many), "no_difference_shown", "open").startswith(
        "No difference between PPO and SFT is shown: win rate over SFT by the judge 0.50 (400 prompts"
    )
    said(ppo_verdict.ppo(PPO, {}, None, Evidence()), "unknown", "open")
    said(ppo_verdict.ppo({}, {}, None, Evidence()), "unknown", "open")


def test_wins_that_are_gone_at_equal_length_are_doubted() -> None:
    longer = Evidence(0.8, (0.72, 0.86), (0.44, 0.58), True, 100)
    assert "among answers of equal length 95 % interval 0.44 to 0.58" in said(
        ppo_verdict.ppo(PPO, {}, None, longer), "only_longer", "doubtful"
    )


QUALITY = {
    "eval_true_quality": curve(0.4, 0.83, 0.61),
    "eval_score": curve(-0.1, 2.1, 3.4),
    "eval_kl": curve(0.0, 9.0, 34.0),
}


def test_quality_that_falls_while_the_score_rises_is_over_optimised() -> None:
    assert said(ppo_verdict.ppo(PPO | JUDGED, QUALITY, None, WINS), "over_optimised", "bad") == (
        "PPO over-optimised: the score rose from -0.100 to 3.40 while the quality by the judge, at its best 0.830 at "
        "iteration 20, fell to 0.610 (SFT: 0.400); KL 34.0 nats per response at the end of training. The policy of "
        "iteration 60 was kept, with a win rate over SFT by the judge of 0.80 (100 prompts, 95 % interval 0.72 to "
        "0.86) at the end of the ppo stage."
    )
    assert "the win rate over SFT by the judge is 0.20" in said(
        ppo_verdict.ppo(PPO, {}, None, LOSES), "over_optimised", "bad"
    )


def test_a_kl_over_its_budget_is_over_optimised_also_without_a_judge() -> None:
    over = PPO | {"over_optimised": True, "over_optimised_because": "the KL ended at 61.0 nats per response, over 50"}
    sentence = said(ppo_verdict.ppo(over, {}, None, BY_SCORE), "over_optimised", "bad")
    assert sentence.startswith("PPO over-optimised: the KL ended at 61.0")
    assert sentence.endswith("No judge says whether the answers are better.")


def test_the_same_fall_with_a_score_that_is_unrelated_to_ranks_is_a_broken_reward() -> None:
    guesses = verdicts.reward(REWARD | {"accuracy": 0.51})
    sentence = said(ppo_verdict.ppo(PPO | JUDGED, QUALITY, guesses, WINS), "broken_reward", "bad")
    assert "the score is unrelated to ranks: the reward model is not good enough: accuracy 0.51" in sentence
    said(ppo_verdict.ppo(PPO, {}, guesses, BY_SCORE), "broken_reward", "bad")  # no judge, but its score means nothing
    said(ppo_verdict.ppo(PPO | JUDGED, {}, guesses, WINS), "improved", "good")  # the judge knows better


def test_a_score_that_has_nothing_to_do_with_quality_is_broken() -> None:
    nothing = Evidence(0.5, (0.4, 0.6), None, True, 100, (0.03, (-0.17, 0.22)), 100)
    sentence = said(ppo_verdict.ppo(PPO, {}, None, nothing), "broken_reward", "bad")
    assert (
        "score and quality of SFT's answers have nothing to do with each other (rank correlation 0.03 over 100"
        in sentence
    )
    few = Evidence(0.5, (0.2, 0.8), None, True, 10, (0.03, (-0.6, 0.6)), 10)
    said(ppo_verdict.ppo(PPO, {}, None, few), "too_few_to_tell", "open")
    related = Evidence(0.5, (0.41, 0.59), None, True, 100, (0.15, (-0.05, 0.34)), 100)
    said(ppo_verdict.ppo(PPO, {}, None, related), "no_difference_shown", "open")


def test_a_score_without_any_spread_is_broken() -> None:
    flat = {"score": curve(0.5, 0.5), "score_std": curve(0.0, 1e-8)}
    assert said(ppo_verdict.ppo(PPO, flat, None, EVEN), "broken_reward", "bad") == (
        "Broken reward: every answer gets the same score, 0.500, in all 2 iterations that were logged, so there is "
        "nothing to learn from."
    )
    said(ppo_verdict.ppo(PPO, flat | {"score_std": curve(0.0, 0.1)}, None, EVEN), "too_few_to_tell", "open")


@pytest.mark.parametrize(("metrics", "curves", "words"), [
    ({"length": 1.1}, {}, "answers fell from 42.0 to 1.10 tokens"),
    ({"eos_share": 0.3}, {}, "answers that come to an end fell from 1.00 to 0.30"),
    ({}, {"entropy": curve(*[2.0] * 9, 0.1)}, "entropy fell from 2.00 to 0.100"),
    ({"findings": ["non_finite"]}, {}, "no finite numbers"),
])  # fmt: skip
def test_answers_that_say_nothing_any_more_are_a_collapse(metrics: Any, curves: Any, words: str) -> None:
    assert words in said(ppo_verdict.ppo(PPO | metrics, curves, None, EVEN), "collapsed", "bad")


@pytest.mark.parametrize(("num", "collapsed"), [(4, False), (100, True)])
def test_answers_of_few_prompts_that_end_less_often_by_chance_are_no_collapse(num: int, collapsed: bool) -> None:
    """Of 4 prompts one answer ended, and now none."""
    ends = PPO | {"sft_eos_share": 0.25, "eos_share": 0.0, "num_eval_prompts": num}
    assert (ppo_verdict.ppo(ends, {}, None, EVEN).name == "collapsed") == collapsed


def test_little_entropy_is_no_collapse_where_the_judge_likes_the_answers() -> None:
    said(ppo_verdict.ppo(PPO | JUDGED, {"entropy": curve(*[2.0] * 9, 0.1)}, None, WINS), "improved", "good")


def test_a_policy_that_is_still_sft_moved_nothing() -> None:
    assert "PPO moved nothing: KL 0.00200" in said(
        ppo_verdict.ppo(PPO | {"kl": 0.002}, {}, None, EVEN), "moved_nothing", "bad"
    )


def test_a_verdict_takes_kl_and_score_of_the_policy_that_was_kept_and_names_whose_figures_they_are() -> None:
    """And not the score of the last iteration beside the KL of the best: here 20 of 30."""
    run = {"eval_score": curve(-0.4, 0.1, 0.9), "eval_kl": curve(0.0, 0.002, 0.7)}
    kept = PPO | {"kl": 0.002, "score": 0.1, "sft_score": -0.4, "best_step": 20}
    assert said(ppo_verdict.ppo(kept, run, None, EVEN), "moved_nothing", "bad") == (
        "PPO moved nothing: KL 0.00200 nats per response, the score rose from -0.400 to 0.100; at the end of the ppo "
        "stage."
    )
    assert "the score rose from -0.400 to 0.100, win" in said(
        ppo_verdict.ppo(kept | {"kl": 3.0}, run, None, BY_SCORE), "raised_the_score", "doubtful"
    )
    evaluated = replace(EVEN, evaluated=True, source="by rlhf eval", kl=0.01, score=(0.2, 0.2))
    assert said(ppo_verdict.ppo(kept, run, None, evaluated), "moved_nothing", "bad") == (
        "PPO moved nothing: KL 0.0100 nats per response, the score stayed at 0.200; by rlhf eval."
    )
    for moved in (ppo_verdict.ppo(kept, run, None, replace(evaluated, kl=0.43)),
                  ppo_verdict.ppo(kept | {"kl": 0.43}, run, None, evaluated)):  # fmt: skip
        said(moved, "too_few_to_tell", "open")  # they contradict each other


def test_answers_that_lose_while_the_score_falls_were_made_worse() -> None:
    said(ppo_verdict.ppo(PPO | {"score": -0.8}, {}, None, LOSES), "made_it_worse", "bad")


# --- evidence


def test_evidence_is_the_evaluations_where_there_is_one() -> None:
    pair = {"one": "ppo", "other": "sft", "by": "judge", "wins": 70, "ties": 10, "losses": 20, "win_rate": 0.75,
            "interval": [0.66, 0.83], "length_controlled": 0.7, "length_controlled_interval": [0.6, 0.8]}  # fmt: skip
    by_score = pair | {"by": "score", "win_rate": 0.9}
    other = pair | {"other": "base", "win_rate": 0.99}
    found = gather({"pairs": [other, by_score, pair]}, [], [], {"win_rate": 0.1})
    assert found == Evidence(0.75, (0.66, 0.83), (0.6, 0.8), True, 100, source="by rlhf eval", evaluated=True)
    assert gather({"pairs": [by_score]}, [], [], {}).judged is False
    models = {"sft": {"quality": {"mean": 0.25}}, "ppo": {"quality": {"mean": 0.5}, "kl": 3.0}}
    asked = {"pairs": [pair], "models": models, "settings": {"num_prompts": 25}}  # four answers to each
    assert gather(asked, [], [], {}) == Evidence(
        0.75, (0.66, 0.83), (0.6, 0.8), True, 25, quality=(0.25, 0.5), kl=3.0, source="by rlhf eval", evaluated=True
    )


def test_all_figures_of_a_sentence_are_from_one_source_and_it_says_which() -> None:
    pair = {"one": "ppo", "other": "sft", "by": "judge", "wins": 70, "ties": 10, "losses": 20, "win_rate": 0.75,
            "interval": [0.66, 0.83]}  # fmt: skip
    models = {
        "sft": {"quality": {"mean": 0.25}, "score": {"mean": 0.1}},
        "ppo": {"quality": {"mean": 0.5}, "score": {"mean": 0.2}, "kl": 3.0},
    }
    stage = PPO | JUDGED | {"win_rate": 0.6, "num_eval_prompts": 100}  # KL 9, quality 0.4 to 0.7, score -0.1 to 1.5
    content = {"pairs": [pair], "models": models, "form": "full"}
    assert said(ppo_verdict.ppo(stage, {}, None, gather(content, [], [], stage)), "improved", "good") == (
        "PPO improved: quality by the judge 0.250 → 0.500, win rate over SFT by the judge 0.75 (100 prompts, 95 % "
        "interval 0.66 to 0.83), KL 3.00 nats per response; by rlhf eval."
    )
    by_score = {"pairs": [pair | {"by": "score"}], "models": models, "form": "cheap"}
    sentence = said(ppo_verdict.ppo(PPO, {}, None, gather(by_score, [], [], PPO)), "raised_the_score", "doubtful")
    assert "the score rose from 0.100 to 0.200" in sentence
    assert sentence.endswith("KL 3.00 nats per response; by rlhf eval --cheap.")
    told = ppo_verdict.ppo(stage, {}, None, gather(None, [], [], stage | {"win_rate": 0.8})).sentence
    assert "0.400 → 0.700" in told
    assert told.endswith("KL 9.00 nats per response; at the end of the ppo stage.")
    unknown = {"pairs": [pair], "models": {}}  # then none is better than another's
    assert "KL" not in ppo_verdict.ppo(stage, {}, None, gather(unknown, [], [], stage)).sentence


def test_an_evaluation_on_fewer_prompts_than_the_stage_asked_is_not_the_evidence() -> None:
    pair = {"one": "ppo", "other": "sft", "by": "judge", "wins": 8, "ties": 0, "losses": 8, "win_rate": 0.5,
            "interval": [0.3, 0.7]}  # fmt: skip
    rows = [{"prompt": str(n)} for n in range(40)]
    assert gather({"pairs": [pair]}, rows[:16], rows, {"win_rate": 0.8}) == Evidence(
        0.8, of_share(0.8, 40), None, True, 40, at_least=True
    )
    assert gather({"pairs": [pair]}, rows[:16], rows[:16], {"win_rate": 0.8}).win_rate == 0.5
    told = {"win_rate": 0.8, "num_eval_prompts": 119}  # of which samples.jsonl has forty
    assert gather(None, [], rows, told) == Evidence(0.8, of_share(0.8, 119), None, True, 119)


def test_the_cheap_form_is_no_evidence_where_the_stage_compared_answers_itself() -> None:
    """`ppo: done` has told the stage's own KL, and an output has one."""
    pair = {"one": "ppo", "other": "sft", "by": "score", "wins": 6, "ties": 0, "losses": 4, "win_rate": 0.6,
            "interval": [0.3, 0.9]}  # fmt: skip
    own = {"score_win_rate": 0.7, "num_eval_prompts": 10, "kl": 0.43}
    models = {"ppo": {"kl": 0.0148}}
    cheap, full = ({"form": form, "pairs": [pair], "models": models} for form in ("cheap", "full"))
    sentence = ppo_verdict.ppo(PPO | own, {}, None, gather(cheap, [], [], own)).sentence
    assert "KL 0.430 nats per response; at the end of the ppo stage." in sentence
    assert gather(full, [], [], own).source == "by rlhf eval"
    assert gather(cheap, [], [], {}).source == "by rlhf eval --cheap"


def test_an_older_manifest_without_a_number_of_prompts_says_only_what_is_known() -> None:
    """samples.jsonl has some of the prompts over which the win rate is."""
    rows = [{"prompt": str(n)} for n in range(40)]
    found = gather(None, [], rows, {"win_rate": 0.855})
    assert said(ppo_verdict.ppo(PPO, {}, None, found), "improved", "good") == (
        "PPO improved: the score rose from -0.100 to 1.50, win rate over SFT by the judge 0.85 (at least 40 prompts; "
        "of so many the 95 % interval 0.72 to 0.93), KL 9.00 nats per response; at the end of the ppo stage."
    )
    assert said(ppo_verdict.ppo(PPO, {}, None, gather(None, [], [], {"win_rate": 0.855})), "unknown", "open") == (
        "Whether PPO improved is not shown: the score rose from -0.100 to 1.50, win rate over SFT by the judge 0.85 "
        "(of how many prompts is not recorded), KL 9.00 nats per response; at the end of the ppo stage."
    )


def test_without_an_evaluation_the_stages_own_figures_and_samples_are_evidence() -> None:
    rows = [{"prompt": str(n), "scores": {"sft": n}, "qualities": {"sft": -n}} for n in range(30)]
    found = gather(None, [], rows, {"win_rate": 0.8, "score_win_rate": 0.9})
    assert (found.win_rate, found.judged, found.num_prompts, found.num_answers) == (0.8, True, 30, 30)
    assert found.interval == of_share(0.8, 30)
    assert found.agreement is not None
    assert found.agreement[0] == pytest.approx(-1)
    assert gather(None, [], [], {"score_win_rate": 0.9}) == Evidence(0.9, None)


def test_wilsons_interval_is_the_textbooks() -> None:
    low, high = of_share(0.8, 10)  # 8 of 10
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert of_share(0.0, 10)[0] == 0
    assert of_share(0.5, 0) == (0, 1)


def test_where_all_came_out_alike_the_interval_is_the_exact_one_that_an_evaluation_has() -> None:
    assert of_share(1.0, 4) == pytest.approx(win_rate([1.0] * 4)[1])
    assert of_share(0.0, 3) == pytest.approx((0, 1 - 0.025 ** (1 / 3)))


def test_a_rank_correlation_shares_places_among_equals() -> None:
    found = rank_correlation([1, 2, 2, 3, 9], [10, 20, 20, 40, 30])
    assert found is not None
    assert found[0] == pytest.approx(1 - 1 / 9.5)  # ranks 0 1.5 1.5 3 4 against 0 1.5 1.5 4 3: covariance 8.5 of 9.5
    assert rank_correlation([1, 1, 1, 1], [1, 2, 3, 4]) is None
    assert rank_correlation([1, 2], [1, 2]) is None
