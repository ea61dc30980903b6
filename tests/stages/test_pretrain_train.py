"""The pretrain stage as a whole: architectures, going on from a checkpoint, steps that are skipped, samples."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stages_world import byte_tokenizer, inputs, run_stage
from test_pretrain_settings import settings
from test_train import Chain, Killed, assert_same, at_step
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.data.collate import document_mask
from rlhf.data.errors import Diverged, RefusedError, SettingsError
from rlhf.stages.artifact import Artifact
from rlhf.stages.pretrain import train as stage
from rlhf.stages.pretrain.model import flops_per_token, make_model
from rlhf.stages.pretrain.objective import NextTokenLoss
from rlhf.stages.runtime import Runtime


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in Artifact(folder).metrics if "loss" in row}


@pytest.fixture
def bad_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of a run's loss, counted from 1, that give no number."""
    bad: list[int] = []
    forward = NextTokenLoss.forward

    def sometimes(self: Any, blocks: torch.Tensor, **more: Any) -> torch.Tensor:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        loss = forward(self, blocks, **more)
        return loss * float("nan") if self.num_calls in bad else loss

    monkeypatch.setattr(NextTokenLoss, "forward", sometimes)
    return bad


@pytest.mark.parametrize(
    "fields", [{"architecture": "gpt2"}, {"preset": "original"}, {"preset": "llama"}, {"optimizer": "muon"}]
)
def test_each_kind_learns_is_saved_and_generates_the_same_with_and_without_a_cache(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", tmp_path / "pretrain", num_steps=20, eval_every=20, **fields)
    curve = losses(tmp_path / "pretrain")
    assert curve[20] < curve[1] - 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrain" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pretrain" / "model")
    ids = tokenizer("The fox", return_tensors="pt")["input_ids"]
    with torch.random.fork_rng():
        texts = [model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*texts)


def test_a_decoder_of_our_own_goes_through_all_four_stages(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("pretrain", "sft", "reward", "ppo")}
    run_stage("pretrain", folders["pretrain"], preset="original", dropout=0.1)
    for name in ("sft", "reward", "ppo"):
        run_stage(name, folders[name], **inputs(name, folders))
    assert abs(Artifact(folders["ppo"]).metrics[0]["kl"]) < 1e-4
    assert AutoModelForCausalLM.from_pretrained(folders["ppo"] / "model").config.model_type == "rlhf_decoder"


