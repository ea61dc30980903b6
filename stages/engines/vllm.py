"""Rollouts from a vLLM server in an environment of its own: vLLM wants one release of torch, and of transformers often
an older one than ours.

TRL's client for such a server imports vLLM, to send weights over NCCL, so it does not start in another environment
than the server's. Here the same server is spoken to over HTTP alone. After an update the weights are written to a
folder that the server reads, which asks for a common file system and for nothing else in common. docs/rollouts.md says
how to start one.
"""

import math
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf.data.collate import pad_right
from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages.adapters import merged_weight
from rlhf.stages.endpoint import Endpoint, EndpointError
from rlhf.stages.engines import Responses
from rlhf.stages.out_of_memory import doing
from rlhf.stages.processes import Processes

T = TypeVar("T")

LOWEST_TEMPERATURE = 0.01  # what is below it, vLLM takes for it


class VLLMEngine:
    """Samples from the model that a vLLM server has, which is the policy from the first `sync` on.

    The main process alone talks to the server. Every process calls `generate` and `sync` equally often, with prompts
    of its own, if need be none.
    """

    def __init__(
        self,
        server_url: str,
        processes: Processes,
        model: str,
        vocab_size: int,
        max_length: int,
        folder: Path,
        timeout: float = 600.0,
    ) -> None:
        """`model` is what the server is started with, `max_length` prompt and response in tokens; `timeout` is in
        seconds. On their way the weights lie below `folder`, which the server must see under the same path.

        Raises RefusedError for a server that is not there or is set up in another way.
        """
        self.processes, self.vocab_size, self.folder = processes, vocab_size, folder.resolve()
        self.cure = (
            f"start it with `VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(model)} --generation-config vllm "
            f"--logprobs-mode processed_logprobs --max-model-len {max_length}` in an environment of its own "
            "(docs/rollouts.md)"
        )
        try:
            key_variable = "VLLM_API_KEY"  # the server's own
            self.server = Endpoint(server_url, key_variable, timeout, self.cure, "ppo.rollout.timeout")
            self.name, self.dtype = self._from_main(lambda: self._look(max_length))
        except (EndpointError, ValueError) as error:
            raise RefusedError(f"ppo.rollout.server_url: {error}") from error

    def sync(self, model: PreTrainedModel) -> None:
        """Give the server the model's weights as they are now, adapters merged. Raises EndpointError."""
        doing("sampling")  # without a server there would be nothing to do here
        self._from_main(lambda: self._send(model))

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> Responses:
        """One response per prompt, as every engine's, but drawn from the server's random stream.

        Raises EndpointError where the server does not answer, or answers something else.
        """
        if temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature {temperature:g} is below {LOWEST_TEMPERATURE:g}, which vLLM would take for it"
            )
        of_each = self.processes.gather_objects([prompts])
        everyone = [prompt for part in of_each for prompt in part]
        answers = self._from_main(lambda: self._answers(everyone, max_new_tokens, temperature, stop_token_ids))
        first = sum(len(part) for part in of_each[: self.processes.rank])
        mine = answers[first : first + len(prompts)]
        device = self.processes.device
        tokens, mask = pad_right([tokens for tokens, _ in mine], pad_token_id)
        logprobs = torch.zeros(tokens.shape)
        logprobs[mask] = torch.tensor([logprob for _, its in mine for logprob in its])
        return Responses(tokens.to(device), logprobs.to(device), mask.to(device))

    def _from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns in the main process, in every process; so do its errors, lest the others wait."""

        def attempt() -> tuple[Any, BaseException | None]:
            try:
                return make(), None
            except (Exception, Stopped) as error:
                return None, error

        found, error = self.processes.from_main(attempt)
        if error is not None:
            raise error
        result: T = found
        return result

    def _look(self, max_length: int) -> tuple[str, torch.dtype]:
        """(name of the server's model, type of its weights), if it is set up as we need it."""
        try:
            card = self.server.get("/v1/models")["data"][0]
            name, room = card["id"], card.get("max_model_len") or math.inf
            config = self.server.get("/server_info?config_format=json")["vllm_config"]["model_config"]
        except EndpointError as error:
            if error.status != 404:
                raise
            raise EndpointError(f"{error}: VLLM_SERVER_DEV_MODE is not set, or it is no vLLM; {self.cure}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                f"{self.server.url}: it does not answer as vLLM does ({error!r}); {self.cure}"
            ) from error
        if room < max_length:
            raise EndpointError(
                f"{self.server.url}: the server takes {room} tokens, prompt and response need {max_length}; {self.cure}"
            )
        if (mode := config.get("logprobs_mode")) != "processed_logprobs":
            raise EndpointError(
                f"{self.server.url}: the server's log-probabilities are {mode}, which leave out the temperature; "
                f"{self.cure}"
            )
        return name, getattr(torch, str(config.get("dtype")).removeprefix("torch."), torch.float32)

    def _send(self, model: PreTrainedModel) -> None:
        folder = self.folder / f"weights-{secrets.token_hex(4)}"  # another run may have the same folder
        folder.mkdir(parents=True)
        try:
            # Rounded here as the server would round them: half the bytes in half precision.
            weights = {name: x.to("cpu", self.dtype).contiguous() for name, x in checkpoint_weights(model)}
            save_file(revert_weight_conversion(model, weights), folder / "model.safetensors")
            del weights
            where = {"weights_path": str(folder)}
            self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": where})
            answer = self.server.post("/reset_prefix_cache", {})  # it holds keys and values of the old weights
        except EndpointError as error:
            if error.status is None:
                raise
            raise EndpointError(
                f"the server did not take the weights in {folder} ({error}); it must see this folder, and have "
                f"been started with the policy's own start: {self.cure}",
                error.status,
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if answer is not None and not answer.get("success"):
            raise EndpointError(
                f"{self.server.url}: the server kept what it had cached with the old weights: others are using it; "
                "let nobody else do so"
            )

    def _answers(
        self, prompts: list[list[int]], max_new_tokens: int, temperature: float, stop_token_ids: list[int]
    ) -> list[tuple[list[int], list[float]]]:
        """(tokens, log-probabilities) of each response, stop token included."""
        if not prompts:
            return []
        law = {  # in full: what is left out, the server may take from the checkpoint's generation_config
            "max_tokens": max_new_tokens, "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "ignore_eos": True, "stop_token_ids": stop_token_ids,  # these, and no others
        }  # fmt: skip
        asked = {"model": self.name, "prompt": prompts, "logprobs": 0, "return_token_ids": True}
        choices = self.server.post("/v1/completions", asked | law).get("choices", [])
        if len(choices) != len(prompts):
            raise EndpointError(f"{self.server.url}: {len(choices)} responses to {len(prompts)} prompts")
        if sorted(choice.get("index", -1) for choice in choices) != list(range(len(prompts))):
            raise EndpointError(f"{self.server.url}: it does not say which prompt each response is to; {self.cure}")
        choices.sort(key=lambda choice: choice["index"])
        for prompt, choice in zip(prompts, choices, strict=True):
            if fault := self._fault(prompt, choice, max_new_tokens, stop_token_ids):
                raise EndpointError(f"{self.server.url}, response {choice['index'] + 1}: {fault}")
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def _fault(self, prompt: list[int], choice: Any, max_new_tokens: int, stop_token_ids: list[int]) -> str | None:
        """What is wrong with a response."""
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not tokens:
            return f"no token ids; {self.cure}"
        if not logprobs or len(logprobs) != len(tokens) or not all(map(_is_number, logprobs)):
            return f"not a log-probability for each of its {len(tokens)} tokens; {self.cure}"
        if choice.get("prompt_token_ids", prompt) != prompt:
            return f"the server read another prompt than it was sent: {choice['prompt_token_ids']} for {prompt}"
        if max(tokens) >= self.vocab_size:
            return (
                f"token {max(tokens)} is outside the policy's vocabulary of {self.vocab_size}: the server has another "
                f"model; {self.cure}"
            )
        stops = [token in stop_token_ids for token in tokens]
        if any(stops[:-1]) or not (stops[-1] or len(tokens) == max_new_tokens):
            return (
                f"it ends after {len(tokens)} tokens ({choice.get('finish_reason')}), neither at the first of the stop "
                f"tokens {stop_token_ids} nor after {max_new_tokens}; {self.cure}"
            )
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each weight as a checkpoint of the model has them: adapters merged, tied weights once."""
    saved = model.state_dict().keys()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner.removesuffix(".base_layer"))
        if name not in saved or ".lora_" in name:
            continue
        value = merged_weight(layer) if leaf == "weight" else tensor
        yield name.replace(".base_layer.", "."), value.detach()
