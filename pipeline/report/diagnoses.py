"""What is behind a verdict or a finding of the health monitor, how it looks in the plots, and what to change.

It answers "is my SFT model bad, or my reward model, or is it the hyperparameters?": each diagnosis stands at the stage
whose figures show it, and a fault is handed on, so the first stage with one is where to begin.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlhf.pipeline.report.verdicts import Verdict


@dataclass(frozen=True)
class Diagnosis:
    """Three sentences or so: what it means, what it looks like in the plots, what to change."""

    means: str
    looks: str
    change: str


VERDICTS: dict[str, Diagnosis] = {
    "pretrain.learned_nothing": Diagnosis(
        "The base model knows little more than how frequent each token is. All later stages build on it.",
        "The loss stays near the dotted level of guessing, or falls and then jumps back up.",
        "Raise pretrain.learning_rate if the loss falls too slowly, lower it if it jumps; raise pretrain.num_steps; "
        "look at the data with `rlhf data check`.",
    ),
    "pretrain.overfitted": Diagnosis(
        "The model began to learn its training text by heart. The best checkpoint was kept, so nothing is lost but "
        "time.",
        "Training loss goes on falling while the held-out loss turns upwards.",
        "More text, fewer steps (pretrain.num_steps), more pretrain.weight_decay or dropout, or a smaller model.",
    ),
    "sft.moved_nothing": Diagnosis(
        "Fine-tuning did not change what the model makes of demonstrations, so PPO begins at the base model.",
        "The loss is a flat line at the level of the base model.",
        "Raise sft.learning_rate or sft.num_epochs; with LoRA the rate has to be about ten times as high. Look "
        "whether sft.max_length leaves most responses out.",
    ),
    "sft.learned_little": Diagnosis(
        "Fine-tuning hardly changed what the model makes of demonstrations, so PPO begins almost at the base model.",
        "The loss falls by less than a fiftieth of where it began, and is still falling at the end.",
        "Raise sft.learning_rate or sft.num_epochs; with LoRA the rate has to be about ten times as high. Where the "
        "base model was fine-tuned on such demonstrations already, there may be no more to learn.",
    ),
    "sft.never_ends": Diagnosis(
        "Its answers run into the limit on tokens. PPO then learns from answers that are cut, and cannot learn from "
        "ppo.missing_eos_penalty, which is the same for all.",
        "The share of answers that end is near zero, and their length is ppo.max_new_tokens.",
        "Raise ppo.max_new_tokens where demonstrations are longer; else more sft.num_epochs or a higher "
        "sft.learning_rate, so that the model learns to end.",
    ),
    "sft.made_it_worse": Diagnosis(
        "The model explains held-out demonstrations worse than before: steps too large, or demonstrations that differ "
        "from the held-out ones.",
        "The loss jumps up after the warm-up, or gradient norms have spikes.",
        "Lower sft.learning_rate; look at held-out and training demonstrations side by side.",
    ),
    "sft.memorised": Diagnosis(
        "The model knows its demonstrations by heart, which makes its answers all alike, and PPO needs variety.",
        "Training loss drops at each new epoch, far below the held-out loss.",
        "Fewer sft.num_epochs, a lower sft.learning_rate, or more demonstrations.",
    ),
    "feedback.nothing_ranked": Diagnosis(
        "Nobody has said yet which answers are better.",
        "There is nothing to see.",
        "Rank answers (`rlhf rank`), or name a judge.",
    ),
    "feedback.mostly_ties": Diagnosis(
        "Answers that are tied teach a reward model nothing. The SFT model says nearly the same each time.",
        "In most rankings all answers are tied.",
        "Sample the answers at a higher temperature, or more of them per prompt.",
    ),
    "reward.constant": Diagnosis(
        "The reward model cannot tell answers apart, so PPO has nothing to climb.",
        "Both histograms of scores are one bar; the ranking loss stays at ln 2 = 0.693.",
        "Lower reward.learning_rate (a model that blew up may end so); look whether reward.max_length cuts the "
        "answers off.",
    ),
    "reward.inverted": Diagnosis(
        "It learned the ranks upside down, or the held-out rankings are of another kind than those it learned from.",
        "Held-out accuracy falls below 0.5 while the training loss falls.",
        "Look whether rank 1 is the best answer in your data and chosen is the better of a pair (`rlhf data check`).",
    ),
    "reward.guesses": Diagnosis(
        "The score has nothing to do with the ranks. PPO would raise it all the same, and make nothing better.",
        "Held-out accuracy stays around 0.5; the loss stays near 0.693, or falls on training data alone. The "
        "histograms of best and worst answers lie on each other.",
        "First the labels: read the pairs it is most wrong about, and look for contradictions with `rlhf data check`. "
        "Then more rankings, more reward.num_epochs, a higher reward.learning_rate, a larger or better fine-tuned "
        "backbone.",
    ),
    "reward.no_better_than_length": Diagnosis(
        "A rule without any understanding does as well, and PPO will follow that rule: answers of one length, "
        "whatever they say.",
        "Held-out accuracy stays at or below its dotted level; by length, pairs in which length misleads are mostly "
        "wrong.",
        "Balance the rankings by length (add pairs whose shorter answer is the better one); then as for a weak model.",
    ),
    "reward.likes_length": Diagnosis(
        "It is right where the better answer is longer and wrong where it is shorter: PPO will write more and more.",
        "In the report card the accuracies by length lie far apart. In PPO, length grows together with the score.",
        "Balance the rankings by length; in PPO set ppo.overlong_buffer or a higher ppo.kl_coef, and watch the "
        "length-controlled win rate.",
    ),
    "reward.below_its_bar": Diagnosis(
        "The recipe asks for more than this reward model has, so PPO did not start.",
        "Held-out accuracy levels off below the bar.",
        "More rankings, less noise in the labels, a larger backbone; or lower the bar, for which nothing is trained "
        "again.",
    ),
    "reward.weak": Diagnosis(
        "It is better than guessing, but wrong in about two of five pairs. PPO can improve a little before it finds "
        "the faults.",
        "Held-out accuracy levels off early while the training loss goes on falling.",
        "More rankings help most, then a backbone that understands the task better. In PPO keep ppo.kl_coef high and "
        "ppo.kl_budget low.",
    ),
    "reward.too_few_to_tell": Diagnosis(
        "There are too few held-out rankings to tell the accuracy from that of guessing, or of a rule on length.",
        "Held-out accuracy jumps between evaluations.",
        "Hold out more: reward.eval_share, or a reward.eval_data of a few hundred prompts.",
    ),
    "ppo.broken_reward": Diagnosis(
        "What PPO is paid for is not what is wanted: it did its work, and the work was the wrong one. No setting of "
        "PPO mends that.",
        "The score is one flat line, or it rises while quality and win rate do not, from the first evaluation on.",
        "Look at ppo.reward_model or ppo.rewards: score a few good and bad answers by hand. If the reward model's own "
        "verdict is bad, begin there; if it is good, look whether PPO's prompts are of the kind that it learned "
        "from, and whether ppo.score_clip or a penalty covers its score.",
    ),
    "ppo.over_optimised": Diagnosis(
        "The policy left the answers on which the reward model can be trusted, and found what it gets wrong (Gao et "
        "al. 2022). Reward model and SFT are usable; the run went too far.",
        "Score and KL rise to the end; the judge's quality rises at first, turns, and falls. In the frontier the line "
        "of PPO bends away from that of best-of-n.",
        "Stop earlier (ppo.num_iterations), hold back more (ppo.kl_coef, ppo.kl_target) or lower ppo.kl_budget, which "
        "keeps an earlier policy. To go further, train the reward model on answers of this policy (rounds).",
    ),
    "ppo.collapsed": Diagnosis(
        "The policy says the same, or nothing, whatever it is asked: it has stopped exploring.",
        "Entropy or length fall steeply to near zero, the share of answers that end falls, or the KL explodes; the "
        "score may still be high.",
        "Lower ppo.learning_rate or ppo.num_epochs, raise ppo.kl_coef or ppo.entropy_coef; set "
        "ppo.missing_eos_penalty where answers no longer end, lower it where they became empty.",
    ),
    "ppo.moved_nothing": Diagnosis(
        "The policy is still the SFT model: it was hardly trained.",
        "KL stays at zero, score and length are flat, the clip fraction is zero.",
        "Raise ppo.learning_rate or ppo.num_iterations, lower ppo.kl_coef. A clip fraction of 0.02 to 0.1 is usual.",
    ),
    "ppo.made_it_worse": Diagnosis(
        "Answers are worse than before, also by the reward: optimisation itself fails.",
        "The score falls or jumps; clip fraction, ratio or gradient norms have spikes; explained variance is below "
        "zero.",
        "Lower ppo.learning_rate and ppo.num_epochs, raise ppo.rollout_batch_size, let the critic learn first "
        "(ppo.critic_warmup_iterations).",
    ),
    "ppo.too_few_to_tell": Diagnosis(
        "The answers may be better or worse: so few prompts do not show it.",
        "The interval of the win rate reaches far across one half.",
        "Hold out more prompts: a larger ppo.eval_share, or a ppo.eval_data of a few hundred.",
    ),
    "ppo.no_difference_shown": Diagnosis(
        "On so many prompts all but a small difference would show.",
        "The interval of the win rate is narrow, and holds one half.",
        "Train longer (ppo.num_iterations) or with larger steps (ppo.learning_rate), hold back less (ppo.kl_coef); to "
        "show a small difference, hold out more prompts (ppo.eval_share, or a larger ppo.eval_data).",
    ),
    "ppo.only_longer": Diagnosis(
        "Longer answers win with many judges. Among answers of equal length PPO's are not shown to be better.",
        "Length grows with the score; the length-controlled win rate lies near one half.",
        "Set ppo.overlong_buffer, raise ppo.kl_coef, and balance the reward model's rankings by length.",
    ),
    "ppo.raised_the_score": Diagnosis(
        "That the score says so, which PPO optimised, is no proof: it rises in a broken run, too.",
        "The score rises with the KL; nothing else judges.",
        "Name a judge (judge: module:function, or `rlhf eval` with one), or read the answers below, the largest gains "
        "first.",
    ),
    "ppo.unknown": Diagnosis(
        "No held-out answers of PPO and SFT were compared.",
        "There are no win-rate bars.",
        "Run `rlhf eval`.",
    ),
}  # fmt: skip
"""By stage and name of the verdict; verdicts that give no cause for a change have none."""

FINDINGS: dict[str, Diagnosis] = {
    "non_finite": Diagnosis(
        "Something overflowed, or a score was no number; the weights may be spoilt.",
        "Curves end, or have gaps.",
        "Go back to the last checkpoint with a lower ppo.learning_rate or ppo.max_grad_norm; try ppo.precision=fp32.",
    ),
    "negative_kl": Diagnosis(
        "Answers are sampled from another distribution than the one that is scored; a KL cannot be negative.",
        "The KL runs below zero for many iterations.",
        "Look for another temperature, top-k or top-p in a server's sampling; try ppo.precision=fp32.",
    ),
    "ratio_blow_up": Diagnosis(
        "One iteration's updates moved the policy far from the one that sampled: the steps are too large.",
        "Clip fraction above 0.3, approx_kl above 0.1, a ratio off 1; often spikes in the gradient norm.",
        "Lower ppo.learning_rate or ppo.num_epochs, set ppo.target_kl, or raise ppo.rollout_batch_size.",
    ),
    "kl_blow_up": Diagnosis(
        "The policy went far from SFT, and has probably found what the reward model gets wrong.",
        "The KL grows faster and faster, usually while the score rises.",
        "Raise ppo.kl_coef or steer it by ppo.kl_target; lower ppo.learning_rate or ppo.num_iterations.",
    ),
    "entropy_collapse": Diagnosis(
        "The policy says almost the same thing each time. Where one certain answer is wanted, that is as it should be.",
        "Entropy falls to under a fifth of where it began.",
        "Raise ppo.kl_coef, ppo.entropy_coef or ppo.temperature, or lower ppo.learning_rate.",
    ),
    "eos_collapse": Diagnosis(
        "The reward model likes answers that go on, so they no longer end.",
        "The share of answers that end falls; length grows to max_new_tokens.",
        "Set or raise ppo.missing_eos_penalty, or raise ppo.max_new_tokens if good answers need the room.",
    ),
    "length_drift": Diagnosis(
        "The reward may pay for length, or for brevity, itself.",
        "Length doubles or halves, together with the score.",
        "Compare scores of long and short answers of equal quality; set ppo.overlong_buffer, or lower "
        "ppo.missing_eos_penalty where answers became short.",
    ),
    "critic_useless": Diagnosis(
        "The critic predicts returns worse than a constant would, and only adds noise.",
        "Explained variance stays below zero.",
        "Raise ppo.critic_learning_rate, or ppo.critic_warmup_iterations; a small ppo.value_clip_range can hold it "
        "back.",
    ),
    "reward_saturation": Diagnosis(
        "The reward no longer tells answers apart, and what is left to learn is noise.",
        "The scores' standard deviation falls to under a tenth of where it began; the score levels off.",
        "Stop here, widen ppo.score_clip if it is set, or train a new reward model on answers of this policy.",
    ),
    "equal_scores": Diagnosis(
        "Every answer gets the same score: there is nothing to learn from.",
        "The score is one flat line without any spread.",
        "Look whether the reward reads the answers, and whether ppo.score_clip flattens their scores.",
    ),
}
"""By name of a finding that was still there when PPO ended."""


def diagnose(verdicts: Mapping[str, Verdict], findings: Iterable[str]) -> list[tuple[str, str, Diagnosis]]:
    """(stage, name in words, diagnosis) of all that deserves one: verdicts in the order of stages, then findings."""
    named = [(stage, verdict.label, VERDICTS.get(f"{stage}.{verdict.name}")) for stage, verdict in verdicts.items()]
    named += [("ppo", name.replace("_", " "), FINDINGS.get(name)) for name in findings]
    return [(stage, name, found) for stage, name, found in named if found is not None]