def test_dropout_and_muon_resume_as_if_nothing_had_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"preset": "llama", "dropout": 0.2, "optimizer": "muon", "sample_prompts": ["The"], "sample_length": 4}
    run_stage("pretrain", tmp_path / "whole", **fields)

    def die() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, 5, die)
        with pytest.raises(Killed):
            run_stage("pretrain", tmp_path / "killed", **fields)
    run_stage("pretrain", tmp_path / "killed", **fields)
    assert (tmp_path / "killed" / "samples.jsonl").read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_samples_are_kept_and_change_nothing(chain: Chain, tmp_path: Path) -> None:
    run_stage("pretrain", tmp_path / "pretrain", sample_prompts=["The", "A"], sample_length=5)
    rows = [json.loads(line) for line in (tmp_path / "pretrain" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [(3, "The"), (3, "A"), (6, "The"), (6, "A")]
    assert same_weights(tmp_path / "pretrain", chain["pretrain"])


def test_it_says_how_many_of_the_held_out_tokens_the_loss_is_measured_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage("pretrain", tmp_path / "pretrain", block_size=10)
    told = re.search(r" (\d+) held out \(measured on (\d+) whole blocks of 10\)", capsys.readouterr().out)
    assert told is not None
    held_out, blocks = map(int, told.groups())
    assert blocks > 1
    assert 10 * blocks < held_out <= 10 * (blocks + 1)  # the first token is foretold from nothing


def test_training_goes_on_from_a_checkpoint_with_its_tokenizer(chain: Chain, tmp_path: Path) -> None:
    start = str(chain["pretrain"] / "model")
    # The shape is the model's, so nothing of a new one may be asked for.
    new = {"vocab_size": 32000, "hidden_size": 512, "num_layers": 8, "num_heads": 8, "context_length": 1024}
    metrics = run_stage("pretrain", tmp_path / "more", model=start, learning_rate=1e-9, **new)
    assert metrics["val_loss"] == pytest.approx(Artifact(chain["pretrain"]).manifest["metrics"]["val_loss"], abs=1e-4)
    manifests = [Artifact(folder).manifest for folder in (tmp_path / "more", chain["pretrain"])]
    assert manifests[0]["hand_over"] == manifests[1]["hand_over"]
    assert manifests[0]["inputs"] == {"model": Artifact(chain["pretrain"]).digest}
    with pytest.raises(SettingsError, match="hidden_size is of a new model, but model names one to train further"):
        run_stage("pretrain", tmp_path / "other", model=start, **{**new, "hidden_size": 16})


def test_a_step_without_numbers_is_skipped_and_told_of(
    tmp_path: Path, bad_steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    bad_steps += [3]
    metrics = run_stage("pretrain", tmp_path / "pretrain")
    assert (metrics["num_skipped"], metrics["rollbacks"]) == (1, [])
    assert sorted(losses(tmp_path / "pretrain")) == [1, 2, 4, 5, 6]
    assert "skipped step 3: loss nan" in capsys.readouterr().out
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "pretrain").values())


def test_a_skipped_step_moves_no_weight(tmp_path: Path, bad_steps: list[int]) -> None:
    bad_steps += [2]
    run_stage("pretrain", tmp_path / "two", num_steps=2, eval_every=2, optimizer="muon", schedule="constant")
    run_stage("pretrain", tmp_path / "one", num_steps=1, eval_every=1, optimizer="muon", schedule="constant")
    assert same_weights(tmp_path / "two", tmp_path / "one")


def test_after_skipped_steps_in_a_row_it_goes_back_and_on_with_other_data(
    tmp_path: Path, bad_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    batch = stage.optimise

    def watched(run: Any, loss_of: Any, optimizers: Any, blocks: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(int(blocks.sum()))
        return batch(run, loss_of, optimizers, blocks, *more)

    monkeypatch.setattr(stage, "optimise", watched)
    bad_steps += [5, 6]
    metrics = run_stage("pretrain", tmp_path / "pretrain", num_steps=8, max_skipped=2)  # a checkpoint is of step 4
    assert metrics["num_skipped"] == 2
    assert [r["to_step"] for r in metrics["rollbacks"]] == [4]
    assert "step 6: loss nan" in metrics["rollbacks"][0]["because"]
    assert len(seen) == 6 + 4  # steps 5 to 8 once more
    assert len(set(seen)) == 10
    assert sorted(losses(tmp_path / "pretrain")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_how_often_it_is_logged_changes_no_skipped_step_and_no_way_back(tmp_path: Path, bad_steps: list[int]) -> None:
    bad_steps += [3, 5, 6]
    run_stage("pretrain", tmp_path / "often", num_steps=8, max_skipped=2, save_every=4, eval_every=8)
    run_stage("pretrain", tmp_path / "rarely", num_steps=8, max_skipped=2, save_every=4, eval_every=8, log_every=8)
    assert Artifact(tmp_path / "rarely").manifest["metrics"]["num_skipped"] == 3
    assert same_weights(tmp_path / "often", tmp_path / "rarely")


def test_it_gives_up_after_so_many_times(tmp_path: Path, bad_steps: list[int]) -> None:
    bad_steps += range(5, 50)
    with pytest.raises(Diverged, match=r"loss nan.*after going back 2 times: .*lower pretrain\.learning_rate"):
        run_stage("pretrain", tmp_path / "pretrain", max_skipped=2, max_rollbacks=2)


def test_it_stops_when_the_validation_loss_no_longer_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([3.0, 2.0, 2.5, 2.4, 1.0])
    monkeypatch.setattr(stage, "validation_loss", lambda *_: next(found))
    metrics = run_stage("pretrain", tmp_path / "pretrain", num_steps=9, eval_every=1, early_stopping_patience=2)
    assert (metrics["val_loss"], metrics["best_step"]) == (2.0, 2)
    assert Artifact(tmp_path / "pretrain").metrics[-1]["step"] == 4


def test_a_batch_in_tokens_is_as_many_blocks_as_they_fill(chain: Chain, tmp_path: Path) -> None:
    run_stage("pretrain", tmp_path / "pretrain", global_batch_tokens=4 * 32 + 31)  # blocks of 32
    assert same_weights(tmp_path / "pretrain", chain["pretrain"])


def test_an_evaluation_reads_no_more_blocks_at_once_than_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, losses = set(), NextTokenLoss.losses

    def watched(self: Any, blocks: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.add(len(blocks))
        return losses(self, blocks, **more)

    monkeypatch.setattr(NextTokenLoss, "losses", watched)
    run_stage("pretrain", tmp_path / "pretrain", num_steps=2, global_batch_tokens=64)
    assert max(seen) == 2


def test_blocks_that_are_too_few_for_a_step_and_odd_are_refused_with_the_tokens_that_will_do(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    run = Runtime(settings(data=str(tmp_path / "text.txt"), global_batch_tokens=8192, report_to=[]), tmp_path)
    name, size, each = run.settings.global_batch(1024)
    run.num_processes = 2
    with pytest.raises(RefusedError, match=r"7 rows for a step of 8, .*; set pretrain\.global_batch_tokens=6144$"):
        run.batch_size(name, size, 7, each)
    run.close()


def test_documents_of_a_block_that_are_kept_apart_cost_what_they_cost_alone() -> None:
    torch.manual_seed(0)
    for fields in ({"architecture": "llama"}, {"architecture": "gpt2"}, {"preset": "llama"}, {"preset": "original"}):
        small = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "context_length": 32, "initializer_range": 0.3}
        loss_of = NextTokenLoss(make_model(settings(**fields, **small), byte_tokenizer()).eval())
        first, second = torch.randint(1, 260, (1, 6)), torch.randint(1, 260, (1, 9))
        first[0, -1] = 0  # eos
        both = torch.cat([first, second], dim=1)
        positions, mask = document_mask(both[:, :-1], 0)
        apart = loss_of(both, position_ids=positions, attention_mask=mask)
        # The second's first token is predicted from the first's eos, which sees all of the first.
        alone = loss_of(torch.cat([first, second[:, :1]], dim=1)) + loss_of(second)
        assert apart.item() == pytest.approx(alone.item(), rel=1e-5), fields
        assert loss_of(both).item() != pytest.approx(alone.item(), rel=1e-4), fields


def test_a_sample_prompt_without_room_to_go_on_is_refused_before_training(tmp_path: Path) -> None:
    for prompt in ("", "0123456789" * 12):
        with pytest.raises(SettingsError, match=r"sample_prompts.*positions"):
            run_stage("pretrain", tmp_path / f"{len(prompt)}", sample_prompts=[prompt])


def test_muon_rises_to_its_own_peak_under_the_schedule_of_2017() -> None:
    found = settings(schedule="noam", optimizer="muon", warmup_steps=100, num_steps=1000, muon_learning_rate=0.02)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0) for _ in range(2)]
    rates = [stage.set_learning_rates(optimizers, found, 64, step)["muon_learning_rate"] for step in (0, 99, 399)]
    assert rates == pytest.approx([0.0002, 0.02, 0.01])


def test_the_share_of_the_peak_counts_only_weights_that_are_multiplied_with() -> None:
    config = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "context_length": 16, "intermediate_size": 64}
    model = make_model(settings(**config, tie_embeddings=False), byte_tokenizer())
    embeddings = model.get_input_embeddings().weight.numel()
    expected = 6 * (model.num_parameters() - embeddings) + 12 * 1 * 32 * 16
    assert flops_per_token(model, 16) == expected


def test_activations_that_are_computed_again_change_no_weight(tmp_path: Path) -> None:
    for again in (False, True):
        run_stage("pretrain", tmp_path / str(again), gradient_checkpointing=again)
    assert same_weights(tmp_path / "False", tmp_path / "True")
