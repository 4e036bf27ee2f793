"""The mailboxes of an engine: for tokens, log-probabilities and experts.

They are in memory of their own, or in a mapped file, where another process reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Mailbox
from graphengine.buckets.shared_memory import PageLocked
from graphengine.config import EngineConfig
from graphengine.host.logprobs import LogprobMailbox, Logprobs, PartialMailbox
from graphengine.host.routes import FrameCodes, GivenCodeTable, RouteMailbox, RouteTable, Routing
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.inventory import Rings, RingShape, mailboxes


class RecordMemory:
    """Maps this file, which is created, filled with zeros, if it does not exist.

    Processes that take the same shapes in the same order get the same memory. `device` is the one
    whose kernels write it; None on a CPU, and for a process that only reads.

    OSError where the file's disk, or memory, has no room for it; RuntimeError where CUDA refuses to
    pin it.
    """

    def __init__(self, path: Path, nbytes: int, device: torch.device | None = None) -> None:
        with path.open("ab+") as file:
            file.truncate(nbytes)
            make_room(file.fileno(), path, nbytes, "a rank's results")
            self._words = torch.frombuffer(mmap(file.fileno(), nbytes), dtype=torch.int64)
        self._locked = None if device is None else PageLocked(self._words, device)

    def close(self) -> None:
        """Unlock the memory, once no kernel writes it any more. Tensors taken stay valid."""
        if self._locked is not None:
            self._locked.close()
        self._locked = None

    def take(self, shape: RingShape) -> Tensor:
        """Take the next part of the memory, as int64 `[entries, lanes, items]`."""
        count = shape.nbytes // 8
        taken, self._words = self._words[:count], self._words[count:]
        return taken.view(tuple(shape))


def make_room(file: int, path: Path, nbytes: int, what: str) -> None:
    """Reserve all bytes of a file before it is mapped: writing to a page without room would end the
    process.

    OSError, with the number of bytes, where there is no room for `what` the file holds. Nobody
    writes to the file yet.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}: {what} take {nbytes} bytes", str(path)
        ) from error


class Records(NamedTuple):
    """The host's side of all mailboxes; `routing` is None without records of experts, and `codes`
    where a step emits tokens.
    """

    mailbox: Mailbox
    logprobs: Logprobs
    routing: Routing | None
    codes: FrameCodes | None = None


def record_rings(config: EngineConfig, memory: MemoryPlan) -> Rings:
    """The shapes of an engine's mailboxes."""
    return mailboxes(
        config,
        tokens_per_step=memory.tokens_per_step,
        prefill_tokens=memory.prefill_ladder.sizes[-1],
        routed=memory.routed,
        inner=memory.inner,
    )


def record_bytes(config: EngineConfig, memory: MemoryPlan) -> int:
    """Bytes of the `RecordMemory` for an engine's mailboxes."""
    return sum(ring.nbytes for ring in record_rings(config, memory) if ring is not None)


def new_records(
    config: EngineConfig, memory: MemoryPlan, shared: RecordMemory | None = None
) -> Records:
    """The mailboxes, in `shared` or in new memory; those for log-probabilities and experts have as
    many entries as the one for tokens.
    """
    rings, device = record_rings(config, memory), memory.device

    def words(shape: RingShape) -> Tensor | None:
        return None if shared is None else shared.take(shape)

    mailbox = Mailbox(*rings.tokens, device=device, words=words(rings.tokens))
    top, prompts = config.max_logprobs, rings.prompt_logprobs
    logprobs = Logprobs(
        LogprobMailbox(*rings.logprobs, top, device=device, words=words(rings.logprobs)),
        prompts and LogprobMailbox(*prompts, top, device=device, words=words(prompts)),
    )
    routed, codes = memory.routed, None
    if memory.inner is not None:
        codes = _frame_codes(rings, memory, memory.inner.steps, words)
    if routed is None:
        return Records(mailbox, logprobs, None, codes)
    assert rings.routes is not None and rings.prompt_routes is not None, f"{rings=}"
    tokens, chunks = (
        RouteMailbox(*ring, (routed.layers, routed.chosen), device=device, words=words(ring))
        for ring in (rings.routes, rings.prompt_routes)
    )
    slots = memory.ladder.max_batch
    table = RouteTable(slots, memory.max_seq_len, routed, device=device)
    return Records(mailbox, logprobs, Routing(tokens, chunks, table), codes)


def _frame_codes(
    rings: Rings,
    memory: MemoryPlan,
    steps: int,
    words: Callable[[RingShape], Tensor | None],
) -> FrameCodes:
    """The mailboxes of frames of `steps` codes, and the table of codes that requests give."""
    of_codes, of_logprobs, device = rings.codes, rings.codes_logprobs, memory.device
    assert of_codes is not None and of_logprobs is not None, f"{rings=}"
    return FrameCodes(
        RouteMailbox(*of_codes, (steps, 1), device=device, words=words(of_codes)),
        PartialMailbox(*of_logprobs, device=device, words=words(of_logprobs)),
        GivenCodeTable(memory.ladder.max_batch, memory.max_seq_len, steps, device=device),
    )
