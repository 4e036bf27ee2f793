"""Faults to plant that need a GPU, in the form of `planted/cases.py`."""

from __future__ import annotations

from planted.cases import Case

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

INCREMENT = """
import triton
import triton.language as tl

@triton.jit
def increment(x, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(x + place, tl.load(x + place) + 1)

def test_it(assert_no_dangling_pointers):
    held = {"x": torch.zeros(1024, device="cuda")}
    graph = capture(lambda: increment[(1,)](held["x"], N=1024))
    <before>
    with assert_no_dangling_pointers(graph, buffers=dict(held)):
        <inside>
        graph.replay()
"""

REPLAYED = """
def test_it(assert_replayed):
    x, y = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()

    def step():
        with torch.cuda.stream(<stream>):
            torch.add(x, 1, out=y)

    graph = capture(step)
    replay = graph.replay
    with assert_replayed({"8": graph}, {"8": 2}):
        replay()
        <dispatch>
    torch.cuda.synchronize()
"""

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
        alone=True,
    ),
    Case(
        check="check_no_alloc",
        fault="pinned memory is taken with each replay",
        program="""
        def test_it(check_no_alloc):
            x, kept = torch.zeros(8, device="cuda"), []
            graph = capture(lambda: x.add_(1))

            def replay():
                graph.replay()
                <here>

            check_no_alloc(replay, replays=10, tolerance_bytes=2**25)
        """,
        sound="pass",
        planted="kept.append(torch.empty(2**20, dtype=torch.uint8, pin_memory=True))",
        message="*10 replays took pinned memory of the host 10 times*",
        alone=True,
    ),
    Case(
        check="no_leaked_pool",
        fault="a capture fails by torch.cuda.graph",
        program="""
        from graphengine.buckets import CapturedGraph

        x = torch.ones(1024, device="cuda")

        def step():
            y = x * 2
            y.sum().item()

        def careful():
            captured = CapturedGraph(step, name="b", device="cuda")
            with pytest.raises(RuntimeError):
                captured.capture()
            captured.close()

        def careless():
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(RuntimeError), torch.cuda.graph(graph):
                step()

        def test_it(no_leaked_pool):
            step()
            with no_leaked_pool():
                <here>()
        """,
        sound="careful",
        planted="careless",
        message="*a capture of the block left something behind: *",
        alone=True,
    ),
    Case(
        check="no_leaked_pool",
        fault="a graph is still held",
        program="""
        kept, x = [], torch.ones(1024, device="cuda")

        def test_it(no_leaked_pool):
            with no_leaked_pool():
                kept.append(capture(lambda: (x * 2).sum()))
                <here>
        """,
        sound="torch.cuda.synchronize(); kept.clear()",
        planted="torch.cuda.synchronize()",
        message="*left something behind: 1 private pools are still held: (*) with *",
    ),
    Case(
        check="assert_outputs_written",
        fault="the last rows are those of the warm-up",
        program="""
        def test_it(assert_outputs_written):
            x, y = torch.ones(8, device="cuda"), torch.full((8,), 2.0, device="cuda")
            graph = capture(lambda: torch.mul(x[:<here>], 2, out=y[:<here>]))
            assert_outputs_written(graph.replay, {"y": y})
        """,
        sound="8",
        planted="5",
        message="*a replay did not write 3 of 8 elements of y (float32 [[]8]), first at [[]5]*",
    ),
    Case(
        check="assert_replayed",
        fault="a step runs without its graph",
        program=REPLAYED.replace("<stream>", "torch.cuda.current_stream()").replace(
            "<dispatch>", "<here>"
        ),
        sound="replay()",
        planted="step()",
        message="*bucket '8' was replayed 1 times, expected 2. 1 of 2 steps ran without a graph*",
    ),
    Case(
        check="assert_replayed",
        fault="a step runs on a stream that is not captured",
        program=REPLAYED.replace("<stream>", "<here>").replace("<dispatch>", "replay()"),
        sound="torch.cuda.current_stream()",
        planted="side",
        message="*graph '8' has 0 nodes: its step was not captured*",
    ),
    Case(
        check="assert_no_dangling_pointers",
        fault="a tensor that a launch of Triton was given is replaced",
        program=INCREMENT.replace("<before>", "pass").replace("<inside>", "<here>"),
        sound='held["x"].fill_(1)',
        planted='held["x"] = torch.ones(1024, device="cuda")',
        message="*addresses in the graph are of memory that was freed: x (float32 [[]1024]): "
        "node 0 (increment), parameter 0: 0x* at 0x*, freed*",
    ),
    Case(
        check="assert_no_dangling_pointers",
        fault="nobody keeps a tensor that a launch of Triton was given",
        program=INCREMENT.replace("<before>", "<here>").replace("<inside>", "pass"),
        sound="pass",
        planted='held["x"] = torch.ones(4096, device="cuda")',
        message="*node 0 (increment), parameter 0: 0x* at 0x*, which is freed already*",
    ),
    Case(
        check="assert_no_host_scalars",
        fault="a kernel is given the position as a number",
        program="""
        import triton
        import triton.language as tl

        @triton.jit
        def store(y, position, POINTER: tl.constexpr):
            if POINTER:
                tl.store(y + tl.load(position), 1.0)
            else:
                tl.store(y + position, 1.0)

        def test_it(assert_no_host_scalars):
            y, position = torch.zeros(8, device="cuda"), 5
            on_device = torch.full((1,), 5, dtype=torch.int32, device="cuda")

            def change():
                nonlocal position
                position = 7
                on_device.fill_(7)

            assert_no_host_scalars(lambda: store[(1,)](y, <here>), change)
        """,
        sound="on_device, POINTER=True",
        planted="position, POINTER=False",
        message="*1 values of the host are frozen in the graph: node 0 (store), parameter 1: "
        "5 -> 7*",
    ),
    Case(
        check="assert_pdl_waits",
        fault="a kernel that starts early does not wait",
        program="""
        import triton
        import triton.language as tl
        from graphengine.kernels.core.pdl import wait_for_inputs

        @triton.jit
        def increment(x, N: tl.constexpr, PDL: tl.constexpr):
            wait_for_inputs(PDL)
            place = tl.arange(0, N)
            tl.store(x + place, tl.load(x + place) + 1)

        def test_it(assert_pdl_waits):
            x, code = torch.zeros(8, device="cuda"), []

            def step():
                for _ in range(2):
                    code.append(increment[(1,)](x, N=8, PDL=<here>, launch_pdl=True))

            assert_pdl_waits(capture(step), code)
        """,
        sound="True",
        planted="False",
        message="*0 (increment) -> 1 (increment): it writes at line * before it has waited; it has "
        "0 waits*",
    ),
    Case(
        check="assert_rng_advances",
        fault="a step draws from another generator than its own",
        program="""
        def test_it(assert_rng_advances):
            y, private = torch.zeros(8, device="cuda"), torch.Generator(device="cuda")
            private.manual_seed(7)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(private)
            y.uniform_(generator=private)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y.uniform_(<here>)
            assert_rng_advances(graph.replay, y, generators={"private": private})
        """,
        sound="generator=private",
        planted="",
        message="*generator 'private' did not advance in replay 1 of 2 (seed 7, offset *",
    ),
    Case(
        check="assert_rng_advances",
        fault="the graph is launched past torch's replay",
        program="""
        from graphengine.buckets.runtime import runtime

        def test_it(assert_rng_advances):
            y = torch.zeros(8, device="cuda")
            graph = capture(lambda: y.uniform_())
            handle = ctypes.c_void_p(int(graph.raw_cuda_graph_exec()))

            def launch():
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                assert not runtime().cudaGraphLaunch(handle, stream)

            assert_rng_advances(<here>, y)
        """,
        sound="graph.replay",
        planted="launch",
        message="*the random numbers are frozen: two replays left the same 8 elements*",
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
        check="poison_padding",
        fault="a captured step writes one element past the end of a tensor",
        program="""
        from graphengine.testing import CanaryPages

        def test_it(poison_padding):
            pages = CanaryPages("cuda")
            x, y = torch.ones(8, device="cuda"), pages.empty("y", (8,), torch.float32)
            graph = capture(lambda: y.as_strided((<here>,), (1,)).fill_(2))
            unused = slice(5, None)
            poison_padding({"x": x, "y": y}, graph.replay, padding={"x": unused}, canaries=pages)
        """,
        sound="8",
        planted="9",
        message="*a write past y (float32 [[]8]) without poison: * of 4096 bytes changed, the "
        "nearest 0 bytes from the tensor*",
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
        from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

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
        alone=True,
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
        message="*+ node [[]1] kernel *exp*",
    ),
]
