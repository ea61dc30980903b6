"""`rlhf estimate`: what is asked of the process that may import torch, and how its answer is shown."""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forking
import pytest
from pipeline_world import write_recipe, write_rows

from rlhf.pipeline import estimate, progress
from rlhf.pipeline.recipe import load_recipe


def phase(total: float, seconds: float, times: int | None, sending: float = 0.0, **gib: float) -> dict[str, Any]:
    sizes = dict.fromkeys(estimate.SIZES, 0.0) | gib
    return {
        "name": "update", "total_gib": total, "seconds": seconds, "seconds_sending": sending, "times": times,
        "gib": sizes,
    }  # fmt: skip


ALONE = {"num_processes": 1, "machines": 1, "layout": "ddp", "notes": []}
ANSWER: dict[str, Any] = {
    "device": {"name": "H100 80GB", "gib": 79.1, "usable_gib": 72.77},
    "fits": False,
    "stages": {
        "sft": {
            **ALONE, "precision": "bf16", "peak_gib": 12.34, "fits": True, "seconds": None, "changes": [],
            "peak_gib_in": {"ddp": 12.34},
            "phases": [phase(12.34, 0.25, None, weights=4.0, optimiser=4.0, gradients=2.0, activations=2.339,
                             logits=0.001)],
        },
        "ppo": {
            **ALONE, "precision": "bf16", "peak_gib": 90.0, "fits": False, "seconds": 7200.0,
            "peak_gib_in": {"ddp": 90.0},
            "phases": [phase(90.0, 72.0, 100, weights=30.0, optimiser=30.0, gradients=15.0, activations=15.0)],
            "changes": [
                {"settings": {"ppo.layout": "adapters"}, "peak_gib": 20.0, "fits": True},
                {"settings": {"ppo.microbatch_size": 4, "ppo.offload": True}, "peak_gib": 80.0, "fits": False},
            ],
        },
    },
}  # fmt: skip


