"""The evaluation of a run: the same held-out rows for every model, whatever stages it has, and nothing disturbed."""

import errno
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ppo_world import model_folders, run_ppo
from stages_world import TINY, WORLD, run_stage

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.rows import prompt_key, read_demonstrations
from rlhf.data.sources import Source
from rlhf.data.split import split_by_prompt
from rlhf.stages.artifact import Artifact
from rlhf.stages.disk import file_digest
from rlhf.stages.evaluation import bench, statistics, tasks
from rlhf.stages.evaluation.answers import Answer, answers
from rlhf.stages.evaluation.config import EvaluationSettings, cheap
from rlhf.stages.evaluation.evaluate import evaluate, finite
from rlhf.stages.evaluation.records import EvaluationFailed, read_answers, read_figures
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain import corpus
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sft.config import SFTSettings

JUDGE = f"{WORLD}:judge"
FULL = EvaluationSettings(num_prompts=5, num_samples=2, best_of=4, judge=JUDGE)


@pytest.fixture(scope="module")
def found(chain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run folder with the evaluation of all stages, and what it says."""
    run_dir = tmp_path_factory.mktemp("run")
    return run_dir, evaluate(run_dir, chain, FULL)


def test_perplexities_are_those_of_the_losses_that_the_stages_report(
    chain: dict[str, Path], found: tuple[Path, dict[str, Any]]
) -> None:
    """All held-out rows take part here: they are the ones that the stages held out."""
    models = found[1]["models"]
    of_pretrain, of_sft = (Artifact(chain[stage]).manifest["metrics"] for stage in ("pretrain", "sft"))
    assert models["base"]["text_perplexity"] == pytest.approx(math.exp(of_pretrain["val_loss"]), rel=1e-4)
    assert models["sft"]["response_perplexity"] == pytest.approx(math.exp(of_sft["eval_loss"]), rel=1e-4)
    assert models["base"]["response_perplexity"] == pytest.approx(math.exp(of_sft["base_eval_loss"]), rel=1e-4)
    assert len({figures["num_text_tokens"] for figures in models.values()}) == 1
    sft = models["sft"]
    rows = read_demonstrations(Source.model_validate(TINY["sft"]["data"])).rows
    held_out = split_by_prompt(rows, lambda row: prompt_key(row.prompt), 0.1)[1]
    size = sum(len(row.response.encode()) for row in held_out)
    bits = math.log2(sft["response_perplexity"]) * sft["num_response_tokens"] / size
    assert sft["response_bits_per_byte"] == pytest.approx(bits, rel=0.05)  # the template's space before an answer


def test_every_figure_is_there_and_they_fit_together(found: tuple[Path, dict[str, Any]]) -> None:
    run_dir, figures = found
    assert json.loads((run_dir / "evaluation.json").read_text()) == figures
    assert read_figures(run_dir) == figures
    assert list(figures["models"]) == ["base", "sft", "ppo"]
    assert figures["settings"]["num_prompts"] == 5
    assert figures["reward_model"] == "reward"  # as its folder is called here
    assert [(pair["one"], pair["other"], pair["by"]) for pair in figures["pairs"]] == [
        (one, other, by)
        for one, other in (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))
        for by in ("score", "judge")
    ]
    for pair in figures["pairs"]:
        assert pair["wins"] + pair["ties"] + pair["losses"] == 10
        assert pair["win_rate"] == (pair["wins"] + pair["ties"] / 2) / 10
        assert pair["interval"][0] <= pair["win_rate"] <= pair["interval"][1]
    assert figures["models"]["sft"]["kl"] == 0
    assert figures["models"]["ppo"]["kl"] != 0
    assert [row["n"] for row in figures["best_of_n"]] == [1, 2, 4]
    scores = [row["score"] for row in figures["best_of_n"]]
    assert scores == sorted(scores)


def test_the_best_are_chosen_of_the_answers_that_were_given_and_of_more(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sampled twice, and what is sampled in addition are other answers."""
    drawn: list[list[list[Answer]]] = []

    def watch(*given: Any, **named: Any) -> list[list[Answer]]:
        drawn.append(answers(*given, **named))
        return drawn[-1]

    monkeypatch.setattr(bench, "answers", watch)
    said: list[str] = []
    told = evaluate(tmp_path, chain, FULL, said.append)
    assert [len(rows[0]) for rows in drawn] == [2, 2, 2, 2]  # sft, base, ppo and two more of sft
    assert drawn[3] != drawn[0]
    scores = [[answer.score for answer in [*one, *more]] for one, more in zip(drawn[0], drawn[3], strict=True)]
    assert [row["score"] for row in told["best_of_n"]] == [row["score"] for row in statistics.best_of_n_curve(scores)]
    assert "ppo: 0 of 10 answers" in said
    assert "sft: the best of 4: 0 of 10 answers" in said
    drawn.clear()
    fewer = evaluate(tmp_path, chain, FULL.model_copy(update={"best_of": 1}))
    assert len(drawn) == 3
    assert fewer["best_of_n"][0]["score"] == pytest.approx(sum(row[0].score or 0.0 for row in drawn[0]) / 5)


def test_a_disk_that_is_full_is_said_and_leaves_what_was_there(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, done = cheap(None), {"pretrain": chain["pretrain"]}
    evaluate(tmp_path, done, asked)
    before = (tmp_path / "evaluation.json").read_bytes()

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlhf.stages.evaluation.evaluate.replace_text", full)
    with pytest.raises(EvaluationFailed, match=r"evaluation\.json cannot be written there: No space left on device"):
        evaluate(tmp_path, done, asked)
    assert (tmp_path / "evaluation.json").read_bytes() == before


def test_answers_lie_side_by_side(chain: dict[str, Path], found: tuple[Path, dict[str, Any]]) -> None:
    rows = read_answers(found[0], found[1]["answers_digest"])
    assert rows == [json.loads(line) for line in (found[0] / "evaluation.jsonl").read_text().split("\n") if line]
    assert len(rows) == 5
    samples = (chain["ppo"] / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {json.loads(line)["prompt"] for line in samples}
    for row in rows:
        assert row["prompt"] in prompts  # which PPO held out
        for part in ("answers", "scores", "qualities", "lengths"):
            assert list(row[part]) == ["base", "sft", "ppo"]


def test_two_models_that_are_one_give_the_same_answers(tmp_path: Path, tokenizer: Any) -> None:
    """PPO that learned nothing: the seeds are the same for every model."""
    given = model_folders(tmp_path, tokenizer)
    run_ppo(tmp_path / "ppo", given, learning_rate=0.0, num_iterations=1)
    told = evaluate(tmp_path, {"ppo": tmp_path / "ppo"}, EvaluationSettings(num_prompts=4, best_of=0))
    assert told["models"]["sft"]["model"] == given["model"]
    assert [told["models"]["ppo"][name] for name in ("kl", "kl_interval")] == [0, [0, 0]]
    (pair,) = told["pairs"]
    assert (pair["wins"], pair["ties"], pair["losses"], pair["win_rate"]) == (0, 16, 0, 0.5)
    rows = read_answers(tmp_path, told["answers_digest"])
    assert rows
    assert all(row["answers"]["ppo"] == row["answers"]["sft"] for row in rows)
    assert told["best_of_n"] is None
    assert told["models"]["ppo"]["text_perplexity"] is None


@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        ({"layout": "adapters", "lora": {"r": 2, "alpha": 4}}, "reward"),
        ({"layout": "shared_trunk"}, "reward"),
        ({"reward_model": None, "rewards": [{"function": f"{__name__}:num_letters"}]}, f"{__name__}:num_letters"),
    ],
)
def test_any_ppo_is_held_against_its_sft(tmp_path: Path, tokenizer: Any, fields: dict[str, Any], reward: str) -> None:
    """Whatever it was trained as and paid by, its model is whole and has the tokenizer of what it started from."""
    given = model_folders(tmp_path, tokenizer)
    run_ppo(tmp_path / "ppo", given | fields, num_iterations=1)
    told = evaluate(tmp_path, {"ppo": tmp_path / "ppo"}, EvaluationSettings(num_prompts=2, num_samples=1, best_of=2))
    assert told["reward_model"].endswith(reward)
    assert [told["models"][name]["score"] is not None for name in ("sft", "ppo")] == [True, True]
    assert told["models"]["ppo"]["kl"] is not None
    assert [row["n"] for row in told["best_of_n"]] == [1, 2]
    assert read_figures(tmp_path) == told


def num_letters(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def test_nothing_is_disturbed(chain: dict[str, Path], tmp_path: Path) -> None:
    """Neither sealed folders nor the random stream."""

    def digests() -> dict[str, str]:
        return {str(path): file_digest(path) for f in chain.values() for path in f.rglob("*") if path.is_file()}

    before, state = digests(), torch.get_rng_state()
    evaluate(tmp_path, chain, cheap(JUDGE))
    assert digests() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", "evaluation.jsonl"]


def test_the_cheap_form_keeps_what_it_has_measured(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    class Watched(bench.Speaker):
        def __init__(self, reference: str, *others: Any) -> None:
            loaded.append(Path(reference).parent.name)
            super().__init__(reference, *others)

    monkeypatch.setattr(bench, "Speaker", Watched)
    stages = {stage: chain[stage] for stage in ("pretrain", "sft")}
    first = evaluate(tmp_path, stages, cheap(JUDGE))
    assert sorted(loaded) == ["pretrain", "sft"]
    assert first["models"]["sft"]["score"] is None  # there is no reward model yet
    loaded.clear()
    assert evaluate(tmp_path, stages, cheap(JUDGE)) == first
    assert not loaded
    whole = evaluate(tmp_path, chain, cheap(JUDGE))  # other prompts, and scores: all answer, old perplexities stay
    assert sorted(loaded) == ["ppo", "pretrain", "sft"]
    for name in ("text_perplexity", "response_perplexity"):
        assert whole["models"]["sft"][name] == first["models"]["sft"][name]
    loaded.clear()
    (tmp_path / "evaluation.jsonl").write_text(
        ""
    )  # of another evaluation, whose figures a kill kept from being written
    assert evaluate(tmp_path, chain, cheap(JUDGE)) == whole
    assert sorted(loaded) == ["ppo", "pretrain", "sft"]


def test_a_run_has_what_its_stages_give(chain: dict[str, Path], tmp_path: Path) -> None:
    asked = cheap(None)
    base = evaluate(tmp_path, {"pretrain": chain["pretrain"]}, asked)
    assert list(base["models"]) == ["base"]
    assert base["models"]["base"]["text_perplexity"] > 1
    assert base["models"]["base"]["length"] is None
    assert (base["pairs"], base["best_of_n"], base["tasks"]) == ([], None, None)
    assert read_figures(tmp_path) == base  # what was not measured is null
    assert read_answers(tmp_path, base["answers_digest"]) == []
    scored = evaluate(tmp_path, {stage: chain[stage] for stage in ("sft", "reward")}, asked)
    assert list(scored["models"]) == ["base", "sft"]
    assert scored["models"]["sft"]["score"]["mean"] is not None
    assert [pair["by"] for pair in scored["pairs"]] == ["score"]
    with pytest.raises(RefusedError, match="no finished pretrain, sft or ppo stage here"):
        evaluate(tmp_path, {"reward": chain["reward"]}, asked)


def test_before_ppo_is_finished_answers_are_drawn_as_is_asked(chain: dict[str, Path], tmp_path: Path) -> None:
    """A finished ppo stage has its own say; no answer takes more than half of what SFT reads."""
    asked = cheap(None).model_copy(update={"max_new_tokens": 3, "temperature": 0.5})
    stages = {stage: chain[stage] for stage in ("pretrain", "sft")}
    told = evaluate(tmp_path, stages, asked)
    assert (told["settings"]["max_new_tokens"], told["settings"]["temperature"]) == (3, 0.5)
    assert told["models"]["sft"]["length"] <= 3
    of_ppo = read_settings(chain["ppo"], PPOSettings)
    told = evaluate(tmp_path, chain, asked)["settings"]
    assert (told["max_new_tokens"], told["temperature"]) == (of_ppo.max_new_tokens, of_ppo.temperature)
    half = read_settings(chain["sft"], SFTSettings).max_length // 2
    assert evaluate(tmp_path, stages, cheap(None))["settings"]["max_new_tokens"] == half


def test_sft_of_any_model_has_that_model_for_its_base(policy_folder: Path, tmp_path: Path) -> None:
    run_stage("sft", tmp_path / "sft", model=str(policy_folder), max_length=64, max_dropped=0.5)
    told = evaluate(tmp_path, {"sft": tmp_path / "sft"}, cheap(None))
    assert told["models"]["base"]["model"] == str(policy_folder)
    assert told["models"]["base"]["text_perplexity"] is None
    assert told["models"]["base"]["response_perplexity"] > told["models"]["sft"]["response_perplexity"]
    assert told["models"]["base"]["kl"] is not None


def test_text_that_is_no_longer_in_tokens_is_read_again_but_not_by_a_run(
    chain: dict[str, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "pretrain"
    shutil.copytree(chain["pretrain"], moved)
    known = evaluate(tmp_path, {"pretrain": chain["pretrain"]}, EvaluationSettings())
    again = evaluate(tmp_path, {"pretrain": moved}, EvaluationSettings())
    assert again["models"]["base"]["text_perplexity"] == known["models"]["base"]["text_perplexity"]
    assert evaluate(tmp_path, {"pretrain": moved}, cheap(None))["models"]["base"]["text_perplexity"] is None


def test_held_out_text_that_may_not_be_read_is_named(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "tokens/held_out.bin")

    monkeypatch.setattr(corpus, "held_out_blocks", forbidden)
    told = evaluate(tmp_path, {"pretrain": chain["pretrain"]}, cheap(None))
    assert told["left_out"] == [
        "tokens/held_out.bin: may not be read; change its mode; left out: the perplexity of text"
    ]


def test_numbers_that_are_none_are_null() -> None:
    assert finite({"a": [math.inf, 1.5], "b": math.nan, "c": "x"}) == {
        "a": [None, 1.5],
        "b": None,
        "c": "x",
    }


def test_tasks_without_the_harness_name_the_extra(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'rlhf-toolkit\[eval\]'"):
        evaluate(tmp_path, chain, cheap(None).model_copy(update={"tasks": ["mine"]}))
    assert not list(tmp_path.iterdir())


def test_tasks_are_run_on_the_model_of_every_stage(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for lm-eval: what it is asked, and what is taken of its answer."""
    calls: list[dict[str, Any]] = []

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        calls.append(options)
        return {"results": {"mine": {"alias": "mine", "acc,none": 0.25, "acc_stderr,none": "N/A"}}}

    manager = SimpleNamespace(all_tasks=["mine"])
    for name, content in {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": lambda include_path: manager},
    }.items():
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(content)
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: object())
    asked = cheap(None).model_copy(update={"tasks": ["mine"], "include_path": str(tmp_path)})
    told = evaluate(tmp_path, chain, asked)["tasks"]
    assert told == {name: {"mine": {"acc,none": 0.25}} for name in ("base", "sft", "ppo")}
    stages = ("pretrain", "sft", "ppo")
    assert [call["model_args"]["pretrained"] for call in calls] == [str(chain[stage] / "model") for stage in stages]
    for update, message in (
        ({"tasks": ["yours"]}, "lm-eval knows no such task"),
        ({"include_path": str(tmp_path / "nowhere")}, "no folder with tasks"),
    ):
        with pytest.raises(SettingsError, match=message):
            evaluate(tmp_path, chain, asked.model_copy(update=update))
