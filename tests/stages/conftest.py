"""Tiny models in memory, and a tokenizer whose pad is its eos."""

from pathlib import Path
from typing import Any

import pytest
from stages_world import byte_tokenizer, inputs, run_stage, tiny_policy

SHAPES = ("llama", "gpt2")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Bytes, three role tokens, and <|endoftext|> (id 0) as eos and pad."""
    return byte_tokenizer()


@pytest.fixture(params=SHAPES)
def policy(request: pytest.FixtureRequest) -> Any:
    return tiny_policy(request.param)


@pytest.fixture
def policy_folder(tmp_path: Path, tokenizer: Any) -> Path:
    """A saved tiny Llama with its tokenizer."""
    from rlhf.stages.models import save_folder

    folder = tmp_path / "policy"
    save_folder(folder, tiny_policy(), tokenizer)
    return folder


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are of what is there all the time, worked and sent: passes, which take long to trace, tell nothing."""
    from rlhf.stages import budget_ppo, budget_stages

    for module in (budget_ppo, budget_stages):
        monkeypatch.setattr(module, "traced", lambda *_: {name: {} for name in ("rollout", "scoring", "update")})


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the four stages, each trained for a few steps from the one before."""
    root = tmp_path_factory.mktemp("chain")
    folders = {stage: root / stage for stage in ("pretrain", "sft", "reward", "ppo")}
    run_stage("pretrain", folders["pretrain"])
    for stage in ("sft", "reward", "ppo"):
        run_stage(stage, folders[stage], **inputs(stage, folders))
    return folders
