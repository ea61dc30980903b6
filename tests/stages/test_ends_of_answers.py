"""A model's answers end at the tokenizer's eos and at the ids in its generation_config, in every stage and after it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts_world import LAYOUTS
from ppo_world import model_folders, run_ppo, settings, tiny_scalar
from reward_world import new_run
from stages_world import WORLD, byte_tokenizer, run_stage, tiny_policy
from transformers import LlamaForCausalLM

from rlhf.data.rows import Prompt
from rlhf.data.tokens import encode_prompt
from rlhf.stages import adapters
from rlhf.stages.artifact import Artifact
from rlhf.stages.chat import Speaker
from rlhf.stages.evaluation import answers as evaluation
from rlhf.stages.export import export
from rlhf.stages.models import load_policy, load_tokenizer, save_folder
from rlhf.stages.ppo import evaluate as ppo_evaluate
from rlhf.stages.ppo import train as ppo_train
from rlhf.stages.ppo.reward_models import ModelReward
from rlhf.stages.ppo.rewards import Rewards
from rlhf.stages.ppo.rollout import Rollout, collect
from rlhf.stages.pretrain.train import show_samples
from rlhf.stages.reward.answers import sample_answers
from rlhf.stages.sample import Writer
from rlhf.stages.settings import LoraSettings
from rlhf.stages.text_limits import stops_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CPU = torch.device("cpu")
EOS = 0
TURN, LETTER = (byte_tokenizer().convert_tokens_to_ids(text) for text in "!a")
BOTH = [EOS, TURN]
ASK: Any = [{"role": "user", "content": "Who?"}]


def chatty() -> LlamaForCausalLM:
    """A policy that draws eos, "!" or "a", of equal chance after any text, and ends a turn at "!" as at eos."""
    torch.manual_seed(0)
    config = tiny_policy().config
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(16))  # the same state after every token
        state = model.model(input_ids=torch.tensor([[5, 6]])).last_hidden_state[0, 0]
        model.lm_head.weight.zero_()
        model.lm_head.weight[[*BOTH, LETTER]] = 30 * state / state.square().sum()
    model.generation_config.eos_token_id = [TURN, EOS]
    return model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The chatty policy as others have saved it."""
    chatty().save_pretrained(tmp_path / "chatty")
    byte_tokenizer().save_pretrained(tmp_path / "chatty")
    return str(tmp_path / "chatty")


