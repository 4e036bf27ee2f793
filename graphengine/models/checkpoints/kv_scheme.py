"""Reads how a checkpoint quantises its KV, where its weights are not quantised.

compressed-tensors says it in `quantization_config` of `config.json`, ModelOpt there or in
`hf_quant_config.json`. One kind of KV can be read: e4m3 with stored scales, one for the keys and
one for the values of each layer, or of each kv head. Anything else would be read with scales that
mean something else, so it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.models.hf.config_schema import unsupported

_METHODS = ("compressed-tensors", "modelopt")
_PLAIN = "null: weights in other formats are not supported"
# The values that `kv_cache_scheme` may have; None: the key is missing, or null.
_SCHEME: Mapping[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "strategy": ("tensor", "attn_head", None),
    "group_size": (None,),
    "block_structure": (None,),
}


def quantises_kv_alone(config: Any) -> bool:
    """Whether a `quantization_config` quantises KV alone, to e4m3 as above.

    False for other formats, and if it does not mention KV. ValueError, with key and value, for
    quantised weights and for KV of another kind.
    """
    name = "quantization_config"
    if not isinstance(config, dict) or config.get("quant_method") not in _METHODS:
        return False
    for key in ("config_groups", "sparsity_config", "transform_config"):
        value = config.get(key)
        # Sparse weights may be stored dense.
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise unsupported(f"{name}.{key}", value, _PLAIN)
    # ModelOpt's own file may be nested in config.json.
    nested = config.get("quantization")
    if isinstance(nested, dict):
        return _quantises_kv(nested, f"{name}.quantization", "config.json")
    return _quantises_kv(config, name, "config.json")


def _quantises_kv(config: Mapping[str, Any], name: str, file: str) -> bool:
    if config.get("quant_algo") is not None:
        raise unsupported(f"{name}.quant_algo", config["quant_algo"], _PLAIN, file=file)
    return check_kv(config, name, file)


def check_kv(config: Mapping[str, Any], name: str, file: str) -> bool:
    """Whether KV is e4m3 as above; False if `config` does not mention KV. Weights are ignored.

    ValueError, with key and value, for KV of another kind; `name` is the path of `config` in
    `file`, for the message.
    """
    algorithm, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    if algorithm not in (None, "FP8"):
        raise unsupported(f"{name}.kv_cache_quant_algo", algorithm, "'FP8', null", file=file)
    # ModelOpt 0.31 writes its algorithm there.
    if scheme in (None, "FP8"):
        return (algorithm or scheme) is not None
    inside = f"{name}.kv_cache_scheme"
    if not isinstance(scheme, dict):
        raise unsupported(inside, scheme, "a JSON object, 'FP8', null", file=file)
    for key, allowed in _SCHEME.items():
        if scheme.get(key) not in allowed:
            known = ", ".join("null" if value is None else repr(value) for value in allowed)
            raise unsupported(f"{inside}.{key}", scheme.get(key), known, file=file)
    return True
