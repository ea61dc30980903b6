"""The engine behind a server, against one that speaks vLLM's protocol: what is asked, sent, read and refused."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from fake_vllm import FakeServer, serving
from processes_world import in_two_processes
from stages_world import tiny_policy
from torch import Tensor

from rlhf.data.collate import pad_left
from rlhf.data.errors import RefusedError
from rlhf.stages import adapters
from rlhf.stages.endpoint import EndpointError
from rlhf.stages.engines import Responses
from rlhf.stages.engines.vllm import VLLMEngine, checkpoint_weights
from rlhf.stages.models import PolicyModel
from rlhf.stages.processes import Processes
from rlhf.stages.settings import LoraSettings

PROMPTS = [[7, 8, 9], [20], [30, 31]]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that still has another model than the policy."""
    with serving(tiny_policy(seed=9)) as fake:
        yield fake


@pytest.fixture
def engine(server: FakeServer, tmp_path: Path) -> VLLMEngine:
    return connect(server, tmp_path)


def connect(server: FakeServer, folder: Path, **fields: Any) -> VLLMEngine:
    given: dict[str, Any] = {"model": "sft/model", "vocab_size": 260, "max_length": 24, "folder": folder} | fields
    return VLLMEngine(server.url, Processes(Accelerator(cpu=True)), **given)


def answers(engine: VLLMEngine, stops: list[int], prompts: list[list[int]] = PROMPTS, temperature: float = 0.7) -> Any:
    torch.manual_seed(0)  # the fake's stream is this process's
    return engine.generate(prompts, 6, temperature, stops, 0)


def read(policy: Any, responses: Responses, temperature: float) -> Tensor:
    """The trainer's own log-probabilities of the responses [B,R]."""
    rows = zip(responses.tokens, responses.mask, strict=True)
    texts = [prompt + tokens[mask].tolist() for prompt, (tokens, mask) in zip(PROMPTS, rows, strict=True)]
    found = torch.zeros(responses.tokens.shape)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        ids, mask = pad_left([text], 0)
        with torch.no_grad():
            logprobs = PolicyModel(policy)(ids, mask, len(text) - len(prompt), temperature)[0]
        found[row, : logprobs.shape[1]] = logprobs
    return found


