"""AWQ's and GPTQ's tensors, written number by number as their documents say, and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("compressed_tensors")
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

from checkpoints.packed_weights import awq_tensors, gptq_tensors, meaning, packed_words
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, dequantise
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.readers import read_weight
from graphengine.models.quantised.schemes import WeightScheme

LINEAR = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


def scheme_of(config: dict[str, Any], linear: str = LINEAR) -> WeightScheme | None:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    return quantisation.scheme(linear)


def read(config: dict[str, Any], tensors: dict[str, Tensor], M: int, K: int) -> QuantisedWeight:
    scheme = scheme_of(config)
    assert scheme is not None
    weight, names = read_weight(scheme, tensors, LINEAR, (M, K))
    assert weight.format == scheme.format
    assert set(names) == tensors.keys()
    return weight


def random_parts(M: int, K: int, columns: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [M, K], zero points and scales [M, G], the group of each column)."""
    generator = torch.Generator().manual_seed(M * K + bits)
    groups = torch.arange(K) // (columns or K)
    G = int(groups[-1]) + 1
    codes = torch.randint(0, 2**bits, (M, K), generator=generator)
    zeros = torch.randint(1, 2**bits, (M, G), generator=generator)
    scales = (0.5 + torch.rand(M, G, generator=generator)).half()
    return codes, zeros, scales, groups


@pytest.mark.parametrize("columns", [32, 64, 0])
@pytest.mark.parametrize(("M", "K"), [(8, 64), (24, 192)])
def test_awq_means_what_went_in(M: int, K: int, columns: int) -> None:
    codes, zeros, scales, groups = random_parts(M, K, columns, 4)
    tensors = awq_tensors(LINEAR, codes, zeros, scales)
    weight = read(AWQ | {"group_size": columns or -1}, tensors, M, K)
    assert weight.format == WeightFormat("int4", 1, columns, True)
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))


def test_awq_is_what_a_public_converter_reads() -> None:
    codes, zeros, scales, _ = random_parts(16, 64, 32, 4)
    tensors = awq_tensors(LINEAR, codes, zeros, scales)
    theirs = AutoAWQConverter.unpack_awq(
        tensors[f"{LINEAR}.qweight"], tensors[f"{LINEAR}.qzeros"], 4
    )
    weight, zeros_read = AutoAWQConverter.reverse_awq_order(*theirs, 4)
    assert zeros_read is not None
    assert torch.equal((weight & 15).T, codes)
    assert torch.equal((zeros_read & 15).T, zeros)


def test_awq_without_zero_points_is_symmetric() -> None:
    codes, zeros, scales, groups = random_parts(8, 64, 32, 4)
    tensors = awq_tensors(LINEAR, codes, zeros, scales)
    del tensors[f"{LINEAR}.qzeros"]
    weight = read(AWQ | {"zero_point": False}, tensors, 8, 64)
    assert weight.zeros is None
    assert torch.equal(dequantise(weight), meaning(codes, torch.full((8, 2), 8), scales, groups))


@pytest.mark.parametrize("less_one", [True, False], ids=["v1", "v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("K", "columns"), [(128, 32), (80, 32), (64, 0)])
def test_gptq_means_what_went_in(bits: int, K: int, columns: int, less_one: bool) -> None:
    codes, zeros, scales, groups = random_parts(16, K, columns, bits)
    tensors = gptq_tensors(LINEAR, codes, zeros, scales, groups, bits, less_one=less_one)
    config = GPTQ | {"bits": bits, "group_size": columns or -1}
    weight = read(config | ({} if less_one else {"checkpoint_format": "gptq_v2"}), tensors, 16, K)
    assert weight.format == WeightFormat("int4" if bits == 4 else "int8", 1, columns, True)
    assert weight.order is None
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))


