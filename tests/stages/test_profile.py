"""Where a stage's time goes: the clock of phases, what a device's bounds are held against, and the trace."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import model_folders, run_ppo
from stages_world import byte_tokenizer, inputs, run_stage, tiny_policy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.pipeline import summary
from rlhf.stages import adapters, profile
from rlhf.stages.artifact import Artifact
from rlhf.stages.ppo import train as train_module
from rlhf.stages.profile import Cost, Limits, Phases, Trace, cost_of
from rlhf.stages.settings import LoraSettings

CPU = torch.device("cpu")
COST = Cost(trunk=10, head=5, attention=2, weight_bytes=100, cache_bytes=3, trained=1.0)
PROMPTS, RESPONSES = torch.tensor([2.0, 4.0]), torch.tensor([3.0, 1.0])


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profile, "time", made)
    return made


def alone(values: torch.Tensor) -> torch.Tensor:
    """The sum over the processes, of which there is one."""
    return values


def test_a_phase_lasts_until_the_next_begins(clock: Clock) -> None:
    phases = Phases(CPU, Limits())
    for now, doing in ((1, "sampling"), (4, "the rollout"), (5, "scoring"), (7, "the update"), (12, "saving")):
        clock.now = now
        phases.begin(doing)
    clock.now = 13
    assert phases.row(1, alone) == {
        "seconds_rollout": 3, "seconds_scoring": 3, "seconds_update": 5, "seconds_checkpoint": 1,
    }  # fmt: skip


def test_seconds_are_of_one_step_and_each_row_starts_at_zero(clock: Clock) -> None:
    phases = Phases(CPU, Limits())
    phases.begin("the update")
    clock.now = 6
    assert phases.row(3, alone) == {"seconds_update": 2}
    clock.now = 7  # the phase goes on
    assert phases.row(2, alone) == {"seconds_update": 0.5}


def test_all_that_an_evaluation_does_is_part_of_it(clock: Clock) -> None:
    phases = Phases(CPU, Limits())
    phases.begin("the update")
    clock.now = 1
    with phases.evaluation():
        for doing in ("sampling", "scoring", "saving"):
            clock.now += 1
            phases.begin(doing)
    clock.now = 5
    phases.begin("sampling")
    clock.now = 7
    assert phases.row(1, alone) == {"seconds_rollout": 2, "seconds_update": 1, "seconds_evaluation": 4}


def test_what_comes_before_training_and_what_has_no_phase_does_not_count(clock: Clock) -> None:
    phases = Phases(CPU, Limits())
    phases.begin("evaluation")
    clock.now = 9
    phases.forget()
    clock.now = 10
    phases.begin("loading")
    assert phases.row(1, alone) == {}


def test_shares_of_the_bounds_by_hand(clock: Clock) -> None:
    phases = Phases(CPU, Limits(flops=100.0, bandwidth=50.0))
    phases.begin("sampling")
    clock.now = 4
    phases.begin("the update")
    clock.now = 14
    phases.count("rollout", 8, num_bytes=100)  # two seconds at best, of four
    phases.count("update", 30, flops=250)
    row = phases.row(2, lambda tokens: 2 * tokens)  # another process has as many tokens
    assert row == {
        "seconds_rollout": 2, "seconds_update": 5, "tokens_per_second_rollout": 4, "tokens_per_second_update": 6,
        "bandwidth_share_rollout": 0.5, "flops_share_update": 0.25,
    }  # fmt: skip


def test_shares_of_a_device_that_is_not_known_are_left_out(clock: Clock) -> None:
    phases = Phases(CPU, profile.limits("Imaginary 9000", "bf16"))
    phases.begin("sampling")
    clock.now = 4
    phases.count("rollout", 8, num_bytes=100, flops=100)
    assert phases.row(1, alone) == {"seconds_rollout": 4, "tokens_per_second_rollout": 2}


@pytest.mark.parametrize(
    ("device", "precision", "limits"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", Limits(989e12, 3350e9)),
        ("NVIDIA H100 PCIe", "bf16", Limits(756e12, 2000e9)),
        ("NVIDIA H100 80GB HBM3", "fp32", Limits(67e12, 3350e9)),
        ("Tesla T4", "bf16", Limits(None, 320e9)),
        ("NVIDIA L40", "bf16", Limits()),
        ("cpu", "fp32", Limits()),
    ],
)
def test_the_bounds_are_those_of_the_data_sheet(device: str, precision: str, limits: Limits) -> None:
    assert profile.limits(device, precision) == limits


def test_decoding_reads_all_weights_per_step_and_the_cache_of_each_row() -> None:
    # three steps; before its tokens the first row holds 2, 3 and 4 others, the second 4
    assert COST.decoding(PROMPTS, RESPONSES) == 3 * 100 + (2 + 3 + 4 + 4) * 3


def test_reading_multiplies_every_token_and_makes_logits_for_responses() -> None:
    assert COST.reading(PROMPTS, RESPONSES) == 2 * 10 * (5 + 5) + 2 * 5 * (3 + 1) + 2 * (25 + 25)


def test_learning_costs_three_forward_passes_and_of_frozen_weights_two() -> None:
    frozen = Cost(10, 5, 2, 100, 3, trained=0.0)
    assert COST.learning(PROMPTS, RESPONSES) == 3 * 340
    assert frozen.learning(PROMPTS, RESPONSES) == 2 * 340


def test_cost_of_a_tied_llama_by_hand() -> None:
    cost = cost_of(tiny_policy(), 2)  # d 16, ffn 32, two heads of 8 with one for keys, vocabulary 260
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16
    assert (cost.trunk, cost.head) == (2 * layer + 16, 260 * 16)
    assert cost.attention == 4 * 2 * 16
    assert cost.weight_bytes == 2 * (cost.trunk + cost.head)
    assert cost.cache_bytes == 2 * 2 * 8 * 2
    assert cost.trained == 1


def test_embeddings_are_looked_up_and_not_multiplied_with() -> None:
    model = tiny_policy("gpt2")
    others = sum(p.numel() for p in model.parameters()) - (260 + 64) * 16  # of tokens and of positions
    assert (cost_of(model, 4).trunk, cost_of(model, 4).head) == (others, 260 * 16)


def test_adapters_are_the_part_that_is_trained() -> None:
    model = tiny_policy().requires_grad_(False)
    adapters.add_lora(model, LoraSettings(r=1))
    lora = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert cost_of(model, 4).trained == pytest.approx(lora / (4688 + lora))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), byte_tokenizer())


def test_ppo_logs_its_phases_and_no_share_of_an_unknown_device(tmp_path: Path, given: dict[str, str]) -> None:
    run_ppo(tmp_path, given, report_to=[])
    rows = Artifact(tmp_path).metrics
    for phase in ("rollout", "scoring", "update"):
        assert all(row[f"seconds_{phase}"] > 0 and row[f"tokens_per_second_{phase}"] > 0 for row in rows)
    assert ["seconds_evaluation" in row for row in rows[:2]] == [False, True]  # the first was before training
    assert "seconds_checkpoint" in rows[2]  # saved after the second row
    assert not any("_share_" in name for row in rows for name in row)


def test_what_is_evaluated_before_training_is_in_no_phase(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, selection = Clock(), train_module.Selection
    monkeypatch.setattr(profile, "time", clock)

    def evaluate(run: Any, *arguments: Any, **named: Any) -> Any:
        run.phases.begin("sampling")
        clock.now += 100
        return selection(run, *arguments, **named)

    monkeypatch.setattr(train_module, "Selection", evaluate)
    run_ppo(tmp_path, given, report_to=[], num_iterations=1)
    assert Artifact(tmp_path).metrics[0]["seconds_rollout"] == 0


def test_ppo_counts_prompts_and_responses_of_every_epoch(tmp_path: Path, given: dict[str, str]) -> None:
    run_ppo(tmp_path, given, report_to=[], num_iterations=1)
    row = Artifact(tmp_path).metrics[0]
    tokens = {p: row[f"tokens_per_second_{p}"] * row[f"seconds_{p}"] for p in ("rollout", "scoring", "update")}
    assert tokens["rollout"] == pytest.approx(8 * row["length"], rel=0.02)
    assert tokens["update"] == pytest.approx(2 * tokens["scoring"], rel=0.02)  # two epochs
    assert tokens["scoring"] > tokens["rollout"]


@pytest.mark.parametrize("layout", ["separate", "shared_trunk", "adapters"])
def test_ppo_on_a_known_device_logs_shares_of_its_bounds(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(profile, "limits", lambda name, precision: Limits(1e9, 1e9))
    run_ppo(tmp_path, given, report_to=[], num_iterations=1, layout=layout)
    row = Artifact(tmp_path).metrics[0]
    assert all(row[name] > 0 for name in ("bandwidth_share_rollout", "flops_share_scoring", "flops_share_update"))


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_sft_and_reward_log_the_share_of_what_the_tokens_of_a_step_need(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(profile, "limits", lambda name, precision: Limits(1e9, 1e9))
    run_stage(stage, tmp_path, log_every=1, **inputs(stage, chain))
    kind = AutoModelForCausalLM if stage == "sft" else AutoModelForSequenceClassification
    cost = cost_of(kind.from_pretrained(tmp_path / "model"), 4)
    for row in Artifact(tmp_path).metrics[:3]:
        tokens = row["tokens_per_second_update"] * row["seconds_update"]
        operations = row["flops_share_update"] * 1e9 * row["seconds_update"]
        least = 3 * 2 * cost.trunk * tokens  # forward and backward; attention and the logits of responses come on top
        most = 3 * (2 * (cost.trunk + cost.head) + 96 * cost.attention) * tokens
        assert 0.98 * least < operations < most


def test_pretraining_tells_updates_from_evaluations(tmp_path: Path) -> None:
    run_stage("pretrain", tmp_path, sample_prompts=["the"], sample_length=4)
    rows = Artifact(tmp_path).metrics
    assert all(row["seconds_update"] > 0 for row in rows)
    assert ["seconds_evaluation" in row for row in rows[:3]] == [False, False, True]
    assert not any("seconds_rollout" in row for row in rows)  # samples are shown as part of an evaluation


def names_in(trace: Path) -> set[Any]:
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_trace_of_one_iteration_of_ppo_lies_outside_of_what_is_sealed(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_PROFILE", "1")
    run_ppo(tmp_path, given, report_to=[], num_epochs=1)
    assert f"profile of iteration 3: {tmp_path}/profile/trace.json.gz" in capsys.readouterr().out
    assert {"rollout", "scoring", "update", "aten::mm"} <= names_in(tmp_path / "profile" / "trace.json.gz")
    assert "aten::mm" in (tmp_path / "profile" / "kernels.txt").read_text(encoding="utf-8")
    assert not any("profile" in name for name in Artifact(tmp_path).manifest["files"])


def test_a_trace_leaves_the_result_as_it_is(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    once: dict[str, Any] = {"report_to": [], "num_iterations": 2, "num_epochs": 1}
    run_ppo(tmp_path / "without", given, **once)
    monkeypatch.setenv("RLHF_PROFILE", "1")
    run_ppo(tmp_path / "with", given, **once)
    assert Artifact(tmp_path / "without").digest == Artifact(tmp_path / "with").digest


def test_pretraining_is_traced_over_three_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_PROFILE", "1")
    run_stage("pretrain", tmp_path)
    assert "profile of steps 3 to 5:" in capsys.readouterr().out
    assert "update" in names_in(tmp_path / "profile" / "trace.json.gz")


@pytest.mark.parametrize(
    ("behind", "of", "steps"),
    [(0, 10, "3 to 5"), (4, 10, "7 to 9"), (0, 4, "2 to 4"), (0, 3, "1 to 3"), (0, 2, "1 to 2")],
)
def test_the_first_steps_are_left_out_of_a_trace_where_there_are_others(
    tmp_path: Path, behind: int, of: int, steps: str
) -> None:
    said: list[str] = []
    trace = Trace(tmp_path, "sft", Phases(CPU, Limits()), said.append)
    trace.begin(behind, of)
    for step in range(behind + 1, of + 1):
        trace.at(step)
    trace.write()
    assert len(said) == 1
    assert said[0].startswith(f"profile of steps {steps}: ")


RECORD = """
import sys
from pathlib import Path
import torch
from rlhf.stages.profile import Limits, Phases, Trace
trace = Trace(Path(sys.argv[1]), "ppo", Phases(torch.device("cpu"), Limits()), lambda text: None)
trace.begin(0, 1)
trace.at(1)
"""


def test_a_recording_says_nothing_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: what the first recording says is settled for good."""
    words = [sys.executable, "-W", "ignore", "-c", RECORD, str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("", "")
    assert (tmp_path / "profile" / "trace.json.gz").is_file()


def test_the_phases_that_status_counts_are_all_of_a_step() -> None:
    assert set(summary.PHASES) == set(profile.PHASES.values())
