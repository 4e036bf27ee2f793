"""Granite 4's hybrids without routed experts: Mamba2 or attention, then a SwiGLU, and multipliers.

Each block's output is multiplied by `residual_multiplier` r before it is added. Here the stream is
kept divided by r instead: embeddings are divided, and outputs are added as they are. RMSNorms give
the same result with an epsilon of eps / r**2, so r costs neither a kernel nor a rounding of
weights.
"""

from __future__ import annotations

from typing import Any

from graphengine.kernels import Mamba2Sizes
from graphengine.models import hf_config
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.config_schema import GRANITE_KEYS, HfConfig, unsupported
from graphengine.models.hybrid import HybridConfig
from graphengine.models.mamba_config import time_step_limits, with_plain_limits
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, keys=GRANITE_KEYS)
_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


def read_config(config: HfConfig, architecture: str) -> HybridConfig:
    """`HybridConfig` of a `GraniteMoeHybridForCausalLM` checkpoint."""
    settings = _read_settings(config)
    types = _layer_types(config, settings)
    residual = settings["residual_multiplier"]
    eps = settings["rms_norm_eps"] / residual**2
    positions = settings["position_embedding_type"]
    if positions not in (None, "nope", "rope"):
        raise unsupported("position_embedding_type", positions, "null, 'nope', 'rope'")
    hidden = settings["hidden_size"]
    attention = GroupedQueryAttention(
        hidden_size=hidden,
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        norm_eps=eps,
        qkv_bias=settings["attention_bias"],
        output_bias=settings["attention_bias"],
        scale_of=settings["attention_multiplier"] ** -2,
    )
    mamba = Mamba2(
        hidden_size=hidden,
        sizes=_mamba_sizes(settings),
        norm_eps=eps,
        gate_eps=settings["rms_norm_eps"],
        bias=settings["mamba_proj_bias"],
        conv_bias=settings["mamba_conv_bias"],
    )
    mlp = Swiglu(
        hidden_size=hidden,
        ffn_size=settings["shared_intermediate_size"],
        norm_eps=eps,
        one_linear=True,
    )
    after = Sublayer("post_attention_layernorm", "shared_mlp.", mlp)
    mixers = {
        True: Sublayer("input_layernorm", "self_attn.", attention),
        False: Sublayer("input_layernorm", "mamba.", mamba),
    }
    return HybridConfig(
        architecture=architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=hidden,
        norm_eps=eps,
        max_positions=settings["max_position_embeddings"],
        layers=tuple((mixers[kind in _ATTENTION], after) for kind in types),
        attention=attention,
        rope=hf_config.rope(settings) if positions == "rope" else None,
        tie_embeddings=settings["tie_word_embeddings"],
        embedding_scale=settings["embedding_multiplier"] / residual,
        stream_scale=residual,
        logits_scale=1 / settings["logits_scaling"],
    )


def _read_settings(config: HfConfig) -> dict[str, Any]:
    """The settings without the layer types, which differ from those of other families."""
    told = with_plain_limits(config)
    for name in ("layer_types", "layers_block_type"):
        told.pop(name, None)
    # The width of routed experts, but there are none.
    told["intermediate_size"] = told.get("intermediate_size") or 1
    if told.get("mamba_d_head") == "auto":
        told["mamba_d_head"] = None
    settings = hf_config.read_settings(told, DEFAULTS)
    if settings["num_local_experts"]:
        raise unsupported("num_local_experts", settings["num_local_experts"], "0")
    return settings


def _layer_types(config: HfConfig, settings: dict[str, Any]) -> list[str]:
    types = config.get("layer_types") or config.get("layers_block_type")
    return hf_config.types_of_layers(types, settings, (*_MAMBA, *_ATTENTION), _ATTENTION)


def _mamba_sizes(settings: dict[str, Any]) -> Mamba2Sizes:
    heads, inner = settings["mamba_n_heads"], settings["mamba_expand"] * settings["hidden_size"]
    head_dim = settings["mamba_d_head"] or inner // heads
    if heads * head_dim != inner:
        raise ValueError(
            f"config.json has mamba_n_heads={heads} of mamba_d_head={head_dim}, which are not "
            f"mamba_expand * hidden_size = {inner}"
        )
    if heads % settings["mamba_n_groups"]:
        raise ValueError(
            f"config.json has mamba_n_heads={heads}, no multiple of "
            f"mamba_n_groups={settings['mamba_n_groups']}"
        )
    return Mamba2Sizes(
        heads=heads,
        head_dim=head_dim,
        groups=settings["mamba_n_groups"],
        state_size=settings["mamba_d_state"],
        width=settings["mamba_d_conv"],
        **time_step_limits(settings),
    )
