"""The three layouts of PPO: who shares what in memory, what learns, what is saved, and what is refused."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_world import ADAPTERS, IDS, LAYOUTS, MASK, logprobs, one_iteration, places, rows
from peft import PeftModel
from ppo_world import flat, lora_reward, make_rollout, make_targets, model_folders, run_ppo, settings
from ppo_world import tiny_scalar as scalar
from safetensors.torch import load_file
from stages_world import tiny_policy
from transformers import AutoModelForCausalLM

from rlhf.data.errors import RefusedError
from rlhf.stages import adapters
from rlhf.stages.artifact import Artifact
from rlhf.stages.budget import GIB
from rlhf.stages.budget_ppo import memory
from rlhf.stages.models import PolicyModel, fresh_head, load_policy, load_scalar, save_folder
from rlhf.stages.ppo import selection as selection_module
from rlhf.stages.ppo import train as train_module
from rlhf.stages.ppo.layout import Roles, keep_policy, load_roles, prepare
from rlhf.stages.ppo.objective import policy_loss, value_loss
from rlhf.stages.ppo.rollout import Rollout, collect, response_values
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
Given = dict[str, str]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Given:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="module")
def with_adapter(given: Given, tmp_path_factory: pytest.TempPathFactory) -> Given:
    """The same, but the reward model was trained as an adapter of the policy's start."""
    return {**given, "reward_model": lora_reward(tmp_path_factory.mktemp("lora") / "reward", given["model"])}


class Finished:
    """A whole stage, and what was in memory at its end."""

    def __init__(self, folder: Path, given: Given, **fields: Any) -> None:
        self.folder = folder
        self.rollouts: list[Rollout] = []

        def load(*arguments: Any) -> Roles:
            self.roles = load_roles(*arguments)
            return self.roles

        def watch(*arguments: Any) -> Rollout:
            self.rollouts.append(collect(*arguments))
            return self.rollouts[-1]

        def keep(at: Path, policy: PolicyModel, *more: Any) -> None:
            if policy.value_head is not None:
                self.valued = flat(policy.value_head)
            keep_policy(at, policy, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_module, "load_roles", load)
            patch.setattr(train_module, "collect", watch)
            patch.setattr(selection_module, "keep_policy", keep)
            self.metrics = run_ppo(folder, given, **fields)


MakeFinished = Callable[[str], Finished]


@pytest.fixture(scope="module")
def finished(with_adapter: Given, given: Given, tmp_path_factory: pytest.TempPathFactory) -> MakeFinished:
    """The finished stage of a layout, four iterations long; each runs once."""
    known: dict[str, Finished] = {}

    def find(layout: str) -> Finished:
        if layout not in known:
            chosen = with_adapter if layout == "adapters" else given
            folder = tmp_path_factory.mktemp("finished") / layout
            known[layout] = Finished(folder, chosen, ema_decay=0.9, eval_every=4, **LAYOUTS[layout])
        return known[layout]

    return find


@pytest.fixture
def new_run(given: Given, tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    runs: list[Runtime] = []

    def make(inputs: Given = given, **fields: Any) -> Runtime:
        (folder := tmp_path / f"run{len(runs)}").mkdir()
        runs.append(Runtime(settings(**{**inputs, **fields}), folder))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


NewRun = Callable[..., Runtime]


# --- all three


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_iterations_and_two_more_after_a_kill_are_four(
    finished: MakeFinished, given: Given, with_adapter: Given, tmp_path: Path, layout: str
) -> None:
    class Killed(BaseException):
        pass

    log = Runtime.log

    def die(self: Runtime, step: int, *more: Any, **options: Any) -> None:
        log(self, step, *more, **options)
        if step == 3:  # the last checkpoint has two steps behind it
            raise Killed

    chosen = {"ema_decay": 0.9, "eval_every": 4, **LAYOUTS[layout]}
    inputs = with_adapter if layout == "adapters" else given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "log", die)
        with pytest.raises(Killed):
            run_ppo(tmp_path / "ppo", inputs, **chosen)
    assert [row["step"] for row in rows(tmp_path / "ppo")] == [1, 2, 3]
    if layout == "adapters":
        checkpoint = tmp_path / "ppo" / "checkpoints" / "step-00000002"
        kept = load_file(next((checkpoint / "tensors").iterdir()))
        policy, critic = ([name for name in kept if name.startswith(f"models.{number}.")] for number in (0, 1))
        assert all("lora_" in name for name in policy)
        assert all("lora_" in name or name.endswith("classifier.score.weight") for name in critic)
        assert len(policy) == len(critic) - 1 == 28  # A and B of seven layers in two blocks
    run_ppo(tmp_path / "ppo", inputs, **chosen)
    ours, theirs = (Artifact(folder).manifest["files"] for folder in (tmp_path / "ppo", finished(layout).folder))
    kept = {name: digest for name, digest in theirs.items() if name.endswith("safetensors")}
    assert len(kept) == (6 if layout == "adapters" else 3)
    assert {name: ours[name] for name in kept} == kept
    assert rows(tmp_path / "ppo") == rows(finished(layout).folder)


