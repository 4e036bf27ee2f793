"""Prefill products of e4m3 lanes and weights: against references and other lane counts; their code.

Their kernel is Gluon's. Without a GPU its code for sm_90 is run in an emulation, whose sums have
all bits; the tensor cores' own have fewer.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.packed import PackedWeight, pack
from graphengine.kernels.linear.prefill.lane_codes import lane_values, quantise_lanes
from graphengine.kernels.linear.prefill.packed_chunk import packed_chunk_product
from graphengine.kernels.linear.prefill.packed_chunk_fp8 import (
    Fp8Tile,
    fp8_tile,
    takes_fp8,
)
from graphengine.kernels.linear.quantised import WeightFormat, dequantise
from graphengine.kernels.norm_rope.activation import silu_reference
from launches.compilation import compile_kernel, record_launch
from launches.hopper_emulation import run_launch
from launches.quantised import FORMATS, inputs_of, random_quantised, to_device

MODULE = importlib.import_module("graphengine.kernels.linear.prefill.packed_chunk_fp8")
CHUNK = importlib.import_module("graphengine.kernels.linear.prefill.packed_chunk")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16 = torch.bfloat16, torch.float16
SENTINEL, NAN = 7.0, float("nan")
SMALL = Fp8Tile(16, 1)
NAMES = ("e4m3", "e4m3 of one scale", "e4m3 in blocks")
# Every tile, from the fewest registers to the most.
TILES = [Fp8Tile(lanes, groups) for groups in (1, 2) for lanes in (16, 32, 64, 128, 256)]


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
    tile: Fp8Tile | None = None,
    late: bool = True,
) -> torch.Tensor:
    """The kernel's outputs, which lie apart; asserts that it wrote nothing else."""
    lanes, M = len(x), weight.shape[0]
    width = M // 2 if swiglu else M
    room = torch.full((lanes + 1, -(-width // 16) * 16 + 16), SENTINEL).to(x)
    out = room[:lanes, :width]
    codes = quantise_lanes(x, pdl=True)
    codes.scales[lanes:] = NAN

    def call() -> None:
        found = packed_chunk_product(
            codes, weight, bias, out=out, swiglu=swiglu, pdl=True, tile=tile
        )
        assert found is out

    if x.is_cuda:
        call()
    else:
        run_launch(record_launch(CHUNK, call, MODULE), late=late)
    result = out.clone()
    out.fill_(SENTINEL)
    assert bool((room == SENTINEL).all()), "something past the outputs was written"
    return result


def expected_of(
    x: torch.Tensor, floats: torch.Tensor, bias: torch.Tensor | None, swiglu: bool
) -> torch.Tensor:
    """The product of what the lanes' codes mean, in float64."""
    y = lane_values(quantise_lanes(x)).double() @ floats.double().t()
    y = y if bias is None else y + bias.double()
    if swiglu:
        gate, up = y.float().chunk(2, dim=1)
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
    tile: Fp8Tile | None = None,
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
    # The tensor cores' sums have about as many bits as a float16 has, and each step adds to them.
    close(found[:live], expected, BF16 if device == "cuda" else dtype)


# The kernel, emulated.


@compiles
@pytest.mark.parametrize(
    "name, dtype, lanes, M, K, swiglu, tile, late",
    [
        # Rows that end in a block and columns in a step; rings that are used again.
        ("e4m3", BF16, 17, 70, 1096, None, SMALL, True),
        ("e4m3 of one scale", FP16, 3, 24, 72, None, SMALL, False),
        # Programs with several tiles, which go on in their rings.
        ("e4m3 of one scale", BF16, 50, 130, 392, None, SMALL, True),
        ("e4m3 in blocks", FP16, 5, 40, 520, False, SMALL, False),
        ("e4m3 in blocks", BF16, 3, 300, 264, None, Fp8Tile(32), True),
        # Two parts of lanes, of which the last ones are in the second.
        ("e4m3", BF16, 131, 72, 648, True, Fp8Tile(256), True),
        ("e4m3 in blocks", FP16, 131, 24, 1160, None, Fp8Tile(256), False),
    ],
)
def test_matches_reference(assert_products_close, name, dtype, lanes, M, K, swiglu, tile, late):
    options = {"swiglu": swiglu, "tile": tile, "late": late}
    check(assert_products_close, name, lanes, M, K, dtype, **options)


@compiles
def test_bits_are_the_same_at_every_number_of_lanes_and_in_every_tile():
    quantised = random_quantised("e4m3 in blocks", 40, 328)
    weight, x = pack(quantised), inputs_of(dequantise(quantised), 20, BF16)
    whole = product_of(x, weight, tile=SMALL)
    for lane_of, tile in (([4], Fp8Tile(64)), ([19, 0, 4, 4, 7], Fp8Tile(256))):
        assert torch.equal(product_of(x[lane_of], weight, tile=tile), whole[lane_of])


# What a CPU engine runs, and what is refused.


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_multiplies_by_what_codes_mean(name):
    quantised = random_quantised(name, 72, 136)
    floats = dequantise(quantised)
    x, bias = inputs_of(floats, 3, torch.float32), torch.randn(72)
    codes = quantise_lanes(x)
    for swiglu, fused in ((False, False), (True, False), (True, True)):
        out = torch.empty(3, 36 if fused else 72)
        weight = pack(quantised, swiglu=swiglu)
        found = packed_chunk_product(codes, weight, bias, out=out, swiglu=fused)
        assert found is out
        torch.testing.assert_close(out, expected_of(x, floats, bias, fused))


def test_formats_that_take_e4m3_activations():
    found = {name for name, (kind, _) in FORMATS.items() if takes_fp8(kind, 4096)}
    assert found == set(NAMES)
    assert takes_fp8(WeightFormat("e4m3", 1, 256), 4096)
    assert not takes_fp8(WeightFormat("e4m3", 1, 32), 4096)
    assert not takes_fp8(WeightFormat("e4m3", 1, 0), 4098)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"K": 60}, "x has K=60 input features, the weight 64"),
        ({"name": "int8"}, "a weight [16, 64] in int8-1x0 takes no e4m3 activations"),
        ({"scales": 2}, "x has 2 lanes and 2 scales, which are to be a multiple of 256"),
        ({"swiglu": True}, "a weight of 16 rows is not laid out as a SwiGLU"),
        ({"bias": 15}, "bias must be a dense torch.float32 [16]"),
        ({"width": 8}, "out must be torch.float32 [2, 16]"),
    ],
)
def test_operands_that_do_not_fit_are_errors(changes, message):
    weight = pack(random_quantised(changes.get("name", "e4m3"), 16, 64))
    x, bias = torch.zeros(2, changes.get("K", 64)), torch.zeros(changes.get("bias", 16))
    out = torch.zeros(2, changes.get("width", 16))
    codes = quantise_lanes(x)
    codes = codes._replace(scales=codes.scales[: changes.get("scales")])
    with pytest.raises(ValueError, match=re.escape(message)):
        packed_chunk_product(codes, weight, bias, out=out, swiglu=changes.get("swiglu", False))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": torch.float32}, "have float16 and bfloat16 outputs, not torch.float32"),
        ({"order": True}, "takes columns in order, and 64 have another"),
        (
            {"tile": Fp8Tile(256, 4)},
            "Fp8Tile(lanes=256, warp_groups=4): 2 of 3 steps of",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error_where_it_runs(monkeypatch, changes, message):
    x = torch.zeros(2, 64, dtype=changes.get("dtype", BF16))
    codes = quantise_lanes(x)
    monkeypatch.setattr(CHUNK, "use_wgmma", lambda x: True)
    weight = pack(random_quantised("e4m3", 16, 64))
    if changes.get("order"):
        weight = weight._replace(order=torch.arange(64).int())
    with pytest.raises(ValueError, match=re.escape(message)):
        packed_chunk_product(codes, weight, None, out=x[:, :16], tile=changes.get("tile"))


@pytest.mark.parametrize("M, lanes", [(16, 1), (28672, 32), (4096, 65), (4096, 128), (4096, 4096)])
def test_tiles_fit_shared_memory(M, lanes):
    tile = fp8_tile(M, lanes, 132)
    assert tile in TILES and tile.stages >= 3
    assert tile.lanes >= min(lanes, 128)


@pytest.mark.parametrize(
    "M, lanes, tile",
    [
        (4096, 8192, Fp8Tile(256)),
        (28672, 256, Fp8Tile(256)),
        # 128 of the largest are there at once, and 256 of half the size are not.
        (4096, 1024, Fp8Tile(256)),
        (6144, 1024, Fp8Tile(128)),
        (4096, 512, Fp8Tile(128)),
        (28672, 128, Fp8Tile(128)),
        (4096, 128, Fp8Tile(128, 1)),
        (4096, 65, Fp8Tile(128, 1)),
        (4096, 33, Fp8Tile(64, 1)),
        (28672, 1, Fp8Tile(16, 1)),
    ],
)
def test_tiles_keep_the_multiprocessors_busy(M, lanes, tile):
    assert fp8_tile(M, lanes, 132) == tile


# The code.


@compiles
@pytest.mark.parametrize("name, swiglu", [("e4m3", True), ("e4m3 in blocks", False)])
def test_codes_go_to_the_tensor_cores_as_they_are(name, swiglu):
    """From shared memory to the registers of `wgmma`, for 128 columns at a time."""
    quantised = random_quantised(name, 256, 1024)
    weight = pack(quantised, swiglu=swiglu)
    codes = quantise_lanes(torch.zeros(1024, 1024, dtype=BF16))
    out = torch.empty(1024, 128 if swiglu else 256, dtype=BF16)

    def call() -> None:
        packed_chunk_product(
            codes, weight, None, out=out, swiglu=swiglu, pdl=True, tile=Fp8Tile(256)
        )

    ptx = compile_kernel(record_launch(CHUNK, call, MODULE))[0].asm["ptx"]
    products = re.findall(r"wgmma\.mma_async\S+m64n128k32\.f32\.e4m3\.e4m3 \{[^}]*\}, (.)", ptx)
    # Of two warp groups, two parts of lanes, 4 times 32 columns; from registers.
    assert products == ["{"] * 16
    assert ptx.count("ld.shared.v4.b32") >= 16
    loop = ptx[ptx.index("wgmma.mma_async") : ptx.rindex("wgmma.mma_async")]
    assert "prmt" not in loop and "cvt.f32.e4m3" not in loop


# What a GPU does.


@gpu
@pytest.mark.parametrize("name", NAMES)
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
        (4096, 4096, 14336, None, BF16),
    ],
)
def test_a_gpu_matches_the_reference(assert_products_close, name, dtype, lanes, M, K, swiglu):
    check(assert_products_close, name, lanes, M, K, dtype, swiglu=swiglu, device="cuda")


@gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tile", TILES)
def test_a_gpu_matches_the_reference_in_every_tile(assert_products_close, name, tile):
    """Edges of lanes, rows and columns; rings that are used again, and several tiles a program."""
    for swiglu in (None, True):
        options: dict[str, Any] = {"swiglu": swiglu, "tile": tile, "device": "cuda"}
        check(assert_products_close, name, tile.lanes + 5, 200, 1608, BF16, **options)
    check(
        assert_products_close, name, 6 * tile.lanes - 1, 8200, 328, FP16, tile=tile, device="cuda"
    )


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_bits_at_every_number_of_lanes(name):
    """Lanes come in any order, with the tiles for so many and with all others."""
    quantised = random_quantised(name, 4096, 1096)
    weight = to_device(pack(quantised), "cuda")
    x = inputs_of(dequantise(quantised), 1024, BF16).cuda()
    whole = product_of(x, weight, tile=Fp8Tile(128))
    random = torch.Generator().manual_seed(0)
    for lanes in (1, 17, 64, 65, 128, 300, 1024):
        lane_of = torch.randperm(1024, generator=random)[:lanes].cuda()
        assert torch.equal(product_of(x[lane_of], weight), whole[lane_of]), f"{lanes=}"
    for tile in TILES:
        assert torch.equal(product_of(x, weight, tile=tile), whole), f"{tile=}"


