"""PPO's verdict: improved, over-optimised, broken reward, collapsed, moved nothing, worse, or not shown.

The judge's opinion decides where there is one, because PPO never saw it; the score alone shows only that PPO can climb.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.pipeline.report.curves import Line, start_and_end
from rlhf.pipeline.report.figures import Interval, between, rank_correlation, wilson
from rlhf.pipeline.report.verdicts import Verdict
from rlhf.stages.metric_names import number, share

NO_KL = 0.02
"""Nats per response. By Pinsker's inequality policy and SFT then give the same answer in nine of ten cases at least."""
QUALITY_DROP = 0.05
"""Of the judge's quality below its best, as the ppo stage has it: more than the noise of an evaluation."""
EQUAL_SCORES = 1e-6
"""Standard deviation of an iteration's scores, relative to the score (or to 1): float32 rounding."""
UNRELATED, MIN_ANSWERS = 0.1, 20
"""Rank correlation of score and quality over answers of SFT below which they have nothing to do with each other, where
the interval holds 0 too; from fewer answers nothing is concluded."""
EMPTY_LENGTH, SPOKE_BEFORE = 1.5, 3.0
"""Tokens on average, eos included: nearly all answers are empty, where those of SFT were not."""
ENTROPY_SHARE, EOS_DROP = 0.2, 0.2
"""As in the health monitor: an entropy below a fifth of the start's leaves nothing to explore; a share of answers that
end does not fall by a fifth in a healthy run."""
UNTRUSTED = ("guesses", "inverted", "constant")
"""Verdicts on a reward model whose score says nothing of ranks."""


@dataclass(frozen=True)
class Evidence:
    """What held-out answers say of PPO against SFT. None where it is not known."""

    win_rate: float | None = None
    interval: Interval | None = None
    length_controlled: Interval | None = None
    """Interval of the win rate among answers of equal length."""
    judged: bool = False
    """Whether wins are the judge's; else they are the reward model's own."""
    num_prompts: int = 0
    agreement: tuple[float, Interval] | None = None
    """Rank correlation of score and judge's quality over SFT's answers: the law on which the reward model learned."""
    num_answers: int = 0
    """Over which it was taken."""
    quality: tuple[float, float] | None = None
    """Mean of the judge's quality, of SFT and of PPO."""
    at_least: bool = False
    """Whether it may be more prompts: older manifests do not tell how many, and samples are of some of them."""
    evaluated: bool = False
    """Whether wins are those of evaluation.json, and not of the stage itself."""


def gather(
    evaluation: Mapping[str, Any] | None,
    answers: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
) -> Evidence:
    """From the evaluation with its `answers`, or from the stage's own figures and `samples`: what asked more prompts.

    Both have the form of evaluation.jsonl.
    """
    quality = _qualities(evaluation, metrics)
    agreement, num_answers = None, 0
    for rows in (answers, samples):
        both = [row for row in rows if "sft" in row.get("scores", {}) and "sft" in row.get("qualities", {})]
        if len(both) > num_answers:
            agreement = rank_correlation(*([row[kind]["sft"] for row in both] for kind in ("scores", "qualities")))
            num_answers = len(both)
    told = metrics.get("num_eval_prompts")
    own = told or len(samples)  # samples are of some of its prompts
    pairs = (evaluation or {}).get("pairs") or []
    found = {pair["by"]: pair for pair in pairs if (pair["one"], pair["other"]) == ("ppo", "sft")}
    for by, name in (("judge", "win_rate"), ("score", "score_win_rate")):
        pair, rate = found.get(by), metrics.get(name)
        num = _num_prompts(evaluation, pair) if pair else 0
        if pair and (rate is None or num >= own):
            controlled = pair.get("length_controlled_interval")
            return Evidence(
                pair["win_rate"], tuple(pair["interval"]), tuple(controlled) if controlled else None, by == "judge",
                num, agreement, num_answers, quality, evaluated=True,
            )  # fmt: skip
        if rate is not None:
            interval = wilson(rate, own) if own else None
            at_least = bool(own) and told is None
            return Evidence(rate, interval, None, by == "judge", own, agreement, num_answers, quality, at_least)
    return Evidence(agreement=agreement, num_answers=num_answers, quality=quality)


def _num_prompts(evaluation: Mapping[str, Any] | None, pair: Mapping[str, Any]) -> int:
    """Of a comparison; where that is not said, its answers."""
    told = ((evaluation or {}).get("settings") or {}).get("num_prompts")
    return int(told or pair["wins"] + pair["ties"] + pair["losses"])


