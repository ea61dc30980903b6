"""A checkpoint is written whole or not at all, damage to it is seen and said, and a full disk costs no other one."""

import errno
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import fork, free_port
from processes_world import become_rank
from safetensors.torch import save_file
from stages_world import TINY, inputs, run_stage

from rlhf.data.errors import DataError
from rlhf.stages import artifact, checkpoints
from rlhf.stages.artifact import Artifact
from rlhf.stages.checkpoints import (
    CannotWrite,
    clear,
    newest_checkpoint,
    read_checkpoint,
    saying_what_cannot_be_written,
    swap_in,
)
from rlhf.stages.disk import file_digest, replace_text
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import write_settings

Chain = dict[str, Path]


def write(folder: Path, step: int, text: str = "weights") -> Path:
    writing = clear(folder)
    (writing / "part").mkdir()
    (writing / "part" / "weights").write_text(text)
    (writing / "optimizer").write_text("moments")
    swap_in(folder, step, processes=2, device="cpu", state={"best": 0.1})
    return folder / "checkpoints" / f"step-{step:08d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_state_json_says_what_a_checkpoint_is_and_holds(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 7)
    content = json.loads((checkpoint / "state.json").read_text())
    assert content == {
        "step": 7, "processes": 2, "device": "cpu", "state": {"best": 0.1},
        "files": {
            "optimizer": {"size": 7, "sha256": file_digest(checkpoint / "optimizer")},
            "part/weights": {"size": 7, "sha256": file_digest(checkpoint / "part" / "weights")},
        },
    }  # fmt: skip
    found = newest_checkpoint(tmp_path, hashes=True)
    assert found is not None
    assert (found.step, found.processes, found.state, found.size) == (7, 2, {"best": 0.1}, 14)


def test_two_stay_and_the_spare_one_is_complete(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]
    (tmp_path / "checkpoints" / "step-00000006" / "optimizer").unlink()
    write(tmp_path, 8)
    assert names(tmp_path) == ["step-00000004", "step-00000008"]


def test_later_steps_of_a_stretch_that_was_lost_go_when_an_earlier_step_is_saved_again(tmp_path: Path) -> None:
    for step in (20, 40):
        write(tmp_path, step)
    (tmp_path / "checkpoints" / "step-00000040" / "optimizer").write_text("damaged")
    (tmp_path / "checkpoints" / "step-00000040" / "part" / "weights").unlink()
    write(tmp_path, 30)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


DAMAGE = {
    "it has no state.json": lambda folder: (folder / "state.json").unlink(),
    "its state.json is damaged": lambda folder: (folder / "state.json").write_text('{"step": 4, "fi'),
    "its state.json is damaged ": lambda folder: (folder / "state.json").write_text("[]"),
    "part/weights is missing": lambda folder: (folder / "part" / "weights").unlink(),
    "optimizer has 3 bytes, not 7": lambda folder: (folder / "optimizer").write_text("mom"),
    "optimizer has another hash than when it was written": lambda folder: (folder / "optimizer").write_text("MOMENTS"),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_the_damage_named(tmp_path: Path, reason: str) -> None:
    write(tmp_path, 2)
    DAMAGE[reason](write(tmp_path, 4))
    said: list[str] = []
    found = newest_checkpoint(tmp_path, hashes=True, passed_over=said.append)
    assert found is not None
    assert found.step == 2
    assert said == [f"passed over the checkpoint step-00000004: {reason.strip()}"]


def test_a_plan_looks_at_sizes_and_not_at_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write(tmp_path, 4) / "optimizer").write_text("MOMENTS")
    monkeypatch.setattr(checkpoints, "file_digests", lambda paths: pytest.fail("it reads files"))
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize(
    "call",
    ["checkpoints.file_digests", "checkpoints.sync", "disk.sync", "disk.os.replace", "disk.sync_path"],
)
def test_an_end_at_any_moment_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(tmp_path, 2)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"rlhf.stages.{call}", die)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 4)
    found = newest_checkpoint(tmp_path, hashes=True)
    assert found is not None
    assert found.step == 2
    assert write(tmp_path, 6).is_dir()