@pytest.mark.parametrize("config", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_scales_may_be_negative(config: dict[str, Any]) -> None:
    """AutoRound writes such files in both formats."""
    codes, zeros, scales, groups = random_parts(16, 64, 32, 4)
    scales[::2] *= -1
    if config is AWQ:
        tensors = awq_tensors(LINEAR, codes, zeros, scales)
    else:
        tensors = gptq_tensors(LINEAR, codes, zeros, scales, groups, 4, less_one=True)
    weight = read(config, tensors, 16, 64)
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("K", [128, 80])
def test_gptq_with_columns_in_the_order_of_activations(bits: int, K: int) -> None:
    codes, zeros, scales, groups = random_parts(16, K, 32, bits)
    groups = groups[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    tensors = gptq_tensors(LINEAR, codes, zeros, scales, groups, bits, less_one=True)
    weight = read(GPTQ | {"bits": bits, "desc_act": True}, tensors, 16, K)
    assert weight.order is not None
    assert weight.order.dtype == torch.int32
    assert torch.equal(groups[weight.order.long()], groups.sort().values)
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))


def test_gptq_without_an_order_needs_no_groups() -> None:
    codes, zeros, scales, groups = random_parts(16, 64, 32, 4)
    tensors = gptq_tensors(LINEAR, codes, zeros, scales, groups, 4, less_one=True)
    del tensors[f"{LINEAR}.g_idx"]
    weight = read(GPTQ, tensors, 16, 64)
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))
    scheme = scheme_of(GPTQ | {"desc_act": True})
    assert scheme is not None
    with pytest.raises(ValueError, match=r"no tensor: one of .*q_proj\.g_idx is needed"):
        read_weight(scheme, tensors, LINEAR, (16, 64))


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_gptq_has_no_zero_points(bits: int) -> None:
    codes, zeros, scales, groups = random_parts(16, 64, 32, bits)
    zeros = torch.full_like(zeros, 2 ** (bits - 1))
    tensors = gptq_tensors(LINEAR, codes, zeros, scales, groups, bits, less_one=True)
    weight = read(GPTQ | {"sym": True, "bits": bits}, tensors, 16, 64)
    assert weight.zeros is None
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))


def test_columns_of_compressed_tensors_may_be_in_an_order_of_groups() -> None:
    """Its older versions wrote this; the layout is that of GPTQ's groups."""
    codes, _, scales, groups = random_parts(8, 96, 32, 4)
    groups = groups[torch.randperm(96, generator=torch.Generator().manual_seed(2))]
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "actorder": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }
    tensors = {
        f"{LINEAR}.weight_packed": packed_words(codes, 4),
        f"{LINEAR}.weight_scale": scales,
        f"{LINEAR}.weight_shape": torch.tensor([8, 96]),
        f"{LINEAR}.weight_g_idx": groups.int(),
    }
    weight = read(config, tensors, 8, 96)
    assert torch.equal(dequantise(weight), meaning(codes, torch.full((8, 3), 8), scales, groups))


def gptq(**changes: Any) -> dict[str, Tensor]:
    codes, zeros, scales, groups = random_parts(16, 64, 32, 4)
    tensors = gptq_tensors(LINEAR, codes, zeros, scales, groups, 4, less_one=True)
    return tensors | {f"{LINEAR}.{name}": tensor for name, tensor in changes.items()}


def with_value(tensor: Tensor, value: float) -> Tensor:
    """A copy, with this value at [1, 2]."""
    tensor = tensor.clone()
    tensor[1, 2] = value
    return tensor


