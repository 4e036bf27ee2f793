"""Reads from a checkpoint's configs how each linear's weight is stored."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphengine.kernels.linear.kinds import KINDS, KindName
from graphengine.kernels.linear.quantised import WeightFormat, format_of
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.gguf.file import is_gguf
from graphengine.models.checkpoints.gguf.tensors import FACTORS
from graphengine.models.checkpoints.kv_scheme import check_kv, quantises_kv_alone
from graphengine.models.hf.config_schema import HfConfig, language_model, unsupported
from graphengine.models.quantised.autoround_config import METHODS, read_autoround
from graphengine.models.quantised.compressed_config import read_compressed
from graphengine.models.quantised.gptq_config import read_awq, read_gptq
from graphengine.models.quantised.schemes import (
    ABOUT_MAKING,
    Quantisation,
    Rule,
    WeightScheme,
    always,
    among_names,
    check_keys,
    is_head,
    plain_layout,
    read_choice,
    read_names,
)
from graphengine.models.quantised.torchao_config import read_torchao

_KEY = "quantization_config"
_FILE = "hf_quant_config.json"
_MODELOPT = ("modelopt", "modelopt_fp4")
_MODELOPT_KINDS: Mapping[str, KindName] = {
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP8": "mxfp8",
}


def quantisation_of(checkpoint: Checkpoint) -> Quantisation | None:
    """A checkpoint's quantised weights, from its configs. ValueError for anything not understood.

    Lists in the configs may use the names in the files, which differ if the language model has a
    vision tower or was saved alone.
    """
    if is_gguf(checkpoint.path):
        return gguf_quantisation(checkpoint)
    given = _given(checkpoint.config)
    if isinstance(given, dict) and given.get("quant_method") == "torchao":
        # Its tensors tell what its config leaves open.
        return read_torchao(checkpoint, given, _KEY)
    found = read_quantisation(checkpoint.config, checkpoint.quant_config)
    if found is None:
        return None
    names = {
        name.rpartition(".")[0]: old.rpartition(".")[0]
        for name, old in checkpoint.stored_names.items()
    }
    return found._replace(stored_names=names)


def gguf_quantisation(checkpoint: Checkpoint) -> Quantisation | None:
    """The linears of a GGUF file whose codes are kept; None: there are none.

    Their codes are in 8 bits, or in 4 with two in a byte. The shapes of these and of the scales say
    how many columns share one, and whether there are minimums and factors.
    """
    names: dict[tuple[KindName, WeightFormat], set[str]] = {}
    for name, info in checkpoint.tensors.items():
        linear = name.removesuffix(".weight")
        scales = checkpoint.tensors.get(f"{linear}.weight_scale")
        if scales is not None:
            columns = info.shape[-1] * (1 if info.dtype == torch.int8 else 2)
            minimums = len(scales.shape) > len(info.shape)
            factors = checkpoint.tensors.get(f"{linear}.{FACTORS}")
            block = 0 if factors is None else columns // factors.shape[len(info.shape) - 1]
            kind = _gguf_kind(info.dtype == torch.int8, minimums, block)
            if scales.dtype == torch.uint8:
                kind = "mxfp4"
            format = format_of(kind, columns=columns // scales.shape[len(info.shape) - 1])
            names.setdefault((kind, format), set()).add(linear)
    rules = [
        Rule(
            linears.__contains__,
            WeightScheme(
                layout="codes" if format.bits == 8 else "halves",
                kind=kind,
                format=format,
                signed=True,
                factors=FACTORS if format.block else None,
            ),
        )
        for (kind, format), linears in names.items()
    ]
    return Quantisation("gguf", tuple(rules)) if rules else None


def _gguf_kind(is_bytes: bool, minimums: bool, block: int) -> KindName:
    """A kind with such codes, whatever number of columns shares a scale."""
    if not block and not minimums:
        return "int8" if is_bytes else "int4"
    if not block:
        return "q5_1" if is_bytes else "q4_1"
    if not minimums:
        return "q6_k"
    return "q5_k" if is_bytes else "q4_k"


def read_quantisation(
    config: HfConfig, quant_file: Mapping[str, Any] | None = None
) -> Quantisation | None:
    """The weights' quantisation, from `config.json` and ModelOpt's `hf_quant_config.json`.

    None: the weights are not quantised; the KV may be. ValueError, with key, value and what is
    known, for anything that is not understood. torchao's config is not enough: `quantisation_of`
    reads its tensors. A model with a tower may have the keys in the language model's config.
    """
    given = _given(config)
    from_file = None if quant_file is None else _read_quant_file(quant_file)
    if given is None or given == {}:
        return from_file
    if not isinstance(given, dict):
        raise unsupported(_KEY, given, "a JSON object, null")
    if "quant_method" not in given and "quant_algo" in given:
        # ModelOpt 0.31 does not name itself.
        given = {"quant_method": "modelopt", **given}
    method = read_choice(given, "quant_method", [*_READERS, "torchao"], _KEY)
    if not _quantises_weights(given) and (quantises_kv_alone(given) or method in _MODELOPT):
        return from_file
    found = _READERS[method](given)
    if from_file is not None and method not in _MODELOPT:
        raise unsupported(f"{_KEY}.quant_method", method, f"'modelopt', as in {_FILE}")
    return found


def _given(config: HfConfig) -> Any:
    """A config's quantisation keys, beside a `text_config` or in it."""
    given = config.get(_KEY)
    return language_model(config).get(_KEY) if given is None else given


