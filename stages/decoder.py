"""A small decoder in which every part is a choice, from Vaswani et al. 2017 to LLaMA (Touvron et al. 2023).

It is registered with transformers' Auto classes when this file is imported. `save_pretrained` puts the file beside the
weights, so that a checkpoint also loads where our package is not installed (`trust_remote_code=True`); for that it
imports nothing but torch and transformers. Weights have the names of transformers' Llama where they mean the same.

Axis letters in shapes: B rows, T new tokens, S tokens seen by attention (cache included), d hidden size, H heads,
G key/value heads, D = d / H, V vocabulary.
"""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

Rotation = tuple[Tensor, Tensor]  # cosines and sines [B,T,D]


class DecoderConfig(PreTrainedConfig):
    """Sizes and parts of a decoder; the defaults are LLaMA's parts. Raises ValueError where they do not fit together.

    `bias` puts biases into layer norms and linear layers, other than query, key, value and the one to the logits.
    `dropout` is applied to attention weights, to the output of every sublayer and to the embeddings.
    """

    model_type = "rlhf_decoder"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 1024
    norm_position: Literal["pre", "post"] = "pre"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    feed_forward: Literal["relu", "gelu", "silu", "swiglu"] = "swiglu"
    positions: Literal["sinusoidal", "learned", "rope", "none"] = "rope"
    bias: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name in ("norm_position", "norm", "feed_forward", "positions"):
            found, choices = getattr(self, name), get_args(DecoderConfig.__annotations__[name])
            if found not in choices:
                raise ValueError(f"{name} is '{found}'; choose one of {', '.join(choices)}")
        width, heads, groups = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if width % heads:
            raise ValueError(f"hidden_size {width} is no multiple of the {heads} attention heads")
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is no multiple of the {groups} key/value heads")
        if self.positions == "rope" and (width // heads) % 2:
            raise ValueError(f"a head of {width // heads} numbers cannot be rotated in pairs; make it even for rope")
        if self.positions == "sinusoidal" and width % 2:
            raise ValueError(f"hidden_size is {width}; sinusoidal positions come in pairs, so make it even")
        super().__post_init__(**kwargs)


class RMSNorm(nn.Module):
    """x / rms(x) · weight (Zhang and Sennrich 2019), in float32 inside; the result has the dtype of x."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Torch's, in float32 inside; the result has the dtype of x under autocast, too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, eps=config.norm_eps, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Encodings [...,size] of positions [...] (Vaswani et al. 2017, section 3.5), in float32.

    Column 2i is sin(position / 10000^(2i/size)), column 2i + 1 its cosine.
    """
    columns = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None] / 10000 ** (columns / size)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def rotations(positions: Tensor, size: int, theta: float) -> Rotation:
    """Cosines and sines [...,size] by which heads at positions [...] are rotated (Su et al. 2021), in float32."""
    columns = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None] * theta ** -(columns / size)
    angles = torch.cat([angles, angles], dim=-1)  # number i is paired with i + size/2, as in Llama's checkpoints
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [B,H,T,D] rotated pair by pair, by cosines and sines [B,T,D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class ResidualLinear(nn.Linear):
    """The last linear layer of a sublayer, of its own class since its weights begin smaller."""


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention written out: results [B,T,H,D] and weights [B,H,T,S], from queries [B,H,T,D] and keys [B,G,S,D].

    A mask [B,1,T,S] is added to the scores, or says where to look if it is boolean.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling  # [B,H,T,S]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class Attention(nn.Module):
    """Causal self-attention with H heads for queries and G for keys and values (Ainslie et al. 2023)."""

    is_causal = True  # read by transformers' attention functions

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        assert config.num_key_value_heads is not None  # the config has filled it in
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = ResidualLinear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, rotation: Rotation | None, cache: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden).view(heads).transpose(1, 2)  # [B,H,T,D]
        key = self.k_proj(hidden).view(heads).transpose(1, 2)  # [B,G,T,D]
        value = self.v_proj(hidden).view(heads).transpose(1, 2)  # [B,G,T,D]
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)  # [B,G,S,D]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.dropout.p if self.training else 0.0
        result, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(result.reshape(hidden.shape)), weights


