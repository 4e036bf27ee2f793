"""Programmatic dependent launch: what may be loaded before the wait, and that nothing else shows.

The compiler orders loads, so the order is read from the PTX, which needs no GPU. On a GPU the bits
of chains with and without PDL are compared, and a kernel that breaks the rule is caught doing so.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from extent import some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.pdl import EARLY, launch_options, wait_for_inputs
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import STORE, AddResidual, SampleTiles, StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed, residual_groups
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.sample.candidates import SamplingTensors
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_kernel,
    compile_launch,
    global_loads,
    record_launch,
)

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

EPS = 1e-5
NAN = float("nan")

DOT = LinearPlan("dot", block_m=32, block_k=128, stages=5)
DOT_SPLIT = DOT._replace(splits=4)
FMA = LinearPlan("fma", block_m=4, block_k=2048)
# Up to 16 lanes a program has one tile of them, up to 32 two; more take a second program, with
# arrivals and partial sums of its own. At 40 that one is partly empty.
DOT_LANES = (16, 32, 40, 64)
PLANS = [*((plan, lanes) for plan in (DOT, DOT_SPLIT) for lanes in DOT_LANES), (FMA, 2)]


# What the PTX says.


def params_of_slots(slots: int, device: str) -> SamplingTensors:
    """Every other slot is greedy; no filters, no stop ids."""
    return SamplingTensors.neutral(slots, device=device)._replace(
        temperature=torch.arange(slots, device=device) % 2.0,
        seed=torch.arange(slots, device=device),
    )


def launch_linear(
    kind: str, plan: LinearPlan, M: int, K: int, *, lanes: int = 1, groups: int = 64
) -> Op:
    """How a linear of this kind launches its kernel in bfloat16, with PDL."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    slot = new(lanes, dtype=torch.int32)
    squares = new(groups, lanes, dtype=torch.float32) if groups else None
    counters = new(arrivals_needed(plan, M), dtype=torch.int32)
    launch = Launch(arrivals=counters, pdl=True)
    call = LinearCall(new(lanes, K), new(M, K), slot, squares, plan=plan, launch=launch)

    def run() -> None:
        if kind == "residual":
            stream = Residual(new(lanes, M, dtype=torch.float32), new(lanes, M), new(0))
            linear(call._replace(squares_TN=None), AddResidual(stream, new(M)))
        elif kind in ("sample", "draft"):
            params = params_of_slots(lanes, "meta")
            ids = new(M, dtype=torch.int32) if kind == "draft" else None
            linear(call, SampleTiles(slot, params, token_ids=ids))
        else:
            store = StoreSwiglu() if kind == "swiglu" else STORE
            linear(call._replace(bias=new(M)), store)

    return record_launch(importlib.import_module("graphengine.kernels.linear.launches"), run)


def compile_linear(
    kind: str, plan: LinearPlan, M: int, K: int, *, lanes: int = 1, groups: int = 64
) -> tuple[dict[str, str], list[str]]:
    """The code for sm_90 of a linear kernel with PDL in bfloat16, and its arguments' names."""
    compiled, names = compile_kernel(launch_linear(kind, plan, M, K, lanes=lanes, groups=groups))
    return compiled.asm, names


FMA_KINDS = [
    ("store", 3072, 2048, FMA),
    # Four tiles of 2,048 columns.
    ("residual", 2048, 8192, FMA._replace(block_m=2)),
    ("swiglu", 16384, 2048, FMA),
    ("sample", 128256, 2048, FMA._replace(block_m=8)),
    ("draft", 32768, 2048, FMA._replace(block_m=8)),
]


@compiles
def test_an_early_launch_starts_the_next_one_before_its_own_wait():
    launch = launch_linear("store", DOT, 64, 128)
    launch = replace(launch, arguments={**launch.arguments, "PDL": EARLY})
    ptx, _ = compile_launch(launch)
    before, after = ptx.split("griddepcontrol.wait")
    assert before.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol.launch_dependents" not in after
    assert launch_options(EARLY) == {"PDL": EARLY, "launch_pdl": True}


