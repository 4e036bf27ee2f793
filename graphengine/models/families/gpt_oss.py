"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, windows in every other layer.

Checkpoints have all experts of a layer in one tensor.
"""

from __future__ import annotations

from graphengine.kernels.experts.router import Router
from graphengine.kernels.norm_rope.activation import ClampedSwiglu
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    GPT_OSS_KEYS,
    LAYER_TYPES,
    HfConfig,
    read_key,
    unsupported,
)
from graphengine.models.hf.decoder_config import (
    decoder_config,
    expert_count,
    read_attention,
    read_mlp,
    with_experts,
)

# Defaults for missing keys, where transformers' differ from those of other families.
_MISSING = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "num_local_experts": 128,
    "rope_theta": 150_000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_FULL, _SLIDING = LAYER_TYPES
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=131_072,
    head_dim=64,
    windows="switched",
    keys=GPT_OSS_KEYS,
    routes=True,
    # In feed-forwards only experts have biases, whatever the key says.
    biases=("attention_bias", "mlp_bias"),
)


NAMES = ExpertNames(
    router="router",
    products=("experts.gate_up_proj", "experts.down_proj"),
    ending="",
    alternating=True,
    # As GGUF files have them.
    other=ExpertNames(router="router"),
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GptOssForCausalLM` checkpoint."""
    for name, only in (("mlp_bias", True), ("use_sliding_window", True)):
        # transformers ignores these.
        if config.get(name) not in (None, only):
            raise unsupported(name, config[name], f"null or {only}")
    settings = hf_config.read_settings(_spelled_out(config), DEFAULTS)
    count, chosen = expert_count(settings, "num_local_experts"), settings["num_experts_per_tok"]
    if settings["num_experts"] not in (None, count):
        raise unsupported("num_experts", settings["num_experts"], "as num_local_experts is")
    if settings["experts_per_token"] not in (None, chosen):
        raise unsupported("experts_per_token", settings["experts_per_token"], f"null or {chosen}")
    experts = Experts(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        experts=count,
        router=Router(top_k=chosen, scores="softmax_of_chosen"),
        norm_eps=settings["rms_norm_eps"],
        bias=True,
        gating=ClampedSwiglu(limit=settings["swiglu_limit"], slope=settings["swiglu_alpha"]),
        names=NAMES,
    )
    attention = read_attention(settings, sinks=True)
    model = decoder_config(settings, architecture, attention, read_mlp(settings))
    return with_experts(model, experts, range(model.num_layers))


def _spelled_out(config: HfConfig) -> HfConfig:
    """The config with transformers' defaults, a type for each layer, and RoPE."""
    told = _MISSING | dict(config)
    if told.get("layer_types") is None:
        layers = read_key(told, "num_hidden_layers")
        told["layer_types"] = hf_config.periodic_types(layers, 2)
    types = told["layer_types"]
    if not isinstance(types, list):
        raise unsupported("layer_types", types, f"a list of {_FULL!r} and {_SLIDING!r}")
    if told["sliding_window"] is None and _SLIDING in types:
        raise unsupported("sliding_window", None, "an integer")
    told["use_sliding_window"] = _SLIDING in types
    if not told.get("rope_parameters") and not told.get("rope_scaling"):
        told["rope_parameters"] = _YARN | {"rope_theta": told["rope_theta"]}
    return told
