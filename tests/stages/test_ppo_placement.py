"""Reference and reward models on a second GPU: the same results, from a thread of their own."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from estimate_world import case, ppo_settings, shape
from layouts_world import rows
from ppo_world import model_folders, run_ppo, settings
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages import budget_ppo
from rlhf.stages.evaluation.config import cheap
from rlhf.stages.evaluation.evaluate import evaluate
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo import placement
from rlhf.stages.ppo.placement import begun, second_gpu
from rlhf.stages.ppo.reward_models import ModelReward

CPU = torch.device("cpu")
asked: list[bool] = []
"""Whether the main thread asked the function, each time."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second GPU, which is the CPU."""
    monkeypatch.setattr(placement, "second_gpu", lambda run: CPU)


def number(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward function."""
    asked.append(in_main())
    return [float(len(response)) for response in responses]


def in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.usefixtures("second")
def test_a_second_gpu_changes_no_result(given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference and reward model read in a thread, policy and functions do not: those may want signals."""
    readers: dict[str, set[bool]] = {"policy": set(), "reference": set(), "reward": set()}
    read, score = PolicyModel.forward, ModelReward.forward

    def watch(self: PolicyModel, *arguments: Any, **options: Any) -> Any:
        frozen = not any(weight.requires_grad for weight in self.parameters())
        readers["reference" if frozen else "policy"].add(in_main())
        return read(self, *arguments, **options)

    def watch_score(self: ModelReward, *arguments: Any) -> Any:
        readers["reward"].add(in_main())
        return score(self, *arguments)

    fields = {"rewards": [{"function": f"{__name__}:number", "weight": 0.1}], "num_iterations": 2, "microbatch_size": 3}
    run_ppo(tmp_path / "together", given, **fields)
    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(PolicyModel, "forward", watch)
        patch.setattr(ModelReward, "forward", watch_score)
        run_ppo(tmp_path / "apart", given, placement="second_gpu", **fields)
    assert readers == {"policy": {True}, "reference": {False}, "reward": {False}}
    assert asked
    assert all(asked)
    assert rows(tmp_path / "apart") == rows(tmp_path / "together")
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("apart", "together"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    monkeypatch.setattr(placement, "second_gpu", second_gpu)
    apart, together = (evaluate(tmp_path, {"ppo": tmp_path / name}, cheap(None)) for name in ("apart", "together"))
    assert apart["models"]["ppo"]["score"] == together["models"]["ppo"]["score"]  # on any machine
    assert apart["pairs"] == together["pairs"]


@pytest.mark.usefixtures("second")
def test_it_goes_together_with_sampling_ahead(given: dict[str, str], tmp_path: Path) -> None:
    ahead: dict[str, Any] = {"num_iterations": 2, "rollout": {"one_step_off": True}}
    for name in ("together", "second_gpu"):
        run_ppo(tmp_path / name, given, placement=name, **ahead)
    assert rows(tmp_path / "second_gpu") == rows(tmp_path / "together")


@pytest.mark.usefixtures("second")
def test_a_reward_model_that_fails_over_there_is_named(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = ModelReward.forward
    monkeypatch.setattr(ModelReward, "forward", lambda *arguments: score(*arguments) * float("nan"))
    with pytest.raises(ValueError, match="reward reward_model: gave nan"):
        run_ppo(tmp_path / "ppo", given, placement="second_gpu")


def test_the_callers_autocast_and_settings_of_the_compiler_hold_in_the_thread_and_no_gradients() -> None:
    weight = torch.ones(2, 2, requires_grad=True)

    def product() -> torch.Tensor:
        return weight @ weight

    with torch.autocast("cpu", torch.bfloat16):
        found = begun(product, CPU).result()
    assert (found.dtype, found.requires_grad) == (torch.bfloat16, False)
    assert begun(product, CPU).result().dtype == torch.float32
    with torch._dynamo.config.patch(recompile_limit=77):
        assert begun(lambda: torch._dynamo.config.recompile_limit, CPU).result() == 77


# --- which GPU, and where there is none


def process(rank: int, device: str = "cuda") -> Any:
    """One of two on this machine."""
    return SimpleNamespace(
        num_processes=2, device=torch.device(device), accelerator=SimpleNamespace(local_process_index=rank)
    )


def test_of_two_processes_the_scorers_are_on_the_third_and_fourth_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [second_gpu(process(rank)) for rank in (0, 1)] == [torch.device("cuda", 2), torch.device("cuda", 3)]


def test_of_four_processes_on_two_machines_each_machine_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert second_gpu(process(0)) == torch.device("cuda", 1)


def test_gpus_that_are_not_there_are_refused_with_their_number(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RefusedError, match="two GPUs for each process, 2 for the 1 on this machine, and 0 are seen "
                       r"\(the run is on cpu\); use fewer processes, or leave it out"):  # fmt: skip
        run_ppo(tmp_path / "ppo", given, placement="second_gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(RefusedError, match="4 for the 2 on this machine, and 3 are seen; use"):
        second_gpu(process(0))


@pytest.mark.parametrize(("fields", "message"), [
    ({"layout": "adapters"}, "placement is not possible in layout adapters, whose roles share one base"),
    ({"offload": True}, "offload has no effect with placement: second_gpu"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(placement="second_gpu", **fields)


def test_where_models_are_is_not_part_of_the_key() -> None:
    assert settings().result_settings() == settings(placement="second_gpu").result_settings()


def test_what_is_elsewhere_does_not_count_in_the_estimate_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_ppo, "traced", lambda *_: {name: {} for name in ("rollout", "scoring", "update")})
    with torch.device("meta"):
        frozen = LlamaForCausalLM(shape()), LlamaForSequenceClassification(shape()).model
    waiting = sum(4 * weight.numel() for model in frozen for weight in model.parameters())
    here, away = (budget_ppo.ppo(ppo_settings(placement=name), case()) for name in ("together", "second_gpu"))
    for before, after in zip(here, away, strict=True):
        assert (before.total - after.total) * 2**30 == pytest.approx(waiting, rel=0.01)
    assert away[1].flops == pytest.approx(here[1].flops / 2, rel=0.05)  # of four readers