def test_all_is_on_disk_before_the_new_name_counts_and_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        write(tmp_path, step)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    done: list[str] = []
    fsync, replace, rmtree = os.fsync, os.replace, shutil.rmtree

    def noting_fsync(descriptor: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def noting_replace(source: Path, target: Path) -> None:
        done.append("renamed")
        replace(source, target)

    def noting_rmtree(path: Path, **options: Any) -> None:
        done.append(f"removed {path.name}")
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    monkeypatch.setattr(shutil, "rmtree", noting_rmtree)
    write(tmp_path, 6)
    before, after = done[: done.index("renamed")], done[done.index("renamed") :]
    inside = ("", "/optimizer", "/part", "/part/weights", "/state.json")
    assert {f"checkpoints/.writing{name}" for name in inside} | {"metrics.jsonl"} <= set(before)
    assert after == ["renamed", "checkpoints", "removed step-00000002"]


def test_a_text_is_on_disk_before_it_replaces_another_and_a_failure_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_text(tmp_path / "a", "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
    replace_text(tmp_path / "a", "new", sync=False)
    assert (tmp_path / "a").read_text() == "new"


# -- what cannot be written -------------------------------------------------------------------------------------


def of_safetensors(folder: Path) -> None:
    save_file({"x": torch.zeros(1 << 20)}, folder / "x.safetensors")


def of_torch(folder: Path) -> None:
    torch.save({"x": torch.zeros(1 << 20)}, folder / "x.bin")


def of_python(folder: Path) -> None:
    (folder / "x").write_bytes(bytes(4 << 20))


def of_tokenizers(folder: Path) -> None:
    from stages_world import byte_tokenizer

    (folder / "fill").write_bytes(bytes(shutil.disk_usage(folder).free))
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """Makes a file system of some KiB in a folder; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # a mapped file may keep it busy


@pytest.mark.parametrize("writer", [of_safetensors, of_torch, of_python, of_tokenizers])
def test_each_library_that_meets_a_full_disk_is_understood(small_disk: Any, writer: Any) -> None:
    disk = small_disk(1024)
    said = r"^the model could not be written to .* MiB free.*: it starts over$"
    with pytest.raises(CannotWrite, match=said), saying_what_cannot_be_written(disk, "the model"):
        writer(disk)


@pytest.fixture
def small_files() -> Iterator[None]:
    """As after `ulimit -f`: files of 64 KiB at most."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", [of_safetensors, of_torch, of_python])
def test_each_library_that_meets_a_limit_on_the_size_of_files_is_understood(
    tmp_path: Path, small_files: None, writer: Any
) -> None:
    said = r"^the model could not be written to .* \(0\.1 MiB allowed in a file\); raise the limit .*`ulimit -f`"
    with pytest.raises(CannotWrite, match=said), saying_what_cannot_be_written(tmp_path, "the model"):
        writer(tmp_path)


def kib_on_disk(folder: Path) -> int:
    """What the files take on a tmpfs, which has pages of 4 KiB."""
    return sum(-(-path.stat().st_size // 4096) * 4 for path in folder.rglob("*") if path.is_file())


def test_a_disk_of_one_and_a_half_checkpoints_keeps_the_first_and_says_what_to_do(
    small_disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_after_the_first(*arguments: Any) -> None:
        swap_in(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlhf.stages.runtime.swap_in", ends_after_the_first)
        with pytest.raises(KeyboardInterrupt):
            run_stage("pretrain", tmp_path / "measured" / "pretrain", eval_every=6)
    one = kib_on_disk(tmp_path / "measured" / "pretrain" / "checkpoints")
    disk = small_disk(kib_on_disk(tmp_path / "measured") + one // 2)
    with pytest.raises(CannotWrite) as error:
        run_stage("pretrain", disk / "pretrain", eval_every=6)
    text = str(error.value)
    assert text.startswith(f"the checkpoint of step 4 could not be written to {disk / 'pretrain'}: ")
    assert text.endswith(
        "needed); free some space, or allow writing there again, and run again: it goes on from step 2"
    )
    assert names(disk / "pretrain") == ["step-00000002"]
    assert not artifact.temporaries(disk / "pretrain")
    read_checkpoint(disk / "pretrain" / "checkpoints" / "step-00000002", hashes=True)
    shutil.copytree(disk / "pretrain", tmp_path / "freed")
    run_stage("pretrain", tmp_path / "freed", eval_every=6)
    run_stage("pretrain", tmp_path / "undisturbed", eval_every=6)
    ours, theirs = (Artifact(tmp_path / name).digest for name in ("freed", "undisturbed"))
    assert ours == theirs


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize(
    ("what", "call", "stage"),
    [
        ("the checkpoint of step 4", "rlhf.stages.checkpoints.sync", "pretrain"),
        ("the checkpoint of step 4", "rlhf.stages.checkpoints.sync", "sft"),
        ("checkpoints/best", "rlhf.stages.pretrain.train.save_folder", "pretrain"),
        ("model", "rlhf.stages.disk.shutil.copytree", "pretrain"),
        ("model", "rlhf.stages.sft.train.save_folder", "sft"),
        ("manifest.json", "rlhf.stages.artifact._versions", "pretrain"),
    ],
)
def test_whatever_cannot_be_written_is_named_and_leaves_no_rubbish(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, call: str, stage: str, number: int
) -> None:
    module, name = call.rsplit(".", 1)
    real, calls = getattr(__import__("pkgutil").resolve_name(module), name), []

    def fails(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if what.startswith("the checkpoint") and len(calls) == 1:
            return real(*arguments, **options)
        real(*arguments, **options)
        if name == "save_folder":  # it had come to its end; have it as if it had not
            os.replace(arguments[0], arguments[0].with_name(f".{arguments[0].name}.writing"))
        raise OSError(number, os.strerror(number), "x")

    folder = tmp_path / stage
    with monkeypatch.context() as patch:
        patch.setattr(call, fails)
        with pytest.raises(CannotWrite) as error:
            run_stage(stage, folder, **inputs(stage, chain))
    text = str(error.value)
    assert text.startswith(f"{what} could not be written to {folder}: {os.strerror(number)} (")
    assert ("free some of the quota there, or have it raised and run again" in text) == (number == errno.EDQUOT)
    assert ("free, " in text) == ("free some space, or allow writing there again" in text) == (number != errno.EDQUOT)
    found = newest_checkpoint(folder, hashes=True)
    assert found is not None
    assert text.endswith(f"run again: it goes on from step {found.step}")
    assert not artifact.temporaries(folder)
    assert not Artifact(folder).sealed
    run_stage(stage, folder, **inputs(stage, chain))
    assert Artifact(folder).digest == Artifact(chain[stage]).digest


def test_other_errors_go_through_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".writing").mkdir(parents=True)
    with pytest.raises(ConnectionRefusedError), saying_what_cannot_be_written(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    with pytest.raises(ZeroDivisionError), saying_what_cannot_be_written(tmp_path):
        raise ZeroDivisionError
    assert (tmp_path / "checkpoints" / ".writing").exists()


# -- going on ---------------------------------------------------------------------------------------------------


def test_a_stage_says_which_checkpoint_it_passed_over_and_that_it_starts_over_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pretrain"
    with monkeypatch.context() as patch:

        def end(self: Runtime, step: int, *more: Any, **options: Any) -> None:
            if step == 5:
                raise KeyboardInterrupt

        patch.setattr(Runtime, "log", end)
        with pytest.raises(KeyboardInterrupt):
            run_stage("pretrain", folder)
    assert names(folder) == ["best", "step-00000002", "step-00000004"]
    weights = next((folder / "checkpoints" / "step-00000004" / "tensors").iterdir())
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    (folder / "checkpoints" / "step-00000002" / "optimizers.json").unlink()
    clear(folder)
    capsys.readouterr()
    run_stage("pretrain", folder)
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert lines == [
        "pretrain: warning: passed over a checkpoint that was not written to its end",
        f"pretrain: warning: passed over the checkpoint step-00000004: tensors/{weights.name} has another hash than "
        "when it was written",
        "pretrain: warning: passed over the checkpoint step-00000002: optimizers.json is missing",
        "pretrain: warning: no complete checkpoint is left to go on from",
    ]
    assert [row["step"] for row in Artifact(folder).metrics] == list(range(1, TINY["pretrain"]["num_steps"] + 1))


def process(rank: int, port: int, folder: Path, said: Path) -> None:
    become_rank(rank, port)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = ["rlhf.stages.pretrain", str(folder)]
    runpy.run_module("rlhf.stages.pretrain", run_name="__main__")


def test_two_processes_end_in_seconds_when_the_disk_is_full(small_disk: Any, tmp_path: Path) -> None:
    """Each by itself: no launcher ends the other."""
    folder = small_disk(200) / "pretrain"
    write_settings(folder, PretrainSettings.load({**TINY["pretrain"], "report_to": [], "hidden_size": 32}, "pretrain"))
    port = free_port()
    processes = [fork(process, rank, port, folder, tmp_path / "said") for rank in (0, 1)]
    for each in processes:
        each.join(120)
    assert [each.exitcode for each in processes] == [1, 1]
    told = json.loads((folder / "status.json").read_text())
    assert told["state"] == "failed"
    assert re.search(
        r"could not be written to .*pretrain: .* and run again: it (starts over|goes on from)", told["message"]
    )
    assert "could not be written" in (tmp_path / "said").read_text()
    assert not artifact.temporaries(folder)


def test_data_that_cannot_be_read_is_refused_and_not_taken_for_a_write_that_failed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^text.txt: cannot be read"), saying_what_cannot_be_written(tmp_path):
        raise DataError("text.txt: cannot be read: Permission denied") from OSError(errno.EACCES, "Permission denied")
