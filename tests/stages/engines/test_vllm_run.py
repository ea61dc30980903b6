"""PPO whose responses come from a server: the whole stage, against one that speaks vLLM's protocol."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeServer, serving
from ppo_world import model_folders, run_ppo
from stages_world import tiny_policy

from rlhf.stages import adapters
from rlhf.stages.artifact import Artifact
from rlhf.stages.ppo import train as train_module
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import Targets, targets
from rlhf.stages.ppo.update import Updater

SHIFT = 0.05
"""What the server's log-probabilities are too low by."""


class Finished:
    """A stage of two iterations, what it learned from, and its policy's weights after every update."""

    def __init__(self, root: Path, tokenizer: Any, one_step_off: bool = False, **fields: Any) -> None:
        self.learned: list[tuple[Rollout, torch.Tensor, float, PPOSettings, Targets]] = []
        self.updated: list[dict[str, torch.Tensor]] = []
        self.folder = root / "ppo"
        given = model_folders(root, tokenizer)
        update = Updater.__call__

        def shaping(*arguments: Any) -> Targets:
            self.learned.append((*arguments, targets(*arguments)))
            return self.learned[-1][-1]

        def updating(updater: Updater, *arguments: Any) -> Any:
            stats = update(updater, *arguments)
            policy = updater.run.unwrap(updater.policy).model
            self.updated.append({name: x.detach().clone() for name, x in whole(policy).items()})
            return stats

        with serving(tiny_policy(seed=9)) as self.server, pytest.MonkeyPatch.context() as patch:
            self.server.spoil = shifted
            patch.setattr(train_module, "targets", shaping)
            patch.setattr(Updater, "__call__", updating)
            rollout = {"engine": "vllm", "server_url": self.server.url, "one_step_off": one_step_off}
            self.metrics = run_ppo(self.folder, given, num_iterations=2, rollout=rollout, precision="fp32", **fields)


def whole(policy: Any) -> dict[str, torch.Tensor]:
    """The policy's weights by their names in a checkpoint, adapters merged by PEFT."""
    merged = adapters.shared_copy(policy)
    for name, module in list(merged.named_modules()):
        if hasattr(module, "get_delta_weight"):
            layer = module.get_base_layer()
            layer.weight = torch.nn.Parameter(layer.weight + module.get_delta_weight("default"))
            merged.set_submodule(name, layer)
    return dict(merged.named_parameters())


def shifted(answer: dict[str, Any]) -> dict[str, Any]:
    for choice in answer["choices"]:
        found = choice["logprobs"]["token_logprobs"]
        choice["logprobs"]["token_logprobs"] = [logprob - SHIFT for logprob in found]
    return answer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Finished:
    return Finished(tmp_path_factory.mktemp("served"), tokenizer)


def assert_served(server: FakeServer, updated: list[dict[str, torch.Tensor]]) -> None:
    """The server got the start, once again after a state was looked for, and what each update made."""
    assert len(server.received) == 4
    assert len(updated) == 2
    for received, own in zip(server.received[2:], updated, strict=True):
        assert received.keys() == own.keys()
        for name in own:
            torch.testing.assert_close(received[name], own[name], rtol=0, atol=1e-7)
    assert any(not torch.equal(updated[0][name], updated[1][name]) for name in updated[0])


def test_a_whole_run_learns_from_a_server_that_has_its_weights_after_every_update(finished: Finished) -> None:
    assert Artifact(finished.folder).sealed
    assert_served(finished.server, finished.updated)
    rows = [row for row in Artifact(finished.folder).metrics if "sampler_gap" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["sampler_gap"] for row in rows] == pytest.approx([SHIFT] * 2, abs=1e-4)
    assert not any("weights" in path.name for path in finished.folder.iterdir())


def test_advantages_are_multiplied_by_the_trainers_probability_over_the_servers(finished: Finished) -> None:
    assert len(finished.learned) == 2
    for rollout, scores, kl_coef, chosen, learned in finished.learned:
        weighed = chosen.model_copy(update={"rollout": chosen.rollout.model_copy(update={"importance_cap": None})})
        plain = targets(rollout, scores, kl_coef, weighed)
        torch.testing.assert_close(learned.advantages, 1.05127 * plain.advantages, rtol=1e-4, atol=1e-6)  # e^0.05
        assert torch.equal(learned.returns, plain.returns)


def test_an_adapter_is_served_merged(tmp_path: Path, tokenizer: Any) -> None:
    finished = Finished(tmp_path, tokenizer, layout="adapters", lora={"r": 2, "alpha": 4})
    assert_served(finished.server, finished.updated)


def test_one_step_off_a_server_samples_from_the_policy_of_one_update_ago(tmp_path: Path, tokenizer: Any) -> None:
    """It gets the start for both rollouts (and twice before them), and for the evaluation what two updates made."""
    finished = Finished(tmp_path, tokenizer, one_step_off=True)
    start = dict(tiny_policy().named_parameters())
    *before, last = finished.server.received
    assert len(before) == 4
    for received, expected in [*((one, start) for one in before), (last, finished.updated[1])]:
        assert received.keys() == expected.keys()
        for name, tensor in received.items():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-7)
    gaps = [row["sampler_gap"] for row in Artifact(finished.folder).metrics]
    assert gaps[0] == pytest.approx(SHIFT, abs=1e-4)
    assert gaps[1] > 2 * SHIFT


def test_a_server_of_another_model_is_found_out_before_it_is_learned_from(tmp_path: Path, tokenizer: Any) -> None:
    with serving(tiny_policy(seed=9)) as server:
        server.answer, answer = (  # type: ignore[method-assign]
            lambda path, body: (200, {"success": True}) if path == "/reset_prefix_cache" else answer(path, body),
            server.answer,
        )  # it says that it took the weights, and goes on with its own
        with pytest.raises(RuntimeError, match="the engine samples from another law than the policy's"):
            run_ppo(
                tmp_path / "ppo", model_folders(tmp_path, tokenizer), num_iterations=1, precision="fp32",
                rollout={"engine": "vllm", "server_url": server.url},
            )  # fmt: skip