@compiles
@pytest.mark.parametrize(
    "kind, M, K, plan, lanes",
    some_of([(*kind, lanes) for kind in FMA_KINDS for lanes in (1, 2)], 0, 1, 2, 5, 6, 9),
)
def test_fma_loads_its_weights_before_the_wait(kind, M, K, plan, lanes):
    code, names = compile_linear(kind, plan, M, K, lanes=lanes)
    ptx = code["ptx"]
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = sum(
        load.size for load in loads if load.argument == "weight_ptr" and not load.after_wait
    )
    assert early == plan.block_m * K * 2 / (32 * plan.warps)
    assert not [load for load in loads if load.argument == "weight_ptr" and load.after_wait]
    assert {load.argument for load in loads if not load.after_wait} <= {
        "weight_ptr",
        "residual.next_norm",
    }
    assert {"x_ptr", "slot_ptr"} <= {load.argument for load in loads if load.after_wait}
    assert all(load.size == 16 for load in loads if load.argument in ("weight_ptr", "x_ptr"))


@compiles
@pytest.mark.parametrize("plan", [DOT, DOT_SPLIT])
@pytest.mark.parametrize(
    "lanes, programs, tiles",
    [(1, 1, 1), (16, 1, 1), (17, 1, 2), (32, 1, 2), (33, 2, 2), (64, 2, 2)],
)
def test_lanes_are_cut_into_tiles_of_16(plan, lanes, programs, tiles):
    launch = launch_linear("store", plan, 3072, 2048, lanes=lanes)
    assert launch.grid == (programs, 3072 // plan.block_m, plan.splits)
    assert launch.arguments["LANE_TILES"] == tiles
    if plan.splits > 1:
        assert programs * launch.grid[1] <= arrivals_needed(plan, 3072)


DOT_KINDS = [
    ("store", 3072, 2048, DOT_SPLIT),
    ("residual", 2048, 8192, DOT_SPLIT),
    ("swiglu", 28672, 4096, DOT._replace(block_m=64, stages=3)),
    ("sample", 128256, 2048, DOT._replace(block_m=64, stages=3)),
    ("draft", 32768, 2048, DOT._replace(block_m=64, stages=3)),
]


@compiles
@pytest.mark.parametrize(
    "kind, M, K, plan, lanes",
    some_of(
        [(*kind, lanes) for kind in DOT_KINDS for lanes in (8, 16, 32, 64)],
        *(0, 2, 5, 7, 9, 10, 12, 15, 18),
    ),
)
def test_dot_loads_its_inputs_after_the_wait_and_multiplies_by_mma(kind, M, K, plan, lanes):
    """wgmma, which sm_90 takes at 64 rows, sums in another order than mma at 16."""
    groups = 0 if kind == "residual" else 64
    code, names = compile_linear(kind, plan, M, K, lanes=lanes, groups=groups)
    ptx = code["ptx"]
    assert "mma.sync" in ptx
    assert "wgmma" not in ptx
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    assert {load.argument for load in loads if not load.after_wait} <= {"residual.next_norm"}
    wanted = {"x_ptr", "weight_ptr", "slot_ptr"} | ({"squares_ptr"} if groups else set())
    assert wanted <= {load.argument for load in loads if load.after_wait}
    assert "cp.async" in ptx, "weights are no longer staged through shared memory"


def float_sums(ttgir: str) -> set[tuple[str, ...]]:
    """For each sum of floats over a 2D tile: (sizes, axis, elements, threads, warps it is over).

    The order of such a sum is the compiler's: first a thread's elements, then threads, then warps.
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    reduction = r'"tt\.reduce"(?:(?!tt\.reduce\.return).)*?axis = (\d).*?tt\.reduce\.return.*?'
    found = re.findall(reduction + r"\(tensor<(\d+x\d+)xf32, (#\w+)>\)", ttgir, re.DOTALL)
    sums = set()
    for axis, sizes, layout in found:
        spread = re.findall(r"\w+ = \[(\d+), (\d+)\]", layouts[layout])[:3]
        sums.add((sizes, axis, *(numbers[int(axis)] for numbers in spread)))
    return sums


SUMMING = [(DOT_SPLIT, (1, 32, 64)), (DOT._replace(block_m=64), (1, 32, 64)), (FMA, (1, 2))]
SUMMED = [("store", 64), ("store", 500), ("swiglu", 64), ("residual", 0)]


@compiles
@pytest.mark.parametrize(
    "plan, lanes, kind, groups",
    some_of([(*plan, *kind) for plan in SUMMING for kind in SUMMED], 0, 3, 5, 6, 9, 11),
)
def test_sums_of_squares_have_one_order(kind, groups, plan, lanes):
    """A lane's sums must not depend on how many other lanes are added up beside it."""
    few, *many = (
        float_sums(compile_linear(kind, plan, 2048, 2048, lanes=count, groups=groups)[0]["ttgir"])
        for count in lanes
    )
    assert all(sums == few for sums in many)
    assert few, "no sum of floats is found in what was compiled"


# What a GPU does.

gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="PDL exists on a GPU")


