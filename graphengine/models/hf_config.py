"""How the families read `config.json`, with errors that name the key and the value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from graphengine.checks import shown
from graphengine.kernels import RopeConfig, RopeKind
from graphengine.models.config_schema import (
    KEYS,
    ROPE_KEYS,
    HfConfig,
    Key,
    check_neutral,
    read_keys,
    unsupported,
)

_ROPE_KINDS: Sequence[RopeKind] = get_args(RopeKind)
HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head sizes that the attention kernels are tested and tuned for."""

# What each kind of RoPE must be told; transformers has no default for these either.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyDefaults:
    """What transformers takes where a family's config says nothing.

    head_dim         None: hidden_size over num_attention_heads
    sliding_windows  whether the family has `use_sliding_window`, off by default; in the others a
                     window alone says that there is one
    keys             that it reads besides `config_schema.KEYS`
    """

    max_positions: int
    head_dim: int | None = None
    sliding_windows: bool = False
    keys: tuple[Key, ...] = ()


def read_settings(config: HfConfig, family: FamilyDefaults) -> dict[str, Any]:
    """The values of `config_schema.KEYS`, with the family's keys and defaults, all of them checked.

    ValueError, with key, value and what is supported, for a key that is wrong, or that says that
    the model computes what no family here does.
    """
    # How weights and KV are quantised changes nothing of what is computed: `read_model` reads it.
    config = {**config, "quantization_config": None}
    check_neutral(config, family.keys)
    settings = read_keys(config, KEYS + family.keys)
    if settings["max_position_embeddings"] is None:
        settings["max_position_embeddings"] = family.max_positions
    heads = settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = heads
    if heads % settings["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={settings['num_key_value_heads']}"
        )
    if settings["head_dim"] is None:
        settings["head_dim"] = family.head_dim or settings["hidden_size"] // heads
    if settings["head_dim"] not in HEAD_DIMS:
        raise ValueError(
            f"config.json gives head_dim={settings['head_dim']}: supported: {HEAD_DIMS}"
        )
    if settings["hidden_act"] not in ("silu", "swish"):
        raise unsupported("hidden_act", settings["hidden_act"], "'silu', 'swish'")
    _check_layers(config, settings, family)
    return settings


def _check_layers(config: HfConfig, settings: dict[str, Any], family: FamilyDefaults) -> None:
    """Refuse windows of attention and layers that differ from each other."""
    for name, supported in (
        ("layer_types", ("full_attention", "attention")),
        ("mlp_layer_types", ("dense",)),
    ):
        types = settings[name]
        if any(kind not in supported for kind in types or ()):
            raise unsupported(name, types, f"{supported[0]!r} in every layer")
    window, used = settings["sliding_window"], settings["use_sliding_window"]
    has_none = window is None and "sliding_window" in config
    if used and not has_none:
        raise unsupported("use_sliding_window", used, "False")
    windowed = window is not None and 0 < window < settings["max_position_embeddings"]
    if windowed and used is None and not family.sliding_windows:
        raise unsupported("sliding_window", window, "null, or use_sliding_window=False")


def rope(settings: dict[str, Any]) -> RopeConfig:
    """RoPE of `rope_scaling`, else of `rope_parameters`, as transformers takes them.

    Where both are there, transformers reads nothing of `rope_parameters`.
    """
    inside = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    given = _of_full_attention(inside, settings[inside] or {})
    values = read_keys(given, ROPE_KEYS, inside=inside)
    named = values["rope_type"] or values["type"] or "default"
    kind = next((kind for kind in _ROPE_KINDS if kind == named), None)
    if kind is None:
        known = f"RoPE of type {', '.join(_ROPE_KINDS)}"
        raise unsupported(f"{inside}.rope_type", named, known)
    rotated = values["partial_rotary_factor"]
    rotated = settings["partial_rotary_factor"] if rotated is None else rotated
    if rotated != 1.0:
        raise unsupported("partial_rotary_factor", rotated, "1.0")
    theta = values["rope_theta"] or settings["rope_theta"]
    if kind == "default":
        return RopeConfig(theta=theta)
    positions = settings["max_position_embeddings"]
    # A key beside the RoPE settings takes precedence over one inside, as in transformers.
    original = settings["original_max_position_embeddings"]
    original = original or values["original_max_position_embeddings"] or positions
    if kind == "yarn" and "factor" in given and values["factor"] is None:
        values["factor"] = positions / original
    for name in _ROPE_NEEDS[kind]:
        if values[name] is None:
            raise ValueError(
                f"config.json has {inside}={shown(given)}: RoPE of type {kind!r} needs {name}"
            )
    names = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale")
    numbers = {name: values[name] for name in (*names, "mscale_all_dim")}
    # Zero turns mean the default.
    numbers |= {name: values[name] or None for name in ("beta_fast", "beta_slow")}
    return RopeConfig(
        kind=kind,
        theta=theta,
        original_max_position_embeddings=original,
        truncate=values["truncate"],
        **{name: value for name, value in numbers.items() if value is not None},
    )


def _of_full_attention(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings of the layers here, where they are told apart by layer type."""
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    if not nested:
        return given
    if "full_attention" not in nested or any(
        given[key] is not None for key in given.keys() - nested
    ):
        raise unsupported(name, given, "RoPE of all layers, or under 'full_attention'")
    full: dict[str, Any] = given["full_attention"]
    return full
