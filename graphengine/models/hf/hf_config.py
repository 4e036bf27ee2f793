"""How the families read `config.json`, with errors that name the key and the value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from graphengine.kernels.attention.decode import MAX_HEAD_DIM
from graphengine.kernels.norm_rope.rope_config import RopeConfig, RopeKind
from graphengine.models.hf.config_schema import (
    KEYS,
    LAYER_TYPES,
    NEUTRAL_ROPE,
    ROPE_KEYS,
    HfConfig,
    Key,
    check_epsilons,
    check_neutral,
    read_keys,
    unsupported,
)
from graphengine.models.hf.neutral_keys import NEUTRAL_ROUTING
from graphengine.options.checks import shown
from graphengine.options.devices import DTYPES

_ROPE_KINDS: Sequence[RopeKind] = get_args(RopeKind)

# Keys that each kind of RoPE requires; transformers has no default for these either.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "dynamic": ("factor",),
    "proportional": (),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyDefaults:
    """transformers' defaults for a family's missing keys, and what the family supports.

    head_dim  None: hidden_size over num_attention_heads
    windows   "none": the family has no windows; "all": `sliding_window` is for all layers;
              "switched": only with `use_sliding_window`, and for the layers that `layer_types`, or
              else `max_window_layers`, names
    keys      keys that the family reads besides `config_schema.KEYS`
    routes    whether layers have experts that tokens are routed to
    latent    whether attention is latent: no head has size head_dim then, and it is not checked
    rotated   fractions of a head that RoPE may rotate; None: any with an even number of values
    biases    the keys of linears' biases that may be true
    fixed     keys of properties that the family always has, and the values that such keys must have
    """

    max_positions: int
    head_dim: int | None = None
    windows: Literal["none", "all", "switched"] = "none"
    keys: tuple[Key, ...] = ()
    routes: bool = False
    latent: bool = False
    rotated: tuple[float, ...] | None = (1.0,)
    biases: tuple[str, ...] = ("attention_bias",)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def read_settings(config: HfConfig, family: FamilyDefaults) -> dict[str, Any]:
    """The checked values of `config_schema.KEYS` and the family's keys, with its defaults.

    ValueError, with key, value and what is supported, for a key that is wrong, or that asks for a
    computation that no family here does.
    """
    # Quantisation of weights and KV does not change the architecture; `read_model` reads it.
    config = {**config, "quantization_config": None}
    known = [*family.fixed, *(key.name for key in family.keys)]
    check_neutral(config, known)
    check_neutral(config, table=family.fixed)
    if family.routes:
        check_neutral(config, known, NEUTRAL_ROUTING)
    settings = read_keys(config, KEYS + family.keys)
    check_epsilons(config, settings)
    for name in ("attention_bias", "mlp_bias"):
        if settings[name] and name not in family.biases:
            raise unsupported(name, True, "null or False")
    if settings["max_position_embeddings"] is None:
        settings["max_position_embeddings"] = family.max_positions
    heads = settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = heads
    if settings["head_dim"] is None:
        settings["head_dim"] = family.head_dim or settings["hidden_size"] // heads
    check_heads(settings, latent=family.latent)
    if settings["hidden_act"] not in ("silu", "swish"):
        raise unsupported("hidden_act", settings["hidden_act"], "'silu', 'swish'")
    types = settings["mlp_layer_types"]
    if family.routes and types is not None:
        # Other keys say which layers have experts.
        raise unsupported("mlp_layer_types", types, "null")
    if any(kind != "dense" for kind in types or ()):
        raise unsupported("mlp_layer_types", types, "'dense' in every layer")
    settings["windows"] = _read_windows(config, settings, family)
    settings["rotated"] = family.rotated
    return settings


def check_heads(settings: Mapping[str, Any], *, latent: bool = False) -> None:
    """ValueError for heads that attention does not have.

    latent  whether the size of heads is not read
    """
    heads, head_dim = settings["num_attention_heads"], settings["head_dim"]
    if heads % settings["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={settings['num_key_value_heads']}"
        )
    if not latent and (head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM):
        raise ValueError(
            f"config.json gives head_dim={head_dim}: supported: even numbers in [2, {MAX_HEAD_DIM}]"
        )


# transformers' default for every family that has windows.
_DEFAULT_WINDOW = 4096


def _read_windows(
    config: HfConfig, settings: dict[str, Any], family: FamilyDefaults
) -> tuple[int, ...]:
    """Each layer's window, 0 for none; empty where no layer has one."""
    types = _layer_types(settings)
    window, used = settings["sliding_window"], settings["use_sliding_window"]
    is_null = window is None and "sliding_window" in config
    if family.windows != "none" and window is None and not is_null:
        window = _DEFAULT_WINDOW
    if family.windows == "none" or (family.windows == "switched" and not used):
        window = None
    _check_windows(settings, family, window, types)
    if window is None:
        return ()
    layers = settings["num_hidden_layers"]
    if types is not None:
        of_layers = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    elif family.windows == "switched":
        full = min(settings["max_window_layers"], layers)
        of_layers = (0,) * full + (window,) * (layers - full)
    else:
        of_layers = (window,) * layers
    # A window as long as the longest text hides nothing; it counts only where layers with a window
    # have another RoPE.
    hides = window < settings["max_position_embeddings"] or _is_nested(_rope_key(settings)[1])
    return of_layers if hides and any(of_layers) else ()