class Child:
    """Stands in for the other process."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}
        self.code, self.said = 0, ""
        self.answer = ANSWER

    def ask(self, request: dict[str, Any], tell: Any) -> subprocess.CompletedProcess[str]:
        self.request = json.loads(json.dumps(request))
        said = "a line of a library\n" + json.dumps(self.answer)
        return subprocess.CompletedProcess([], self.code, said, self.said)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, world: Path) -> Child:
    found = Child()
    monkeypatch.setattr(estimate, "_ask", found.ask)
    monkeypatch.setattr(estimate, "visible_gpus", lambda: 2)
    return found


Call = Callable[..., tuple[int, str, str]]


def test_the_table_shows_each_phase_and_what_to_change_and_the_exit_code_is_0(child: Child, rlhf: Call) -> None:
    code, out, err = rlhf("estimate", "recipe.yaml")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["sft", "update", "4.00", "4.00", "2.00", "2.34", "0", "<.01", "12.34", "250", "ms", "?"]
    assert lines[2][:2] == ["ppo", "update"]
    assert lines[2][-4:] == ["90.00", "1:12", "min", "100"]
    assert out.splitlines()[3:] == [
        "H100 80GB: 79.1 GiB, 72.8 of them counted on",
        "sft: 12.34 GiB in bf16, fits; rows not counted",
        "ppo: 90.00 GiB in bf16, does not fit; about 2:00:00",
        "  ppo.layout=adapters: 20.00 GiB, fits",
        "  ppo.microbatch_size=4 ppo.offload=true: 80.00 GiB",
    ]


def test_that_nothing_is_enough_is_said(child: Child, rlhf: Call) -> None:
    """Beside a change that fits nothing is said (above)."""
    of_ppo = child.answer["stages"]["ppo"]
    for told, what in ((of_ppo["changes"][1:], "none of these is enough"), ([], "no setting is known that would help")):
        child.answer = ANSWER | {"stages": {"ppo": of_ppo | {"changes": told}}}
        assert rlhf("estimate", "recipe.yaml")[1].splitlines()[-1] == (
            f"  {what}; take a larger device, more of them (--devices NUMBERxNAME), or a smaller model"
        )


def test_a_change_is_told_as_a_shell_takes_it(child: Child, rlhf: Call) -> None:
    args = {"activation_checkpointing": True, "optim": "sgd"}
    change = {"settings": {"sft.args": args, "sft.lora": {}}, "peak_gib": 20.0, "fits": True}
    of_sft = ANSWER["stages"]["sft"] | {"fits": False, "changes": [change]}
    child.answer = ANSWER | {"stages": {"sft": of_sft}}
    told = rlhf("estimate", "recipe.yaml")[1].splitlines()[-1]
    assert told == "  sft.args.activation_checkpointing=true sft.args.optim=sgd sft.lora={}: 20.00 GiB, fits"
    assert load_recipe("recipe.yaml", shlex.split(told.partition(":")[0])).section("sft").args == args


def test_json_is_the_answer(child: Child, rlhf: Call) -> None:
    code, out, _ = rlhf("estimate", "recipe.yaml", "--json")
    assert (code, json.loads(out)) == (0, ANSWER | {"left_out": []})


def test_what_the_estimate_leaves_out_is_told(child: Child, rlhf: Call, world: Path) -> None:
    child.answer = ANSWER | {"stages": {"sft": ANSWER["stages"]["sft"] | {"notes": ["left out: this"]}}}
    feedback = {"prompts": "prompts.jsonl", "judge": "judges:rank"}
    write_recipe(
        world, rounds=3, sft={"data": "demonstrations.jsonl", "model": "a/b"}, feedback=feedback, reward={},
        ppo={"data": "prompts.jsonl"},
    )  # fmt: skip
    code, out, err = rlhf("estimate", "recipe.yaml")
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "  left out: this",
        "left out: feedback: 4 answers to each prompt are sampled, and ranked by a judge",
        "left out: rounds: reward and ppo are counted once, and run 3 times",
    ]


def test_the_recipe_is_asked_about_as_it_is_written(child: Child, rlhf: Call) -> None:
    rlhf("estimate", "recipe.yaml", "ppo.layout=adapters")
    stages = child.request["stages"]
    assert list(stages) == ["pretrain", "sft", "reward", "ppo"]
    assert stages["ppo"]["layout"] == "adapters"
    assert "layout" not in stages["sft"]
    assert "microbatch_size" not in stages["ppo"]  # which is not set, and has a default


STAGES = ("pretrain", "sft", "reward", "ppo")
SHARED_BY_64 = [f"{stage}.global_batch_size=64" for stage in STAGES[:3]] + ["ppo.rollout_batch_size=64"]


def test_there_are_as_many_processes_as_a_run_would_have(child: Child, rlhf: Call) -> None:
    rlhf("estimate", "recipe.yaml")
    assert (child.request["num_processes"], child.request["device"]) == (dict.fromkeys(STAGES, 2), None)
    rlhf("estimate", "recipe.yaml", "--device", "h100")
    assert (child.request["num_processes"], child.request["device"]) == (dict.fromkeys(STAGES, 1), "h100")
    rlhf("estimate", "recipe.yaml", "--device", "h100", "num_processes={sft: 4}")
    assert child.request["num_processes"] == dict.fromkeys(STAGES, 1) | {"sft": 4}
    assert child.request["layouts"] == dict.fromkeys(STAGES, "ddp")


def test_so_many_devices_are_so_many_processes_in_whatever_layout_fits(child: Child, rlhf: Call) -> None:
    rlhf("estimate", "recipe.yaml", "--devices", "64xH100", "num_processes=4", *SHARED_BY_64)
    assert (child.request["num_processes"], child.request["device"]) == (dict.fromkeys(STAGES, 64), "H100 80GB")
    assert child.request["layouts"] == dict.fromkeys(STAGES, None)


def test_all_batches_that_the_devices_cannot_share_are_named_at_once(child: Child, rlhf: Call) -> None:
    uneven = [f"{stage}.global_batch_size=20" for stage in STAGES[:3]] + ["ppo.rollout_batch_size=20"]
    code, _, err = rlhf("estimate", "recipe.yaml", "--devices", "8xH100", *uneven)
    assert (code, child.request) == (2, {})
    assert all(f"{stage}.global_batch_size" in err for stage in STAGES[:3])
    assert "ppo.rollout_batch_size" in err


def test_the_layout_is_that_of_the_stages_accelerate_config(child: Child, rlhf: Call, world: Path) -> None:
    (world / "mine.yaml").write_text('distributed_type: "NO"\nnum_processes: 1\n')
    configs = "accelerate_config={pretrain: fsdp2, sft: zero2, reward: mine.yaml}"
    rlhf("estimate", "recipe.yaml", configs, "--devices", "8xh100")
    assert child.request["layouts"] == {"pretrain": "fsdp2", "sft": "zero2", "reward": "ddp", "ppo": None}
    rlhf("estimate", "recipe.yaml", "accelerate_config=mine.yaml", "--devices", "8xh100")
    assert child.request["layouts"] == dict.fromkeys(STAGES, "ddp")
    rlhf("estimate", "recipe.yaml", "accelerate_config=cpu2")
    assert child.request["num_processes"] == dict.fromkeys(STAGES, 2)
    assert child.request["layouts"] == dict.fromkeys(STAGES, "ddp")


@pytest.mark.parametrize(("config", "message"), [
    ("distributed_type: MEGATRON_LM", "distributed_type MEGATRON_LM"),
    ("distributed_type: DEEPSPEED", "distributed_type DEEPSPEED"),
])  # fmt: skip
def test_a_layout_of_which_nothing_is_known_is_refused(
    child: Child, rlhf: Call, world: Path, config: str, message: str
) -> None:
    (world / "mine.yaml").write_text(config)
    said = f"error: accelerate_config mine.yaml: {message} cannot be estimated; take ddp, fsdp2 or zero2\n"
    assert rlhf("estimate", "recipe.yaml", "accelerate_config=mine.yaml", "--device", "h100") == (2, "", said)
    assert child.request == {}


def test_several_processes_are_told_with_their_layout_and_what_they_send(child: Child, rlhf: Call) -> None:
    of_sft = ANSWER["stages"]["sft"] | {
        "num_processes": 64, "machines": 8, "layout": "fsdp2", "peak_gib_in": {"ddp": 112.346, "fsdp2": 12.34},
        "phases": [phase(12.34, 0.25, None, sending=0.125)],
    }  # fmt: skip
    of_ppo = ANSWER["stages"]["ppo"] | {"num_processes": 8, "changes": []}
    child.answer = ANSWER | {"stages": {"sft": of_sft, "ppo": of_ppo}}
    _, out, _ = rlhf("estimate", "recipe.yaml", "--devices", "64xh100", *SHARED_BY_64)
    lines = out.splitlines()
    assert lines[0].split()[-4:] == ["GiB", "sending", "time", "×"]
    assert lines[1].split()[-6:] == ["12.34", "125", "ms", "250", "ms", "?"]
    assert lines[3:] == [
        "H100 80GB: 79.1 GiB, 72.8 of them counted on",
        "sft: 64 processes on 8 machines, fsdp2 (ddp would take 112.35 GiB); each 12.34 GiB in bf16, fits; "
        "rows not counted",
        "ppo: 8 processes, ddp; each 90.00 GiB in bf16, does not fit; about 2:00:00",
        "  no setting is known that would help; take a larger device, more of them (--devices NUMBERxNAME), or a "
        "smaller model",
    ]


@pytest.mark.parametrize(("words", "message"), [
    (("--devices", "8xh100", "--device", "h100"), "--device and --devices: give one of the two"),
    (("--devices", "h100"), "--devices h100: write how many of which, such as 64xH100 or 8xA100-80GB"),
])  # fmt: skip
def test_devices_that_are_not_told_are_refused(child: Child, rlhf: Call, words: tuple[str, ...], message: str) -> None:
    assert rlhf("estimate", "recipe.yaml", *words) == (2, "", f"error: {message}\n")
    assert child.request == {}


def test_rows_that_are_here_are_counted_less_those_held_out(child: Child, rlhf: Call, world: Path) -> None:
    rlhf("estimate", "recipe.yaml", "eval_share=0.5")
    assert child.request["rows"] == {"sft": {"rows": 1}, "reward": {"rows": 1, "answers": 2}}
    rankings = [{"prompt": f"p{n}", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]} for n in range(10)]
    write_rows(world / "rankings.jsonl", rankings)
    rlhf("estimate", "recipe.yaml", "reward.eval_data=rankings.jsonl")
    assert child.request["rows"]["reward"] == {"rows": 10, "answers": 3}


@pytest.mark.parametrize("content", [None, '{"prompt": "a"}\n'])
def test_rows_that_are_not_here_or_cannot_be_read_are_not_counted(
    child: Child, rlhf: Call, world: Path, content: str | None
) -> None:
    (world / "demonstrations.jsonl").unlink()
    if content is not None:
        (world / "demonstrations.jsonl").write_text(content)
    code, _, _ = rlhf("estimate", "recipe.yaml")
    assert (code, child.request["rows"]["sft"]) == (0, {})


def test_what_the_other_process_refuses_is_refused(child: Child, rlhf: Call) -> None:
    child.code, child.said = 2, "sft.model: no config of a model in 'x'\n"
    assert rlhf("estimate", "recipe.yaml") == (2, "", "error: sft.model: no config of a model in 'x'\n")


def test_what_breaks_there_is_told_in_its_last_line(child: Child, rlhf: Call) -> None:
    child.code, child.said = 1, "Traceback …\nRuntimeError: no\n"
    assert rlhf("estimate", "recipe.yaml") == (1, "", "error: RuntimeError: no\n")


def test_the_stage_that_is_being_estimated_is_told_while_it_lasts(
    rlhf: Call, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, beside the answer; what the other process says there itself is told where it breaks alone."""
    (world / "answer.json").write_text(json.dumps(ANSWER) + "\n")
    (world / "other").write_text(
        f"#!/bin/sh\ncat > {world}/asked.json\necho a library >&2\necho estimating sft\necho a line of a library\n"
        f"echo estimating ppo\ncat {world}/answer.json\n"
    )
    (world / "other").chmod(0o755)

    @contextmanager
    def telling(what: str, say: Any) -> Iterator[Any]:
        say(what)
        yield say

    monkeypatch.setattr(estimate.sys, "executable", str(world / "other"))
    monkeypatch.setattr(estimate, "visible_gpus", lambda: 1)
    monkeypatch.setattr(progress, "telling", telling)
    code, out, err = rlhf("estimate", "recipe.yaml", "--json")
    assert (code, json.loads(out)) == (0, ANSWER | {"left_out": []})
    assert err == "starting\nestimating sft\nestimating ppo\n"
    assert list(json.loads((world / "asked.json").read_text())["stages"]) == list(STAGES)


