"""Faults to plant: each is a test file of another project in which one place differs.

These need no GPU; `planted/gpu_cases.py` has the others. The order is that of the table.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`program` has the one place `<here>`, which holds `sound` or `planted`.

    `message` is a line of the failure, in which `*` stands for anything. `alone` says that no other
    process may use the GPU meanwhile.
    """

    check: str
    fault: str
    program: str
    sound: str
    planted: str
    message: str
    alone: bool = False

    def source(self, here: str) -> str:
        return PREAMBLE + textwrap.dedent(self.program).replace("<here>", here)


PREAMBLE = """
import ctypes, random, time
import pytest, torch
from graphengine.buckets import GraphEdge, GraphNode, GraphStructure, KernelLaunch

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

SNAPSHOT = """
def test_it(graph_snapshot):
    nodes = [GraphNode(index=i, kind="kernel", name=n) for i, n in enumerate(("norm", "linear"))]
    edges = [GraphEdge(source=0, target=1, type=<here>)]
    graph_snapshot(GraphStructure(nodes=tuple(nodes), edges=tuple(edges)), max_kernels=2)
"""

OUTPUTS = """
def test_it(assert_outputs_written):
    x, y = torch.ones(8), torch.full((8,), 2.0)
    assert_outputs_written(lambda: <here>, {"y": y})
"""

DISPATCH = """
class Graph:
    replays = 0

    def replay(self):
        self.replays += 1
        torch.add(x, 1, out=y)

x, y = torch.zeros(8), torch.zeros(8)

def test_it(assert_replayed):
    graphs = {"4": Graph(), "8": Graph()}

    def run(rows):
        <here>

    with assert_replayed(graphs, {"4": 1, "8": 1}, most_eager=2):
        run(4)
        run(5)
