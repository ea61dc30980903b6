"""Scores come from reward models by ids or by text, from functions, and from mixes; what fails names reward and row."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stages_world import tiny_policy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.data.collate import pad_left, pad_right
from rlhf.data.errors import DataError, SettingsError
from rlhf.data.rows import Prompt
from rlhf.data.tokens import encode_prompt, encode_response, ensure_chat_template, ensure_pad
from rlhf.stages.artifact import Identity, identify
from rlhf.stages.models import load_scalar, save_folder
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.reward_models import Episodes, ModelReward
from rlhf.stages.ppo.rewards import FunctionReward, Rewards, load_rewards, response_texts

ROWS: list[dict[str, Any]] = [
    {"prompt": "Sum 2 + 3", "answer": "5", "tests": ["5"]},
    {"prompt": "Hi", "answer": "Hello!", "tests": []},
    {"prompt": "Why?", "answer": "Because", "tests": []},
]
PROMPTS = [Prompt([{"role": "user", "content": row["prompt"]}], row) for row in ROWS]
RESPONSES = ["It is 5.", "Hello!", "Because"]
ENDED = [True, True, False]


def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def no_h(prompts: list[str], responses: list[str]) -> list[float]:
    return [1 / (not response.startswith("H")) for response in responses]


def nan_for_hello(prompts: list[str], responses: list[str]) -> list[float]:
    return [float("nan") if response == "Hello!" else 1.0 for response in responses]


def endless_for_hello(prompts: list[str], responses: list[str]) -> list[float]:
    return [1e39 if response == "Hello!" else 1.0 for response in responses]  # too large for float32


def too_long_for_hello(prompts: list[str], responses: list[str]) -> list[int]:
    return [10**400 if response == "Hello!" else 1 for response in responses]


def by_response(prompts: list[str], responses: list[str]) -> dict[str, float]:
    return dict.fromkeys(responses, 1.0)


def texts(prompts: list[str], responses: list[str]) -> list[str]:
    return ["1.0" for _ in responses]


def forgets_hello(prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0 for response in responses if response != "Hello!"]


def one_for_all(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [1.0]


def one_too_many(prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0] * (len(responses) + (len(responses) > 1))


def array(prompts: list[str], responses: list[str]) -> Any:
    return torch.arange(len(responses)).numpy()


def right_answer(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [float(row["answer"] == response) for response, row in zip(responses, rows, strict=True)]


def spoils_rows(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[int]:
    found = [len(row["tests"]) + len(row) for row in rows]
    for row in rows:
        row["tests"].append("more")
        row["more"] = row.pop("answer")
        row["mine"] = True
    return found


def leaves_at_hello(prompts: list[str], responses: list[str]) -> list[float]:
    if "Hello!" in responses:
        raise SystemExit(0)
    return [0.0] * len(responses)


def no_answer_for_hello(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [1 / (row["answer"] != "Hello!") for row in rows]


def optional_rows(prompts: list[str], responses: list[str], rows: Any = None) -> list[float]:
    return [float(rows is not None)] * len(responses)


def other_option(prompts: list[str], responses: list[str], scale: float = 2.0) -> list[float]:
    return [scale] * len(responses)


def any_number(*columns: list[Any]) -> list[float]:
    return [float(len(columns))] * len(columns[0])


def one(prompts: list[str]) -> list[float]:
    return [0.0] * len(prompts)


def four(prompts: list[str], responses: list[str], rows: Any, more: Any) -> list[float]:
    return [0.0] * len(prompts)


def by_name(prompts: list[str], responses: list[str], *, rows: Any) -> list[float]:
    return [0.0] * len(prompts)


@pytest.fixture
def episodes(tokenizer: Any) -> Episodes:
    """Three rows as a rollout holds them: prompts left-padded, responses right-padded, the last one cut off."""
    return as_episodes(tokenizer, PROMPTS, RESPONSES, ENDED)


def as_episodes(tokenizer: Any, prompts: list[Prompt], responses: list[str], ended: list[bool]) -> Episodes:
    prompt_ids = [encode_prompt(tokenizer, prompt.messages) for prompt in prompts]
    response_ids = [
        encode_response(tokenizer, prompt.messages, text) for prompt, text in zip(prompts, responses, strict=True)
    ]
    cut = [ids if done else ids[:-1] for ids, done in zip(response_ids, ended, strict=True)]
    left, left_mask = pad_left(prompt_ids, tokenizer.pad_token_id)
    right, mask = pad_right(cut, tokenizer.pad_token_id)
    return Episodes(
        torch.cat([left, right], 1), torch.cat([left_mask, mask], 1), mask, torch.tensor(ended), prompts, responses
    )


@pytest.fixture
def scalar(policy_folder: Path, tokenizer: Any) -> Any:
    torch.manual_seed(1)
    return load_scalar(str(policy_folder), tokenizer, new_head=True)


def fixed(scalar: Any, monkeypatch: pytest.MonkeyPatch, *columns: list[float], weight: float = 1.0) -> list[Any]:
    """Reward models with these scores."""
    made = [ModelReward(f"model{n}", scalar, weight) for n in range(len(columns))]
    for model, scores in zip(made, columns, strict=True):
        monkeypatch.setattr(model, "forward", lambda *_, scores=scores: torch.tensor(scores))
    return made


def named(function: Callable[..., Any], weight: float = 1.0) -> FunctionReward:
    return FunctionReward(function.__name__, f"{__name__}:{function.__name__}", weight)


def other_tokenizer() -> Any:
    """One token per byte as well, but other ids, a pad token of its own, and the plain template."""
    specials = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    bpe = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*alphabet, *specials])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ensure_pad(tokenizer)
    ensure_chat_template(tokenizer)
    return tokenizer


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_policys_own_tokenizer_gives_the_same_scores_by_ids_and_by_text(
    scalar: Any, tokenizer: Any, episodes: Episodes, pooling: str
) -> None:
    scalar.pooling = pooling
    by_ids, _ = Rewards([ModelReward("ids", scalar)])(episodes)
    by_text, _ = Rewards([ModelReward("text", scalar, tokenizer=tokenizer)])(episodes)
    assert by_ids.dtype == torch.float32
    assert by_ids.std() > 0.01
    torch.testing.assert_close(by_ids, by_text, rtol=1e-5, atol=1e-5)


def test_another_tokenizer_is_given_its_own_ids_with_its_own_template_and_pad(scalar: Any, episodes: Episodes) -> None:
    own = other_tokenizer()
    rewards = Rewards([ModelReward("other", scalar, tokenizer=own)])
    seen: list[torch.Tensor] = []
    scalar.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    scores, _ = rewards(episodes)
    ids, mask = seen
    written = ["".join(own.convert_ids_to_tokens(row[kept])) for row, kept in zip(ids, mask, strict=True)]
    places = [written.index(text) for text in (
        "<s>User:ĠSumĠ2Ġ+Ġ3ĊAssistant:ĠItĠisĠ5.</s>", "<s>User:ĠHiĊAssistant:ĠHello!</s>",
        "<s>User:ĠWhy?ĊAssistant:ĠBecause",  # cut off by the policy, so no eos here either
    )]  # fmt: skip
    assert (ids[~mask] == own.pad_token_id).all()
    ends = mask.sum(-1) - 1
    with torch.no_grad():
        assert torch.equal(scores, scalar(ids, mask)[torch.arange(3), ends][places])


@pytest.mark.parametrize("by_text", [False, True])
def test_a_score_depends_neither_on_batch_mates_nor_on_padding_nor_on_the_microbatch(
    scalar: Any, tokenizer: Any, episodes: Episodes, by_text: bool
) -> None:
    model = ModelReward("model", scalar, tokenizer=tokenizer if by_text else None)
    scores, _ = Rewards([model])(episodes)
    by_two, _ = Rewards([model])(episodes, 2)
    alone = [
        Rewards([model])(as_episodes(tokenizer, [prompt], [response], [ended]))[0]
        for prompt, response, ended in zip(PROMPTS, RESPONSES, ENDED, strict=True)
    ]
    torch.testing.assert_close(torch.cat(alone), scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_two, scores, rtol=1e-5, atol=1e-5)


def test_reward_models_are_frozen_and_without_dropout(scalar: Any) -> None:
    rewards = Rewards([ModelReward("model", scalar.train())])
    assert not any(parameter.requires_grad for parameter in rewards.parameters())
    assert not any(module.training for module in rewards.modules())


def test_a_mix_is_the_weighted_sum_and_the_parts_are_told_unweighted(
    scalar: Any, episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fixed(scalar, monkeypatch, [1.0, 2.0, 3.0], weight=2.0)
    rewards = Rewards(model, [named(lengths, -0.5), named(array)])
    scores, parts = rewards(episodes)
    assert rewards.names == ["model0", "lengths", "array"]
    assert parts.tolist() == [[1.0, 8.0, 0.0], [2.0, 6.0, 1.0], [3.0, 7.0, 2.0]]
    assert scores.tolist() == [2 - 4 + 0, 4 - 3 + 1, 6 - 3.5 + 2]


def test_functions_alone_are_enough_and_leave_the_critic_without_a_start(episodes: Episodes) -> None:
    rewards = Rewards([], [named(lengths)])
    assert rewards(episodes)[0].tolist() == [8.0, 6.0, 7.0]
    assert rewards.critic_start is None


def test_a_function_of_three_sees_its_own_row_beside_each_response(tokenizer: Any, episodes: Episodes) -> None:
    rewards = Rewards([], [named(lengths), named(right_answer)])
    assert rewards(episodes)[1].tolist() == [[8.0, 0.0], [6.0, 1.0], [7.0, 1.0]]
    twice = as_episodes(tokenizer, [PROMPTS[0], PROMPTS[0], PROMPTS[1]], ["5", "6", "Hello!"], ENDED)
    assert rewards(twice)[1][:, 1].tolist() == [1.0, 0.0, 1.0]  # two samples of one prompt


def test_a_function_that_changes_rows_disturbs_neither_other_samples_nor_later_calls(
    tokenizer: Any, episodes: Episodes
) -> None:
    before = copy.deepcopy(ROWS)
    rewards = Rewards([], [named(spoils_rows), named(right_answer)])
    twice = as_episodes(tokenizer, [PROMPTS[0], PROMPTS[0], PROMPTS[1]], ["5", "5", "no"], ENDED)
    for _ in range(2):
        assert rewards(twice)[1].tolist() == [[4.0, 1.0], [4.0, 1.0], [3.0, 0.0]]
    assert before == ROWS


@pytest.mark.parametrize(
    ("function", "value"),
    [(optional_rows, 1.0), (other_option, 2.0), (any_number, 2.0)],
)
def test_rows_go_to_a_third_parameter_that_is_required_or_called_rows(
    episodes: Episodes, function: Callable[..., Any], value: float
) -> None:
    assert Rewards([], [named(function)])(episodes)[0].tolist() == [value] * 3


@pytest.mark.parametrize("function", [one, four, by_name])
def test_a_function_of_other_parameters_is_refused_before_training(
    tokenizer: Any, function: Callable[..., Any]
) -> None:
    message = rf"{function.__name__}: takes \(prompts.* takes \(prompts, responses\) or \(prompts, responses, rows\)"
    with pytest.raises(DataError, match=message):
        load_rewards(settings(rewards=[{"function": f"{__name__}:{function.__name__}"}]), tokenizer, tiny_policy())


def test_the_critic_starts_from_the_first_model_that_reads_the_policys_ids(scalar: Any, tokenizer: Any) -> None:
    text = ModelReward("text", scalar, tokenizer=tokenizer, reference="a")
    assert Rewards([text, ModelReward("ids", scalar, reference="b")]).critic_start == "b"
    assert Rewards([text]).critic_start is None


@pytest.mark.parametrize(
    ("ensemble", "penalty", "expected"),
    # Members 1, 2, 6: mean 3, variance ((-2)² + (-1)² + 3²) / 3 = 14 / 3. Members 4, 4, 4 agree. Plus the length.
    [
        (None, 1.0, [9 + 8, 12 + 6, -3 + 7]),
        ("mean", 1.0, [3 + 8, 4 + 6, -1 + 7]),
        ("lower_bound", 0.0, [3 + 8, 4 + 6, -1 + 7]),
        ("lower_bound", 2.0, [3 - 2 * (14 / 3) ** 0.5 + 8, 4 + 6, -1 - 2 * (2 / 3) ** 0.5 + 7]),
    ],
)
def test_an_ensemble_of_models_counts_as_one_and_functions_are_added_to_it(
    scalar: Any, episodes: Episodes, monkeypatch: pytest.MonkeyPatch, ensemble: Any, penalty: float, expected: list[Any]
) -> None:
    members = fixed(scalar, monkeypatch, [1.0, 4.0, 0.0], [2.0, 4.0, -1.0], [6.0, 4.0, -2.0])
    scores, parts = Rewards(members, [named(lengths)], ensemble, penalty)(episodes)
    assert parts.shape == (3, 4)
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


HELLO = r"row 2 of 3: prompt 'Hi', response 'Hello!'"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_h, rf"test_ppo_rewards:no_h: raised ZeroDivisionError: division by zero \({HELLO}\)"),
        (nan_for_hello, rf"test_ppo_rewards:nan_for_hello: gave nan, not a finite number \({HELLO}\)"),
        (endless_for_hello, rf"gave 1e\+39, not a finite number \({HELLO}\)"),
        (too_long_for_hello, rf"gave 10+, not a finite number \({HELLO}\)"),
        (
            by_response,
            r"by_response: raised TypeError: returned a dict, not a list of one number for each re.* \(row 1",
        ),
        (texts, r"gave '1\.0', not a finite number \(row 1 of 3: prompt 'Sum 2 \+ 3', response 'It is 5\.'\)"),
        (forgets_hello, rf"forgets_hello: returned 2 numbers for 3 responses \({HELLO}\)"),
        (no_answer_for_hello, rf"no_answer_for_hello: raised ZeroDivisionError: .* \({HELLO}\)"),
        (leaves_at_hello, rf"leaves_at_hello: raised SystemExit: 0 \({HELLO}\)"),
        (one_for_all, r"one_for_all: returned 1 number for 3 responses"),
        (one_too_many, r"returned 4 numbers for 3 responses \(no single row fails alone; the first is row 1 of 3"),
    ],
)
def test_a_function_that_fails_is_named_with_the_row(
    episodes: Episodes, function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Rewards([], [named(lengths), named(function)])(episodes)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_whose_score_is_no_number_is_named_with_the_row(
    scalar: Any, episodes: Episodes, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    members = fixed(scalar, monkeypatch, [1.0, 1.0, 1.0], [1.0, value, 1.0])
    with pytest.raises(ValueError, match=rf"reward model1: gave {value} \({HELLO}\)"):
        Rewards(members)(episodes)


def test_long_texts_are_shortened_in_errors(tokenizer: Any) -> None:
    long = as_episodes(tokenizer, [Prompt([{"role": "user", "content": "p" * 500}], {})], ["H" * 500], [True])
    with pytest.raises(ValueError, match="no_h: raised") as caught:
        Rewards([], [named(no_h)])(long)
    assert len(str(caught.value)) < 400


def test_a_response_too_long_for_the_reward_model_is_named_and_a_long_prompt_is_cut(
    scalar: Any, tokenizer: Any, episodes: Episodes
) -> None:
    model = ModelReward("small", scalar, tokenizer=tokenizer)
    model.max_length = 10  # 'It is 5.' and its eos take 9
    assert Rewards([model])(episodes)[0].isfinite().all()
    model.max_length = 9
    with pytest.raises(ValueError, match=r"reward small: the response does not fit .* 9 positions \(row 1 of 3.*lower"):
        Rewards([model])(episodes)


def test_prompts_that_a_reward_models_template_refuses_are_found_before_training(scalar: Any, tokenizer: Any) -> None:
    other = Prompt([{"role": "critic", "content": "5"}], {})
    Rewards([ModelReward("ids", scalar)]).check_prompts([other])  # never writes text
    with pytest.raises(DataError, match=r"reward text \(folder\): the chat template refuses .*critic: 5"):
        Rewards([ModelReward("text", scalar, 1.0, tokenizer, "folder")]).check_prompts([*PROMPTS, other])


def test_the_text_of_a_response_ends_at_its_stop_token(tokenizer: Any, episodes: Episodes) -> None:
    responses = episodes.scored_ids[:, -episodes.mask.shape[1] :].clone()
    responses[~episodes.mask] = 99  # junk after the end
    assert response_texts(tokenizer, responses, episodes.mask, [tokenizer.eos_token_id]) == RESPONSES


# -- loading ----------------------------------------------------------------------------------------------


def settings(**fields: Any) -> PPOSettings:
    sizes = {"max_prompt_length": 32, "max_new_tokens": 16}
    return PPOSettings.load({"data": "unused.jsonl", **sizes, **fields}, "ppo")


def saved(folder: Path, scalar: Any, tokenizer: Any) -> str:
    save_folder(folder / "model", scalar, tokenizer)
    return str(folder / "model")


def test_a_listed_model_reads_ids_where_it_agrees_with_the_policy_and_text_where_not(
    scalar: Any, tokenizer: Any, episodes: Episodes, tmp_path: Path
) -> None:
    ours, theirs = saved(tmp_path / "ours", scalar, tokenizer), saved(tmp_path / "theirs", scalar, other_tokenizer())
    listed = [{"model": theirs}, {"function": f"{__name__}:lengths", "weight": 0.5}, {"model": ours}, {"model": ours}]
    rewards = load_rewards(settings(rewards=listed), tokenizer, tiny_policy())
    assert rewards.names == ["theirs", "ours", "ours_2", "lengths"]
    assert [model.tokenizer is None for model in rewards.models] == [False, True, True]
    assert rewards.critic_start == ours
    scores, parts = rewards(episodes)
    assert parts[:, 3].tolist() == [8.0, 6.0, 7.0]
    torch.testing.assert_close(scores, parts[:, :3].sum(-1) + parts[:, 3] / 2)
    assert parts[:, 1].tolist() != parts[:, 0].tolist()


def test_the_reward_model_comes_first_with_weight_one_and_must_read_as_the_policy_does(
    scalar: Any, tokenizer: Any, episodes: Episodes, tmp_path: Path
) -> None:
    ours, theirs = saved(tmp_path / "ours", scalar, tokenizer), saved(tmp_path / "theirs", scalar, other_tokenizer())
    rewards = load_rewards(settings(reward_model=ours), tokenizer, tiny_policy())
    assert rewards.names == ["reward_model"]
    torch.testing.assert_close(rewards(episodes)[0], Rewards([ModelReward("it", scalar)])(episodes)[0])
    with pytest.raises(SettingsError, match=r"ppo\.model and ppo\.reward_model differ in .*list it under ppo\.rewards"):
        load_rewards(settings(reward_model=theirs), tokenizer, tiny_policy())


def test_what_cannot_be_loaded_is_refused_with_its_place_in_the_list(
    scalar: Any, tokenizer: Any, policy_folder: Path, tmp_path: Path
) -> None:
    headless = {"model": str(policy_folder)}
    with pytest.raises(SettingsError, match=r"ppo\.rewards\.1\.model: .*lacks the weights"):
        load_rewards(settings(rewards=[{"function": f"{__name__}:lengths"}, headless]), tokenizer, tiny_policy())
    with pytest.raises(DataError, match=r"nowhere:lengths: No module named 'nowhere'"):
        load_rewards(settings(rewards=[{"function": "nowhere:lengths"}]), tokenizer, tiny_policy())
    ours = saved(tmp_path / "ours", scalar, tokenizer)
    with pytest.raises(SettingsError, match=r"ppo\.ensemble: mean needs several reward models, there is 1"):
        load_rewards(settings(reward_model=ours, ensemble="mean"), tokenizer, tiny_policy())
    with pytest.raises(
        SettingsError, match=r"ppo\.rewards\.0\.model: ppo\.max_prompt_length .* is 80, .* 64 positions"
    ):
        load_rewards(settings(rewards=[{"model": ours}], max_new_tokens=48), tokenizer, tiny_policy())


@pytest.mark.parametrize("spec", [{}, {"model": "a", "function": "b:c"}])
def test_a_reward_is_either_a_model_or_a_function(spec: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"ppo\.rewards\.0: a reward is either a model or a function"):
        settings(rewards=[spec])


def test_models_and_functions_of_the_list_take_part_in_the_key_by_content_and_weight(
    scalar: Any, tokenizer: Any, policy_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    one, same = saved(tmp_path / "one", scalar, tokenizer), saved(tmp_path / "same", scalar, tokenizer)
    with torch.no_grad():
        scalar.classifier.score.weight += 1
    other = saved(tmp_path / "other", scalar, tokenizer)

    def identity(*rewards: dict[str, Any], **fields: Any) -> Identity:
        where = {"data": str(tmp_path / "prompts.jsonl"), "model": str(policy_folder)}
        return identify(settings(**where, rewards=list(rewards), **fields))

    length = {"function": f"{__name__}:lengths"}
    base = identity({"model": one}, length)
    assert set(base.inputs) == {"model", "rewards.0"}  # no reward_model is needed
    assert set(base.data) == {"data", "rewards.1"}
    assert identity({"model": same}, length).key == base.key
    changed = [
        identity({"model": other}, length),
        identity({"model": one}, length | {"weight": 2}),
        identity(length, {"model": one}),
        identity({"model": one}, length, reward_model=one),
        identity({"model": one}, {"function": "rlhf.recipes.demo_world:judge"}),
    ]
    assert len({base.key, *(identity.key for identity in changed)}) == 6
    with pytest.raises(SettingsError, match=r"ppo\.rewards\.0: no folder '\./gone'"):
        identity({"model": "./gone"})
    with pytest.raises(SettingsError, match=r"ppo\.reward_model: not set"):
        identity()
