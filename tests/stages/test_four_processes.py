"""Four processes and seven rows, in batches of four: no share comes out even, and all is as in one process."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from processes_world import in_processes
from safetensors.torch import load_file
from stages_world import byte_tokenizer, run_stage, tiny_policy
from torch.testing import assert_close

from rlhf.stages.artifact import Artifact
from rlhf.stages.models import save_folder

STAGES = ("sft", "reward")
SMALL: dict[str, Any] = {"num_epochs": 2, "global_batch_size": 4, "max_length": 48, "save_every": 9}
MORE: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {"judge": None, "num_sampled_answers": 0, "judge_noise": 0.0, "eval_every": 2},
}


def rows(stage: str, first: int) -> list[dict[str, Any]]:
    """Seven, of unlike lengths."""
    found = []
    for number in range(first, first + 7):
        prompt, good = f"{chr(97 + number)} {number}?", "yes " * (1 + number % 4)
        found.append(
            {"prompt": prompt, **({"response": good} if stage == "sft" else {"chosen": good, "rejected": "no"})}
        )
    return found


def write_world(root: Path) -> None:
    save_folder(root / "policy", tiny_policy(), byte_tokenizer())
    for stage, (name, first) in product(STAGES, (("data", 0), ("eval_data", 7))):
        (root / f"{stage}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(stage, first)))


def train(_rank: int, root: Path, name: str) -> list[dict[str, Any]]:
    """The final metrics of each stage, in folders with that in their names."""
    return [
        run_stage(
            stage, root / f"{stage}-{name}", model=str(root / "policy"), data=str(root / f"{stage}-data.jsonl"),
            eval_data=str(root / f"{stage}-eval_data.jsonl"), **SMALL, **MORE[stage],
        )
        for stage in STAGES
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """A folder with stages of one process and of four, and the final metrics that each of the four had."""
    root = tmp_path_factory.mktemp("four")
    write_world(root)
    for stage, name in product(STAGES, ("one", "four")):
        (root / f"{stage}-{name}").mkdir()
    train(0, root, "one")
    return root, in_processes(4, root, train, root, "four")


@pytest.mark.parametrize("stage", STAGES)
def test_weights_losses_and_figures_are_those_of_one_process(
    stage: str, trained: tuple[Path, list[list[dict[str, Any]]]]
) -> None:
    root, of_each = trained
    one, four = (Artifact(root / f"{stage}-{name}") for name in ("one", "four"))
    assert (one.manifest["made_with"]["processes"], four.manifest["made_with"]["processes"]) == (1, 4)
    weights, expected = (load_file(artifact.model / "model.safetensors") for artifact in (four, one))
    assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    steps = [row["step"] for row in four.metrics]
    assert steps == [row["step"] for row in one.metrics]
    assert set(steps) == {1, 2, 3, 4}  # of 14 rows, and two of a third epoch
    for found, wanted in zip([*four.metrics, *(final[STAGES.index(stage)] for final in of_each)],
                             [*one.metrics, *[one.manifest["metrics"]] * 4], strict=True):  # fmt: skip
        for name in ("loss", "eval_loss", "accuracy", "score_mean", "score_std", "grad_norm"):
            assert found.get(name) == (None if name not in wanted else pytest.approx(wanted[name], rel=1e-5)), name
