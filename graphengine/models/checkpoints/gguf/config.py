"""Translates a GGUF file's metadata to the keys of Hugging Face's `config.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphengine.models.checkpoints.gguf.families import (
    COUNT,
    FAMILIES,
    WITH_EXPERTS,
    GgufFamily,
)
from graphengine.models.checkpoints.gguf.file import GgufFile
from graphengine.options.checks import shown, some

_LLAMA_3 = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (_LLAMA_3, _SHORT, _LONG)
"""Tensors of factors by which each pair of a head is slowed: Llama 3's, and LongRoPE's two."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_NEEDED = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
_DRAFT_LAYERS = "nextn_predict_layers"
_WIDTHS = ("attention.key_length", "attention.value_length")
# Sizes that are used here; the models' configs check the others.
_COUNTS = (
    *("embedding_length", "block_count", "attention.head_count", "rope.dimension_count"),
    *_WIDTHS,
)
_ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Keys that are read elsewhere, or do not affect the arithmetic.
_OTHER_KEYS = (
    *("vocab_size", "rope.dimension_count", "rope.scaling.type", "rope.scale_linear"),
    *("attention.value_length", "rope.scaling.finetuned", "tensor_data_layout"),
)
# The values that other keys may have, as the result is the same without them.
_ATTENTION_FACTOR = "rope.scaling.attn_factor"
_NEUTRAL = {"attention.causal": True, _ATTENTION_FACTOR: 1.0}
# Trained lengths of Llama 3's RoPE that are tried, and the factors of all of its releases.
_TRAINED = tuple(2**power for power in range(9, 21))
_LOW, _HIGH = 1.0, 4.0
# Layers of Gemma 2 and 3 with 27B parameters, whose attention has another scale.
_GEMMA_27B = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


def family_of(file: GgufFile) -> GgufFamily:
    """The file's architecture. ValueError, with the known ones, for any other."""
    name = file.value("general.architecture", str)
    if name not in FAMILIES:
        raise ValueError(
            f"{file.path} has general.architecture={shown(name)}: GGUF files are read of "
            f"{', '.join(FAMILIES)}; open the safetensors checkpoint of other models"
        )
    if name in WITH_EXPERTS and file.metadata.get(f"{name}.{COUNT}"):
        return WITH_EXPERTS[name]
    return FAMILIES[name]


