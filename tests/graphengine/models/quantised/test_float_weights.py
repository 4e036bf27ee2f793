"""Weights of fp8, MXFP4 and NVFP4, against transformers' own dequantisation and plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graphengine.kernels.linear.kinds import E2M1
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, dequantise
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.readers import is_plain, read_weight

LINEAR = "model.layers.0.mlp.down_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
MXFP4 = {"quant_method": "mxfp4"}


def read(config: dict[str, Any], tensors: dict[str, Tensor], M: int, K: int) -> QuantisedWeight:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    scheme = quantisation.scheme(LINEAR)
    assert scheme is not None
    stored = {f"{LINEAR}.{name}": tensor for name, tensor in tensors.items()}
    weight, names = read_weight(scheme, stored, LINEAR, (M, K))
    assert weight.format == scheme.format
    assert set(names) == stored.keys()
    return weight


def fp8_codes(M: int, K: int) -> Tensor:
    """All codes of e4m3 but its two NaN, again and again."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    return codes.repeat(-(-M * K // 254))[: M * K].view(M, K).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_fp8_are_those_of_transformers(dtype: torch.dtype) -> None:
    codes, scales = fp8_codes(256, 384), torch.linspace(0.01, 3, 6).view(2, 3).to(dtype)
    weight = read(FP8, {"weight": codes, "weight_scale_inv": scales}, 256, 384)
    assert weight.format == WeightFormat("e4m3", 128, 128)
    tensors = {"weight": codes, "weight_scale_inv": scales.float()}
    meant = Fp8Dequantize(None).convert(tensors)["weight"]
    assert torch.equal(dequantise(weight), meant)