def _qualities(evaluation: Mapping[str, Any] | None, metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    """Of SFT and of PPO, by the stage's own evaluation or else by the run's."""
    before, after = metrics.get("sft_true_quality"), metrics.get("true_quality")
    if before is None or after is None:
        models = (evaluation or {}).get("models") or {}
        before, after = (((models.get(name) or {}).get("quality") or {}).get("mean") for name in ("sft", "ppo"))
    return None if before is None or after is None else (before, after)


def ppo(metrics: Mapping[str, Any], curves: Mapping[str, Line], reward: Verdict | None, found: Evidence) -> Verdict:
    """`curves` are the lines of metrics.jsonl, `reward` the verdict on the run's own reward model, if it has one."""
    if "kl" not in metrics:
        return Verdict("unknown", "open", "PPO tells no figures, so nothing is known of what it brought.")
    if sentence := _constant(metrics, curves):
        return Verdict("broken_reward", "bad", sentence)
    if "non_finite" in (metrics.get("findings") or []):
        return Verdict("collapsed", "bad", "Collapsed: some figures of the last iterations are no finite numbers.")
    rose, score = _score(metrics, curves)
    kl = f"KL {number(_last(curves, 'eval_kl', metrics['kl']))} nats per response"
    kept = ""
    if "best_step" in metrics:
        won = f", with a win rate over SFT {_by(found)} of {_rate(found)}" if found.win_rate is not None else ""
        kept = f" The policy of iteration {metrics['best_step']} was kept{won}."
    unrelated = _unrelated(reward, found)
    fallen = _fallen(metrics, curves)
    if fallen is None and found.judged and found.interval and found.interval[1] < 0.5 and rose:
        fallen = f"the win rate over SFT by the judge is {_rate(found)}"
    if fallen is not None and rose:
        if unrelated:
            return Verdict("broken_reward", "bad", f"Broken reward: {score} while {fallen}; {unrelated}; {kl}.{kept}")
        return Verdict("over_optimised", "bad", f"PPO over-optimised: {score} while {fallen}; {kl}.{kept}")
    if sentence := _collapsed(metrics, curves, found):
        return Verdict("collapsed", "bad", sentence)
    better = found.interval is not None and found.interval[0] > 0.5
    if unrelated and rose and not (found.judged and better):
        return Verdict("broken_reward", "bad", f"Broken reward: {score}, but {unrelated}; {kl}.")
    if metrics.get("over_optimised"):
        why = metrics.get("over_optimised_because") or "the run went too far"
        judge = "" if found.judged else " No judge says whether the answers are better."
        return Verdict("over_optimised", "bad", f"PPO over-optimised: {why}.{kept}{judge}")
    if abs(metrics["kl"]) < NO_KL:
        return Verdict(
            "moved_nothing", "bad", f"PPO moved nothing: KL {number(metrics['kl'])} nats per response, {score}."
        )
    return _compared(metrics, score, found)


def _compared(metrics: Mapping[str, Any], score: str, found: Evidence) -> Verdict:
    """Of a run in which nothing went wrong: whether PPO's answers are better than SFT's."""
    kl = f"KL {number(metrics['kl'])} nats per response"
    quality = None if found.quality is None else "true quality {} → {}".format(*map(number, found.quality))
    if found.win_rate is None:
        return Verdict(
            "unknown", "open", f"Whether PPO improved is not shown: {score}, {kl}, but no answers were compared."
        )
    if found.interval is None:
        return Verdict(
            "unknown", "open", f"Whether PPO improved is not shown: {score}, {kl}, win rate over SFT {_by(found)} "
            f"{_rate(found)}."
        )  # fmt: skip
    rate = f"win rate over SFT {_by(found)} {_rate(found)}"
    if found.interval[0] > 0.5:
        if found.length_controlled and found.length_controlled[0] <= 0.5:
            return Verdict(
                "only_longer",
                "doubtful",
                f"PPO's answers win, but perhaps by their length alone: {rate}, among answers of equal length "
                f"{between(found.length_controlled)}; {kl}.",
            )
        if not found.judged:
            return Verdict(
                "raised_the_score",
                "doubtful",
                f"PPO raised the score, and no judge says whether the answers are better: {score}, {rate}, {kl}.",
            )
        return Verdict("improved", "good", f"PPO improved: {quality or score}, {rate}, {kl}.")
    if found.interval[1] < 0.5:
        return Verdict("made_it_worse", "bad", f"PPO made it worse: {rate}, {quality or score}, {kl}.")
    return Verdict("no_difference_shown", "open", f"No difference between PPO and SFT is shown: {rate}, {kl}.")


def _by(found: Evidence) -> str:
    return "by the judge" if found.judged else "by the reward model itself"


def _rate(found: Evidence) -> str:
    assert found.win_rate is not None
    if found.interval is None:
        return f"{share(found.win_rate)} (of how many prompts is not recorded)"
    prompts, source = f"{number(found.num_prompts)} prompts", ", from evaluation.json" if found.evaluated else ""
    if found.at_least:
        return f"{share(found.win_rate)} (at least {prompts}; of so many the {between(found.interval)})"
    return f"{share(found.win_rate)} ({prompts}, {between(found.interval)}{source})"


def _last(curves: Mapping[str, Line], name: str, otherwise: float) -> float:
    line = curves.get(name)
    return line[-1][1] if line else otherwise


def _score(metrics: Mapping[str, Any], curves: Mapping[str, Line]) -> tuple[bool, str]:
    """Whether the score rose over the run, on held-out prompts if they were asked, and that in words."""
    if line := curves.get("eval_score"):
        before, after = line[0][1], line[-1][1]
    elif line := curves.get("score"):
        before, after = start_and_end(line)
    else:
        before, after = metrics.get("sft_score", 0.0), metrics.get("score", 0.0)
    before = metrics.get("sft_score", before)
    word = "rose" if after > before else "fell"
    return after > before, f"the score {word} from {number(before)} to {number(after)}"


def _constant(metrics: Mapping[str, Any], curves: Mapping[str, Line]) -> str | None:
    """Scores without any spread in every iteration."""
    spread, scores = curves.get("score_std", []), dict(curves.get("score", []))
    flat = [step for step, std in spread if std <= EQUAL_SCORES * max(1.0, abs(scores.get(step, 0.0)))]
    if not spread or len(flat) < len(spread):
        return None
    score = next(iter(scores.values()), metrics.get("score"))
    return (
        f"Broken reward: every answer gets the same score, {number(score)}, in all {number(len(spread))} iterations "
        "that were logged, so there is nothing to learn from."
    )


def _collapsed(metrics: Mapping[str, Any], curves: Mapping[str, Line], found: Evidence) -> str | None:
    """Answers that say nothing any more, or that never end; a judge who likes them better is believed."""
    if found.judged and found.interval and found.interval[0] > 0.5:
        return None
    length, before = _last(curves, "eval_length", metrics.get("length", 0.0)), metrics.get("sft_length", 0.0)
    if length and length <= EMPTY_LENGTH and before >= SPOKE_BEFORE:
        return f"Collapsed: answers fell from {number(before)} to {number(length)} tokens, so nearly all are empty."
    ended, ended_before = _last(curves, "eval_eos_share", metrics.get("eos_share", 1.0)), metrics.get("sft_eos_share")
    if ended_before is not None and ended < ended_before - EOS_DROP:
        return f"Collapsed: the share of answers that come to an end fell from {share(ended_before)} to {share(ended)}."
    if line := curves.get("entropy"):
        start, end = start_and_end(line)
        if end < ENTROPY_SHARE * start:
            return (
                f"Collapsed: entropy fell from {number(start)} to {number(end)} nats per token, so the policy says "
                "almost the same thing each time, and no judge likes it better."
            )
    return None


def _fallen(metrics: Mapping[str, Any], curves: Mapping[str, Line]) -> str | None:
    """How the judge's quality fell from its best, in words."""
    line = curves.get("eval_true_quality", [])
    if not line:
        return None
    (step, best), (_, last) = max(line, key=lambda point: point[1]), line[-1]
    if last >= best - QUALITY_DROP:
        return None
    before = metrics.get("sft_true_quality")
    if before is None or step == 0:
        return f"the true quality fell from {number(best)} to {number(last)}"
    return (
        f"the true quality, at its best {number(best)} at iteration {number(int(step))}, fell to {number(last)} (SFT: "
        f"{number(before)})"
    )


def _unrelated(reward: Verdict | None, found: Evidence) -> str | None:
    """Why the score is not to be trusted at all, in words."""
    if reward is not None and reward.name in UNTRUSTED:
        return "the score is unrelated to ranks: " + reward.sentence[0].lower() + reward.sentence[1:].rstrip(".")
    if found.agreement is not None and found.num_answers >= MIN_ANSWERS:
        rho, (low, high) = found.agreement
        if rho < UNRELATED and (low <= 0 or high <= 0):
            return (
                f"score and quality of SFT's answers have nothing to do with each other (rank correlation {share(rho)} "
                f"over {number(found.num_answers)} answers)"
            )
    return None
