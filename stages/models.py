"""Loading and saving the models of the stages, and the two ways they are read: log-probabilities and scores.

Axis letters in shapes: B rows, P prompt tokens, R response tokens, T = P + R, V vocabulary.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as partitioner
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.data.errors import RefusedError, SettingsError, first_line
from rlhf.data.hub import refuse_unknown
from rlhf.data.tokens import ensure_chat_template, ensure_pad
from rlhf.stages import decoder as decoder  # registers our own model with transformers' Auto classes
from rlhf.stages.disk import swap_folder
from rlhf.stages.packing import PackedRows, episodes_as_pack, laid_out, pack_of, read_rows
from rlhf.stages.sharding import later
from rlhf.stages.text_limits import stops_of
from rlhf.stages.token_logprobs import token_logprobs

LOGITS_AT_ONCE = 2**27  # numbers: half a GiB of logits is in memory, however long the texts are
SAFELY = {"trust_remote_code": False, "use_safetensors": True}
"""For every `from_pretrained`: a model brings no code of its own here, neither in its folder nor in a pickle."""
WITH_FILES = (
    "put the tokenizer's files beside the model, as its save_pretrained writes them (tokenizer.json and others)"
)
SCORE_KEYS = "rlhf_score"  # name under which the reading rule and the normaliser travel in config.json


def read_tokenizer(reference: str) -> PreTrainedTokenizerBase:
    """The tokenizer as it was saved."""
    refuse_unknown(reference)
    try:
        tokenizer = AutoTokenizer.from_pretrained(reference, trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = why_not_loaded(reference, error).rstrip(" :")  # the line before a list
        cure = "" if "trust_remote_code" in str(error) else f"; {WITH_FILES}"
        raise RefusedError(f"no tokenizer in '{reference}': {why}{cure}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up by transformers where there are no files of one
        raise RefusedError(
            f"no tokenizer in '{reference}': its files are missing, or hold special tokens alone; {WITH_FILES}"
        )
    return tokenizer


def load_tokenizer(reference: str) -> PreTrainedTokenizerBase:
    """Tokenizer with a pad token and a chat template; a foreign one without gets ours, which then travels on."""
    tokenizer = read_tokenizer(reference)
    if not tokenizer.is_fast:
        raise RefusedError(
            f"'{reference}' has a tokenizer without tokenizer.json ({type(tokenizer).__name__}); name one that the "
            "tokenizers library can read"
        )
    ensure_pad(tokenizer)
    ensure_chat_template(tokenizer)
    return tokenizer


def load_policy(
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype = torch.float32,
    spread: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model; nothing may be newly initialised, and every token needs an embedding.

    One that is to be `spread` over processes comes to its `dtype` only then (`sharding.later`). `options` are further
    arguments of `from_pretrained`.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            reference, dtype="auto" if spread else dtype, output_loading_info=True, **SAFELY, **options
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise RefusedError(f"no causal language model in '{reference}': {why_not_loaded(reference, error)}") from error
    if any("ForSequenceClassification" in name for name in model.config.architectures or []):
        raise RefusedError(f"'{reference}' is a reward model, not a language model; name the sft or ppo stage's model")
    if info["missing_keys"]:
        raise RefusedError(f"'{reference}' lacks the weights {sorted(info['missing_keys'])[:3]}; save it again")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise RefusedError(
            f"'{reference}': the tokenizer has {len(tokenizer)} tokens, the model {rows} embeddings; "
            "use the tokenizer that the model was trained with"
        )
    stops = model.generation_config.eos_token_id
    if not all(id is None or type(id) is int for id in (stops if isinstance(stops, list) else [stops])):
        raise RefusedError(
            f"'{reference}': eos_token_id in its generation_config.json is {stops!r}; it needs the id of a token, a "
            "whole number, or a list of them"
        )
    if spread:
        later(model, dtype)
    return model


def why_not_loaded(reference: str, error: Exception) -> str:
    """What an error of loading says first; what would work, where it is code of the model's own that we refuse."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run here; take a model that transformers itself knows"
    folder = Path(reference)
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        return (
            f"its weights are a pickle ({pickled[0]}), which may run code when it is opened; "
            "where you trust it, load it with transformers and save it with save_pretrained, as safetensors"
        )
    return first_line(error)


