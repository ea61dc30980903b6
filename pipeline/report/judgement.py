"""The verdicts on a run folder: what its files say, given to the functions that judge plain figures."""

from rlhf.pipeline.report import verdicts
from rlhf.pipeline.report.ppo_verdict import gather, ppo
from rlhf.pipeline.report.run import Run
from rlhf.pipeline.report.verdicts import Verdict


def judge_run(run: Run) -> dict[str, Verdict]:
    """A verdict for each stage, in the order of stages."""
    found: dict[str, Verdict] = {}
    for name, stage in run.stages.items():
        if not stage.done:
            step, steps = stage.entry.get("step"), stage.entry.get("steps")
            found[name] = verdicts.unfinished(stage.title, stage.status, stage.message, step, steps)
        elif name == "pretrain":
            found[name] = verdicts.pretrain(stage.metrics, stage.curves)
        elif name == "sft":
            found[name] = verdicts.sft(stage.metrics, stage.curves)
        elif name == "feedback":
            found[name] = verdicts.feedback(stage.metrics)
        elif name == "reward":
            found[name] = verdicts.reward(stage.metrics, stage.card)
        else:
            evidence = gather(run.evaluation, run.answers, run.samples, stage.metrics)
            reward = found.get("reward") if _learned_from(run) else None
            found[name] = ppo(stage.metrics, stage.curves, reward, evidence)
    return found


def _learned_from(run: Run) -> bool:
    """Whether PPO was paid by the run's own reward model, and not by one from elsewhere."""
    reward = run.stages.get("reward")
    given = run.stages["ppo"].manifest.get("inputs", {}).get("reward_model")
    if reward is None or reward.artifact is None or not reward.manifest or given is None:
        return reward is not None and given is None
    return bool(reward.artifact.digest == given)
