"""Reward models: decoders read by our own rule, and encoders that classify prompt and response as a pair of texts.

A decoder that reads text as the policy does is given the ids as they were sampled. Any other model is given the
text, which its own tokenizer encodes anew: ids never cross from one vocabulary into another.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.data.collate import pad_examples
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.hub import refuse_unknown
from rlhf.data.rows import Prompt, prompt_text
from rlhf.data.tokens import Encoded, encode_examples
from rlhf.stages.microbatches import Piece, pieces
from rlhf.stages.models import (
    SAFELY,
    ScalarModel,
    hand_over,
    load_scalar,
    load_tokenizer,
    read_tokenizer,
    why_not_loaded,
)
from rlhf.stages.packing import pack_of
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.sharding import evenly
from rlhf.stages.text_limits import check_positions, num_positions


@dataclass
class Episodes:
    """B responses as ids and as text, in the order of the rollout."""

    scored_ids: Tensor  # [B,T] prompt and response as reward models read them: whatever ended it, eos does here
    attention_mask: Tensor  # [B,T] True on prompt tokens and on the response up to its stop token
    mask: Tensor  # [B,R] True on the response up to its stop token
    ended: Tensor  # [B] True where the response has a stop token
    prompts: Sequence[Prompt]
    responses: Sequence[str]
    max_tokens: int | None = None
    """Tokens that a model reads at a time, padding included; no limit by default."""

    def to(self, device: torch.device) -> "Episodes":
        """The same, its tensors on a device."""
        tensors = ("scored_ids", "attention_mask", "mask", "ended")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    def cut(
        self, prompts: Sequence[int], responses: Sequence[int], max_rows: int | None, packed: bool = False
    ) -> list[Piece]:
        """What is read together, from the lengths that prompts and responses have for a model."""
        device = self.mask.device.type
        return pieces(prompts, responses, max_rows, max_tokens=self.max_tokens, device=device, packed=packed)

    def row(self, number: int) -> str:
        """Row `number` (from 0) as errors show it."""
        prompt = _excerpt(prompt_text(self.prompts[number].messages))
        return (
            f"row {number + 1} of {len(self.responses)}: prompt {prompt}, response {_excerpt(self.responses[number])}"
        )


class ModelReward(nn.Module):
    """A decoder. `tokenizer` is its own where it reads text, None where it reads the policy's ids."""

    def __init__(
        self,
        name: str,
        scalar: ScalarModel,
        weight: float = 1.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: str = "",
    ) -> None:
        super().__init__()
        self.name, self.scalar, self.weight, self.tokenizer, self.reference = name, scalar, weight, tokenizer, reference
        self.max_length = num_positions(scalar.classifier)

    def forward(self, episodes: Episodes, microbatch_size: int | None = None) -> Tensor:
        """Scores [B]."""
        read = self._from_ids if self.tokenizer is None else self._from_text
        return read(episodes, microbatch_size)

    def _from_ids(self, episodes: Episodes, microbatch_size: int | None) -> Tensor:
        width = episodes.mask.shape[1]
        lengths = episodes.attention_mask[:, :-width].sum(-1).tolist(), episodes.mask.sum(-1).tolist()
        scores = torch.zeros(len(episodes.mask), device=episodes.mask.device)
        cut = evenly(episodes.cut(*lengths, microbatch_size, self.scalar.packed), self.scalar)
        whole = episodes.scored_ids, episodes.attention_mask
        texts = [(piece.of_text(whole[0], width), piece.of_text(whole[1], width)) for piece in cut]
        packs = [pack_of(*text) if self.scalar.packed else None for text in texts]  # all before the first is read
        for piece, (ids, attention_mask), as_pack in zip(cut, texts, packs, strict=True):
            in_response = torch.zeros_like(attention_mask)
            in_response[:, -piece.num_response :] = piece.of_response(episodes.mask)
            values = self.scalar(ids, attention_mask, as_pack=as_pack)
            scores[piece.on(scores.device)] = self.scalar.pool(values, in_response).float()
        return scores

    def _from_text(self, episodes: Episodes, microbatch_size: int | None) -> Tensor:
        assert self.tokenizer is not None
        encoded = list(self._encoded(episodes))
        lengths = [len(text.input_ids) for text in encoded]
        scores = torch.zeros(len(encoded), device=episodes.mask.device)
        cut = episodes.cut([0] * len(encoded), lengths, microbatch_size, self.scalar.packed)
        for piece in evenly(cut, self.scalar):
            padded = pad_examples([encoded[row] for row in piece.rows], self.tokenizer.pad_token_id)
            ids, attention_mask, in_response = (x.to(self.scalar.classifier.device) for x in padded)
            scores[piece.on(scores.device)] = self.scalar.pool(self.scalar(ids, attention_mask), in_response).to(scores)
        return scores

    def _encoded(self, episodes: Episodes) -> Iterator[Encoded]:
        """Prompts and responses. A response that was cut off gets no eos: its ids have none either."""
        prompts = (prompt.messages for prompt in episodes.prompts)
        pairs = zip(prompts, episodes.responses, strict=True)
        for row, example in enumerate(encode_examples(self.tokenizer, pairs, self.max_length)):
            if example is None:
                raise _too_long(self, episodes, row)
            if not episodes.ended[row] and len(example.input_ids) - example.prompt_length > 1:
                example = Encoded(example.input_ids[:-1], example.prompt_length)
            yield example


