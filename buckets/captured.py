"""Capture of a step program into a CUDA graph, and its replay.

A *step program* is any callable without arguments that works on static buffers. On a CUDA device it
is warmed up and captured once, and a replay launches the graph; on a CPU device a replay calls it.
Graphs that share a pool also share memory: capture the largest first, on one stream, and never
replay two of them at the same time. Data that must outlive a replay belongs in static buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from graphengine.buckets.driver import driver
from graphengine.buckets.graphs.nodes import count_nodes
from graphengine.buckets.runtime import runtime

if TYPE_CHECKING:
    from graphengine.buckets.static import StaticBuffers

CHECK_EVERY = 64
"""Replays of a graph between two checks of its buffers' addresses."""

Step = Callable[[], object]
"""The function to capture. It works on static tensors; its result is ignored."""
PoolHandle = tuple[int, int]
"""A handle from `torch.cuda.graph_pool_handle()`. It dies with the last graph that used it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """The cost of capturing one bucket. On a CPU device nothing is captured: no nodes, no bytes.

    `node_kinds` counts nodes by kind, as `count_nodes` does; None where they cannot be counted.
    `warm_up_ms` holds compilation, `capture_ms` recording and instantiation, both wall time.
    `allocated_bytes` is the memory that torch's allocator still counts as live after the capture,
    `reserved_bytes` how much the pool grew, `driver_bytes` how much the driver's free memory fell:
    the pool's growth and the graph's own memory, but also what other processes took meanwhile.
    """

    name: str
    node_kinds: Mapping[str, int] | None
    warm_up_ms: float
    capture_ms: float
    allocated_bytes: int
    reserved_bytes: int
    driver_bytes: int

    @property
    def nodes(self) -> int | None:
        """All nodes of the graph."""
        return None if self.node_kinds is None else sum(self.node_kinds.values())

    @property
    def bytes(self) -> int:
        """Device memory that the bucket added: `driver_bytes`, never less than `reserved_bytes`."""
        return max(self.driver_bytes, self.reserved_bytes)


class CapturedGraph:
    """One bucket: `step` captured under `name` on `stream`, its memory taken from `pool`.

    `stream` is a CUDA stream other than the default stream; None makes a new one. Without `pool`
    the graph gets a pool of its own. `buffers`, where given, are the static buffers that `step`
    uses: once one of them has moved, a replay raises, the 64th at the latest. `step` is kept until
    `close()`, so that everything it refers to lives as long as the graph. An error in the step is
    raised as a RuntimeError with the bucket's name, with the step's exception as its cause.
    `adjust` is called with the recorded graph before it is instantiated, and may set attributes of
    its nodes; its errors are raised like those of the step. On a CPU there is no graph, and it is
    not called.
    """

    __slots__ = (
        "_adjust",
        "_buffers",
        "_draws",
        "_graph",
        "_launch",
        "_replays",
        "_report",
        "_step",
        "_warm_up_ms",
        "device",
        "is_direct",
        "name",
        "pool",
        "stream",
        "warmups",
    )

    def __init__(
        self,
        step: Step,
        *,
        name: str,
        device: torch.device | str,
        stream: torch.cuda.Stream | None = None,
        pool: PoolHandle | None = None,
        buffers: StaticBuffers | None = None,
        warmups: int = 2,
        adjust: Callable[[torch.cuda.CUDAGraph], object] | None = None,
    ) -> None:
        self.name = name
        self._adjust = adjust
        self.device = torch.device(device)
        self.stream = stream
        self.pool = pool
        self.warmups = warmups
        self._step: Step | None = step
        self._buffers = buffers
        self._graph: torch.cuda.CUDAGraph | None = None
        self._report: CaptureReport | None = None
        self._warm_up_ms: float | None = None
        self._draws = False
        self._replays = 0
        self.is_direct = False
        self._launch: Step = partial(_refuse, RuntimeError, f"bucket {name!r} is not captured yet")
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.device = torch.device("cuda", torch.cuda.current_device())
            self.stream = _new_stream(self.device) if stream is None else stream
            if self.stream.cuda_stream == torch.cuda.default_stream(self.device).cuda_stream:
                raise ValueError(f"bucket {name!r}: the default stream cannot be captured")

    @property
    def report(self) -> CaptureReport:
        """The cost of the capture; RuntimeError before `capture()`."""
        if self._report is None:
            raise RuntimeError(f"bucket {self.name!r} is not captured yet")
        return self._report

    @property
    def graph(self) -> torch.cuda.CUDAGraph | None:
        """The captured graph, kept so that it can be inspected; None on a CPU device."""
        return self._graph

    @property
    def replays(self) -> int:
        """How often `replay` was called."""
        return self._replays

    @property
    def step(self) -> Step:
        """The step program, which a tool may run eagerly; ValueError after `close()`."""
        if self._step is None:
            raise ValueError(f"bucket {self.name!r} is closed")
        return self._step

    def warm_up(self) -> None:
        """Run the step `warmups` times, for real, and wait for the stream.

        Kernels are compiled and workspaces allocated here, so that the capture needs neither. The
        caller resets the step's changes to the static buffers.
        """
        step = self.step
        started = time.perf_counter()
        try:
            with self._on_stream():
                drawn = _random_numbers_drawn(self.device)
                for _ in range(self.warmups):
                    step()
                self._draws = self.warmups == 0 or _random_numbers_drawn(self.device) != drawn
                if self.stream is not None:
                    self.stream.synchronize()
        except Exception as cause:
            raise RuntimeError(f"warm-up of bucket {self.name!r} failed: {cause}") from cause
        self._warm_up_ms = (time.perf_counter() - started) * 1e3

    def capture(self) -> CaptureReport:
        """Record the step, warming it up first if that was not done; from then on `replay` works.

        A step that raises, or calls something that cannot be captured (a synchronisation,
        `.item()`), raises RuntimeError "capture of bucket 'decode/8' failed: ..." with the cause
        chained. The process, the stream and the pool remain usable; close this object and make
        another. (One exception: after a stream that the step forked and did not join, take a new
        pool.)
        """
        step = self.step
        if self._report is not None or self._graph is not None:
            raise RuntimeError(f"capture of bucket {self.name!r} was already tried")
        if self._warm_up_ms is None:
            self.warm_up()
        if self._buffers is not None:
            self._buffers.record_addresses()
        before = _memory(self.device)
        started = time.perf_counter()
        kinds = None
        launch = step
        if self.stream is not None:
            try:
                with self._on_stream():
                    self._graph = graph = torch.cuda.CUDAGraph(keep_graph=True)
                    _record(graph, step, self.stream, self.device, self.pool)
                    if self._adjust is not None:
                        self._adjust(graph)
                    graph.instantiate()
                    _upload(graph, self.stream)
                    kinds = count_nodes(graph)
            except Exception as cause:
                raise RuntimeError(f"capture of bucket {self.name!r} failed: {cause}") from cause
            # torch's replay also tells the graph the offset of its random number generator.
            library = None if self._draws else runtime()
            self.is_direct = library is not None
            launch = partial(_launch_by_torch, graph, self.stream)
            if library is not None:
                launch = _direct_launch(library, graph, self.stream, otherwise=launch)
        milliseconds = (time.perf_counter() - started) * 1e3
        after = _memory(self.device)
        self._launch = launch
        self._report = CaptureReport(
            name=self.name,
            node_kinds=kinds,
            warm_up_ms=self._warm_up_ms or 0.0,
            capture_ms=milliseconds,
            allocated_bytes=after[0] - before[0],
            reserved_bytes=after[1] - before[1],
            driver_bytes=after[2] - before[2],
        )
        return self._report

    def replay(self) -> None:
        """Launch the graph asynchronously on its own stream, whichever stream is current.

        This is one call into CUDA (`is_direct`), with three exceptions: the step draws torch's
        random numbers, it was captured without a warm-up that would have shown this, or torch's
        runtime library was not found. Then it is torch's replay, with the graph's stream made
        current around it.

        On a CPU device: call the step. ValueError after `close()`; RuntimeError before `capture()`,
        and when a static buffer has moved since, which the first and every 64th replay check.
        """
        if self._replays % CHECK_EVERY == 0 and self._buffers is not None:
            self._buffers.check_addresses()
        self._replays += 1
        self._launch()

    def close(self) -> None:
        """Wait for the stream; free the graph and its share of the pool. May be called again."""
        self._launch = partial(_refuse, ValueError, f"bucket {self.name!r} is closed")
        self._step = self._buffers = self._adjust = None
        graph, self._graph = self._graph, None
        if graph is not None and self.stream is not None:
            with contextlib.suppress(RuntimeError):  # a broken device must not prevent closing
                self.stream.synchronize()
            graph.reset()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Make `stream` current, after the work on the caller's stream; neither may capture."""
        if self.stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        for stream in (caller, self.stream):
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("another capture is under way")
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield


