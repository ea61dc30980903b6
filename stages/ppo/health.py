"""The health monitor: says in words what is going wrong with a PPO run, and what to try.

Plain numbers in, sentences out. It takes the metrics row of every iteration (whether logged or not), and its state is
training state: a resumed run must find what the uninterrupted one would have found.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

# Where a "healthy" figure is named below, it is N+'s (Huang et al. 2024, TL;DR, answers of 53 tokens).
RECENT_EPISODES = 128
"""Figures are means over at least so many episodes, at the start and now: a share is then known to about ±0.04."""
KL_EPISODES = 512
"""Episodes over which a negative KL counts: single answers, and small batches, may well be below zero."""
KL_MARGIN = 12.0
"""Nats of all those episodes together. The policy's own samples have E[exp(−log-ratio)] ≤ 1, so that by Markov's
inequality their log-ratios sum to less than −12 with a probability of at most e⁻¹², whatever the policy is."""
KL_PER_TOKEN = 0.75
"""Nats; 40 in 53 tokens, beyond which N+'s answers got worse while their score still rose."""
KL_FLOOR = 20.0
"""Nats per answer that are never too much: the upper end of healthy runs, and short answers move further a token."""
RATIO_DRIFT = 0.1
"""Ratios average 1 over a policy's own samples; healthy updates stay within 0.003."""
APPROX_KL = 0.1
"""Nats per token in one iteration; healthy below 0.02."""
CLIP_FRACTION = 0.3
"""Share of tokens; healthy 0.02 to 0.1."""
ENTROPY_SHARE = 0.2
"""Of the start's. Half of it is a usual price of a higher score; a fifth leaves nothing to explore."""
EOS_DROP = 0.2
"""Of the share of answers that end; about four standard errors, and a healthy share does not fall at all."""
LENGTH_FACTOR = 2.0
"""Longer or shorter than at the start; answers that are merely better rarely need that."""
CRITIC_PATIENCE = 10
"""Iterations in a row: a critic that starts from the reward model may begin below zero, but not stay there."""
SPREAD_SHARE = 0.1
"""Of the start's standard deviation of scores: advantages are then mostly the critic's error, whitened to size 1."""
EQUAL_SCORES = 1e-6
"""Standard deviation, relative to the score (or to 1): float32 rounding."""
CLEAR_AFTER = 5
"""Iterations without a finding until it counts as gone, so that one on the border is not told again and again."""

_KEPT = ("score_std", "kl", "entropy", "eos_share", "length", "staleness")


@dataclass(frozen=True)
class Finding:
    """One thing that is going wrong: what was seen, what it usually means, what to try."""

    name: str
    seen: str
    advice: str = ""
    """Left out where the same was told before."""

    @property
    def message(self) -> str:
        """All of it, in sentences."""
        return f"{self.seen}: {self.advice}" if self.advice else f"{self.seen}, which was told before with what to try."