"""

# A stand-in for torch's allocator, with two tensors in one segment.
MEMORY = """
def test_it(assert_no_dangling_pointers, monkeypatch):
    state = ["active_allocated", "active_allocated"]

    def snapshot():
        blocks = [{"size": 512, "state": each} for each in state]
        return [{"device": 0, "address": 0x1000, "total_size": 1024, "blocks": blocks}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    data = [(0x1004).to_bytes(8, "little"), (3).to_bytes(4, "little")]
    launch = KernelLaunch(path="0", name="attend", parameters=tuple(data))
    <before>
    with assert_no_dangling_pointers([launch]):
        <inside>
"""

SCALARS = """
def test_it(assert_no_host_scalars):
    position = 5

    def change():
        nonlocal position
        position = 7

    def capture(step):
        data = (0x1000).to_bytes(8, "little"), step().to_bytes(4, "little")
        return [KernelLaunch(path="0", name="attend", grid=(<grid>, 1, 1), parameters=data)]

    assert_no_host_scalars(lambda: <number>, change, capture=capture)
"""

# Of a kernel that stores one number, as ptxas takes it.
WAITS = """
PTX = '''
.visible .entry attend(.param .u64 out)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<2>;
    <here>
    griddepcontrol.wait;
    ld.param.b64 %rd1, [out];
    st.global.b32 [%rd1], 0;
$L_end:
    ret;
}
'''

def test_it(assert_pdl_waits):
    nodes = [GraphNode(index=i, kind="kernel", name=n) for i, n in enumerate(("norm", "attend"))]
    edges = [GraphEdge(source=0, target=1, type="programmatic", from_port=1)]
    assert_pdl_waits(GraphStructure(nodes=tuple(nodes), edges=tuple(edges)), [PTX])
"""

ISOLATED = """
PROGRAM = '''
import os
print("begun")
<here>
'''

def test_it(run_isolated):
    assert run_isolated(PROGRAM).stdout == "begun\\n"
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
        from graphengine.buckets import Field, StaticBuffers

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
        check="assert_replay_matches_eager",
        fault="a copy of an integer is replayed",
        program="""
        def test_it(assert_replay_matches_eager):
            rows, position, y = torch.ones(8, 4), torch.tensor(5), torch.zeros(4)
            frozen = position.clone()
            assert_replay_matches_eager(
                lambda: y.copy_(rows[position]),
                {"rows": rows, "position": position, "y": y},
                graph=lambda: y.copy_(rows[<here>]),
                draw={"position": range(8)},
            )
        """,
        sound="position",
        planted="frozen",
        message="*differs from eager in y (float32 [[]4]), first at row 0*(seed 0)*",
    ),
    Case(
        check="assert_replay_matches_eager",
        fault="nobody says which integers are valid",
        program="""
        def test_it(assert_replay_matches_eager):
            position, y = torch.tensor(5), torch.zeros(())
            step = lambda: y.copy_(position)
            assert_replay_matches_eager(step, {"position": position, "y": y}, <here>)
        """,
        sound='draw={"position": range(8)}',
        planted="",
        message="*position (int64 [[][]]) would keep the values of now, so a graph that has*",
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
        fault="a step writes nothing",
        program=PADDED,
        sound="torch.sum(x[:5], 0, out=y)",
        planted="torch.sum(x[:5], 0)",
        message="*`run` was not seen to write anything outside of the padding: x, y hold*",
    ),
    Case(
        check="poison_padding",
        fault="a step changes state that is not among the buffers",
        program="""
        def test_it(poison_padding):
            x, y, count = torch.ones(8), torch.zeros(8), torch.zeros(())
            unused = slice(5, None)
            buffers = {"x": x, "y": y, <here>}
            step = lambda: torch.mul(x, count.add_(1), out=y)
            poison_padding(buffers, step, padding={"x": unused, "y": unused})
        """,
        sound='"count": count',
        planted="",
        message="*`run` is not repeatable*differ in y*the first 1.0, the second 2.0*",
    ),
    Case(
        check="poison_padding",
        fault="one element is written past the end of a tensor",
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
        message="*a write past y (float32 [[]8]) without poison: * of 4096 bytes changed, the "
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
        fault="an attribute is bound to a new tensor",
        program="""
        class Runner:
            x, y = torch.zeros(4, 4), torch.zeros(4)

        def test_it(assert_pointers_stable):
            runner = Runner()
            with assert_pointers_stable(lambda: {"x": runner.x, "y": runner.y}):
                <here>
        """,
        sound="runner.y.copy_(torch.ones(4))",
        planted="runner.y = torch.ones(4)",
        message="*1 of 2 buffers moved*y was float32 [[]4] with strides [[]1] at 0x*, is *",
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
        check="assert_rng_advances",
        fault="a step draws from another generator than its own",
        program="""
        def test_it(assert_rng_advances):
            y, private = torch.zeros(8), torch.Generator()
            assert_rng_advances(lambda: y.uniform_(<here>), y, generators={"private": private})
        """,
        sound="generator=private",
        planted="",
        message="*generator 'private' did not advance in replay 1 of 2: the graph does not draw*",
    ),
    Case(
        check="assert_outputs_written",
        fault="the last rows are those of the warm-up",
        program=OUTPUTS,
        sound="torch.mul(x, 2, out=y)",
        planted="torch.mul(x[:5], 2, out=y[:5])",
        message="*a replay did not write 3 of 8 elements of y (float32 [[]8]), first at [[]5]*",
    ),
    Case(
        check="assert_outputs_written",
        fault="a sum is added to what was there",
        program=OUTPUTS,
        sound="y.zero_().add_(x)",
        planted="y.add_(x)",
        message="*a replay reads an output before it writes it: what was there before changed y*",
    ),
    Case(
        check="assert_replayed",
        fault="a batch without a bucket of its size runs eagerly",
        program=DISPATCH,
        sound="graphs[min((b for b in graphs if int(b) >= rows), key=int)].replay()",
        planted="graphs[str(rows)].replay() if str(rows) in graphs else torch.add(x, 1, out=y)",
        message="*bucket '8' was replayed 0 times, expected 1. 1 of 2 steps ran without a graph*",
    ),
    Case(
        check="assert_replayed",
        fault="a batch goes to too large a bucket",
        program=DISPATCH,
        sound='graphs["4" if rows <= 4 else "8"].replay()',
        planted='graphs["8"].replay()',
        message="*bucket '4' was replayed 0 times, expected 1; bucket '8' was replayed 2 times*",
    ),
    Case(
        check="assert_replayed",
        fault="a part of the step runs beside the graph",
        program=DISPATCH,
        sound='graphs["4" if rows <= 4 else "8"].replay()',
        planted='graphs["4" if rows <= 4 else "8"].replay(); y.exp_()',
        message="*4 of torch's operations ran eagerly beside 2 replays, most_eager=2: 2 x aten.*",
    ),
    Case(
        check="assert_no_dangling_pointers",
        fault="memory that a kernel was given is freed",
        program=MEMORY.replace("<before>", "pass").replace(
            "<inside>", "state[<here>] = 'inactive'"
        ),
        sound="1",
        planted="0",
        message="*1 of 1 addresses in the graph are of memory that was freed: node 0 (attend), "
        "parameter 0: 0x1004 in 512 B at 0x1000, freed*",
    ),
    Case(
        check="assert_no_dangling_pointers",
        fault="memory was freed before the capture ended",
        program=MEMORY.replace("<before>", "state[<here>] = 'inactive'").replace(
            "<inside>", "pass"
        ),
        sound="1",
        planted="0",
        message="*parameter 0: 0x1004 in 512 B at 0x1000, which is freed already*",
    ),
    Case(
        check="assert_no_host_scalars",
        fault="a kernel is given the position as a number",
        program=SCALARS.replace("<grid>", "8").replace("<number>", "<here>"),
        sound="0",
        planted="position",
        message="*1 values of the host are frozen in the graph: node 0 (attend), parameter 1: "
        "5 -> 7. Give them to the kernel in a tensor*",
    ),
    Case(
        check="assert_no_host_scalars",
        fault="a grid follows the length",
        program=SCALARS.replace("<grid>", "<here>").replace("<number>", "0"),
        sound="8",
        planted="position",
        message="*node 0 (attend): grid (5, 1, 1) -> (7, 1, 1)*",
    ),
    Case(
        check="assert_pdl_waits",
        fault="a kernel does not wait",
        program=WAITS.replace("griddepcontrol.wait;", "<here>", 1).replace("<here>", "", 1),
        sound="griddepcontrol.wait;",
        planted="",
        message="*1 of 1 programmatic edges lead into a kernel that does not wait: 0 (norm) -> "
        "1 (attend): it writes at line * (st.global.b32 *) before it has waited; it has 0 waits*",
    ),
    Case(
        check="assert_pdl_waits",
        fault="a padded program ends before the wait",
        program=WAITS,
        sound="",
        planted="@%p1 bra $L_end;",
        message="*1 (attend): it may end at line * (ret) before it has waited; it has 1 waits*",
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
        def test_it(latency_budget, monkeypatch):
            now = [0.0]

            def taking(seconds):
                def call():
                    now[0] += seconds
                return call

            monkeypatch.setattr(time, "perf_counter", lambda: now[0])
            latency_budget(taking(<here>), taking(0.001), median=3, repeats=20, warmup=1)
        """,
        sound="0.001",
        planted="0.005",
        message="*median ratio 5.000 is over its budget of 3: median * us against * us of the*",
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
        program="""
        def test_it(run_isolated):
            seconds, timeout = <here>
            run_isolated(f"import time; time.sleep({seconds})", timeout=timeout)
        """,
        sound="0, 600",
        planted="600, 0.5",
        message="*the program did not end within 0.5 s and was killed*",
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
        message="*+ node [[]2] kernel  cast*",
    ),
    Case(
        check="graph_snapshot",
        fault="an edge is no longer programmatic",
        program=SNAPSHOT,
        sound='"programmatic"',
        planted='"full"',
        message="*~ edge [[]0 -> 1] norm -> linear: type *programmatic* -> full*",
    ),
    Case(
        check="graph_snapshot",
        fault="more kernels than the budget has",
        program=SNAPSHOT.replace("<here>", '"full"').replace("max_kernels=2", "max_kernels=<here>"),
        sound="2",
        planted="1",
        message="*graph 'test_it' has 2 kernels, max_kernels=1*",
    ),
]
