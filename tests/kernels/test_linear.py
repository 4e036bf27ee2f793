"""The skinny linear: against its reference, against itself at other lane counts, and poisoned."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch
import triton
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphengine.kernels.dispatch import INTERPRETED
from graphengine.kernels.linear import (
    MAX_LANES,
    REFERENCE_ROWS,
    TilePlan,
    linear,
    linear_reference,
    tile_plan,
)

# The package exports the function under the module's name.
linear_module = sys.modules["graphengine.kernels.linear"]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SENTINEL = 77.0

# Llama 3.2 1B and Llama 3.1 8B: M, K, splits and epilogue of qkv, attention output, gate-up, down,
# and one lm_head.
LLAMA_WEIGHTS = [
    (3072, 2048, 1, "plain"),
    (2048, 2048, 1, "residual"),
    (16384, 2048, 1, "swiglu"),
    (2048, 8192, 4, "residual"),
    (6144, 4096, 1, "plain"),
    (4096, 4096, 1, "residual"),
    (28672, 4096, 1, "swiglu"),
    (4096, 14336, 2, "residual"),
    (128256, 2048, 1, "plain"),
]


class Case(NamedTuple):
    """Operands of one launch; `options` are linear's keyword arguments but `out`."""

    x: torch.Tensor
    weight: torch.Tensor
    slot: torch.Tensor
    options: dict[str, object]
    out: torch.Tensor

    def run(self, op=linear, **changes: object) -> torch.Tensor:
        """The output of `op` on copies of what it may write."""
        options = {"out": self.out.clone(), **self.options, **changes}
        if options.get("residual") is not None:
            options["residual"] = options["residual"].clone()
        return op(self.x, self.weight, self.slot, **options)


def make_case(
    lanes: int,
    M: int,
    K: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    epilogue: str = "plain",
    bias: bool = False,
    padded: tuple[int, ...] = (),
    out_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Random operands; `M` counts the weight's rows. Outputs are of order 1."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, weight = random(lanes, K), random(M, K) / K**0.5
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[list(padded)] = -1
    options: dict[str, object] = {"swiglu": epilogue == "swiglu"}
    if bias:
        options["bias"] = random(M).to(device, dtype)
    if epilogue == "residual":
        options["residual"] = random(lanes, M).to(device)
        out_dtype = torch.float32
    if out_dtype is not None:
        options["out_dtype"] = out_dtype
    outputs = M // 2 if epilogue == "swiglu" else M
    out = torch.full((lanes, outputs), SENTINEL, dtype=out_dtype or dtype, device=device)
    return Case(x.to(device, dtype), weight.to(device, dtype), slot.to(device), options, out)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=30)
@given(
    lanes=st.integers(1, MAX_LANES),
    outputs=st.integers(1, 80),
    K=st.integers(1, 300) | st.sampled_from([16, 64, 128, 256]),
    dtype=st.integers(0, 2),
    epilogue=st.sampled_from(["plain", "residual", "swiglu"]),
    bias=st.booleans(),
    wide_output=st.booleans(),
    data=st.data(),
)
def test_matches_reference(
    device, dtypes, lanes, outputs, K, dtype, epilogue, bias, wide_output, data
):
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    dtype = dtypes[dtype % len(dtypes)]
    case = make_case(
        lanes,
        2 * outputs if epilogue == "swiglu" else outputs,
        K,
        dtype,
        device=device,
        epilogue=epilogue,
        bias=bias,
        padded=tuple(padded),
        out_dtype=torch.float32 if wide_output else None,
    )
    # Padded lanes of both hold the sentinel.
    assert_close(case.run(), case.run(linear_reference), dtype)


@pytest.mark.parametrize("epilogue", ["plain", "residual", "swiglu"])
@pytest.mark.parametrize("lanes", [3, 19])
@pytest.mark.parametrize(
    "K, plan",
    [
        (128, TilePlan(block_m=32, block_k=32, splits=4, stages=3)),
        (128, TilePlan(block_m=64, block_k=64, splits=2, stages=3)),
        # Five tiles over four splits: the last split is empty, the last tile masked.
        (130, TilePlan(block_m=32, block_k=32, splits=4, stages=3)),
        # Fewer tiles than splits.
        (20, TilePlan(block_m=32, block_k=16, splits=4, stages=3)),
    ],
)
def test_split_k(device, dtypes, monkeypatch, epilogue, lanes, K, plan):
    monkeypatch.setattr(linear_module, "tile_plan", lambda *_: plan)
    for dtype in dtypes:
        case = make_case(
            lanes,
            # At 3 lanes more outputs than a block of the reduce kernel.
            540 if lanes == 3 and K == 128 else 70,
            K,
            dtype,
            device=device,
            epilogue=epilogue,
            bias=True,
            padded=(1,),
        )
        assert_close(case.run(), case.run(linear_reference), dtype)


