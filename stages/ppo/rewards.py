"""What PPO maximises: one score per response from reward models and Python functions, mixed by weight.

A reward model that reads text as the policy does is given the ids as they were sampled. Any other is given the text,
which its own tokenizer and chat template encode anew: ids never cross from one vocabulary into another.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.collate import pad_right
from rlhf.data.errors import DataError, RefusedError, SettingsError
from rlhf.data.rows import Messages, prompt_text
from rlhf.data.sources import load_function
from rlhf.data.tokens import encode_example, encode_prompt
from rlhf.stages.models import ScalarModel, check_hand_over, check_positions, hand_over, load_scalar, load_tokenizer
from rlhf.stages.ppo.config import PPOSettings


@dataclass
class Episodes:
    """B responses as ids and as text, in the order of the rollout."""

    input_ids: Tensor  # [B,T] prompt and response
    attention_mask: Tensor  # [B,T] True on prompt tokens and on the response up to its stop token
    mask: Tensor  # [B,R] True on the response up to its stop token
    ended: Tensor  # [B] True where the response has a stop token
    prompts: Sequence[Messages]
    responses: Sequence[str]

    def row(self, number: int) -> str:
        """Row `number` (from 0) as errors show it."""
        prompt, response = _excerpt(prompt_text(self.prompts[number])), _excerpt(self.responses[number])
        return f"row {number + 1} of {len(self.responses)}: prompt {prompt}, response {response}"


class ModelReward(nn.Module):
    """A reward model. `tokenizer` is its own where it reads text, None where it reads the policy's ids."""

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
        positions = getattr(scalar.classifier.config.get_text_config(), "max_position_embeddings", None)
        self.max_length: int = positions or sys.maxsize

    def forward(self, episodes: Episodes, microbatch_size: int | None = None) -> Tensor:
        """Scores [B]."""
        num = len(episodes.responses)
        size = microbatch_size or num
        parts = [range(start, min(start + size, num)) for start in range(0, num, size)]
        read = self._from_ids if self.tokenizer is None else self._from_text
        return torch.cat([read(episodes, rows) for rows in parts]).float()

    def _from_ids(self, episodes: Episodes, rows: range) -> Tensor:
        place = slice(rows.start, rows.stop)
        input_ids, attention_mask = episodes.input_ids[place], episodes.attention_mask[place]
        mask = episodes.mask[place]
        in_response = torch.zeros_like(attention_mask)
        in_response[:, -mask.shape[1] :] = mask
        return self.scalar.pool(self.scalar(input_ids, attention_mask), in_response)

    def _from_text(self, episodes: Episodes, rows: range) -> Tensor:
        assert self.tokenizer is not None
        encoded = [self._encode(episodes, row) for row in rows]
        ids, attention_mask = pad_right([ids for ids, _ in encoded], self.tokenizer.pad_token_id)
        starts = torch.tensor([prompt_length for _, prompt_length in encoded])
        in_response = attention_mask & (torch.arange(ids.shape[1]) >= starts[:, None])
        device = next(self.scalar.parameters()).device
        ids, attention_mask, in_response = (x.to(device) for x in (ids, attention_mask, in_response))
        return self.scalar.pool(self.scalar(ids, attention_mask), in_response).to(episodes.input_ids.device)

    def _encode(self, episodes: Episodes, row: int) -> tuple[list[int], int]:
        """(ids, length of the prompt in them). A response that was cut off gets no eos: its ids have none either."""
        example = encode_example(self.tokenizer, episodes.prompts[row], episodes.responses[row], self.max_length)
        if example is None:
            raise ValueError(
                f"reward {self.name}: the response does not fit into the model's {self.max_length} positions "
                f"({episodes.row(row)}); lower ppo.max_new_tokens"
            )
        ids, prompt_length = example.input_ids, example.prompt_length
        if not episodes.ended[row] and len(ids) - prompt_length > 1:
            ids = ids[:-1]
        return ids, prompt_length