def _quantises_weights(given: Mapping[str, Any]) -> bool:
    """Whether a config quantises weights, as some methods may quantise KV alone."""
    if given["quant_method"] == "compressed-tensors":
        sparse = given.get("sparsity_config")
        is_dense = isinstance(sparse, dict) and sparse.get("format") == "dense"
        return bool(given.get("config_groups") or (sparse and not is_dense))
    nested = given.get("quantization")
    inside = nested if isinstance(nested, dict) else given
    return given["quant_method"] not in _MODELOPT or bool(inside.get("quant_algo"))


def _read_fp8(config: Mapping[str, Any]) -> Quantisation:
    """Read fp8: one scale per block of a weight, or one for all of it."""
    known = """
        quant_method fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers
        scale_fmt kv_cache_scheme is_checkpoint_fp8_serialized expert_dtype dequantize
    """
    check_keys(config, known + ABOUT_MAKING, _KEY)
    read_choice(config, "fmt", ["e4m3", "float8_e4m3fn", None], _KEY)
    scheme = read_choice(config, "activation_scheme", ["dynamic", "static", None], _KEY)
    read_choice(config, "scale_fmt", ["float", "ue8m0", None], _KEY)
    read_choice(config, "kv_cache_scheme", ["static", None], _KEY)
    read_choice(config, "is_checkpoint_fp8_serialized", [True, None], _KEY)
    block = config.get("weight_block_size")
    if block is not None and not (_is_sizes(block) and len(block) == 2):
        raise unsupported(f"{_KEY}.weight_block_size", block, "[rows, columns], null")
    rows, columns = block or (0, 0)
    weights = WeightScheme(
        layout="codes",
        kind="fp8",
        format=format_of("fp8", rows, columns),
        scales=("weight_scale_inv", "weight_scale"),
        unread=("input_scale", "activation_scale"),
        notes=(f"{_KEY}.activation_scheme={scheme!r} is not carried out: weights alone are read",)
        if scheme
        else (),
    )
    skipped = [
        Rule(among_names(read_names(config, key, _KEY), f"{_KEY}.{key}"), None)
        for key in ("modules_to_not_convert", "ignored_layers")
    ]
    return Quantisation("fp8", (*skipped, Rule(is_head, None), Rule(always, weights)))


def _read_fbgemm(config: Mapping[str, Any]) -> Quantisation:
    """Read FBGEMM's fp8: one scale per row of a weight."""
    check_keys(config, "quant_method activation_scale_ub modules_to_not_convert", _KEY)
    weights = WeightScheme(
        layout="codes",
        kind="fp8",
        format=format_of("fp8", 1, 0),
        unread=("input_scale_ub",),
        notes=(f"{_KEY}: activations are not quantised, weights alone are",),
    )
    key = "modules_to_not_convert"
    skipped = Rule(among_names(read_names(config, key, _KEY), f"{_KEY}.{key}"), None)
    return Quantisation("fbgemm_fp8", (skipped, Rule(is_head, None), Rule(always, weights)))


def _read_bitsandbytes(config: Mapping[str, Any]) -> Quantisation | None:
    """Read LLM.int8: one scale per row, stored times 127. Weights in 4 bits are widened."""
    known = """
        quant_method load_in_8bit load_in_4bit _load_in_8bit _load_in_4bit llm_int8_threshold
        llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
        bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype
        bnb_4bit_quant_storage target_parameters
    """
    check_keys(config, known, _KEY)
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return None
    weights = WeightScheme(
        layout="codes",
        kind="int8",
        format=format_of("int8", 1, 0),
        scales=("SCB",),
        signed=True,
        factor=1 / 127,
        unread=(),
        rows_if_0="weight_format",
        notes=(f"{_KEY}: activations are not quantised, weights alone are",),
    )
    key = "llm_int8_skip_modules"
    skipped = Rule(among_names(read_names(config, key, _KEY), f"{_KEY}.{key}"), None)
    return Quantisation("bitsandbytes", (skipped, Rule(is_head, None), Rule(always, weights)))


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value
    )


