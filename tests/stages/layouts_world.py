"""What the tests of PPO's layouts have in common: a run of each, one iteration of their roles, a look into memory."""

from pathlib import Path
from typing import Any

import torch
from ppo_world import EOS, make_targets
from stages_world import byte_tokenizer, without_clock
from torch import Tensor

from rlhf.data.rows import Prompt
from rlhf.stages.artifact import Artifact
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo.layout import Roles, prepare
from rlhf.stages.ppo.rollout import Rollout, collect, policy_engine
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime

LAYOUTS: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared_trunk": {"layout": "shared_trunk", "value_coef": 0.5},
    "adapters": {"layout": "adapters", "lora": {"r": 2, "alpha": 4}},
}
ADAPTERS = LAYOUTS["adapters"]
IDS = torch.randint(1, 260, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).bool()


def places(model: torch.nn.Module) -> set[int]:
    """Where the weights of the base lie."""
    return {p.data_ptr() for name, p in model.named_parameters() if "lora_" not in name and "score" not in name}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(row) for row in Artifact(folder).metrics]


def logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        return PolicyModel(model)(IDS, MASK, 6, 0.7)[0]


def one_iteration(run: Runtime, roles: Roles) -> Rollout:
    """A rollout and its updates, after which every weight that learns has had a gradient."""
    tokenizer = byte_tokenizer()
    policy, critic, *optimizers = prepare(run, roles)
    asked = [Prompt([{"role": "user", "content": "unread"}], {})] * 8
    prompts = [[40 + i] * (1 + i % 3) for i in range(8)]
    rollout = collect(
        policy_engine(run, roles.policy), roles.policy, roles.reference, roles.rewards, roles.critic, prompts,
        asked, run.settings, [EOS], tokenizer,
    )  # fmt: skip
    Updater(run, policy, critic, optimizers, None)(rollout, make_targets(rollout), 0, 0.05)
    return rollout