@pytest.fixture(scope="module")
def counters() -> torch.Tensor:
    """Arrivals for every plan of this file; zero between launches."""
    return torch.zeros(512, dtype=torch.int32, device="cuda")


@gpu
@pytest.mark.parametrize("plan, lanes", PLANS)
@pytest.mark.parametrize("swiglu", [False, True])
def test_linear_gives_the_same_bits(make_linear_case, counters, plan, lanes, swiglu):
    case = make_linear_case(lanes, 3072, 2048, torch.bfloat16, device="cuda", groups=64)

    def run(pdl: bool) -> torch.Tensor:
        call = case.call(eps=EPS, plan=plan, launch=Launch(arrivals=counters, pdl=pdl))
        return linear(call, StoreSwiglu() if swiglu else STORE)

    plain = run(False)
    for _ in range(20):
        assert torch.equal(run(True), plain)
    assert not counters.any()


@gpu
@pytest.mark.parametrize("plan, lanes", PLANS)
def test_linear_residual_gives_the_same_bits(make_linear_case, counters, plan, lanes):
    case = make_linear_case(lanes, 2048, 2048, torch.bfloat16, device="cuda")

    def run(pdl: bool) -> Residual:
        nothing = torch.empty(0, device="cuda")
        stream = Residual(case.stream.clone(), torch.zeros_like(case.x), nothing)
        call = case.call(plan=plan, launch=Launch(arrivals=counters, pdl=pdl))
        return linear(call, AddResidual(stream, case.next_norm))

    plain = run(False)
    for _ in range(20):
        # What is kept beside the stream is nothing here.
        assert all(map(torch.equal, run(True)[:3], plain[:3]))
    assert not counters.any()


