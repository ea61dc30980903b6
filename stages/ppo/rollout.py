"""The rollout phase: responses sampled from the policy, and what every model says about them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.collate import pad_left
from rlhf.data.rows import Prompt
from rlhf.stages.engines import Engine
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.engines.stock import TransformersEngine
from rlhf.stages.engines.vllm import VLLMEngine
from rlhf.stages.microbatches import Piece, pieces
from rlhf.stages.models import PolicyModel, ScalarModel
from rlhf.stages.out_of_memory import at_once, doing
from rlhf.stages.packing import PackedRows
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.objective import after_the_end
from rlhf.stages.ppo.placement import begun
from rlhf.stages.ppo.reward_models import Episodes
from rlhf.stages.ppo.rewards import Rewards, episodes_of
from rlhf.stages.runtime import Runtime
from rlhf.stages.sharding import GatheredEngine, Whole, evenly, is_sharded


@dataclass
class Rollout:
    """B episodes: prompts padded on the left to P tokens, responses on the right to R, T = P + R."""

    input_ids: Tensor  # [B,T] prompt and response
    attention_mask: Tensor  # [B,T] True on prompt tokens and on the response up to its stop token
    mask: Tensor  # [B,R] True on the response up to its stop token, which is an action like the others
    logprobs: Tensor  # [B,R] of the policy that sampled, at the sampling temperature
    sampled_logprobs: Tensor  # [B,R] the same, as the engine has it that sampled
    ref_logprobs: Tensor  # [B,R] of the reference, at the same temperature
    entropy: Tensor  # [B,R]
    values: Tensor  # [B,R] of the state before each token; zeros without a critic
    scores: Tensor  # [B] of all rewards together, before any penalty
    reward_scores: Tensor  # [B,N] of each reward, unweighted
    ended: Tensor  # [B] True where the response has a stop token

    @property
    def responses(self) -> Tensor:
        return self.input_ids[:, -self.mask.shape[1] :]

    @property
    def kl(self) -> Tensor:
        """Log-ratio to the reference [B], summed over each response (k1, in nats)."""
        return torch.where(self.mask, self.logprobs - self.ref_logprobs, 0.0).sum(-1)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(-1)

    @property
    def prompt_lengths(self) -> Tensor:
        return self.attention_mask[:, : -self.mask.shape[1]].sum(-1)

    def cut(self, piece: Piece) -> "Rollout":
        """The piece's rows, without the columns that are padding in all of them."""
        width = self.mask.shape[1]

        def cut(name: str) -> Tensor:
            tensor: Tensor = getattr(self, name)
            if name in ("input_ids", "attention_mask"):
                return piece.of_text(tensor, width)
            return piece.of_response(tensor) if tensor.shape == self.mask.shape else tensor[piece.on(tensor.device)]

        return Rollout(**{f.name: cut(f.name) for f in fields(self)})


def policy_engine(run: Runtime[PPOSettings], policy: PolicyModel) -> Engine:
    """What samples from a policy, as the settings say; a server is for the one that is trained."""
    if not is_sharded(policy):
        return engine_for(run, policy.model)
    served = run.settings.rollout.engine == "vllm"
    if served:
        whole = Whole(policy, torch.device("cpu"), everywhere=False)
    else:
        whole = Whole(policy, run.device, run.low_precision)
        run.say("the policy is gathered once for each rollout: every process then has all of its weights")
    engine = engine_for(run, whole.model.model)
    if isinstance(engine, StaticEngine):
        engine.twin.owns_weights = True
    return GatheredEngine(engine, whole, served)


def engine_for(run: Runtime[PPOSettings], model: PreTrainedModel) -> Engine:
    """What samples from a model with all of its weights, as the settings say."""
    settings = run.settings
    given = settings.rollout
    if given.engine != "vllm":
        return make_engine(model, given.engine, run.low_precision, settings.generation_batch_size, compiled=True)
    assert given.server_url is not None
    assert settings.model is not None
    longest = settings.max_prompt_length + settings.max_new_tokens
    folder = Path(given.weights_folder or run.folder)
    vocab_size = model.config.get_text_config().vocab_size
    return VLLMEngine(given.server_url, run, settings.model, vocab_size, longest, folder, given.timeout)


def give_room(run: Runtime[PPOSettings], engine: Engine) -> None:
    """Let an engine in this process sample as many at a time as `auto_microbatch` has come down to."""
    if isinstance(engine, StaticEngine | TransformersEngine):
        engine.batch_size = at_once(run, "generation_batch_size")


