"""Every check lets a sound program pass and fails on the same program with one fault planted.

Each case is a test file of somebody else's project, in which `<here>` is the one place that
differs. It runs under the installed plugin, first sound, then with the fault.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest_plugins = ["pytester"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`message` is a line of the failure, in which `*` stands for anything."""

    check: str
    fault: str
    program: str
    sound: str
    planted: str
    message: str

    def source(self, here: str) -> str:
        return PREAMBLE + textwrap.dedent(self.program).replace("<here>", here)


PREAMBLE = """
import ctypes, random, time
import pytest, torch
from graphengine.buckets import Field, GraphEdge, GraphNode, GraphStructure, StaticBuffers

def capture(step):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    graph.instantiate()
    return graph
"""

# Programs in which several faults are planted.

REPLAY = """
def test_it(assert_replay_matches_eager):
    x, y = torch.ones(4, 3), torch.zeros(4, 3)
    factor, frozen = {"now": 1.0}, 1.0

    def fill(seed, live):
        x.normal_()
        factor["now"] = 1.0 + seed

    def step():
        torch.mul(x, factor["now"], out=y)

    def replay():
        <here>

    assert_replay_matches_eager(step, {"x": x, "y": y}, graph=replay, fill=fill)
"""

PADDED = """
def test_it(poison_padding):
    x, y = torch.ones(8), torch.zeros(())
    live = torch.arange(8) < 5

    def step():
        <here>

    poison_padding({"x": x, "y": y}, step, padding={"x": slice(5, None)})
"""

POINTERS = """
def test_it(assert_pointers_stable):
    buffers = {"x": torch.zeros(4, 4), "y": torch.zeros(4)}
    x = buffers["x"]
    with assert_pointers_stable(buffers):
        <here>
"""

STRUCTURE = """
def test_it({check}):
    def kernel(index):
        return GraphNode(index=index, kind="kernel", name=f"kernel_{{index}}")

    def edge(source, target, type="programmatic"):
        return GraphEdge(source=source, target=target, type=type, from_port=1)

    body = GraphStructure(nodes=(kernel(0), {node}), edges=({edge},))
    child = GraphNode(index=1, kind="child_graph", graphs=(body,))
    {check}(GraphStructure(nodes=(kernel(0), child), edges=(edge(0, 1),)))
"""

ISOLATED = """
PROGRAM = '''
import os, time
print("begun")
<here>
'''

def test_it(run_isolated):
    assert run_isolated(PROGRAM, timeout=3).stdout == "begun\\n"
"""

ON_REPLAY = """
def test_it({check}):
    x, y = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = capture(lambda: torch.add(x, 1, out=y))
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    with {check}():
        for _ in range(3):
            graph.replay()
            <here>
"""

IN_CAPTURE = """
def test_it({check}):
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")

    def step():
        <here>

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with {blocks}:
        step()
"""

