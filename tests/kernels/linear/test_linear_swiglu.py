"""The fused gate, up and SwiGLU of prefill: when it is taken, its code for sm_90, and, on a Hopper
GPU, its results against the reference, at edges, alone and in company, after a launch that runs.

Gluon has no interpreter; what it compiles to is read without a GPU.
"""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.prefill.linear_swiglu import (
    _STAGES,
    LANES,
    _swiglu_kernel,
    fuses_swiglu,
    linear_swiglu,
    linear_swiglu_reference,
    tile_outputs,
)

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
hopper = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

linear_swiglu_module = importlib.import_module("graphengine.kernels.linear.prefill.linear_swiglu")

BF16 = torch.bfloat16
H200 = 132
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_rows(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) / shape[1] ** 0.25).to(device, dtype)


# When it is taken.


@pytest.mark.parametrize(
    "lanes, outputs, expected",
    [
        # Of llama 8B: 112 of 132 processors; two waves of them as busy, then four; seven full ones.
        (128, 14336, 128),
        (65, 14336, 128),
        (64, 14336, None),
        (256, 14336, 128),
        (512, 14336, None),
        (1024, 14336, 128),
        # Of llama 1B: half of the processors would idle at 128 outputs a tile.
        (128, 8192, 64),
        (256, 8192, 128),
        # Of Qwen3 4B and 0.6B.
        (128, 9728, None),
        (128, 3072, None),
    ],
)
def test_tiles_keep_the_processors_busy(lanes, outputs, expected):
    assert tile_outputs(lanes, outputs, H200) == expected


def test_a_cpu_keeps_the_blas():
    assert not fuses_swiglu(torch.empty(2 * 14336, 64, dtype=BF16), 128)


def test_weight_and_result_need_aligned_rows():
    fits = linear_swiglu_module._can_be_fused
    assert fits(torch.empty(2 * 24, 64, dtype=BF16)) and fits(torch.empty(16, 8).half())
    assert not fits(torch.empty(2 * 20, 64, dtype=BF16)), "rows of 40 bytes come out"
    assert not fits(torch.empty(2 * 24, 60, dtype=BF16)), "rows of 120 bytes go in"
    assert not fits(torch.empty(2 * 24, 64)), "float32"


def test_a_cpu_runs_the_reference():
    x, weight = random_rows(5, 24), random_rows(14, 24)
    expected = linear_swiglu_reference(x, weight)
    assert torch.equal(linear_swiglu(x, weight), expected)
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=1)
    torch.testing.assert_close(expected, (torch.nn.functional.silu(gate) * up).to(BF16))


@pytest.mark.parametrize("weight", [torch.empty(7, 24), torch.empty(8, 16), torch.empty(8, 24)])
def test_refuses_a_weight_that_does_not_fit(weight):
    """An odd number of rows, other columns, another dtype."""
    x = random_rows(5, 24)
    weight = weight if weight.shape == (8, 24) else weight.to(BF16)
    with pytest.raises(ValueError, match=r"weight_MK is .*\(5, 24\), takes an even number of rows"):
        linear_swiglu(x, weight)


def test_refuses_an_output_that_does_not_fit():
    with pytest.raises(ValueError, match=r"out must be torch.bfloat16 \[5, 4\]"):
        linear_swiglu(random_rows(5, 24), random_rows(8, 24), out=torch.empty(5, 8, dtype=BF16))


# What it compiles to.


@compiles
@pytest.mark.parametrize("outputs", sorted(_STAGES))
def test_weights_are_on_their_way_before_the_wait(outputs):
    ptx, shared = compiled(outputs)
    before, after = ptx.split("griddepcontrol.wait")
    copy = "cp.async.bulk.tensor.2d.shared"
    assert before.count(copy) == 2 * (_STAGES[outputs] - 1), "gates and ups of all steps but one"
    assert after.count(copy) == _STAGES[outputs] - 1 + 3
    assert "cp.async.bulk.tensor.2d.global" not in before
    # Both warp groups of a program leave registers for the sums; shared memory holds it once.
    assert shared <= 232_448
    assert len(re.findall(rf"wgmma\.mma_async\S*m64n{2 * outputs}k16", ptx)) == 4


@compiles
def test_gelu_is_compiled_in():
    """Its cube is one more product than silu has; the copies and products are the same."""
    silu, gelu = (compiled(64, activation)[0] for activation in (1, 2))
    assert "0f3D372713" in gelu and "0f3D372713" not in silu, "0.044715"
    for word in ("wgmma.mma_async", "cp.async.bulk.tensor"):
        assert silu.count(word) == gelu.count(word) > 0


