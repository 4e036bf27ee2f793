"""Reads the formats of a torchao checkpoint's weights from its tensors.

torchao writes a weight as `_weight_qdata`, `_weight_scale` and, with integers, `_weight_zero_point`
(torchao.prototype.safetensors). The shapes tell how many rows and columns share a scale, so its
configs need not be evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphengine.kernels.linear.kinds import KindName
from graphengine.kernels.linear.quantised import WeightFormat, format_of
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.tensor_files import DTYPE_NAMES, TensorInfo
from graphengine.models.hf.config_schema import unsupported
from graphengine.models.quantised.schemes import Quantisation, Rule, WeightScheme, check_keys

_CODES, _SCALES, _ZEROS = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_KINDS: Mapping[torch.dtype, KindName] = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
_CONFIGS = (
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
)
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")


def read_torchao(checkpoint: Checkpoint, config: Mapping[str, Any], inside: str) -> Quantisation:
    """The linears that a checkpoint has in torchao's formats of 8 bits.

    ValueError, with names and numbers, for other formats, and for scales that fit no groups.
    """
    check_keys(
        config,
        "quant_method quant_type quant_type_kwargs modules_to_not_convert "
        "include_input_output_embeddings untie_embedding_weights",
        inside,
    )
    _check_type(config.get("quant_type"), inside)
    names: dict[WeightFormat, set[str]] = {}
    for name, codes in checkpoint.tensors.items():
        linear = name.removesuffix(_CODES)
        if linear != name:
            kind = _format(checkpoint, linear, codes)
            # Symmetric weights have zero points of 0, and so must floats.
            zeros = f"{linear}{_ZEROS}"
            if codes.dtype == torch.int8 and zeros in checkpoint.tensors:
                kind = kind._replace(has_zeros=not checkpoint.is_zero(zeros))
            names.setdefault(kind, set()).add(linear)
    if not names:
        raise ValueError(
            f"{checkpoint.path}: {inside} is of torchao, and no tensor's name ends with "
            f"{_CODES[1:]}: only what torchao writes as safetensors is read"
        )
    rules = [Rule(linears.__contains__, _scheme(kind, inside)) for kind, linears in names.items()]
    return Quantisation("torchao", tuple(rules))


def _check_type(given: Any, inside: str) -> None:
    """ValueError for a config, anywhere in `given`, whose weights are not read here."""
    if isinstance(given, dict):
        kind = given.get("_type")
        if isinstance(kind, str) and kind.endswith("Config") and kind not in (*_CONFIGS, *_BY_NAME):
            raise unsupported(f"{inside}.quant_type", kind, ", ".join(_CONFIGS))
        for each in given.values():
            _check_type(each, inside)
    elif isinstance(given, list):
        for each in given:
            _check_type(each, inside)


def _format(checkpoint: Checkpoint, linear: str, codes: TensorInfo) -> WeightFormat:
    scales = checkpoint.tensors.get(f"{linear}{_SCALES}")
    if scales is None:
        raise ValueError(f"{checkpoint.path} lacks {linear}{_SCALES}, of {linear}{_CODES}")
    if codes.dtype not in _KINDS:
        known = ", ".join(DTYPE_NAMES[dtype] for dtype in _KINDS)
        raise ValueError(
            f"{checkpoint.path} has {linear}{_CODES} in {DTYPE_NAMES[codes.dtype]}: of torchao's "
            f"formats those in {known} are read"
        )
    groups = scales.shape or (1, 1)
    if not len(codes.shape) == len(groups) == 2 or any(
        not count or size % count for size, count in zip(codes.shape, groups, strict=True)
    ):
        raise ValueError(
            f"{checkpoint.path} has {linear}{_SCALES} of shape {list(scales.shape)}: these are no "
            f"groups of codes {list(codes.shape)}"
        )
    rows, columns = (size // count for size, count in zip(codes.shape, groups, strict=True))
    if groups[1] == 1:
        rows, columns = rows if groups[0] > 1 else 0, 0
    return format_of(_KINDS[codes.dtype], rows, columns)


def _scheme(kind: WeightFormat, inside: str) -> WeightScheme:
    return WeightScheme(
        layout="codes",
        kind="fp8" if kind.code == "e4m3" else "int8",
        format=kind,
        codes=(_CODES,),
        scales=(_SCALES,),
        signed=True,
        zeros=_ZEROS,
        notes=(f"{inside}: activations are not quantised, weights alone are",),
    )
