"""Liger's kernels in SFT: refused where they cannot be, and for the layers alone where they can."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stages_world import run_stage

from rlhf.data.errors import RefusedError
from rlhf.stages.sft import config
from rlhf.stages.sft.config import SFTSettings

LIGER = {"use_liger_kernel": True}


def test_a_stage_alone_refuses_them_on_a_cpu_and_trains_nothing(policy_folder: Path, tmp_path: Path) -> None:
    said = (
        r"^sft\.args\.use_liger_kernel: Liger's kernels need a GPU, and the stage is on the CPU; use one, or leave it"
    )
    with pytest.raises(RefusedError, match=said):
        run_stage("sft", tmp_path / "sft", model=str(policy_folder), args=LIGER)
    assert not (tmp_path / "sft" / "metrics.jsonl").exists()


def test_on_a_gpu_they_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = (SFTSettings.load({"data": "x.jsonl", "args": args}, "sft") for args in (LIGER, {}))
    monkeypatch.setattr(config, "find_spec", lambda _: None)
    assert asked.why_no_liger(on_gpu=True) == (
        "sft.args.use_liger_kernel: needs liger-kernel, which is not installed; "
        "`pip install rlhf-toolkit[liger]`, or leave it out"
    )
    assert plain.why_no_liger(on_gpu=True) is plain.why_no_liger(on_gpu=False) is None
    monkeypatch.setattr(config, "find_spec", lambda _: SimpleNamespace())
    assert asked.why_no_liger(on_gpu=True) is None


def test_the_loss_stays_the_stages_own_and_what_liger_does_not_know_is_told(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    applied: list[Any] = []
    known = ModuleType("monkey_patch")
    known.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}  # type: ignore[attr-defined]
    monkeypatch.setattr(SFTSettings, "why_no_liger", lambda *_, **__: None)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda _, options: applied.append(options))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", known)
    run_stage("sft", tmp_path / "sft", model=str(policy_folder), max_length=64, args=LIGER)
    assert applied == [{"fused_linear_cross_entropy": False}]  # which would take the forward pass in which our loss is
    assert "sft.args.use_liger_kernel has no effect: Liger has no kernels for llama models" in capsys.readouterr().out