@gpu
def test_a_gpu_loses_no_bits_in_long_sums():
    """One large product first, and then so many small ones that 14 bits would not hold the sum.

    In the first step those may be lost, which are 2 in all, and then the output is rounded.
    """
    K = 16384
    floats = torch.full((64, K), 2.0**-6)
    floats[:, 0] = 256.0
    kind = WeightFormat("e4m3", 1, 0)
    codes = floats.to(torch.float8_e4m3fn).view(torch.uint8)
    quantised = random_quantised("e4m3", 64, K)._replace(
        format=kind, codes=codes, scales=torch.ones(64, 1)
    )
    x = torch.ones(16, K, dtype=BF16, device="cuda")
    found = product_of(x, to_device(pack(quantised), "cuda"))
    exact = 256.0 + (K - 1) * 2.0**-6
    assert found.float().sub(exact).abs().max() <= 4.0


@gpu
@pytest.mark.parametrize("swiglu", [False, True])
def test_a_gpu_reads_nothing_past_the_ends(swiglu):
    """Lanes, columns and rows that are none are NaN in the memory around them."""
    quantised = random_quantised("e4m3 in blocks", 136, 200)
    weight = to_device(pack(quantised, swiglu=swiglu), "cuda")
    wide = torch.full((40, 256), NAN, dtype=BF16, device="cuda")
    x = wide[3:30, 8:208]
    x.copy_(inputs_of(dequantise(quantised), 27, BF16))
    expected = expected_of(x, dequantise(quantised).cuda(), None, False)
    torch.testing.assert_close(product_of(x, weight), expected, rtol=1.6e-2, atol=1.6e-2)


@gpu
def test_a_gpu_replays_both_kernels_from_a_graph():
    """Each waits for the one before it, where launches overlap."""
    quantised = random_quantised("e4m3", 512, 1024)
    weight = to_device(pack(quantised), "cuda")
    floats = dequantise(quantised).cuda()
    x = torch.zeros(300, 1024, dtype=BF16, device="cuda")
    out = torch.zeros(300, 512, dtype=BF16, device="cuda")
    codes = quantise_lanes(x)

    def step() -> None:
        for _ in range(3):
            quantise_lanes(x, out=codes, pdl=True)
            packed_chunk_product(codes, weight, None, out=out, pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        x.copy_(inputs_of(floats.cpu(), 300, torch.float32) * (seed + 1))
        graph.replay()
        expected = expected_of(x, floats, None, False)
        torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2 * (seed + 1))