@torch.no_grad()
def collect(
    engine: Engine,
    policy: PolicyModel,
    reference: PolicyModel,
    rewards: Rewards,
    critic: ScalarModel | None,
    prompts: list[list[int]],
    asked: Sequence[Prompt],
    settings: PPOSettings,
    stop_token_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    microbatch_size: int | None = None,
) -> Rollout:
    """One response per prompt, with log-probabilities, values and scores. All models are in eval mode.

    `engine` samples from the policy. `asked` are the prompts as they were read, for the rewards. `microbatch_size`
    episodes and `microbatch_tokens` tokens are read at a time.
    """
    device, pad_token_id = policy.model.device, tokenizer.pad_token_id
    doing("sampling")
    law = settings.max_new_tokens, settings.temperature, stop_token_ids, pad_token_id
    sampled = engine.generate(prompts, *law)
    responses = sampled.tokens.to(device)  # [B,R]
    prompt_ids, prompt_mask = (x.to(device) for x in pad_left(prompts, pad_token_id))  # [B,P]
    mask = sampled.mask.to(device)
    input_ids = torch.cat([prompt_ids, responses], dim=1)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    limit = settings.microbatch_tokens
    episodes = episodes_of(input_ids, attention_mask, mask, asked, stop_token_ids, tokenizer, limit)
    doing("the rollout", input_ids[:microbatch_size])
    with placed(device, settings.offload, reference, rewards):
        logprobs, ref_logprobs, entropy, values = torch.zeros(4, *mask.shape, device=device)
        # The critic is asked about every slot that may be rewarded, also about one after the end.
        read = after_the_end(mask) if settings.score_placement == "after_eos" else mask
        lengths = [len(ids) for ids in prompts], read.sum(-1).tolist()
        packed = all(x.packed for x in (policy, reference, critic) if x is not None)
        cut = evenly(pieces(*lengths, microbatch_size, max_tokens=limit, device=device.type, packed=packed), policy)
        if packed:  # all of them before the first is read
            cut = [piece.packed(input_ids, attention_mask, mask.shape[1]) for piece in cut]
        beside = of_models = None
        if settings.placement == "second_gpu":
            there = reference.model.device
            work = partial(
                read_there, reference, rewards, input_ids.to(there), episodes.to(there), cut, settings, microbatch_size
            )
            beside = begun(work, there)
        try:
            for piece in cut:
                text = piece.of_text(input_ids, mask.shape[1]), piece.of_text(attention_mask, mask.shape[1])
                doing("the rollout", text[0], len(piece))
                readers = policy, None if beside else reference, critic
                found = read_part(*readers, *text, piece.num_response, settings, piece.as_pack)
                for whole, part in zip((logprobs, ref_logprobs, entropy, values), found, strict=True):
                    whole[piece.on(device), : piece.num_response] = part
        except Exception:
            if beside is not None:
                beside.exception()  # what is tried again finds the second GPU at rest
            raise
        doing("scoring", input_ids[:microbatch_size])
        if beside is not None:
            ref_logprobs, *of_models = (x.to(device) for x in beside.result())
        scores, parts_of_score = rewards(episodes, microbatch_size, of_models)
    return Rollout(
        input_ids, attention_mask, mask, logprobs, sampled.logprobs.to(device), ref_logprobs, entropy, values, scores,
        parts_of_score, episodes.ended,
    )  # fmt: skip


def read_part(
    policy: PolicyModel,
    reference: PolicyModel | None,
    critic: ScalarModel | None,
    input_ids: Tensor,
    attention_mask: Tensor,
    num_response: int,
    settings: PPOSettings,
    as_pack: PackedRows | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, ref_logprobs, entropy, values) [B,R] of one microbatch; zeros for who is not asked here."""
    text = input_ids, attention_mask, num_response
    logprobs, entropy, values = policy(*text, settings.temperature, with_entropy=True, as_pack=as_pack)
    assert entropy is not None
    ref_logprobs = torch.zeros_like(logprobs)
    if reference is not None:
        ref_logprobs, _, _ = reference(*text, settings.temperature, as_pack=as_pack)
    if critic is not None:
        values = response_values(critic, *text, as_pack)
    return logprobs, ref_logprobs, entropy, torch.zeros_like(logprobs) if values is None else values


def read_there(
    reference: PolicyModel,
    rewards: Rewards,
    input_ids: Tensor,
    episodes: Episodes,
    cut: Sequence[Piece],
    settings: PPOSettings,
    microbatch_size: int | None,
) -> list[Tensor]:
    """ref_logprobs [B,R] of ids [B,T], and the scores [B] of each reward model, where these and the models are."""
    width = episodes.mask.shape[1]
    ref_logprobs = torch.zeros(episodes.mask.shape, device=episodes.mask.device)
    if reference.packed:
        cut = [piece.packed(input_ids, episodes.attention_mask, width) for piece in cut]
    for piece in cut:
        text = piece.of_text(input_ids, width), piece.of_text(episodes.attention_mask, width)
        logprobs, _, _ = reference(*text, piece.num_response, settings.temperature, as_pack=piece.as_pack)
        ref_logprobs[piece.on(ref_logprobs.device), : piece.num_response] = logprobs
    return [ref_logprobs, *rewards.of_models(episodes, microbatch_size)]


def response_values(
    critic: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    num_response: int,
    as_pack: PackedRows | None = None,
) -> Tensor:
    """Values [B,R]: the one at t judges the state before response token t, so that the last token's is not needed."""
    values: Tensor = critic(input_ids[:, :-1], attention_mask[:, :-1], as_pack=as_pack)
    return values[:, -num_response:]


@contextmanager
def placed(device: torch.device, offload: bool, *models: torch.nn.Module) -> Iterator[None]:
    """With `offload`, models that wait in the CPU's memory are on the device inside."""
    if offload:
        for model in models:
            model.to(device)
    try:
        yield
    finally:  # also when memory runs out: what is tried again begins as this did
        if offload:
            for model in models:
                model.to("cpu")