def _read_mxfp4(config: Mapping[str, Any]) -> Quantisation:
    """Read MXFP4: blocks of 32 columns, as gpt-oss stores them."""
    check_keys(config, "quant_method modules_to_not_convert dequantize", _KEY)
    key = "modules_to_not_convert"
    names = [name.replace("*", "[^.]*") for name in read_names(config, key, _KEY)]
    scheme = WeightScheme(
        layout="halves",
        kind="mxfp4",
        format=format_of("mxfp4"),
        codes=("weight_blocks", "_blocks"),
        scales=("weight_scales", "_scales"),
        unread=(),
    )
    skipped = Rule(among_names(names, f"{_KEY}.{key}"), None)
    return Quantisation("mxfp4", (skipped, Rule(is_head, None), Rule(always, scheme)))


def _read_quant_file(quant_file: Mapping[str, Any]) -> Quantisation | None:
    found = quant_file.get("quantization")
    if not isinstance(found, dict):
        raise unsupported("quantization", found, "a JSON object", file=_FILE)
    if found.get("quant_algo"):
        return _modelopt(found, "quantization", _FILE)
    check_kv(found, "quantization", _FILE)
    return None


def _read_modelopt(config: Mapping[str, Any]) -> Quantisation:
    nested = config.get("quantization")
    if isinstance(nested, dict):
        return _modelopt(nested, f"{_KEY}.quantization", "config.json")
    return _modelopt(config, _KEY, "config.json")


def _modelopt(config: Mapping[str, Any], inside: str, file: str) -> Quantisation:
    known = """
        quant_method quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules
        ignore config_groups producer quantized_layers has_zero_point pre_quant_scale
    """
    check_keys(config, known, inside)
    check_kv(config, inside, file)
    skipped = [
        name for key in ("exclude_modules", "ignore") for name in read_names(config, key, inside)
    ]
    rules = [Rule(_among_patterns(skipped), None)]
    if config.get("quant_algo") == "MIXED_PRECISION":
        layers = config.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            raise unsupported(f"{inside}.quantized_layers", layers, "a JSON object", file=file)
        for name, layer in layers.items():
            scheme = _modelopt_scheme(layer, f"{inside}.quantized_layers.{name}", file)
            rules.append(Rule(_among_patterns([name]), scheme))
    else:
        rules.append(Rule(always, _modelopt_scheme(config, inside, file)))
    return Quantisation("modelopt", tuple(rules))


def _modelopt_scheme(config: Mapping[str, Any], inside: str, file: str) -> WeightScheme:
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT_KINDS:
        known = f"{', '.join(map(repr, _MODELOPT_KINDS))}, 'MIXED_PRECISION' of these"
        raise unsupported(f"{inside}.quant_algo", algorithm, known, file=file)
    note = f"{inside}.quant_algo={algorithm!r}: activations are not quantised, weights alone are"
    name = _MODELOPT_KINDS[algorithm]
    kind = KINDS[name]
    if kind.columns and config.get("group_size") not in (kind.columns, None):
        known = f"{kind.columns}, null"
        raise unsupported(f"{inside}.group_size", config["group_size"], known, file=file)
    return WeightScheme(
        layout=plain_layout(kind),
        kind=name,
        # Without a group size there is one scale for the whole weight.
        format=format_of(name) if kind.columns else format_of(name, 0, 0),
        whole="weight_scale_2" if kind.whole else None,
        notes=() if algorithm.startswith("W4A16") else (note,),
    )


def _among_patterns(names: Sequence[str]) -> Callable[[str], bool]:
    """Whether a linear, or a module that contains it, has one of these names; `*` is any text."""
    patterns = [pattern for name in names for pattern in (name, f"{name}.*")]
    return lambda linear: any(fnmatch.fnmatchcase(linear, pattern) for pattern in patterns)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantisation | None]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    **dict.fromkeys(METHODS, read_autoround),
    "mxfp4": _read_mxfp4,
    **dict.fromkeys(_MODELOPT, _read_modelopt),
}
