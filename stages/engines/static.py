"""The built-in engine: samples with the policy's own weights, in tensors made once, and without a server.

Each row has a slot. A row that has ended is taken out: a waiting prompt is put in its place, or, where none waits,
the last rows move up, so that one long answer does not hold the others. On a GPU a step is a CUDA graph, and what is
done with the logits is inside; the CPU looks at what has ended every few steps only.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from rlhf.data.collate import pad_right, response_mask
from rlhf.stages.engines import Responses, no_responses
from rlhf.stages.engines.sampling import draw, shaped
from rlhf.stages.engines.slots import HAS_TRITON, Slots, working_on
from rlhf.stages.engines.twin import Twin
from rlhf.stages.models import LOGITS_AT_ONCE

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "rlhf_decoder"})
"""Model types whose sampling is tested against their own forward pass."""
PREFILL_TOKENS = 2**15  # that one forward pass reads, which bounds its activations
_FEWEST = 8  # rows of a step on a GPU: fewer are not faster, and code that is compiled for one row is good for no other
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which takes some 60 ms to plan for every new shape."""


class StaticEngine:
    """Samples from `model`, whose weights are read anew for every call; nothing of a call is kept but compiled code.

    `dtype` is what it computes in, the model's own by default; `batch_size` is how many rows are written at a time, all
    by default; `compiled` compiles its layers, on a GPU with Triton. Other model types than those of FAMILIES may have
    parts that it does not know of.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        batch_size: int | None = None,
        compiled: bool = False,
    ) -> None:
        self.twin = Twin(model, dtype or model.dtype, compiled and model.device.type == "cuda" and HAS_TRITON)
        self.device = model.device
        self.batch_size = batch_size

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> Responses:
        """See `Engine.generate`."""
        if not prompts:
            return no_responses(self.device)
        num_slots = min(self.batch_size or len(prompts), len(prompts))
        slots = Slots(
            max(num_slots, _FEWEST) if self.device.type == "cuda" else num_slots,
            max(map(len, prompts)) + max_new_tokens,
            self.device,
        )
        self.twin.take()
        try:
            with working_on(slots), torch.autocast(self.device.type, enabled=False), sdpa_kernel(_KERNELS):
                writing = _Writing(self.twin, slots, max_new_tokens, temperature, stop_token_ids, pad_token_id)
                tokens, logprobs = _schedule(writing, prompts, num_slots)
        finally:
            self.twin.give_back()
        mask = response_mask(tokens, stop_token_ids)
        width = int(mask.sum(-1).amax())
        tokens, logprobs, mask = tokens[:, :width], logprobs[:, :width], mask[:, :width]
        return Responses(tokens.masked_fill(~mask, pad_token_id), logprobs.masked_fill(~mask, 0.0), mask)

    def sync(self, model: PreTrainedModel) -> None:
        """Nothing to do: weights are read anew for every call."""


def _schedule(writing: "_Writing", prompts: list[list[int]], num_slots: int) -> tuple[Tensor, Tensor]:
    """(tokens, log-probabilities) [B,R] of all prompts: which row is in which slot, and when that changes."""
    limit = writing.max_new_tokens
    # Prompts of one length are next to each other, and equal ones too.
    waiting = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i], i), reverse=True)
    tokens = writing.tokens.new_empty(len(prompts), limit)
    logprobs = writing.logprobs.new_empty(len(prompts), limit)
    owners = [waiting.pop() for _ in range(num_slots)]  # prompt of each slot; those beyond the list are free
    writing.begin(list(range(num_slots)), [prompts[i] for i in owners])
    begun, step = [0] * num_slots, 0
    while owners:
        rounds = min(writing.rounds, limit - 1 - step + max(begun))
        for _ in range(rounds):
            writing.step(len(owners))
        step += rounds
        ended = [slot for slot, done in enumerate(writing.done[: len(owners)].tolist()) if done]
        few = len(ended) * 8 < len(owners)
        if not ended or (few and len(ended) < len(waiting)):
            continue
        if not waiting and not writing.shrinks(len(owners), len(ended)):
            continue
        rows = torch.tensor(ended, device=tokens.device)
        places = torch.tensor([owners[slot] for slot in ended], device=tokens.device)
        tokens[places], logprobs[places] = writing.tokens[rows, :limit], writing.logprobs[rows, :limit]
        refilled = ended[: len(waiting)]
        for slot in refilled:
            owners[slot], begun[slot] = waiting.pop(), step
        if refilled:
            writing.begin(refilled, [prompts[owners[slot]] for slot in refilled])
        freed = set(ended[len(refilled) :])
        holes = sorted(slot for slot in freed if slot < len(owners) - len(freed))
        movers = [slot for slot in range(len(owners) - len(freed), len(owners)) if slot not in freed]
        writing.move(movers, holes)
        for mover, hole in zip(movers, holes, strict=True):
            owners[hole], begun[hole] = owners[mover], begun[mover]
        del owners[len(owners) - len(freed) :], begun[len(begun) - len(freed) :]
    return tokens, logprobs


class _Writing:
    """The rows under way: N slots with what they have so far."""

    def __init__(
        self,
        twin: Twin,
        slots: Slots,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> None:
        self.twin, self.slots, self.max_new_tokens = twin, slots, max_new_tokens
        self.temperature, self.pad_token_id = temperature, pad_token_id
        device, num = slots.lengths.device, slots.shape[0]
        self.stops = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
        self.made = torch.zeros(num, dtype=torch.long, device=device)  # [N] new tokens
        self.last = torch.zeros_like(self.made)  # [N] newest token
        self.done = torch.zeros_like(self.made, dtype=torch.bool)
        # What a row that is done still makes goes to a column of its own.
        self.tokens = self.made.new_full((num, max_new_tokens + 1), pad_token_id)
        self.logprobs = torch.zeros(num, max_new_tokens + 1, device=device)
        self.on_gpu = device.type == "cuda"
        self.in_kernels = self.on_gpu and HAS_TRITON
        self.seed = torch.randint(2**31, (1,), device=device) if self.in_kernels else torch.zeros_like(self.made[:1])
        self.rounds = 16 if self.on_gpu else 1
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def begin(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Read prompts, each into its slot, and draw the first token of each. Equal prompts are read once."""
        first: dict[tuple[int, ...], int] = {}
        sources = [first.setdefault(tuple(prompt), slot) for slot, prompt in zip(slots, prompts, strict=True)]
        states: dict[int, Tensor] = {}
        for some in self._batches(list(first)):
            into = [first[prompt] for prompt in some]
            states |= dict(zip(into, self._read(into, [list(prompt) for prompt in some]), strict=True))
        copied = [(source, slot) for source, slot in zip(sources, slots, strict=True) if source != slot]
        if copied:
            self.slots.copy(*self._index(copied), num_tokens=max(map(len, prompts)))
        rows = torch.tensor(slots, device=self.made.device)
        hidden = torch.stack([states[source] for source in sources])
        size = max(LOGITS_AT_ONCE // self.twin.vocab_size, 1)
        parts = [self._draw(self.twin.logits(some)) for some in hidden.split(size)]
        tokens, logprobs = (torch.cat(part) for part in zip(*parts, strict=True))
        self.made[rows], self.done[rows], self.tokens[rows] = 0, False, self.pad_token_id
        self._store(rows, tokens, logprobs)

    def step(self, num: int) -> None:
        """One more token in each of the first `num` slots."""
        if not self.on_gpu:
            self.slots.next_step(longest=int(self.slots.lengths[:num].amax()) + 1)
            self._step(num)
            return
        self.slots.next_step()
        num = _rows_of_graph(num, self.slots.shape[0])
        if num not in self.graphs:
            self.graphs[num] = self._capture(num)
        self.graphs[num].replay()

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Rows that are under way move to other slots."""
        if sources:
            old, new = self._index(list(zip(sources, targets, strict=True)))
            self.slots.copy(old, new, num_tokens=int(self.slots.lengths[old].amax()))
            for tensor in (self.made, self.last, self.done, self.tokens, self.logprobs):
                tensor[new] = tensor[old]

    def shrinks(self, num: int, num_ended: int) -> bool:
        """Whether a step becomes shorter where `num_ended` of `num` rows leave."""
        if not self.on_gpu or num == num_ended:
            return True
        return _rows_of_graph(num - num_ended, num) < _rows_of_graph(num, num)

    def _batches(self, prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Prompts that are read at a time."""
        size = max(PREFILL_TOKENS // max(map(len, prompts)), 1)
        for start in range(0, len(prompts), size):
            yield prompts[start : start + size]

    def _read(self, rows: list[int], prompts: list[list[int]]) -> Tensor:
        """Last states [n,d] of prompts, whose keys and values go into the slots `rows`."""
        if self.on_gpu and len(rows) == 1:  # as above
            hidden = self._read(rows * 2, prompts * 2)
            return hidden[:1]
        ids, mask = (x.to(self.made.device) for x in pad_right(prompts, self.pad_token_id))  # [n,P]
        self.slots.beginning = torch.tensor(rows, device=self.made.device)
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        hidden = self.twin.states(ids, positions)
        lengths = mask.sum(-1)
        self.slots.lengths[self.slots.beginning] = lengths
        return hidden[torch.arange(len(rows), device=ids.device), lengths - 1]

    def _step(self, num: int) -> None:
        hidden = self.twin.states(self.last[:num, None], self.slots.lengths[:num, None])[:, 0]
        logits = self.twin.logits(hidden)
        if self.in_kernels:
            from rlhf.stages.engines import decode_kernels

            law = self.twin.scale, self.twin.softcap, self.temperature
            state = self.last, self.made, self.done, self.slots.lengths, self.tokens, self.logprobs
            decode_kernels.take(logits, self.seed, *law, self.stops, *state)
            return
        self.slots.lengths[:num] += ~self.done[:num]
        self._store(slice(num), *self._draw(logits))

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return draw(shaped(logits, self.twin.scale, self.twin.softcap, self.temperature))

    def _store(self, rows: Tensor | slice, tokens: Tensor, logprobs: Tensor) -> None:
        """Tokens [n] that were drawn for `rows`."""
        made, done = self.made[rows], self.done[rows]
        place = torch.where(done, self.max_new_tokens, made)
        where = torch.arange(len(self.made), device=made.device)[rows]
        self.tokens[where, place], self.logprobs[where, place] = tokens, logprobs
        made = made + ~done
        done = done | torch.isin(tokens, self.stops) | (made >= self.max_new_tokens)
        self.made[rows], self.done[rows], self.last[rows] = made, done, tokens

    def _capture(self, num: int) -> torch.cuda.CUDAGraph:
        """A graph of `_step`, which changes nothing here."""
        state = self.slots.lengths, self.made, self.last, self.done, self.tokens, self.logprobs, self.seed
        saved = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(num)  # what is made at first, compiled code above all, is made outside of the graph
        self.slots.next_step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._step(num)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return graph

    def _index(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        old, new = torch.tensor(pairs, device=self.made.device).unbind(1)
        return old, new


def _rows_of_graph(num: int, most: int) -> int:
    """Rows of the graph that serves `num` rows: the next power of two, so that there are few graphs."""
    return min(max(1 << (num - 1).bit_length(), _FEWEST), most)
