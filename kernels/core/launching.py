"""Launches of Triton kernels, and a pass over step programs that only compiles their kernels.

Triton compiles a kernel at its first launch, hence one after the other. `compile_kernels` runs the
programs once with every launch turned into a look-up: kernels that are not in memory are read from
Triton's cache on disk or compiled, in threads, while the pass goes on. A later launch finds its
kernel in memory.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime import driver

from graphengine.kernels.core.devices import new_context
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.triton_versions import OPTIONS, future_of

MAX_WORKERS = 8
"""Most threads that compile. About a quarter of the work holds the GIL: more threads would wait
for it."""
_PARSES = 8
"""How often a compilation begins again that other threads' parsers have disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Options that the kernel launches of a step share.

    arrivals  int32, on the device: counters with which the programs of a launch find out which one
              is last. Zero before and after each launch, so kernels that do not run at the same
              time may share them; each wrapper says how many it needs. None: there are none
    pdl       the launch may overlap the one before, by the rules of `core.pdl`

    The wrapper of a kernel without such counters has only the argument `pdl`.
    """

    arrivals: torch.Tensor | None = None
    pdl: bool = False


ALONE = Launch()
"""Launches that overlap no other and need no counters."""


def take_counters(arrivals: torch.Tensor | None, needed: int, what: object) -> torch.Tensor:
    """The first `needed` of a launch's counters, so that its `Op` says how many it uses.

    ValueError, which names `what` is launched, unless they are dense, int32 and as many.
    """
    fits = arrivals is not None and arrivals.dtype == torch.int32 and arrivals.is_contiguous()
    if arrivals is None or not fits or arrivals.numel() < needed:
        found = None if arrivals is None else f"{arrivals.dtype} {list(arrivals.shape)}"
        raise ValueError(f"{what} wants {needed} dense int32 arrivals, not {found}")
    return arrivals[:needed]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCompilation:
    """Counts of `compile_kernels`; a kernel that was already in memory is not counted.

    compiled  kernels that were neither in memory nor on disk: 0 where the cache was warm
    loaded    kernels that were read from Triton's cache on disk
    seconds   wall time of the pass
    """

    compiled: int
    loaded: int
    seconds: float


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Return `kernel[grid]`: calling it with the kernel's arguments launches the kernel.

    Inside `launched_by` something else is done with the launch: `compile_kernels` looks the kernel
    up, and `op.py` records it.
    """
    instead = _instead.get()
    launch = kernel[grid] if instead is None else partial(instead, kernel, grid)
    return partial(cast(Callable[..., object], launch), **OPTIONS)


_instead: ContextVar[Callable[..., None] | None] = ContextVar("instead", default=None)


@contextmanager
def launched_by(instead: Callable[..., None]) -> Iterator[None]:
    """Inside, `launcher` calls `instead(kernel, grid, *arguments, **options)` and launches nothing.

    That holds for this context alone, and not for other threads or their launches.
    """
    token = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(token)


# Triton has one listener per process. A second pass waits, and then finds the first pass's kernels.
_one_at_a_time = threading.RLock()


