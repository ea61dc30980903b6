"""Memory runs out: what is said about it, and what `auto_microbatch` makes of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from reward_world import marked, policy_folder, rankings_file, run_reward, settings
from safetensors.torch import load_file
from stages_world import TINY, inputs, run_stage, without_clock
from test_train import Killed, at_step

from rlhf.data.errors import RefusedError
from rlhf.stages import entry, lora_layers, microbatches, out_of_memory
from rlhf.stages.artifact import Artifact
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.out_of_memory import OutOfMemory, at_once, is_out_of_memory, within_memory
from rlhf.stages.ppo import rollout
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.settings_file import write_settings

Chain = dict[str, Path]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(row) for row in Artifact(folder).metrics]


def assert_same(one: Path, other: Path) -> None:
    """Equal weights bit for bit, equal rows of metrics."""
    ours, theirs = weights(one), weights(other)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert rows(one) == rows(other)


class SmallDevice:
    """Has memory for the gradients of so many texts."""

    def __init__(self, num_texts: int) -> None:
        self.num_texts, self.tried = num_texts, []
        forward = torch.nn.Embedding.forward

        def limited(embedding: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and ids.ndim == 2:
                self.tried.append(len(ids))
                if len(ids) > self.num_texts:
                    torch.rand(3)  # as dropout before it would have done
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return forward(embedding, ids)

        self.forward: Callable[..., torch.Tensor] = limited


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> SmallDevice:
    """All rows of a step are one microbatch there, if no setting cuts them."""
    device = SmallDevice(num_texts=10**6)
    monkeypatch.setattr(microbatches, "PASS_TOKENS", 10**6)
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda *arguments: device.forward(*arguments))
    return device


# --- what it is


def test_errors_of_memory_are_known_from_others() -> None:
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(2**60)  # which the CPU's allocator refuses at once
    assert is_out_of_memory(too_large.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("the log is out of memory for details"))
    refused = RefusedError("no language model in this folder")
    refused.__cause__ = too_large.value
    assert is_out_of_memory(refused)


def fail(small: SmallDevice, folder: Path, **fields: Any) -> str:
    """What a pretraining says that has no memory for a single row."""
    small.num_texts = 0
    with pytest.raises(OutOfMemory) as found:
        run_stage("pretrain", folder, **fields)
    return str(found.value)


def test_the_message_names_phase_sizes_memory_estimate_and_three_settings(small: SmallDevice, tmp_path: Path) -> None:
    said = fail(small, tmp_path / "pretrain")
    assert said.startswith("out of memory in the update of 4 rows × 33 tokens (microbatch_size: no limit); ")
    assert "this machine has " in said
    assert " free; this process took " in said
    # 320 · 16 embeddings; q, k, v, o, three matrices of the MLP and two norms; the last norm.
    number = 320 * 16 + 4 * 16 * 16 + 3 * 16 * 64 + 2 * 16 + 16
    assert f"{number:,} weights, {number:,} of them trained, with gradients and moments up to 0.00 GiB" in said
    assert said.endswith(
        "lower pretrain.microbatch_size, pretrain.gradient_checkpointing (true) or pretrain.block_size "
        "(CUDA out of memory. Tried to allocate 1.00 GiB.)"
    )


def test_settings_that_are_at_their_end_are_not_named(small: SmallDevice, tmp_path: Path) -> None:
    said = fail(small, tmp_path / "pretrain", microbatch_size=1)
    assert "lower pretrain.gradient_checkpointing (true), pretrain.block_size or pretrain.hidden_size" in said


@pytest.mark.parametrize(
    ("phase", "place", "words"),
    [
        ("loading", "rlhf.stages.ppo.train.load_roles", "ppo.layout (adapters), ppo.offload (true) or ppo.model"),
        (
            "sampling",
            "rlhf.stages.engines.static.StaticEngine.generate",
            "ppo.generation_batch_size, ppo.layout (adapters) or",
        ),
        ("the rollout of", "rlhf.stages.ppo.rollout.read_part", "ppo.microbatch_size, ppo.gradient_checkpointing"),
        ("scoring of", "rlhf.stages.ppo.rewards.ModelReward.forward", "ppo.microbatch_size, "),
        ("saving", "rlhf.stages.runtime.training_state.save", "ppo.layout (adapters), ppo.offload (true) or"),
    ],
)
def test_each_phase_of_ppo_is_named(
    chain: Chain, tmp_path: Path, phase: str, place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any, **_named: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(place, full)
    with pytest.raises(OutOfMemory, match=f"out of memory in {phase}") as found:
        run_stage("ppo", tmp_path / "ppo", **inputs("ppo", chain))
    assert f"lower {words}" in str(found.value)


def test_a_stage_by_hand_ends_with_the_message_code_1_and_the_traceback_in_its_log(
    small: SmallDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.num_texts = 0
    folder = tmp_path / "pretrain"
    write_settings(folder, PretrainSettings.load({**TINY["pretrain"], "report_to": []}, "pretrain"))
    monkeypatch.setattr(sys, "argv", ["stage", str(folder)])
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda self: None)
    with pytest.raises(SystemExit) as ended:
        entry.run_stage("pretrain")
    assert ended.value.code == 1
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert "out of memory in the update of 4 rows" in status["message"]
    assert "lower pretrain.microbatch_size" in capsys.readouterr().err
    log = (folder / "error.log").read_text()
    assert "in limited" in log
    assert "OutOfMemoryError: CUDA out of memory" in log


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("rlhf.stages.pretrain.train.prepare", broken)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        run_stage("pretrain", tmp_path / "pretrain")


# --- auto_microbatch


def test_without_being_asked_for_nothing_is_tried_again(small: SmallDevice, tmp_path: Path) -> None:
    small.num_texts = 2
    with pytest.raises(OutOfMemory):
        run_stage("pretrain", tmp_path / "pretrain")
    assert small.tried == [4]


@pytest.mark.parametrize(
    ("stage", "num_texts", "size", "tried"),
    [("pretrain", 2, 2, [4, 2, 2]), ("sft", 3, 2, [10, 5, 2, 2])],
)
def test_it_comes_to_a_size_that_fits_and_the_result_is_as_if_it_had_been_set(
    chain: Chain, small: SmallDevice, tmp_path: Path, stage: str, num_texts: int, size: int, tried: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Dropout draws from the random stream, which has to be where it was before the pass that failed."""
    fields: dict[str, Any] = {"dropout": 0.1} if stage == "pretrain" else {}
    fields |= inputs(stage, chain)
    small.num_texts = num_texts
    metrics = run_stage(stage, tmp_path / "auto", auto_microbatch=True, **fields)
    assert small.tried[: len(tried)] == tried
    assert metrics["microbatch_size"] == size
    assert Artifact(tmp_path / "auto").manifest["metrics"]["microbatch_size"] == size
    said = capsys.readouterr().out
    assert f"{stage}: out of memory in the update of {tried[0]} rows × " in said
    assert f"microbatch_size {tried[0]} → {tried[1]}, the global batch stays as it is" in said
    run_stage(stage, tmp_path / "set", microbatch_size=size, **fields)
    assert_same(tmp_path / "auto", tmp_path / "set")
    assert Artifact(tmp_path / "auto").manifest["key"] == Artifact(tmp_path / "set").manifest["key"]


