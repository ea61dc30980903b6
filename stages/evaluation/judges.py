"""Judges of an evaluation: functions, which give an answer a quality, and models behind a server, which compare two."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf.data.errors import SettingsError
from rlhf.data.feedback.records import Shown, Task
from rlhf.data.rows import Prompt, prompt_text
from rlhf.data.sources import load_function
from rlhf.stages.endpoint import EndpointError
from rlhf.stages.evaluation.answers import Answer
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.records import EvaluationFailed
from rlhf.stages.judge import judge_answers
from rlhf.stages.judging import ModelJudge, model_judge

BESIDE = "evaluation"
"""What a server said lies in the run folder under this name, with `judging.REPLIES` behind it."""


class Judging:
    """Either kind."""

    def __init__(self, name: str, model: ModelJudge | None = None, at: str = "") -> None:
        self.name, self._model = name, model
        self.who = f"{name} at {at}" if at else name
        """Its name, and of a model the address where it is asked."""

    @property
    def compares(self) -> bool:
        """Whether it compares answers, and gives none a quality."""
        return self._model is not None

    def probe(self, text: str) -> None:
        """Ask it once before anything is sampled for it, a function about two answers to `text`: some hold the answers
        that they are given together against each other.

        Raises SettingsError where it fails.
        """
        try:
            if self._model is None:
                judge_answers(self.name, [text, text], [text, f"{text} {text}"])
            else:
                self._model.probe()
        except (ValueError, EndpointError) as error:
            raise SettingsError(f"the judge was asked before anything else, and failed: {error}") from error

    def qualities(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[Answer]]) -> list[list[float]]:
        """Of each answer to each prompt, by a function. Raises EvaluationFailed where it fails."""
        assert self._model is None
        texts = [prompt_text(prompt.messages) for prompt, row in zip(prompts, answers, strict=True) for _ in row]
        try:
            given = iter(judge_answers(self.name, texts, [answer.text for row in answers for answer in row]))
        except ValueError as error:
            raise EvaluationFailed(str(error)) from error
        return [[next(given) for _ in row] for row in answers]

    def wins(
        self,
        prompts: Sequence[Prompt],
        ours: Sequence[Sequence[Answer]],
        theirs: Sequence[Sequence[Answer]],
        say: Callable[[str], None],
    ) -> list[list[float]]:
        """1 where our answer is better, 0 where theirs is, 0.5 where it does not name one of them in both orders.

        Raises EvaluationFailed where it could not be asked; what it said before is not asked for again. `say` is told
        how many it has compared.
        """
        assert self._model is not None
        tasks = [
            Task(0, 1, prompt.messages, [Shown(0, a.text), Shown(1, b.text)])
            for prompt, *pair in zip(prompts, ours, theirs, strict=True)
            for a, b in zip(*pair, strict=True)
        ]
        tasks = [Task(number, 1, task.messages, task.answers) for number, task in enumerate(tasks)]
        found: list[float] = []
        for start in range(0, len(tasks), self._model.at_once):
            say(f"{start} of {len(tasks)} pairs of answers")
            for points in self._model.points(tasks[start : start + self._model.at_once]):
                if isinstance(points, Exception):
                    raise EvaluationFailed(f"the judge failed: {points}; what it said before is kept") from points
                found.append(points[0])
        given = iter(found)
        return [[next(given) for _ in row] for row in ours]


def judging(asked: EvaluationSettings, run_dir: Path) -> Judging | None:
    """The judge that is asked for. Raises RefusedError for what cannot be one."""
    if asked.judge is not None:
        if ":" not in asked.judge:
            raise SettingsError(f"--judge {asked.judge}: not of the form package.module:function")
        load_function(asked.judge)
        return Judging(asked.judge)
    if asked.judge_from is None:
        return None
    served = asked.judge_from
    model = model_judge(run_dir / BESIDE, served.url, served.model, served.key_variable)
    return Judging(model.name, model, served.url)
