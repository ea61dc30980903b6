"""PPO's verdict: improved, over-optimised, broken reward, collapsed, moved nothing, worse, or not shown.

The judge's opinion decides where there is one, because PPO never saw it; the score alone shows only that PPO can climb.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.pipeline.report.curves import Line, start_and_end
from rlhf.pipeline.report.figures import Interval, rank_correlation
from rlhf.pipeline.report.verdicts import A_TENTH, Verdict
from rlhf.stages.metric_names import between, named_rewards, number, of_share, share

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
STAGES_OWN = "at the end of the ppo stage"
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
    """Whether wins are the judge's; else they are those of what PPO is paid by."""
    num_prompts: int = 0
    agreement: tuple[float, Interval] | None = None
    """Rank correlation of score and judge's quality over SFT's answers: the law on which the reward model learned."""
    num_answers: int = 0
    """Over which it was taken."""
    quality: tuple[float, float] | None = None
    """Mean of the judge's quality, of SFT and of PPO."""
    kl: float | None = None
    """From SFT, nats per response, by evaluation.json."""
    score: tuple[float, float] | None = None
    """Mean of the score, of SFT and of PPO, by evaluation.json."""
    at_least: bool = False
    """Whether it may be more prompts: older manifests do not tell how many, and samples are of some of them."""
    source: str = STAGES_OWN
    """Who measured wins, quality, KL and score, in a word."""
    evaluated: bool = False
    """Whether all of them are of evaluation.json, and not of the stage itself."""
    paid_by: str = "the reward model itself"
    """What gives the score, in words."""


def gather(
    evaluation: Mapping[str, Any] | None,
    answers: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
) -> Evidence:
    """From the evaluation with its `answers`, or from the stage's own figures and `samples`: what asked more prompts.

    The cheap form counts only where the stage compared nothing: a run that makes it has told the stage's figures by
    then. Answers and samples have the form of evaluation.jsonl.
    """
    quality = _both(metrics, "sft_true_quality", "true_quality")
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
        num = _num_prompts(evaluation, pair) if evaluation and pair else 0
        if evaluation and pair and (rate is None or (evaluation.get("form") != "cheap" and num >= own)):
            controlled = pair.get("length_controlled_interval")
            models = evaluation.get("models") or {}
            quality, score = (
                _both({name: (figures.get(key) or {}).get("mean") for name, figures in models.items()}, "sft", "ppo")
                for key in ("quality", "score")
            )
            return Evidence(
                pair["win_rate"], tuple(pair["interval"]), tuple(controlled) if controlled else None, by == "judge",
                num, agreement, num_answers, quality, (models.get("ppo") or {}).get("kl"), score,
                source=source(evaluation), evaluated=True,
            )  # fmt: skip
        if rate is not None:
            return Evidence(
                rate, of_share(rate, own) if own else None, None, by == "judge", own, agreement, num_answers, quality,
                at_least=bool(own) and told is None,
            )  # fmt: skip
    return Evidence(agreement=agreement, num_answers=num_answers, quality=quality)


def paid_by(section: Any) -> str:
    """What gives the score in a recipe's section ppo, in words; the recipe may hold anything, if it was changed."""
    rewards = section.get("rewards") if isinstance(section, Mapping) else None
    if isinstance(rewards, list) and rewards and all(isinstance(spec, Mapping) for spec in rewards):
        return f"the rewards themselves, {named_rewards(section.get('reward_model'), rewards)},"
    return Evidence.paid_by


def source(evaluation: Mapping[str, Any]) -> str:
    """The command that measures what evaluation.json holds; `rlhf run` does as its cheap form after a stage."""
    return "by rlhf eval --cheap" if evaluation.get("form") == "cheap" else "by rlhf eval"


def _num_prompts(evaluation: Mapping[str, Any], pair: Mapping[str, Any]) -> int:
    """Of a comparison; where that is not said, its answers."""
    told = (evaluation.get("settings") or {}).get("num_prompts")
    return int(told or pair["wins"] + pair["ties"] + pair["losses"])


def _both(figures: Mapping[str, Any], before: str, after: str) -> tuple[float, float] | None:
    first, last = figures.get(before), figures.get(after)
    return None if first is None or last is None else (first, last)


def ppo(metrics: Mapping[str, Any], curves: Mapping[str, Line], reward: Verdict | None, found: Evidence) -> Verdict:
    """`curves` are the lines of metrics.jsonl, `reward` the verdict on the run's own reward model, if it has one."""
    if "kl" not in metrics:
        return Verdict("unknown", "open", "PPO tells no figures, so nothing is known of what it brought.")
    if sentence := _constant(metrics, curves):
        return Verdict("broken_reward", "bad", sentence)
    if "non_finite" in (metrics.get("findings") or []):
        return Verdict("collapsed", "bad", "Collapsed: some figures of the last iterations are no finite numbers.")
    rose, score = _score(metrics, curves)
    kl = f"KL {number(_last(curves, 'eval_kl', metrics['kl']))} nats per response at the end of training"
    kept = ""
    if "best_step" in metrics:
        won = (
            f", with a win rate over SFT {_by(found)} of {_rate(found)} {found.source}"
            if found.win_rate is not None
            else ""
        )
        kept = f" The policy of iteration {metrics['best_step']} was kept{won}."
    unrelated = _unrelated(reward, found)
    fallen = _fallen(metrics, curves)
    if fallen is None and found.judged and found.interval and found.interval[1] < 0.5 and rose:
        fallen = f"the win rate over SFT by the judge is {_rate(found)} {found.source}"
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
    return _of_the_kept(metrics, found)