class ScalarModel(nn.Module):
    """A one-label sequence classifier read our way: one number per token, in float32, normalised.

    The score of a text is the number at its last real token, found by length (transformers' own forward looks
    for the right-most id that is not pad, and misses a final eos when pad = eos), or the mean over the
    response (`pooling="mean"`). A critic is the same model with the numbers read as values.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        if not isinstance(getattr(classifier, "score", None), nn.Linear):
            raise RefusedError(f"{type(classifier).__name__} has no linear head named 'score'; use a decoder model")
        self.classifier = classifier
        self.has_new_head = False
        """Whether the head was made when the model was loaded, and has learned nothing yet."""
        self.packed = False
        """Whether texts are read without their padding, as a model can that `packing.reads_packs`."""
        rule = getattr(classifier.config, SCORE_KEYS, None) or {}
        self.pooling: str = rule.get("pooling", "last")
        self.mean: float = rule.get("mean", 0.0)
        self.std: float = rule.get("std", 1.0)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        with_hidden: bool = False,
        as_pack: PackedRows | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Numbers per token [B,T], from ids [B,T] and attention mask [B,T] (True where a token is).

        With `with_hidden` also the states [B,T,d] that they were read from. `as_pack` are the same texts, where that
        has been made already.
        """
        if self.packed and as_pack is None:
            as_pack = pack_of(input_ids, attention_mask)
        hidden, in_rows = read_rows(self.classifier, input_ids, attention_mask, as_pack)
        values = in_rows((scalars(self.classifier.score, hidden) - self.mean) / self.std)  # [B,T]
        return (values, in_rows(hidden)) if with_hidden else values

    def pool(self, values: Tensor, response_mask: Tensor) -> Tensor:
        """Scores [B] of the responses marked in `response_mask` [B,T] from the numbers per token [B,T]."""
        if self.pooling == "mean":
            kept = torch.where(response_mask, values, 0.0)
            return kept.sum(-1) / response_mask.sum(-1).clamp(min=1)
        positions = torch.arange(values.shape[-1], device=values.device)
        last = torch.where(response_mask, positions, -1).amax(-1).clamp(min=0)
        return values.gather(-1, last[:, None])[:, 0]

    @property
    def rule(self) -> dict[str, Any]:
        """How it is read: what travels in the model's config."""
        return {"pooling": self.pooling, "mean": self.mean, "std": self.std}

    def save(self, folder: Path) -> None:
        """Write it as a plain sequence classifier, the reading rule in its config."""
        setattr(self.classifier.config, SCORE_KEYS, self.rule)
        self.classifier.save_pretrained(folder)


def load_scalar(
    reference: str, tokenizer: PreTrainedTokenizerBase, new_head: bool = False, spread: bool = False
) -> ScalarModel:
    """A reward model or critic, in float32; `spread` as in `load_policy`.

    With `new_head` a model without a head gets one, N(0, 1/sqrt(d + 1)) (Stiennon et al.); otherwise that is an error,
    since PPO against a random head optimises noise.
    """
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            reference, dtype="auto" if spread else torch.float32, num_labels=1, output_loading_info=True, **SAFELY
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # the last for a head of several labels
        raise RefusedError(f"no sequence classifier in '{reference}': {why_not_loaded(reference, error)}") from error
    scalar = ScalarModel(model)
    headless = "score.weight" in info["missing_keys"]
    missing = {key for key in info["missing_keys"] if not (new_head and headless and key.startswith("score."))}
    if missing:
        raise RefusedError(
            f"'{reference}' lacks the weights {sorted(missing)[:3]}; "
            "a reward model must be saved with its score head (train one with `rlhf reward`)"
        )
    if headless:
        scalar.has_new_head = True
        scalar.pooling, scalar.mean, scalar.std = "last", 0.0, 1.0  # a rule without its head means nothing
        model.score = fresh_head(model.config.get_text_config().hidden_size, bias=model.score.bias is not None)
    model.config.pad_token_id = tokenizer.pad_token_id
    if spread:
        later(model, torch.float32)
    return scalar


def fresh_head(hidden_size: int, bias: bool = False) -> nn.Linear:
    """A head to one number with weights N(0, 1/sqrt(d + 1)) (Stiennon et al.) in float32."""
    head = nn.utils.skip_init(nn.Linear, hidden_size, 1, bias=bias, dtype=torch.float32)
    nn.init.normal_(head.weight, std=(hidden_size + 1) ** -0.5)
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return head


