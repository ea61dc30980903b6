"""The health monitor: what it says to series that go wrong, and its silence on a real one that goes well."""

import json
import math
import re

import pytest

from rlhf.stages.metric_names import named_rewards
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.health import CLEAR_AFTER, CRITIC_PATIENCE, Finding, Health

NAMES = ("score", "score_std", "kl", "entropy", "eos_share", "length", "explained_variance", "ratio", "approx_kl",
         "clip_fraction", "policy_grad_norm")  # fmt: skip
# Iterations 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 19, 22, 25, 28 and 30 of a demo run (128 episodes each) that went well.
HEALTHY = [dict(zip(NAMES, row, strict=True)) for row in (
    (-0.11, 1.03, 0.0, 1.05, 1.0, 15.6, -6.3, 1.0, 0.00636, 0.0402, 0.434),
    (0.363, 0.81, 0.334, 1.01, 1.0, 13.6, -5.37, 1.0, 0.00161, 0.00803, 0.452),
    (0.406, 0.76, 0.344, 0.968, 1.0, 14.1, -3.16, 1.0, 0.000368, 0.000838, 0.426),
    (0.506, 0.73, 0.451, 0.954, 1.0, 13.8, -1.62, 0.999, 0.000958, 0.00753, 0.424),
    (0.527, 0.753, 0.652, 0.936, 1.0, 13.0, -0.306, 0.999, 0.00193, 0.0162, 0.447),
    (0.524, 0.741, 0.966, 0.928, 1.0, 11.9, 0.0516, 0.999, 0.00125, 0.00954, 0.399),
    (0.588, 0.756, 1.47, 0.871, 1.0, 11.1, 0.259, 1.0, 0.00034, 0.00145, 0.377),
    (0.699, 0.782, 1.68, 0.843, 1.0, 11.0, 0.387, 0.999, 0.000715, 0.00426, 0.439),
    (0.912, 0.72, 2.26, 0.814, 1.0, 9.88, 0.584, 1.0, 0.000777, 0.00313, 0.413),
    (0.727, 0.955, 2.39, 0.751, 1.0, 9.57, 0.558, 0.999, 0.000526, 0.00245, 0.575),
    (0.841, 0.636, 2.73, 0.722, 1.0, 9.5, 0.727, 0.999, 0.000438, 0.0033, 0.356),
    (0.845, 0.764, 2.79, 0.714, 1.0, 9.62, 0.8, 1.0, 7.57e-05, 0.0, 0.411),
    (0.968, 0.636, 3.01, 0.708, 1.0, 9.66, 0.783, 1.0, 0.000275, 0.00162, 0.419),
    (0.906, 0.707, 3.26, 0.697, 1.0, 9.27, 0.84, 1.0, 2.05e-05, 0.0, 0.427),
    (0.839, 0.744, 3.07, 0.692, 1.0, 9.27, 0.873, 1.0, 5.85e-06, 0.0, 0.4),
)]  # fmt: skip
STEADY = HEALTHY[-1]
Series = list[dict[str, float]]


def health(num_episodes: int = 128, **settings: int) -> Health:
    return Health(num_episodes, max_new_tokens=48, **settings)


def findings(monitor: Health, series: Series) -> list[list[str]]:
    """Names of the new findings, iteration by iteration."""
    return [[finding.name for finding in monitor.check(row)] for row in series]


def first(series: Series, monitor: Health | None = None) -> tuple[int, Finding]:
    """The only finding of a series and the iteration (from 1) that brought it."""
    monitor = monitor or health()
    told = [(i, finding) for i, row in enumerate(series, 1) for finding in monitor.check(row)]
    assert len(told) == 1, told
    return told[0]


def falling(last: dict[str, float], number: int = 20) -> Series:
    """From a steady state in a straight line to `last`."""
    return [{k: v + (last.get(k, v) - v) * i / (number - 1) for k, v in STEADY.items()} for i in range(number)]


def test_a_healthy_run_is_met_with_silence() -> None:
    assert not any(findings(health(), HEALTHY))
    assert not any(findings(health(), [STEADY] * 100))
    assert not any(findings(health(), falling({"kl": 19.0, "entropy": 0.2, "length": 5.0, "score_std": 0.2})))


