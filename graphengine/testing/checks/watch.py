"""Checks that a block does not wait for the device, or allocate memory on it."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphengine.buckets import format_bytes
from graphengine.testing.arguments import integer, require_callable, require_end
from graphengine.testing.errors import GraphCheckError, hide_frame

__tracebackhide__ = hide_frame

# The message of torch's sync debug mode for an operation that waits.
_SYNC_MESSAGE = "called a synchronizing CUDA operation"

# Explicit waits, which that mode lets pass: where each is looked up, and its name. One level below
# torch.cuda.synchronize, so that code that imported that function by name is watched too.
_WAITS: tuple[tuple[Any, str, str], ...] = (
    (torch._C, "_cuda_synchronize", "torch.cuda.synchronize()"),
    (torch._C, "_accelerator_synchronizeDevice", "torch.accelerator.synchronize()"),
    (torch.cuda.Stream, "synchronize", "Stream.synchronize()"),
    (torch.cuda.Event, "synchronize", "Event.synchronize()"),
)
# Modules of torch between such a wait and its caller.
_BETWEEN = ("torch.cuda", "torch.accelerator")
# Beginning and ending a capture waits for the device, which is not the captured step's fault.
_CAPTURING = ("torch.cuda.graphs", "graphengine.buckets.captured")


class _Waited(RuntimeError):
    """Raised in place of an explicit wait."""


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """GraphCheckError if the block waits for the device, with the stack of the call that waits.

    Put it around replays or around a capture: the waits by which `torch.cuda.graph` and
    `CapturedGraph` begin and end a capture do not count (but those of a warm-up do: warm up
    before). It sees the operations that torch's sync debug mode knows, such as `item`, `tolist`,
    `nonzero` and copies to pageable memory, and the `synchronize` of a device, a
    `torch.cuda.Stream` or a `torch.cuda.Event`. Each raises where it is called, without waiting, so
    the rest of the block does not run. If the block catches that error, only a `synchronize` is
    still reported, also if the block raises something else later.

    The debug mode applies to the whole process: other threads' operations raise too. It is restored
    at the end. RuntimeError without a CUDA device.
    """
    _require_cuda("no_sync")
    mode = torch.cuda.get_sync_debug_mode()
    waits: list[_Waited] = []
    # An error being handled around the block: not the block's, though it is the context of errors
    # raised in it.
    outside = sys.exception()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.cuda.set_sync_debug_mode, mode)
        torch.cuda.set_sync_debug_mode("error")
        for holder, attribute, call in _WAITS:
            if original := getattr(holder, attribute, None):
                setattr(holder, attribute, _refuse(original, call, waits))
                undo.callback(setattr, holder, attribute, original)
        try:
            yield
        except Exception as error:
            if (sync := _find_sync(error, outside)) is not None:
                raise GraphCheckError(_describe_sync(sync)) from error
            if not waits:
                raise
            raise GraphCheckError(
                f"{_describe_sync(waits[0])}\n(its error was caught in the block, which then "
                f"raised {type(error).__name__}: {error})"
            ) from error
    if waits:
        raise GraphCheckError(f"{_describe_sync(waits[0])}\n(its error was caught in the block)")


def _refuse(
    original: Callable[..., object], call: str, waits: list[_Waited]
) -> Callable[..., object]:
    """Replaces the wait `original`: raises, and adds to `waits`."""

    @functools.wraps(original)
    def wait(*arguments: object) -> object:
        if not _is_capturing_itself():
            waits.append(_Waited(call))
            raise waits[-1]
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return original(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return wait


def _is_capturing_itself() -> bool:
    """Whether torch's code for a capture called the wait two frames above."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _CAPTURING


def _find_sync(error: BaseException | None, outside: BaseException | None) -> BaseException | None:
    """The innermost error of a wait among `error` and its causes, up to `outside`."""
    found = None
    while error is not None and error is not outside:
        if isinstance(error, _Waited) or _SYNC_MESSAGE in str(error):
            found = error
        error = error.__cause__ or error.__context__
    return found


def _describe_sync(sync: BaseException) -> str:
    stack = [frame for frame in traceback.extract_tb(sync.__traceback__) if _is_of_user(frame)]
    call = f" by {sync}" if isinstance(sync, _Waited) else ""
    calls = "".join(traceback.format_list(stack)).rstrip()
    return f"the block waits for the device{call}:\n{calls}"