def _layer_types(settings: dict[str, Any]) -> list[str] | None:
    """One of `LAYER_TYPES` for each layer, or None where the config does not say.

    If all entries are full attention, their number does not matter.
    """
    types: list[str] | None = settings["layer_types"]
    if types is None:
        return None
    # The name of full attention in older files.
    types = ["full_attention" if kind == "attention" else kind for kind in types]
    if all(kind == "full_attention" for kind in types):
        return ["full_attention"] * settings["num_hidden_layers"]
    known = " or ".join(map(repr, LAYER_TYPES))
    layers = settings["num_hidden_layers"]
    if any(kind not in LAYER_TYPES for kind in types) or len(types) != layers:
        raise unsupported("layer_types", settings["layer_types"], f"{layers} times {known}")
    return types


def _check_windows(
    settings: dict[str, Any],
    family: FamilyDefaults,
    window: int | None,
    types: Sequence[str] | None,
) -> None:
    """Refuse settings that contradict each other, and windows where the family has none."""
    given, used = settings["sliding_window"], settings["use_sliding_window"]
    slides = "sliding_attention" in (types or ())
    if family.windows == "none":
        if used:
            raise unsupported("use_sliding_window", used, "False")
        hides = given is not None and 0 < given < settings["max_position_embeddings"]
        if hides and used is None:
            raise unsupported("sliding_window", given, "null, or use_sliding_window=False")
        if slides:
            raise unsupported("layer_types", types, "'full_attention' in every layer")
        return
    if window is None and slides:
        shown_window = "use_sliding_window=True and a sliding_window"
        if family.windows == "all":
            shown_window = "a sliding_window"
        raise unsupported("layer_types", types, f"'full_attention', or {shown_window}")
    if window is not None and window < 1:
        raise unsupported("sliding_window", window, "null, or 1 or more")
    if family.windows == "all" and window is not None:
        if used is False:
            raise unsupported("use_sliding_window", used, "null beside a sliding_window")
        if "full_attention" in (types or ()):
            raise unsupported("layer_types", types, "'sliding_attention' in every layer")


def check_windows_on(config: HfConfig) -> None:
    """ValueError where windows are switched off by a key that transformers ignores."""
    if config.get("use_sliding_window") not in (None, True):
        raise unsupported("use_sliding_window", config["use_sliding_window"], "null or True")


def periodic_types(layers: int, period: int) -> list[str]:
    """A type for each layer: of `period` consecutive ones, the last has no window."""
    full, sliding = LAYER_TYPES
    return [sliding if (index + 1) % period else full for index in range(layers)]


def types_of_layers(
    types: Any, settings: dict[str, Any], known: Sequence[str], attending: Collection[str]
) -> list[str]:
    """A hybrid's `layer_types`: one of the `known` for each layer, at least one that attends."""
    layers = settings["num_hidden_layers"]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in known for kind in types)
        or not any(kind in attending for kind in types)
    ):
        names = " or ".join(map(repr, known))
        raise unsupported("layer_types", types, f"{layers} of {names}, one that attends among them")
    return types


def of_one_axis(config: HfConfig) -> dict[str, Any]:
    """The config for text alone, where RoPE has a single axis.

    Multi-axis RoPE is the same as with one axis if a token has the same position on all of them.
    """
    told = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        given = told.get(name)
        if isinstance(given, dict):
            kept = {key: each for key, each in given.items() if key not in NEUTRAL_ROPE}
            if given.get("mrope_section") is not None and kept.get("type") == "mrope":
                # An older name for RoPE with these axes and nothing else.
                del kept["type"]
            told[name] = kept
    return told


def with_axes(rope: RopeConfig, config: HfConfig) -> RopeConfig:
    """A model's RoPE with the axes that its config gives, if it gives any (M-RoPE)."""
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if not isinstance(given, dict) or (sections := given.get("mrope_section")) is None:
            continue
        sizes = sections if isinstance(sections, list) else []
        if len(sizes) != 3 or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise unsupported(f"{name}.mrope_section", sections, "three numbers of pairs, or null")
        return replace(
            rope, sections=tuple(sizes), interleaved=bool(given.get("mrope_interleaved"))
        )
    return rope


