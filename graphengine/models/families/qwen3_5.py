"""Qwen3.5's language model: gated delta nets, and gated attention in every fourth layer; a SwiGLU
or experts. RoPE rotates the first quarter of each head.

Checkpoints with a vision tower have the language model's config under `text_config`. For text, RoPE
with several axes (`mrope_section`) equals RoPE with one: a token has the same position on all axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphengine.kernels.experts.router import Router
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import GatedDeltaSizes
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gated_delta import GatedDelta
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    QWEN3_5_KEYS,
    HfConfig,
    Key,
    checked_language_model,
    unsupported,
)
from graphengine.models.hf.decoder_config import composed, expert_count, read_attention, read_mlp
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=32_768,
    head_dim=256,
    keys=QWEN3_5_KEYS,
    rotated=(0.25, 0.5, 1.0),
    # The activation of the gates in the norm after a gated delta net. Attention's gates go through
    # a sigmoid, for which there is no key.
    fixed={"output_gate_type": ("swish", "silu")},
)
# transformers' defaults for missing keys; in other families these keys must be there.
_SIZES = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
}
_MOE_KEYS = (
    Key("num_experts", "integer", (1, 2**16), default=256),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=8),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=512),
    Key("shared_expert_intermediate_size", "integer", (1, 2**22), default=512),
)
MOE_DEFAULTS = replace(
    DEFAULTS,
    keys=QWEN3_5_KEYS + _MOE_KEYS,
    routes=True,
    fixed={**DEFAULTS.fixed, "norm_topk_prob": (True,)},
)
# Among them is the width of feed-forwards without experts, which this model has none of.
_MOE_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 1,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}
EXPERT_NAMES = ExpertNames(
    shared="shared_expert.",
    # The layout of published checkpoints. Others have a tensor for each expert.
    other=ExpertNames(
        products=("experts.gate_up_proj", "experts.down_proj"), ending="", shared="shared_expert."
    ),
)
_ATTENTION, _DELTA = "full_attention", "linear_attention"


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3_5ForCausalLM` checkpoint, or of one with a vision tower."""
    config = _SIZES | _language_model(config)
    settings = hf_config.read_settings(without_layer_types(config), DEFAULTS)
    mlps = [read_mlp(settings)] * settings["num_hidden_layers"]
    return delta_hybrid(config, settings, architecture, mlps)


def read_moe(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3_5MoeForCausalLM` checkpoint, or of one with a vision tower."""
    config = _SIZES | _MOE_SIZES | _language_model(config)
    settings = hf_config.read_settings(without_layer_types(config), MOE_DEFAULTS)
    experts = [gated_experts(settings, normalised=True)] * settings["num_hidden_layers"]
    return delta_hybrid(config, settings, architecture, experts)


def gated_experts(settings: dict[str, Any], *, normalised: bool) -> Experts:
    """Experts, and a shared one with a gate.

    normalised  whether the weights of a token's experts are divided by their sum
    """
    width = settings["shared_expert_intermediate_size"]
    return Experts(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["moe_intermediate_size"],
        experts=expert_count(settings, "num_experts"),
        router=Router(top_k=settings["num_experts_per_tok"], normalised=normalised),
        norm_eps=settings["rms_norm_eps"],
        shared=read_mlp(settings, ffn_size=width, role="shared_"),
        shared_gate=True,
        names=EXPERT_NAMES,
    )


def delta_hybrid(
    config: HfConfig,
    settings: dict[str, Any],
    architecture: str,
    feed_forwards: Sequence[Swiglu | Experts],
) -> DecoderConfig:
    """The model of gated delta nets and gated attention, with a feed-forward for each layer."""
    if not settings["attn_output_gate"]:
        raise unsupported("attn_output_gate", False, "true")
    rope = hf_config.with_axes(hf_config.rope(settings), config)
    attention = read_attention(settings, qk_norm=True, rotated=rope.rotated, gated=True)
    delta = GatedDelta(
        hidden_size=settings["hidden_size"],
        sizes=_delta_sizes(settings),
        norm_eps=settings["rms_norm_eps"],
        state_dtype=hf_config.state_dtype(settings, "mamba_ssm_dtype"),
    )
    mixers = {
        _ATTENTION: Sublayer("input_layernorm", "self_attn.", attention),
        _DELTA: Sublayer("input_layernorm", "linear_attn.", delta),
    }
    types = _layer_types(config.get("layer_types"), settings)
    layers = tuple(
        (mixers[kind], Sublayer("post_attention_layernorm", "mlp.", feed_forward))
        for kind, feed_forward in zip(types, feed_forwards, strict=True)
    )
    mlp = read_mlp(settings)
    return composed(settings, architecture, layers, mlp=mlp, rope=rope, norms_plus_one=True)


def _language_model(config: HfConfig) -> dict[str, Any]:
    """The language model's own config."""
    text = checked_language_model(config)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "tie_word_embeddings": tied}


def without_layer_types(config: HfConfig) -> dict[str, Any]:
    """Drop the layer types, which differ from other families', and RoPE's axes."""
    told = hf_config.of_one_axis(config)
    return {name: value for name, value in told.items() if name != "layer_types"}


def _layer_types(types: Any, settings: dict[str, Any]) -> list[str]:
    layers, every = settings["num_hidden_layers"], settings["full_attention_interval"]
    if types is None:
        types = [_DELTA if (index + 1) % every else _ATTENTION for index in range(layers)]
    return hf_config.types_of_layers(types, settings, (_DELTA, _ATTENTION), (_ATTENTION,))


def _delta_sizes(settings: dict[str, Any]) -> GatedDeltaSizes:
    keys, values = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    if values % keys:
        raise ValueError(
            f"config.json has linear_num_value_heads={values}, no multiple of "
            f"linear_num_key_heads={keys}"
        )
    return GatedDeltaSizes(
        key_heads=keys,
        value_heads=values,
        key_dim=settings["linear_key_head_dim"],
        value_dim=settings["linear_value_head_dim"],
        taps=settings["linear_conv_kernel_dim"],
    )