def _is_of_user(frame: traceback.FrameSummary) -> bool:
    return frame.filename not in (__file__, contextlib.__file__)


# Counters that only grow, so that memory that is freed again is counted too.
_ALLOCATED_BYTES, _SEGMENT_BYTES = "allocated_bytes.all.allocated", "reserved_bytes.all.allocated"
_ALLOCATIONS, _SEGMENTS = "allocation.all.allocated", "segment.all.allocated"


@contextlib.contextmanager
def no_alloc(
    *, device: torch.device | str | int | None = None, tolerance_bytes: int = 0
) -> Iterator[None]:
    """GraphCheckError if torch's allocator allocates memory of `device` in the block.

    Memory that the block frees again counts, too. `tolerance_bytes` limits both the total that may
    be allocated and the allocator's growth. Memory taken directly from the driver (NCCL, a
    library's workspace, a kernel's own) is not seen: see `check_no_alloc`.

    Around replays: a replay allocates nothing, so an allocation comes from the code around it.
    Around captured code, `with torch.cuda.graph(graph), no_alloc():` (beginning a capture itself
    takes memory): the step's allocations come from the graph's pool and stay with the graph; the
    segments are the pool's growth. A step that passes writes only into tensors that existed before,
    and needs no cuBLAS workspace.

    `device` is the current one by default. RuntimeError without a CUDA device.
    """
    _require_cuda("no_alloc")
    before = torch.cuda.memory_stats(device)
    yield
    after = torch.cuda.memory_stats(device)
    grown = {key: after.get(key, 0) - before.get(key, 0) for key in after}
    if max(grown[_ALLOCATED_BYTES], grown[_SEGMENT_BYTES]) > tolerance_bytes:
        raise GraphCheckError(
            f"the block allocated {format_bytes(grown[_ALLOCATED_BYTES])} in "
            f"{grown[_ALLOCATIONS]} allocations ({_ALLOCATIONS} from {before.get(_ALLOCATIONS, 0)} "
            f"to {after[_ALLOCATIONS]}), and the allocator grew by {grown[_SEGMENTS]} segments of "
            f"{format_bytes(grown[_SEGMENT_BYTES])}; allowed are {tolerance_bytes} bytes"
        )


def check_no_alloc(
    replay: Callable[[], object],
    *,
    replays: int = 100,
    device: torch.device | str | int | None = None,
    tolerance_bytes: int = 0,
) -> None:
    """GraphCheckError if `replays` calls of `replay` allocate, by `no_alloc` or the driver.

    Allocations are counted, not what is left of them: a tensor made and freed in each replay shows.
    So does pinned memory that torch gives out, which a copy to the host in each step takes.

    The driver's free memory is compared before and after, following one call that is not counted.
    So memory taken without torch's allocator is seen; so is memory that other processes take
    meanwhile: on a shared GPU `tolerance_bytes` must allow for it. ValueError if `replays` is less
    than 1, RuntimeError without a CUDA device.
    """
    require_callable("replay", replay)
    integer("replays", replays, least=1)
    _require_cuda("check_no_alloc")
    require_end(replay())
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    pinned = _pinned_allocations()
    with no_alloc(device=device, tolerance_bytes=tolerance_bytes):
        for _ in range(replays):
            replay()
    torch.cuda.synchronize(device)
    if more := _pinned_allocations() - pinned:
        raise GraphCheckError(
            f"{replays} replays took pinned memory of the host {more} times: allocate what a step "
            "copies to once, before the first replay"
        )
    lost = free - torch.cuda.mem_get_info(device)[0]
    if lost > tolerance_bytes:
        raise GraphCheckError(
            f"the driver's free memory fell by {format_bytes(lost)} over {replays} replays, of "
            f"which torch's allocator knows nothing; allowed are {tolerance_bytes} bytes"
        )


def _pinned_allocations() -> int:
    """How often torch gave out pinned memory; older versions count only what the driver gave."""
    stats = torch.cuda.memory.host_memory_stats()
    return int(stats.get("active_requests.allocated", stats.get("num_host_alloc", 0)))


def _require_cuda(check: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{check} needs a CUDA device: torch.cuda.is_available() is False")
    # Before the allocator's first use it has no statistics.
    torch.cuda.init()  # type: ignore[no-untyped-call]
