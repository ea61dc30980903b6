"""What every engine in this process does: it samples softmax(logits / temperature), up to the first stop token."""

import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from engines_world import PROMPTS, assert_drawn_from, assert_sampled
from stages_world import tiny_policy
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM

from rlhf.data.errors import SettingsError
from rlhf.stages.engines import Engine
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.engines.slots import Slots, slots_attention, working_on
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.engines.stock import TransformersEngine

Name = Literal["static", "transformers"]
Shares = Callable[[int], torch.Tensor]
MANY = 20_000
STOPS = list(range(10, 60))
"""Of 260 tokens: enough for responses of several lengths."""


@pytest.fixture(params=["static", "transformers"])
def name(request: pytest.FixtureRequest) -> Name:
    found: Name = request.param
    return found


@pytest.fixture
def engine(policy: Any, name: Name) -> Engine:
    return make_engine(policy, name)


def tokens(engine: Engine, prompts: list[list[int]], length: int, temperature: float = 1.0,
           stops: list[int] | None = None) -> torch.Tensor:  # fmt: skip
    torch.manual_seed(3)
    return engine.generate(prompts, length, temperature, stops or [], 0).tokens


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@torch.no_grad()
def test_tokens_follow_the_softmax_at_the_temperature(policy: Any, engine: Engine, temperature: float) -> None:
    drawn = tokens(engine, [[7, 8, 9]] * MANY, 2, temperature)
    first = (policy(torch.tensor([[7, 8, 9]])).logits[0, -1] / temperature).softmax(-1)
    assert_drawn_from(first, drawn[:, 0])
    texts = torch.tensor([[7, 8, 9, token] for token in range(260)])
    second = (policy(texts).logits[:, -1] / temperature).softmax(-1)  # [260,260] after each first token
    assert_drawn_from(first @ second, drawn[:, 1])


def test_a_leftover_generation_config_changes_nothing(policy: Any, engine: Engine) -> None:
    plain = tokens(engine, [[7, 8, 9]] * 200, 3)
    policy.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.1, repetition_penalty=9.0)
    assert torch.equal(tokens(engine, [[7, 8, 9]] * 200, 3), plain)
    assert policy.generation_config.top_k == 1


@pytest.mark.parametrize("num_rows", [None, 2])
def test_responses_have_the_log_probabilities_of_one_forward_pass(
    policy: Any, name: Name, num_rows: int | None
) -> None:
    torch.manual_seed(3)
    responses = make_engine(policy, name, batch_size=num_rows).generate(PROMPTS, 12, 0.7, STOPS, 0)
    assert_sampled(policy, PROMPTS, responses, 0.7, STOPS, 12)
    assert len(set(responses.mask.sum(-1).tolist())) > 2