def test_where_tokens_bound_a_pass_half_the_rows_that_were_in_it_are_tried_next(
    chain: Chain, small: SmallDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.num_texts = 1
    run_stage("sft", tmp_path / "sft", auto_microbatch=True, microbatch_tokens=400, **inputs("sft", chain))
    first = small.tried[0]
    assert 1 < first < 10  # of ten that are its share
    assert f"microbatch_size {first} → {first // 2}, the global batch" in capsys.readouterr().out


def test_rows_in_a_pack_are_told_as_what_they_are() -> None:
    out_of_memory.doing("the update", torch.zeros(1, 512), 7)
    assert out_of_memory._where() == "the update of 7 rows packed into 512 tokens"


def test_the_reward_model_reads_fewer_prompts_at_a_time(small: SmallDevice, tmp_path: Path) -> None:
    given = {"model": policy_folder(tmp_path), "data": rankings_file(tmp_path / "rows.jsonl", marked(48))}
    small.num_texts = 8  # two prompts of four answers
    metrics = run_reward(tmp_path / "auto", **given, auto_microbatch=True)
    assert small.tried[:3] == [32, 16, 8]
    assert metrics["microbatch_size"] == 2
    run_reward(tmp_path / "set", **given, microbatch_size=2)
    assert_same(tmp_path / "auto", tmp_path / "set")


def test_ppo_reads_its_rollouts_and_updates_in_smaller_pieces(
    chain: Chain, small: SmallDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation is the first to run out of memory: nothing has been read in larger pieces before."""
    small.num_texts, read, read_part = 2, list[int](), rollout.read_part

    def limited(policy: Any, reference: Any, critic: Any, input_ids: torch.Tensor, *more: Any) -> Any:
        read.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError
        return read_part(policy, reference, critic, input_ids, *more)

    monkeypatch.setattr(rollout, "read_part", limited)
    metrics = run_stage("ppo", tmp_path / "auto", auto_microbatch=True, **inputs("ppo", chain))
    assert metrics["microbatch_size"] == 2
    assert sorted(read, reverse=True)[:3] == [8, 4, 2]
    run_stage("ppo", tmp_path / "set", microbatch_size=2, **inputs("ppo", chain))
    assert_same(tmp_path / "auto", tmp_path / "set")


def test_an_update_of_ppo_that_does_not_fit_is_made_in_smaller_pieces(
    chain: Chain, small: SmallDevice, tmp_path: Path
) -> None:
    """The rollout before it was read as a whole, which rounds another way."""
    fields = {"num_iterations": 1, "target_kl": 1.0, **inputs("ppo", chain)}
    small.num_texts = 1
    metrics = run_stage("ppo", tmp_path / "auto", auto_microbatch=True, **fields)
    assert metrics["microbatch_size"] == 1
    assert small.tried[:4] == [4, 2, 1, 1]
    run_stage("ppo", tmp_path / "set", microbatch_size=1, **fields)
    ours, theirs = weights(tmp_path / "auto"), weights(tmp_path / "set")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def limit_slots(monkeypatch: pytest.MonkeyPatch, num_slots: int) -> list[int]:
    """Let the engine have memory for so many slots; how many it tried."""
    tried, generate = list[int](), StaticEngine.generate

    def limited(engine: StaticEngine, prompts: list[list[int]], *law: Any) -> Any:
        tried.append(min(engine.batch_size or len(prompts), len(prompts)))
        if tried[-1] > num_slots:
            torch.rand(3)  # as the first draws of tokens would have done
            raise torch.OutOfMemoryError
        return generate(engine, prompts, *law)

    monkeypatch.setattr(StaticEngine, "generate", limited)
    return tried


def test_where_sampling_does_not_fit_ppo_samples_fewer_at_a_time_and_reads_as_many(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"num_iterations": 2, **inputs("ppo", chain)}
    tried = limit_slots(monkeypatch, 3)
    metrics = run_stage("ppo", tmp_path / "auto", auto_microbatch=True, **fields)
    assert tried[:4] == [8, 4, 2, 2]
    assert set(tried[2:]) == {2}
    assert metrics["generation_batch_size"] == 2
    assert "microbatch_size" not in metrics
    said = capsys.readouterr().out
    assert "ppo: out of memory in sampling: generation_batch_size 8 → 4, the global batch stays as it is" in said
    run_stage("ppo", tmp_path / "set", generation_batch_size=2, **fields)
    assert_same(tmp_path / "auto", tmp_path / "set")


def test_where_not_one_answer_can_be_sampled_it_gives_up_with_the_message(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_slots(monkeypatch, 0)
    to_lower = r"lower ppo\.layout \(adapters\), ppo\.offload \(true\) or ppo\.max_new_tokens"
    with pytest.raises(OutOfMemory, match=rf"in sampling \(generation_batch_size: 1\); .*; {to_lower}"):
        run_stage("ppo", tmp_path / "ppo", auto_microbatch=True, **inputs("ppo", chain))


def test_how_much_is_done_at_a_time_is_the_setting_or_what_it_came_down_to() -> None:
    run: Any = SimpleNamespace(settings=SimpleNamespace(generation_batch_size=6, microbatch_size=None), state={})
    assert (at_once(run, "generation_batch_size"), at_once(run, "microbatch_size")) == (6, None)
    run.state |= {"generation_batch_size": 3, "microbatch_size": 2}
    assert (at_once(run, "generation_batch_size"), at_once(run, "microbatch_size")) == (3, 2)


@pytest.mark.parametrize("stage", ["pretrain", "sft", "ppo"])
def test_at_one_row_it_gives_up_with_the_message(chain: Chain, small: SmallDevice, tmp_path: Path, stage: str) -> None:
    small.num_texts = 0
    limits = r"\(microbatch_size: 1(, microbatch_tokens: 16384)?\)"
    with pytest.raises(OutOfMemory, match=rf"the update of 1 rows .*{limits}.*; lower {stage}\."):
        run_stage(stage, tmp_path / stage, auto_microbatch=True, **inputs(stage, chain))


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_a_resumed_run_starts_with_the_size_that_fitted(
    chain: Chain, small: SmallDevice, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise Killed

    fields = {"auto_microbatch": True, **inputs(stage, chain)}
    small.num_texts = 2
    with monkeypatch.context() as patch:
        at_step(patch, 3, die)
        with pytest.raises(Killed):
            run_stage(stage, tmp_path / stage, **fields)
    small.tried.clear()
    assert run_stage(stage, tmp_path / stage, **fields)["microbatch_size"] == 2
    assert set(small.tried) == {2}


def test_sft_makes_the_step_that_did_not_fit_again_in_smaller_pieces(
    chain: Chain, small: SmallDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = small.forward

    def later(*arguments: Any) -> torch.Tensor:
        small.num_texts = 5 if len(small.tried) >= 3 else 10**6  # step 4 does not fit any more
        return forward(*arguments)

    small.forward = later
    metrics = run_stage("sft", tmp_path / "sft", auto_microbatch=True, **inputs("sft", chain))
    assert metrics["microbatch_size"] == 5
    assert small.tried[:6] == [10, 10, 10, 10, 5, 5]
    said = capsys.readouterr().out
    assert "microbatch_size 10 → 5" in said
    assert "resuming" not in said
    assert [row["step"] for row in rows(tmp_path / "sft") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_what_the_pass_that_failed_has_made_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = torch.nn.Linear(1, 1), []
    said: list[str] = []
    run: Any = SimpleNamespace(
        settings=settings(data="x", auto_microbatch=True), state={}, device=torch.device("cpu"), say=said.append,
        microbatch_size=None,
    )  # fmt: skip

    def make() -> float:
        seen.append((model.weight.grad, torch.rand(1).item()))
        model(torch.ones(1, 1)).sum().backward()
        if len(seen) == 1:
            raise torch.OutOfMemoryError
        return 1.0

    let_go: list[Any] = []
    monkeypatch.setattr(lora_layers, "forget", let_go.append)
    assert within_memory(run, 6, make, model) == 1.0
    assert let_go == [model]
    assert [grad for grad, _ in seen] == [None, None]
    assert seen[0][1] == seen[1][1]
    assert run.state == {"microbatch_size": 3}
