"""EXAONE 4: norms after blocks, and of each head's query and key. In models with windows, layers
without a window have no RoPE.
"""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import LAYER_TYPES, HfConfig, read_key, unsupported
from graphengine.models.hf.decoder_config import composed, read_attention, read_mlp
from graphengine.models.sublayers import post_normed_layer

DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, windows="switched", biases=())
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
_FULL, _SLIDING = LAYER_TYPES
_PATTERN = 4


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of an `Exaone4ForCausalLM` checkpoint."""
    told = _MISSING | dict(config)
    hf_config.check_windows_on(told)
    types = _types(told)
    told |= {"layer_types": types, "use_sliding_window": _SLIDING in types}
    settings = hf_config.read_settings(told, DEFAULTS)
    mlp, count = read_mlp(settings), settings["num_hidden_layers"]
    # A window as long as the longest text hides nothing, but tells which layers have RoPE.
    kinds = types if _SLIDING in types else [_FULL] * count
    nope = told["sliding_window"] is not None
    layers = tuple(
        post_normed_layer(
            read_attention(settings, qk_norm=True, window=window, nope=nope and kind == _FULL), mlp
        )
        for window, kind in zip(settings["windows"] or (0,) * count, kinds, strict=True)
    )
    return composed(settings, architecture, layers, mlp=mlp)


def _types(told: dict[str, Any]) -> list[str]:
    """The type of each layer, from `layer_types` or a pattern, which is removed."""
    every = told.pop("sliding_window_pattern", _PATTERN)
    types, count = read_key(told, "layer_types"), read_key(told, "num_hidden_layers")
    if types is not None:
        return list(types)
    if told["sliding_window"] is None:
        return [_FULL] * count
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise unsupported("sliding_window_pattern", every, "1 or more, or layer_types")
    return hf_config.periodic_types(count, every)