def test_negative_mean_kl_needs_512_episodes() -> None:
    step, finding = first([{**STEADY, "kl": -0.1}] * 8)
    assert finding.name == "negative_kl"
    assert step == 4
    assert "512 episodes is -0.1 nats" in finding.message
    assert first([{**STEADY, "kl": -0.1}] * 2, health(num_episodes=512))[0] == 1


def test_kl_that_is_negative_by_chance_is_no_finding() -> None:
    noise = [0.02, -0.03, 0.01, -0.02] * 10  # a policy that hardly moved
    assert not any(findings(health(), [{**STEADY, "kl": kl} for kl in noise]))
    assert not any(findings(health(num_episodes=1), [{**STEADY, "kl": kl} for kl in [-1.5, 1.6] * 400]))
    assert not any(findings(health(), [{**STEADY, "kl": -1e-9}] * 10))  # rounding, at learning rate 0


@pytest.mark.parametrize("bad", [{"ratio": 1.4}, {"ratio": 0.7}, {"approx_kl": 0.3}, {"clip_fraction": 0.5}])
def test_ratio_blow_up_is_told_at_once(bad: dict[str, float]) -> None:
    step, finding = first([*HEALTHY, {**STEADY, **bad}])
    assert (step, finding.name) == (len(HEALTHY) + 1, "ratio_blow_up")


def test_kl_blow_up() -> None:
    finding = first(falling({"kl": 60.0}))[1]
    assert finding.name == "kl_blow_up"
    assert "more than 20" in finding.message


def test_long_answers_may_have_more_kl() -> None:
    long = {**STEADY, "length": 53.0}
    assert not any(findings(health(), [{**long, "kl": 39.0}] * 5))
    assert first([{**long, "kl": 41.0}] * 5)[1].name == "kl_blow_up"


def test_entropy_collapse() -> None:
    finding = first(falling({"entropy": 0.01}))[1]
    assert finding.name == "entropy_collapse"
    assert "from 0.692 to" in finding.message


def test_eos_collapse_is_against_the_start() -> None:
    finding = first(falling({"eos_share": 0.3}))[1]
    assert finding.name == "eos_collapse"
    assert "at the start 100% did" in finding.message
    assert "within 48 tokens" in finding.message
    assert not any(findings(health(), [{**STEADY, "eos_share": 0.3}] * 20))  # SFT was like that already


@pytest.mark.parametrize(("length", "word"), [(30.0, "length itself"), (2.0, "brevity itself")])
def test_length_drift_in_both_directions(length: float, word: str) -> None:
    finding = first(falling({"length": length}))[1]
    assert finding.name == "length_drift"
    assert word in finding.message


def test_critic_below_zero_counts_after_its_warm_up_only() -> None:
    series = [{**STEADY, "explained_variance": -0.4}] * 30
    step, finding = first(series, health(critic_warmup_iterations=7))
    assert (step, finding.name) == (7 + CRITIC_PATIENCE, "critic_useless")
    assert "now -0.40" in finding.message
    assert not any(findings(health(), [*series[: CRITIC_PATIENCE - 1], STEADY] * 3))


def test_reward_saturation() -> None:
    assert first(falling({"score_std": 0.01}))[1].name == "reward_saturation"


def test_equal_scores() -> None:
    step, finding = first([{**STEADY, "score": 5.0, "score_std": 0.0}] * 20)
    assert (step, finding.name) == (1, "equal_scores")
    assert "same score (5; 128 of them)" in finding.message
    assert "Check that the answers are read by ppo.reward_model, that" in finding.message


def test_where_functions_give_the_score_they_are_named() -> None:
    """Nobody should look for a reward model that is not there."""
    from_functions = named_rewards(None, [{"function": "mine:correct"}, {"function": "mine:short"}])
    for row, words in (
        ({**STEADY, "score_std": 0.0}, "Check that the answers are read by ppo.rewards (mine:correct, mine:short), "),
        ({**STEADY, "score": math.nan}, "check what is returned by ppo.rewards (mine:correct, mine:short)."),
    ):
        _, finding = first([row], Health(128, 48, rewards=from_functions))
        assert words in finding.message
        assert "ppo.reward_model" not in finding.message