SCALES = gptq()[f"{LINEAR}.scales"]
# Stored 15 of the first version is 16, which 4 bits do not have.
HIGH = packed_words(torch.full((2, 16), 15), 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": SCALES[:1]}, r"scales has shape \[1, 16\]: scales, of 2 groups of 32 columns .*"
         r"must have shape \[2, 16\]"),
        ({"scales": with_value(SCALES, torch.nan)}, r"1 wrong of 32 scales, the first nan at "
         r"\[1, 2\]"),
        ({"scales": with_value(SCALES, -torch.inf)}, r"first -inf at \[1, 2\]: scales are finite"),
        ({"scales": SCALES.int()}, r"scales is in int32: .* in float32, bfloat16, float16"),
        ({"qzeros": HIGH}, r"qzeros has 32 zero points out of range, the first 16 at \[0, 0\]: "
         r"they are in \[0, 15\]"),
        ({"qzeros": HIGH[:, :1]}, r"qzeros has shape \[2, 1\]: .*\[2, 2\]"),
        ({"qweight": torch.zeros(8, 8, dtype=torch.int32)}, r"qweight has shape \[8, 8\]: a weight "
         r"\[16, 64\], transposed, in int32 of 8 codes must have shape \[8, 16\]"),
        ({"qweight": torch.zeros(8, 16)}, "qweight is in float32: .* must be in int32"),
        ({"g_idx": torch.arange(64, dtype=torch.int32) // 33}, "g_idx puts 33 columns into group "
         "0 of 2: it is of 32"),
        ({"g_idx": torch.full((64,), -1, dtype=torch.int32)}, r"64 groups out of range, the first "
         r"-1 at \[0\]: they are in \[0, 1\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_gptq_is_said(changes: dict[str, Tensor], message: str) -> None:
    scheme = scheme_of(GPTQ)
    assert scheme is not None
    with pytest.raises(ValueError, match=message) as error:
        read_weight(scheme, gptq(**changes), LINEAR, (16, 64))
    assert str(error.value).startswith(f"{LINEAR}.")


def test_zero_points_of_symmetric_gptq_say_nothing() -> None:
    scheme = scheme_of(GPTQ | {"sym": True})
    assert scheme is not None
    with pytest.raises(ValueError, match=r"qzeros has \d+ zero points of a symmetric format out"):
        read_weight(scheme, gptq(), LINEAR, (16, 64))


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (AWQ, (12, 64), "qweight has 12 rows: its packing takes a multiple of 8"),
        (AWQ, (16, 80), "qweight has 80 columns: its packing takes a multiple of 32"),
        (GPTQ, (12, 64), "qzeros has 12 rows: its packing takes a multiple of 8"),
        (GPTQ, (16, 60), "qweight has 60 columns: its packing takes a multiple of 8"),
    ],
)
def test_sizes_that_the_packing_does_not_take(
    config: dict[str, Any], shape: tuple[int, int], message: str
) -> None:
    scheme = scheme_of(config)
    assert scheme is not None
    M, K = shape
    tensors = {
        f"{LINEAR}.qweight": torch.zeros(K // 8, M, dtype=torch.int32),
        f"{LINEAR}.qzeros": torch.zeros(2, M // 8, dtype=torch.int32),
        f"{LINEAR}.scales": torch.ones(2, M),
    }
    with pytest.raises(ValueError, match=message):
        read_weight(scheme, tensors, LINEAR, shape)


@given(data=st.data())
def test_random_gptq_and_awq_weights_come_back(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([4, 8]))
    columns = data.draw(st.sampled_from([32, 64, 0]))
    M = 8 * data.draw(st.integers(1, 3))
    # Groups of GPTQ may end early.
    K = data.draw(st.sampled_from([32, 64, 96, 72]))
    codes, zeros, scales, groups = random_parts(M, K, columns, bits)
    order = torch.tensor(data.draw(st.permutations(range(K))))
    moved = groups[order]
    tensors = gptq_tensors(LINEAR, codes, zeros, scales, moved, bits, less_one=True)
    config = GPTQ | {"bits": bits, "group_size": columns or -1, "desc_act": True}
    weight = read(config, tensors, M, K)
    assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, moved))
    if bits == 4 and K % (columns or K) == 0:
        tensors = awq_tensors(LINEAR, codes, zeros, scales)
        weight = read(AWQ | {"group_size": columns or -1}, tensors, M, K)
        assert torch.equal(dequantise(weight), meaning(codes, zeros, scales, groups))
