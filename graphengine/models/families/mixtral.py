"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from graphengine.kernels.experts.router import Router
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key
from graphengine.models.hf.decoder_config import composed, expert_count, read_attention, read_mlp
from graphengine.models.sublayers import Sublayer

_KEYS = (
    Key("num_local_experts", "integer", (1, 2**16), default=8),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=2),
)
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=131_072, windows="all", keys=_KEYS, routes=True, biases=()
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
NAMES = ExpertNames(products=tuple(f"experts.{{}}.{name}" for name in ("w1", "w3", "w2")))


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `MixtralForCausalLM` checkpoint."""
    settings = hf_config.read_settings({**_MISSING, **config}, DEFAULTS)
    experts = Experts(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        experts=expert_count(settings, "num_local_experts"),
        router=Router(top_k=settings["num_experts_per_tok"], normalised=True),
        norm_eps=settings["rms_norm_eps"],
        names=NAMES,
    )
    layers = tuple(
        (
            Sublayer("input_layernorm", "self_attn.", read_attention(settings, window=window)),
            Sublayer("post_attention_layernorm", "block_sparse_moe.", experts),
        )
        for window in settings["windows"] or (0,) * settings["num_hidden_layers"]
    )
    return composed(settings, architecture, layers, mlp=read_mlp(settings))