def test_weights_in_bf16_are_refused_where_the_device_multiplies_in_fp32(given: Given, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"ppo\.weights: bf16 needs precision bf16"):
        run_ppo(tmp_path / "ppo", given, weights="bf16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_starts_at_its_reference_and_leaves_it_as_it_was(
    finished: MakeFinished, given: Given, layout: str
) -> None:
    found = finished(layout)
    first = rows(found.folder)[0]
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    if layout == "adapters":
        assert first["kl"] == 0
    assert rows(found.folder)[-1]["kl"] != 0
    start = AutoModelForCausalLM.from_pretrained(given["model"]).state_dict()
    for name, weight in found.roles.reference.model.state_dict().items():
        assert torch.equal(weight, start[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_and_its_average_load_as_plain_language_models(
    finished: MakeFinished, given: Given, layout: str
) -> None:
    start = load_file(Path(given["model"]) / "model.safetensors")
    found = []
    for part in ("model", "ema"):
        folder = finished(layout).folder / part
        assert load_file(folder / "model.safetensors").keys() == start.keys()
        assert not (folder / "adapter_config.json").exists()  # peft has no part in loading it
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["unexpected_keys"]
        assert not info["missing_keys"]
        assert (model.generation_config.temperature, model.generation_config.do_sample) == (None, True)
        found.append(model)
    ours = logprobs(finished(layout).roles.policy.model)
    # The average was swapped into the policy at the end.
    assert torch.allclose(logprobs(found[1]), ours, atol=1e-5)
    assert not torch.allclose(logprobs(found[0]), ours, atol=1e-3)


def test_at_learning_rate_zero_one_trunk_samples_and_scores_exactly_what_two_do(given: Given, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "num_iterations": 2}
    one, two = (
        Finished(tmp_path / layout, given, **LAYOUTS[layout], **fields) for layout in ("separate", "shared_trunk")
    )
    for ours, theirs in zip(one.rollouts, two.rollouts, strict=True):
        for name in ("input_ids", "logprobs", "ref_logprobs", "entropy", "scores"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for row in rows(tmp_path / "shared_trunk"):
        assert row["ratio"] == pytest.approx(1, abs=1e-6)
        assert row["kl"] == 0
        assert row["clip_fraction"] == 0


# --- shared_trunk


def test_one_optimiser_has_two_learning_rates_that_fall_together(
    given: Given, new_run: NewRun, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"learning_rate": 1e-3, "critic_learning_rate": 4e-3, **LAYOUTS["shared_trunk"]}
    roles = load_roles(new_run(**fields), tokenizer)
    assert roles.critic is None
    (optimizer,) = roles.optimizers(settings(**given, **fields))
    trunk, head = optimizer.param_groups
    assert (trunk["lr"], head["lr"]) == (1e-3, 4e-3)
    assert roles.policy.value_head is not None
    assert head["params"] == [roles.policy.value_head.weight]
    assert len(trunk["params"]) == len(list(roles.policy.model.parameters()))
    rates: list[list[float]] = []
    step = torch.optim.AdamW.step

    def watch(self: torch.optim.AdamW, *arguments: Any, **options: Any) -> Any:
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    run_ppo(tmp_path / "ppo", given, num_iterations=2, num_epochs=1, num_minibatches=1, **fields)
    assert rates == [pytest.approx([1e-3, 4e-3]), pytest.approx([5e-4, 2e-3])]


def test_the_gradient_of_one_trunk_is_the_policys_and_the_values_times_value_coef(new_run: NewRun) -> None:
    run = new_run(
        layout="shared_trunk", value_coef=0.5, num_epochs=1, num_minibatches=1, microbatch_size=3, max_grad_norm=1e9
    )

    def world() -> PolicyModel:
        torch.manual_seed(4)
        return PolicyModel(tiny_policy(), fresh_head(16))

    rollout = make_rollout(tiny_policy(), tiny_policy(seed=2), scalar())
    learned = make_targets(rollout)
    gradients = []
    for part in ("policy", "value"):
        reader = world()
        logprobs, _, values = reader(rollout.input_ids, rollout.attention_mask, 6, 0.7)
        assert values is not None
        if part == "policy":
            loss, _ = policy_loss(
                logprobs, rollout.logprobs, learned.advantages, rollout.mask, 0.2, None,
                torch.tensor(28), torch.tensor(28),
            )  # fmt: skip
        else:
            loss, _ = value_loss(values, rollout.values, learned.returns, rollout.mask, 0.2, torch.tensor(28))
        loss.backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in reader.parameters()])
    assert gradients[0][-1].abs().sum() == 0  # the policy's loss knows nothing of the value head
    assert gradients[1][0].abs().sum() > 0  # the value's reaches the trunk
    reader = world()
    before = flat(reader).double()
    optimizer = torch.optim.SGD(reader.parameters(), lr=1.0)
    stats = Updater(run, reader, None, [optimizer], None)(rollout, learned, 0, 0.05)
    expected = torch.cat([(ours + 0.5 * value).flatten() for ours, value in zip(*gradients, strict=True)])
    torch.testing.assert_close((before - flat(reader).double()).float(), expected, rtol=1e-4, atol=1e-5)
    assert stats["policy_grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
    assert {"value_loss", "value_clip_fraction", "ratio_max"} <= stats.keys()
    assert "critic_grad_norm" not in stats


def test_the_value_head_of_the_kept_policy_is_saved_in_a_file_of_its_own(finished: MakeFinished) -> None:
    found = finished("shared_trunk")
    head = load_file(found.folder / "critic" / "value_head.safetensors")
    assert {name: weight.shape for name, weight in head.items()} == {"weight": (1, 16)}
    assert torch.equal(head["weight"][0], found.valued)
    assert not any("value_head" in name for name in load_file(found.folder / "model" / "model.safetensors"))


# --- adapters


@pytest.mark.parametrize("kind", ["with its adapter", "without"])
def test_both_adapters_learn_while_base_and_reference_stay_bit_for_bit(
    given: Given, with_adapter: Given, new_run: NewRun, tokenizer: Any, kind: str
) -> None:
    run = new_run(with_adapter if kind == "with its adapter" else given, **ADAPTERS)
    roles = load_roles(run, tokenizer)
    assert roles.critic is not None
    before = {name: p.detach().clone() for name, p in roles.reference.named_parameters()}
    of_reference, of_policy = logprobs(roles.reference.model), logprobs(roles.policy.model)
    starts = [
        {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        for model in (roles.policy, roles.critic)
    ]
    had_gradient: Counter[str] = Counter()
    for role, model in (("policy", roles.policy), ("critic", roles.critic)):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, key=f"{role} {name}": had_gradient.update([key] if p.grad.abs().sum() > 0 else [])
                )
    rollout = one_iteration(run, roles)
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
    for role, model, start in zip(("policy", "critic"), (roles.policy, roles.critic), starts, strict=True):
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert learning.keys() == start.keys()
        for name, parameter in learning.items():
            assert not torch.equal(parameter, start[name]), name
            assert had_gradient[f"{role} {name}"], name
    assert torch.equal(logprobs(roles.reference.model), of_reference)
    assert not torch.equal(logprobs(roles.policy.model), of_policy)
    for name, parameter in roles.reference.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_all_roles_share_one_base_that_is_counted_once(with_adapter: Given, new_run: NewRun, tokenizer: Any) -> None:
    run = new_run(with_adapter, **ADAPTERS)
    roles = load_roles(run, tokenizer)
    assert roles.critic is not None
    base = places(roles.reference)
    assert places(roles.policy) == base
    for tree in (roles.critic, roles.rewards):
        assert places(tree) <= base
        assert len(places(tree)) == 20  # of 20; the output layer is tied
    found = memory(roles, run.settings, num_rows=8)
    size = sum(x.nbytes for x in (*roles.reference.parameters(), *roles.reference.buffers()))
    assert found["base"] == pytest.approx(size / GIB)
    for name, model in (("policy", roles.policy), ("critic", roles.critic)):
        learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert found[name] == pytest.approx(16 * learning / GIB)  # weight, gradient and two moments in float32
    assert found["reward models"] < 0.5 * found["base"]
    # Keys and values of one head of 8 in 2 layers, for 22 tokens of 8 rows, in float32.
    assert found["rollout cache"] == pytest.approx(2 * 2 * 1 * 8 * 22 * 8 * 4 / GIB)


def test_the_critic_starts_as_the_reward_model(with_adapter: Given, new_run: NewRun, tokenizer: Any) -> None:
    roles = load_roles(new_run(with_adapter, **ADAPTERS), tokenizer)
    assert roles.critic is not None
    whole = load_scalar(with_adapter["reward_model"], tokenizer).eval()
    with torch.no_grad():
        expected = response_values(whole, IDS, MASK, 6)
        values = response_values(roles.critic, IDS, MASK, 6)
        assert torch.equal(values, response_values(roles.rewards.models[0].scalar, IDS, MASK, 6))
    assert torch.allclose(values, expected, atol=1e-5)
    assert roles.rewards.names == ["reward_model"]


def test_the_merged_model_says_what_adapter_and_base_say(finished: MakeFinished, given: Given, tokenizer: Any) -> None:
    folder = finished("adapters").folder
    for part in ("model", "ema"):
        merged = logprobs(AutoModelForCausalLM.from_pretrained(folder / part))
        by_peft = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(given["model"]), str(folder / part / "adapter")
        )
        assert torch.allclose(logprobs(by_peft.base_model.model), merged, atol=1e-5)
        base = load_policy(given["model"], tokenizer)
        adapters.load_adapter(base, folder / part / "adapter")
        assert torch.allclose(logprobs(base), logprobs(by_peft.base_model.model), atol=1e-5)
        assert not torch.allclose(merged, logprobs(load_policy(given["model"], tokenizer)), atol=1e-2)


def test_the_saved_critic_gives_the_values_of_the_trained_one(
    finished: MakeFinished, given: Given, tokenizer: Any
) -> None:
    found = finished("adapters")
    base = load_policy(given["model"], tokenizer).requires_grad_(False)
    again = adapters.load_scalar_on(base, found.folder / "critic").eval()
    assert found.roles.critic is not None
    with torch.no_grad():
        assert torch.equal(again(IDS, MASK), found.roles.critic(IDS, MASK))
    assert (again.mean, again.std) == (found.roles.critic.mean, found.roles.critic.std)
    assert again.std != 1


def test_a_checkpoint_with_other_weights_is_refused(new_run: NewRun, tokenizer: Any) -> None:
    run = new_run(**ADAPTERS)
    prepare(run, load_roles(run, tokenizer))
    run.save(1)
    for lora in ({"r": 2, "target_modules": ["q_proj"]}, {"r": 1}):
        other = new_run(**{**ADAPTERS, "lora": lora})
        other.folder = run.folder
        prepare(other, load_roles(other, tokenizer))
        with pytest.raises(RuntimeError, match="holds other weights than those that are trained now"):
            other.resume()


def test_a_reward_model_that_is_no_adapter_of_this_base_is_loaded_whole(
    with_adapter: Given, new_run: NewRun, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "other", tiny_policy(seed=5), tokenizer)
    roles = load_roles(new_run({**with_adapter, "model": str(tmp_path / "other")}, **ADAPTERS), tokenizer)
    assert not places(roles.rewards) & places(roles.reference)
    assert "no reward model is an adapter of ppo.model" in capsys.readouterr().out
    assert roles.critic is not None
    assert (roles.critic.mean, roles.critic.std) == (0, 1)
