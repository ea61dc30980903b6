"""What a model answers to the held-out prompts, how far it is from SFT there, and what reward and judge say of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.collate import pad_left
from rlhf.data.rows import Prompt
from rlhf.stages.engines import Engine
from rlhf.stages.evaluation.records import EvaluationFailed
from rlhf.stages.microbatches import pieces
from rlhf.stages.models import PolicyModel, load_policy
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.rewards import Rewards, episodes_of
from rlhf.stages.precision import half
from rlhf.stages.text_limits import stops_of

ROWS_AT_ONCE = 256
"""Answers that are sampled together where `ppo.generation_batch_size` says nothing."""
TOKENS_AT_ONCE = 2**14
"""That a model reads at a time afterwards."""


@dataclass(frozen=True)
class Answer:
    """One response to one prompt."""

    text: str
    length: int
    """Tokens, eos included."""
    ended: bool
    kl: float | None
    """Log-ratio to SFT in nats, summed over the response, at the sampling temperature; None without an SFT model."""
    score: float | None
    """All rewards together, before any penalty of PPO's."""


class Speaker:
    """A model in memory, with what samples from it."""

    def __init__(
        self, reference: str, tokenizer: PreTrainedTokenizerBase, device: torch.device, compiled: bool
    ) -> None:
        self.model = load_policy(reference, tokenizer, half(device)).to(device).eval()
        self.reader = PolicyModel(self.model)
        self.stops = stops_of(self.model, tokenizer)
        self._compiled = compiled

    @cached_property
    def engine(self) -> Engine:
        """What samples from it; of perplexities alone it is not needed."""
        from rlhf.stages.engines.choice import make_engine  # and PEFT with it, which takes long to import

        return make_engine(self.model, compiled=self._compiled)


@dataclass(frozen=True)
class Questions:
    """Prompts, their ids, and how they are to be answered."""

    prompts: Sequence[Prompt]
    ids: Sequence[list[int]]
    settings: PPOSettings
    """Of the run's PPO; temperature, length limit, seed and the like."""
    tokenizer: PreTrainedTokenizerBase


@torch.no_grad()
def answers(
    asked: Questions,
    speaker: Speaker,
    reference: Speaker | None,
    rewards: Rewards | None,
    num_samples: int,
    say: Callable[[str], None],
    stream: int = 0,
) -> list[list[Answer]]:
    """`num_samples` answers to each prompt, from a random stream that is the same for every model; another `stream`
    gives others. `say` is told how many there are. The global random stream is left as it was. Raises EvaluationFailed
    where a reward fails.
    """
    device = speaker.model.device
    rows = [prompt for prompt in range(len(asked.prompts)) for _ in range(num_samples)]
    size = asked.settings.generation_batch_size or ROWS_AT_ONCE
    found: list[Answer] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(asked.settings.seed + stream)
        for start in range(0, len(rows), size):
            say(f"{start} of {len(rows)} answers")
            found += _answers(asked, rows[start : start + size], speaker, reference, rewards)
    return [found[start : start + num_samples] for start in range(0, len(found), num_samples)]


def _answers(
    asked: Questions, rows: list[int], speaker: Speaker, reference: Speaker | None, rewards: Rewards | None
) -> list[Answer]:
    tokenizer, law, device = asked.tokenizer, asked.settings, speaker.model.device
    stops, pad = speaker.stops, tokenizer.pad_token_id
    prompts = [asked.ids[row] for row in rows]
    sampled = speaker.engine.generate(prompts, law.max_new_tokens, law.temperature, stops, pad)
    responses, mask = sampled.tokens.to(device), sampled.mask.to(device)  # [B,R]
    prompt_ids, prompt_mask = (x.to(device) for x in pad_left(prompts, pad))  # [B,P]
    ids, attended = torch.cat([prompt_ids, responses], 1), torch.cat([prompt_mask, mask], 1)
    told = [asked.prompts[row] for row in rows]
    episodes = episodes_of(ids, attended, mask, told, stops, tokenizer, law.microbatch_tokens)
    kl: list[float | None] = [None] * len(rows)
    if reference is speaker:
        kl = [0.0] * len(rows)
    elif reference is not None:
        kl = [*_log_ratio(speaker.reader, reference.reader, ids, attended, mask, law.temperature).tolist()]
    scores: list[float | None] = [None] * len(rows)
    if rewards is not None:
        try:
            scores = [*rewards(episodes, law.microbatch_size)[0].tolist()]
        except ValueError as error:  # of a function, or a score that is no finite number
            raise EvaluationFailed(str(error)) from error
    columns = episodes.responses, mask.sum(-1).tolist(), episodes.ended.tolist(), kl, scores
    return [Answer(*values) for values in zip(*columns, strict=True)]


def _log_ratio(
    ours: PolicyModel, theirs: PolicyModel, ids: Tensor, attended: Tensor, mask: Tensor, temperature: float
) -> Tensor:
    """log ours − log theirs [B] of responses [B,R] as marked in `mask`, at the end of `ids` [B,T]."""
    width = mask.shape[1]
    lengths = attended[:, :-width].sum(-1).tolist(), mask.sum(-1).tolist()
    found = torch.zeros(len(ids), device=ids.device)
    for piece in pieces(*lengths, max_tokens=TOKENS_AT_ONCE, device=ids.device.type):
        text = piece.of_text(ids, width), piece.of_text(attended, width), piece.num_response, temperature
        ratio = ours(*text)[0] - theirs(*text)[0]
        found[piece.on(ids.device)] = torch.where(piece.of_response(mask), ratio, 0.0).sum(-1)
    return found