def change(policy: Any, seed: int) -> None:
    """What an update does, in a way."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn_like(parameter)


# --- sampling


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_responses_are_of_the_policy_with_its_log_probabilities(shape: str, tmp_path: Path) -> None:
    policy = tiny_policy(shape)
    with serving(tiny_policy(shape, seed=9)) as server:
        engine = connect(server, tmp_path)
        engine.sync(policy)
        responses = answers(engine, [0])
    assert responses.tokens.shape == responses.logprobs.shape == responses.mask.shape == (3, 6)
    assert responses.logprobs.dtype == torch.float32
    torch.testing.assert_close(responses.logprobs, read(policy, responses, 0.7), rtol=0, atol=1e-5)


def test_each_stop_token_ends_a_response_and_counts_while_the_models_own_eos_does_not(
    engine: VLLMEngine, server: FakeServer
) -> None:
    logits = torch.full((260,), -1e9)
    logits[[0, 5, 6]] = 0.7 * torch.tensor([0.8, 0.1, 0.1]).log()  # 0 is the model's own eos
    server.model.lm_head.weight.data.zero_()
    server.model.lm_head.bias = torch.nn.Parameter(logits)
    responses = answers(engine, [5, 6], [[7]] * 30)
    counted = [row[mask].tolist() for row, mask in zip(responses.tokens, responses.mask, strict=True)]
    assert {token for row in counted for token in row[:-1]} == {0}
    assert {row[-1] for row in counted} == {0, 5, 6}
    assert all(len(row) == 6 for row in counted if row[-1] == 0)
    assert responses.tokens[~responses.mask].unique().tolist() == [0]
    assert responses.logprobs[~responses.mask].unique().tolist() == [0]
    expected = torch.where(responses.tokens == 0, 0.8, 0.1).log().where(responses.mask, 0.0)
    torch.testing.assert_close(responses.logprobs, expected)


def test_nothing_of_the_servers_generation_config_changes_the_law(engine: VLLMEngine) -> None:
    """The fake takes the best token alone where top_k is left out: then all samples of a prompt would be the same."""
    prompts = [[7, 8]] * 8
    assert len({tuple(row) for row in answers(engine, [], prompts).tokens.tolist()}) > 1


def test_no_prompts_make_no_request(engine: VLLMEngine, server: FakeServer) -> None:
    before = len(server.asked)
    assert answers(engine, [0], []).tokens.shape == (0, 0)
    assert len(server.asked) == before


def test_answers_in_another_order_are_put_right(engine: VLLMEngine, server: FakeServer) -> None:
    plain = answers(engine, [0])
    server.spoil = lambda answer: answer | {"choices": answer["choices"][::-1]}
    assert torch.equal(answers(engine, [0]).tokens, plain.tokens)


# --- weights


def test_the_server_has_the_trainers_weights_after_every_update(engine: VLLMEngine, server: FakeServer) -> None:
    policy = tiny_policy()
    for update in range(3):
        change(policy, update)
        engine.sync(policy)
        own = dict(policy.named_parameters())
        assert server.received[update].keys() == own.keys()
        assert all(torch.equal(server.received[update][name], own[name]) for name in own)
        responses = answers(engine, [0])
        torch.testing.assert_close(responses.logprobs, read(policy, responses, 0.7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_adapters_are_sent_merged(shape: str, tmp_path: Path) -> None:
    policy = tiny_policy(shape)
    names = dict(policy.named_parameters()).keys()
    before = {name: x.clone() for name, x in policy.named_parameters()}
    adapters.add_lora(policy, LoraSettings(r=2, alpha=4))
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with serving(tiny_policy(shape, seed=9)) as server:
        engine = connect(server, tmp_path)
        engine.sync(policy)
        assert server.received[0].keys() == names
        moved = {name for name, x in server.received[0].items() if not torch.equal(x, before[name])}
        assert moved == {name for name in names if ("proj" in name or "c_" in name) and name.endswith("weight")}
        responses = answers(engine, [0])
    torch.testing.assert_close(responses.logprobs, read(policy, responses, 0.7), rtol=0, atol=1e-5)


def test_weights_are_rounded_to_the_servers_type(server: FakeServer, tmp_path: Path) -> None:
    server.dtype = "torch.bfloat16"
    policy = tiny_policy()
    connect(server, tmp_path).sync(policy)
    for name, parameter in policy.named_parameters():
        assert torch.equal(server.received[0][name], parameter.bfloat16())


def test_a_tied_weight_is_named_once_and_buffers_of_a_checkpoint_are_there(policy: Any) -> None:
    policy.register_buffer("kept", torch.ones(2))
    policy.register_buffer("not_kept", torch.ones(2), persistent=False)
    names = [name for name, _ in checkpoint_weights(policy)]
    assert len(names) == len(set(names))
    assert "kept" in names
    assert not {"not_kept", "lm_head.weight"} & set(names)


def test_nothing_is_left_of_the_folder_that_the_weights_lay_in(
    engine: VLLMEngine, server: FakeServer, tmp_path: Path
) -> None:
    engine.sync(tiny_policy())
    assert server.folders[0].is_absolute()
    assert server.folders[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_two_runs_with_one_folder_write_to_folders_of_their_own(
    engine: VLLMEngine, server: FakeServer, tmp_path: Path
) -> None:
    connect(server, tmp_path).sync(tiny_policy())
    engine.sync(tiny_policy())
    assert len(set(server.folders)) == 2


def test_weights_that_the_server_cannot_read_or_use_are_an_error(
    engine: VLLMEngine, server: FakeServer, tmp_path: Path
) -> None:
    server.sees_folders = False
    with pytest.raises(EndpointError, match=r"it must see this folder.*vllm serve sft/model"):
        engine.sync(tiny_policy())
    server.sees_folders = True
    with pytest.raises(EndpointError, match=r"no parameter transformer\.h\.0.*started with the policy's own start"):
        engine.sync(tiny_policy("gpt2"))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_emptied_is_an_error(engine: VLLMEngine, server: FakeServer) -> None:
    server.is_busy = True
    with pytest.raises(EndpointError, match="kept what it had cached with the old weights"):
        engine.sync(tiny_policy())


# --- what is refused


def test_a_server_that_is_not_there_is_refused_with_the_command_that_starts_it(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            RefusedError, match=rf"server_url: {url}/v1/models: cannot be reached.*vllm serve 'my run/model' "
        ):
            VLLMEngine(url, Processes(Accelerator(cpu=True)), "my run/model", 260, 24, tmp_path)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE is not set"),
        ({"logprobs_mode": "raw_logprobs"}, "log-probabilities are raw_logprobs, which leave out the temperature"),
        ({"max_model_len": 23}, "takes 23 tokens, prompt and response need 24; .*--max-model-len 24"),
        ({"answer": lambda path, body: (200, {"models": []})}, "does not answer as vLLM does"),
        ({"answer": lambda path, body: (200, b"<html>")}, "is not JSON: b'<html>'"),
        ({"answer": lambda path, body: (401, {"error": "Unauthorized"})}, "HTTP 401.*Unauthorized"),
    ],
)
def test_a_server_that_is_set_up_in_another_way_is_refused(
    server: FakeServer, tmp_path: Path, setup: dict[str, Any], words: str
) -> None:
    for name, value in setup.items():
        setattr(server, name, value)
    with pytest.raises(RefusedError, match=words):
        connect(server, tmp_path)


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"'localhost:8000' is not the address of a server; write it as http://"):
        VLLMEngine("localhost:8000", Processes(Accelerator(cpu=True)), "sft/model", 260, 24, tmp_path)


def test_a_temperature_that_vllm_would_raise_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match=r"0\.001 is below 0\.01"):
        answers(engine, [0], temperature=0.001)


def spoil(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Other values in the second response."""

    def other(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][1] |= fields
        return answer

    return other