@pytest.mark.parametrize("splits", [1, 2])
def test_residual_in_place(device, monkeypatch, splits):
    plan = TilePlan(block_m=32, block_k=32, splits=splits, stages=2)
    monkeypatch.setattr(linear_module, "tile_plan", lambda *_: plan)
    case = make_case(5, 40, 64, torch.float32, device=device, epilogue="residual", padded=(2,))
    stream = case.options["residual"].clone()
    returned = linear(case.x, case.weight, case.slot, residual=stream, out=stream)
    assert returned is stream
    expected = case.run()
    expected[2] = case.options["residual"][2]
    assert torch.equal(stream, expected)


def test_strided_operands(device):
    """Rows may lie apart: a slice of a wider matrix, as a fused projection leaves it."""
    case = make_case(6, 48, 64, torch.float16, device=device, epilogue="residual")
    x, weight = torch.zeros(6, 100).to(case.x), torch.zeros(48, 80).to(case.weight)
    x[:, :64], weight[:, 16:] = case.x, case.weight
    residual, out = torch.zeros(6, 50, device=device), torch.zeros(6, 60, device=device)
    residual[:, :48] = case.options["residual"]
    actual = linear(
        x[:, :64], weight[:, 16:], case.slot, residual=residual[:, :48], out=out[:, :48]
    )
    assert torch.equal(actual, case.run())
    assert (out[:, 48:] == 0).all()


@settings(deadline=None, max_examples=25)
@given(
    lanes=st.sampled_from([1, 2, 8, 16, 17, 32, 64]),
    epilogue=st.sampled_from(["plain", "residual", "swiglu"]),
    splits=st.sampled_from([1, 3]),
    poison=st.sampled_from([float("nan"), float("inf"), 6e4]),
    data=st.data(),
)
def test_padded_lanes_are_neither_read_nor_written(
    device, dtypes, lanes, epilogue, splits, poison, data
):
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1), min_size=1)))
    dtype = dtypes[-1]
    case = make_case(
        lanes, 48, 80, dtype, device=device, epilogue=epilogue, bias=True, padded=tuple(padded)
    )
    with pytest.MonkeyPatch.context() as patch:
        plan = TilePlan(block_m=32, block_k=32, splits=splits, stages=2)
        patch.setattr(linear_module, "tile_plan", lambda *_: plan)
        clean = case.run()
        case.x[padded] = poison
        if epilogue == "residual":
            case.options["residual"][padded] = poison
        poisoned = case.run()
    assert torch.equal(clean, poisoned)
    assert (poisoned[padded] == SENTINEL).all()