def scalars(head: nn.Linear, hidden: Tensor) -> Tensor:
    """One number in float32 per state: [B,T] from [B,T,d], or [N] from [N,d]."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.to(head.weight.dtype)).float().squeeze(-1)


class PolicyModel(nn.Module):
    """A causal language model read our way: log-probabilities of response tokens, in float32.

    The one place that makes log-probabilities: for the rollout's policy, the reference and the update. Logits are
    made for response positions only, LOGITS_AT_ONCE at a time, and where they are more than that, again in the
    backward pass (`token_logprobs`). With a `value_head` (hidden size → 1, in float32) the
    same pass also reads the critic's values.
    """

    def __init__(self, model: PreTrainedModel, value_head: nn.Linear | None = None) -> None:
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.scale, self.softcap = logit_rule(model)
        self.compiled = False
        """Whether what becomes of logits is compiled."""
        self.packed = False
        """Whether texts are read without their padding, as a model can that `packing.reads_packs`."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        num_response: int,
        temperature: float,
        with_entropy: bool = False,
        as_pack: PackedRows | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(log-probabilities, entropies if asked for, values if there is a value head), each [B,R].

        Of the last R = `num_response` tokens, from ids [B,T] and attention mask [B,T] (True where a token is);
        log-probabilities and entropies at `temperature`; what they are at padding means nothing. The state at
        position t judges the token at t + 1, hence the shift by one: the last token's own state is not needed.
        `as_pack` are the same texts (`episodes_as_pack`), where that has been made already.
        """
        if self.packed and as_pack is None:
            as_pack = episodes_as_pack(input_ids, attention_mask, num_response)
        hidden, in_rows = read_rows(self.model, input_ids[:, :-1], attention_mask[:, :-1], as_pack)
        hidden = in_rows(hidden)[:, -num_response:]  # [B,R,d]
        values = None if self.value_head is None else scalars(self.value_head, hidden)
        tokens, flat = input_ids[:, -num_response:], hidden.flatten(0, 1)
        if as_pack is None:
            return *self.read(flat, tokens, temperature, with_entropy), values
        judged = as_pack.judged  # padding has no logits either
        assert judged is not None
        logprobs, entropies = self.read(flat[judged], tokens.flatten()[judged], temperature, with_entropy)
        logprobs = laid_out(logprobs, judged, tokens.shape)
        return logprobs, None if entropies is None else laid_out(entropies, judged, tokens.shape), values

    def read(
        self, hidden: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(log-probabilities, entropies if asked for) as `tokens` [B,R] or [N], from hidden states [B·R,d] or [N,d]."""
        head = self.model.get_output_embeddings()
        logprobs, entropies = token_logprobs(
            hidden, head.weight, getattr(head, "bias", None), tokens.flatten(),
            (self.scale, self.softcap, temperature), with_entropy, max(LOGITS_AT_ONCE // len(head.weight), 1),
            self.compiled,
        )  # fmt: skip
        return logprobs.view(tokens.shape), None if entropies is None else entropies.view(tokens.shape)

    @torch.no_grad()
    def check_head(self, input_ids: Tensor) -> None:
        """Refuse a model whose own logits say otherwise: it does more after its last layer than we know of.

        Of texts [B,T] without padding.
        """
        ours, _, _ = self(input_ids, torch.ones_like(input_ids, dtype=torch.bool), 1, 1.0)
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, -2].float()
        theirs = logits.log_softmax(-1).gather(-1, input_ids[:, -1:])
        gap = (ours - theirs).abs().max().item()
        if gap > 0.1 + logits.abs().max().item() * 2**-7:  # what bfloat16 may round off two logits
            raise RefusedError(
                f"{type(self.model).__name__} does not take its logits straight from its last hidden state "
                f"(log-probabilities differ by {gap:.2g} nats); this architecture is not supported in PPO"
            )


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of a decoder by itself, for any shapes: what is compiled for one layer serves all.

    For the backward pass a layer keeps what its products make, and makes once more what stands between them, which the
    compiler by itself would keep in part.
    """
    partitioner.ban_recompute_used_far_apart = False
    partitioner.ban_recompute_long_fusible_chains = False
    partitioner.ban_recompute_materialized_backward = False
    torch._dynamo.config.recompile_limit = 64  # the code of a layer is compiled for every role, type and mode
    torch._dynamo.config.optimize_ddp = False  # else a layer is cut where a bucket ends, and more of it kept
    torch._dynamo.config.specialize_float = True  # else an epsilon is a tensor on the CPU, made anew in every call
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    for first in layers[:1]:
        first.register_forward_pre_hook(_as_if_learned)


def _as_if_learned(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """What frozen embeddings make needs no gradient: the first layer would be compiled apart from the others."""
    if inputs and torch.is_grad_enabled():  # a family may hand it over by name, and then has that one piece more
        inputs[0].requires_grad_()


def logit_rule(model: PreTrainedModel) -> tuple[float, float | None]:
    """What becomes of the products of hidden states and output embeddings: a factor, and a cap if there is one."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return scale, getattr(config, "final_logit_softcapping", None)


def save_folder(folder: Path, model: PreTrainedModel | ScalarModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model, tokenizer, template and generation_config beside `folder`, then swap it in.

    All that generation_config says is where answers end (`stops_of`), and to sample.
    """
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        if isinstance(model, ScalarModel):
            model.save(writing)
        else:
            model.config.use_cache = True  # trainers switch it off and leave it so
            stops = stops_of(model, tokenizer)
            model.generation_config = GenerationConfig(
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=stops if len(stops) > 1 else stops[0],
                pad_token_id=tokenizer.pad_token_id,
                do_sample=True,
            )
            model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        swap_folder(writing, folder)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def hand_over(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> dict[str, Any]:
    """What the next stage must agree with: the same text has to become the same ids."""
    return {
        "tokenizer": _short_hash(tokenizer.backend_tokenizer.to_str()),
        "vocab_size": int(model.config.vocab_size),
        "chat_template": _short_hash(str(tokenizer.chat_template)),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def check_hand_over(ours: dict[str, Any], theirs: dict[str, Any], our_name: str, their_name: str) -> None:
    """Refuse two models that read text differently; says both values and the cure."""
    for name, value in ours.items():
        if theirs[name] != value:
            raise SettingsError(
                f"{our_name} and {their_name} differ in {name}: {value} and {theirs[name]}; "
                "use models that come from the same tokenizer"
            )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
