"""Which checkpoint of a PPO run is kept, and whether the run went too far."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.stages.disk import swap_folder
from rlhf.stages.metric_names import NAMES, number
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.evaluate import Answer, Evaluator, comparison, write_gallery
from rlhf.stages.ppo.layout import keep_policy, put_in_place
from rlhf.stages.runtime import Runtime

QUALITY_DROP = 0.05  # of the judge's quality, below its best: more than the noise of an evaluation


class Selection:
    """Keeps the policy with the best held-out score among those within the KL budget (Gao et al. 2022: the score
    goes on rising when the true quality has long begun to fall)."""

    def __init__(self, run: Runtime[PPOSettings], tokenizer: PreTrainedTokenizerBase, sft: list[Answer]) -> None:
        self.run, self.tokenizer, self.sft = run, tokenizer, sft
        self.best = run.folder / "checkpoints" / "best"
        run.state["evaluations"] = []

    def consider(self, step: int, policy: PolicyModel, evaluator: Evaluator) -> dict[str, float]:
        """Evaluate the policy, keep it if it is the best so far; returns the row's `eval_…` figures."""
        answers = evaluator(policy)
        figures = comparison(self.sft, answers)
        within = figures["kl"] <= self.run.settings.kl_budget
        earlier = [e["score"] for e in self.run.state["evaluations"] if e["within_budget"]]
        self.run.state["evaluations"].append({"step": step, "within_budget": within, **figures})
        # Over the budget the newest is kept as long as there is nothing better: a run never ends without a model.
        if (within and figures["score"] > max(earlier, default=-math.inf)) or (not within and not earlier):
            with self.run.whole(policy) as whole:
                self.run.on_main(lambda: self._keep(step, whole, answers))
        return {f"eval_{name}": value for name, value in figures.items()}

    def finish(self, folder: Path) -> dict[str, Any]:
        """Put the kept policy in place; returns its figures, and what is to be said about the run as a whole."""
        kept = json.loads((self.best / "answers.json").read_text(encoding="utf-8"))
        answers = [Answer(**answer) for answer in kept["answers"]]
        self.run.on_main(lambda: write_gallery(folder / "samples.jsonl", self.sft, answers))
        settings, tokenizer = self.run.settings, self.tokenizer
        self.run.on_main(lambda: put_in_place(self.best, folder / "model", settings, tokenizer))
        metrics: dict[str, Any] = {**comparison(self.sft, answers), "best_step": kept["step"]}
        metrics["num_eval_prompts"] = len({answer.prompt for answer in answers})
        reason = over_optimised(self.run.state["evaluations"], self.run.settings.kl_budget)
        metrics["over_optimised"] = reason is not None
        if reason is not None:
            self.run.say(f"over-optimised: {reason}; kept the policy of iteration {kept['step']}")
            metrics["over_optimised_because"] = reason
        return metrics

    def _keep(self, step: int, policy: PolicyModel, answers: list[Answer]) -> None:
        writing = self.best.with_name(".best.writing")  # aside: weights and answers belong together
        keep_policy(writing, policy, self.run.settings, self.tokenizer)
        content = {"step": step, "answers": [asdict(answer) for answer in answers]}
        (writing / "answers.json").write_text(json.dumps(content), encoding="utf-8")
        swap_folder(writing, self.best)


def over_optimised(evaluations: list[dict[str, Any]], kl_budget: float) -> str | None:
    """Why a run went too far, in words, or None: KL over its budget, or quality falling while the score rose."""
    last = evaluations[-1]
    if last["kl"] > kl_budget:
        return f"the KL ended at {number(last['kl'])} nats per response, over kl_budget {kl_budget:g}"
    judged = [e for e in evaluations if "true_quality" in e]
    best = max(judged, key=lambda e: e["true_quality"], default=None)
    if best and last["true_quality"] < best["true_quality"] - QUALITY_DROP and last["score"] > best["score"]:
        return (
            f"from iteration {best['step']} to {last['step']} the score rose from {number(best['score'])} to "
            f"{number(last['score'])} while the {NAMES['true_quality']} fell from {number(best['true_quality'])} to "
            f"{number(last['true_quality'])}"
        )
    return None
