"""GLM-4-MoE (GLM-4.5 to 4.7): grouped-query attention, and experts like DeepSeek-V3's.

RoPE rotates the first half of each head. All layers but the first ones have experts.
"""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.deepseek import Version, with_routed_experts
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import ROUTED_KEYS, HfConfig, Key, unsupported
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

# Defaults for missing keys, where transformers' differ from those of other families.
_MISSING = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}

_KEYS = (*ROUTED_KEYS, Key("use_qk_norm", "flag", default=False))
_GLM = Version(
    defaults=hf_config.FamilyDefaults(max_positions=131072, keys=_KEYS, routes=True, rotated=None),
    methods=("noaux_tc",),
    scores="sigmoid",
    missing={
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Glm4MoeForCausalLM` checkpoint."""
    settings = hf_config.read_settings({**_MISSING, **config}, _GLM.defaults)
    for name, value in _GLM.missing.items():
        if settings[name] is None:
            settings[name] = value
    if settings["moe_layer_freq"] != 1:
        raise unsupported("moe_layer_freq", settings["moe_layer_freq"], "1")
    rope = hf_config.rope(settings)
    attention = read_attention(
        settings, output_bias=False, qk_norm=settings["use_qk_norm"], rotated=rope.rotated
    )
    model = decoder_config(settings, architecture, attention, read_mlp(settings))
    return with_routed_experts(settings, model, _GLM)
