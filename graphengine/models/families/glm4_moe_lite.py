"""GLM-4-MoE-Lite (GLM-4.7-Flash): latent attention and experts like DeepSeek-V3's."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.deepseek import Version, read_latent
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import LATENT_KEYS, HfConfig, read_key, unsupported

# transformers' defaults for missing keys, where DeepSeek-V3's are different ones.
_MISSING = {
    "intermediate_size": 10_240,
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
}
LITE = Version(
    defaults=hf_config.FamilyDefaults(
        max_positions=202_752, keys=LATENT_KEYS, routes=True, latent=True, biases=()
    ),
    methods=("noaux_tc",),
    scores="sigmoid",
    missing={
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
_KINDS = ("dense", "sparse")


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Glm4MoeLiteForCausalLM` checkpoint."""
    told = {**_MISSING, **config}
    # transformers ignores these two: all layers but the first have experts.
    for name in ("first_k_dense_replace", "moe_layer_freq"):
        if told.get(name) not in (None, 1):
            raise unsupported(name, told[name], "null or 1, as mlp_layer_types says it")
    types = told.pop("mlp_layer_types", None)
    if types is None:
        return read_latent(told, architecture, LITE)
    layers = read_key(told, "num_hidden_layers")
    known = isinstance(types, list) and all(kind in _KINDS for kind in types)
    if not known or len(types) != layers:
        raise unsupported("mlp_layer_types", types, f"{layers} times 'dense' or 'sparse'")
    sparse = [index for index, kind in enumerate(types) if kind == "sparse"]
    return read_latent(told, architecture, LITE, sparse)