def _of_the_kept(metrics: Mapping[str, Any], found: Evidence) -> Verdict:
    """Of a run in which nothing went wrong: whether the answers of its policy are better than SFT's. All figures of a
    sentence are of that policy, and of the same answers."""
    nats = found.kl if found.evaluated else metrics["kl"]
    scores = found.score if found.evaluated else _both(metrics, "sft_score", "score")
    kl = "" if nats is None else f"KL {number(nats)} nats per response"
    score = "" if scores is None else _moved(*scores)
    if max(abs(value) for value in (metrics["kl"], nats) if value is not None) < NO_KL:
        figures, source = ", ".join(part for part in (kl, score) if part), found.source
        if not figures:  # an evaluation that has neither
            figures, source = f"KL {number(metrics['kl'])} nats per response", STAGES_OWN
        return Verdict("moved_nothing", "bad", f"PPO moved nothing: {figures}; {source}.")
    if found.win_rate is None:
        figures = "".join(f"{part}, " for part in (score, kl) if part)
        return Verdict("unknown", "open", f"Whether PPO improved is not shown: {figures}but no answers were compared.")
    quality = "" if found.quality is None else "quality by the judge {} → {}".format(*map(number, found.quality))
    rate = f"win rate over SFT {_by(found)} {_rate(found)}"
    end = f"{', ' if kl else ''}{kl}; {found.source}."
    brought = "".join(f"{part}, " for part in [quality or score] if part)
    if found.interval is None:
        return Verdict("unknown", "open", f"Whether PPO improved is not shown: {brought}{rate}{end}")
    if found.interval[0] > 0.5:
        if found.length_controlled and found.length_controlled[0] <= 0.5:
            return Verdict(
                "only_longer",
                "doubtful",
                f"PPO's answers win, but perhaps by their length alone: {rate}, among answers of equal length "
                f"{between(found.length_controlled)}{end}",
            )
        if not found.judged:
            return Verdict(
                "raised_the_score",
                "doubtful",
                "PPO raised the score, and no judge says whether the answers are better: "
                f"{score}{', ' if score else ''}{rate}{end}",
            )
        return Verdict("improved", "good", f"PPO improved: {brought}{rate}{end}")
    if found.interval[1] < 0.5:
        return Verdict("made_it_worse", "bad", f"PPO made it worse: {brought}{rate}{end}")
    if max(found.interval[1] - 0.5, 0.5 - found.interval[0]) >= A_TENTH:
        return Verdict(
            "too_few_to_tell", "open", f"Too few to tell whether PPO's answers are better than SFT's: {rate}{end}"
        )
    return Verdict("no_difference_shown", "open", f"No difference between PPO and SFT is shown: {rate}{end}")


def _by(found: Evidence) -> str:
    return "by the judge" if found.judged else f"by {found.paid_by}"


def _rate(found: Evidence) -> str:
    assert found.win_rate is not None
    if found.interval is None:
        return f"{share(found.win_rate)} (of how many prompts is not recorded)"
    prompts = f"{number(found.num_prompts)} prompts"
    if found.at_least:
        return f"{share(found.win_rate)} (at least {prompts}; of so many the {between(found.interval)})"
    return f"{share(found.win_rate)} ({prompts}, {between(found.interval)})"


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
    return after > before, _moved(before, after)


def _moved(before: float, after: float) -> str:
    if number(before) == number(after):
        return f"the score stayed at {number(after)}"
    return f"the score {'rose' if after > before else 'fell'} from {number(before)} to {number(after)}"


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
    if ended_before is not None and ended < ended_before - EOS_DROP and _differ(ended, ended_before, metrics):
        return f"Collapsed: the share of answers that come to an end fell from {share(ended_before)} to {share(ended)}."
    if line := curves.get("entropy"):
        start, end = start_and_end(line)
        if end < ENTROPY_SHARE * start:
            return (
                f"Collapsed: entropy fell from {number(start)} to {number(end)} nats per token, so the policy says "
                "almost the same thing each time, and no judge likes it better."
            )
    return None


def _differ(ended: float, before: float, metrics: Mapping[str, Any]) -> bool:
    """Whether two shares of held-out answers are apart for all that so many prompts tell. Of older runs, that do not
    say how many, any are."""
    num = metrics.get("num_eval_prompts")
    return not num or of_share(ended, num)[1] < of_share(before, num)[0]


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
        return f"the quality by the judge fell from {number(best)} to {number(last)}"
    return (
        f"the quality by the judge, at its best {number(best)} at iteration {number(int(step))}, fell to "
        f"{number(last)} (SFT: {number(before)})"
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
