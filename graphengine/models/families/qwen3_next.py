"""Qwen3-Next: Qwen3.5's gated delta nets and gated attention, and experts in most layers.

Checkpoints have a gated delta net's projections interleaved by head; `fused_heads.py` reads them.
"""

from __future__ import annotations

from dataclasses import replace

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.qwen3_5 import (
    DEFAULTS,
    delta_hybrid,
    gated_experts,
    without_layer_types,
)
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import QWEN3_5_KEYS, HfConfig, Key
from graphengine.models.hf.decoder_config import read_mlp, sparse_layers

_KEYS = (
    Key("num_experts", "integer", (0, 2**16), default=512),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=10),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=512),
    Key("shared_expert_intermediate_size", "integer", (1, 2**22), default=512),
    Key("norm_topk_prob", "flag", default=True),
    Key("decoder_sparse_step", "integer", (1, 1024), default=1),
    Key("mlp_only_layers", "integers", (0, 2**31 - 1), default=(), null=True),
)
NEXT_DEFAULTS = replace(DEFAULTS, keys=QWEN3_5_KEYS + _KEYS, routes=True)
# transformers' defaults for missing keys; in other families these keys must be there.
_MISSING = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3NextForCausalLM` checkpoint."""
    config = _MISSING | dict(config)
    settings = hf_config.read_settings(without_layer_types(config), NEXT_DEFAULTS)
    mlp, experts, sparse = read_mlp(settings), None, sparse_layers(settings)
    if settings["num_experts"]:
        experts = gated_experts(settings, normalised=settings["norm_topk_prob"])
    feed_forwards = [
        mlp if experts is None or index not in sparse else experts
        for index in range(settings["num_hidden_layers"])
    ]
    return delta_hybrid(config, settings, architecture, feed_forwards)