class Health:
    """Feed it every iteration's metrics; it returns what is newly wrong. Metrics that a row lacks are not judged."""

    def __init__(
        self,
        num_episodes: int,
        max_new_tokens: int,
        critic_warmup_iterations: int = 0,
        rewards: str = "ppo.reward_model",
    ) -> None:
        """`num_episodes` is the number in one iteration, over all processes; `rewards` where the score comes from."""
        self.num_episodes, self.max_new_tokens, self.rewards = num_episodes, max_new_tokens, rewards
        self.critic_warmup_iterations = critic_warmup_iterations
        self._iterations = 0
        self._start: list[dict[str, float]] = []  # the first rows, of RECENT_EPISODES together
        self._recent: list[dict[str, float]] = []  # the last rows, of KL_EPISODES together
        self._critic_below_zero = 0  # iterations in a row
        self._active: dict[str, int] = {}  # finding → iterations since it was last seen
        self._told: set[str] = set()  # findings of which all was said

    @property
    def active(self) -> list[str]:
        """Names of the findings that have been reported and have not gone away."""
        return sorted(self._active)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later findings depend on, for JSON."""
        return {
            "iterations": self._iterations, "start": self._start[:], "recent": self._recent[:],
            "critic_below_zero": self._critic_below_zero, "active": dict(self._active), "told": sorted(self._told),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._iterations, self._critic_below_zero = state["iterations"], state["critic_below_zero"]
        self._start, self._recent, self._active = state["start"][:], state["recent"][:], dict(state["active"])
        self._told = set(state.get("told", self._active))  # a checkpoint may be of before there was such a list

    def check(self, row: dict[str, float]) -> list[Finding]:
        """Take the next iteration's metrics; the findings that were not there before."""
        self._iterations += 1
        if broken := sorted(name for name, value in row.items() if not math.isfinite(value)):
            # Such a row says nothing else, and must not get into the means.
            return self._news([_non_finite(broken, self.rewards)])
        kept = {name: row[name] for name in _KEPT if name in row}
        if len(self._start) < self._rows(RECENT_EPISODES):
            self._start.append(kept)
        self._recent = [*self._recent, kept][-self._rows(KL_EPISODES) :]
        past_warmup = self._iterations > self.critic_warmup_iterations
        below_zero = past_warmup and row.get("explained_variance", 0.0) < 0
        self._critic_below_zero = self._critic_below_zero + 1 if below_zero else 0
        start, now = _means(self._start), _means(self._recent[-self._rows(RECENT_EPISODES) :])
        now = {name: value for name, value in now.items() if name in start}
        return self._news([
            *self._of_update(row), *self._of_critic(row), *self._of_answers(start, now),
            *self._of_scores(row, start, now),
        ])  # fmt: skip

    def _news(self, found: list[Finding]) -> list[Finding]:
        """Those of `found` that are not active yet, in short where they were told before; active ones that stay away
        for long enough are forgotten."""
        news = [finding for finding in found if finding.name not in self._active]
        news = [replace(finding, advice="") if finding.name in self._told else finding for finding in news]
        self._told |= {finding.name for finding in news}
        self._active = {name: n + 1 for name, n in self._active.items() if n + 1 < CLEAR_AFTER}
        self._active |= {finding.name: 0 for finding in found}
        return news

    def _rows(self, num_episodes: int) -> int:
        return math.ceil(num_episodes / self.num_episodes)

    def _of_update(self, row: dict[str, float]) -> Iterator[Finding]:
        ratio, approx_kl, clipped = (row.get(k, d) for k, d in (("ratio", 1.0), ("approx_kl", 0), ("clip_fraction", 0)))
        if abs(ratio - 1) > RATIO_DRIFT or approx_kl > APPROX_KL or clipped > CLIP_FRACTION:
            yield Finding(
                "ratio_blow_up",
                f"One iteration's updates moved the policy far from the one that sampled (mean ratio {ratio:.3g}, "
                f"approx_kl {approx_kl:.2g} nats per token, {clipped:.0%} of tokens clipped)",
                "the steps are too large. Lower ppo.learning_rate or ppo.num_epochs, set ppo.target_kl, or raise "
                "ppo.rollout_batch_size.",
            )

    def _of_critic(self, row: dict[str, float]) -> Iterator[Finding]:
        if self._critic_below_zero >= CRITIC_PATIENCE:
            yield Finding(
                "critic_useless",
                f"The critic's explained variance has been below zero for {self._critic_below_zero} iterations (now "
                f"{row['explained_variance']:.2f})",
                "it predicts returns worse than a constant would, and only adds noise to the advantages. Raise "
                "ppo.critic_learning_rate, or ppo.critic_warmup_iterations to let it learn before the policy moves; a "
                "small ppo.value_clip_range can hold it back.",
            )

    def _of_answers(self, start: dict[str, float], now: dict[str, float]) -> Iterator[Finding]:
        # Of an older policy's samples (one_step_off) the mean may well be below zero.
        kls = [kept["kl"] for kept in self._recent if "kl" in kept and not kept.get("staleness")]
        num_episodes = len(kls) * self.num_episodes
        if num_episodes >= KL_EPISODES and sum(kls) * self.num_episodes < -KL_MARGIN:
            yield Finding(
                "negative_kl",
                f"The mean KL to the reference over {num_episodes} episodes is {_mean(kls):.3g} nats, and a KL cannot "
                "be negative",
                "answers are sampled from another distribution than the one that is scored. Look for top_k, top_p, "
                "another temperature or a stale cache in sampling and for dropout in scoring, or try ppo.precision "
                "fp32.",
            )
        if "kl" in now and now["kl"] > (limit := max(KL_FLOOR, KL_PER_TOKEN * now.get("length", 0.0))):
            yield Finding(
                "kl_blow_up",
                f"The KL to the reference is {now['kl']:.3g} nats per answer (more than {limit:.3g})",
                "the policy has probably found what the reward gets wrong. Read some answers and prefer an earlier "
                "checkpoint; raise ppo.kl_coef or steer it by ppo.kl_target, or lower ppo.learning_rate or "
                "ppo.num_iterations.",
            )
        if "entropy" in now and now["entropy"] < ENTROPY_SHARE * start["entropy"]:
            yield Finding(
                "entropy_collapse",
                f"Entropy fell from {start['entropy']:.3g} to {now['entropy']:.3g} nats per token",
                "the policy says almost the same thing each time and has stopped exploring. Raise ppo.kl_coef, "
                "ppo.entropy_coef or ppo.temperature, or lower ppo.learning_rate.",
            )
        if "eos_share" in now and now["eos_share"] < start["eos_share"] - EOS_DROP:
            yield Finding(
                "eos_collapse",
                f"Only {now['eos_share']:.0%} of answers end within {self.max_new_tokens} tokens; at the start "
                f"{start['eos_share']:.0%} did",
                "the reward likes answers that go on. Set or raise ppo.missing_eos_penalty, or raise "
                "ppo.max_new_tokens if good answers need the room.",
            )
        if "length" in now and not start["length"] / LENGTH_FACTOR <= now["length"] <= start["length"] * LENGTH_FACTOR:
            longer = now["length"] > start["length"]
            cure = "set ppo.overlong_buffer" if longer else "lower ppo.missing_eos_penalty"
            yield Finding(
                "length_drift",
                f"Answers went from {start['length']:.3g} to {now['length']:.3g} tokens on average",
                f"the reward may pay for {'length' if longer else 'brevity'} itself. Compare its scores of long and "
                f"short answers of equal quality; raise ppo.kl_coef or {cure}.",
            )

    def _of_scores(self, row: dict[str, float], start: dict[str, float], now: dict[str, float]) -> Iterator[Finding]:
        if "score_std" not in now or self.num_episodes == 1:  # one score has no spread
            return
        window = self._rows(RECENT_EPISODES)
        if now["score_std"] <= EQUAL_SCORES * max(1.0, abs(row.get("score", 0.0))):
            if len(self._recent) >= window:
                yield Finding(
                    "equal_scores",
                    f"Episodes all get the same score ({row.get('score', 0.0):.4g}; {window * self.num_episodes} of "
                    "them)",
                    f"there is nothing to learn from. Check that the answers are read by {self.rewards}, that they are "
                    "neither all empty nor all identical, and that ppo.score_clip does not flatten their scores.",
                )
        elif now["score_std"] < SPREAD_SHARE * start["score_std"]:
            yield Finding(
                "reward_saturation",
                f"The scores' standard deviation fell from {start['score_std']:.3g} to {now['score_std']:.3g}",
                "the reward no longer tells answers apart, and what is left to learn is noise. Stop here (lower "
                "ppo.num_iterations), widen ppo.score_clip if it is set, or go on with a reward that tells these "
                "answers apart, such as a reward model that was trained on answers of this policy.",
            )


def _non_finite(names: list[str], rewards: str) -> Finding:
    return Finding(
        "non_finite",
        f"No finite number in {', '.join(names)}",
        "something overflowed, or a score was no number, and the weights may be spoilt. Go back to the last checkpoint "
        "with a lower ppo.learning_rate or ppo.max_grad_norm, try ppo.precision fp32, and check what is returned by "
        f"{rewards}.",
    )


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of the metrics that all rows have."""
    return {name: _mean([row[name] for row in rows]) for name in _KEPT if all(name in row for row in rows)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