def compile_kernels(
    steps: Mapping[str, Callable[[], object]], *, workers: int | None = None
) -> KernelCompilation:
    """Compile every kernel that the named steps launch, in parallel; nothing is launched.

    Torch operations of a step do run, on the current device and stream, and read zeros where a
    kernel would have written. The caller must reset the steps' tensors afterwards. No thread
    remains, and no memory except what torch's allocator caches.
    In Triton's interpreter there is nothing to compile, and no step runs.

    workers  threads; by default one for each core that the process may use, at most `MAX_WORKERS`

    Warning filters that another thread sets meanwhile are lost: Triton's way of setting them is not
    thread-safe.

    ValueError for fewer than one worker. RuntimeError, with the step's name and the cause chained,
    if a step raises; it also names the kernel if a kernel does not compile.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be 1 or more, or None")
    started = time.perf_counter()
    compiled = loaded = 0
    if not INTERPRETED:
        # A separate context: after a failure Triton's mode would remain in the caller's.
        compiled, loaded = new_context().run(_compile, steps, workers or _cores())
    return KernelCompilation(
        compiled=compiled, loaded=loaded, seconds=time.perf_counter() - started
    )


def _cores() -> int:
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def _compile(steps: Mapping[str, Callable[[], object]], workers: int) -> tuple[int, int]:
    """How many kernels were compiled, and how many were read from disk."""
    found, compilers = _UncompiledKernels(), _Compilers(workers)
    # Triton changes the warning filters and restores them; threads that do so at the same time
    # would leave them changed.
    with (
        _one_at_a_time,
        warnings.catch_warnings(),
        compilers.listening(),
        compilers,
        launched_by(found.look_up),
        triton.AsyncCompileMode(compilers, ignore_errors=True),
    ):
        try:
            for name, step in steps.items():
                found.collect(name, step)
            found.finish()
        except BaseException:
            # The mode waits for all compilations that it has begun.
            found.cancel()
            raise
    return compilers.compiled, len(found.names) - compilers.compiled


class _UncompiledKernels:
    """Kernels that the steps launch and that are not in memory yet, with names for errors."""

    def __init__(self) -> None:
        self.names: dict[triton.FutureKernel, str] = {}
        self._step = ""

    def collect(self, name: str, step: Callable[[], object]) -> None:
        """Run a step with its launches looked up."""
        self._step = name
        try:
            with ZeroedMemory():
                step()
        except Exception as cause:
            raise RuntimeError(f"compilation for step {name!r} failed: {cause}") from cause

    def look_up(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Stand in for a launch; every layer of a model asks for the same few kernels again."""
        found = kernel.warmup(*args, grid=grid, **options)
        if not isinstance(found, triton.FutureKernel):
            return
        if found not in self.names:
            self.names[found] = f"kernel {kernel.__name__} of step {self._step!r}"
        elif _is_there(future_of(found)):
            # From now on Triton keeps it in memory, where it finds it much faster.
            found.result()

    def finish(self) -> None:
        """Wait for all kernels, and keep them in memory."""
        for kernel, name in self.names.items():
            try:
                kernel.result()
            except Exception as cause:
                raise RuntimeError(f"compilation of {name} failed: {cause}") from cause

    def cancel(self) -> None:
        """Cancel the compilations that have not begun."""
        for kernel in self.names:
            future = future_of(kernel)
            if future is not None:
                future.cancel()


def _is_there(future: Future[Any] | None) -> bool:
    if future is None or not future.done():
        return False
    return not future.cancelled() and future.exception() is None


def _compiled_again(compile_kernel: Callable[[], Any], times: int) -> Any:
    """The kernel; a compilation that other parsers have disturbed begins again, so many times."""
    try:
        return compile_kernel()
    except Exception as error:
        if not times or not _is_of_parsers(error):
            raise
    return _compiled_again(compile_kernel, times - 1)


def _is_of_parsers(error: BaseException | None) -> bool:
    """Whether the cause is that `ast.parse` ran in several threads: in Python 3.11, at least, they
    count the depth of their trees in one place, and may find it changed.
    """
    while error is not None:
        if isinstance(error, SystemError) and "AST constructor" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Compilers(ThreadPoolExecutor):
    """Threads that compile; they count the kernels that were not on disk."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="graphengine-compile")
        self.compiled = 0
        self._lock = threading.Lock()
        self._launchers: set[str] = set()
        self._thread = threading.local()

    def submit(self, compile_kernel: Any, /, *args: Any, **options: Any) -> Future[Any]:
        return super().submit(self._compile, partial(compile_kernel, *args, **options))

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        self._thread.on_disk = True
        kernel = _compiled_again(compile_kernel, _PARSES)
        if not self._thread.on_disk:
            self._build_launcher(kernel)
        return kernel

    def _build_launcher(self, kernel: Any) -> None:
        """Have Triton build the C program that launches kernels of this signature.

        Otherwise Triton runs the C compiler at the first launch. It keeps the result on disk.
        """
        signature = str(kernel.src.signature.values())
        with self._lock:
            self.compiled += 1
            if signature in self._launchers:
                return
            self._launchers.add(signature)
        driver.active.launcher_cls(kernel.src, kernel.metadata)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have Triton report, in these threads, which kernels it finds on disk."""
        knobs = triton.knobs.compilation
        before = knobs.listener

        def listener(*, cache_hit: bool, **found: Any) -> None:
            # Thread-local: only the thread that compiles the kernel reads it.
            self._thread.on_disk = cache_hit
            if before is not None:
                before(cache_hit=cache_hit, **found)

        knobs.listener = listener
        try:
            yield
        finally:
            # Keep a listener that somebody else has set meanwhile.
            if knobs.listener is listener:
                knobs.listener = before


UNINITIALISED = frozenset(
    [
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
    ]
)
"""Functions of torch that return memory as they find it."""


class ZeroedMemory(TorchFunctionMode):
    """Zero new tensors: garbage among a kernel's indices would stop the device for good.

    A function mode, because a dispatch mode would import torch's compiler, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in UNINITIALISED else result
