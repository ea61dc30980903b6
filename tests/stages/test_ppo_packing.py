"""PPO's models read episodes without padding where they can, and everything is as if there had been padding."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_world import LAYOUTS, one_iteration
from ppo_world import flat, model_folders, settings
from torch import Tensor

from rlhf.stages.packing import episodes_as_pack, pack_of, read_pack
from rlhf.stages.ppo import layout as layout_module
from rlhf.stages.ppo.layout import Roles, load_roles
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime

NewRun = Callable[..., Runtime]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture
def new_run(given: dict[str, str], tmp_path: Path) -> Iterator[NewRun]:
    runs: list[Runtime] = []

    def make(**fields: Any) -> Runtime:
        (folder := tmp_path / f"run{len(runs)}").mkdir()
        runs.append(Runtime(settings(**given, **fields), folder))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def readers(roles: Roles) -> list[Any]:
    critic = [] if roles.critic is None else [roles.critic]
    return [roles.policy, roles.reference, *critic, *(reward.scalar for reward in roles.rewards.models)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_iteration_without_padding_is_the_one_with_it(
    new_run: NewRun, tokenizer: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of layers that are computed again, and with the value of a slot after the end."""
    packs: list[int] = []

    def watch(model: Any, pack: Any) -> Tensor:
        packs.append(pack.ids.numel())
        return read_pack(model, pack)

    rates = {"learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    fields = {"score_placement": "after_eos", "gradient_checkpointing": True, **rates, **LAYOUTS[layout]}
    found = []
    for packing in (False, True):
        monkeypatch.setattr("rlhf.stages.packing.read_pack", watch if packing else pytest.fail)
        run = new_run(packing=packing, **fields)
        torch.manual_seed(1)
        roles = load_roles(run, tokenizer)
        packs.clear()
        rollout = one_iteration(run, roles)
        learned = [flat(roles.policy)] + ([] if roles.critic is None else [flat(roles.critic)])
        kept = [x.where(rollout.mask, 0) if x.shape == rollout.mask.shape else x for x in vars(rollout).values()]
        found.append([*kept, *learned])
    assert packs
    for padded, without in zip(*found, strict=True):
        torch.testing.assert_close(without, padded, rtol=1e-4, atol=1e-4)


def test_the_tokens_of_all_microbatches_are_found_once_and_before_the_first_is_read(
    new_run: NewRun, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has to be waited for: once for policy, reference and critic, once for the epochs of an update, and by the
    reward model, which reads the last token too."""
    events: list[str] = []

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: events.append(name) or function(*given)

    monkeypatch.setattr("rlhf.stages.microbatches.episodes_as_pack", note("found", episodes_as_pack))
    monkeypatch.setattr("rlhf.stages.models.episodes_as_pack", pytest.fail)
    monkeypatch.setattr("rlhf.stages.models.pack_of", pytest.fail)
    monkeypatch.setattr("rlhf.stages.ppo.reward_models.pack_of", note("found late", pack_of))
    monkeypatch.setattr("rlhf.stages.packing.read_pack", note("read", read_pack))
    run = new_run(packing=True, microbatch_tokens=30, num_epochs=2, num_minibatches=1)
    roles = load_roles(run, tokenizer)
    monkeypatch.setattr("rlhf.stages.ppo.update.Updater.__call__", note("update", Updater.__call__))
    events.clear()
    one_iteration(run, roles)
    scoring, update = events[: events.index("update")], events[events.index("update") + 1 :]
    num = scoring.count("found")
    assert num > 1
    assert scoring == ["found"] * num + ["read"] * 3 * num + ["found late"] * num + ["read"] * num
    assert update == ["found"] * num + ["read"] * 2 * 2 * num


def test_every_role_that_reads_ids_is_tried_on_the_device_and_waits_elsewhere(
    new_run: NewRun, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(packing=True, offload=True)
    assert [reader.packed for reader in readers(load_roles(run, tokenizer))] == [True] * 4
    assert "no effect" not in capsys.readouterr().out
    answers = iter([True, True, False, False])
    monkeypatch.setattr(layout_module, "reads_packs", lambda *_: next(answers))
    assert [reader.packed for reader in readers(load_roles(run, tokenizer))] == [True, True, False, False]
    assert "ppo.packing has no effect on critic, reward_model: the model, or" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU packs unasked")
def test_without_a_gpu_rows_are_padded_unless_packing_is_asked_for(new_run: NewRun, tokenizer: Any) -> None:
    assert [reader.packed for reader in readers(load_roles(new_run(), tokenizer))] == [False] * 4
