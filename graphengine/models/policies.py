"""A policy's `config.json`: a language model for the prefix, an expert for the actions.

Two forms are read: transformers' (`PI0ForConditionalGeneration`, with a config of each model), and
LeRobot's (`"type": "pi0"`, which names both models by their size).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families import gemma
from graphengine.models.hf.config_schema import HfConfig, Key, read_keys, unsupported
from graphengine.options.checks import INT32_MAX

ARCHITECTURE = "PI0ForConditionalGeneration"
PALIGEMMA_VOCABULARY = 257_152
MOST_STEPS = 1000
"""The most denoising steps of a chunk, each of which is a part of the graph."""


def _gemma_variant(hidden: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": PALIGEMMA_VOCABULARY,
    }


_VARIANTS = {"gemma_2b": _gemma_variant(2048, 16_384), "gemma_300m": _gemma_variant(1024, 4096)}
# transformers' defaults for missing keys of each model.
_DEFAULTS = {"vlm_config": "gemma_2b", "dit_config": "gemma_300m"}
# Far beyond any useful period; sines of times are still finite in float32.
_PERIODS = (1e-9, 1e9)
_KEYS = (
    Key("chunk_size", "integer", (1, INT32_MAX), default=50),
    Key("max_state_dim", "integer", (1, INT32_MAX), default=32),
    Key("max_action_dim", "integer", (1, INT32_MAX), default=32),
    Key("num_inference_steps", "integer", (1, MOST_STEPS), default=10),
    # LeRobot's older name of `num_inference_steps`.
    Key("num_steps", "integer", (1, MOST_STEPS), default=None, null=True),
    Key("min_period", "number", _PERIODS, default=4e-3),
    Key("max_period", "number", _PERIODS, default=4.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """A flow-matching policy: pi0 (Black et al. 2024).

    prefix      the language model that reads images and text
    expert      the model of state and actions; its layers also attend to the KV of `prefix`
    horizon     actions of a chunk
    state_dim   values of a robot's state
    action_dim  values of an action
    steps       denoising steps
    periods     shortest and longest period of the embedding of time
    """

    prefix: DecoderConfig
    expert: DecoderConfig
    horizon: int
    state_dim: int
    action_dim: int
    steps: int
    periods: tuple[float, float]


def is_policy(config: HfConfig) -> bool:
    """Whether a `config.json` is that of a policy, which `Policy` opens and `Engine` does not."""
    named = config.get("model_type") == "pi0" or config.get("architectures") == [ARCHITECTURE]
    return named or config.get("type") == "pi0"


def read_policy_config(config: HfConfig) -> PolicyConfig:
    """The policy of a `config.json`. ValueError, with key and value, for anything not supported."""
    if not is_policy(config):
        key, wanted = ("architectures", ARCHITECTURE) if "type" not in config else ("type", "pi0")
        raise unsupported(key, config.get(key), f"{wanted!r}; `Engine` opens language models")
    if config.get("type") == "pi0":
        parts = {
            "vlm_config": _variant(config, "paligemma_variant", "gemma_2b"),
            "dit_config": _variant(config, "action_expert_variant", "gemma_300m"),
        }
    else:
        parts = {name: _part(config, name) for name in _DEFAULTS}
    prefix = gemma.read_config(parts["vlm_config"], ARCHITECTURE)
    # Actions have no tokens: its embedding is never read.
    expert = replace(gemma.read_config(parts["dit_config"], ARCHITECTURE), vocab_size=1)
    if expert.hidden_size % 2:
        wanted = "an even number: sines and cosines of time"
        raise unsupported("dit_config.hidden_size", expert.hidden_size, wanted)
    _check_states(prefix, expert)
    sizes = read_keys(config, _KEYS)
    steps = sizes["num_inference_steps"]
    if "num_inference_steps" not in config and sizes["num_steps"] is not None:
        steps = sizes["num_steps"]
    return PolicyConfig(
        prefix=prefix,
        expert=expert,
        horizon=sizes["chunk_size"],
        state_dim=sizes["max_state_dim"],
        action_dim=sizes["max_action_dim"],
        steps=steps,
        periods=(sizes["min_period"], sizes["max_period"]),
    )


def _variant(config: HfConfig, key: str, default: str) -> dict[str, Any]:
    name = config.get(key, default)
    if not isinstance(name, str) or name not in _VARIANTS:
        raise unsupported(key, name, ", ".join(map(repr, _VARIANTS)))
    return _VARIANTS[name]


def _part(config: HfConfig, key: str) -> dict[str, Any]:
    """The config of one of the two models, with transformers' defaults."""
    told, defaults = config.get(key) or {}, _VARIANTS[_DEFAULTS[key]]
    if not isinstance(told, Mapping):
        raise unsupported(key, told, "a JSON object")
    if key == "vlm_config":
        if told.get("model_type", "paligemma") != "paligemma":
            raise unsupported(f"{key}.model_type", told["model_type"], "'paligemma'")
        told, key = told.get("text_config") or {}, f"{key}.text_config"
        if not isinstance(told, Mapping):
            raise unsupported(key, told, "a JSON object")
    if told.get("model_type", "gemma") != "gemma":
        raise unsupported(f"{key}.model_type", told["model_type"], "'gemma'")
    told = dict(told)
    # A policy builds its own masks; the key only selects how transformers builds them.
    seen = told.pop("use_bidirectional_attention", None)
    if seen not in (None, True):
        raise unsupported(f"{key}.use_bidirectional_attention", seen, "null or true")
    return {**defaults, **told}


def _check_states(prefix: DecoderConfig, expert: DecoderConfig) -> None:
    if prefix.states != expert.states:
        raise ValueError(
            f"config.json: layers of dit_config keep {_shown(expert)}, those of vlm_config "
            f"{_shown(prefix)}: layers, KV heads and head_dim must be the same, as the former read "
            f"the KV of the latter"
        )


def _shown(config: DecoderConfig) -> str:
    entries = sorted({str(state) for layer in config.states for state in layer})
    return f"{len(config.states)} layers of {', '.join(entries)}"
