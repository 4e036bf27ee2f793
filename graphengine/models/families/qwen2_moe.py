"""Qwen2-MoE (Qwen1.5-MoE): Qwen2 with experts in most layers, and a shared one with a gate."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.qwen3_5 import gated_experts
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key
from graphengine.models.hf.decoder_config import (
    decoder_config,
    read_attention,
    read_mlp,
    sparse_layers,
    with_experts,
)

_KEYS = (
    Key("num_experts", "integer", (0, 2**16), default=60),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=4),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=1408),
    Key("shared_expert_intermediate_size", "integer", (1, 2**22), default=5632),
    Key("norm_topk_prob", "flag", default=False),
    Key("decoder_sparse_step", "integer", (1, 1024), default=1),
    Key("mlp_only_layers", "integers", (0, 2**31 - 1), default=(), null=True),
    Key("qkv_bias", "flag", default=True),
)
# Windows, which no published config switches on, are refused.
DEFAULTS = hf_config.FamilyDefaults(max_positions=32_768, keys=_KEYS, routes=True, biases=())
# transformers' defaults for missing keys; in other families these keys must be there.
_MISSING = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "use_sliding_window": False,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen2MoeForCausalLM` checkpoint."""
    settings = hf_config.read_settings(_MISSING | dict(config), DEFAULTS)
    attention = read_attention(settings, qkv_bias=settings["qkv_bias"], output_bias=False)
    model = decoder_config(settings, architecture, attention, read_mlp(settings))
    layers = sparse_layers(settings)
    if not settings["num_experts"] or not layers:
        return model
    experts = gated_experts(settings, normalised=settings["norm_topk_prob"])
    return with_experts(model, experts, layers)