def listed(model: Path) -> Any:
    return json.loads((model / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize(("own", "ends"), [
    (None, [0]), (0, [0]), (7, [0, 7]), ([7, 0, 9, 7], [0, 7, 9]), ([0, 260, -1, 259], [0, 259]),
])  # fmt: skip
def test_answers_end_at_eos_first_and_at_the_models_own_ids_that_it_can_draw(own: Any, ends: list[int]) -> None:
    model = tiny_policy()
    model.generation_config.eos_token_id = own
    assert stops_of(model, byte_tokenizer()) == ends


@pytest.mark.parametrize(("own", "kept"), [([7, 0, 260], [0, 7]), ([0], 0), (None, 0)])
def test_a_saved_model_lists_all_its_ends_and_one_alone_as_a_number(tmp_path: Path, own: Any, kept: Any) -> None:
    model = tiny_policy()
    model.generation_config.eos_token_id = own
    model.generation_config.top_k = 5
    save_folder(tmp_path / "model", model, byte_tokenizer())
    assert listed(tmp_path / "model") == kept
    assert "top_k" not in json.loads((tmp_path / "model" / "generation_config.json").read_text())


@pytest.mark.parametrize(
    ("layout", "engine"), [*((layout, "static") for layout in LAYOUTS), ("separate", "transformers")]
)
def test_a_rollout_of_ppo_ends_at_both_and_both_count_as_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, layout: str, engine: str
) -> None:
    rollouts: list[Rollout] = []

    def watched(*given: Any, **named: Any) -> Rollout:
        rollouts.append(collect(*given, **named))
        return rollouts[-1]

    monkeypatch.setattr(ppo_train, "collect", watched)
    monkeypatch.setattr(ppo_evaluate, "collect", watched)
    given = {**model_folders(tmp_path, byte_tokenizer()), "model": folder}
    fields = {"max_new_tokens": 12, "missing_eos_penalty": 100.0, "rollout": {"engine": engine}, "num_iterations": 2,
              "ema_decay": 0.5}  # fmt: skip
    metrics = run_ppo(tmp_path / "ppo", given, **fields, **LAYOUTS[layout])
    for rollout in rollouts:
        is_end = torch.isin(rollout.responses, torch.tensor(BOTH)) & rollout.mask
        last = rollout.mask & (rollout.mask.cumsum(-1) == rollout.lengths[:, None])
        assert torch.equal(is_end, last)  # all of them end, and none goes on after an end
        assert rollout.ended.all()
    drawn = torch.cat([rollout.responses[rollout.mask] for rollout in rollouts])
    assert {*drawn.tolist()} == {*BOTH, LETTER}
    rows = Artifact(tmp_path / "ppo").metrics
    assert [row["eos_share"] for row in rows] == [1.0, 1.0]
    assert all(row["rlhf_reward"] > -50 for row in rows)  # no answer paid for an end that it has
    assert metrics["eos_share"] == metrics["sft_eos_share"] == 1.0
    texts = [json.loads(line) for line in (tmp_path / "ppo" / "samples.jsonl").read_text().splitlines()]
    assert {*"".join(row["sft"] + row["ppo"] for row in texts)} <= {"a"}  # without the token that ends them
    assert listed(tmp_path / "ppo" / "model") == listed(tmp_path / "ppo" / "ema") == BOTH


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 4}])
def test_sft_hands_on_all_ends_of_its_model(tmp_path: Path, folder: str, lora: Any) -> None:
    rows = [{"prompt": text, "response": text * 3} for text in "abcdefghijkl"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(tmp_path / "rows.jsonl")
    run_stage("sft", tmp_path / "sft", model=folder, data=data, lora=lora, max_length=32)
    assert listed(tmp_path / "sft" / "model") == BOTH


def test_an_exported_model_has_all_ends_also_one_merged_from_an_adapter(tmp_path: Path, folder: str) -> None:
    model = load_policy(folder, byte_tokenizer())
    adapters.add_lora(model, LoraSettings(r=2))
    adapters.save_adapter(tmp_path / "adapter", model)
    for name, source in (("whole", folder), ("merged", str(tmp_path / "adapter"))):
        export(source, tmp_path / name)
        assert listed(tmp_path / name) == BOTH


def test_an_evaluation_ends_answers_at_both_and_scores_them_as_if_at_eos(folder: str) -> None:
    tokenizer, scorer = load_tokenizer(folder), tiny_scalar()
    speaker = evaluation.Speaker(folder, tokenizer, CPU, compiled=False)
    ids = encode_prompt(tokenizer, ASK)
    asked = evaluation.Questions([Prompt(ASK, {})], [ids], settings(max_new_tokens=12), tokenizer)
    rewards = Rewards([ModelReward("reward", scorer)])
    found = evaluation.answers(asked, speaker, speaker, rewards, 40, lambda text: None)[0]
    assert all(answer.ended for answer in found)
    assert all(answer.text == "a" * (answer.length - 1) for answer in found)
    assert len({answer.length for answer in found}) > 2
    for answer in found:
        whole = torch.tensor([[*ids, *[LETTER] * (answer.length - 1), EOS]])
        alone = scorer(whole, torch.ones_like(whole).bool())[0, -1].item()
        assert answer.score == pytest.approx(alone, abs=1e-5)


def test_chat_ends_an_answer_at_both_and_shows_neither(folder: str) -> None:
    torch.manual_seed(0)
    speaker = Speaker("chatty", folder, 1.0, 30, CPU)
    pieces: list[str] = []
    found = [speaker.answer(ASK, pieces.append) for _ in range(20)]
    assert all(answer.ended for answer in found)
    assert {*"".join(pieces)} == {*"".join(answer.text for answer in found)} == {"a"}


def test_answers_for_raters_end_at_both(folder: str) -> None:
    torch.manual_seed(0)
    texts = Writer(folder, "chatty", CPU, 30).answers([ASK] * 20, 1.0)
    assert {*"".join(texts)} == {"a"}
    assert max(map(len, texts)) < 30


def test_answers_that_a_judge_ranks_end_at_both(tmp_path: Path, folder: str) -> None:
    run = new_run(tmp_path / "run", judge=f"{WORLD}:judge", num_sampled_answers=20, max_new_tokens=30, model=folder)
    texts = sample_answers(run, byte_tokenizer(), [ASK])[0]
    run.close()
    assert {*"".join(texts)} == {"a"}
    assert max(map(len, texts)) < 30


def test_samples_while_pretraining_goes_on_from_a_chat_model_end_at_both(tmp_path: Path, folder: str) -> None:
    chosen = SimpleNamespace(seed=0, sample_length=30, sample_prompts=["b"] * 20)
    run: Any = SimpleNamespace(
        settings=chosen, is_main=True, device=CPU, low_precision=None, folder=tmp_path, say=lambda text: None
    )
    tokenizer = load_tokenizer(folder)
    show_samples(run, load_policy(folder, tokenizer), tokenizer, [[5, 6]] * 20, 1)
    texts = [json.loads(line)["text"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert any(text.endswith("!") for text in texts)
    assert not any("!" in text[:-1] for text in texts)
