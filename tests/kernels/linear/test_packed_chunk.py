"""Prefill products with packed weights: against references, at other lane counts, and their code.

Their kernels are Gluon's. Without a GPU their code for sm_90 is run in an emulation.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from extent import some_of
from graphengine.kernels.core.devices import SHARED_BYTES, Device, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.packed import PackedWeight, empty_packed, pack, packed_form
from graphengine.kernels.linear.prefill.packed_chunk import (
    ChunkTile,
    decodes_chunk,
    packed_chunk_product,
    packed_chunk_reference,
)
from graphengine.kernels.linear.quantised import WeightFormat, dequantise
from graphengine.kernels.norm_rope.activation import silu_reference
from launches import emulation
from launches.compilation import Op, compile_kernel, record_launch
from launches.hopper_emulation import run_launch
from launches.quantised import COMMON, FORMATS, inputs_of, random_quantised, to_device

MODULE = importlib.import_module("graphengine.kernels.linear.prefill.packed_chunk")
LAUNCHES = importlib.import_module("graphengine.kernels.linear.launches")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16 = torch.bfloat16, torch.float16
SENTINEL, NAN = 7.0, float("nan")
SMALL = ChunkTile(16, 1)
RTX_3090 = Device((8, 6), processors=82, shared_bytes=SHARED_BYTES[8, 6])
T4 = Device((7, 5), processors=40, shared_bytes=64 * 1024)


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """So that a program has several tiles in an emulated launch."""
    of_gpu = MODULE.processors_of
    monkeypatch.setattr(
        MODULE, "processors_of", lambda tensor: of_gpu(tensor) if tensor.is_cuda else 3
    )


def product_of(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    tile: ChunkTile | None = None,
    late: bool = True,
) -> torch.Tensor:
    """The kernel's outputs, which lie apart; asserts that it wrote nothing else."""
    lanes, M = len(x), weight.shape[0]
    width = M // 2 if swiglu else M
    room = torch.full((lanes + 1, -(-width // 16) * 16 + 16), SENTINEL).to(x)
    out = room[:lanes, :width]

    def call() -> None:
        found = packed_chunk_product(x, weight, bias, out=out, swiglu=swiglu, pdl=True, tile=tile)
        assert found is out

    if x.is_cuda:
        call()
    else:
        run_launch(record_launch(MODULE, call), late=late)
    result = out.clone()
    out.fill_(SENTINEL)
    assert bool((room == SENTINEL).all()), "something past the outputs was written"
    return result


def expected_of(
    x: torch.Tensor, floats: torch.Tensor, bias: torch.Tensor | None, swiglu: bool
) -> torch.Tensor:
    y = x.float() @ floats.t()
    y = y if bias is None else y + bias.float()
    if swiglu:
        gate, up = y.chunk(2, dim=1)
        y = silu_reference(gate) * up
    return y.to(x.dtype)


def check(
    close: Any,
    name: str,
    lanes: int,
    M: int,
    K: int,
    dtype: torch.dtype,
    *,
    swiglu: bool | None = None,
    tile: ChunkTile | None = None,
    late: bool = True,
    device: str = "cpu",
) -> None:
    """One launch against the reference; the last lane is padded and holds NaN.

    `swiglu` None: no SwiGLU; False: gates and ups.
    """
    quantised = random_quantised(name, M, K)
    floats = dequantise(quantised)
    x = inputs_of(floats, lanes, dtype).to(device)
    live = lanes - 1 if lanes > 1 else 1
    x[live:] = NAN
    bias = torch.randn(M, generator=torch.Generator().manual_seed(1)).to(x)
    weight = to_device(pack(quantised, swiglu=swiglu is not None), device)
    found = product_of(x, weight, bias, swiglu=bool(swiglu), tile=tile, late=late)
    expected = expected_of(x[:live], floats.to(device), bias, bool(swiglu))
    close(found[:live], expected, dtype)


# The kernel, emulated.


@compiles
@pytest.mark.parametrize(
    "name, dtype, lanes, M, K, swiglu, tile, late",
    [
        # Rows that end in a block and columns in a unit; rings that are used again.
        ("e4m3", BF16, 17, 70, 1096, None, SMALL, True),
        ("e4m3 in blocks", FP16, 5, 40, 520, False, SMALL, False),
        ("int8 with a zero a row", BF16, 3, 40, 136, None, SMALL, True),
        ("int8 in groups", FP16, 3, 24, 136, None, ChunkTile(16, 1, 2), False),
        ("int4", BF16, 3, 150, 648, None, ChunkTile(32), False),
        ("int4 with zeros", BF16, 2, 130, 136, None, SMALL, True),
        ("int4 in small groups", FP16, 3, 24, 136, None, ChunkTile(128, 1), True),
        ("mxfp4", BF16, 17, 72, 328, True, ChunkTile(16, 1, 4), False),
        ("mxfp4", FP16, 3, 24, 72, None, SMALL, True),
        ("nvfp4", BF16, 3, 24, 136, None, SMALL, True),
    ],
)
def test_matches_reference(assert_products_close, name, dtype, lanes, M, K, swiglu, tile, late):
    options = {"swiglu": swiglu, "tile": tile, "late": late}
    check(assert_products_close, name, lanes, M, K, dtype, **options)


@compiles
@pytest.mark.parametrize("name", some_of(COMMON, COMMON.index("int4"), COMMON.index("nvfp4")))
def test_bits_are_the_same_at_every_number_of_lanes_and_in_every_tile(name):
    quantised = random_quantised(name, 40, 328)
    weight, x = pack(quantised), inputs_of(dequantise(quantised), 20, BF16)
    whole = product_of(x, weight, tile=SMALL)
    for lane_of, tile in (([4], ChunkTile(16, 1, 2)), ([19, 0, 4, 4, 7], ChunkTile(64))):
        assert torch.equal(product_of(x[lane_of], weight, tile=tile), whole[lane_of])


@compiles
@pytest.mark.parametrize("byte", [40, 100, 159])
def test_powers_of_two_scale_codes_exactly(byte):
    """Up to the largest one that a weight may have."""
    quantised = random_quantised("mxfp4", 16, 64)
    quantised = quantised._replace(scales=torch.full_like(quantised.scales, byte))
    x = torch.eye(64, dtype=BF16)
    found = product_of(x, pack(quantised), tile=ChunkTile(64))
    exact = dequantise(quantised).t()
    # Below 2**-94 sums end in zero.
    assert torch.equal(found.float(), exact.where(exact.abs() >= 2.0**-94, found.float()))


# The kernel of decode, of other GPUs.


def decoded_product_of(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, *, swiglu: bool
) -> torch.Tensor:
    """What a GPU without `wgmma` computes, and any with a format that its kernel does not take."""
    lanes, M = len(x), weight.shape[0]
    out = x.new_full((lanes, M // 2 if swiglu else M), SENTINEL)

    def call() -> None:
        packed_chunk_product(x, weight, bias, out=out, swiglu=swiglu, pdl=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "use_wgmma", lambda x: not weight.format.is_common)
        if x.is_cuda:
            call()
        else:
            with assumed(RTX_3090):
                recorded = record_launch(LAUNCHES, call)
            assert recorded.arguments["PDL"] is False, "slots are written right before"
            emulation.run_launch(recorded)
    return out


def check_decoded(
    close: Any, name: str, lanes: int, M: int, K: int, dtype: torch.dtype, swiglu: bool, device: str
) -> None:
    quantised = random_quantised(name, M, K)
    floats = dequantise(quantised)
    x, floats = inputs_of(floats, lanes, dtype).to(device), floats.to(device)
    x[-1] = NAN
    bias = torch.randn(M, generator=torch.Generator().manual_seed(1)).to(x)
    weight = to_device(pack(quantised, swiglu=swiglu), device)
    found = decoded_product_of(x, weight, bias, swiglu=swiglu)
    close(found[:-1], expected_of(x[:-1], floats, bias, swiglu), dtype)
    alone = decoded_product_of(x[2:3], weight, bias, swiglu=swiglu)
    assert torch.equal(found[2:3], alone), "bits depend on how many lanes there are"


@compiles
@pytest.mark.parametrize(
    "name, dtype, lanes, M, K, swiglu",
    [
        ("int4 with zeros", BF16, MAX_LANES + 3, 40, 136, False),
        ("mxfp4", FP16, 20, 48, 264, True),
        ("e4m3", BF16, 5, 70, 520, False),
        ("q4_k", BF16, 5, 40, 264, False),
    ],
)
def test_other_gpus_run_the_kernel_of_decode(
    assert_products_close, name, dtype, lanes, M, K, swiglu
):
    check_decoded(assert_products_close, name, lanes, M, K, dtype, swiglu, "cpu")


@compiles
def test_what_the_kernel_of_decode_does_not_take_is_for_the_reference():
    weight, x = pack(random_quantised("int4", 16, 64)), torch.zeros(2, 64, dtype=BF16)
    for device, taken in ((RTX_3090, True), (T4, False)):
        with assumed(device):
            assert decodes_chunk(x, weight) == taken
    with assumed(RTX_3090):
        assert not decodes_chunk(x.float(), weight)
        assert not decodes_chunk(x, weight._replace(order=torch.arange(64).int()))
        assert not decodes_chunk(x, pack(random_quantised("int4", 16, 68)))
    assert not decodes_chunk(x, weight) or x.is_cuda


@gpu
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("swiglu", [False, True])
def test_other_gpus_run_the_kernel_of_decode_natively(assert_products_close, name, swiglu):
    check_decoded(assert_products_close, name, 515, 1056, 520, BF16, swiglu, "cuda")


# What a CPU engine runs, and what is refused.


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_cpu_multiplies_by_what_the_weight_means(monkeypatch, name):
    """Also in parts, which end where the weight ends."""
    monkeypatch.setattr(MODULE, "_REFERENCE_BLOCKS", 2)
    quantised = random_quantised(name, 72, 66)
    floats = dequantise(quantised)
    x, bias = inputs_of(floats, 3, torch.float32), torch.randn(72)
    for swiglu, fused in ((False, False), (True, False), (True, True)):
        out = torch.empty(3, 36 if fused else 72)
        weight = pack(quantised, swiglu=swiglu)
        found = packed_chunk_product(x, weight, bias, out=out, swiglu=fused)
        assert found is out
        torch.testing.assert_close(out, expected_of(x, floats, bias, fused))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_cpu_gives_the_same_bits_at_every_number_of_lanes(name):
    """Where it is asked to, for lanes in any order; with a SwiGLU as well."""
    quantised = random_quantised(name, 72, 200)
    x, bias = inputs_of(dequantise(quantised), 37, torch.float32), torch.randn(72)

    def multiplied(lane_of: list[int], swiglu: bool) -> torch.Tensor:
        out = torch.empty(len(lane_of), 36 if swiglu else 72)
        weight = pack(quantised, swiglu=swiglu)
        options: dict[str, Any] = {"out": out, "swiglu": swiglu, "any_lanes": True}
        return packed_chunk_product(x[lane_of], weight, bias, **options)

    for swiglu in (False, True):
        whole = multiplied([*range(37)], swiglu)
        expected = expected_of(x, dequantise(quantised), bias, swiglu)
        torch.testing.assert_close(whole, expected)
        for lane_of in ([4], [36, 0, 4, 4, 7], [*range(20)]):
            assert torch.equal(multiplied(lane_of, swiglu), whole[lane_of])


def test_a_cpu_takes_columns_in_another_order():
    quantised = random_quantised("int4", 16, 64)
    quantised = quantised._replace(order=torch.arange(64).flip(0).int())
    x, out = torch.randn(3, 64), torch.empty(3, 16)
    packed_chunk_product(x, pack(quantised), None, out=out)
    torch.testing.assert_close(out, expected_of(x, dequantise(quantised), None, False))


def test_a_cpu_rounds_once():
    quantised = random_quantised("int4", 16, 64)
    x = inputs_of(dequantise(quantised), 5, BF16)
    bias = torch.full((16,), 1000.0, dtype=BF16)
    out = torch.empty(5, 16, dtype=BF16)
    packed_chunk_product(x, pack(quantised), bias, out=out)
    assert torch.equal(out, expected_of(x, dequantise(quantised), bias, False))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"K": 62}, "x has K=62 input features, the weight 64"),
        ({"swiglu": True}, "a weight of 16 rows is not laid out as a SwiGLU"),
        ({"bias": 15}, "bias must be a dense .*16"),
        ({"width": 8}, r"out must be .* \[2, 16\]"),
    ],
)
def test_operands_that_do_not_fit_are_errors(changes, message):
    weight = pack(random_quantised("int4", 16, 64))
    x, bias = torch.zeros(2, changes.get("K", 64)), torch.zeros(changes.get("bias", 16))
    out = torch.zeros(2, changes.get("width", 16))
    with pytest.raises(ValueError, match=message):
        packed_chunk_product(x, weight, bias, out=out, swiglu=changes.get("swiglu", False))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": torch.float32}, "take float16 and bfloat16 inputs, not torch.float32"),
        ({"K": 68}, "a multiple of 8 input features on a GPU, not K=68"),
        ({"order": True}, "takes columns in order, and 64 have another"),
        ({"tile": ChunkTile(256)}, "ChunkTile.lanes=256.*2 of 3 steps of 81920 bytes fit"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error_where_it_runs(monkeypatch, changes, message):
    monkeypatch.setattr(MODULE, "use_wgmma", lambda x: True)
    K = changes.get("K", 64)
    weight = pack(random_quantised("e4m3 in blocks", 16, K))
    if changes.get("order"):
        weight = weight._replace(order=torch.arange(K).int())
    x = torch.zeros(2, K, dtype=changes.get("dtype", BF16))
    with pytest.raises(ValueError, match=message):
        packed_chunk_product(x, weight, None, out=x[:, :16], tile=changes.get("tile"))


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("M, lanes", [(16, 1), (28672, 32), (4096, 64), (4096, 128), (4096, 4096)])
def test_tiles_fit_shared_memory(name, M, lanes):
    weight = pack(random_quantised(name, 16, 64))
    for dtype in (FP16, BF16):
        form = MODULE.chunk_form(weight, dtype)
        tile = MODULE.chunk_tile(form, M, lanes, 132)
        assert MODULE.stages_of(form, weight.format.bits, tile) >= 3
        assert tile.lanes >= min(lanes, 128)


@pytest.mark.parametrize(
    "name, M, lanes, tile",
    [
        # 128 programs of 256 lanes end before 256 of half as many do on 132 multiprocessors.
        ("e4m3 rows", 4096, 1024, MODULE.ChunkTile(256)),
        ("e4m3 rows", 6144, 1024, MODULE.ChunkTile(256)),
        ("e4m3 rows", 4096, 512, MODULE.ChunkTile(128, 2, 2)),
        ("e4m3 rows", 4096, 128, MODULE.ChunkTile(128, 1, 2)),
        # Sums that groups scale have room for 128 lanes.
        ("int4 groups", 4096, 1024, MODULE.ChunkTile(128)),
        ("int4 groups", 28672, 128, MODULE.ChunkTile(128)),
        # Few lanes have steps of 256 columns, and more than 32 of 128.
        ("e4m3 rows", 4096, 3, MODULE.ChunkTile(16, 1, 4)),
        ("e4m3 rows", 4096, 33, MODULE.ChunkTile(64, 1, 2)),
        ("int4 groups", 4096, 32, MODULE.ChunkTile(32, 1, 2)),
        ("int4 groups", 4096, 64, MODULE.ChunkTile(64, 1, 1)),
    ],
)
def test_a_tile_is_the_one_whose_programs_end_first(name, M, lanes, tile):
    kind = {"e4m3 rows": WeightFormat("e4m3", 1, 0), "int4 groups": WeightFormat("int4", 1, 128)}
    weight = empty_packed(packed_form(kind[name], BF16), (16, 64), swiglu=False, device="cpu")
    assert MODULE.chunk_tile(MODULE.chunk_form(weight, BF16), M, lanes, 132) == tile


# The code.


def compiled(name: str, lanes: int, *, swiglu: bool = False) -> Any:
    weight = pack(random_quantised(name, 256, 1024), swiglu=swiglu)
    x = torch.empty(lanes, 1024, dtype=BF16)
    out = torch.empty(lanes, 128 if swiglu else 256, dtype=BF16)

    def call() -> None:
        packed_chunk_product(x, weight, None, out=out, swiglu=swiglu, pdl=True)

    recorded: Op = record_launch(MODULE, call)
    return compile_kernel(recorded)[0]


@compiles
@pytest.mark.parametrize("name, swiglu", [("e4m3", False), ("mxfp4", False), ("int4", True)])
def test_codes_are_converted_while_the_tensor_cores_multiply(name, swiglu):
    """The weight comes from registers, and a step's second unit is converted before its first one's
    products are waited for.
    """
    ptx = compiled(name, 128, swiglu=swiglu).asm["ptx"]
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (.)", ptx)
    assert products and set(products) == {"{"}
    steps = ptx.split("wgmma.wait_group")[:-1]
    assert steps
    for step in steps:
        first, second = step.split("wgmma.commit_group")[:2]
        assert "wgmma.mma_async" in first
        assert len(re.findall(r"(?:fma|mul)\.rn\.bf16x2", second)) >= 16


# What a GPU does.


@gpu
@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize(
    "lanes, M, K, swiglu, dtype",
    [
        (1, 16, 64, None, FP16),
        (15, 40, 72, False, BF16),
        (16, 300, 1096, None, FP16),
        (17, 72, 328, True, BF16),
        (300, 520, 2056, None, FP16),
        (1024, 4096, 1032, True, FP16),
        (1024, 8208, 1032, False, BF16),
    ],
)
def test_a_gpu_matches_the_reference(assert_products_close, name, dtype, lanes, M, K, swiglu):
    check(assert_products_close, name, lanes, M, K, dtype, swiglu=swiglu, device="cuda")


@gpu
@pytest.mark.parametrize("name", COMMON)
def test_a_gpu_gives_the_same_bits_at_every_number_of_lanes(name):
    """Lanes come in any order, with the tiles for so many and with others."""
    quantised = random_quantised(name, 4096, 1096)
    weight = to_device(pack(quantised), "cuda")
    x = inputs_of(dequantise(quantised), 1024, BF16).cuda()
    whole = product_of(x, weight, tile=ChunkTile(128))
    random = torch.Generator().manual_seed(0)
    for lanes in (1, 17, 64, 128, 300, 1024):
        lane_of = torch.randperm(1024, generator=random)[:lanes].cuda()
        assert torch.equal(product_of(x[lane_of], weight), whole[lane_of]), f"{lanes=}"
    scaled_by_groups = FORMATS[name][0].columns > 0 or FORMATS[name][0].has_zeros
    largest = ChunkTile(128, 1) if scaled_by_groups else ChunkTile(256)
    for tile in (ChunkTile(64), ChunkTile(32, 1, 2), largest):
        assert torch.equal(product_of(x, weight, tile=tile), whole), f"{tile=}"


@gpu
@pytest.mark.parametrize("swiglu", [False, True])
def test_a_gpu_reads_nothing_past_the_ends(swiglu):
    """Lanes, columns and rows that are none are NaN in the memory around them."""
    quantised = random_quantised("int4", 136, 200)
    weight = to_device(pack(quantised, swiglu=swiglu), "cuda")
    wide = torch.full((40, 256), NAN, dtype=BF16, device="cuda")
    x = wide[3:30, 8:208]
    x.copy_(inputs_of(dequantise(quantised), 27, BF16))
    alone = packed_chunk_reference(
        x.cpu(),
        to_device(weight, "cpu"),
        None,
        out=torch.empty(27, 136, dtype=BF16),
    )
    torch.testing.assert_close(product_of(x, weight).cpu(), alone, rtol=1.6e-2, atol=1.6e-2)