def test_a_device_that_is_not_known_is_refused_before_anything_is_started(child: Child, rlhf: Call) -> None:
    code, _, err = rlhf("estimate", "recipe.yaml", "--device", "h9000")
    assert code == 2
    assert err.startswith("error: --device h9000: no such device; give one of B200, H200, ")
    assert child.request == {}


def test_a_whole_recipe_is_told_by_the_real_process(world: Path) -> None:
    write_recipe(
        world,
        pretrain={"data": "text.jsonl", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300,
                  "context_length": 64, "num_steps": 10},
        sft={"data": "demonstrations.jsonl", "max_length": 64},
    )  # fmt: skip
    words = ["--devices", "2xl4", "--json", "accelerate_config={sft: fsdp2}"]
    ended = forking.rlhf("estimate", "recipe.yaml", *words, cwd=world)
    assert ended.returncode == 0
    assert all(line.endswith(" so far") for line in ended.stderr.splitlines())  # how far it was, where it took long
    found = json.loads(ended.stdout)
    assert (found["device"]["name"], found["fits"]) == ("L4", True)
    assert {stage: of_stage["layout"] for stage, of_stage in found["stages"].items()} == {
        "pretrain": "ddp", "sft": "fsdp2"
    }  # fmt: skip
    assert 0 < found["stages"]["pretrain"]["peak_gib"] < 1
    assert not list(world.glob("runs*"))  # nothing is written
