"""Two processes, of which the second hangs: both end, and it is the second that is named."""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forking import fork, free_port
from processes_world import become_rank
from stages_world import byte_tokenizer, run_stage, tiny_policy

from rlhf.stages.models import save_folder

CASES: dict[str, tuple[str, str]] = {
    "forward": ("sft", "the update"),
    "forward of pretraining": ("pretrain", "the update"),
    "forward of spread weights": ("sft", "the update"),
    "first evaluation": ("sft", "evaluation"),
    "writing": ("sft", "saving"),
    "stopped": ("sft", "the update"),
}
"""Stage, and the phase that is told."""


def process(rank: int, port: int, case: str, root: Path) -> None:
    """Rank 1 hangs. From there on nothing moves: now a hundredth of `stop_hung_after` is enough."""
    os.dup2(os.open(root / f"{case} {rank}", os.O_CREAT | os.O_WRONLY), 2)
    become_rank(rank, port)
    if case == "forward of spread weights":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    from torch.distributed.checkpoint.filesystem import FileSystem
    from transformers import LlamaModel

    from rlhf.stages import watchdog

    reached: list[bool] = []

    def instead(owner: Any, name: str, phase: str, step: int) -> None:
        real = getattr(owner, name)

        def hang(*arguments: Any, **named: Any) -> Any:
            dog = watchdog._current
            if not reached and dog is not None and (dog._place.phase, dog._place.step) == (phase, step):
                reached.append(True)
                dog.limit /= 100
                if rank == 1:
                    if case == "stopped":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    threading.Event().wait()
            return real(*arguments, **named)

        setattr(owner, name, hang)

    if case == "writing":
        instead(FileSystem, "create_stream", "saving", 2)
    else:
        instead(LlamaModel, "forward", CASES[case][1], 0 if case == "first evaluation" else 2)
    given = {"num_epochs": 3, "max_length": 48, "model": str(root / "policy")} if CASES[case][0] == "sft" else {}
    run_stage(CASES[case][0], root / case, save_every=2, stop_hung_after=600, **given)


@dataclass
class Ended:
    """What became of the two processes of a case."""

    pids: list[int | None]
    codes: list[int | None]
    """None of one that is still there."""
    message: str
    said: str
    """What the second wrote."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All cases, at once since they mostly wait."""
    root = tmp_path_factory.mktemp("hangs")
    save_folder(root / "policy", tiny_policy(), byte_tokenizer())
    begun, found = {}, {}
    for case in CASES:
        (root / case).mkdir()
        port = free_port()
        begun[case] = [fork(process, rank, port, case, root) for rank in range(2)]
    for case, both in begun.items():
        for each in both:
            each.join(60)
        codes = [each.exitcode for each in both]
        for each in both:
            each.kill()
            each.join()
        told = json.loads((root / case / "status.json").read_text())
        assert told["state"] == "failed"
        found[case] = Ended([each.pid for each in both], codes, told["message"], (root / f"{case} 1").read_text())
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case != "stopped"])
def test_the_process_that_hangs_is_named_and_not_the_one_that_waits_for_it(case: str, ended: dict[str, Ended]) -> None:
    found = ended[case]
    of_second, _, of_first = found.message.partition(" (rank 0 is in ")
    assert of_second.startswith(f"it stands still: rank 1 (pid {found.pids[1]} on ")
    assert f"it is in {CASES[case][1]} after step " in of_second
    assert ("the collective" in of_first) == (case != "forward of spread weights")  # which waits in its forward pass
    assert "in hang" in found.said
    assert found.codes == [1, 1]


def test_a_process_that_is_stopped_is_named_and_ended(ended: dict[str, Ended]) -> None:
    """It may have moved since it last wrote where it is."""
    found = ended["stopped"]
    assert found.message.startswith(f"it stands still: rank 1 (pid {found.pids[1]} on ")
    assert "gave its last sign of life" in found.message
    assert found.codes == [1, -signal.SIGKILL]