def test_a_few_equal_scores_by_chance_are_no_finding() -> None:
    small = [{**STEADY, "score_std": std} for std in (0.0, 0.0, 0.7, 0.0)] * 20
    assert not any(findings(health(num_episodes=4), small))
    assert not any(findings(health(num_episodes=1), [{**STEADY, "score_std": 0.0}] * 600))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_named_and_do_not_spoil_the_means(bad: float) -> None:
    monitor = health()
    step, finding = first([STEADY, {**STEADY, "policy_grad_norm": bad, "kl": bad}, STEADY], monitor)
    assert (step, finding.name) == (2, "non_finite")
    assert "kl, policy_grad_norm" in finding.message
    assert not any(findings(monitor, [STEADY] * 20))
    assert monitor.active == []


def test_rows_without_the_policys_statistics_are_judged_by_the_rest() -> None:
    warming = {k: STEADY[k] for k in ("score", "score_std", "kl", "entropy", "eos_share", "length")}
    assert not any(findings(health(), [warming] * 5 + [STEADY] * 5))
    assert not any(findings(health(), [{"kl": 0.0}] + [STEADY] * 5))
    assert not any(findings(health(), [{}] * 5))


def test_a_finding_is_told_once_until_it_has_gone_away() -> None:
    bad, good = {**STEADY, "ratio": 2.0}, STEADY
    monitor = health()
    assert findings(monitor, [bad, bad, good, bad, good, good, bad]) == [["ratio_blow_up"], [], [], [], [], [], []]
    assert monitor.active == ["ratio_blow_up"]
    assert not any(findings(monitor, [good] * CLEAR_AFTER))
    assert monitor.active == []
    assert findings(monitor, [bad]) == [["ratio_blow_up"]]


def test_what_to_try_is_told_once_and_what_was_seen_again_when_it_comes_back() -> None:
    bad, good = {**STEADY, "ratio": 2.0}, STEADY
    monitor = health()
    [full] = monitor.check(bad)
    assert "mean ratio 2, " in full.message
    assert "Lower ppo.learning_rate" in full.message
    assert not any(findings(monitor, [good] * CLEAR_AFTER))
    resumed = health()
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for again in (monitor, resumed):
        [short] = again.check({**bad, "ratio": 3.0})
        assert (short.name, short.message) == (
            "ratio_blow_up",
            "One iteration's updates moved the policy far from the one that sampled (mean ratio 3, approx_kl 5.8e-06 "
            "nats per token, 0% of tokens clipped), which was told before with what to try.",
        )
        [other] = again.check({**bad, "kl": math.nan})
        assert "ppo.precision fp32" in other.message


def test_a_resumed_run_finds_the_same() -> None:
    series = [*HEALTHY, *falling({"kl": 60.0, "explained_variance": -9.0, "entropy": 0.01, "length": 2.0}, 25)]
    series += [{**STEADY, "kl": -0.1}] * 8 + [{**STEADY, "kl": math.nan}] * 2 + [{**STEADY, "ratio": 2.0}] * 3
    straight = findings(health(num_episodes=100), series)
    assert len({name for names in straight for name in names}) >= 5
    for stop in range(len(series)):
        before, after = health(num_episodes=100), health(num_episodes=100)
        told = findings(before, series[:stop])
        after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
        assert told + findings(after, series[stop:]) == straight


def test_advice_names_settings_that_exist() -> None:
    bad = [
        {"kl": -1.0}, {"kl": 90.0}, {"ratio": 2.0}, {"entropy": 0.0}, {"eos_share": 0.0}, {"length": 1.0},
        {"length": 40.0}, {"explained_variance": -1.0}, {"score_std": 0.001}, {"score_std": 0.0}, {"kl": math.nan},
    ]  # fmt: skip
    told = [finding for row in bad for finding in _all(row)]
    assert len({finding.name for finding in told}) == 10
    for finding in told:
        named = re.findall(r"ppo\.(\w+)", finding.message)
        assert named, finding
        assert set(named) <= set(PPOSettings.model_fields), finding


def _all(bad: dict[str, float]) -> list[Finding]:
    monitor = health()
    return [finding for row in [STEADY, *[{**STEADY, **bad}] * 20] for finding in monitor.check(row)]
