"""One step off: a rollout is sampled in a thread while the one before it is scored and learned from.

What samples is a copy of the policy, which gets the policy's weights just before each rollout begins; or a server. So
but for the first, which is waited for, each rollout comes from the policy as it was one update ago.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf.data.errors import RefusedError
from rlhf.stages.adapters import shared_copy
from rlhf.stages.engines import Engine, Responses
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.placement import begun, end_at_exit, scorers_device
from rlhf.stages.ppo.rollout import engine_for
from rlhf.stages.runtime import Runtime
from rlhf.stages.sharding import Whole, is_sharded


class Ahead:
    """An engine that answers at once with what it has sampled meanwhile, and begins the next rollout.

    `prompts_of` an iteration are this process's prompts, none after the last. `engine` is what samples from the policy
    otherwise. Every process calls `generate` once per iteration; `begin` says which comes first.
    """

    def __init__(
        self,
        run: Runtime[PPOSettings],
        policy: PolicyModel,
        engine: Engine,
        prompts_of: Callable[[int], list[list[int]]],
    ) -> None:
        self.run, self.policy, self.engine, self.prompts_of = run, policy, engine, prompts_of
        self.staleness = 0
        """Updates between the policy that sampled the last rollout and the one that learns from it."""
        self.seconds = 0.0
        """What it took to sample the last rollout."""
        self._iteration = 0
        self._asked: list[list[int]] = []
        self._under_way: Future[tuple[Responses, float]] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._device = run.device
        self._sampler, self._refresh = self._made()

    def begin(self, iteration: int) -> None:
        """The next rollout is that of `iteration`."""
        self._iteration = iteration

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> Responses:
        """Responses to the iteration's `prompts`; the next iteration's are under way from here on."""
        law = max_new_tokens, temperature, stop_token_ids, pad_token_id
        self.staleness = int(self._under_way is not None)
        if self._under_way is None:
            self._start(prompts, law)
        assert self._under_way is not None
        assert prompts == self._asked, "the rollout under way answers other prompts"
        sampled, self.seconds = self._under_way.result()
        self._under_way = None
        self._iteration += 1
        if upcoming := self.prompts_of(self._iteration):
            self._start(upcoming, law)
        return sampled

    def sync(self, model: PreTrainedModel) -> None:
        """Nothing to do: the weights are taken when a rollout begins."""

    def settle(self) -> None:
        """Wait until nothing is being sampled, and give a server the policy of now: an evaluation asks `engine`."""
        if self._under_way is not None:
            self._under_way.exception()
        self.engine.sync(self.policy.model)

    def _start(self, prompts: list[list[int]], law: tuple[int, float, list[int], int]) -> None:
        self._refresh()
        self._asked = prompts
        self._under_way = begun(partial(self._sample, self._iteration, prompts, law), self._device)

    def _sample(
        self, iteration: int, prompts: list[list[int]], law: tuple[int, float, list[int], int]
    ) -> tuple[Responses, float]:
        """(responses on the CPU, seconds), in the thread."""
        began = time.perf_counter()
        with self._aside():
            self._seed(iteration)
            sampled = self._sampler.generate(prompts, *law)
            sampled = Responses(*(x.cpu() for x in (sampled.tokens, sampled.logprobs, sampled.mask)))
        return sampled, time.perf_counter() - began

    def _seed(self, iteration: int) -> None:
        """Begin a random stream that depends on nothing that is done meanwhile, nor on a resume."""
        stream = f"{self.run.settings.seed} {self.run.rank} rollout {iteration}"
        number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4], "big")
        (torch.cuda if self._device.type == "cuda" else torch).manual_seed(number)

    def _aside(self) -> AbstractContextManager[object]:
        """On a GPU, a queue of its own: reference and reward models are at work there too."""
        if self._device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # in which the weights are copied
        return torch.cuda.stream(self._stream)

    def _made(self) -> tuple[Engine, Callable[[], object]]:
        """What samples, and what gives it the policy's weights."""
        run, settings, policy = self.run, self.run.settings, self.policy
        if settings.rollout.engine == "vllm":
            if run.num_processes > 1:
                raise RefusedError(
                    f"ppo.rollout.one_step_off: with engine vllm it works with one process, there are "
                    f"{run.num_processes}, which would all wait for the server; use one, or another engine"
                )
            return self.engine, lambda: self.engine.sync(policy.model)
        self._device = scorers_device(run)
        if run.device.type == "cuda" and self._device == run.device:
            raise RefusedError(
                "ppo.rollout.one_step_off: sampling needs a GPU of its own, since one that trains has no time for it; "
                "set ppo.placement: second_gpu, or rollout.engine: vllm with its server on another GPU"
            )
        if is_sharded(policy):
            whole = Whole(policy, self._device, run.low_precision)
            model, refresh = whole.model.model, whole.__enter__
        else:
            # Adapters are small and stay as they are.
            dtype = None if settings.layout == "adapters" else run.low_precision
            model, refresh = copy_of(policy.model, self._device, dtype)
        model.get_input_embeddings().register_forward_pre_hook(end_at_exit)
        return engine_for(run, model), refresh


def copy_of(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Callable[[], None]]:
    """A second tree of modules on a device, and what brings it up to date with the model.

    Weights that are trained have copies of their own, in `dtype` or their own; the rest is the model's.
    """
    copied = shared_copy(model)
    pairs: dict[nn.Parameter, nn.Parameter] = {}
    for module in copied.modules():
        vars(module).pop("forward", None)  # what was put there recomputes activations, or is compiled for the model
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.requires_grad:
                if weight not in pairs:
                    room = torch.empty_like(weight, device=device, dtype=dtype or weight.dtype)
                    pairs[weight] = nn.Parameter(room, requires_grad=False)
                setattr(module, name, pairs[weight])
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)

    @torch.no_grad()
    def refresh() -> None:
        for weight, own in pairs.items():
            own.copy_(weight)

    return copied, refresh
