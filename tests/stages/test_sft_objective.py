"""However SFT reads its rows, a step learns from the same: the loss per response token over the global batch."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_world import make_world, rows, run_and_watch, weights
from safetensors.torch import load_file
from stages_world import inputs, run_stage, tiny_policy

from rlhf.data.collate import labels, pad_right
from rlhf.data.tokens import Encoded
from rlhf.stages.sft import objective, trainer
from rlhf.stages.sft.objective import Reading, num_targets

ROWS = [Encoded([5, 6, 7, 8], 2), Encoded([9, 10, 11, 12, 13, 14, 15], 3), Encoded([16, 17], 0), Encoded([18, 0], 1)]
CPU = torch.device("cpu")
Chain = dict[str, Path]


def reading(model: Any, packed: bool) -> Reading:
    return Reading(model, 7, 0, CPU, "no", nullcontext(), packing=packed)


def test_a_padded_passage_by_hand() -> None:
    found = reading(tiny_policy(), packed=False).passage(ROWS[:2])
    assert found.ids.tolist() == [[5, 6, 7, 8, 0, 0, 0], [9, 10, 11, 12, 13, 14, 15]]
    assert found.targets.tolist() == [7, 8, 12, 13, 14, 15]
    assert found.places.tolist() == [1, 2, 9, 10, 11, 12]  # the state before each of them
    assert found.num_tokens == 11


def test_a_packed_passage_by_hand() -> None:
    found = reading(tiny_policy(), packed=True).passage(ROWS[:3])
    assert found.packed is not None
    assert found.ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
    assert found.packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1]]
    assert found.packed.borders.tolist() == [0, 4, 11, 13]
    assert found.targets.tolist() == [7, 8, 12, 13, 14, 15, 17]  # nothing judges a text's first token
    assert found.places.tolist() == [1, 2, 6, 7, 8, 9, 11]
    assert [num_targets(row) for row in ROWS] == [2, 4, 1, 1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_loss_and_gradients_are_those_of_the_models_own_loss(shape: str, packed: bool) -> None:
    ours, theirs = tiny_policy(shape), tiny_policy(shape)
    ids, mask = pad_right([row.input_ids for row in ROWS], 0)
    expected = theirs(input_ids=ids, attention_mask=mask.long(), labels=labels(ROWS)).loss  # a mean over 8 tokens
    expected.backward()
    read = reading(ours, packed)
    assert (read.straight, read.packed) == (True, packed)
    for cut in read.cut(ROWS, max_rows=3, max_tokens=2**14):
        loss, _ = read.losses(ours, read.passage([ROWS[i] for i in cut]))
        (loss / 8).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_rows_of_like_length_share_a_pass_and_packs_are_as_few_as_hold_them() -> None:
    rows = [Encoded([1] * length, 1) for length in (300, 10, 290, 12, 11)]
    assert reading(tiny_policy(), packed=False).cut(rows, None, 2**14) == [[0, 2], [3, 4, 1]]
    assert reading(tiny_policy(), packed=True).cut(rows, None, 320) == [[0, 4], [2, 3, 1]]  # 311 tokens and 312


def figures(folder: Path) -> list[list[float]]:
    names = ("loss", "mean_token_accuracy", "grad_norm")
    return [[row[name] for name in names] for row in rows(folder) if "loss" in row]


def same(one: Path, other: Path) -> None:
    for ours, theirs in zip(figures(one), figures(other), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    tensors = load_file(other / "model" / "model.safetensors")
    for name, tensor in load_file(one / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=2e-4)


def test_packed_the_stage_learns_the_same_also_when_it_recomputes_activations(chain: Chain, tmp_path: Path) -> None:
    options = {"args": {"activation_checkpointing": True}, "packing": True, "microbatch_tokens": 300}
    run_stage("sft", tmp_path / "sft", **options, **inputs("sft", chain))
    same(tmp_path / "sft", chain["sft"])
    assert "rlhf_causal" not in (tmp_path / "sft" / "model" / "config.json").read_text()


def test_with_the_trainers_own_loss_the_stage_learns_the_same(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "takes_logits_straight", lambda _: False)
    monkeypatch.setattr(trainer, "give_losses", lambda *_: None)  # nobody asks the model for them
    metrics = run_stage("sft", tmp_path / "sft", **inputs("sft", chain))
    same(tmp_path / "sft", chain["sft"])
    assert figures(chain["sft"])[0][0] == pytest.approx(metrics["base_eval_loss"], abs=0.1)


def test_other_kinds_of_loss_are_the_trainers(chain: Chain, tmp_path: Path) -> None:
    run_stage("sft", tmp_path / "sft", args={"loss_type": "dft"}, **inputs("sft", chain))
    assert figures(tmp_path / "sft")[0][0] < 0.5 * figures(chain["sft"])[0][0]  # each token weighs by its probability


def test_tokens_bound_a_pass_with_the_trainers_loss_too(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has as many rows as fit if all were as long as the longest, here of less than 128 tokens."""
    read: list[int] = []

    def note(_: str, ids: torch.Tensor, num_rows: int) -> None:
        read.append(num_rows)

    monkeypatch.setattr(trainer, "doing", note)
    run_stage("sft", tmp_path / "sft", args={"loss_type": "dft"}, microbatch_tokens=256, **inputs("sft", chain))
    assert max(read) == 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return make_world(tmp_path_factory.mktemp("world"), "gpt2", dropout=0.2)


@pytest.mark.parametrize("options", [{"packing": True}, {"args": {"loss_type": "dft"}}])
def test_packed_or_with_the_trainers_loss_it_goes_on_bit_for_bit(
    world: dict[str, dict[str, Any]], tmp_path: Path, options: dict[str, Any]
) -> None:
    fields = world["sft"] | options
    taken = run_and_watch("sft", tmp_path / "straight", fields)
    run_and_watch("sft", tmp_path / "broken", fields, 7)
    assert run_and_watch("sft", tmp_path / "broken", fields) == taken[7:]
    assert weights(tmp_path / "broken") == weights(tmp_path / "straight")
    assert rows(tmp_path / "broken") == rows(tmp_path / "straight")
