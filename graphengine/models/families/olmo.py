"""OLMo: Llama with LayerNorms that have no weights. OLMo 2 and 3: norms only after blocks, and of
all heads' queries and keys together.

Three layers of four of OLMo 3 have a window; only the others scale RoPE.
"""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    KEYS,
    LAYER_TYPES,
    HfConfig,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import composed, decoder_config, read_attention, read_mlp
from graphengine.models.sublayers import post_normed_layer

V1 = hf_config.FamilyDefaults(max_positions=2048)
V2 = hf_config.FamilyDefaults(max_positions=2048)
V3 = hf_config.FamilyDefaults(max_positions=2048, windows="switched")
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}
_FULL, _SLIDING = LAYER_TYPES
_THETA = 500_000.0


def read_v1(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of an `OlmoForCausalLM` checkpoint."""
    settings = hf_config.read_settings(_MISSING | dict(config), V1)
    # The keys have no epsilon: it is always the default of `_MISSING`.
    eps = _MISSING["rms_norm_eps"]
    if settings["rms_norm_eps"] != eps:
        raise unsupported("rms_norm_eps", settings["rms_norm_eps"], f"null or {eps}")
    attention = read_attention(settings)
    return decoder_config(
        settings, architecture, attention, read_mlp(settings), norms="layer_plain"
    )


def read_v2(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of an `Olmo2ForCausalLM` checkpoint."""
    return _read(hf_config.read_settings(_MISSING | dict(config), V2), architecture)


def read_v3(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of an `Olmo3ForCausalLM` checkpoint."""
    return _read(hf_config.read_settings(_spelled_out(config), V3), architecture)


def _read(settings: dict[str, Any], architecture: str) -> DecoderConfig:
    mlp = read_mlp(settings)
    layers = tuple(
        post_normed_layer(read_attention(settings, qk_norm=True, row_norm=True, window=window), mlp)
        for window in settings["windows"] or (0,) * settings["num_hidden_layers"]
    )
    local_rope = hf_config.local_rope(settings)
    return composed(settings, architecture, layers, mlp=mlp, local_rope=local_rope)


def _spelled_out(config: HfConfig) -> dict[str, Any]:
    """The config in the other families' keys: a type for each layer and RoPE for each type."""
    told = _MISSING | dict(config)
    hf_config.check_windows_on(told)
    given = read_keys(told, KEYS)
    types = given["layer_types"]
    if types is None:
        types = hf_config.periodic_types(given["num_hidden_layers"], 4)
    parameters, scaling = given["rope_parameters"] or {}, given["rope_scaling"] or {}
    if any(name not in LAYER_TYPES for name in parameters):
        known = " and ".join(map(repr, LAYER_TYPES))
        raise unsupported("rope_parameters", parameters, f"RoPE under {known}")
    theta = told.pop("rope_theta", None) or _THETA
    usual = {"rope_type": "default", "rope_theta": theta}
    of_types = {kind: usual | (parameters.get(kind) or {}) for kind in LAYER_TYPES}
    told.pop("rope_scaling", None)
    return told | {
        "layer_types": types,
        "use_sliding_window": _SLIDING in types,
        "rope_parameters": of_types | {_FULL: of_types[_FULL] | scaling},
    }
