"""A check that a capture leaves nothing: no memory, and no allocator that still records into it."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

import torch

from graphengine.buckets import format_bytes
from graphengine.testing.allocator import DEFAULT_POOL, Pool, find, read_segments
from graphengine.testing.errors import GraphCheckError, hide_frame, listed

__tracebackhide__ = hide_frame

# Larger than any cached small block, so that the allocation comes from the current pool.
_PROBE_BYTES = 4 << 20


@contextlib.contextmanager
def no_leaked_pool() -> Iterator[None]:
    """GraphCheckError if a capture that began in the block is not over when the block ends.

    Put it round a test of a capture that fails, or round each test by a fixture of your own:

        @pytest.fixture(autouse=True)
        def captures_end(no_leaked_pool):
            with no_leaked_pool():
                yield

    A capture that is interrupted may leave three things to the next test: a stream that is still
    being captured; an allocator that puts every tensor into the dead graph's private pool; and that
    pool's memory, which nothing frees until the process ends. Each is looked for. Graphs that the
    block makes and keeps are to be dropped in it, or made before it.

    Looks at the current device and stream. RuntimeError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no_leaked_pool needs a CUDA device: torch.cuda.is_available() is False")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    before = _private_pools()
    yield
    # Memory that an error's traceback holds is not a leak.
    gc.collect()
    try:
        if torch.cuda.is_current_stream_capturing():
            _left("the current stream is still being captured. End the capture in a `finally`")
        pool = _pool_of_new_memory()
        torch.cuda.empty_cache()
    except RuntimeError as cause:
        _left(f"torch cannot allocate any more ({_first_line(cause)}). {_APART}", cause)
    if pool != DEFAULT_POOL:
        _left(
            f"a new tensor was put into the private pool {pool}, and so will be those of the tests "
            f"that follow: torch's allocator still records into it. {_APART}"
        )
    sizes = _private_pools()
    if leaked := {pool: sizes[pool] - before[pool] for pool in sizes if sizes[pool] > before[pool]}:
        pools = [f"{pool} with {format_bytes(size)}" for pool, size in leaked.items()]
        _left(
            f"{len(leaked)} private pools are still held: {listed(pools)}. Drop or reset() graphs "
            f"and their results; a failed capture's pool stays until the process ends. {_APART}"
        )


_APART = "A capture that fails on purpose runs in a process of its own by run_isolated"


def _left(what: str, cause: BaseException | None = None) -> NoReturn:
    raise GraphCheckError(f"a capture of the block left something behind: {what}") from cause


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _private_pools() -> Counter[Pool]:
    """Bytes that are reserved in each pool but the default one."""
    sizes: Counter[Pool] = Counter()
    for segment in read_segments():
        if segment.pool != DEFAULT_POOL:
            sizes[segment.pool] += segment.size
    return sizes


def _pool_of_new_memory() -> Pool:
    """The pool from which torch allocates for the current stream."""
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
    segment = find(read_segments(), probe.data_ptr())
    return DEFAULT_POOL if segment is None else segment.pool