def test_blocks_of_fp8_may_end_early() -> None:
    codes, scales = fp8_codes(130, 300), torch.rand(2, 3) + 0.5
    weight = read(FP8, {"weight": codes, "weight_scale_inv": scales}, 130, 300)
    meant = codes.float()
    for row in range(130):
        for block in range(3):
            meant[row, 128 * block : 128 * (block + 1)] *= scales[row // 128, block]
    assert torch.equal(dequantise(weight), meant)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FP8 | {"weight_block_size": None, "activation_scheme": "static"}, "weight_scale"),
        ({"quant_method": "fp8"}, "weight_scale_inv"),
        (MODELOPT, "weight_scale"),
    ],
)
def test_one_scale_for_all_of_a_weight(
    config: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    codes = fp8_codes(5, 7)
    tensors = {"weight": codes, name: torch.full(shape, 0.3), "input_scale": torch.tensor(2.0)}
    weight = read(config, tensors, 5, 7)
    assert weight.format == WeightFormat("e4m3", 0, 0)
    assert torch.equal(dequantise(weight), codes.float() * 0.3)


def four_bits(M: int, K: int) -> tuple[Tensor, Tensor]:
    """(bytes [M, K / 2], what their halves stand for [M, K]) of all bytes."""
    packed = torch.arange(M * K // 2).remainder(256).to(torch.uint8).view(M, K // 2)
    numbers = (*E2M1, *(-number for number in E2M1))
    values = [
        [numbers[code] for byte in row for code in (byte & 15, byte >> 4)]
        for row in packed.tolist()
    ]
    return packed, torch.tensor(values)


def test_nvfp4_of_modelopt() -> None:
    packed, values = four_bits(12, 64)
    scales = (torch.rand(12, 4) * 400 + 1).to(torch.float8_e4m3fn)
    # A scale that was too small for e4m3 is 0, and so are the weights.
    scales[0, 0] = 0
    whole = torch.tensor(0.013)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    weight = read(NVFP4, tensors | {"input_scale": torch.tensor(1.0)}, 12, 64)
    assert weight.format == WeightFormat("e2m1", 1, 16)
    assert weight.scales.dtype == torch.float8_e4m3fn
    meant = values * (scales.float() * whole).repeat_interleave(16, dim=1)
    assert torch.equal(dequantise(weight), meant)


def test_mxfp4_is_that_of_transformers() -> None:
    packed, _ = four_bits(6, 128)
    blocks = packed.view(6, 4, 16)
    scales = torch.arange(100, 124).to(torch.uint8).view(6, 4)
    weight = read(MXFP4, {"weight_blocks": blocks, "weight_scales": scales}, 6, 128)
    assert weight.format == WeightFormat("e2m1", 1, 32)
    meant = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    assert torch.equal(dequantise(weight), meant[0].T)


def test_mxfp4_below_a_parameters_name() -> None:
    quantisation = read_quantisation({"quantization_config": MXFP4})
    assert quantisation is not None
    scheme = quantisation.scheme(LINEAR)
    assert scheme is not None
    packed, values = four_bits(2, 32)
    scales = torch.full((2, 1), 126, dtype=torch.uint8)
    tensors = {f"{LINEAR}_blocks": packed.view(2, 1, 16), f"{LINEAR}_scales": scales}
    weight, names = read_weight(scheme, tensors, LINEAR, (2, 32))
    assert torch.equal(dequantise(weight), values / 2)
    assert set(names) == tensors.keys()


BLOCKS = {"weight": fp8_codes(256, 256), "weight_scale_inv": torch.ones(2, 2)}
HALVES = {
    "weight": torch.zeros(4, 32, dtype=torch.uint8),
    "weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn),
    "weight_scale_2": torch.tensor(1.0),
}
NEGATIVE = torch.full((4, 4), -1.0).to(torch.float8_e4m3fn)
WITH_NAN = fp8_codes(256, 256).clone()
WITH_NAN.view(torch.uint8)[130, 7] = 255
GROUPS = {
    "weight_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8),
    "weight_scales": torch.full((4, 2), 127, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("config", "tensors", "shape", "message"),
    [
        (FP8, BLOCKS | {"weight_scale_inv": torch.ones(2, 1)}, (256, 256),
         r"weight_scale_inv has shape \[2, 1\]: scales, one for 128 rows and 128 columns of a "
         r"weight \[256, 256\], must have shape \[2, 2\]"),
        (FP8, BLOCKS | {"weight_scale_inv": torch.tensor([[1, 2], [3, torch.inf]])}, (256, 256),
         r"weight_scale_inv has 1 wrong of 4 scales, the first inf at \[1, 1\]"),
        (FP8, BLOCKS | {"weight_scale_inv": torch.zeros(2, 2)}, (256, 256),
         r"4 wrong of 4 scales, the first 0 at \[0, 0\]: scales are positive"),
        (FP8, BLOCKS | {"weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)}, (256, 256),
         r"in uint8: scales, .* must be in float32, bfloat16, float16, float8_e8m0fnu"),
        (FP8, BLOCKS | {"weight": torch.zeros(256, 256)}, (256, 256),
         r"weight is in float32: codes of e4m3 must be in float8_e4m3fn"),
        (FP8, BLOCKS | {"weight": WITH_NAN}, (256, 256),
         r"weight has a NaN at \[130, 7\] of \[256, 256\] codes of e4m3"),
        (FP8, BLOCKS, (256, 260),
         r"weight has shape \[256, 256\]: .* must have shape \[256, 260\]"),
        (FP8, {"weight": BLOCKS["weight"]}, (256, 256),
         r"has no tensor: one of \S+weight_scale_inv, \S+weight_scale is needed"),
        (FP8, BLOCKS | {"weight_scale": torch.ones(2, 2)}, (256, 256),
         r"has \S+weight_scale_inv and \S+weight_scale: one of"),
        (NVFP4, HALVES, (4, 72), "weight has 72 columns: its packing takes a multiple of 16"),
        (NVFP4, HALVES | {"weight_scale": torch.ones(4, 4)}, (4, 64), "must be in float8_e4m3fn"),
        (NVFP4, HALVES | {"weight_scale": NEGATIVE},
         (4, 64), r"16 wrong of 16 scales, the first -1 at \[0, 0\]"),
        (NVFP4, HALVES | {"weight_scale_2": torch.tensor(-1.0)}, (4, 64),
         "weight_scale_2 has -1: it must be positive and finite"),
        (NVFP4, HALVES | {"weight_scale_2": torch.ones(3)}, (4, 64),
         r"weight_scale_2 is in float32 with shape \[3\]: one number is needed"),
        (MXFP4, GROUPS | {"weight_scales": torch.full((4, 2), 255, dtype=torch.uint8)}, (4, 64),
         r"weight_scales has 8 wrong of 8 scales, the first 255 at \[0, 0\]"),
        (MXFP4, GROUPS | {"weight_blocks": torch.zeros(4, 2, 8, dtype=torch.uint8)}, (4, 64),
         r"weight_blocks has shape \[4, 2, 8\]: .* must have shape \[4, 2, 16\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(config, tensors, *shape)
    assert str(error.value).startswith(LINEAR)


def test_a_weight_that_is_stored_as_it_is() -> None:
    quantisation = read_quantisation({"quantization_config": FP8})
    assert quantisation is not None
    scheme = quantisation.scheme(LINEAR)
    assert scheme is not None
    plain = {f"{LINEAR}.weight": torch.bfloat16}
    assert is_plain(scheme, plain, LINEAR)
    assert not is_plain(scheme, plain | {f"{LINEAR}.weight_scale_inv": torch.float32}, LINEAR)
    assert not is_plain(scheme, {f"{LINEAR}.weight": torch.float8_e4m3fn}, LINEAR)
    assert not is_plain(scheme, {}, LINEAR)
