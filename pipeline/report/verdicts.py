"""What each stage brought, in one sentence with its figures. Plain metrics in, verdicts out; PPO has a file of its own.

Every verdict has a name, under which `diagnoses` says what it means and what to change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf.pipeline.report.curves import Line, start_and_end
from rlhf.stages.metric_names import between, number, of_share, share

SAME_LOSS = 0.01
"""Nats per token: another seed moves a held-out loss by as much, so less is no change."""
LITTLE_GAIN = 0.02
"""Of the base model's loss. Demonstrations have a form of their own, which alone saves more than a fiftieth."""
NEVER_END = 0.05
"""Of a model's answers: so few end that the ends may be accidents, and the rest is what the limit on tokens cut off."""
NOTHING_LEARNED = 0.95
"""Of the loss of guessing. Knowing nothing but how frequent each token is already saves more than a twentieth."""
MEMORISED_GAP, MEMORISED_FACTOR = 0.3, 1.5
"""Held-out loss over training loss, in nats and as a factor. Both at once is more than the noise of a batch, and than
what rare tokens do to a low loss."""
WEAK_ACCURACY = 0.6
"""Of held-out pairs. People agree with each other in 0.73 to 0.77 of such pairs (Stiennon et al. 2020, Ouyang et al.
2022), and published reward models with them in 0.65 to 0.75: below 0.6 it is nearer to guessing than to either."""
A_TENTH = 0.1
"""Of accuracy over a rule: where the interval holds both the rule's figure and so much more, nothing is shown."""
SHORTER_WINS_PROMPTS = 30
"""Prompts with pairs whose better answer is the shorter one, from which on a share of them is known to about ±0.18."""

Tone = Literal["good", "doubtful", "bad", "open"]


@dataclass(frozen=True)
class Verdict:
    """One sentence on a stage; `open` is the tone of what cannot be said yet, or not with so little evidence."""

    name: str
    tone: Tone
    sentence: str

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")


def unfinished(title: str, status: str, message: str | None, step: int | None = None, steps: int | None = None
               ) -> Verdict:  # fmt: skip
    """Of a stage that is not done."""
    far = f" at step {step} of {steps}" if steps else ""
    why = f": {message}" if message else ""
    tone: Tone = "bad" if status == "failed" else "open"
    return Verdict(status, tone, f"{title} is {status}{far}, so there is no result yet{why}.".replace("..", "."))


def missing(title: str, message: str) -> Verdict:
    """Of a stage whose folder is not in the run any more; the message says how to get it back."""
    return Verdict("missing", "open", f"{title} is finished, but not here, so it is not judged: {message}.")


def pretrain(metrics: Mapping[str, Any], curves: Mapping[str, Line]) -> Verdict:
    """Against guessing among all tokens of the vocabulary."""
    loss, guessing = metrics.get("val_loss"), metrics.get("guessing_loss")
    if loss is None or guessing is None:
        return Verdict("unknown", "open", "Pretraining tells no held-out loss, so nothing is known of what it learned.")
    against = f"guessing among {metrics['vocab_size']:,} tokens would be {number(guessing)}"
    if loss > NOTHING_LEARNED * guessing:
        return Verdict(
            "learned_nothing", "bad", f"Pretraining learned next to nothing: held-out loss {number(loss)}, {against}."
        )
    line = curves.get("val_loss", [])
    best_step, best = min(line, key=lambda point: point[1], default=(0, loss))
    if line and line[-1][1] > best + SAME_LOSS:
        return Verdict(
            "overfitted",
            "doubtful",
            f"Pretraining went on for too long: the held-out loss was lowest at step {best_step:,.0f} ({number(best)}) "
            f"and rose to {number(line[-1][1])}; the model of the best step was kept ({against}).",
        )
    return Verdict(
        "learned", "good", f"Pretraining learned: held-out loss {number(loss)} nats per token, where {against}."
    )


def sft(metrics: Mapping[str, Any], curves: Mapping[str, Line], ended: tuple[float, str] | None = None) -> Verdict:
    """Against the model that it started from, on held-out demonstrations. `ended` is the share of its answers that come
    to an end, and by whom and on how much that was taken, where it is known."""
    loss, base = metrics.get("eval_loss"), metrics.get("base_eval_loss")
    if loss is None or base is None:
        return Verdict("unknown", "open", "SFT tells no held-out loss, so nothing is known of what it learned.")
    change = f"held-out loss {number(base)} → {number(loss)}"
    if loss > base + SAME_LOSS:
        return Verdict("made_it_worse", "bad", f"SFT made it worse: {change} nats per token.")
    if loss > base - SAME_LOSS:
        return Verdict("moved_nothing", "bad", f"SFT moved nothing: {change}.")
    ends = ""
    if ended is not None and ended[0] < NEVER_END:
        ends = f", and the share of answers that come to an end is {share(ended[0])} ({ended[1]})"
    if loss > (1 - LITTLE_GAIN) * base:
        return Verdict("learned_little", "doubtful", f"SFT learned little: {change}{ends}.")
    if ends:
        return Verdict("never_ends", "doubtful", f"SFT learned, but not where an answer ends: {change}{ends}.")
    if line := curves.get("loss"):
        training = start_and_end(line)[1]
        if loss > training + MEMORISED_GAP and loss > MEMORISED_FACTOR * training:
            return Verdict(
                "memorised",
                "doubtful",
                f"SFT learned, but by heart: {change}, while the loss on what it was trained on is {number(training)}.",
            )
    return Verdict("learned", "good", f"SFT learned: {change}.")


