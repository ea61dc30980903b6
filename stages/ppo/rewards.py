"""What PPO maximises: one score per response from reward models and Python functions, mixed by weight."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.errors import DataError, SettingsError, named_error, told_as
from rlhf.data.rows import Prompt, prompt_text
from rlhf.data.sources import load_function, takes_rows
from rlhf.data.tokens import answer_texts, encode_prompt
from rlhf.stages.models import ScalarModel, check_hand_over, hand_over
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.reward_models import Episodes, ModelReward, PairReward, load_reward_model


@dataclass
class FunctionReward:
    """A `module:function` (prompts, responses) or (prompts, responses, rows) -> one number per response.

    Raises DataError where it cannot be imported or takes something else.
    """

    name: str
    function: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.takes_rows = takes_rows(self.function)

    def __call__(self, episodes: Episodes) -> Tensor:
        """Scores [B], on the CPU."""
        num = len(episodes.responses)
        try:
            values = self._ask(episodes, range(num))
        except ValueError as error:
            raise ValueError(f"reward {self.function}: {error} ({self._guilty_row(episodes)})") from error
        if len(values) != num:
            where = self._guilty_row(episodes)
            returned = f"{len(values)} number{'s' * (len(values) != 1)}"
            raise ValueError(f"reward {self.function}: returned {returned} for {num} responses ({where})")
        if bad := [row for row, value in enumerate(values) if not _is_number(value)]:
            raise ValueError(
                f"reward {self.function}: gave {values[bad[0]]!r}, not a finite number ({episodes.row(bad[0])})"
                f"{_and_others(len(bad), num)}"
            )
        return torch.tensor([float(value) for value in values], dtype=torch.float32)

    @told_as(lambda error: ValueError(f"raised {named_error(error)}"))
    def _ask(self, episodes: Episodes, places: range) -> list[Any]:
        """What the function returns for these rows. It is given copies: what it does to them is lost.

        Raises ValueError with what the function raised.
        """
        prompts = [episodes.prompts[place] for place in places]
        given: list[Any] = [[prompt_text(prompt.messages) for prompt in prompts]]
        given.append([episodes.responses[place] for place in places])
        if self.takes_rows:
            given.append([deepcopy(prompt.row) for prompt in prompts])  # microseconds each
        return _numbers(load_function(self.function)(*given))

    def _guilty_row(self, episodes: Episodes) -> str:
        """The first row for which the function fails alone; the first of all if it only fails for them together."""
        for row in range(len(episodes.responses)):
            with suppress(ValueError):
                if len(self._ask(episodes, range(row, row + 1))) == 1:
                    continue
            return episodes.row(row)
        return f"no single row fails alone; the first is {episodes.row(0)}"


class Rewards(nn.Module):
    """All rewards of a run, mixed: Σ weight · score.

    With an `ensemble` the weighted scores s of the models count as one: their mean, or the lower confidence bound
    mean(s) − penalty · std(s) (std over the members, biased), under which the policy gains nothing where the models
    disagree (as in Coste et al. 2023, who subtract the variance). Functions are added to it.
    """

    def __init__(
        self,
        models: Sequence[ModelReward | PairReward],
        functions: Sequence[FunctionReward] = (),
        ensemble: Literal["mean", "lower_bound"] | None = None,
        ensemble_penalty: float = 1.0,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.functions = list(functions)
        self.names = [*(model.name for model in models), *(function.name for function in functions)]
        self.ensemble, self.ensemble_penalty = ensemble, ensemble_penalty
        self.requires_grad_(False).eval()

    @property
    def critic_start(self) -> str | None:
        """The first model that reads the policy's ids, from which a critic can start; None if there is none."""
        return next((model.reference for model in self._members() if model.tokenizer is None), None)

    @torch.no_grad()
    def forward(
        self, episodes: Episodes, microbatch_size: int | None = None, of_models: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(scores [B], unweighted score of each reward [B,N] in the order of `names`), both float32.

        `of_models` are the models' scores where they have been asked already. Raises ValueError naming reward and row
        where a reward fails or gives something that is no finite number.
        """
        device = episodes.mask.device
        columns = list(self.of_models(episodes, microbatch_size) if of_models is None else of_models)
        columns += [function(episodes).to(device) for function in self.functions]
        parts = torch.stack(columns, dim=-1)
        weights = [*(model.weight for model in self._members()), *(function.weight for function in self.functions)]
        return self._mix(parts * parts.new_tensor(weights)), parts

    @torch.no_grad()
    def of_models(self, episodes: Episodes, microbatch_size: int | None = None) -> list[Tensor]:
        """Unweighted scores [B] of each model."""
        columns = []
        for model in self._members():
            scores = model(episodes, microbatch_size)
            if len(bad := (~scores.isfinite()).nonzero()):
                row = int(bad[0])
                raise ValueError(
                    f"reward {model.name}: gave {scores[row].item()} ({episodes.row(row)})"
                    f"{_and_others(len(bad), len(scores))}"
                )
            columns.append(scores)
        return columns

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Refuse, before training, prompts that the chat template of a reward model cannot write."""
        writers = [model for model in self._members() if isinstance(model, ModelReward) and model.tokenizer is not None]
        for prompt in prompts if writers else ():
            for model in writers:
                try:
                    encode_prompt(model.tokenizer, prompt.messages)
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

    def _members(self) -> Iterator[ModelReward | PairReward]:
        for model in self.models:
            assert isinstance(model, ModelReward | PairReward)
            yield model


def load_rewards(
    settings: PPOSettings,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel,
    reward_model: ScalarModel | None = None,
) -> Rewards:
    """The rewards that the settings name, on the CPU. A decoder as `reward_model` must read text as the
    policy does; it is given where it has been loaded already.

    Raises RefusedError for what is not there or cannot be used.
    """
    ours = hand_over(tokenizer, policy)
    models: list[ModelReward | PairReward] = []
    functions: list[FunctionReward] = []
    if reward_model is not None:
        models.append(ModelReward("reward_model", reward_model, reference=settings.reward_model or ""))
    elif settings.reward_model is not None:
        model = load_reward_model("reward_model", settings.reward_model, 1.0, "ppo.reward_model", ours, settings)
        if isinstance(model, ModelReward) and model.tokenizer is not None:
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
            models.append(load_reward_model(name, spec.model, spec.weight, where, ours, settings))
        elif spec.function is not None:
            functions.append(FunctionReward(_new_name(spec.function, taken), spec.function, spec.weight))
    if settings.ensemble and len(models) < 2:
        raise SettingsError(
            f"ppo.ensemble: {settings.ensemble} needs several reward models, there is {len(models)}; "
            "list more under ppo.rewards, or leave it out"
        )
    return Rewards(models, functions, settings.ensemble, settings.ensemble_penalty)


def episodes_of(
    input_ids: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    prompts: Sequence[Prompt],
    stops: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
) -> Episodes:
    """What rewards are told of prompts and responses as they were sampled: ids and attention mask [B,T], mask [B,R].

    Reward models learned that answers end with eos, also where this policy ends them with another of `stops`.
    """
    prompt_ids, responses = input_ids.split([input_ids.shape[1] - mask.shape[1], mask.shape[1]], dim=1)
    stopped = mask & torch.isin(responses, torch.tensor(stops, device=mask.device))  # [B,R]
    scored_ids = torch.cat([prompt_ids, responses.masked_fill(stopped, tokenizer.eos_token_id)], dim=1)
    texts = response_texts(tokenizer, responses, mask, stops)
    return Episodes(scored_ids, attention_mask, mask, stopped.any(-1), prompts, texts, max_tokens)


def response_texts(tokenizer: PreTrainedTokenizerBase, responses: Tensor, mask: Tensor, stops: list[int]) -> list[str]:
    """Text of each response [B,R] up to its stop token, as reward functions, judges and people see it."""
    responses, mask = responses.cpu(), mask.cpu()  # a GPU is waited for once, not for each row
    kept = (row[counts].tolist() for row, counts in zip(responses, mask, strict=True))
    return answer_texts(tokenizer, kept, stops)


def _new_name(reference: str, taken: list[str]) -> str:
    """A short name for the log: the function's, the hub model's, or that of the folder around `model`."""
    path = Path(reference.rpartition(":")[2])
    name = path.parent.name if path.name == "model" else path.name
    if name not in taken:
        return name
    return next(f"{name}_{number}" for number in count(2) if f"{name}_{number}" not in taken)


def _and_others(bad: int, num: int) -> str:
    """How many are like the one that is shown."""
    return f"; so are {bad - 1} more of {num}" if bad > 1 else ""


def _numbers(returned: Any) -> list[Any]:
    """A list, from a list, a numpy array or a tensor. Raises TypeError where it is unknown which number is whose."""
    if isinstance(returned, str | bytes | Mapping | Set):
        raise TypeError(f"returned a {type(returned).__name__}, not a list of one number for each response")
    return list(returned.tolist() if hasattr(returned, "tolist") else returned)


def _is_number(value: Any) -> bool:
    most = torch.finfo(torch.float32).max  # an int may be larger than any float
    return isinstance(value, Real) and bool(abs(value) <= most)  # type: ignore[operator]  # False for NaN