@dataclass
class FunctionReward:
    """A `module:function` (prompts, responses) -> one number per response."""

    name: str
    function: str
    weight: float = 1.0

    def __call__(self, episodes: Episodes) -> Tensor:
        """Scores [B], on the CPU."""
        function = load_function(self.function)
        prompts, responses = [prompt_text(prompt) for prompt in episodes.prompts], list(episodes.responses)
        try:
            values = _numbers(function(list(prompts), list(responses)))
        except Exception as error:
            where = _guilty_row(function, prompts, responses, episodes)
            raise ValueError(f"reward {self.function}: raised {type(error).__name__}: {error} ({where})") from error
        if len(values) != len(responses):
            where = _guilty_row(function, prompts, responses, episodes)
            raise ValueError(f"reward {self.function}: returned {len(values)} for {len(responses)} responses ({where})")
        for row, value in enumerate(values):
            if not _is_number(value):
                raise ValueError(f"reward {self.function}: gave {value!r}, not a finite number ({episodes.row(row)})")
        return torch.tensor([float(value) for value in values], dtype=torch.float32)


class Rewards(nn.Module):
    """All rewards of a run, mixed: Σ weight · score.

    With an `ensemble` the weighted scores s of the models count as one: their mean, or the lower confidence bound
    mean(s) − penalty · std(s) (std over the members, biased), under which the policy gains nothing where the models
    disagree (as in Coste et al. 2023, who subtract the variance). Functions are added to it.
    """

    def __init__(
        self,
        models: Sequence[ModelReward],
        functions: Sequence[FunctionReward] = (),
        ensemble: Literal["mean", "lower_bound"] | None = None,
        ensemble_penalty: float = 1.0,
        microbatch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.functions = list(functions)
        self.names = [*(model.name for model in models), *(function.name for function in functions)]
        self.ensemble, self.ensemble_penalty = ensemble, ensemble_penalty
        self.microbatch_size = microbatch_size
        self.requires_grad_(False).eval()

    @property
    def critic_start(self) -> str | None:
        """The first model that reads the policy's ids, from which a critic can start; None if there is none."""
        return next((model.reference for model in self._members() if model.tokenizer is None), None)

    @torch.no_grad()
    def forward(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """(scores [B], unweighted score of each reward [B,N] in the order of `names`), both float32.

        Raises ValueError naming reward and row where a reward fails or gives something that is no finite number.
        """
        device = episodes.input_ids.device
        columns = []
        for model in self._members():
            scores = model(episodes, self.microbatch_size)
            if not (finite := scores.isfinite()).all():
                row = int((~finite).long().argmax())
                raise ValueError(f"reward {model.name}: gave {scores[row].item()} ({episodes.row(row)})")
            columns.append(scores)
        columns += [function(episodes).to(device) for function in self.functions]
        parts = torch.stack(columns, dim=-1)
        weights = [*(model.weight for model in self._members()), *(function.weight for function in self.functions)]
        return self._mix(parts * parts.new_tensor(weights)), parts

    def check_prompts(self, prompts: Sequence[Messages]) -> None:
        """Refuse, before training, prompts that the chat template of a reward model cannot write."""
        for model in self._members():
            if model.tokenizer is not None:
                try:
                    for prompt in prompts:
                        encode_prompt(model.tokenizer, prompt)
                except DataError as error:
                    raise DataError(f"reward {model.name} ({model.reference}): {error}") from error

    def _mix(self, weighted: Tensor) -> Tensor:
        """[B,N] -> [B]"""
        members, others = weighted[:, : len(self.models)], weighted[:, len(self.models) :]
        if self.ensemble is None:
            return weighted.sum(-1)
        score = members.mean(-1)
        if self.ensemble == "lower_bound":
            score = score - self.ensemble_penalty * members.std(-1, unbiased=False)
        return score + others.sum(-1)

    def _members(self) -> Iterator[ModelReward]:
        for model in self.models:
            assert isinstance(model, ModelReward)
            yield model


def load_rewards(settings: PPOSettings, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> Rewards:
    """The rewards that the settings name, on the CPU. `reward_model` must read text as the policy does.

    Raises RefusedError for what is not there or cannot be used.
    """
    ours = hand_over(tokenizer, policy)
    models: list[ModelReward] = []
    functions: list[FunctionReward] = []
    if settings.reward_model is not None:
        model = _load_model("reward_model", settings.reward_model, 1.0, "ppo.reward_model", ours, settings)
        if model.tokenizer is not None:
            theirs = hand_over(model.tokenizer, model.scalar.classifier)
            try:
                check_hand_over(ours, theirs, "ppo.model", "ppo.reward_model")
            except SettingsError as error:
                raise SettingsError(f"{error}; or list it under ppo.rewards, where models are given text") from None
        models.append(model)
    for number, spec in enumerate(settings.rewards):
        taken = [*(model.name for model in models), *(function.name for function in functions)]
        if spec.model is not None:
            name, where = _new_name(spec.model, taken), f"ppo.rewards.{number}.model"
            models.append(_load_model(name, spec.model, spec.weight, where, ours, settings))
        elif spec.function is not None:
            load_function(spec.function)  # refused now where it cannot be imported
            functions.append(FunctionReward(_new_name(spec.function, taken), spec.function, spec.weight))
    if settings.ensemble and len(models) < 2:
        raise SettingsError(
            f"ppo.ensemble: {settings.ensemble} needs several reward models, there is {len(models)}; "
            "list more under ppo.rewards, or leave it out"
        )
    return Rewards(models, functions, settings.ensemble, settings.ensemble_penalty, settings.microbatch_size)


def _load_model(
    name: str, reference: str, weight: float, where: str, ours: dict[str, Any], settings: PPOSettings
) -> ModelReward:
    """A reward model with its own tokenizer, or without where it agrees with the policy's (`ours`)."""
    try:
        tokenizer = load_tokenizer(reference)
        scalar = load_scalar(reference, tokenizer)
    except RefusedError as error:
        raise SettingsError(f"{where}: {error}") from error
    if hand_over(tokenizer, scalar.classifier) != ours:
        return ModelReward(name, scalar, weight, tokenizer, reference)
    longest = settings.max_prompt_length + settings.max_new_tokens
    check_positions(f"{where}: ppo.max_prompt_length + ppo.max_new_tokens", longest, scalar.classifier)
    return ModelReward(name, scalar, weight, None, reference)


def response_texts(tokenizer: PreTrainedTokenizerBase, responses: Tensor, mask: Tensor) -> list[str]:
    """Text of each response [B,R] up to its stop token, as reward functions, judges and people see it."""
    kept = [row[counts].tolist() for row, counts in zip(responses, mask, strict=True)]
    return [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]


def _new_name(reference: str, taken: list[str]) -> str:
    """A short name for the log: the function's, the hub model's, or that of the folder around `model`."""
    path = Path(reference.rpartition(":")[2])
    name = path.parent.name if path.name == "model" else path.name
    if name not in taken:
        return name
    return next(f"{name}_{number}" for number in count(2) if f"{name}_{number}" not in taken)


def _numbers(returned: Any) -> list[Any]:
    """A list, from a list, a numpy array or a tensor."""
    return list(returned.tolist() if hasattr(returned, "tolist") else returned)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and abs(float(value)) <= torch.finfo(torch.float32).max  # False for NaN


def _guilty_row(function: Callable[..., Any], prompts: list[str], responses: list[str], episodes: Episodes) -> str:
    """The first row for which the function fails alone; the first of all if it only fails for them together."""
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        try:
            if len(_numbers(function([prompt], [response]))) == 1:
                continue
        except Exception:
            pass
        return episodes.row(row)
    return f"no single row fails alone; the first is {episodes.row(0)}"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "…")
