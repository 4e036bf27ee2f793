"""Ministral 3: Mistral with YaRN, up to the position where it begins to scale queries.

From `original_max_position_embeddings` on, transformers multiplies a query by 1 + beta * log(1 +
position // original_max_position_embeddings), where beta is `llama_4_scaling_beta`. Before that the
factor is 1. The engine has no such factor, so sequences end there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families import mistral
from graphengine.models.hf.config_schema import HfConfig, Key, read_keys
from graphengine.options.checks import INT32_MAX

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# transformers' defaults for missing keys, where Mistral has different ones.
_MISSING: dict[str, Any] = {
    "max_position_embeddings": 262_144,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _ROPE,
}
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_SCALING = (
    Key(_BETA, "number", (0, 1e6), default=0.0, null=True),
    Key(_ORIGINAL, "integer", (1, INT32_MAX), default=INT32_MAX, null=True),
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Ministral3ForCausalLM` checkpoint."""
    told = {**_MISSING, **config}
    longest = INT32_MAX
    for name in ("rope_parameters", "rope_scaling"):
        given = told[name] if isinstance(told.get(name), dict) else {}
        scaling = read_keys(given, _SCALING, inside=name)
        if scaling[_BETA]:
            longest = min(longest, scaling[_ORIGINAL])
            told[name] = {key: value for key, value in given.items() if key != _BETA}
    model = mistral.read_config(told, architecture)
    return replace(model, max_positions=min(longest, model.max_positions))
