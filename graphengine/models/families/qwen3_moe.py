"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers, or in all."""

from __future__ import annotations

from typing import Any

from graphengine.kernels.experts.router import Router
from graphengine.models.blocks.experts import Experts
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.qwen3 import NORMED
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import EXPERT_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import (
    decoder_config,
    expert_count,
    read_attention,
    read_mlp,
    sparse_layers,
    with_experts,
)

# transformers' default where neither key is there.
_EXPERTS = 128
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=32768, keys=EXPERT_KEYS, routes=True, fixed=NORMED
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3MoeForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    attention = read_attention(settings, qk_norm=True)
    model = decoder_config(settings, architecture, attention, read_mlp(settings))
    count = _experts(settings)
    layers = sparse_layers(settings)
    if not count or not layers:
        return model
    experts = Experts(
        hidden_size=model.hidden_size,
        ffn_size=settings["moe_intermediate_size"],
        experts=count,
        router=Router(top_k=settings["num_experts_per_tok"], normalised=settings["norm_topk_prob"]),
        norm_eps=model.norm_eps,
    )
    return with_experts(model, experts, layers)


def _experts(settings: dict[str, Any]) -> int:
    """Experts per layer; 0: no layer has any."""
    given = {name: settings[name] for name in ("num_experts", "num_local_experts")}
    counts = {name: value for name, value in given.items() if value is not None}
    if len({*counts.values()}) > 1:
        raise unsupported("num_local_experts", counts["num_local_experts"], "as num_experts is")
    counts = counts or {"num_experts": _EXPERTS}
    return expert_count(settings | counts, next(iter(counts)))