def compiled(outputs: int, activation: int = 1) -> tuple[str, int]:
    """The PTX for sm_90, and the shared memory, of the kernel with these outputs a tile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    tiles = {"inputs": (LANES, 64), "weights": (outputs, 64), "out": (LANES, outputs)}
    constants = {
        **{"F": 14336, "K": 4096, "LANES": LANES, "B": outputs, "BLOCK_K": 64},
        **{
            "LANE_TILES": 8,
            "STAGES": _STAGES[outputs],
            "WARPS": 8,
            "ACTIVATION": activation,
            "PDL": True,
            "delta": None,
        },
    }
    signature = dict.fromkeys(constants, "constexpr")
    for name, tile in tiles.items():
        layout = gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16)
        signature[name] = f"tensordesc<bf16{list(tile)},{layout!r}>"
    names = _swiglu_kernel.arg_names
    source = GluonASTSource(
        _swiglu_kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return kernel.asm["ptx"], kernel.metadata.shared


# What it computes.


@hopper
@example(lanes=1024, outputs=8192, columns=64, dtype=BF16, pdl=True)
@example(lanes=100, outputs=8192, columns=200, dtype=torch.float16, pdl=False)
@settings(deadline=None, max_examples=examples(13, 40))
@given(
    lanes=st.integers(1, 300) | st.sampled_from([128, 129, 1024]),
    outputs=st.sampled_from([8, 64, 120, 128, 200, 1000, 8192]),
    columns=st.sampled_from([8, 64, 72, 200, 512, 1024]),
    dtype=st.sampled_from(list(TOLERANCE)),
    pdl=st.booleans(),
)
def test_matches_reference(lanes, outputs, columns, dtype, pdl):
    x = random_rows(lanes, columns, dtype=dtype, device="cuda")
    weight = random_rows(2 * outputs, columns, dtype=dtype, device="cuda")
    room = torch.full((lanes + 2, outputs), 77.0, dtype=dtype, device="cuda")
    linear_swiglu(x, weight, out=room[1:-1], pdl=pdl)
    expected = linear_swiglu_reference(x, weight)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(room[1:-1], expected, rtol=tolerance, atol=tolerance)
    assert (room[0] == 77).all() and (room[-1] == 77).all(), "written outside of its lanes"


@hopper
@pytest.mark.parametrize("outputs", [8192, 14336])
def test_bits_do_not_depend_on_company_nor_on_padded_lanes(outputs):
    weight = random_rows(2 * outputs, 256, device="cuda")
    x = random_rows(1024, 256, device="cuda")
    whole = linear_swiglu(x, weight)
    for count in (1, 17, 128, 200):
        order = torch.randperm(1024, device="cuda")[:count]
        assert torch.equal(linear_swiglu(x[order], weight), whole[order]), f"{count=}"
    x[1::2] = float("nan")
    assert torch.equal(linear_swiglu(x, weight)[::2], whole[::2])


@hopper
def test_rows_may_lie_apart():
    x = random_rows(40, 128, device="cuda")[:, 64:]
    weight = random_rows(256, 128, device="cuda")[:, 8:72]
    room = torch.zeros(40, 256, dtype=BF16, device="cuda")
    linear_swiglu(x, weight, out=room[:, :128])
    assert torch.equal(room[:, :128], linear_swiglu(x.contiguous(), weight.contiguous()))
    assert not room[:, 128:].any()


@hopper
@pytest.mark.parametrize("name", ["x_NK", "weight_MK", "out"])
def test_refuses_rows_that_are_not_aligned(name):
    rows = {
        "x_NK": random_rows(4, 64, device="cuda"),
        "weight_MK": random_rows(16, 64, device="cuda"),
        "out": torch.empty(4, 8, dtype=BF16, device="cuda"),
    }
    height, width = rows[name].shape
    rows[name] = torch.empty(height, width + 4, dtype=BF16, device="cuda")[:, 4:]
    with pytest.raises(ValueError, match=f"{name} is torch.bfloat16 in rows .* aligned to 16"):
        linear_swiglu(rows["x_NK"], rows["weight_MK"], out=rows["out"])


@hopper
def test_waits_for_what_the_launch_before_writes():
    """Replays of a long chain give the bits of one launch after the other."""
    weight = random_rows(2 * 14336, 4096, device="cuda")
    x = random_rows(1024, 4096, device="cuda")
    expected = linear_swiglu(x.clone().mul_(2), weight)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    source, out = torch.empty_like(x), torch.empty_like(expected)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            source.fill_(float("nan"))
            torch.mul(x, 2, out=source)
            linear_swiglu(source, weight, out=out, pdl=True)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@hopper
def test_is_taken_on_this_gpu():
    weight = torch.empty(2 * 14336, 4096, dtype=BF16, device="cuda")
    assert fuses_swiglu(weight, 1024) == (tile_outputs(1024, 14336, processors()) is not None)
    assert not fuses_swiglu(weight.float(), 1024)
    assert not fuses_swiglu(weight[:, 4:], 1024)


def processors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count