def read_gguf_config(file: GgufFile, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The model's `config.json`, without the keys of the weights' format.

    factors  values of the tensors in `ROPE_FACTORS`, as far as the file has them

    ValueError names a key that is missing, or not understood.
    """
    family, prefix = family_of(file), f"{file.metadata['general.architecture']}."
    own = {
        key.removeprefix(prefix): _plain(value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    if _LONG in factors:
        own.setdefault("rope.scaling.type", "longrope")
    _check_keys(file, family, prefix, own)
    names = {**_KEYS, **family.keys}
    config = {name: own[key] for key, name in names.items() if key in own}
    config = {"architectures": [family.architecture], **family.fixed, **config}
    config["vocab_size"] = _vocabulary(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["eos_token_id"] = _end_ids(file)
    for name, tensor in family.biases.items():
        config[name] = f"blk.0.{tensor}" in file.tensors
    # These layers come last in the file, and are no layers of the model.
    config["num_hidden_layers"] -= own.get(_DRAFT_LAYERS, 0)
    if config.get("sliding_window") == 0:
        # Files of models without a window, such as Phi-4, may say so with 0.
        config["sliding_window"] = None
    if "layer_types" in config:
        config["layer_types"] = _window_types(config)
    if family.more is not None:
        config |= family.more(file, own, config)
    if family.architecture in _GEMMA_27B:
        config["query_pre_attn_scalar"] = _gemma_scalar(config, _GEMMA_27B[family.architecture])
    _read_rope(own, config, family)
    if any(factor != 1 for factor in factors.get(_LLAMA_3, ())):
        config["rope_scaling"] = _llama3(file, factors[_LLAMA_3], config)
    if _LONG in factors and _SHORT in factors:
        kind = own["rope.scaling.type"]
        if kind != "longrope":
            raise ValueError(
                f"{file.path} has {prefix}rope.scaling.type={shown(kind)} and the tensors {_SHORT} "
                f"and {_LONG}, which are of type 'longrope'"
            )
        config["rope_scaling"] |= {
            "short_factor": [_plain(factor) for factor in factors[_SHORT]],
            "long_factor": [_plain(factor) for factor in factors[_LONG]],
        }
    return config


def with_metadata_keys(message: str, config: Mapping[str, Any]) -> str:
    """An error about the config that `read_gguf_config` made; it also says which metadata keys the
    values are from.
    """
    architecture = config["architectures"][0]
    name, family = next(
        (name, each)
        for name, each in (*FAMILIES.items(), *WITH_EXPERTS.items())
        if architecture in (each.architecture, each.older)
    )
    keys = {**_KEYS, **family.keys, **_ROPE_KEYS}
    words = set(re.findall(r"\w+", message))
    sources = [f"{each} from {name}.{key}" for key, each in keys.items() if each in words]
    if not sources:
        return f"{message} (the config is made of the file's metadata)"
    return f"{message} (the config is made of the file's metadata: {', '.join(sources)})"


def _check_keys(file: GgufFile, family: GgufFamily, prefix: str, own: Mapping[str, Any]) -> None:
    epsilon = next((key for key in _EPSILONS if key in family.keys), _EPSILONS[1])
    missing = [prefix + key for key in (*_NEEDED, epsilon) if key not in own]
    if missing:
        raise ValueError(f"{file.path} lacks the metadata keys {some(missing)}")
    known = {*_KEYS, *family.keys, *family.read, *family.scaling, *_ROPE_KEYS, *_OTHER_KEYS}
    unknown = [
        f"{prefix}{key}={shown(value)}"
        for key, value in own.items()
        if key not in known and value not in (0, "", _NEUTRAL.get(key), family.only.get(key))
        if (key, own.get("rope.scaling.type")) != (_ATTENTION_FACTOR, "longrope")
    ]
    if unknown:
        raise ValueError(
            f"{file.path} has {len(unknown)} metadata keys that are not understood, and may change "
            f"what is computed: {some(unknown)}"
        )
    for key in _COUNTS:
        count = own.get(key, 1)
        if type(count) is not int or count < 1:
            raise ValueError(
                f"{file.path} has {prefix}{key}={shown(count)}: must be an integer of 1 or more"
            )
    drafts, layers = own.get(_DRAFT_LAYERS, 0), own["block_count"]
    if type(drafts) is not int or not 0 <= drafts < layers:
        raise ValueError(
            f"{file.path} has {prefix}{_DRAFT_LAYERS}={shown(drafts)}: must be an integer from 0 "
            f"to {layers - 1}, as block_count={layers} counts these layers, too"
        )
    width, value_width = (own.get(key) for key in _WIDTHS)
    if value_width not in (None, width) and "attention.kv_lora_rank" not in own:
        raise ValueError(
            f"{file.path} has {prefix}attention.key_length={width} and "
            f"value_length={value_width}: they must be equal"
        )


def _plain(value: Any) -> Any:
    """A value as `config.json` would have it: a value that all layers share is written once.

    A float of 32 bits becomes the shortest decimal with these bits, which it was made from.
    """
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _vocabulary(file: GgufFile) -> int:
    """Rows of the embedding: a tokenizer may have fewer tokens."""
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _end_ids(file: GgufFile) -> list[int] | None:
    """Ids that end a text or a turn. ValueError for a value that is not an integer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = [file.value(key, int) for key in keys if key in file.metadata]
    return list(dict.fromkeys(found)) or None


def _gemma_scalar(config: Mapping[str, Any], largest: int) -> float:
    """The number whose root scores are divided by: a head's size, except in the `largest` model."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config["num_hidden_layers"] == largest or "head_dim" not in config:
        return float(hidden / heads)
    return float(config["head_dim"])


def _window_types(config: Mapping[str, Any]) -> Any:
    """The type of each layer, from flags of those that have a window."""
    flags, count = config["layer_types"], config["num_hidden_layers"]
    if type(flags) is bool:
        flags = [flags] * count
    if not isinstance(flags, list) or not all(type(flag) is bool for flag in flags):
        # The model's own config refuses such a value.
        return flags
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _read_rope(own: Mapping[str, Any], config: dict[str, Any], family: GgufFamily) -> None:
    """Add RoPE's scaling, and the part of a head that it rotates."""
    # llama.cpp takes a factor without a type as linear.
    scaled = "rope.scale_linear" in own or own.get("rope.scaling.factor", 1.0) != 1.0
    kind = own.get("rope.scaling.type", "linear" if scaled else "none")
    if kind != "none":
        scaling = {name: own[key] for key, name in _ROPE_KEYS.items() if key in own}
        scaling.setdefault("factor", own.get("rope.scale_linear"))
        if kind == "longrope" and _ATTENTION_FACTOR in own:
            scaling["attention_factor"] = own[_ATTENTION_FACTOR]
        for key, (names, factor) in family.scaling.items():
            if key in own:
                scaling |= dict.fromkeys(names, _plain(factor * own[key]))
        config["rope_scaling"] = {"rope_type": kind, **family.rope, **scaling}
    if "head_dim" in config and config["head_dim"] is None:
        return
    width = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    turned = own.get("rope.dimension_count", width)
    if width and (family.rotated or turned != width):
        config[family.rotated or "partial_rotary_factor"] = turned / width


def _llama3(file: GgufFile, factors: Sequence[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Llama 3's RoPE with these factors. ValueError if there are none."""
    width, theta = config["head_dim"], config.get("rope_theta", 10_000.0)
    periods = theta ** (np.arange(0, width, 2) / width)
    most = _plain(max(factors))
    for trained in _TRAINED if len(factors) == len(periods) else ():
        smooth = (trained / (2 * math.pi * periods) - _LOW) / (_HIGH - _LOW)
        smooth = np.clip(smooth, 0, 1)
        if np.allclose(factors, 1 / ((1 - smooth) / most + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": most,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": trained,
            }
    raise ValueError(
        f"{file.path} has {len(factors)} factors of RoPE in {_LLAMA_3}, {min(factors):.7g} to "
        f"{most:.7g}: they are not Llama 3's for rope_theta={theta} and heads of {width}"
    )