@gpu
@pytest.mark.parametrize("plan, lanes", PLANS)
def test_linear_sample_gives_the_same_bits(make_linear_case, counters, plan, lanes):
    case = make_linear_case(lanes, 5000, 2048, torch.bfloat16, device="cuda", groups=64)
    position = torch.arange(3, 3 + lanes, dtype=torch.int32, device="cuda")
    params = params_of_slots(lanes, "cuda")

    def run(pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
        call = case.call(eps=EPS, plan=plan, launch=Launch(arrivals=counters, pdl=pdl))
        return linear(call, SampleTiles(position, params))

    plain = run(False)
    for _ in range(20):
        assert all(map(torch.equal, run(True), plain))
    assert not counters.any()


class Chain(NamedTuple):
    """Attention output, gate and up, down: x -> stream -> ffn -> stream, on buffers of its own."""

    first: Any
    gate_up: Any
    down: Any
    stream: Residual
    ffn: torch.Tensor

    def poison(self) -> None:
        """Forget all that the chain computes, and set the stream back."""
        self.stream.x.copy_(self.first.stream)
        self.stream.scaled.fill_(NAN)
        self.ffn.fill_(NAN)

    def run(self, plan: LinearPlan, arrivals: torch.Tensor, pdl: bool) -> Residual:
        options: dict[str, Any] = {"plan": plan, "launch": Launch(arrivals=arrivals, pdl=pdl)}
        slot, norm = self.first.slot, self.first.next_norm
        middle = linear(self.first.call(**options), AddResidual(self.stream, norm))
        gate_up, down = self.gate_up.weight, self.down.weight
        linear(
            LinearCall(middle.scaled, gate_up, slot, middle.squares, EPS, **options),
            StoreSwiglu(out=self.ffn),
        )
        call = LinearCall(self.ffn, down, slot, **options)
        return linear(call, AddResidual(middle, self.down.next_norm))


@gpu
@pytest.mark.parametrize("plan, lanes", PLANS)
def test_captured_chain_replays_the_bits_of_the_eager_one(make_linear_case, counters, plan, lanes):
    hidden, ffn = 2048, 4096
    first, gate_up, down = (
        make_linear_case(lanes, M, K, torch.bfloat16, device="cuda", padded=(1,), seed=seed)
        for seed, (M, K) in enumerate([(hidden, hidden), (2 * ffn, hidden), (hidden, ffn)])
    )
    stream = Residual(first.stream.clone(), torch.empty_like(first.x), torch.empty(0))
    chain = Chain(first, gate_up, down, stream, torch.empty_like(down.x))
    live = first.slot >= 0

    def results(final: Residual) -> list[torch.Tensor]:
        return [chain.ffn[live], final.x[live], final.scaled[live], final.squares[:, live]]

    chain.poison()
    expected = [tensor.clone() for tensor in results(chain.run(plan, counters, pdl=False))]
    assert all(tensor.isfinite().all() for tensor in expected)
    chain.run(plan, counters, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        final = chain.run(plan, counters, pdl=True)
    assert final.squares.shape[0] == residual_groups(plan, hidden)
    for replay in range(50):
        chain.poison()
        final.squares.fill_(NAN)
        graph.replay()
        for index, pair in enumerate(zip(results(final), expected, strict=True)):
            assert torch.equal(*pair), f"{replay=}, result {index}"
    assert not counters[: arrivals_needed(plan, 2 * ffn)].any()


@triton.jit
def _slow_copy(source_ptr, target_ptr, rounds, N: tl.constexpr, PDL: tl.constexpr):
    """target = source, long after the next kernel may have started."""
    wait_for_inputs(PDL)
    index = tl.arange(0, N)
    value = tl.load(source_ptr + index)
    # Each round needs the one before; an exact one, which no compiler knows.
    for _ in range(rounds):
        value = value * value
    tl.store(target_ptr + index, value)


@triton.jit
def _copy(source_ptr, target_ptr, N: tl.constexpr, RACES: tl.constexpr, PDL: tl.constexpr):
    """target = source; with RACES it reads what the kernel before writes, and then waits for it."""
    index = tl.arange(0, N)
    if RACES:
        value = tl.load(source_ptr + index)
        wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)
        value = tl.load(source_ptr + index)
    tl.store(target_ptr + index, value)


@compiles
@pytest.mark.parametrize("races", [False, True])
def test_the_racing_kernel_reads_before_its_wait(races):
    buffers = (torch.empty(1024, device="meta") for _ in range(2))
    values = (*buffers, 1024, races, launch_options(True)["PDL"])
    arguments = dict(zip(_copy.arg_names, values, strict=True))
    ptx, _ = compile_launch(Op(_copy, (1,), arguments, {}))
    assert (ptx.index("ld.global") < ptx.index("griddepcontrol.wait")) == races


def poisoned_replays(races: bool, replays: int) -> int:
    """How many of the `replays` of a slow kernel and a copy of its output copied the poison."""
    N = 1024
    source, middle, target = (torch.ones(N, device="cuda") for _ in range(3))
    options = launch_options(True)

    def launch() -> None:
        # 4 cycles a round: about 50 us.
        _slow_copy[(1,)](source, middle, 20_000, N=N, **options)
        _copy[(1,)](middle, target, N=N, RACES=races, **options)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    poisoned = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        middle.fill_(NAN)
        target.fill_(0)
        graph.replay()
        poisoned += target.isnan().any()
        assert not middle.isnan().any(), "the slow kernel is done once the graph is"
    return int(poisoned)


@gpu
def test_a_racing_kernel_is_caught():
    """What the discipline of `pdl.py` guards against does happen, but not to those that keep it."""
    assert poisoned_replays(races=True, replays=200) > 0
    assert poisoned_replays(races=False, replays=200) == 0