class PairReward(nn.Module):
    """An encoder (BERT, RoBERTa, DeBERTa, ModernBERT …), read by its own forward: logits[:, 0].

    It is given text even where its vocabulary is the policy's, and no critic can start from it: its number for a
    token depends on the tokens after it.
    """

    def __init__(
        self,
        name: str,
        classifier: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        weight: float = 1.0,
        reference: str = "",
    ) -> None:
        super().__init__()
        self.name, self.classifier, self.weight, self.reference = name, classifier, weight, reference
        self.tokenizer = tokenizer
        self.tokenizer.truncation_side = "left"  # of the prompt: the question is usually at its end
        self.max_length: int = min(tokenizer.model_max_length, _num_positions(classifier))

    def forward(self, episodes: Episodes, microbatch_size: int | None = None) -> Tensor:
        """Scores [B]."""
        prompts, responses = [prompt_text(prompt.messages) for prompt in episodes.prompts], list(episodes.responses)
        plain: dict[str, Any] = {"split_special_tokens": True, "verbose": False}  # "[SEP]" in a text stays text
        whole = self.tokenizer(prompts, responses, **plain)
        lengths = [len(ids) for ids in whole["input_ids"]]
        for row, length in enumerate(lengths):
            if 0 < length - self.max_length >= whole.sequence_ids(row).count(0):  # all of the prompt is not enough
                raise _too_long(self, episodes, row)
        scores = torch.zeros(len(lengths), device=episodes.mask.device)
        fitting = [min(length, self.max_length) for length in lengths]
        for piece in evenly(episodes.cut([0] * len(lengths), fitting, microbatch_size), self.classifier):
            encoded = self.tokenizer(
                [prompts[row] for row in piece.rows], [responses[row] for row in piece.rows], truncation="only_first",
                max_length=self.max_length, padding=True, return_tensors="pt", **plain,
            )  # fmt: skip
            logits = self.classifier(**encoded.to(self.classifier.device)).logits
            scores[piece.on(scores.device)] = logits[:, 0].to(scores)
        return scores


def load_reward_model(
    name: str, reference: str, weight: float, where: str, ours: dict[str, Any], settings: PPOSettings
) -> ModelReward | PairReward:
    """A reward model with its own tokenizer, or without where it is a decoder that agrees with the policy (`ours`).

    Raises SettingsError, naming the setting `where`, for what cannot be used.
    """
    refuse_unknown(reference, where)
    try:
        if not _is_decoder(reference):
            return PairReward(name, *_load_pair(reference), weight, reference)
        tokenizer = load_tokenizer(reference)
        scalar = load_scalar(reference, tokenizer)
    except RefusedError as error:
        raise SettingsError(f"{where}: {error}") from error
    if hand_over(tokenizer, scalar.classifier) != ours:
        return ModelReward(name, scalar, weight, tokenizer, reference)
    lengths, longest = settings.longest()
    check_positions(f"{where}: {lengths}", longest, scalar.classifier)
    return ModelReward(name, scalar, weight, None, reference)


def _is_decoder(reference: str) -> bool:
    """Whether its sequence classifier has the linear head `score` that transformers gives decoders alone."""
    try:
        config = AutoConfig.from_pretrained(reference, trust_remote_code=False)
        with torch.device("meta"):  # the shape only
            model = AutoModelForSequenceClassification.from_config(config)
    except (OSError, ValueError):
        return True  # loading it will say what is wrong
    return isinstance(getattr(model, "score", None), nn.Linear)


def _load_pair(reference: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An encoder with its tokenizer, in float32; a missing head or another number of labels than one is refused."""
    tokenizer = read_tokenizer(reference)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            reference, dtype=torch.float32, output_loading_info=True, **SAFELY
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RefusedError(f"no sequence classifier in '{reference}': {why_not_loaded(reference, error)}") from error
    if model.config.is_encoder_decoder:
        raise RefusedError(f"'{reference}' is an encoder-decoder; use a decoder or an encoder")
    if info["missing_keys"]:
        raise RefusedError(
            f"'{reference}' lacks the weights {sorted(info['missing_keys'])[:3]}; "
            "a reward model must be saved with its head"
        )
    if model.config.num_labels != 1:
        raise RefusedError(
            f"'{reference}' has {model.config.num_labels} labels; a reward model has one, whose number is the score"
        )
    if tokenizer.pad_token_id is None:
        raise RefusedError(f"the tokenizer in '{reference}' has no pad token; set it in its tokenizer_config.json")
    return model, tokenizer


def _num_positions(model: PreTrainedModel) -> int:
    """How many tokens an encoder takes; RoBERTa's positions begin after its pad id."""
    embeddings = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    before = getattr(embeddings, "padding_idx", None)
    return (getattr(model.config, "max_position_embeddings", None) or sys.maxsize) - (
        0 if before is None else before + 1
    )


def _too_long(model: ModelReward | PairReward, episodes: Episodes, row: int) -> ValueError:
    return ValueError(
        f"reward {model.name}: the response does not fit into the model's {model.max_length} positions "
        f"({episodes.row(row)}); lower ppo.max_new_tokens"
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "…")