def assert_bits_do_not_depend_on_company(
    case: Case, op, counts: tuple[int, ...], seed: int = 0
) -> None:
    """Every lane alone, and all of them shuffled among padded ones at each count: the same bits."""
    lanes = case.x.shape[0]
    generator = torch.Generator().manual_seed(seed)
    residual = case.options.get("residual")

    def run(lane_of: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        chosen = lane_of.to(case.x.device)
        slot = torch.where(padded, -1, lane_of.int()).to(case.slot)
        options = dict(case.options)
        if residual is not None:
            options["residual"] = residual[chosen]
        return op(case.x[chosen], case.weight, slot, **options)

    alone = torch.cat([run(torch.tensor([i]), torch.tensor([False])) for i in range(lanes)])
    for count in counts:
        lane_of = torch.randint(lanes, (count,), generator=generator)
        padded = torch.rand(count, generator=generator) < 0.2
        live = (~padded).to(case.x.device)
        actual = run(lane_of, padded)
        expected = alone[lane_of.to(case.x.device)]
        assert torch.equal(actual[live], expected[live]), f"{count=} {lanes=}"


@pytest.mark.parametrize("epilogue", ["plain", "residual", "swiglu"])
@pytest.mark.parametrize("splits", [1, 2])
def test_bits_do_not_depend_on_company(device, dtypes, monkeypatch, epilogue, splits):
    plan = TilePlan(block_m=32, block_k=32, splits=splits, stages=2)
    monkeypatch.setattr(linear_module, "tile_plan", lambda *_: plan)
    for dtype in dtypes:
        case = make_case(16, 66, 100, dtype, device=device, epilogue=epilogue, bias=True)
        if device == "cuda":
            assert_bits_do_not_depend_on_company(case, linear, (1, 8, 16, 17, 32, 64))
            continue
        # The interpreter multiplies in a BLAS, to which the row and the tile's height matter.
        expected = case.run()
        for count in (1, 5, 8):
            fewer = case._replace(
                x=case.x[:count],
                slot=case.slot[:count],
                out=case.out[:count],
                options={
                    name: value[:count] if name == "residual" else value
                    for name, value in case.options.items()
                },
            )
            assert torch.equal(fewer.run(), expected[:count])


@pytest.mark.parametrize(
    "M, K, epilogue, dtype",
    [
        *((M, K, epilogue, torch.bfloat16) for M, K, _, epilogue in LLAMA_WEIGHTS),
        # Off the path without masks: K, then M; and a split of 17.5 tiles.
        (1002, 1003, "swiglu", torch.bfloat16),
        (9001, 1024, "plain", torch.bfloat16),
        (1536, 8960, "residual", torch.bfloat16),
        (2048, 2048, "plain", torch.float16),
        (2048, 2048, "swiglu", torch.float32),
    ],
)
def test_large_weights(device, M, K, epilogue, dtype):
    """On a GPU: right, and the same bits at every lane count, at the sizes the tiles are for."""
    if device != "cuda":
        pytest.skip("too large for the interpreter")
    case = make_case(8, M, K, dtype, device=device, epilogue=epilogue, bias=True)
    assert_close(case.run(), case.run(linear_reference), dtype)
    assert_bits_do_not_depend_on_company(case, linear, (1, 8, 16, 17, 32, 64))


def test_weight_beyond_int32_offsets(device):
    if device != "cuda":
        pytest.skip("needs 4.5 GB on a GPU")
    M, K = 2_200_000, 1024
    assert M * K > 2**31
    weight = torch.empty(M, K, dtype=torch.bfloat16, device=device).normal_(std=K**-0.5)
    case = make_case(2, 64, K, torch.bfloat16, device=device)
    last = linear(case.x, weight, case.slot)[:, -64:]
    assert_close(last, linear_reference(case.x, weight[-64:].clone(), case.slot), torch.bfloat16)


@pytest.mark.parametrize("M, K", [(3072, 2048), (2048, 8192)])
def test_capture_holds_kernels_that_replay_the_same_bits(device, M, K):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    case = make_case(8, M, K, torch.bfloat16, device=device, epilogue="residual", padded=(3,))
    expected = case.run()
    out, residual = case.out.clone(), case.options["residual"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(case.x, case.weight, case.slot, residual=residual, out=out)
    out.fill_(SENTINEL)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("lane_tile", [16, 32])
@pytest.mark.parametrize("swiglu", [False, True])
def test_tiles_compile_to_mma_sync(lane_tile, swiglu):
    """wgmma, which sm_90 takes at 64 rows, sums in another order. Compiles without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = linear_module._linear_kernel
    plan = tile_plan(28672, 4096, torch.bfloat16)
    constants = {
        "bias_ptr": None,
        "residual_ptr": None,
        "partial_ptr": None,
        "M": 28672,
        "K": 4096,
        "SWIGLU": swiglu,
        "SPLITS": plan.splits,
        "LANE_TILE": lane_tile,
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "EVEN_K": True,
    }
    types = dict.fromkeys(constants, "constexpr")
    types |= {"x_ptr": "*bf16", "weight_ptr": "*bf16", "slot_ptr": "*i32", "out_ptr": "*bf16"}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name not in constants and name != "lanes"
        },
    )
    options = {"num_warps": 4, "num_stages": plan.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert "mma.sync" in ptx
    assert "wgmma" not in ptx
    assert "cp.async" in ptx, "weights are no longer staged through shared memory"


def test_tile_plan():
    for M, K, splits, _ in LLAMA_WEIGHTS:
        for dtype in (torch.float16, torch.bfloat16):
            plan = tile_plan(M, K, dtype)
            staged = plan.stages * plan.block_k * 2 * (plan.block_m + 32)
            assert plan.splits == splits
            assert K % (plan.block_k * plan.splits) == 0, "off the path without masks"
            assert staged <= 100 * 1024, f"{staged} bytes of shared memory keep a successor out"


def test_tile_plan_of_odd_shapes():
    for K in [1, 16, 17, 63, 64, 100, 192, 896, 1000, 8193]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            plan = tile_plan(33, K, dtype)
            assert plan.block_k in (16, 32, 64, 128)
            assert plan.block_k < 2 * max(K, 16)
            assert plan.splits in (1, 2, 4)
    assert tile_plan(32, 192, torch.bfloat16).block_k == 64, "192 = 3 * 64 needs no mask"


def test_reference_matches_float64():
    case = make_case(7, 30, 50, torch.float32, epilogue="residual", bias=True)
    wide = case.x.double() @ case.weight.double().T + case.options["bias"].double()
    wide += case.options["residual"].double()
    torch.testing.assert_close(case.run(linear_reference).double(), wide, rtol=1e-5, atol=1e-5)

    case = make_case(7, 30, 50, torch.float32, epilogue="swiglu", bias=True)
    wide = case.x.double() @ case.weight.double().T + case.options["bias"].double()
    gate, up = wide.chunk(2, dim=1)
    wide = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(case.run(linear_reference).double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@settings(deadline=None, max_examples=80)
@given(
    lanes=st.integers(1, 16),
    M=st.integers(1, 300) | st.sampled_from([64, 128, 512, 1024, 4096]),
    K=st.integers(1, 300) | st.sampled_from([64, 128, 512, 1024, 2048]),
    epilogue=st.sampled_from(["plain", "residual", "swiglu"]),
    num_threads=st.sampled_from([1, 2]),
)
@example(lanes=16, M=1, K=1, epilogue="plain", num_threads=2)
@example(lanes=16, M=3 * 257, K=1025, epilogue="plain", num_threads=2)
@example(lanes=13, M=2 * 1000, K=333, epilogue="swiglu", num_threads=2)
@example(lanes=5, M=4096, K=4096, epilogue="residual", num_threads=1)
def test_reference_bits_do_not_depend_on_company(lanes, M, K, epilogue, num_threads):
    """A BLAS picks its kernel by the shape; elementwise loops treat an array's tail apart."""
    M += M % 2 if epilogue == "swiglu" else 0
    case = make_case(lanes, M, K, torch.float32, epilogue=epilogue, bias=True)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        counts = (lanes, REFERENCE_ROWS, 16, 33)
        assert_bits_do_not_depend_on_company(case, linear_reference, counts)
    finally:
        torch.set_num_threads(before)


def test_dispatches_to_the_reference_on_a_cpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs the kernel")
    case = make_case(5, 20, 30, torch.bfloat16, epilogue="swiglu", bias=True, padded=(0, 3))
    assert torch.equal(case.run(), case.run(linear_reference))


def operands() -> dict[str, object]:
    return {
        "x_NK": torch.zeros(2, 16),
        "weight_MK": torch.zeros(8, 16),
        "slot_N": torch.zeros(2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x_NK": torch.zeros(65, 16), "slot_N": torch.zeros(65).int()}, "1 to 64 lanes, not 65"),
        ({"x_NK": torch.zeros(0, 16), "slot_N": torch.zeros(0).int()}, r"\(0, 16\)"),
        ({"x_NK": torch.zeros(2, 15)}, "K=15 input features, the weight 16"),
        ({"x_NK": torch.zeros(2, 16).half()}, "float16, the weight torch.float32"),
        ({"x_NK": torch.zeros(16, 2).t()}, r"dense rows.*strides \(1, 2\)"),
        ({"x_NK": torch.zeros(16)}, r"\(16,\)"),
        ({"weight_MK": torch.zeros(8, 16).int()}, "weight_MK is torch.int32"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
        ({"slot_N": torch.zeros(2).long()}, "slot_N must be int32, not torch.int64"),
        ({"bias": torch.zeros(7)}, r"bias.*\[8\].*\(7,\)"),
        ({"bias": torch.zeros(8).half()}, "bias must be a dense torch.float32.*float16"),
        ({"residual": torch.zeros(2, 8).half()}, "residual must be float32, not torch.float16"),
        ({"residual": torch.zeros(2, 7)}, r"residual must be \[2, 8\].*\(2, 7\)"),
        ({"residual": torch.zeros(2, 8), "out_dtype": torch.float16}, "output is float32, not"),
        ({"residual": torch.zeros(2, 8), "swiglu": True}, "swiglu and residual"),
        ({"weight_MK": torch.zeros(7, 16), "swiglu": True}, "not 7 rows"),
        ({"out": torch.zeros(2, 7)}, r"\[2, 8\].*\[2, 7\]"),
        ({"out": torch.zeros(2, 8), "swiglu": True}, r"\[2, 4\].*\[2, 8\]"),
        ({"out": torch.zeros(2, 8).half()}, "out must be torch.float32.*float16"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
    ],
)
def test_bad_operands_are_errors_with_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        linear(**{**operands(), **changes})
