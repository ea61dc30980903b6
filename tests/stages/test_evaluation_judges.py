"""Judges of an evaluation: they are asked before a model is loaded, named where they fail, and lose no figures."""

from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from ppo_world import model_folders, run_ppo
from stages_world import WORLD

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.feedback.records import Task
from rlhf.stages.endpoint import EndpointError
from rlhf.stages.evaluation import judges
from rlhf.stages.evaluation.config import EvaluationSettings, cheap
from rlhf.stages.evaluation.evaluate import evaluate
from rlhf.stages.evaluation.records import EvaluationFailed, read_answers
from rlhf.stages.judge import judge_answers

JUDGE = f"{WORLD}:judge"


class Server:
    """A model that takes the longer answer, whichever is shown first."""

    name, at_once = "long-1", 2

    def __init__(self) -> None:
        self.failed: Exception | None = None
        self.down = False

    def probe(self) -> None:
        if self.down:
            raise EndpointError("http://127.0.0.1:1: cannot be reached")

    def points(self, asked: list[Task]) -> list[list[float] | Exception]:
        assert len({task.prompt_id for task in asked}) == len(asked) <= self.at_once
        lengths = [[len(answer.text) for answer in task.answers] for task in asked]
        return [self.failed or [(a > b) + (a == b) / 2, (b > a) + (a == b) / 2] for a, b in lengths]


def test_a_model_behind_a_server_compares_and_gives_no_qualities(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    monkeypatch.setattr(judges, "model_judge", lambda *_: server)
    asked = EvaluationSettings.load(
        {"num_prompts": 3, "num_samples": 1, "best_of": 2, "judge_from": {"url": "http://127.0.0.1:1", "model": "m"}},
        "eval",
    )
    said: list[str] = []
    told = evaluate(tmp_path, chain, asked, said.append)
    assert told["judge"] == "long-1"
    assert said.index("asking the judge long-1 at http://127.0.0.1:1") < said.index("sft: 0 of 3 answers")
    pairs = [f"long-1 at http://127.0.0.1:1 compares ppo and sft: {number} of 3 pairs of answers" for number in (0, 2)]
    assert [text for text in said if "compares ppo and sft" in text] == pairs  # two at once
    assert told["models"]["ppo"]["quality"] is None
    assert [row["quality"] for row in told["best_of_n"]] == [None, None]
    rows = read_answers(tmp_path, told["answers_digest"])
    for pair in told["pairs"][1::2]:
        texts = [(len(row["answers"][pair["one"]]), len(row["answers"][pair["other"]])) for row in rows]
        assert (pair["by"], pair["wins"]) == ("judge", sum(a > b for a, b in texts))
    before = (tmp_path / "evaluation.json").read_bytes()
    server.failed = OSError("out of order")
    with pytest.raises(EvaluationFailed, match=r"^the judge failed: out of order; what it said before is kept$"):
        evaluate(tmp_path, chain, asked)
    server.down = True
    said.clear()
    with pytest.raises(SettingsError, match=r"before anything else, and failed: http://127.0.0.1:1: cannot be"):
        evaluate(tmp_path, chain, asked, said.append)
    assert said == ["reading held-out data", "asking the judge long-1 at http://127.0.0.1:1"]  # no model was loaded
    assert (tmp_path / "evaluation.json").read_bytes() == before


def only_of_questions(prompts: list[str], responses: list[str]) -> list[float]:
    """A judge that breaks at the first answer which does not begin with the prompt's own text."""
    return [{prompt: 1.0}[response[: len(prompt)]] for prompt, response in zip(prompts, responses, strict=True)]


def never(prompts: list[str], responses: list[str]) -> list[float]:
    raise EndpointError("http://127.0.0.1:1: cannot be reached; start the server")


def test_a_function_is_asked_once_before_a_model_is_loaded(chain: dict[str, Path], tmp_path: Path) -> None:
    said: list[str] = []
    cure = "judge test_evaluation_judges:never: http://127.0.0.1:1: cannot be reached; start the server$"
    with pytest.raises(SettingsError, match=cure):
        evaluate(tmp_path, chain, cheap(f"{__name__}:never"), said.append)
    assert said == ["reading held-out data", f"asking the judge {__name__}:never"]
    with pytest.raises(EvaluationFailed, match=r"^judge test_evaluation_judges:only_of_questions: KeyError: "):
        evaluate(tmp_path, chain, cheap(f"{__name__}:only_of_questions"), said.append)
    assert said[-1].startswith(f"{__name__}:only_of_questions judges ")


def standardised(prompts: list[str], responses: list[str]) -> list[float]:
    """A judge that takes all answers together: how many standard deviations one is longer than their mean."""
    lengths = [len(response) for response in responses]
    return [(length - fmean(lengths)) / pstdev(lengths) for length in lengths]


def test_a_judge_that_takes_answers_together_is_asked_about_two_that_differ(
    chain: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        judge_answers(f"{__name__}:standardised", ["Who?"], ["I."])
    told = evaluate(tmp_path, chain, cheap(f"{__name__}:standardised"))
    assert all(model["quality"] for model in told["models"].values())


@pytest.mark.parametrize(
    ("judge", "message"), [("nowhere", "not of the form package.module:function"), ("nowhere:judge", "nowhere")]
)
def test_what_is_no_judge_is_refused(chain: dict[str, Path], tmp_path: Path, judge: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        evaluate(tmp_path, chain, EvaluationSettings(judge=judge))
    assert not list(tmp_path.iterdir())


def test_one_judge_is_enough() -> None:
    given = {"judge": JUDGE, "judge_from": {"url": "http://127.0.0.1:1", "model": "m"}}
    with pytest.raises(SettingsError, match="one of the two can judge"):
        EvaluationSettings.load(given, "eval")


def enormous(prompts: list[str], responses: list[str]) -> list[float]:
    """Finite, but their spread is not."""
    return [1e308 * (-1) ** number for number in range(len(responses))]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_figures_that_could_not_be_read_back_are_not_written(chain: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("earlier")
    with pytest.raises(EvaluationFailed, match=r"models\.base\.quality\.std is no finite number, so that nothing is"):
        evaluate(tmp_path, {"sft": chain["sft"], "pretrain": chain["pretrain"]}, cheap(f"{__name__}:enormous"))
    assert (tmp_path / "evaluation.json").read_text() == "earlier"


def pays(prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0] * len(responses)


def never_pays(prompts: list[str], responses: list[str]) -> list[float]:
    raise SystemExit(0)


def test_a_reward_that_fails_is_named_and_ends_the_evaluation(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its function would have ended the process."""
    given = model_folders(tmp_path, tokenizer) | {"reward_model": None}
    run_ppo(tmp_path / "ppo", given | {"rewards": [{"function": f"{__name__}:pays"}]}, num_iterations=1)
    monkeypatch.setattr(f"{__name__}.pays", never_pays)
    with pytest.raises(EvaluationFailed, match=r"^reward test_evaluation_judges:pays: raised SystemExit: 0 \(row 1"):
        evaluate(tmp_path, {"ppo": tmp_path / "ppo"}, cheap(None))
    assert not (tmp_path / "evaluation.json").exists()
