"""The verdicts of the stages before PPO and of the whole run from figures that call for them, and each diagnosis from a
verdict that there is."""

import re
from pathlib import Path
from typing import Any, get_args

from verdicts_world import BY_SCORE, EVEN, JUDGED, PPO, PRETRAIN, REWARD, SFT, WINS, curve, said

from rlhf.pipeline.report import diagnoses, ppo_verdict, verdicts
from rlhf.pipeline.report.ppo_verdict import gather

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


def test_sft_that_gained_less_than_a_fiftieth_is_doubted() -> None:
    little = SFT | {"base_eval_loss": 8.93, "eval_loss": 8.88}
    sentence = said(verdicts.sft(little, {}), "learned_little", "doubtful")
    assert sentence == "SFT learned little: held-out loss 8.93 → 8.88."
    said(verdicts.sft(SFT | {"base_eval_loss": 2.0, "eval_loss": 1.97}, {}), "learned_little", "doubtful")
    said(verdicts.sft(SFT | {"base_eval_loss": 2.0, "eval_loss": 1.95}, {}), "learned", "good")


def test_sft_whose_answers_never_end_is_doubted() -> None:
    told = "the share of answers that come to an end is 0.00 (16 prompts, by rlhf eval --cheap)."
    ended = (0.0, "16 prompts, by rlhf eval --cheap")
    assert said(verdicts.sft(SFT, {}, ended), "never_ends", "doubtful") == (
        f"SFT learned, but not where an answer ends: held-out loss 1.92 → 1.31, and {told}"
    )
    little = verdicts.sft({"base_eval_loss": 8.93, "eval_loss": 8.88}, {}, ended)
    assert said(little, "learned_little", "doubtful") == (f"SFT learned little: held-out loss 8.93 → 8.88, and {told}")
    said(verdicts.sft(SFT, {}, (0.06, "")), "learned", "good")


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


def test_what_is_not_shown_of_a_stage_is_not_called_good_enough() -> None:
    few = REWARD | {"accuracy": 0.57, "num_eval_prompts": 33}
    found = {"sft": verdicts.sft(SFT, {}), "reward": verdicts.reward(few)}
    told = "Too few to tell whether the reward model is better than guessing"
    moved_nothing = ppo_verdict.ppo(PPO | {"kl": 0.001}, {}, None, EVEN)
    assert verdicts.outcome(found | {"ppo": moved_nothing}, None)[1].startswith(f"Begin with this: {told}")
    improved = ppo_verdict.ppo(PPO | JUDGED, {}, None, WINS)
    assert verdicts.outcome(found | {"ppo": improved}, None)[1].startswith(f"A doubt is left: {told}")


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
