"""Gemma 4's language model: Gemma 3's layers whose heads differ between layers with a window and
without one.

Layers without a window have longer heads, of which RoPE rotates a part, and may have fewer kv
heads, whose keys are their values before norms. Values are normed, and each layer ends by
multiplying the stream by a learned factor. Each layer may have experts beside its feed-forward.
Checkpoints have towers beside the language model, or none in their unified form, which embeds
patches and sounds with a single linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from graphengine.kernels.experts.router import Router
from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.per_layer.layer_inputs import LayerInput, LayerInputs
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    GEMMA4_KEYS,
    KEYS,
    LAYER_TYPES,
    HfConfig,
    checked_language_model,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import composed, expert_count, read_attention, read_mlp
from graphengine.models.sublayers import Layer, Sublayer, usual_layer

# transformers' defaults for missing keys; other families require these keys.
_SIZES: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
# The unified form's, where they differ; it has no inputs of layers, and no experts.
_UNIFIED_PREFIX = "Gemma4Unified"
_UNIFIED = {
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
_FULL, _SLIDING = LAYER_TYPES
_ROPE = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
_GELU = "gelu_pytorch_tanh"
_HEADS = ("head_dim", "num_key_value_heads")
# Quantised files have a tensor for each linear of an expert.
_SINGLE = ExpertNames(router="router.proj", shared="mlp.")
_EXPERT_NAMES = _SINGLE._replace(
    products=("experts.gate_up_proj", "experts.down_proj"), ending="", other=_SINGLE
)
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=131_072,
    head_dim=256,
    windows="switched",
    keys=GEMMA4_KEYS,
    routes=True,
    rotated=None,
    biases=(),
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a Gemma 4 checkpoint, alone, beside towers, or unified."""
    told = _told(config, architecture)
    own = read_keys(told, GEMMA4_KEYS)
    _check(told, own, architecture)
    settings = hf_config.read_settings(told, DEFAULTS)
    heads = _heads_without_window(told, settings)
    rope, local_rope = _ropes(settings, heads)
    windows = settings["windows"] or (0,) * settings["num_hidden_layers"]
    return composed(
        settings,
        architecture,
        tuple(
            _layer(settings, heads, window, place)
            for window, place in zip(windows, _places(settings, windows), strict=True)
        ),
        layer_inputs=_layer_inputs(settings),
        rope=rope,
        local_rope=local_rope,
        embedding_scale=math.sqrt(settings["hidden_size"]),
        scales_in_embedding=True,
        logits_cap=settings["final_logit_softcapping"],
        bidirectional_images=architecture.endswith("ForConditionalGeneration")
        and settings["use_bidirectional_attention"] == "vision",
        causal_without_window=True,
    )


def _told(config: HfConfig, architecture: str) -> dict[str, Any]:
    """The language model's own config, with transformers' defaults and a type for each layer."""
    text = checked_language_model(config)
    tied = [each.get("tie_word_embeddings", True) for each in (config, text)]
    if tied[0] != tied[1]:
        raise unsupported("text_config.tie_word_embeddings", tied[1], f"{tied[0]}, as beside it")
    unified = _UNIFIED if architecture.startswith(_UNIFIED_PREFIX) else {}
    told: dict[str, Any] = {**_SIZES, **unified, **text}
    given = read_keys(told, KEYS)
    types = given["layer_types"]
    if types is None:
        types = hf_config.periodic_types(given["num_hidden_layers"], 6)
    if types and types[-1] == _SLIDING:
        # transformers forces this type on the last layer.
        types = [*types[:-1], _FULL]
    told |= {"layer_types": types, "use_sliding_window": _SLIDING in types}
    told["rope_parameters"] = given["rope_parameters"] or _ROPE
    return told


def _check(told: Mapping[str, Any], own: Mapping[str, Any], architecture: str) -> None:
    """ValueError for settings that no layer here implements."""
    if own["hidden_activation"] != _GELU:
        raise unsupported("hidden_activation", own["hidden_activation"], repr(_GELU))
    if own["use_bidirectional_attention"] not in (None, "vision"):
        raise unsupported(
            "use_bidirectional_attention", own["use_bidirectional_attention"], "null or 'vision'"
        )
    if own["enable_moe_block"] and architecture.startswith(_UNIFIED_PREFIX):
        raise unsupported("enable_moe_block", True, f"False in a {architecture}")
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if own["enable_moe_block"] and own[name] is None:
            raise unsupported(name, None, "an integer, as enable_moe_block is true")
    given = told["rope_parameters"]
    if given.keys() - set(LAYER_TYPES):
        raise unsupported("rope_parameters", given, " and ".join(map(repr, LAYER_TYPES)))


