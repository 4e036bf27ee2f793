"""Gemma 3's language model: norms on both sides of the blocks, GeGLU, windows in most layers.

Layers with a window have their own RoPE. The embeddings of an image see each other. Checkpoints
with a vision tower have the language model's config under `text_config`, which leaves out
transformers' defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    GEMMA_KEYS,
    KEYS,
    LAYER_TYPES,
    HfConfig,
    checked_language_model,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

# transformers' defaults for missing keys; other families require these keys.
_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_FULL, _SLIDING = LAYER_TYPES
_THETAS = {_FULL: 1_000_000.0, _SLIDING: 10_000.0}
_GELU = "gelu_pytorch_tanh"
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=131_072, head_dim=256, windows="switched", keys=GEMMA_KEYS
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Gemma3ForCausalLM` checkpoint, or of one with a vision tower."""
    config = _language_model(config)
    own = read_keys(config, GEMMA_KEYS)
    check_switches(config, own)
    settings = hf_config.read_settings(_spelled_out(config, own), DEFAULTS)
    return read_gemma(settings, architecture, qk_norm=True)


def check_switches(config: HfConfig, own: Mapping[str, Any]) -> None:
    """ValueError for another activation than Gemma's, or windows that are switched off."""
    if own["hidden_activation"] != _GELU:
        raise unsupported("hidden_activation", own["hidden_activation"], repr(_GELU))
    for name, wanted in (("hidden_act", _GELU), ("use_sliding_window", True)):
        # transformers ignores these.
        if config.get(name) not in (None, wanted):
            raise unsupported(name, config[name], f"null or {wanted!r}")


def read_gemma(
    settings: dict[str, Any], architecture: str, *, logits_cap: float = 0.0, **attention: Any
) -> DecoderConfig:
    """A Gemma of these settings, with these switches of attention."""
    scale_of = settings["query_pre_attn_scalar"]
    return decoder_config(
        settings,
        architecture,
        read_attention(settings, scale_of=scale_of, **attention),
        read_mlp(settings, activation="gelu_tanh"),
        post_norms=True,
        norms_plus_one=True,
        embedding_scale=math.sqrt(settings["hidden_size"]),
        scales_in_embedding=True,
        logits_cap=logits_cap,
        bidirectional_images=architecture == "Gemma3ForConditionalGeneration",
    )


def _language_model(config: HfConfig) -> dict[str, Any]:
    """The language model's own config, with transformers' defaults."""
    text = checked_language_model(config)
    tied = [each.get("tie_word_embeddings", True) for each in (config, text)]
    if tied[0] != tied[1]:
        raise unsupported("text_config.tie_word_embeddings", tied[1], f"{tied[0]}, as beside it")
    return _SIZES | dict(text)


def _spelled_out(config: HfConfig, own: dict[str, Any]) -> dict[str, Any]:
    """The config in the other families' keys: a type for each layer and RoPE for each type."""
    given = read_keys(config, KEYS)
    types = given["layer_types"]
    if types is None:
        types = hf_config.periodic_types(given["num_hidden_layers"], own["sliding_window_pattern"])
    told = {name: value for name, value in config.items() if name not in ("hidden_act", *_ROPE)}
    return told | {
        "layer_types": types,
        "use_sliding_window": _SLIDING in types,
        "rope_parameters": _rope_of_types(config, given, own),
    }


_ROPE = ("rope_theta", "rope_local_base_freq", "rope_parameters", "rope_scaling")


def _rope_of_types(
    config: HfConfig, given: dict[str, Any], own: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """RoPE of each layer type, from the old keys or the new ones.

    Before `rope_parameters` existed, `rope_theta` and `rope_scaling` were only for the layers
    without a window.
    """
    parameters, scaling = given["rope_parameters"] or {}, given["rope_scaling"] or {}
    if any(
        name not in LAYER_TYPES or not isinstance(parameters[name], dict) for name in parameters
    ):
        known = " and ".join(map(repr, LAYER_TYPES))
        raise unsupported("rope_parameters", parameters, f"RoPE under {known}")
    if scaling and "rope_type" not in scaling:
        raise unsupported("rope_scaling", scaling, "null, or an object with a rope_type")
    thetas = {_FULL: config.get("rope_theta"), _SLIDING: own["rope_local_base_freq"]}
    of_types = {}
    for kind in LAYER_TYPES:
        theta = thetas[kind] or _THETAS[kind]
        of_types[kind] = {"rope_type": "default", "rope_theta": theta, **parameters.get(kind, {})}
    of_types[_FULL] |= scaling
    return of_types
