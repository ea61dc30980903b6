"""Encoders score a prompt and a response as a pair of texts, by their own forward, and never see the policy's ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import model_folders, run_ppo, tiny_scalar
from stages_world import tiny_policy
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from rlhf.data.errors import SettingsError
from rlhf.data.rows import Prompt
from rlhf.stages.models import save_folder
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.reward_models import Episodes, ModelReward, PairReward
from rlhf.stages.ppo.rewards import Rewards, load_rewards

PAD, CLS, SEP = 0, 1, 2
PAIRS = [("Sum 2 + 3", "It is 5."), ("Hi", "Hello there!"), ("Why?", "")]
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": PAD, "num_labels": 1, "initializer_range": 0.5,
}  # fmt: skip


def byte_pairs() -> Any:
    """One token per byte, [CLS] prompt [SEP] response [SEP]; the second text is of type 1."""
    specials = ["[PAD]", "[CLS]", "[SEP]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*specials, *alphabet])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    bpe.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    return tokenizer


def letters(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.convert_tokens_to_ids([char.replace(" ", "Ġ") for char in text])
    assert None not in ids
    return ids


def bert(**fields: Any) -> Any:
    torch.manual_seed(3)
    return BertForSequenceClassification(BertConfig(**{**SIZES, **fields})).eval()


def episodes(pairs: list[tuple[str, str]]) -> Episodes:
    """As a rollout hands them over; ids and masks are not for encoders."""
    nothing = torch.zeros(len(pairs), 2, dtype=torch.bool)
    prompts = [Prompt([{"role": "user", "content": prompt}], {}) for prompt, _ in pairs]
    return Episodes(
        torch.full((len(pairs), 4), 10**6), nothing, nothing, nothing[:, 0], prompts, [text for _, text in pairs]
    )


def by_hand(classifier: Any, prompt: list[int], response: list[int]) -> float:
    ids = [CLS, *prompt, SEP, *response, SEP]
    types = [0] * (len(prompt) + 2) + [1] * (len(response) + 1)
    with torch.no_grad():
        return float(classifier(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits)


def test_an_encoder_scores_the_pair_as_its_own_forward_does() -> None:
    tokenizer, classifier = byte_pairs(), bert()
    scores, _ = Rewards([PairReward("bert", classifier, tokenizer)])(episodes(PAIRS))
    expected = [by_hand(classifier, letters(tokenizer, p), letters(tokenizer, r)) for p, r in PAIRS]
    assert scores.dtype == torch.float32
    assert scores.std() > 0.01
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_of_a_conversation_an_encoder_reads_every_turn() -> None:
    tokenizer, classifier = byte_pairs(), bert()
    given = episodes([("unread", "Yes")])
    given.prompts = [Prompt([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], {})]
    scores, _ = Rewards([PairReward("bert", classifier, tokenizer)])(given)
    prompt = [letters(tokenizer, "system: S"), tokenizer.convert_tokens_to_ids(["Ċ"]), letters(tokenizer, "user: Q")]
    assert scores.item() == pytest.approx(
        by_hand(classifier, [*prompt[0], *prompt[1], *prompt[2]], letters(tokenizer, "Yes")), abs=1e-5
    )


def test_a_separator_that_a_response_spells_out_stays_text() -> None:
    tokenizer, classifier = byte_pairs(), bert()
    scores, _ = Rewards([PairReward("bert", classifier, tokenizer)])(episodes([("Hi", "a[SEP]b")]))
    expected = by_hand(classifier, letters(tokenizer, "Hi"), letters(tokenizer, "a[SEP]b"))
    assert scores.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BertConfig, BertForSequenceClassification),
        (RobertaConfig, RobertaForSequenceClassification),
        (DebertaV2Config, DebertaV2ForSequenceClassification),
        (ModernBertConfig, ModernBertForSequenceClassification),
    ],
)
def test_a_pairs_score_depends_neither_on_batch_mates_nor_on_padding(
    config: Any, kind: Any, tmp_path: Path, tokenizer: Any
) -> None:
    torch.manual_seed(3)
    classifier, own = kind(config(**SIZES, type_vocab_size=2)), byte_pairs()
    if config is ModernBertConfig:  # knows no token types, and its tokenizers give none
        own.model_input_names = ["input_ids", "attention_mask"]
    listed = [{"model": saved(tmp_path, classifier, own)}]
    rewards = load_rewards(settings(rewards=listed), tokenizer, tiny_policy())
    scores, _ = rewards(episodes(PAIRS))
    assert scores.std() > 1e-4
    alone = [rewards(episodes([pair]))[0].item() for pair in PAIRS]
    assert alone == pytest.approx(scores.tolist(), abs=1e-5)
    torch.testing.assert_close(rewards(episodes(PAIRS), 2)[0], scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decoder", [False, True])
def test_models_that_read_text_keep_to_a_budget_of_tokens(decoder: bool, tokenizer: Any) -> None:
    model = ModelReward("decoder", tiny_scalar(), 1.0, tokenizer) if decoder else PairReward("b", bert(), byte_pairs())
    whole = model(episodes(PAIRS)).detach()
    read: list[tuple[int, ...]] = []
    classifier = model.scalar.classifier if isinstance(model, ModelReward) else model.classifier
    classifier.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape))
    given = episodes(PAIRS)
    given.max_tokens = 50
    torch.testing.assert_close(model(given).detach(), whole, rtol=1e-5, atol=1e-5)
    assert sorted(rows for rows, _ in read) == [1, 2]
    assert all(rows * width <= 50 for rows, width in read)


def test_a_long_prompt_is_cut_from_the_left_and_a_response_never() -> None:
    tokenizer, classifier = byte_pairs(), bert()
    model = PairReward("bert", classifier, tokenizer)
    model.max_length = 10  # three separators, so seven letters
    scores, _ = Rewards([model])(episodes([("abcdef", "123"), ("xy", "1")]))
    expected = [(letters(tokenizer, p), letters(tokenizer, r)) for p, r in (("cdef", "123"), ("xy", "1"))]
    assert scores.tolist() == pytest.approx([by_hand(classifier, *pair) for pair in expected], abs=1e-5)
    one_letter = by_hand(classifier, letters(tokenizer, "f"), letters(tokenizer, "123456"))
    assert Rewards([model])(episodes([("abcdef", "123456")]))[0].item() == pytest.approx(one_letter, abs=1e-5)
    too_long = r"reward bert: the response does not fit .* 10 positions \(row 2 of 2: prompt 'abcdef', .*'1234567'\)"
    with pytest.raises(ValueError, match=too_long + r"; lower ppo\.max_new_tokens"):
        Rewards([model])(episodes([("xy", "1"), ("abcdef", "1234567")]))


def test_the_length_limit_is_that_of_the_positions_or_of_the_tokenizer() -> None:
    tokenizer = byte_pairs()
    assert PairReward("bert", bert(), tokenizer).max_length == 64
    roberta = RobertaForSequenceClassification(RobertaConfig(**{**SIZES, "pad_token_id": 1}))
    assert PairReward("roberta", roberta, tokenizer).max_length == 62  # positions begin at pad id + 1
    tokenizer.model_max_length = 40
    assert PairReward("bert", bert(), tokenizer).max_length == 40


def row_of_prompt(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    assert [row["prompt"] for row in rows] == prompts
    return [row["bonus"] for row in rows]


def test_a_whole_run_scores_with_an_encoder_and_a_function_of_the_rows(tmp_path: Path, tokenizer: Any) -> None:
    given = model_folders(tmp_path, tokenizer)
    for name, texts in (("prompts", "abcdefgh"), ("held_out", "mnop")):
        lines = [json.dumps({"prompt": text, "bonus": 7}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    given["reward_model"] = saved(tmp_path, bert(), byte_pairs())
    rewards = [{"function": f"{__name__}:row_of_prompt", "weight": 0.5}]
    run_ppo(tmp_path / "run", given, rewards=rewards, num_iterations=1, num_samples_per_prompt=2)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["score_row_of_prompt"] == 7
    assert first["score"] == pytest.approx(first["score_reward_model"] + 7 / 2)


# -- loading ----------------------------------------------------------------------------------------------


def settings(**fields: Any) -> PPOSettings:
    sizes = {"max_prompt_length": 32, "max_new_tokens": 16}
    return PPOSettings.load({"data": "unused.jsonl", **sizes, **fields}, "ppo")


def saved(folder: Path, classifier: Any, tokenizer: Any) -> str:
    classifier.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def test_the_critic_does_not_start_from_an_encoder(tmp_path: Path, tokenizer: Any) -> None:
    encoder = saved(tmp_path / "encoder", bert(), byte_pairs())
    save_folder(tmp_path / "decoder" / "model", tiny_scalar(), tokenizer)
    decoder = str(tmp_path / "decoder" / "model")
    both = load_rewards(settings(rewards=[{"model": encoder}, {"model": decoder}]), tokenizer, tiny_policy())
    assert [type(model) for model in both.models] == [PairReward, ModelReward]
    assert both.names == ["encoder", "decoder"]
    assert both.critic_start == decoder
    assert load_rewards(settings(rewards=[{"model": encoder}]), tokenizer, tiny_policy()).critic_start is None


def test_an_encoder_with_the_policys_tokenizer_is_still_given_text(tmp_path: Path, tokenizer: Any) -> None:
    encoder = saved(tmp_path, bert(vocab_size=260), tokenizer)
    rewards = load_rewards(settings(reward_model=encoder), tokenizer, tiny_policy())
    assert rewards.names == ["reward_model"]
    assert rewards.critic_start is None
    assert rewards(episodes(PAIRS))[0].isfinite().all()  # ids of these episodes would be out of range
    rewards.check_prompts(episodes(PAIRS).prompts)


@pytest.mark.parametrize("num_labels", [2, 5])
def test_another_number_of_labels_than_one_is_refused(tmp_path: Path, tokenizer: Any, num_labels: int) -> None:
    encoder = saved(tmp_path, bert(num_labels=num_labels), byte_pairs())
    with pytest.raises(SettingsError, match=rf"ppo\.rewards\.0\.model: .* has {num_labels} labels; .* has one"):
        load_rewards(settings(rewards=[{"model": encoder}]), tokenizer, tiny_policy())


def test_an_encoder_that_cannot_score_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    t5 = T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, num_labels=1)
    headless = saved(tmp_path / "headless", BertModel(BertConfig(**SIZES)), byte_pairs())
    two_parts = saved(tmp_path / "two_parts", T5ForSequenceClassification(t5), byte_pairs())
    padless = byte_pairs()
    padless.pad_token = None
    no_pad = saved(tmp_path / "no_pad", bert(), padless)
    bert().save_pretrained(tmp_path / "no_tokenizer")
    for reference, message in (
        (headless, r"lacks the weights \['classifier\.bias', 'classifier\.weight'\]"),
        (two_parts, "is an encoder-decoder"),
        (no_pad, "has no pad token"),
        (str(tmp_path / "no_tokenizer"), "no tokenizer in"),
    ):
        with pytest.raises(SettingsError, match=rf"ppo\.rewards\.0\.model: .*{message}"):
            load_rewards(settings(rewards=[{"model": reference}]), tokenizer, tiny_policy())
