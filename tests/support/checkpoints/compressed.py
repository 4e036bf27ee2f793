"""Weights that the public compressed-tensors package packs, and what it says they mean."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

# The tests that need it are skipped where it is missing.
pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

from graphengine.kernels.linear.quantised import WeightFormat

Stored = dict[str, Tensor]


def weight_args(given: dict[str, Any]) -> QuantizationArgs:
    """Arguments of weights in 8 bits and integers, where nothing else is given."""
    return QuantizationArgs(**{"num_bits": 8, "type": "int", **given})


def config_of(name: str, args: QuantizationArgs, **group: Any) -> dict[str, Any]:
    """`quantization_config` as the package itself writes it."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, **group)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=name,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return json.loads(config.model_dump_json())


def random_parameters(args: QuantizationArgs, M: int, K: int, size: float = 1.0) -> Stored:
    """Scales, and zero points where there are some, for a weight in (-size, size)."""
    kind = WeightFormat("int8", *{
        "tensor": (0, 0), "channel": (1, 0), "block": tuple(args.block_structure or ()),
    }.get(args.strategy or "", (1, args.group_size)))  # fmt: skip
    shape = (1,) if args.strategy == "tensor" else kind.groups(M, K)
    steps = {("int", 8): 127, ("int", 4): 7, ("float", 8): 448, ("float", 4): 6}
    scales = size * (0.5 + torch.rand(shape)) / steps[args.type, args.num_bits]
    if args.type == "float" and args.num_bits == 4:
        scales = torch.exp2(scales.log2().round())
    found = {"weight_scale": scales}
    if not args.symmetric:
        least, most = -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1)
        found["weight_zero_point"] = torch.randint(least, most, shape, dtype=torch.int8)
    if args.strategy == "tensor_group":
        whole = torch.tensor([37.5]) / size
        found["weight_scale"] = (scales * whole).to(torch.float8_e4m3fn).float()
        found["weight_global_scale"] = whole
    return found


def compressed(
    name: str, args: QuantizationArgs, M: int, K: int, size: float = 1.0
) -> tuple[Stored, Tensor]:
    """(a linear's tensors, what the package says they mean) of a random weight in (-size, size)."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)
    weight = size * (torch.rand(M, K) * 2 - 1)
    parameters = random_parameters(args, M, K, size)
    tensors = compressor.compress({"weight": weight, **parameters}, scheme)
    if name != "nvfp4-pack-quantized":
        return tensors, compressor.decompress(dict(tensors), scheme)["weight"].float()
    # Its compressor computes in bfloat16.
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], M, K, dtype=torch.float32)
    scales, whole = tensors["weight_scale"].float(), tensors["weight_global_scale"]
    return tensors, dequantize(codes, scales, args=args, global_scale=whole)