def test_near_temperature_0_the_likeliest_token_is_taken_however_many_rows_are_written_at_a_time(
    policy: Any, name: Name
) -> None:
    stop = tokens(make_engine(policy, name), PROMPTS, 8, 1e-4)[1, 2].item()  # which ends the second row, if no other
    found = [tokens(make_engine(policy, name, batch_size=n), PROMPTS, 8, 1e-4, [stop]) for n in (None, 1, 3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for prompt, row in zip(PROMPTS, found[0].tolist(), strict=True):
        ids = list(prompt)
        for t, token in enumerate(row):
            assert token == policy(torch.tensor([ids])).logits[0, -1].argmax().item()
            ids.append(token)
            if token == stop:
                assert row[t + 1 :] == [0] * (len(row) - t - 1)
                break


@torch.no_grad()
def test_at_temperature_0_transformers_takes_the_likeliest_token_with_certainty(policy: Any) -> None:
    engine = TransformersEngine(policy)
    found = engine.generate(PROMPTS, 4, 0.0, [], 0)
    assert torch.equal(found.logprobs, torch.zeros(len(PROMPTS), 4))
    for prompt, row in zip(PROMPTS, found.tokens.tolist(), strict=True):
        for t, token in enumerate(row):
            assert token == policy(torch.tensor([prompt + row[:t]])).logits[0, -1].argmax().item()
    policy.lm_head.weight.data.zero_()  # all are equally likely, and still it is always the same one
    assert engine.generate([[7, 8]] * 50, 4, 0.0, [], 0).tokens.unique().numel() == 1


def test_several_stop_tokens_each_end_a_response(engine: Engine) -> None:
    plain = tokens(engine, [[7, 8], [9]], 6, 1e-4)
    stopped = tokens(engine, [[7, 8], [9]], 6, 1e-4, [plain[0, 1].item(), plain[1, 2].item()])
    assert (stopped[0, 2:] == 0).all()
    assert (stopped[1, 3:] == 0).all()


def test_without_a_stop_token_the_models_own_eos_ends_nothing(policy: Any, name: Name) -> None:
    policy.lm_head.weight.data.zero_()  # all tokens are equally likely, eos (0) too
    drawn = tokens(make_engine(policy, name), [[7, 8]] * 200, 20)
    assert drawn.shape == (200, 20)
    assert (drawn[:, :-1] == 0).any()
    assert drawn[(drawn == 0).cumsum(-1) > 0].unique().numel() > 20


def test_rows_with_the_same_prompt_get_different_samples(engine: Engine) -> None:
    assert len({tuple(row) for row in tokens(engine, [[7, 8]] * 8, 6).tolist()}) > 1


def test_no_prompts_have_no_responses(engine: Engine) -> None:
    """A process whose share of the held-out prompts is at its end is asked like the others."""
    found = engine.generate([], 6, 1.0, [0], 0)
    assert [x.shape for x in (found.tokens, found.logprobs, found.mask)] == [(0, 0)] * 3


def test_an_engine_samples_from_the_weights_as_they_are(name: Name) -> None:
    """Greedy in the limit, by one engine before and after its model's weights change, and by that of another model."""
    model, other = tiny_policy(seed=0), tiny_policy(seed=1)
    engine = make_engine(model, name)
    first = tokens(engine, PROMPTS, 6, 1e-4)
    model.load_state_dict(other.state_dict())
    engine.sync(model)
    second = tokens(engine, PROMPTS, 6, 1e-4)
    assert not torch.equal(first, second)
    assert torch.equal(second, tokens(make_engine(other, name), PROMPTS, 6, 1e-4))


def test_the_mean_of_one_over_the_probability_is_the_number_of_tokens(name: Name) -> None:
    """E[1/p] = V where p is the law that was sampled."""
    policy = tiny_policy()
    for parameter in policy.parameters():
        parameter.data *= 0.5  # so that no token is too rare to be seen
    torch.manual_seed(0)
    responses = make_engine(policy, name).generate([[7, 8, 9]] * MANY, 2, 0.7, [], 0)
    assert (-responses.logprobs).exp().mean(0).tolist() == pytest.approx([260, 260], rel=0.1)


def test_static_is_taken_where_the_family_is_known_and_not_quantised() -> None:
    config = OPTConfig(
        vocab_size=260, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )
    unknown = OPTForCausalLM(config).eval()
    assert isinstance(make_engine(tiny_policy()), StaticEngine)
    assert isinstance(make_engine(tiny_policy(), "transformers"), TransformersEngine)
    assert isinstance(make_engine(unknown), TransformersEngine)
    with pytest.raises(SettingsError, match=r"static reads models of type .*gpt2.*; this one is of type opt; use tran"):
        make_engine(unknown, "static")
    packed = tiny_policy()
    packed.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert isinstance(make_engine(packed), TransformersEngine)


def test_the_slots_of_one_thread_are_not_those_of_another() -> None:
    ours, theirs = (Slots(1, 4, torch.device("cpu")) for _ in range(2))
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with working_on(theirs):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    new = torch.ones(1, 1, 1, 2)  # [n,H,T,D]
    with working_on(ours):
        thread.start()
        assert entered.wait(10)
        ours.next_step()
        slots_attention(new, new, new, torch.tensor(0), 1.0, None, None)
    leave.set()
    thread.join()
    assert (list(ours.layers), list(theirs.layers)) == ([0], [])
