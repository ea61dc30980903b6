"""The evaluation of a run: base, SFT and PPO on the same held-out text, responses and prompts.

`rlhf eval RUN` makes it whole, and a run makes its cheap form after a stage. It reads what the stages sealed and writes
evaluation.json and evaluation.jsonl beside them; docs/evaluation.md says what the figures mean.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from rlhf.data.errors import SettingsError
from rlhf.data.rows import Prompt, prompt_text
from rlhf.stages.disk import replace_text
from rlhf.stages.evaluation import statistics
from rlhf.stages.evaluation.answers import Answer
from rlhf.stages.evaluation.bench import Bench, Say
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.records import (
    ANSWERS,
    FIGURES,
    NAMES,
    EvaluationFailed,
    Figures,
    Row,
    read_figures,
    short_hash,
)
from rlhf.stages.evaluation.subjects import find_subjects, is_current
from rlhf.stages.evaluation.tasks import run_tasks, task_manager
from rlhf.stages.logs import be_quiet

Answers = Mapping[str, list[list[Answer]]]
"""Of each model, to each prompt [P,m]."""
Qualities = Mapping[str, list[list[float]]]
PAIRS = (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))


def evaluate(
    run_dir: Path, done: Mapping[str, Path], asked: EvaluationSettings, say: Say = lambda text: None
) -> dict[str, Any]:
    """Measure the models of a run, write the two files, and return what evaluation.json says.

    `done` are the sealed folders of its finished stages, those of the last round. Raises RefusedError for what is not
    there or cannot be used, a judge among it, before a model is loaded, and EvaluationFailed for what fails later;
    nothing is written then.
    """
    be_quiet()
    subjects = find_subjects(run_dir, done)
    if not subjects:
        status = shlex.join(["rlhf", "status", str(run_dir)])
        raise SettingsError(f"{run_dir}: no finished pretrain, sft or ppo stage here; `{status}` shows how far it is")
    manager = task_manager(asked) if asked.tasks else None
    bench = Bench(run_dir, done, asked, subjects, say)
    refuse_to_lose(run_dir, done, bench.left_out)
    figures: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[list[Answer]]] = {}
    qualities: dict[str, list[list[float]]] = {}
    for name in sorted(subjects, key=("sft", "base", "ppo").index):  # SFT's model is kept, as the reference
        figures[name] = bench.perplexities(name)
        if bench.questions is not None:
            answers[name] = bench.answers(name, figures[name])
            if judged := bench.qualities(answers[name]):
                qualities[name] = judged
        figures[name] |= summary(answers.get(name), qualities.get(name))
        if name != "sft":
            bench.speakers.pop(name, None)
    curve = None
    if "sft" in answers and (several := bench.several(answers["sft"])):
        curve = statistics.best_of_n_curve(_values(several, "score"), bench.qualities(several))
    say("comparing")
    pairs = [*compare(bench, answers, qualities)]
    bench.speakers.clear()
    tasks = run_tasks(subjects, asked.tasks, manager, str(bench.device), say) if asked.tasks else None
    names = [name for name in NAMES if name in subjects]
    rows = finite([*gallery(bench.questions.prompts, names, answers, qualities)] if bench.questions else [])
    found = {
        "form": asked.form,
        "settings": bench.settings(),
        "reward_model": bench.reward_name,
        "judge": bench.judging.name if bench.judging else None,
        "models": {name: figures[name] for name in names},
        "pairs": pairs,
        "best_of_n": curve,
        "tasks": tasks,
        "left_out": [*bench.left_out],
        "answers_digest": short_hash(rows),
    }
    found = finite(found)
    write(run_dir, found, rows)
    return found


def refuse_to_lose(run_dir: Path, done: Mapping[str, Path], left_out: Mapping[str, Sequence[str]]) -> None:
    """Raise SettingsError where the run's evaluation, of the same models, has figures that cannot be made anew now:
    `left_out` says of what is left out the names of these."""
    earlier = read_figures(run_dir)
    if earlier is None or not is_current(run_dir, done):
        return
    for told, names in left_out.items():
        if any(figures.get(name) is not None for figures in earlier["models"].values() for name in names):
            raise SettingsError(
                f"{told}, which {FIGURES} has of these models, and keeps; start where those data lie, or delete "
                f"{run_dir / FIGURES} to measure without them"
            )


def write(run_dir: Path, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Put both files into the run folder. Raises EvaluationFailed where that cannot be done, or could not be read back;
    what is there is kept then."""
    try:
        Figures.model_validate(found)
        [Row.model_validate(row) for row in rows]
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise EvaluationFailed(
            f"{run_dir}: {key} is no finite number, so that nothing is written; does the judge or a reward give "
            "numbers too large to average?"
        ) from error
    try:
        replace_text(run_dir / ANSWERS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        replace_text(run_dir / FIGURES, json.dumps(found, indent=1, ensure_ascii=False))
    except OSError as error:
        raise EvaluationFailed(f"{run_dir}: {FIGURES} cannot be written there: {error.strerror or error}") from error


def summary(answers: list[list[Answer]] | None, qualities: list[list[float]] | None) -> dict[str, Any]:
    """What a model's answers are like; everything is None where there are none."""
    if not answers:
        names = ("score", "quality", "length", "eos_share", "distinct_1", "distinct_2", "repetition", "refusal_share")
        return dict.fromkeys((*names, "kl", "kl_interval"))
    flat = [answer for row in answers for answer in row]
    texts = [answer.text for answer in flat]
    kl, kl_interval = (None, None)
    if flat[0].kl is not None:
        kl, kl_interval = statistics.mean(_values(answers, "kl"))
    return {
        "score": _spread(_values(answers, "score")) if flat[0].score is not None else None,
        "quality": _spread(qualities) if qualities else None,
        "length": float(np.mean([answer.length for answer in flat])),
        "eos_share": float(np.mean([answer.ended for answer in flat])),
        "distinct_1": statistics.distinct_n(texts, 1),
        "distinct_2": statistics.distinct_n(texts, 2),
        "repetition": statistics.repetition(texts),
        "refusal_share": statistics.refusal_share(texts),
        "kl": kl,
        "kl_interval": kl_interval,
    }


def _spread(values: Any) -> dict[str, Any]:
    flat = np.asarray(values, float).ravel()
    quantiles = np.quantile(flat, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
    return {"mean": float(flat.mean()), "std": float(flat.std()), "quantiles": quantiles}


def compare(bench: Bench, answers: Answers, qualities: Qualities) -> Iterator[dict[str, Any]]:
    """How often one model's answers are better than another's, by score and by judge."""
    for one, other in PAIRS:
        if one not in answers or other not in answers:
            continue
        ours, theirs = answers[one], answers[other]
        longer_by = _values(ours, "length") - _values(theirs, "length")
        outcomes: dict[str, Any] = {}
        if bench.reward_name is not None:
            outcomes["score"] = _outcomes(_values(ours, "score"), _values(theirs, "score"))
        if one in qualities:
            outcomes["judge"] = _outcomes(qualities[one], qualities[other])
        elif bench.judging is not None:
            outcomes["judge"] = bench.wins(one, other, ours, theirs)
        for by, won in outcomes.items():
            yield {"one": one, "other": other, "by": by} | comparison(won, longer_by)


def comparison(won: statistics.Floats, longer_by: statistics.Floats) -> dict[str, Any]:
    """Win rate with its interval, as it is and at equal length, from outcomes and length differences [P,m]."""
    rate, interval = statistics.win_rate(won)
    controlled, its_interval = statistics.length_controlled(won, longer_by) or (None, None)
    wins, ties, losses = (int((won == outcome).sum()) for outcome in (1.0, 0.5, 0.0))
    return {
        "wins": wins, "ties": ties, "losses": losses, "win_rate": rate, "interval": interval,
        "length_controlled": controlled, "length_controlled_interval": its_interval,
    }  # fmt: skip


def _values(answers: list[list[Answer]], name: str) -> statistics.Floats:
    """A number of each answer [P,m]."""
    return np.array([[getattr(answer, name) for answer in row] for row in answers], float)


def _outcomes(ours: Any, theirs: Any) -> statistics.Floats:
    """1 where ours is higher, 0.5 where both are alike, 0 where theirs is."""
    found: statistics.Floats = (np.sign(np.subtract(ours, theirs)) + 1) / 2
    return found


def gallery(
    prompts: Sequence[Prompt], names: Sequence[str], answers: Answers, qualities: Qualities
) -> Iterator[dict[str, Any]]:
    """A row per prompt, with the first answer of each model."""
    for place, prompt in enumerate(prompts):
        first = {name: answers[name][place][0] for name in names}
        row: dict[str, Any] = {"prompt": prompt_text(prompt.messages)}
        row["answers"] = {name: answer.text for name, answer in first.items()}
        if all(answer.score is not None for answer in first.values()):
            row["scores"] = {name: answer.score for name, answer in first.items()}
        if qualities:
            row["qualities"] = {name: qualities[name][place][0] for name in names}
        row["lengths"] = {name: answer.length for name, answer in first.items()}
        row["ended"] = {name: answer.ended for name, answer in first.items()}
        row["kl"] = {name: answer.kl for name, answer in first.items()}
        yield row


def finite(content: Any) -> Any:
    """With None in the place of what is no finite number, as JSON has none."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