@pytest.mark.parametrize(
    ("change_answer", "words"),
    [
        (spoil(token_ids=None), "response 2: no token ids"),
        (spoil(logprobs=None), "response 2: not a log-probability for each of its 6 tokens"),
        (spoil(logprobs={"token_logprobs": [-1.0] * 5}), "not a log-probability for each"),
        (spoil(logprobs={"token_logprobs": [-1.0] * 5 + [None]}), "not a log-probability for each"),
        (spoil(logprobs={"token_logprobs": [-1.0] * 5 + [float("nan")]}), "not a log-probability for each"),
        (spoil(token_ids=[1, 2, 3, 4, 5, 260]), "token 260 is outside the policy's vocabulary of 260"),
        (spoil(prompt_token_ids=[1, 20]), r"read another prompt than it was sent: \[1, 20\] for \[20\]"),
        (spoil(token_ids=[1], logprobs={"token_logprobs": [-1.0]}), "ends after 1 tokens .*neither at the first of"),
        (spoil(token_ids=[1, 2, 259, 4, 5, 6]), r"neither at the first of the stop tokens \[259\] nor after 6"),
        (lambda answer: answer | {"choices": answer["choices"][:2]}, "2 responses to 3 prompts"),
        (lambda answer: {}, "0 responses to 3 prompts"),
        (spoil(index=0), "does not say which prompt each response is to"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_errors(
    engine: VLLMEngine, server: FakeServer, change_answer: Callable[[Any], Any], words: str
) -> None:
    server.model.lm_head.bias = torch.nn.Parameter(torch.where(torch.arange(260) == 259, -1e9, 0.0))  # never a stop
    server.spoil = change_answer
    with pytest.raises(EndpointError, match=words):
        answers(engine, [259])


def test_a_server_that_takes_too_long_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    engine = connect(server, tmp_path, timeout=0.2)
    server.waits = threading.Event()
    with pytest.raises(EndpointError, match=r"/v1/completions: no answer within 0\.2 seconds"):
        answers(engine, [0])


def test_the_servers_key_is_read_from_its_own_variable(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    connect(server, tmp_path)
    assert {key for *_, key in server.asked} == {"Bearer a-key"}


# --- several processes


def process(rank: int, url: str, root: Path) -> list[Any]:
    engine = VLLMEngine(url, Processes(Accelerator()), "sft/model", 260, 24, root)
    engine.sync(tiny_policy())
    mine = [PROMPTS[:2], PROMPTS[2:]][rank]
    found: list[Any] = [engine.generate(mine, 6, 0.7, [0], 0), engine.generate(mine[:rank], 6, 0.7, [0], 0)]
    try:
        engine.generate(mine, 6, 0.7, [259], 0)
    except EndpointError as error:
        found.append(str(error))
    return found


def test_of_two_processes_one_talks_and_each_gets_its_own_answers_and_the_error(
    server: FakeServer, tmp_path: Path
) -> None:
    def fail_at_259(answer: dict[str, Any]) -> dict[str, Any]:
        return {} if server.asked[-1][1]["stop_token_ids"] == [259] else answer

    server.spoil = fail_at_259
    one, two = in_two_processes(tmp_path, process, server.url, tmp_path)
    paths = [path for path, *_ in server.asked]
    assert (
        paths
        == ["/v1/models", "/server_info?config_format=json", "/collective_rpc", "/reset_prefix_cache"]
        + ["/v1/completions"] * 3
    )
    assert server.asked[4][1]["prompt"] == PROMPTS
    assert server.asked[5][1]["prompt"] == PROMPTS[2:]
    width = max(one[0].tokens.shape[1], two[0].tokens.shape[1])
    whole = Responses(*(
        torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in pair])
        for pair in zip(*(vars(found[0]).values() for found in (one, two)), strict=True)
    ))  # fmt: skip
    torch.testing.assert_close(whole.logprobs, read(tiny_policy(), whole, 0.7), rtol=0, atol=1e-5)
    assert len(one[1].tokens) == 0
    assert len(two[1].tokens) == 1
    assert one[2] == two[2]
    assert "0 responses to 3 prompts" in one[2]
