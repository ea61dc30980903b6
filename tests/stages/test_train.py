"""Each stage leaves a sealed folder that the next one loads, and an interruption leaves no trace in it."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from stages_world import TINY, inputs, run_stage, without_clock
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages import stopping
from rlhf.stages.artifact import STAGES, Artifact, refuse_finished
from rlhf.stages.checkpoints import newest_checkpoint
from rlhf.stages.disk import file_digest
from rlhf.stages.ppo import train as ppo_stage
from rlhf.stages.ppo.health import Finding, Health
from rlhf.stages.runtime import Runtime

Chain = dict[str, Path]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(row) for row in Artifact(folder).metrics]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_seals_a_model_that_transformers_loads(chain: Chain, stage: str) -> None:
    auto = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    model = auto.from_pretrained(chain[stage] / "model")
    tokenizer = AutoTokenizer.from_pretrained(chain[stage] / "model")
    assert (len(tokenizer), model.config.vocab_size) == (300, 320)  # a multiple of 64
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(chain["pretrain"] / "model").chat_template
    manifest = Artifact(chain[stage]).manifest
    assert all(file_digest(chain[stage] / name) == digest for name, digest in manifest["files"].items())
    assert not (chain[stage] / "checkpoints").exists()


def test_final_metrics_have_the_names_that_scripts_rely_on(chain: Chain) -> None:
    metrics = {stage: set(Artifact(chain[stage]).manifest["metrics"]) for stage in STAGES}
    assert {"val_loss", "vocab_size"} <= metrics["pretrain"]
    assert {"eval_loss", "base_eval_loss"} <= metrics["sft"]
    assert {"accuracy", "longer_wins_accuracy"} <= metrics["reward"]
    assert {"true_quality", "sft_true_quality", "win_rate", "kl", "eos_share", "sft_eos_share"} <= metrics["ppo"]


def test_an_input_is_known_in_the_next_manifest_by_its_digest(chain: Chain) -> None:
    assert Artifact(chain["ppo"]).manifest["inputs"] == {
        "model": Artifact(chain["sft"]).digest,
        "reward_model": Artifact(chain["reward"]).digest,
    }


def test_ppo_moves_policy_and_critic_and_leaves_its_inputs_alone(chain: Chain) -> None:
    tuned = load_file(chain["ppo"] / "model" / "model.safetensors")
    start = load_file(chain["sft"] / "model" / "model.safetensors")
    assert all(not torch.equal(tuned[name], start[name]) for name in start)
    critic = load_file(chain["ppo"] / "critic" / "model.safetensors")
    scorer = load_file(chain["reward"] / "model" / "model.safetensors")
    assert all(not torch.equal(critic[name], scorer[name]) for name in scorer)
    for stage in ("sft", "reward"):
        files = Artifact(chain[stage]).manifest["files"]
        assert all(file_digest(chain[stage] / name) == digest for name, digest in files.items())


def test_the_first_rollout_has_no_kl_and_a_ratio_near_one(chain: Chain) -> None:
    first = rows(chain["ppo"])[0]
    assert abs(first["kl"]) < 1e-4
    assert first["ratio"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_between_checkpoints_ends_as_if_nothing_had_happened(
    chain: Chain, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until_killed(stage, chain, tmp_path / stage, 3, monkeypatch)  # checkpoints are written every second step
    assert not Artifact(tmp_path / stage).sealed
    run_stage(stage, tmp_path / stage, **inputs(stage, chain))
    assert_same(tmp_path / stage, chain[stage])


@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_saves_the_state_and_the_stage_resumes_from_that_very_step(
    chain: Chain, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped) as stopped:
            run_stage(stage, tmp_path / stage, **inputs(stage, chain))
    assert stopped.value.code == 143
    status = json.loads((tmp_path / stage / "status.json").read_text())
    # SFT's trainer logs after the step's own stop check, so there the signal is seen one step later.
    assert (status["state"], status["step"]) == ("stopped", 4 if stage == "sft" else 3)
    run_stage(stage, tmp_path / stage, **inputs(stage, chain))
    assert f"resuming from step {status['step']} of " in capsys.readouterr().out
    assert_same(tmp_path / stage, chain[stage])


def test_a_half_written_checkpoint_is_passed_over(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_while_saving(self: Runtime, step: int) -> None:
        if step == 4:
            (self.folder / "checkpoints" / ".writing").mkdir()
            (self.folder / "checkpoints" / ".writing" / "model.safetensors").write_text("half")
            raise Killed
        save(self, step)

    save = Runtime.save
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "save", die_while_saving)
        with pytest.raises(Killed):
            run_stage("pretrain", tmp_path / "pretrain")
    found = newest_checkpoint(tmp_path / "pretrain")
    assert found is not None
    assert found.step == 2
    run_stage("pretrain", tmp_path / "pretrain")
    assert_same(tmp_path / "pretrain", chain["pretrain"])


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    chain: Chain, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tests/faults/test_cases.py it is one of the others that is cut, and these are damaged in other ways."""
    run_until_killed(stage, chain, tmp_path / stage, 5, monkeypatch)
    newest = sorted((tmp_path / stage / "checkpoints").glob("*-*4"))[-1]
    weights = next(newest.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    run_stage(stage, tmp_path / stage, **inputs(stage, chain))
    assert_same(tmp_path / stage, chain[stage])


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_diverges_fails_with_the_cure_and_seals_nothing(chain: Chain, stage: str, tmp_path: Path) -> None:
    fields = {"learning_rate": 1e30, "max_grad_norm": 1e9}
    with pytest.raises((RuntimeError, ValueError), match=rf"lower {stage}\.learning_rate|reward .*: gave nan"):
        run_stage(stage, tmp_path / stage, **fields, **inputs(stage, chain))
    assert not Artifact(tmp_path / stage).sealed


def test_the_best_checkpoint_by_validation_loss_is_kept_and_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def falls_then_rises(_run: Runtime, loss_of: Any, *_: Any) -> float:
        seen.append(loss_of.model.model.norm.weight.detach().clone())
        return [3.0, 1.0, 2.0][len(seen) - 1]

    monkeypatch.setattr("rlhf.stages.pretrain.train.validation_loss", falls_then_rises)
    metrics = run_stage("pretrain", tmp_path / "pretrain", eval_every=2)
    assert (metrics["val_loss"], metrics["best_step"]) == (1.0, 4)
    kept = load_file(tmp_path / "pretrain" / "model" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(kept, seen[1])
    assert not torch.equal(kept, seen[2])


def test_microbatches_change_nothing(chain: Chain, tmp_path: Path) -> None:
    for stage in STAGES:
        run_stage(stage, tmp_path / stage, microbatch_size=2, **inputs(stage, chain))
        ours, theirs = (load_file(f / "model" / "model.safetensors") for f in (tmp_path / stage, chain[stage]))
        for name, weights in theirs.items():
            assert torch.allclose(ours[name], weights, atol=2e-4), (stage, name)


def test_a_learning_rate_of_zero_keeps_policy_kl_and_ratio_where_they_were(chain: Chain, tmp_path: Path) -> None:
    run_stage("ppo", tmp_path / "ppo", learning_rate=0.0, temperature=0.7, **inputs("ppo", chain))
    for row in rows(tmp_path / "ppo"):
        if "ratio" in row:
            assert abs(row["kl"]) < 1e-4
            assert row["ratio"] == pytest.approx(1, abs=1e-5)
            assert row["clip_fraction"] == 0


def test_an_unhealthy_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, rows_seen = Health.check, []

    def ill_in_the_third(self: Health, row: dict[str, float]) -> list[Finding]:
        rows_seen.append(row)
        check(self, row)
        return [Finding("kl_blow_up", "made up")] if len(rows_seen) == 3 else []

    with monkeypatch.context() as patch:  # the third iteration is also evaluated
        patch.setattr(Health, "check", ill_in_the_third)
        with pytest.raises(RuntimeError, match="unhealthy at iteration 3: kl_blow_up"):
            run_stage("ppo", tmp_path / "ppo", on_unhealthy="stop", **inputs("ppo", chain))
    run_stage("ppo", tmp_path / "ppo", **inputs("ppo", chain))
    assert_same(tmp_path / "ppo", chain["ppo"])


def test_lora_sft_is_merged_so_that_ppo_starts_at_its_own_reference(chain: Chain, tmp_path: Path) -> None:
    run_stage("sft", tmp_path / "sft", lora={"r": 2, "alpha": 4}, learning_rate=0.1, **inputs("sft", chain))
    folders = {**chain, "sft": tmp_path / "sft"}
    assert not list((tmp_path / "sft" / "model").glob("adapter*"))
    run_stage("ppo", tmp_path / "ppo", **inputs("ppo", folders))
    assert abs(rows(tmp_path / "ppo")[0]["kl"]) < 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_reward_model_of_adapters_killed_between_checkpoints_ends_as_if_nothing_had_happened(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"lora": {"r": 2, "alpha": 4, "dropout": 0.1}, "learning_rate": 0.01, **inputs("reward", chain)}

    def die() -> None:
        kept = load_file(next((tmp_path / "broken" / "checkpoints" / "step-00000002" / "tensors").iterdir()))
        assert all("lora_" in name or "classifier.score.weight" in name for name in kept)
        raise Killed

    run_stage("reward", tmp_path / "straight", **fields)
    with monkeypatch.context() as patch:
        at_step(patch, 3, die)
        with pytest.raises(Killed):
            run_stage("reward", tmp_path / "broken", **fields)
    run_stage("reward", tmp_path / "broken", **fields)
    assert (tmp_path / "broken" / "model" / "adapter" / "value_head.safetensors").is_file()
    assert_same(tmp_path / "broken", tmp_path / "straight")


def test_fewer_prompts_than_a_rollout_still_train(chain: Chain, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Write about a {x} and a kite."}) + "\n" for x in ("fox", "cat")))
    run_stage("ppo", tmp_path / "ppo", data=str(prompts), num_iterations=2, **inputs("ppo", chain))
    tuned = load_file(tmp_path / "ppo" / "model" / "model.safetensors")
    start = load_file(chain["sft"] / "model" / "model.safetensors")
    assert any(not torch.equal(tuned[name], start[name]) for name in start)


@pytest.mark.parametrize(
    ("stage", "fields", "message"),
    [
        ("pretrain", {"block_size": 96, "data": {"path": "tiny.txt"}}, "tokens, but a block needs 97"),
        ("sft", {"max_length": 8}, r"sft\.max_length: .* nothing is left to train on"),
        (
            "reward",
            {"max_length": 8, "num_sampled_answers": 0},
            r"reward\.data: no ranking keeps two answers of different rank; raise reward\.max_length",
        ),
        ("sft", {"max_length": 97}, r"sft\.max_length is 97, but the model has 96 positions"),
        ("reward", {"max_length": 97}, r"reward\.max_length is 97, but the model has 96 positions"),
        ("ppo", {"max_prompt_length": 3}, r"ppo\.max_prompt_length: none of \d+ prompts fits in 3 tokens"),
        ("ppo", {"max_new_tokens": 90}, "is 154, but the model has 96 positions"),
        ("ppo", {"precision": "bf16"}, r"ppo\.precision: bf16 is not supported by this device"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("A fox and a kite. " * 4)
    if fields.get("precision") and torch.cuda.is_available():
        pytest.skip("this device can do bf16")
    with pytest.raises(RefusedError, match=message):
        run_stage(stage, tmp_path / stage, **{**inputs(stage, chain), **fields})
    assert not (tmp_path / stage / "metrics.jsonl").exists()


def test_a_finished_folder_is_never_trained_over(chain: Chain) -> None:
    before = {path: path.read_bytes() for path in chain["sft"].rglob("*") if path.is_file()}
    with pytest.raises(RefusedError, match=r"is finished .*/again/sft && python -m rlhf\.stages\.sft .*/again/sft`"):
        run_stage("sft", chain["sft"], **inputs("sft", chain))
    assert {path: path.read_bytes() for path in chain["sft"].rglob("*") if path.is_file()} == before


def test_what_runs_a_finished_stage_once_more_names_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the finished one itself, which may be the copy that was proposed before."""

    def proposed(folder: str) -> str:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "manifest.json").write_text("{}")
        with pytest.raises(RefusedError) as refused:
            refuse_finished(Path(folder), "ppo")
        return str(refused.value).split(": ")[-1]

    monkeypatch.chdir(tmp_path)

    def command(old: str, new: str) -> str:
        return f"`mkdir -p {new} && cp {old}/settings.yaml {new} && python -m rlhf.stages.ppo {new}`"

    assert proposed("runs/alone/ppo-01") == command("runs/alone/ppo-01", "runs/again/ppo-01")
    assert proposed("runs/again/ppo-01") == command("runs/again/ppo-01", "runs/again2/ppo-01")
    assert proposed("runs/again2/ppo-01") == command("runs/again2/ppo-01", "runs/again3/ppo-01")
    monkeypatch.chdir(tmp_path / "runs/again2")
    assert proposed("ppo-01") == command("ppo-01", "../again3/ppo-01")


def long_ones(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def test_ppos_health_monitor_is_told_what_gives_the_score(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def monitor(*given: Any) -> Any:
        raise RefusedError(str(given[-1]))

    monkeypatch.setattr(ppo_stage, "Health", monitor)
    function = f"{__name__}:long_ones"
    fields = {**inputs("ppo", chain), "reward_model": None, "rewards": [{"function": function}]}
    with pytest.raises(RefusedError) as told:
        run_stage("ppo", tmp_path / "ppo", **fields)
    assert str(told.value) == f"ppo.rewards ({function})"


@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_in_the_last_step_lets_the_stage_finish_and_then_stops_the_run(
    chain: Chain, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large seed, which is as good as any."""
    last = {"pretrain": 6, "sft": 6, "reward": 6, "ppo": 5}[stage]
    at_step(monkeypatch, last, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped) as stopped:
        run_stage(stage, tmp_path / stage, seed=20_261_128_000, **inputs(stage, chain))
    assert stopped.value.code == 130
    assert Artifact(tmp_path / stage).sealed


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_few_rows_are_passed_over_as_often_as_asked(chain: Chain, stage: str, tmp_path: Path) -> None:
    options = {"sft": {"num": 8}, "reward": {"num": 8}}[stage]
    source = {**TINY[stage]["data"], "options": options}
    run_stage(stage, tmp_path / stage, data=source, num_epochs=3, global_batch_size=64, **inputs(stage, chain))
    assert max(row["step"] for row in rows(tmp_path / stage)) == 3


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_single_prompt_cannot_be_split_and_is_refused(chain: Chain, stage: str, tmp_path: Path) -> None:
    row = {"prompt": "Write about a fox and a kite.", "response": "A", "responses": ["A", "B"], "ranks": [1, 2]}
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RefusedError, match=rf"{stage}\.data: 1 rows to train on and 0 to evaluate on"):
        run_stage(stage, tmp_path / stage, data=str(tmp_path / "one.jsonl"), **inputs(stage, chain))


def test_training_leaves_signal_handlers_as_they_were(chain: Chain, tmp_path: Path) -> None:
    stopping.close()  # those of a stage that failed in this process
    before = signal.getsignal(signal.SIGTERM)
    run_stage("pretrain", tmp_path / "pretrain")
    assert signal.getsignal(signal.SIGTERM) is before


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def run_until_killed(stage: str, chain: Chain, folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a stage and end it, without any saving, when the given step is logged."""

    def die() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, step, die)
        with pytest.raises(Killed):
            run_stage(stage, folder, **inputs(stage, chain))


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do something the first time that the given step is logged."""
    log, acted = Runtime.log, []

    def log_and_act(self: Runtime, at: int, *arguments: Any, **options: Any) -> None:
        log(self, at, *arguments, **options)
        if at == step and not acted:
            acted.append(True)
            action()

    patch.setattr(Runtime, "log", log_and_act)


def assert_same(folder: Path, undisturbed: Path) -> None:
    """Equal weights bit for bit, equal rows of metrics."""
    ours, theirs = Artifact(folder).manifest["files"], Artifact(undisturbed).manifest["files"]
    assert {n: d for n, d in ours.items() if n.endswith("safetensors")} == {
        n: d for n, d in theirs.items() if n.endswith("safetensors")
    }
    assert rows(folder) == rows(undisturbed)
    shutil.rmtree(folder)


@pytest.mark.parametrize("stage", STAGES)
def test_processes_keep_gradients_once_and_send_no_buffers(
    stage: str, chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT's trainer has an accelerator of its own. Sent buffers let two processes of PPO wait for each other."""
    asked, prepare = [], Accelerator.prepare_model

    def watch(accelerator: Accelerator, *arguments: Any, **named: Any) -> Any:
        asked.append(accelerator.ddp_handler.to_kwargs())
        return prepare(accelerator, *arguments, **named)

    monkeypatch.setattr(Accelerator, "prepare_model", watch)
    run_stage(stage, tmp_path / stage, **inputs(stage, chain))
    assert asked
    for one in asked:
        assert one.pop("gradient_as_bucket_view") is True
        assert list(one.values()) == [False]  # buffers, whatever torch calls it
