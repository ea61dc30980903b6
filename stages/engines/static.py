"""The built-in engine: samples with the policy's own weights, in tensors made once, and without a server.

Each row has a slot. A row that has ended is taken out: a waiting prompt is put in its place, or, where none waits,
the last rows move up, so that one long answer does not hold the others. On a GPU a step is a CUDA graph, and what is
done with the logits is inside; the CPU looks at what had ended a step before, so that the GPU never waits for it.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from rlhf.data.collate import response_mask
from rlhf.stages.engines import Responses, no_responses
from rlhf.stages.engines.graphs import Graphs
from rlhf.stages.engines.prefill import Prefill
from rlhf.stages.engines.sampling import draw, shaped
from rlhf.stages.engines.slots import FEWEST_ROWS, HAS_TRITON, Slots, working_on
from rlhf.stages.engines.twin import Twin
from rlhf.stages.models import LOGITS_AT_ONCE
from rlhf.stages.packing import sent

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "rlhf_decoder"})
"""Model types whose sampling is tested against their own forward pass."""
_MEANWHILE = 16  # steps that a GPU makes while something is recorded: 10 ms and more
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which takes some 60 ms to plan for every new shape."""


class StaticEngine:
    """Samples from `model`, whose weights are read anew for every call; nothing of a call is kept but compiled
    code and, on a GPU, the memory of its graphs.

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
        self._graphs: Graphs | None = None

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
            max(num_slots, FEWEST_ROWS) if self.device.type == "cuda" else num_slots,
            max(map(len, prompts)) + max_new_tokens,
            self.device,
        )
        if self._graphs is None and self.device.type == "cuda":
            self._graphs = Graphs()
        self.twin.take()
        try:
            with working_on(slots), torch.autocast(self.device.type, enabled=False), sdpa_kernel(_KERNELS):
                law = max_new_tokens, temperature, stop_token_ids, pad_token_id
                writing = _Writing(self.twin, slots, self._graphs, *law)
                tokens, logprobs = _schedule(writing, prompts, num_slots)
        finally:
            self.twin.give_back()
        mask = response_mask(tokens, stop_token_ids)
        width = int(mask.sum(-1).amax())
        tokens, logprobs, mask = tokens[:, :width], logprobs[:, :width], mask[:, :width]
        return Responses(tokens.masked_fill(~mask, pad_token_id), logprobs.masked_fill(~mask, 0.0), mask)

    def sync(self, model: PreTrainedModel) -> None:
        """Nothing to do: weights are read anew for every call."""


@dataclass
class _Look:
    """At which slots are done at some step."""

    told: Tensor  # [N] where the CPU reads when each was done; steps to come write to it too
    num_steps: int
    there: torch.cuda.Event | None
    """When that step has been made."""
    changed: set[int] = field(default_factory=set)
    """Slots that were given to another row since then."""

    def ended(self, num: int) -> list[int]:
        """Those of the first `num` slots whose rows were done at that step, however late this is asked."""
        if self.there is not None:
            self.there.synchronize()
        told = enumerate(self.told[:num].tolist())
        return [slot for slot, step in told if 0 <= step <= self.num_steps and slot not in self.changed]


def _schedule(writing: "_Writing", prompts: list[list[int]], num_slots: int) -> tuple[Tensor, Tensor]:
    """(tokens, log-probabilities) [B,R] of all prompts: which row is in which slot, and when that changes."""
    limit = writing.max_new_tokens
    # Prompts of one length are next to each other, and equal ones too.
    waiting = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i], i), reverse=True)
    tokens = writing.tokens.new_empty(len(prompts), limit)
    logprobs = writing.logprobs.new_empty(len(prompts), limit)
    owners = [waiting.pop() for _ in range(num_slots)]  # prompt of each slot; those beyond the list are free
    writing.begin(list(range(num_slots)), [prompts[i] for i in owners])
    begun = [0] * num_slots  # steps that had been made when a row began
    looks: deque[_Look] = deque()
    while owners:
        goes_on = writing.num_steps - max(begun) < limit - 1
        if goes_on:
            writing.step(len(owners))
        if goes_on or not looks:
            looks.append(writing.look())
        if goes_on and len(looks) <= writing.lag:
            continue
        ended = looks.popleft().ended(len(owners))
        few = len(ended) * 8 < len(owners)
        if not ended or (few and len(ended) < len(waiting)):
            continue
        if not waiting and not writing.shrinks(len(owners), len(ended)):
            continue
        if len(ended) < len(waiting):
            ended = ended[: writing.refilled_at_once(len(ended))]  # the others, with what has ended by the next look
        rows, places = sent(tokens.device, torch.tensor(ended), torch.tensor([owners[slot] for slot in ended]))
        tokens[places], logprobs[places] = writing.tokens[rows, :limit], writing.logprobs[rows, :limit]
        refilled = ended[: len(waiting)]
        for slot in refilled:
            owners[slot] = waiting.pop()
        if refilled:
            writing.begin(refilled, [prompts[owners[slot]] for slot in refilled])
        for slot in refilled:
            begun[slot] = writing.num_steps
        freed = set(ended[len(refilled) :])
        holes = sorted(slot for slot in freed if slot < len(owners) - len(freed))
        movers = [slot for slot in range(len(owners) - len(freed), len(owners)) if slot not in freed]
        if movers:
            longest = max(len(prompts[owners[slot]]) + writing.num_steps - begun[slot] for slot in movers)
            writing.move(movers, holes, longest)
        for mover, hole in zip(movers, holes, strict=True):
            owners[hole], begun[hole] = owners[mover], begun[mover]
        del owners[len(owners) - len(freed) :], begun[len(begun) - len(freed) :]
        for look in looks:
            look.changed.update(refilled, holes)
    return tokens, logprobs


class _Writing:
    """The rows under way: N slots with what they have so far."""

    def __init__(
        self,
        twin: Twin,
        slots: Slots,
        graphs: Graphs | None,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> None:
        self.twin, self.slots, self.max_new_tokens = twin, slots, max_new_tokens
        self.temperature, self.pad_token_id = temperature, pad_token_id
        device, num = slots.lengths.device, slots.shape[0]
        self.stops = sent(device, torch.tensor(stop_token_ids, dtype=torch.long))[0]
        self.made = torch.zeros(num, dtype=torch.long, device=device)  # [N] new tokens
        self.last = torch.zeros_like(self.made)  # [N] newest token
        self.ended = torch.full_like(self.made, -1)  # [N] steps that had been made when a row was done; -1 before
        self.steps = torch.zeros_like(self.made[:1])  # [1] that have been made
        self.told = self.ended  # [N] where the CPU reads it
        if graphs is not None:
            self.told = torch.empty_like(self.ended, device="cpu", pin_memory=device.type == "cuda")
        # What a row that is done still makes goes to a column of its own.
        self.tokens = self.made.new_full((num, max_new_tokens + 1), pad_token_id)
        self.logprobs = torch.zeros(num, max_new_tokens + 1, device=device)
        self.in_kernels = graphs is not None and HAS_TRITON
        self.seed = torch.randint(2**31, (1,), device=device) if self.in_kernels else torch.zeros_like(self.made[:1])
        self.graphs = graphs
        self.recorded: dict[int, torch.cuda.CUDAGraph] = {}  # steps, by their number of rows
        self.newest: torch.cuda.CUDAGraph | None = None
        self.num_steps = 0
        self.prefill = Prefill(twin, slots, graphs, pad_token_id)
        self.lag = 0 if graphs is None else 1  # steps that are made before a look at what is done is acted on

    def begin(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Read prompts, each into its slot, and draw the first token of each. Equal prompts are read once."""
        first: dict[tuple[int, ...], int] = {}
        sources = [first.setdefault(tuple(prompt), slot) for slot, prompt in zip(slots, prompts, strict=True)]
        number = {slot: i for i, slot in enumerate(first.values())}
        go_on = self._go_on if self.num_steps else None
        states = self.prefill.read(list(first.values()), [list(prompt) for prompt in first], go_on)
        copied = [(source, slot) for source, slot in zip(sources, slots, strict=True) if source != slot]
        if copied:
            self.slots.copy(*self._index(copied), num_tokens=max(map(len, prompts)))
        rows, order = self._index([(slot, number[source]) for slot, source in zip(slots, sources, strict=True)])
        size = max(LOGITS_AT_ONCE // self.twin.vocab_size, 1)
        parts = [self._draw(self.twin.logits(some)) for some in states[order].split(size)]
        tokens, logprobs = (torch.cat(part) for part in zip(*parts, strict=True))
        for tensor, start in ((self.made, 0), (self.ended, -1), (self.tokens, self.pad_token_id)):
            tensor.index_fill_(0, rows, start)  # an assignment of a number would wait for the GPU to have it
        self._store(rows, tokens, logprobs)
        self._tell()

    def step(self, num: int) -> None:
        """One more token in each of the first `num` slots."""
        self.num_steps += 1
        if self.graphs is None:
            self.slots.next_step(longest=int(self.slots.lengths[:num].amax()) + 1)
            self._step(num)
            return
        num = _rows_of_graph(num, self.slots.shape[0])
        if num not in self.recorded:
            self._go_on()
            self.recorded[num] = self._capture(self.graphs, num)
        self.newest = self.recorded[num]
        self.newest.replay()

    def look(self) -> _Look:
        """At what is done after the steps so far."""
        there = None if self.graphs is None else torch.cuda.Event()
        if there is not None:
            there.record()
        return _Look(self.told, self.num_steps, there)

    def move(self, sources: list[int], targets: list[int], longest: int) -> None:
        """Rows that are under way move to other slots; they have no more than `longest` tokens."""
        old, new = self._index(list(zip(sources, targets, strict=True)))
        self.slots.copy(old, new, num_tokens=longest)
        for tensor in (self.made, self.last, self.ended, self.tokens, self.logprobs):
            tensor[new] = tensor[old]

    def shrinks(self, num: int, num_ended: int) -> bool:
        """Whether a step becomes shorter where `num_ended` of `num` rows leave."""
        if self.graphs is None or num == num_ended:
            return True
        return _rows_of_graph(num - num_ended, num) < _rows_of_graph(num, num)

    def refilled_at_once(self, num: int) -> int:
        """How many of `num` slots: passes over prompts, if all are different, are recorded for powers of two."""
        return num if self.graphs is None else 1 << (num.bit_length() - 1)

    def _go_on(self) -> None:
        """Make more steps of the rows as they are, with which the GPU is busy while something is recorded."""
        if self.newest is not None:
            for _ in range(_MEANWHILE):
                self.newest.replay()
            self.num_steps += _MEANWHILE

    def _step(self, num: int) -> None:
        self.slots.forget_seen()  # here, so that a graph makes it anew
        hidden = self.twin.states(self.last[:num, None], self.slots.lengths[:num, None])[:, 0]
        logits = self.twin.logits(hidden)
        if self.in_kernels:
            from rlhf.stages.engines import decode_kernels

            law = self.twin.scale, self.twin.softcap, self.temperature
            state = self.last, self.made, self.ended, self.told, self.slots.lengths, self.tokens, self.logprobs
            decode_kernels.take(logits, self.seed, self.steps, *law, self.stops, *state)
            return
        self.steps += 1
        self.slots.lengths[:num] += self.ended[:num] < 0
        self._store(slice(num), *self._draw(logits))
        self._tell()

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return draw(shaped(logits, self.twin.scale, self.twin.softcap, self.temperature))

    def _store(self, rows: Tensor | slice, tokens: Tensor, logprobs: Tensor) -> None:
        """Tokens [n] that were drawn for `rows`."""
        made, ended = self.made[rows], self.ended[rows]
        going = ended < 0
        place = torch.where(going, made, self.max_new_tokens)
        where = torch.arange(len(self.made), device=made.device)[rows]
        self.tokens[where, place], self.logprobs[where, place] = tokens, logprobs
        made = made + going
        ends = going & (torch.isin(tokens, self.stops) | (made >= self.max_new_tokens))
        self.made[rows], self.ended[rows], self.last[rows] = made, torch.where(ends, self.steps, ended), tokens

    def _tell(self) -> None:
        """The CPU when rows were done."""
        if self.told is not self.ended:
            self.told.copy_(self.ended, non_blocking=True)

    def _capture(self, graphs: Graphs, num: int) -> torch.cuda.CUDAGraph:
        """A graph of `_step`, which changes nothing here; `told` may name the step to come, which no look asks for."""
        shapes = num, self.slots.shape, self.tokens.shape, len(self.stops)
        self.slots.next_step()
        if graphs.is_known(shapes):
            return graphs.capture(lambda: self._step(num), shapes)
        state = self.slots.lengths, self.made, self.last, self.ended, self.steps, self.tokens, self.logprobs
        saved = [tensor.clone() for tensor in state]
        graph = graphs.capture(lambda: self._step(num), shapes)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return graph

    def _index(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        old, new = sent(self.made.device, torch.tensor(pairs))[0].unbind(1)
        return old, new


def _rows_of_graph(num: int, most: int) -> int:
    """Rows of the graph that serves `num` rows: the next power of two, so that there are few graphs, or, of more than
    64 rows, three quarters of it."""
    power = 1 << (num - 1).bit_length()
    rows = power * 3 // 4 if 64 < num <= power * 3 // 4 else power
    return min(max(rows, FEWEST_ROWS), most)
