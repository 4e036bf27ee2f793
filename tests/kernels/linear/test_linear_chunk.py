"""The prefill product of any number of lanes: the reference, and the Gluon kernel's code for sm_90
in an emulation, at edges, in every tile, alone and in company. On a Hopper GPU the kernel itself.
Logits are also computed in Triton's interpreter.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from extent import LONG
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.prefill.linear_chunk import (
    _STAGES,
    linear_chunk,
    linear_chunk_logits,
    linear_chunk_reference,
    tile_outputs,
)
from launches.compilation import record_launch
from launches.hopper_emulation import run_launch

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
hopper = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

MODULE = importlib.import_module("graphengine.kernels.linear.prefill.linear_chunk")
BF16 = torch.bfloat16
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SENTINEL = 77.0


def random_rows(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.25).to(device, dtype)


def product_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    width: int | None = None,
    late: bool = True,
) -> torch.Tensor:
    """The kernel's result, on a CPU in an emulation; `width` outputs a tile."""
    room = torch.full((len(x) + 2, len(weight)), SENTINEL, dtype=x.dtype, device=x.device)
    out = room[1:-1]
    with pytest.MonkeyPatch.context() as patch:
        if width is not None:
            patch.setattr(MODULE, "tile_outputs", lambda *sizes: width)
        if x.is_cuda:
            linear_chunk(x, weight, bias, out=out, pdl=True)
        else:
            with assumed(H200):
                launch = record_launch(
                    MODULE, lambda: linear_chunk(x, weight, bias, out=out, pdl=True)
                )
            run_launch(launch, late=late)
    assert (room[0] == SENTINEL).all() and (room[-1] == SENTINEL).all(), "outside of its lanes"
    return out


def check(lanes: int, M: int, K: int, dtype: torch.dtype, device: str, **options: object) -> None:
    x, weight = (random_rows(rows, K, dtype=dtype, device=device) for rows in (lanes, M))
    bias = random_rows(M, dtype=dtype, device=device) if options.pop("bias", True) else None
    found = product_of(x, weight, bias, **options)  # type: ignore[arg-type]
    expected = linear_chunk_reference(x, weight, bias)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **close)


@compiles
@pytest.mark.parametrize(
    "lanes, M, K, dtype, width, late",
    [
        # Ends of lanes, outputs and columns inside a tile; one step; more steps than stages.
        (3, 72, 200, BF16, 64, True),
        (130, 136, 72, torch.float16, 128, False),
        (5, 264, 328, BF16, 256, True),
    ],
)
def test_matches_the_reference(lanes, M, K, dtype, width, late):
    check(lanes, M, K, dtype, "cpu", width=width, late=late, bias=width != 128)


@compiles
def test_bits_are_the_same_at_every_number_of_lanes_and_in_every_tile():
    weight, x = random_rows(80, 136), random_rows(140, 136)
    whole = product_of(x, weight, width=64)
    x[1] = float("nan")
    lanes = [0, 139, 1, 5, 5]
    for width in (128, 256):
        found = product_of(x[lanes], weight, width=width)
        kept = [0, 1, 3, 4]
        assert torch.equal(found[kept], whole[[0, 139, 5, 5]])


def test_the_reference_has_the_same_bits_at_every_number_of_lanes():
    weight, x, bias = torch.randn(40, 100), torch.randn(37, 100), torch.randn(40)
    whole = linear_chunk(x, weight, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))
    for lanes in ([4], [36, 0, 4, 4, 7], [*range(20)]):
        assert torch.equal(linear_chunk(x[lanes], weight, bias), whole[lanes])