def _heads_without_window(told: HfConfig, settings: Mapping[str, Any]) -> dict[str, int]:
    """Size and number of kv heads of the layers without a window.

    Newer files list the layers that differ from the others, each with its differing values.
    """
    heads = {name: settings[name] for name in _HEADS}
    listed = settings["per_layer_config"]
    if listed is None:
        heads["head_dim"] = settings["global_head_dim"]
        if settings["attention_k_eq_v"] and settings["num_global_key_value_heads"] is not None:
            heads["num_key_value_heads"] = settings["num_global_key_value_heads"]
    else:
        full = [str(i) for i, kind in enumerate(told["layer_types"]) if kind == _FULL]
        first = listed.get(full[0], {}) if full else {}
        wanted = dict.fromkeys(full, first) if first else {}
        sizes = first.values() if isinstance(first, dict) else [None]
        if listed != wanted or first.keys() - set(_HEADS) or not all(map(_is_size, sizes)):
            raise unsupported(
                "per_layer_config",
                listed,
                f"{' and '.join(_HEADS)}, the same in all of the {len(full)} {_FULL!r} layers",
            )
        heads |= first
    hf_config.check_heads({**settings, **heads})
    return heads


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ropes(
    settings: dict[str, Any], heads: Mapping[str, int]
) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of the layers without a window, and of those with one."""
    full = hf_config.rope(settings | {"head_dim": heads["head_dim"]})
    local = (hf_config.local_rope(settings) or full) if settings["windows"] else None
    for rope in (full, local):
        if rope is not None and rope.kind != "proportional" and rope.rotated != 1:
            raise unsupported(
                "rope_parameters", settings["rope_parameters"], "parts of heads as 'proportional'"
            )
    return full, local


class _Place(NamedTuple):
    """Whether a layer's attention reuses an earlier one's keys and values, or lends its own."""

    reuses: bool
    lends: bool


def _places(settings: Mapping[str, Any], windows: Sequence[int]) -> list[_Place]:
    """The place of each layer: the last layers reuse keys and values of the last layers before
    them.

    ValueError where none before them has the same window.
    """
    layers, shared = len(windows), settings["num_kv_shared_layers"]
    own = layers - shared
    lending = {window: index for index, window in enumerate(windows[: max(0, own)])}
    if shared and set(windows) != lending.keys():
        raise unsupported(
            "num_kv_shared_layers", shared, f"fewer of {layers} layers, with each type before them"
        )
    return [
        _Place(index >= own, bool(shared) and index == lending[window])
        for index, window in enumerate(windows)
    ]


def _layer_inputs(settings: Mapping[str, Any]) -> LayerInputs | None:
    """The per-layer embeddings, if the model has any."""
    size, rows = settings["hidden_size_per_layer_input"], settings["vocab_size_per_layer_input"]
    if not size:
        return None
    if rows < settings["vocab_size"]:
        raise unsupported(
            "vocab_size_per_layer_input", rows, f"vocab_size={settings['vocab_size']} or more"
        )
    pad = settings["pad_token_id"]
    return LayerInputs(
        size=size, rows=rows, pad=min(pad, rows - 1), norm_eps=settings["rms_norm_eps"]
    )


def _layer(settings: dict[str, Any], heads: Mapping[str, int], window: int, place: _Place) -> Layer:
    """A layer; heads differ without a window, and so do the names of their linears."""
    sizes = settings if window else {**settings, **heads}
    projected: Literal["qkv", "qk", "q"] = "qkv"
    if place.reuses:
        projected = "q"
    elif settings["attention_k_eq_v"] and not window:
        projected = "qk"
    kinds = {"qkv": "", "qk": "", "q": "reusing_"}
    attention = read_attention(
        sizes,
        window=window,
        scale_of=1.0,
        qk_norm=True,
        value_norm=True,
        projected=projected,
        lends=place.lends,
        role=kinds[projected] + ("" if window else "full_"),
    )
    wide = settings["use_double_wide_mlp"] and place.reuses
    mlp = read_mlp(
        settings,
        activation="gelu_tanh",
        ffn_size=settings["intermediate_size"] * (2 if wide else 1),
        role="wide_" if wide else "",
    )
    layer = usual_layer(attention, mlp, post_norms=True)
    if settings["enable_moe_block"]:
        experts = _experts(settings, mlp)
        layer = (*layer[:-1], layer[-1]._replace(prefix="", block=experts))
    size = settings["hidden_size_per_layer_input"]
    if size:
        taken = LayerInput(
            hidden_size=settings["hidden_size"], size=size, norm_eps=settings["rms_norm_eps"]
        )
        layer = (*layer, Sublayer("", "", taken, "post_per_layer_input_norm"))
    return (*layer[:-1], layer[-1]._replace(factor="layer_scalar"))


def _experts(settings: dict[str, Any], beside: Swiglu) -> Experts:
    """The experts, and the feed-forward beside them."""
    return Experts(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["moe_intermediate_size"],
        experts=expert_count(settings, "num_experts", "top_k_experts"),
        # Probabilities of all experts, divided by the sum of the chosen ones'.
        router=Router(top_k=settings["top_k_experts"], scores="softmax_of_chosen"),
        norm_eps=settings["rms_norm_eps"],
        shared=beside,
        gating="gelu_tanh",
        own_norms=True,
        names=_EXPERT_NAMES,
    )