def capture_all(
    steps: Mapping[str, Step],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    pool: PoolHandle | None = None,
    buffers: StaticBuffers | None = None,
    warmups: int = 2,
    adjust: Callable[[str, torch.cuda.CUDAGraph], object] | None = None,
    on_capture: Callable[[CaptureReport], None] | None = None,
    around: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> dict[str, CapturedGraph]:
    """Warm up and capture the named steps, in the order given, on one stream and in one pool.

    Put the largest bucket first: the others then reuse its memory. `adjust` is called with the name
    of each graph and the graph, before it is instantiated. `on_capture` is called with each
    report (for a progress bar); `around(name)` is a context entered around each graph's warm-up and
    capture. If a capture fails, those made before it are closed.
    """
    device = torch.device(device)
    if device.type == "cuda":
        stream = _new_stream(device) if stream is None else stream
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graphs: dict[str, CapturedGraph] = {}
    with contextlib.ExitStack() as undo:
        for name, step in steps.items():
            graphs[name] = graph = CapturedGraph(
                step,
                name=name,
                device=device,
                stream=stream,
                pool=pool,
                buffers=buffers,
                warmups=warmups,
                adjust=None if adjust is None else partial(adjust, name),
            )
            undo.callback(graph.close)
            with around(name):
                report = graph.capture()
            if on_capture is not None:
                on_capture(report)
        undo.pop_all()
    return graphs


def _record(
    graph: torch.cuda.CUDAGraph,
    step: Step,
    stream: torch.cuda.Stream,
    device: torch.device,
    pool: PoolHandle | None,
) -> None:
    """Capture `step` into `graph`; `stream` is current. After any failure no capture is open."""
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with _blas_workspaces_in_pool():
        # thread_local: other threads of the host program may use CUDA meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            with no_garbage_collection():
                step()
            _require_valid_capture(stream)
        except BaseException:
            _abandon(graph, stream, device, pool)
            raise
        try:
            graph.capture_end()
        except BaseException:
            _give_up(graph, device, pool)
            raise


def clear_blas_workspaces() -> None:
    """Free the memory that torch keeps for matrix products, of all streams, where torch can.

    Each stream allocates its own again when it next needs it. A graph that was captured with such
    memory outside its pool must not be replayed afterwards.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


@contextlib.contextmanager
def _blas_workspaces_in_pool() -> Iterator[None]:
    """Make torch take the workspace of a captured matrix product from the graph's pool.

    torch keeps a workspace for each stream and never frees it. The warm-up's workspace would
    outlive the closed graph; and if somebody cleared the workspaces, a live graph would lose its
    own (pytorch #193402). torch can only clear those of all streams: each stream allocates its
    workspace again when it next needs one. This can hurt a graph of the host program, as
    torch.compile's graphs can too: if products ran on its stream before its capture, its workspace
    is not in its pool. docs/limits.md says so.
    """
    clear_blas_workspaces()
    try:
        yield
    finally:
        clear_blas_workspaces()


def _require_valid_capture(stream: torch.cuda.Stream) -> None:
    """RuntimeError if an error that the step swallowed has invalidated the capture."""
    library = driver()
    if library is None:
        return
    status = library.capture_status(stream.cuda_stream)
    if status != "active":
        raise RuntimeError(
            f"the step did something that cannot be captured, and hid the error (its capture: "
            f"{status})"
        )


def _abandon(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, device: torch.device, pool: PoolHandle
) -> None:
    """End a failed capture so that torch's allocators and random generators leave it too.

    `capture_end` would raise on an invalidated capture and leave its bookkeeping half done: torch
    2.11 keeps recording into the pool, 2.13 never returns its share of it (pytorch #180395,
    #190348). So the driver ends the bad capture and begins an empty one in its place, and torch
    ends that one; the state is then the same as after a success. `graph` is left empty. Until it is
    reset it holds the pool, so that other captures can share it.
    """
    try:
        library = driver()
        if library is not None:
            library.drop_capture(stream.cuda_stream)
            library.begin_capture(stream.cuda_stream)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
    except RuntimeError:
        _give_up(graph, device, pool)


_unfinished_graphs: list[torch.cuda.CUDAGraph] = []


def _give_up(graph: torch.cuda.CUDAGraph, device: torch.device, pool: PoolHandle) -> None:
    """Make the allocator of device memory leave the pool after `capture_end` has failed.

    The allocator of pinned memory cannot be reached from Python. In torch 2.11 it keeps asking this
    graph whether an allocation belongs to its capture, so the graph must never be freed.
    """
    _unfinished_graphs.append(graph)
    with contextlib.suppress(RuntimeError):  # it has left already: torch 2.13
        torch._C._cuda_endAllocateToPool(device.index, pool)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's collector: freeing events or modules can invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Send the graph to the device now, so that the first replay is as fast as the others."""
    library = driver()
    if library is not None:
        library.upload(int(graph.raw_cuda_graph_exec()), stream.cuda_stream)
        stream.synchronize()


def _direct_launch(
    library: Any, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *, otherwise: Step
) -> Step:
    """A launch of `graph` on `stream` that neither reads nor changes the current stream.

    Where the runtime refuses (a thread of another device, an earlier error), `otherwise` is called,
    so that torch launches the graph or raises its own error.
    """
    launch = library.cudaGraphLaunch
    graph_handle = ctypes.c_void_p(int(graph.raw_cuda_graph_exec()))
    stream_handle = ctypes.c_void_p(stream.cuda_stream)

    def replay() -> None:
        if launch(graph_handle, stream_handle):
            library.cudaGetLastError()
            otherwise()

    return replay


def _launch_by_torch(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        graph.replay()


def _random_numbers_drawn(device: torch.device) -> int:
    """The offset of torch's generator of the device; 0 on a CPU, where it does not matter."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.default_generators[device.index].get_offset())


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes live in torch's allocator, bytes it has reserved, and bytes in use on the device."""
    if device.type != "cuda":
        return 0, 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free


def _refuse(kind: type[Exception], message: str) -> NoReturn:
    raise kind(message)