CPU_CASES = [
    Case(
        check="assert_replay_matches_eager",
        fault="a Python number is frozen in the graph",
        program=REPLAY,
        sound='torch.mul(x, factor["now"], out=y)',
        planted="torch.mul(x, frozen, out=y)",
        message="*differs from eager in y (float32 [[]4, 3]), first at row 0*(seed 1)*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="the last row is not written",
        program=REPLAY,
        sound='torch.mul(x, factor["now"], out=y)',
        planted='torch.mul(x[:3], factor["now"], out=y[:3])',
        message="*in y*first at row 3, element [[]3, 0]: eager *, replay 0.0; 3 of 12 elements*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="one element is off by its last bit",
        program=REPLAY,
        sound='torch.mul(x, factor["now"], out=y)',
        planted='torch.mul(x, factor["now"], out=y)[2, 1] *= 1 + 2**-23',
        message="*in y*first at row 2, element [[]2, 1]: *; 1 of 12 elements differ (seed 0)*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="an input is changed",
        program=REPLAY,
        sound='torch.mul(x, factor["now"], out=y)',
        planted='torch.mul(x, factor["now"], out=y); x.zero_()',
        message="*differs from eager in x (float32*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="an output is overwritten by the next replay",
        program="""
        def test_it(assert_replay_matches_eager):
            inputs, static, y = torch.ones(2, 4), torch.zeros(4), torch.zeros(4)

            def graphed(x):
                static.copy_(x)
                torch.exp(static, out=y)
                return <here>

            assert_replay_matches_eager(
                lambda: [torch.exp(x) for x in inputs],
                {"inputs": inputs},
                graph=lambda: [graphed(x) for x in inputs],
            )
        """,
        sound="y.clone()",
        planted="y",
        message="*differs from eager in returned[[]0] (float32 [[]4]), first at row 0*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="the graph of one live size serves them all",
        program="""
        def test_it(assert_replay_matches_eager):
            table = [Field(name="x", shape=(8,), dtype=torch.float32)]
            buffers, total = StaticBuffers(table, "cpu"), torch.zeros(())
            live = 8

            def fill(seed, size):
                nonlocal live
                live = size
                buffers.x.fill_(1)

            assert_replay_matches_eager(
                lambda: torch.sum(buffers.x[:live], 0, out=total),
                {"x": buffers.x, "total": total},
                graph=lambda: torch.sum(buffers.x[:<here>], 0, out=total),
                fill=fill,
                live_sizes=(8, 3),
            )
        """,
        sound="live",
        planted="8",
        message="*in total (float32 [[][]]), first at its only element: eager 3.0, replay 8.0;*"
        "(seed 0, live size 3)*",
    ),
    Case(
        check="poison_padding",
        fault="a sum runs over padded lanes",
        program=PADDED,
        sound="torch.sum(x[:5], 0, out=y)",
        planted="torch.sum(x, 0, out=y)",
        message="*poison 'NaN, largest' in the padding of x changed y*: unpoisoned 8.0, *nan*",
    ),
    Case(
        check="poison_padding",
        fault="padded lanes are multiplied by zero instead of left out",
        program=PADDED,
        sound="torch.sum(torch.where(live, x, 0), 0, out=y)",
        planted="torch.sum(x * live, 0, out=y)",
        message="*poison 'NaN, largest' in the padding of x changed y*: unpoisoned 5.0, *nan*",
    ),
    Case(
        check="poison_padding",
        fault="the tail of a table is used as an index",
        program="""
        def test_it(poison_padding):
            table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([[4], [1]])
            rows, out = torch.randn(3), torch.zeros(2, 4)
            tail = torch.arange(4) >= lengths

            def step():
                out.copy_(rows[<here>].masked_fill(tail, 0))

            poison_padding({"table": table, "out": out}, step, padding={"table": tail})
        """,
        sound="table.masked_fill(tail, 0)",
        planted="table",
        message="*with poison 'NaN, largest' in the padding of table, the step failed: IndexError*",
    ),
    Case(
        check="poison_padding",
        fault="one element is written behind a tensor",
        program="""
        from graphengine.testing import CanaryPages

        def test_it(poison_padding):
            pages = CanaryPages("cpu")
            x, y = torch.ones(8), pages.empty("y", (8,), torch.float32)
            step = lambda: y.as_strided((<here>,), (1,)).fill_(2)
            unused = slice(5, None)
            poison_padding({"x": x, "y": y}, step, padding={"x": unused}, canaries=pages)
        """,
        sound="8",
        planted="9",
        message="*a write behind y (float32 [[]8]) without poison: * of 4096 bytes changed, the "
        "nearest 0 bytes from the tensor*",
    ),
    Case(
        check="assert_pointers_stable",
        fault="an input is replaced by a new tensor",
        program=POINTERS,
        sound='buffers["x"].copy_(torch.ones(4, 4))',
        planted='buffers["x"] = torch.ones(4, 4)',
        message="*1 of 2 buffers moved*x was float32 [[]4, 4] with strides [[]4, 1] at 0x*, is *",
    ),
    Case(
        check="assert_pointers_stable",
        fault="the memory of a tensor is exchanged",
        program=POINTERS,
        sound="x.zero_()",
        planted="x.data = torch.zeros(4, 4)",
        message="*1 of 2 buffers moved*",
    ),
    Case(
        check="assert_pointers_stable",
        fault="a tensor is transposed in place",
        program=POINTERS,
        sound="x.t()",
        planted="x.t_()",
        message="*strides [[]4, 1] at *, is float32 [[]4, 4] with strides [[]1, 4]*",
    ),
    Case(
        check="assert_rng_advances",
        fault="the random number of the capture is replayed",
        program="""
        def test_it(assert_rng_advances):
            y, frozen = torch.zeros(8), torch.rand(8)
            assert_rng_advances(lambda: y.copy_(<here>), y)
        """,
        sound="torch.rand(8)",
        planted="frozen",
        message="*the random numbers are frozen: two replays left the same 8 elements*",
    ),
    Case(
        check="assert_rng_advances",
        fault="a fixed seed is not used",
        program="""
        def test_it(assert_rng_advances):
            y, generator = torch.zeros(8), torch.Generator()

            def replay():
                generator.manual_seed(7)
                y.uniform_(<here>)

            assert_rng_advances(replay, y, fixed=True)
        """,
        sound="generator=generator",
        planted="",
        message="*two replays with a fixed seed differ in output (float32 [[]8]), first at row 0*",
    ),
    Case(
        check="assert_no_host_nodes",
        fault="a nested graph calls a function on the host",
        program=STRUCTURE.format(check="assert_no_host_nodes", node="<here>", edge="edge(0, 1)"),
        sound="kernel(1)",
        planted='GraphNode(index=1, kind="host")',
        message="*1 host nodes in the graph: node 1/0/1*",
    ),
    Case(
        check="assert_pdl_edges",
        fault="an edge waits for all of a kernel",
        program=STRUCTURE.format(check="assert_pdl_edges", node="kernel(1)", edge="<here>"),
        sound="edge(0, 1)",
        planted='edge(0, 1, "full")',
        message="*1 of 2 edges are programmatic (50.0%), expected at least 100.0%; full: "
        "1/0/0 (kernel_0) -> 1/0/1 (kernel_1)*",
    ),
    Case(
        check="latency_budget",
        fault="a replay takes five times as long",
        program="""
        def test_it(latency_budget):
            wait = lambda seconds: lambda: time.sleep(seconds)
            latency_budget(wait(<here>), wait(0.001), median=3, p99=100, repeats=20, warmup=1)
        """,
        sound="0.001",
        planted="0.005",
        message="*median ratio * is over its budget of 3: median * us against * us of the*",
    ),
    Case(
        check="run_isolated",
        fault="the child raises",
        program=ISOLATED,
        sound="pass",
        planted='raise ValueError("boom")',
        message="*ValueError: boom*",
    ),
    Case(
        check="run_isolated",
        fault="the child is killed by a signal",
        program=ISOLATED,
        sound="pass",
        planted="os.abort()",
        message="*the program ended with signal 6 (SIGABRT), expected exit status 0*",
    ),
    Case(
        check="run_isolated",
        fault="the child does not end",
        program=ISOLATED,
        sound="pass",
        planted="time.sleep(60)",
        message="*the program did not end within 3 s and was killed*",
    ),
    Case(
        check="graph_snapshot",
        fault="one more kernel",
        program="""
        def test_it(graph_snapshot):
            names = ["norm", "linear", <here>]
            nodes = [GraphNode(index=i, kind="kernel", name=n) for i, n in enumerate(names)]
            graph_snapshot(GraphStructure(nodes=tuple(nodes)))
        """,
        sound="",
        planted='"cast"',
        message="*cast*",
    ),
]