class FeedForward(nn.Module):
    """down(act(up(x))), or with a gate down(silu(gate(x)) · up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        gated = config.feed_forward == "swiglu"
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = ResidualLinear(config.intermediate_size, config.hidden_size, bias=config.bias)
        self.activation = {"relu": nn.ReLU, "gelu": nn.GELU}.get(config.feed_forward, nn.SiLU)()

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up_proj(hidden)
        inner = self.activation(inner) if self.gate_proj is None else self.activation(self.gate_proj(hidden)) * inner
        return self.down_proj(inner)


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each added to what goes past it; the norm is before the sublayer or after the sum."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_first = config.norm_position == "pre"
        self.self_attn = Attention(config, layer_idx)
        self.mlp = FeedForward(config)
        if self.norm_first:
            self.input_layernorm = NORMS[config.norm](config)
        self.post_attention_layernorm = NORMS[config.norm](config)
        if not self.norm_first:
            self.post_feedforward_layernorm = NORMS[config.norm](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, rotation: Rotation | None, cache: Cache | None, **kwargs: Any
    ) -> Tensor:
        if self.norm_first:
            attended, _ = self.self_attn(self.input_layernorm(hidden), mask, rotation, cache, **kwargs)
            hidden = hidden + self.dropout(attended)
            return hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        attended, _ = self.self_attn(hidden, mask, rotation, cache, **kwargs)
        hidden = self.post_attention_layernorm(hidden + self.dropout(attended))
        return self.post_feedforward_layernorm(hidden + self.dropout(self.mlp(hidden)))


class DecoderPreTrainedModel(PreTrainedModel):
    """What the three models below have in common: how weights begin, and what transformers may do with them."""

    config: DecoderConfig
    config_class = DecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range), less for what is added to the residual stream; biases 0, norms' weights 1."""
        super()._init_weights(module)
        if isinstance(module, ResidualLinear):
            # 2 outputs per layer are summed up; so the sum does not grow with depth (GPT-2, section 2.3).
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            initialization.normal_(module.weight, std=std)
        if isinstance(module, DecoderModel) and self.config.positions == "rope":  # it is in no checkpoint
            initialization.copy_(module.rotations, module.all_rotations())


class DecoderModel(DecoderPreTrainedModel):
    """Embeddings, layers and, with norms before the sublayers, a last norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.positions == "rope":  # kept: a compiler would compute the sines anew wherever they are used
            self.register_buffer("rotations", self.all_rotations(), persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([DecoderLayer(config, n) for n in range(config.num_hidden_layers)])
        self.norm = NORMS[config.norm](config) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """States [B,T,d] of ids [B,T], or of embeddings [B,T,d] as `embed_tokens` gives them.

        `attention_mask` is [B,S], 1 where a token is, or a ready mask [B,1,T,S]. `position_ids` [B,T] count on from the
        cache where none are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B,T,d]
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask = self._mask(hidden, attention_mask, position_ids, cache)
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + seen
        hidden, rotation = self._place(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, rotation, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache)

    def all_rotations(self) -> Tensor:
        """Cosines and sines [2,max_position_embeddings,D] of all positions."""
        config = self.config
        positions = torch.arange(config.max_position_embeddings)
        return torch.stack(rotations(positions, config.hidden_size // config.num_attention_heads, config.rope_theta))

    def _place(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Rotation | None]:
        """Embeddings that know their positions, and the rotation if attention is where they come in."""
        config, rotation = self.config, None
        if config.positions == "sinusoidal":
            # Sines have a mean square of 1/2, embeddings of initializer_range², some 0.0004: added as they are, the
            # tokens would drown. Times √d, as in section 3.4 of the paper, both are of the same order.
            hidden = hidden * math.sqrt(config.hidden_size)
            hidden = hidden + sinusoids(position_ids, config.hidden_size).to(hidden.dtype)
        elif config.positions == "learned":
            hidden = hidden + self.embed_positions(position_ids).to(hidden.dtype)
        elif config.positions == "rope":
            cos, sin = self.rotations[:, position_ids].to(hidden.dtype)
            rotation = cos, sin
        return self.dropout(hidden), rotation

    def _mask(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> Tensor | None:
        """The mask that the attention function wants; None where its own causal one is enough."""
        plain = attention_mask is None and position_ids is None and cache is None
        if plain and self.config._attn_implementation == "sdpa":
            return None  # when compiled, create_causal_mask always makes one, and flash kernels take none
        return create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, cache=cache,
            position_ids=position_ids,
        )  # fmt: skip


class DecoderForCausalLM(DecoderPreTrainedModel, GenerationMixin):
    """A decoder that says which token comes next."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.model = DecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B,T,V], of the last `logits_to_keep` tokens (0 is all), or of those at the indices that it lists.

        With `labels` [B,T] (-100 where none counts) also the mean loss in nats; label t is token t, not t + 1.
        """
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=output.cache, hidden_states=output.hidden_states,
            attentions=output.attentions,
        )  # fmt: skip


class DecoderForSequenceClassification(GenericForSequenceClassification, DecoderPreTrainedModel):
    """A decoder with a linear head `score` on its last token."""


AutoConfig.register(DecoderConfig.model_type, DecoderConfig)
DecoderConfig.register_for_auto_class()
for _auto, _model in (
    (AutoModel, DecoderModel),
    (AutoModelForCausalLM, DecoderForCausalLM),
    (AutoModelForSequenceClassification, DecoderForSequenceClassification),
):
    _auto.register(DecoderConfig, _model)
    _model.register_for_auto_class(_auto.__name__)
