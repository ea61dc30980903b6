"""Each verdict from figures that call for it, and each diagnosis from a verdict that there is."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf.pipeline.report import diagnoses, ppo_verdict, verdicts
from rlhf.pipeline.report.figures import rank_correlation
from rlhf.pipeline.report.ppo_verdict import Evidence, gather
from rlhf.pipeline.report.verdicts import Verdict
from rlhf.stages.evaluation.statistics import win_rate
from rlhf.stages.metric_names import of_share

PRETRAIN = {"val_loss": 2.0, "guessing_loss": 6.9, "vocab_size": 1000}
SFT = {"eval_loss": 1.31, "base_eval_loss": 1.92}
REWARD = {"accuracy": 0.72, "longer_wins_accuracy": 0.55, "num_eval_prompts": 400}
PPO = {"score": 1.5, "sft_score": -0.1, "kl": 9.0, "eos_share": 1.0, "sft_eos_share": 1.0, "length": 40.0,
       "sft_length": 42.0, "best_step": 60}  # fmt: skip
JUDGED = {"true_quality": 0.7, "sft_true_quality": 0.4}
WINS = Evidence(0.8, (0.72, 0.86), judged=True, num_prompts=100, quality=(0.4, 0.7))
LOSES = Evidence(0.2, (0.14, 0.28), judged=True, num_prompts=100)
EVEN = Evidence(0.55, (0.34, 0.74), judged=True, num_prompts=20)
BY_SCORE = Evidence(0.8, (0.72, 0.86), num_prompts=100)


def said(verdict: Verdict, name: str, tone: str) -> str:
    """The sentence of a verdict that has this name and tone."""
    assert (verdict.name, verdict.tone) == (name, tone), verdict.sentence
    return " ".join(verdict.sentence.split())  # no spaces that do not break


def curve(*values: float) -> list[tuple[float, float]]:
    return [(20.0 * place, value) for place, value in enumerate(values)]


# --- pretrain and SFT


def test_pretraining_is_held_against_guessing() -> None:
    assert "0.812" in said(verdicts.pretrain(PRETRAIN | {"val_loss": 0.812}, {}), "learned", "good")
    assert said(verdicts.pretrain(PRETRAIN | {"val_loss": 6.6}, {}), "learned_nothing", "bad") == (
        "Pretraining learned next to nothing: held-out loss 6.60, guessing among 1,000 tokens would be 6.90."
    )
    said(verdicts.pretrain({}, {}), "unknown", "open")


def test_pretraining_whose_held_out_loss_turned_upwards_was_too_long() -> None:
    turned = {"val_loss": curve(4.0, 2.0, 2.5)}
    assert "lowest at step 20 (2.00) and rose to 2.50" in said(
        verdicts.pretrain(PRETRAIN, turned), "overfitted", "doubtful"
    )
    said(verdicts.pretrain(PRETRAIN, {"val_loss": curve(4.0, 2.0, 2.005)}), "learned", "good")


def test_sft_is_held_against_its_base_model() -> None:
    assert said(verdicts.sft(SFT, {}), "learned", "good") == "SFT learned: held-out loss 1.92 → 1.31."
    said(verdicts.sft(SFT | {"eval_loss": 1.915}, {}), "moved_nothing", "bad")
    said(verdicts.sft(SFT | {"eval_loss": 2.1}, {}), "made_it_worse", "bad")
    said(verdicts.sft({"eval_loss": 1.0}, {}), "unknown", "open")


def test_sft_that_knows_its_demonstrations_by_heart_is_told() -> None:
    by_heart = verdicts.sft(SFT, {"loss": curve(*[2.0] * 9, 0.2)})
    assert "the loss on what it was trained on is 0.200" in said(by_heart, "memorised", "doubtful")
    said(verdicts.sft(SFT, {"loss": curve(*[2.0] * 9, 1.2)}), "learned", "good")


def test_feedback_counts_what_was_ranked() -> None:
    assert "80 rankings, 3 of them" in said(
        verdicts.feedback({"num_rankings": 80, "num_disagreed": 3}), "ranked", "good"
    )
    said(verdicts.feedback({"num_rankings": 0}), "nothing_ranked", "bad")
    told = said(verdicts.feedback({"num_rankings": 40, "num_tied": 21}), "mostly_ties", "doubtful")
    assert "40 rankings, but in 21 of them all answers are tied" in told
    said(verdicts.feedback({"num_rankings": 40, "num_tied": 20}), "ranked", "good")
    said(verdicts.feedback({}), "unknown", "open")


# --- reward


def test_a_reward_model_is_held_against_guessing_and_against_length() -> None:
    assert said(verdicts.reward(REWARD), "learned", "good") == (
        "The reward model learned: accuracy 0.72 on held-out pairs of 400 prompts (95 % interval 0.67 to 0.76); always "
        "preferring the longer answer (in tokens) reaches 0.55."
    )
    longer = verdicts.reward(REWARD | {"accuracy": 0.58, "longer_wins_accuracy": 0.61})
    assert said(longer, "no_better_than_length", "bad") == (
        "The reward model is not good enough: accuracy 0.58 on held-out pairs of 400 prompts (95 % interval 0.53 to "
        "0.63), and always preferring the longer answer (in tokens) reaches 0.61."
    )
    shorter = verdicts.reward(REWARD | {"accuracy": 0.58, "longer_wins_accuracy": 0.35})
    assert "always preferring the shorter answer (in tokens) reaches 0.65" in said(
        shorter, "no_better_than_length", "bad"
    )
    said(verdicts.reward(REWARD | {"accuracy": 0.58, "longer_wins_accuracy": 0.5}), "weak", "doubtful")
    said(verdicts.reward(REWARD | {"accuracy": 0.51}), "guesses", "bad")
    said(verdicts.reward(REWARD | {"accuracy": 0.4}), "inverted", "bad")
    said(verdicts.reward({}), "unknown", "open")


def test_the_interval_of_an_accuracy_is_of_the_mean_over_prompts() -> None:
    """10 of 12 pairs are right, nine of them of one of three prompts: averaged, (1 + 1/2 + 0) / 3 = 1/2.

    Wilson's by hand: weight 1.96² / 3 = 1.2805, (0.5 + 0.6403 ± 1.96 √(0.25 / 3 + 1.2805 / 12)) / 2.2805.
    """
    found = REWARD | {"accuracy": 10 / 12, "prompt_accuracy": 0.5, "num_eval_prompts": 3}
    assert said(verdicts.reward(found), "too_few_to_tell", "open") == (
        "Too few to tell whether the reward model is better than guessing: accuracy 0.83 on held-out pairs of 3 "
        "prompts (averaged prompt by prompt 0.50, 95 % interval 0.13 to 0.87)."
    )
    many = found | {"prompt_accuracy": 0.4, "num_eval_prompts": 400}
    assert "averaged prompt by prompt 0.40" in said(verdicts.reward(many), "inverted", "bad")


def test_an_accuracy_on_few_prompts_shows_nothing() -> None:
    sentence = said(verdicts.reward(REWARD | {"accuracy": 0.6, "num_eval_prompts": 20}), "too_few_to_tell", "open")
    assert sentence == (
        "Too few to tell whether the reward model is better than guessing: accuracy 0.60 on held-out pairs of 20 "
        "prompts (95 % interval 0.39 to 0.78)."
    )


def test_four_right_of_four_are_too_few_to_tell_and_six_of_six_are_not() -> None:
    """By the chance of so many heads in a row, twice which is 0.125 for four and 0.031 for six."""
    right = REWARD | {"accuracy": 1.0}
    assert "(95 % interval 0.40 to 1.00)" in said(
        verdicts.reward(right | {"num_eval_prompts": 4}), "too_few_to_tell", "open"
    )
    said(verdicts.reward(right | {"num_eval_prompts": 6}), "learned", "good")
    pair = {"one": "ppo", "other": "sft", "by": "judge", "wins": 4, "ties": 0, "losses": 0, "win_rate": 1.0,
            "interval": [0.3976, 1.0]}  # fmt: skip
    assert "1.00 (4 prompts, 95 % interval 0.40 to 1.00)" in said(
        ppo_verdict.ppo(PPO, {}, None, gather({"pairs": [pair]}, [], [], {})), "too_few_to_tell", "open"
    )
    stage = gather(None, [], [], {"win_rate": 1.0, "num_eval_prompts": 4})
    assert "1.00 (4 prompts, 95 % interval 0.40 to 1.00)" in said(
        ppo_verdict.ppo(PPO, {}, None, stage), "too_few_to_tell", "open"
    )


def test_a_tie_with_the_rule_of_length_on_few_prompts_shows_nothing() -> None:
    few = REWARD | {"accuracy": 1.0, "longer_wins_accuracy": 1.0, "num_eval_prompts": 5}
    assert said(verdicts.reward(few | {"num_eval_prompts": 8}), "too_few_to_tell", "open") == (
        "Too few to tell whether the reward model knows more than always preferring the longer answer (in tokens) "
        "does: accuracy 1.00 on held-out pairs of 8 prompts (95 % interval 0.63 to 1.00), where that reaches 1.00."
    )
    said(verdicts.reward(few), "too_few_to_tell", "open")
    said(verdicts.reward(REWARD | {"longer_wins_accuracy": 0.75}), "no_better_than_length", "bad")


def test_a_reward_model_with_one_score_for_all_is_broken() -> None:
    same = {"chosen_std": 0.0, "rejected_std": 0.0, "chosen_mean": 0.3, "rejected_mean": 0.3}
    assert "every answer the same score" in said(verdicts.reward(REWARD | {"accuracy": 0.5} | same), "constant", "bad")


def test_the_recipes_bar_is_a_verdict_of_its_own() -> None:
    below = REWARD | {"gates_failed": ["held-out accuracy 0.72 is below reward.min_accuracy 0.8"]}
    assert "0.72 is below reward.min_accuracy 0.8" in said(verdicts.reward(below), "below_its_bar", "bad")


def test_a_reward_model_that_is_wrong_where_the_better_answer_is_shorter_likes_length() -> None:
    def card(prompts: int, by_prompt: float = 0.35) -> dict[str, Any]:
        group = {"name": "better answer shorter", "pairs": 200, "accuracy": 0.35}
        return {"by_length": [group | {"prompts": prompts, "prompt_accuracy": by_prompt}]}

    assert "0.35 on the 200 pairs, of 100 prompts, whose better answer" in said(
        verdicts.reward(REWARD, card(100)), "likes_length", "doubtful"
    )
    said(verdicts.reward(REWARD, card(20)), "learned", "good")  # however many pairs
    said(verdicts.reward(REWARD, card(40)), "learned", "good")  # 0.22 to 0.50, by Wilson
    said(verdicts.reward(REWARD, card(100, by_prompt=0.45)), "learned", "good")
    told = {"by_length": [{"name": "better answer shorter", "pairs": 200, "accuracy": 0.35}]}
    said(verdicts.reward(REWARD, told), "learned", "good")  # of an earlier release: of how many prompts is not known


# --- PPO


def test_ppo_improved_where_the_judge_prefers_its_answers() -> None:
    assert said(ppo_verdict.ppo(PPO | JUDGED, {}, None, WINS), "improved", "good") == (
        "PPO improved: quality by the judge 0.400 → 0.700, win rate over SFT by the judge 0.80 (100 prompts, 95 % "
        "interval 0.72 to 0.86), KL 9.00 nats per response; at the end of the ppo stage."
    )


def test_a_rise_by_the_score_alone_is_no_proof() -> None:
    sentence = said(ppo_verdict.ppo(PPO, {}, None, BY_SCORE), "raised_the_score", "doubtful")
    assert "the score rose from -0.100 to 1.50, win rate over SFT by the reward model itself 0.80" in sentence


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
        "iteration 20, fell to 0.610 (SFT: 0.400); KL 34.0 nats per response. The policy of iteration 60 was kept, "
        "with a win rate over SFT by the judge of 0.80 (100 prompts, 95 % interval 0.72 to 0.86) at the end of the ppo "
        "stage."
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


def test_little_entropy_is_no_collapse_where_the_judge_likes_the_answers() -> None:
    said(ppo_verdict.ppo(PPO | JUDGED, {"entropy": curve(*[2.0] * 9, 0.1)}, None, WINS), "improved", "good")


def test_a_policy_that_is_still_sft_moved_nothing() -> None:
    assert "PPO moved nothing: KL 0.00200" in said(
        ppo_verdict.ppo(PPO | {"kl": 0.002}, {}, None, EVEN), "moved_nothing", "bad"
    )


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
    own = PPO | {"score_win_rate": 0.6, "num_eval_prompts": 100}
    sentence = said(ppo_verdict.ppo(own, {}, None, gather(by_score, [], [], own)), "raised_the_score", "doubtful")
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


# --- the whole run


def test_the_outcome_names_the_first_weak_link() -> None:
    found = {"sft": verdicts.sft(SFT, {}), "reward": verdicts.reward(REWARD | {"accuracy": 0.51})}
    found["ppo"] = ppo_verdict.ppo(PPO, {}, found["reward"], BY_SCORE)
    first, second, third = verdicts.outcome(found, "run/ppo-1/model")
    assert first.startswith("Broken reward")
    assert second.startswith("Begin with this: The reward model is not good enough")
    assert third == "The last finished model is run/ppo-1/model."


def test_where_no_stage_before_is_weak_ppos_settings_are() -> None:
    found = {"sft": verdicts.sft(SFT, {}), "reward": verdicts.reward(REWARD)}
    found["ppo"] = ppo_verdict.ppo(PPO | {"kl": 0.001}, {}, found["reward"], EVEN)
    assert "look at PPO's own settings first" in verdicts.outcome(found, None)[1]
    found["ppo"] = ppo_verdict.ppo(PPO, {}, found["reward"], BY_SCORE)  # which no setting mends
    assert len(verdicts.outcome(found, None)) == 1


def test_a_good_run_says_so_and_keeps_its_doubts() -> None:
    found = {"sft": verdicts.sft(SFT, {}), "ppo": ppo_verdict.ppo(PPO | JUDGED, {}, None, WINS)}
    assert verdicts.outcome(found, None)[1] == "No stage before it gives cause for doubt."
    doubted = {"sft": verdicts.sft(SFT, {"loss": curve(0.1)}), "ppo": found["ppo"]}
    assert verdicts.outcome(doubted, None)[1].startswith("A doubt is left: SFT learned, but by heart")
    assert verdicts.outcome({}, None) == ["Nothing has run yet."]


def test_the_first_stage_that_is_not_done_decides_the_outcome() -> None:
    found = {"reward": verdicts.reward(REWARD | {"gates_failed": ["accuracy 0.72 is below 0.8"]})}
    found |= {"ppo": verdicts.unfinished("PPO", "planned", None)}
    first, second = verdicts.outcome(found, None, "ppo")
    assert first == "PPO is planned, so there is no result yet."
    assert second == "Begin with this: The reward model is below its bar: accuracy 0.72 is below 0.8."
    failed = {"sft": verdicts.unfinished("SFT", "failed", "out of memory"), "ppo": found["ppo"]}
    assert verdicts.outcome(failed, None, "sft") == ["SFT is failed, so there is no result yet: out of memory."]


def test_an_unfinished_stage_says_how_far_it_came_and_why_it_ended() -> None:
    assert said(verdicts.unfinished("PPO", "failed", "out of memory", 3, 10), "failed", "bad") == (
        "PPO is failed at step 3 of 10, so there is no result yet: out of memory."
    )
    said(verdicts.unfinished("PPO", "running", None), "running", "open")


# --- diagnoses


def names_in_code(file: str) -> set[str]:
    """Names of verdicts that are written down in a module."""
    source = (Path(verdicts.__file__).parent / file).read_text(encoding="utf-8")
    return set(re.findall(r'Verdict\(\s*"(\w+)"', source))


def test_every_verdict_but_the_good_ones_says_what_to_change() -> None:
    explained = {name for stage, name in (key.split(".") for key in diagnoses.VERDICTS)}
    fine = {"learned", "ranked", "improved", "unknown", "missing"}
    assert names_in_code("verdicts.py") | names_in_code("ppo_verdict.py") == explained | fine
    assert "unknown" in explained  # of ppo


def test_every_setting_that_a_diagnosis_names_exists() -> None:
    from rlhf.pipeline.recipe import section_class

    texts = " ".join(
        f"{found.means} {found.looks} {found.change}" for part in (diagnoses.VERDICTS, diagnoses.FINDINGS)
        for found in part.values()
    )  # fmt: skip
    named = re.findall(r"\b(pretrain|sft|reward|ppo)\.([a-z_]+)", texts)
    assert len(named) > 30
    for stage, name in named:
        assert name in section_class(stage).model_fields, f"{stage}.{name}"


def test_every_finding_of_the_health_monitor_is_explained() -> None:
    source = (Path(verdicts.__file__).parents[2] / "stages" / "ppo" / "health.py").read_text(encoding="utf-8")
    assert set(re.findall(r'Finding\(\s*"(\w+)"', source)) == set(diagnoses.FINDINGS)


def test_diagnoses_come_in_the_order_of_stages() -> None:
    found = {"sft": verdicts.sft(SFT | {"eval_loss": 1.92}, {}), "ppo": ppo_verdict.ppo(PPO, {}, None, EVEN)}
    named = [(stage, name) for stage, name, _ in diagnoses.diagnose(found, ["kl_blow_up", "unheard_of"])]
    assert named == [("sft", "moved nothing"), ("ppo", "too few to tell"), ("ppo", "kl blow up")]
    assert {"good", "bad"} < set(get_args(verdicts.Tone))