def feedback(metrics: Mapping[str, Any]) -> Verdict:
    """How much was ranked, and how far raters agree."""
    num = metrics.get("num_rankings")
    if num is None:
        return Verdict("unknown", "open", "The feedback step tells no rankings.")
    if not num:
        return Verdict("nothing_ranked", "bad", "Feedback brought nothing: no prompt has ranked answers.")
    differ, tied = metrics.get("num_disagreed") or 0, metrics.get("num_tied") or 0
    more = f", {number(differ)} of them by several raters who differ" if differ else ""
    if 2 * tied > num:
        return Verdict(
            "mostly_ties",
            "doubtful",
            f"Feedback brought {number(num)} rankings, but in {number(tied)} of them all answers are tied: they are "
            "too much alike.",
        )
    return Verdict("ranked", "good", f"Feedback brought {number(num)} rankings{more}.")


def reward(metrics: Mapping[str, Any], card: Mapping[str, Any] | None = None) -> Verdict:
    """On held-out pairs, against guessing and against always preferring the longer answer."""
    accuracy, longer = metrics.get("accuracy"), metrics.get("longer_wins_accuracy")
    if accuracy is None:
        return Verdict("unknown", "open", "The reward model tells no accuracy, so nothing is known of its worth.")
    spreads = [metrics.get(f"{side}_std") for side in ("chosen", "rejected")]
    if spreads == [0.0, 0.0] and metrics.get("chosen_mean") == metrics.get("rejected_mean"):
        return Verdict("constant", "bad", "The reward model is broken: it gives every answer the same score.")
    # Pairs of one prompt are not independent of each other, so the interval is that of a mean over prompts, which is
    # the accuracy itself where all have as many pairs.
    num = metrics.get("num_eval_prompts") or (card or {}).get("num_prompts")
    by_prompt = metrics.get("prompt_accuracy", accuracy)
    interval = of_share(by_prompt, num) if num else (accuracy, accuracy)
    known = f"accuracy {share(accuracy)} on held-out pairs"
    if num:
        averaged = "" if share(by_prompt) == share(accuracy) else f"averaged prompt by prompt {share(by_prompt)}, "
        known += f" of {number(num)} prompts ({averaged}{between(interval)})"
    if interval[1] < 0.5:
        return Verdict("inverted", "bad", f"The reward model prefers the worse answer: {known}.")
    if interval[0] <= 0.5 and interval[1] >= WEAK_ACCURACY:
        return Verdict(
            "too_few_to_tell", "open", f"Too few to tell whether the reward model is better than guessing: {known}."
        )
    if interval[0] <= 0.5:
        return Verdict("guesses", "bad", f"The reward model is not good enough: {known}, and guessing reaches 0.50.")
    if longer is not None and accuracy <= max(longer, 1 - longer):
        rule = f"always preferring the {'longer' if longer >= 0.5 else 'shorter'} answer (in tokens)"
        if num and interval[1] >= min(max(longer, 1 - longer) + A_TENTH, 1.0):
            return Verdict(
                "too_few_to_tell",
                "open",
                f"Too few to tell whether the reward model knows more than {rule} does: {known}, where that reaches "
                f"{share(max(longer, 1 - longer))}.",
            )
        return Verdict(
            "no_better_than_length",
            "bad",
            f"The reward model is not good enough: {known}, and {rule} reaches {share(max(longer, 1 - longer))}.",
        )
    if failed := metrics.get("gates_failed"):
        return Verdict("below_its_bar", "bad", f"The reward model is below its bar: {'; '.join(failed)}.")
    for group in (card or {}).get("by_length", []):
        prompts = group.get("prompts") or 0  # a card that somebody else wrote may lack them
        if (
            group["name"] == "better answer shorter"
            and prompts >= SHORTER_WINS_PROMPTS
            and of_share(group["prompt_accuracy"], prompts)[1] < 0.5
        ):
            return Verdict(
                "likes_length",
                "doubtful",
                f"The reward model likes length: accuracy {share(accuracy)}, but {share(group['accuracy'])} on the "
                f"{number(group['pairs'])} pairs, of {number(prompts)} prompts, whose better answer is the shorter "
                "one.",
            )
    against = "" if longer is None else f"; always preferring the longer answer (in tokens) reaches {share(longer)}"
    if accuracy < WEAK_ACCURACY:
        return Verdict("weak", "doubtful", f"The reward model is weak: {known}{against}.")
    return Verdict("learned", "good", f"The reward model learned: {known}{against}.")


OF_SETTINGS = ("over_optimised", "collapsed", "moved_nothing", "made_it_worse")
"""Verdicts on PPO that its own settings may bring about, where nothing before it is weak."""


def outcome(verdicts: Mapping[str, Verdict], model: str | None, unfinished: str | None = None) -> list[str]:
    """The whole run in two or three sentences: what came of it, where it is weakest, which model there is.

    `unfinished` is the first stage that is not done. A fault is handed on, so the first weak stage is the one to name.
    """
    if not verdicts:
        return ["Nothing has run yet."]
    last = unfinished or list(verdicts)[-1]
    decisive, said = verdicts[last], [verdicts[last].sentence]
    others = [verdict for stage, verdict in verdicts.items() if stage != last]
    is_of_settings = last == "ppo" and decisive.name in OF_SETTINGS
    tones = ["bad", "doubtful", *(["open"] if decisive.tone == "good" or is_of_settings else [])]
    weakest = next((found for tone in tones for found in others if found.tone == tone), None)
    if weakest is not None:
        said.append(f"{'A doubt is left' if decisive.tone == 'good' else 'Begin with this'}: {weakest.sentence}")
    elif others and decisive.tone == "good":
        said.append("No stage before it gives cause for doubt.")
    elif others and is_of_settings:
        said.append("The stages before it are good enough by their held-out figures: look at PPO's own settings first.")
    if model is not None:
        said.append(f"The last finished model is {model}.")
    return said