def test_logits_have_the_same_bits_at_every_number_of_lanes(device, dtypes):
    """In float32, of more lanes than a decode step has; padded ones hold NaN."""
    for dtype in dtypes:
        weight, x = (random_rows(n, 72, dtype=dtype, device=device) for n in (24, 71))
        slot = torch.arange(71, dtype=torch.int32, device=device)
        x[1], slot[1] = float("nan"), -1
        whole, live = linear_chunk_logits(x, weight, slot), slot >= 0
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(whole[live].double(), expected[live], rtol=1e-5, atol=1e-4)
        for lanes in ([4], [70, 0, 4, 4, 7], [*range(2, 40)]):
            found = linear_chunk_logits(x[lanes], weight, slot[lanes])
            assert torch.equal(found, whole[lanes])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(16, 56)}, r"weight_MK is .*\(16, 56\): x_NK, .* takes rows of 64"),
        ({"weight": torch.zeros(16, 64).half()}, "weight_MK is torch.float16"),
        ({"slot": torch.zeros(3, dtype=torch.int32)}, "slot_N must .*2"),
    ],
)
def test_operands_of_logits_that_do_not_fit_are_errors(changes, message):
    x, slot = torch.zeros(2, 64), changes.get("slot", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        linear_chunk_logits(x, changes.get("weight", torch.zeros(16, 64)), slot)


@pytest.mark.parametrize(
    "lanes, outputs, expected",
    [
        # Of llama 8B: its QKV, output, and gates and ups.
        (1024, 6144, 128),
        (1024, 4096, 256),
        (128, 28672, 256),
        (128, 4096, 64),
        (1, 4096, 64),
    ],
)
def test_tiles_keep_the_processors_busy(lanes, outputs, expected):
    assert tile_outputs(lanes, outputs, 132) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": torch.zeros(16, 56)}, r"weight_MK is .*\(16, 56\): x_NK, .* takes rows of 64"),
        ({"weight": torch.zeros(16, 64).half()}, "weight_MK is torch.float16"),
        ({"bias": torch.zeros(15)}, "bias_M must be a dense .*16"),
        ({"out": torch.zeros(2, 8)}, r"out must be .* \[2, 16\]"),
    ],
)
def test_operands_that_do_not_fit_are_errors(changes, message):
    x, weight = torch.zeros(2, 64), changes.get("weight", torch.zeros(16, 64))
    with pytest.raises(ValueError, match=message):
        linear_chunk(x, weight, changes.get("bias"), out=changes.get("out"))


@pytest.mark.parametrize(
    "x, weight, message",
    [
        (torch.zeros(2, 64), torch.zeros(16, 64), "x_NK is torch.float32 in rows 256 bytes"),
        (torch.zeros(2, 60, dtype=BF16), torch.zeros(16, 60, dtype=BF16), "x_NK .* 120 bytes"),
        (torch.zeros(2, 64, dtype=BF16), torch.zeros(20, 64, dtype=BF16), "out .* 40 bytes"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error_where_it_runs(x, weight, message):
    with assumed(H200), pytest.raises(ValueError, match=message):
        linear_chunk(x, weight)


@hopper
@pytest.mark.parametrize("width", sorted(_STAGES))
@pytest.mark.parametrize("lanes, M, K", [(1, 8, 8), (129, 200, 72), (300, 1000, 1032)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_matches_the_reference_natively(lanes, M, K, dtype, width):
    check(lanes, M, K, dtype, "cuda", width=width)


@hopper
@pytest.mark.parametrize("M, K", [(4096, 14336), (6144, 4096), (2048, 2048)])
def test_bits_are_the_same_natively(M, K):
    weight, x = random_rows(M, K, device="cuda"), random_rows(1024, K, device="cuda")
    whole = linear_chunk(x, weight)
    for count in (1, 17, 128, 200, 700) if LONG else (1, 200):
        order = torch.randperm(1024, device="cuda")[:count]
        assert torch.equal(linear_chunk(x[order], weight), whole[order]), f"{count=}"
    for width in _STAGES:
        assert torch.equal(product_of(x[:300], weight, width=width), whole[:300]), f"{width=}"
    x[1::2] = float("nan")
    assert torch.equal(linear_chunk(x, weight)[::2], whole[::2])


@hopper
def test_waits_for_what_the_launch_before_writes():
    """Replays of a long chain give the bits of one launch after the other."""
    weight, x = random_rows(4096, 4096, device="cuda"), random_rows(1024, 4096, device="cuda")
    expected = linear_chunk(x.clone().mul_(2), weight)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    source, out = torch.empty_like(x), torch.empty_like(expected)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            source.fill_(float("nan"))
            torch.mul(x, 2, out=source)
            linear_chunk(source, weight, out=out, pdl=True)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
