"""Models that are spread over two processes (FSDP2) learn what one process teaches them, and any number goes on."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppo_world import flat, make_rollout, make_targets, model_folders, settings, tiny_scalar
from processes_world import in_two_processes
from resume_world import make_world, rows, run_and_watch
from safetensors.torch import load_file
from stages_world import run_stage, tiny_policy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.data.collate import Blocks
from rlhf.data.errors import RefusedError
from rlhf.stages import sharding
from rlhf.stages.adapters import merged
from rlhf.stages.artifact import Artifact
from rlhf.stages.head_loss import takes_logits_straight
from rlhf.stages.models import load_policy, load_tokenizer, save_folder
from rlhf.stages.optimizers import trained
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import load_roles
from rlhf.stages.ppo.rollout import read_part
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import read_settings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
END_AFTER, STEPS = 2, 5
PPO: dict[str, Any] = {"num_iterations": STEPS, "num_epochs": 1}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretrain": ("pretrain", {"num_steps": STEPS, "sample_prompts": ["ab"], "sample_length": 4}),
    "sft": ("sft", {"num_epochs": 1}),
    "sft of adapters": ("sft", {"num_epochs": 1, "lora": {"r": 1, "alpha": 4}}),
    "reward": ("reward", {"num_epochs": 1, "microbatch_size": 1}),
    "reward of adapters": ("reward", {"num_epochs": 1, "lora": {"r": 2, "alpha": 4}}),
    "ppo": ("ppo", PPO),
    "ppo of adapters": ("ppo", {**PPO, "layout": "adapters", "lora": {"r": 2, "alpha": 4}}),
}
EQUAL = [name for name in RUNS if not name.startswith("ppo")]  # whose samples come from a stream of each process
FOLDERS = [(name, folder) for name in EQUAL for folder in ("fewer", "more") if folder == "fewer" or " " not in name]
"""Of runs that two processes begin and one ends, or the other way round."""
VARIANTS: list[dict[str, Any]] = [
    {"microbatch_tokens": 10, "ema_decay": 0.5},  # of which the processes make unequally many passes
    {"layout": "shared_trunk", "value_coef": 0.5, "gradient_checkpointing": True, "ptx_coef": 0.3, "ptx_data": "",
     "ptx_batch_size": 4, "ptx_block_size": 8},
    {"layout": "adapters", "lora": {"r": 2, "alpha": 4}},
]  # fmt: skip
BLOCKS = Blocks(np.arange(1, 34), 8, "text")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("pretrain", {"optimizer": "muon"}, "pretrain.optimizer: muon: not with models that are spread"),
    ("ppo", {"offload": True}, "ppo.offload: not with models"),
]
ON = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@dataclass
class Found:
    """What a process saw of PPO's updates, by variant."""

    weights: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)
    read: list[tuple[Tensor, ...]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    loaded: tuple[dict[str, Any], int, Tensor] = ({}, 0, torch.zeros(0))
    """What a model was before it was spread, how many weights a process has of it then, and all of them."""


def update(root: Path, given: dict[str, str], rank: int, of: int) -> Found:
    """One update of eight episodes that are shared by the processes."""
    found = Found()
    whole = make_rollout(tiny_policy(), tiny_policy(), tiny_scalar())
    mine = list(range(rank, 8, of))
    for number, variant in enumerate(VARIANTS):
        fields = {**given, "num_epochs": 1, "num_minibatches": 1, "max_grad_norm": 1e9, **variant}
        fields |= {"ptx_data": given["data"]} if "ptx_data" in variant else {}
        (folder := root / f"update-{of}-{number}").mkdir(exist_ok=True)
        run = Runtime(settings(**fields), folder)
        roles = load_roles(run, load_tokenizer(given["model"]))
        learners: list[Any] = [roles.policy, *([roles.critic] if roles.critic else [])]
        assert [sharding.is_sharded(model) for model in [*learners, roles.reference]] == [of == 2] * (len(learners) + 1)
        optimizers = [torch.optim.SGD(trained(model).values(), lr=0.01) for model in learners]
        prepared = run.accelerator.prepare(*learners, *optimizers)
        policy, critic, optimizers = prepared[0], prepared[1] if roles.critic else None, prepared[len(learners) :]
        updater = Updater(run, policy, critic, list(optimizers), BLOCKS if "ptx_coef" in variant else None)
        with torch.no_grad():
            ids, attention = whole.input_ids[mine], whole.attention_mask[mine]
            found.read.append(read_part(roles.policy, roles.reference, roles.critic, ids, attention, 6, run.settings))
        part, learned = (make_part(x, mine) for x in (whole, make_targets(whole)))
        found.stats.append(updater(part, learned, 0, 0.05))
        weights = []
        for model in learners:
            with run.whole(model) as together:
                weights.append(flat(together) if run.is_main else torch.zeros(0))
        found.weights.append(torch.cat(weights))
        averages = [sharding.full(x).flatten() for x in updater.ema.weights.values()]
        found.averages.append(torch.cat([torch.zeros(0), *averages]))
        run.close()
    return found


def load_half(folder: Path) -> tuple[dict[str, Any], int, Tensor]:
    """A model whose file is in bfloat16, to be trained in float32."""
    model = load_policy(str(folder), load_tokenizer(str(folder)), spread=True)
    before = {
        "type": model.dtype,
        "is in its file": f"{folder}/model.safetensors" in Path("/proc/self/maps").read_text(),
    }
    sharding.spread(model, sharding.Sharding(True), torch.device("cpu"), torch.bfloat16)
    with sharding.gathered(model), torch.autocast("cpu", torch.bfloat16):
        before["straight"] = takes_logits_straight(model)
    weights = list(model.parameters())
    parts = sum(sharding.local(weight).numel() for weight in weights)
    return before, parts, torch.cat([sharding.full(weight.detach()).flatten() for weight in weights])


def make_part(whole: Any, mine: list[int]) -> Any:
    """The rows of one process, of a rollout or its targets."""
    return type(whole)(**{name: x[mine] for name, x in vars(whole).items()})


def process(rank: int, root: Path, world: dict[str, dict[str, Any]], given: dict[str, str]) -> Found:
    """One of two: the first steps of some folders, the last steps of others."""
    os.environ |= ON
    found = update(root, given, rank, 2)
    found.loaded = load_half(root / "half")
    for stage, fields, _ in REFUSED:
        with pytest.raises(RefusedError) as error:
            run_stage(stage, root / "refused" / next(iter(fields)), **world[stage] | fields)
        found.refused.append(str(error.value))
    for name, (stage, _) in RUNS.items():
        run_and_watch(stage, root / "fewer" / name, world[name], END_AFTER)
        if " " not in name:
            run_and_watch(stage, root / "more" / name, world[name])
    return found


@dataclass
class Outcome:
    root: Path
    alone: Found
    both: list[Found]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Outcome:
    root = tmp_path_factory.mktemp("sharding")
    stages = make_world(root / "world", "llama", dropout=0.0)
    (root / "ppo").mkdir()
    given = model_folders(root / "ppo", tokenizer)
    save_folder(root / "half", tiny_policy().bfloat16(), tokenizer)
    world = {name: stages[stage] | fields for name, (stage, fields) in RUNS.items()}
    for name, (stage, _) in RUNS.items():
        if name in EQUAL:
            run_and_watch(stage, root / "alone" / name, world[name])
        if " " not in name:
            run_and_watch(stage, root / "more" / name, world[name], END_AFTER)
    both = in_two_processes(root, process, root, world, given)
    for name, (stage, _) in RUNS.items():
        run_and_watch(stage, root / "fewer" / name, world[name])
    return Outcome(root, update(root, given, 0, 1), both)


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_a_stage_ends_as_that_of_one_process_and_goes_on_with_another_number(
    outcome: Outcome, name: str, folder: str
) -> None:
    ours, theirs = (outcome.root / where / name for where in (folder, "alone"))
    found, expected = (load_file(where / "model" / "model.safetensors") for where in (ours, theirs))
    assert found.keys() == expected.keys()
    for weight, value in expected.items():
        torch.testing.assert_close(found[weight], value, rtol=1e-5, atol=1e-5)
    for one, other in zip(rows(ours), rows(theirs), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert Artifact(ours).manifest["metrics"].keys() == Artifact(theirs).manifest["metrics"].keys()


@pytest.mark.parametrize("folder", ["fewer/ppo", "more/ppo", "fewer/ppo of adapters"])
def test_ppo_ends_with_all_its_rows_and_models_that_load(outcome: Outcome, folder: str) -> None:
    stage = outcome.root / folder
    assert [row["step"] for row in rows(stage)] == [3, 5]
    model = AutoModelForCausalLM.from_pretrained(stage / "model")
    if folder.endswith("adapters"):
        base = load_policy(read_settings(stage, PPOSettings).model or "", load_tokenizer(str(stage / "model")))
        torch.testing.assert_close(flat(merged(base, stage / "model" / "adapter")), flat(model))
        assert (stage / "critic" / "adapter_model.safetensors").is_file()
    else:
        AutoModelForCausalLM.from_pretrained(stage / "ema")
        assert AutoModelForSequenceClassification.from_pretrained(stage / "critic").num_labels == 1


def test_a_model_comes_to_its_type_when_it_is_spread_and_lies_in_its_file_until_then(outcome: Outcome) -> None:
    _, parts, values = outcome.both[0].loaded
    for before, both_parts, found in (both.loaded for both in outcome.both):
        assert before == {"type": torch.bfloat16, "is in its file": True, "straight": True}
        assert both_parts == parts
        torch.testing.assert_close(found, values)
    whole = load_policy(str(outcome.root / "half"), load_tokenizer(str(outcome.root / "half")))  # in one process
    torch.testing.assert_close(values, flat(whole), rtol=0, atol=0)
    assert parts <= 0.6 * len(values)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_two_processes_make_ppos_update_of_one(outcome: Outcome, variant: int) -> None:
    expected = outcome.alone
    torch.testing.assert_close(outcome.both[0].weights[variant], expected.weights[variant], rtol=1e-5, atol=1e-5)
    for found in outcome.both:
        torch.testing.assert_close(found.averages[variant], expected.averages[variant], rtol=1e-5, atol=1e-5)
        assert found.stats[variant] == pytest.approx(expected.stats[variant], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_all_roles_read_what_they_read_in_one_process(outcome: Outcome, variant: int) -> None:
    for rank, found in enumerate(outcome.both):
        for ours, theirs in zip(found.read[variant], outcome.alone.read[variant], strict=True):
            torch.testing.assert_close(ours, theirs[rank::2], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_spread_is_refused_by_name(outcome: Outcome) -> None:
    for found in outcome.both:
        for said, (_, _, expected) in zip(found.refused, REFUSED, strict=True):
            assert expected in said


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def ask(**more: str) -> sharding.Sharding | None:
        for name, value in {**ON, **more}.items():
            monkeypatch.setenv(name, value)
        sharding.asked_for.cache_clear()
        return sharding.asked_for()

    yield ask
    sharding.asked_for.cache_clear()


def test_what_the_accelerate_config_asks_for_is_taken_from_its_variables_once(asking: Any) -> None:
    assert asking() == sharding.Sharding(reshard_after_forward=True)
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert sharding.asked_for() is not None
    assert asking(FSDP_RESHARD_AFTER_FORWARD="false") == sharding.Sharding(reshard_after_forward=False)
    assert asking(ACCELERATE_USE_FSDP="false") is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FSDP_VERSION", "1", "FSDP version 1: set fsdp_version: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params .* is not supported: leave it out"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "set the stage's own gradient_checkpointing"),
    ],
)
def test_what_is_not_done_here_is_refused_with_the_cure(asking: Any, name: str, value: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        asking(**{name: value})
