"""Reading of Hugging Face's `config.json`, with errors that name the field and the value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from graphengine.kernels import RopeConfig

HfConfig = Mapping[str, Any]

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_HEAD_DIMS = (64, 80, 96, 128, 256)


def positive_int(config: HfConfig, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json lacks {key!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json has {key}={value!r}: must be a positive integer")
    return value


def flag(config: HfConfig, key: str) -> bool:
    """A switch that is off where the config does not name it."""
    return bool(config.get(key) or False)


def require_value(config: HfConfig, key: str, supported: tuple[Any, ...]) -> None:
    """Refuse a value that changes the computation in a way this engine does not implement."""
    value = config.get(key, supported[0])
    if value not in supported:
        listed = ", ".join(repr(item) for item in supported)
        raise ValueError(f"config.json has {key}={value!r}: supported: {listed}")


def head_dim(config: HfConfig, default: int) -> int:
    """The configured head size, or the family's default; one that the attention kernels serve."""
    value = positive_int(config, "head_dim", default)
    if value not in _HEAD_DIMS:
        raise ValueError(f"config.json gives head_dim={value}: supported: {_HEAD_DIMS}")
    return value


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )


def rope(config: HfConfig, *, max_positions: int) -> RopeConfig:
    """RoPE settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta: Any = settings.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ValueError(f"config.json has rope type {kind!r}: supported: {', '.join(_ROPE_KINDS)}")
    if config.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json has a partial_rotary_factor other than 1.0: not supported")
    original = settings.get("original_max_position_embeddings", max_positions)
    names = [field.name for field in fields(RopeConfig)]
    known = {name: settings[name] for name in names if settings.get(name) is not None}
    known |= {"kind": kind, "theta": float(theta), "original_max_position_embeddings": original}
    return RopeConfig(**known)