GPU_CASES = [
    Case(
        check="no_sync",
        fault="a replay is followed by .item()",
        program=ON_REPLAY.format(check="no_sync"),
        sound="pass",
        planted="y[0].item()",
        message="*the block waits for the device:*",
    ),
    Case(
        check="no_sync",
        fault="a result is copied to pageable memory",
        program=ON_REPLAY.format(check="no_sync"),
        sound='y.to("cuda")',
        planted='y.to("cpu")',
        message="*the block waits for the device:*",
    ),
    Case(
        check="no_sync",
        fault="torch.cuda.synchronize()",
        program=ON_REPLAY.format(check="no_sync"),
        sound="event.record()",
        planted="torch.cuda.synchronize()",
        message="*the block waits for the device by torch.cuda.synchronize():*",
    ),
    Case(
        check="no_sync",
        fault="Stream.synchronize()",
        program=ON_REPLAY.format(check="no_sync"),
        sound="stream.query()",
        planted="stream.synchronize()",
        message="*the block waits for the device by Stream.synchronize():*",
    ),
    Case(
        check="no_sync",
        fault="Event.synchronize()",
        program=ON_REPLAY.format(check="no_sync"),
        sound="event.record(); event.query()",
        planted="event.record(); event.synchronize()",
        message="*the block waits for the device by Event.synchronize():*",
    ),
    Case(
        check="no_sync",
        fault="a sync inside of a capture",
        program=IN_CAPTURE.format(check="no_sync", blocks="no_sync(), torch.cuda.graph(graph)"),
        sound="torch.mul(x, 2, out=y)",
        planted="torch.mul(x, x.sum().item(), out=y)",
        message="*the block waits for the device:*",
    ),
    Case(
        check="no_alloc",
        fault="a copy of the output beside each replay",
        program=ON_REPLAY.format(check="no_alloc"),
        sound="x.copy_(y)",
        planted="y.clone()",
        message="*the block allocated 1.5 KiB in 3 allocations*",
    ),
    Case(
        check="no_alloc",
        fault="an allocation inside of a capture",
        program=IN_CAPTURE.format(check="no_alloc", blocks="torch.cuda.graph(graph), no_alloc()"),
        sound="torch.mul(x, 2, out=y)",
        planted="y.copy_(x * 2)",
        message="*the block allocated *in 1 allocations*the allocator grew by 1 segments*",
    ),
    Case(
        check="check_no_alloc",
        fault="memory taken from the driver with each replay",
        program="""
        from cuda.bindings import driver

        def test_it(check_no_alloc):
            x = torch.zeros(8, device="cuda")
            graph = capture(lambda: x.add_(1))

            def replay():
                graph.replay()
                driver.cuMemAlloc(<here>) if <here> else None

            check_no_alloc(replay, replays=10, tolerance_bytes=2**25)
        """,
        sound="0",
        planted="2**24",
        message="*the driver's free memory fell by 160.0 MiB over 10 replays*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="a Python number is frozen in a captured graph",
        program="""
        def test_it(assert_replay_matches_eager):
            x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
            number, tensor = [1.0], torch.ones((), device="cuda")

            def fill(seed, live):
                x.normal_()
                number[0] = 1.0 + seed
                tensor.fill_(1.0 + seed)

            assert_replay_matches_eager(
                lambda: torch.mul(x, <here>, out=y), {"x": x, "y": y, "scale": tensor}, fill=fill
            )
        """,
        sound="tensor",
        planted="number[0]",
        message="*differs from eager in y (float32 [[]4]), first at row 0*(seed 1)*",
    ),
    Case(
        check="poison_padding",
        fault="a captured sum runs over padded lanes",
        program="""
        def test_it(poison_padding):
            x, y = torch.ones(8, device="cuda"), torch.zeros((), device="cuda")
            graph = capture(lambda: torch.sum(x[:<here>], 0, out=y))
            poison_padding({"x": x, "y": y}, graph.replay, padding={"x": slice(5, None)})
        """,
        sound="5",
        planted="8",
        message="*changed y (float32 [[][]])*unpoisoned 8.0, poisoned nan*",
    ),
    Case(
        check="assert_rng_advances",
        fault="the host's random number is frozen in a captured graph",
        program="""
        def test_it(assert_rng_advances):
            y = torch.zeros(8, device="cuda")
            graph = capture(lambda: y.<here>)
            assert_rng_advances(graph.replay, y)
        """,
        sound="uniform_()",
        planted="fill_(random.random())",
        message="*the random numbers are frozen: two replays left the same 8 elements*",
    ),
    Case(
        check="assert_no_host_nodes",
        fault="a function of the host is captured",
        program="""
        FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)

        def on_host():
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert not ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, FUNCTION, None)

        def test_it(assert_no_host_nodes):
            x = torch.zeros(8, device="cuda")
            assert_no_host_nodes(capture(lambda: (x.add_(1), <here>)))
        """,
        sound="x.add_(2)",
        planted="on_host()",
        message="*1 host nodes in the graph: node 1*",
    ),
    Case(
        check="assert_pdl_edges",
        fault="a kernel is launched without overlap",
        program="""
        import triton
        import triton.language as tl
        from graphengine.kernels.pdl import launch_options, wait_for_inputs

        @triton.jit
        def increment(x, N: tl.constexpr, PDL: tl.constexpr):
            wait_for_inputs(PDL)
            place = tl.arange(0, N)
            tl.store(x + place, tl.load(x + place) + 1)

        def test_it(assert_pdl_edges):
            x = torch.zeros(8, device="cuda")

            def step():
                for pdl in (True, True, <here>):
                    increment[(1,)](x, N=8, **launch_options(pdl))

            assert_pdl_edges(capture(step))
        """,
        sound="True",
        planted="False",
        message="*1 of 2 edges are programmatic (50.0%)*full: 1 (increment) -> 2 (increment)*",
    ),
    Case(
        check="latency_budget",
        fault="a replay takes much longer",
        program="""
        def test_it(latency_budget):
            def graph(cycles):
                return capture(lambda: torch.cuda._sleep(cycles))

            latency_budget(
                graph(<here>).replay, graph(100_000).replay, median=3, p99=50, repeats=20, warmup=2
            )
        """,
        sound="100_000",
        planted="1_000_000",
        message="*median ratio *is over its budget of 3: *",
    ),
    Case(
        check="run_isolated",
        fault="an index out of range breaks the CUDA context",
        program="""
        def program():
            place = torch.tensor([<here>], device="cuda")
            torch.zeros(8, device="cuda").index_select(0, place)
            torch.cuda.synchronize()

        def test_it(run_isolated):
            run_isolated(program)
            torch.ones(1, device="cuda").item()
        """,
        sound="7",
        planted="8",
        message="*device-side assert*",
    ),
    Case(
        check="graph_snapshot",
        fault="one more kernel in a captured graph",
        program="""
        def test_it(graph_snapshot):
            x = torch.zeros(8, device="cuda")
            graph_snapshot(capture(lambda: (x.add_(1), <here>)))
        """,
        sound="",
        planted="x.exp_()",
        message="*exp*",
    ),
]


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *(pytest.param(case, "CPU", id=f"{case.check}: {case.fault}") for case in CPU_CASES),
        *(
            pytest.param(case, "GPU", id=f"{case.check}: {case.fault}", marks=pytest.mark.gpu)
            for case in GPU_CASES
        ),
    ],
)
def test_a_planted_fault_is_caught(
    case: Case,
    device: str,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    for key, value in (("check", case.check), ("fault", case.fault), ("device", device)):
        record_property(key, value)
    # The file changes faster than the clock by which cached bytecode is judged.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    pytester.makepyfile(test_program=case.source(case.sound))
    # hypothesis would be imported, and rewritten, in every run.
    options = "-p", "no:hypothesispytest"
    pytester.runpytest(*options, "--graph-snapshot-update").assert_outcomes(passed=1)
    pytester.makepyfile(test_program=case.source(case.planted))
    result = pytester.runpytest(*options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([case.message])