def state_dtype(settings: dict[str, Any], name: str) -> torch.dtype:
    """The dtype of recurrent layers' states, from the key of this name."""
    told: str = settings[name]
    if told not in DTYPES:
        raise unsupported(name, told, ", ".join(map(repr, DTYPES)))
    return DTYPES[told]


def rope(settings: dict[str, Any]) -> RopeConfig:
    """RoPE of `rope_scaling`, else of `rope_parameters`, as transformers takes them.

    Where both are there, transformers reads nothing of `rope_parameters`.
    """
    inside, given = _rope_settings(settings, "full_attention")
    return _rope_of(settings, inside, given)


def local_rope(settings: dict[str, Any]) -> RopeConfig | None:
    """RoPE of the layers with a window; None where all layers have the same RoPE."""
    inside, given = _rope_settings(settings, "sliding_attention")
    if not settings["windows"] or not _is_nested(settings[inside] or {}):
        return None
    local = _rope_of(settings, inside, given)
    return None if local == rope(settings) else local


def _rope_of(settings: dict[str, Any], inside: str, given: dict[str, Any]) -> RopeConfig:
    values = read_keys(given, ROPE_KEYS, inside=inside)
    named = values["rope_type"] or values["type"] or "default"
    kind = next((kind for kind in _ROPE_KINDS if kind == named), None)
    if kind is None:
        known = f"RoPE of type {', '.join(_ROPE_KINDS)}"
        raise unsupported(f"{inside}.rope_type", named, known)
    rotated = values["partial_rotary_factor"]
    rotated = settings["partial_rotary_factor"] if rotated is None else rotated
    known = settings["rotated"]
    if known is not None and rotated not in known:
        raise unsupported("partial_rotary_factor", rotated, " or ".join(map(str, known)))
    theta = values["rope_theta"] or settings["rope_theta"]
    if kind == "default":
        return _checked(RopeConfig(theta=theta, rotated=rotated), settings)
    positions = settings["max_position_embeddings"]
    # A key next to the RoPE settings takes precedence over one inside, as in transformers.
    original = settings["original_max_position_embeddings"]
    original = original or values["original_max_position_embeddings"] or positions
    if kind == "dynamic":
        # Dynamic RoPE counts from here, whatever else the config says.
        original = positions
    stretched = kind == "longrope" or (kind == "yarn" and "factor" in given)
    if stretched and values["factor"] is None:
        values["factor"] = positions / original
    for name in _ROPE_NEEDS[kind]:
        if values[name] is None:
            raise ValueError(
                f"config.json has {inside}={shown(given)}: RoPE of type {kind!r} needs {name}"
            )
    names = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale")
    numbers = {name: values[name] for name in (*names, "mscale_all_dim")}
    # Zero counts as missing and means the default.
    numbers |= {name: values[name] or None for name in ("beta_fast", "beta_slow")}
    numbers |= {name: values[name] for name in ("short_factor", "long_factor")}
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        original_max_position_embeddings=original,
        truncate=values["truncate"],
        rotated=rotated,
        **{name: value for name, value in numbers.items() if value is not None},
    )
    return _checked(rope, settings)


def _checked(rope: RopeConfig, settings: dict[str, Any]) -> RopeConfig:
    """The RoPE, if it fits the heads; else ValueError."""
    try:
        rope.pairs(settings["head_dim"])
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error
    return rope


def _rope_key(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key that has RoPE's settings, and its value."""
    inside = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    return inside, settings[inside] or {}


def _is_nested(given: dict[str, Any]) -> bool:
    """Whether RoPE has separate settings for each layer type."""
    return any(isinstance(value, dict) for value in given.values())


def _rope_settings(settings: dict[str, Any], layer_type: str) -> tuple[str, dict[str, Any]]:
    """The key that has RoPE's settings, and the settings for layers of this type.

    Settings may be missing for a type that no layer has.
    """
    inside, given = _rope_key(settings)
    if not _is_nested(given):
        return inside, given
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    wanted = ["full_attention"]
    if settings["windows"]:
        wanted = [kind for kind, here in zip(LAYER_TYPES, _kinds(settings), strict=True) if here]
    if any(kind not in nested for kind in wanted) or any(
        given[key] is not None for key in given.keys() - nested
    ):
        under = " and ".join(map(repr, wanted))
        raise unsupported(inside, given, f"RoPE of all layers, or under {under}")
    of_type: dict[str, Any] = given.get(layer_type) or given[wanted[0]]
    return inside, of_type


def _kinds(settings: dict[str, Any]) -> tuple[bool, bool]:
    """Whether there are layers of each of `LAYER_TYPES`."""
    windows: tuple[int, ...] = settings["windows"]
    return (0 in windows or not windows, any(windows))
