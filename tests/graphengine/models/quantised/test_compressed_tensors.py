"""Weights that the public compressed-tensors package packs, against what it unpacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.compressed import Stored, compressed, config_of, weight_args
from graphengine.kernels.linear.quantised import WeightFormat, dequantise
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.readers import read_weight

LINEAR = "model.layers.3.mlp.up_proj"

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int], WeightFormat]] = {
    "fp8 tensor": (
        "float-quantized", {"type": "float", "strategy": "tensor"}, (9, 33),
        WeightFormat("e4m3", 0, 0),
    ),
    "fp8 channel": (
        "float-quantized", {"type": "float", "strategy": "channel"}, (9, 33),
        WeightFormat("e4m3", 1, 0),
    ),
    "fp8 group": (
        "naive-quantized", {"type": "float", "strategy": "group", "group_size": 32}, (9, 96),
        WeightFormat("e4m3", 1, 32),
    ),
    "fp8 block": (
        "float-quantized",
        {"type": "float", "strategy": "block", "block_structure": [128, 128]}, (256, 384),
        WeightFormat("e4m3", 128, 128),
    ),
    "int8 channel": (
        "int-quantized", {"strategy": "channel"}, (9, 33), WeightFormat("int8", 1, 0),
    ),
    "int8 tensor": ("int-quantized", {"strategy": "tensor"}, (9, 33), WeightFormat("int8", 0, 0)),
    "int8 zeros": (
        "naive-quantized", {"strategy": "channel", "symmetric": False}, (9, 33),
        WeightFormat("int8", 1, 0, True),
    ),
    "int8 group zeros": (
        "int-quantized", {"strategy": "group", "group_size": 32, "symmetric": False}, (9, 96),
        WeightFormat("int8", 1, 32, True),
    ),
    "int4 as int8": (
        "int-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, (9, 96),
        WeightFormat("int4", 1, 32),
    ),
    "int4 as int8 zeros": (
        "int-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, (9, 96),
        WeightFormat("int4", 1, 32, True),
    ),
    "packed int4 of 32": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, (9, 96),
        WeightFormat("int4", 1, 32),
    ),
    "packed int4 of 128": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}, (5, 384),
        WeightFormat("int4", 1, 128),
    ),
    "packed int4 zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, (9, 192),
        WeightFormat("int4", 1, 64, True),
    ),
    "packed int4 channel": (
        "pack-quantized", {"num_bits": 4, "strategy": "channel"}, (9, 38),
        WeightFormat("int4", 1, 0),
    ),
    "packed int4 channel zeros": (
        "pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}, (9, 38),
        WeightFormat("int4", 1, 0, True),
    ),
    "packed int8": (
        "pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}, (9, 96),
        WeightFormat("int8", 1, 32),
    ),
    "packed int8 zeros": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False}, (9, 37),
        WeightFormat("int8", 1, 0, True),
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, (9, 48),
        WeightFormat("e2m1", 1, 16),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, (9, 96),
        WeightFormat("e2m1", 1, 32),
    ),
}  # fmt: skip


def packed(case: str) -> tuple[dict[str, Any], Stored, Tensor]:
    """(config, the linear's tensors, what the package says they mean) of a case."""
    name, given, (M, K), _ = CASES[case]
    torch.manual_seed(len(case))
    args = weight_args(given)
    tensors, meant = compressed(name, args, M, K)
    stored = {f"{LINEAR}.{key}": value for key, value in tensors.items()}
    return config_of(name, args), stored, meant


@pytest.mark.parametrize("case", CASES)
def test_a_packed_weight_means_what_the_package_says(case: str) -> None:
    config, tensors, meant = packed(case)
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    assert quantisation.scheme("lm_head") is None
    scheme = quantisation.scheme(LINEAR)
    assert scheme is not None
    weight, names = read_weight(scheme, tensors, LINEAR, tuple(meant.shape))
    assert weight.format == scheme.format == CASES[case][3]
    assert weight.shape == meant.shape
    # The package divides by NVFP4's factor, in place of a multiplication with its inverse.
    slack = 2**-22 if "nvfp4" in case else 0
    torch.testing.assert_close(dequantise(weight), meant, rtol=slack, atol=0)
    assert set(names) == tensors.keys()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("packed int4 of 32", {"weight_shape": torch.tensor([9, 128])},
         r"weight_shape says \[9, 128\]: its weight is \[9, 96\]"),
        ("packed int4 of 32", {"weight_packed": torch.zeros(9, 6, dtype=torch.int32)},
         r"weight_packed has shape \[9, 6\]: .* must have shape \[9, 12\]"),
        ("packed int4 of 32", {"weight_scale": torch.ones(9, 2)},
         r"weight_scale has shape \[9, 2\]: scales, one for 1 rows and 32 columns of a weight "
         r"\[9, 96\], must have shape \[9, 3\]"),
        ("packed int4 of 32", {"weight_zero_point": torch.ones(9, 3, dtype=torch.int8)},
         r"has 27 zero points of a symmetric format out of range, the first 1\.0 at \[0, 0\]"),
        ("packed int4 zeros", {"weight_zero_point": torch.zeros(1, 3, dtype=torch.int32)},
         r"weight_zero_point has shape \[1, 3\]: zero points of 9 rows and 3 groups .*\[2, 3\]"),
        ("int4 as int8", {"weight": torch.full((9, 96), 9, dtype=torch.int8)},
         r"weight has 864 codes of 4 bits out of range, the first 9 at \[0, 0\]: .* \[-8, 7\]"),
        ("int4 as int8 zeros", {"weight_zero_point": torch.full((9, 3), -9, dtype=torch.int8)},
         r"weight_zero_point has 27 zero points out of range, the first -9 at \[0, 0\]"),
        ("int8 zeros", {"weight_zero_point": torch.zeros(9, 1, dtype=torch.int32)},
         "weight_zero_point is in int32: .* must be in int8"),
        ("fp8 tensor", {"weight_scale": torch.ones(9, 1)},
         r"one for all rows and all columns .* must have shape \[1, 1\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(case: str, changes: Stored, message: str) -> None:
    config, tensors, meant = packed(case)
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    scheme = quantisation.scheme(LINEAR)
    assert scheme is not None
    tensors |= {f"{LINEAR}.{name}": tensor for name, tensor in changes.items()}
    with pytest.raises(ValueError, match=message) as error:
        read_weight(scheme, tensors, LINEAR, tuple(meant.shape))
    assert str(error.value).startswith(LINEAR)


def test_zero_points_of_a_symmetric_format_may_be_stored() -> None:
    config, tensors, meant = packed("int8 channel")
    tensors[f"{LINEAR}.weight_zero_point"] = torch.zeros(9, 1, dtype=torch.int8)
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    scheme = quantisation.scheme(LINEAR)
    assert scheme is not None
    weight, names = read_weight(scheme, tensors, LINEAR, (9, 33))
    assert weight.zeros is None
    assert torch.equal(dequantise(weight), meant)
    assert set(names) == tensors.keys()
