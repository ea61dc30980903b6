"""Figures of a run that went well, evidence for and against PPO, and what a verdict says."""

from rlhf.pipeline.report.ppo_verdict import Evidence
from rlhf.pipeline.report.verdicts import Verdict

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
