"""The mailboxes of an engine: of tokens, of log-probabilities, and of experts.

They are in memory of their own, or in a file that another process maps too, which reads them there.
"""

from __future__ import annotations

import os
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Mailbox
from graphengine.buckets.shared_memory import PageLocked
from graphengine.config import EngineConfig
from graphengine.host.logprobs import LogprobMailbox, Logprobs
from graphengine.host.routes import RouteMailbox, RouteTable, Routing
from graphengine.opening.inventory import Rings, RingShape, mailboxes
from graphengine.opening.memory import MemoryPlan


class RecordMemory:
    """The memory of this file, which is made, with zeros, where there is none.

    Whoever takes the same shapes in the same order has the same memory. `device` is whose kernels
    write it; on a CPU, and for who only reads it, None.

    OSError where the file's disk, or memory, has no room for it; RuntimeError where CUDA refuses
    it.
    """

    def __init__(self, path: Path, nbytes: int, device: torch.device | None = None) -> None:
        with path.open("ab+") as file:
            file.truncate(nbytes)
            make_room(file.fileno(), path, nbytes, "a rank's results")
            self._words = torch.frombuffer(mmap(file.fileno(), nbytes), dtype=torch.int64)
        self._locked = None if device is None else PageLocked(self._words, device)

    def close(self) -> None:
        """No kernel writes it any more. Who has taken memory still has it."""
        if self._locked is not None:
            self._locked.close()
        self._locked = None

    def take(self, shape: RingShape) -> Tensor:
        """The next int64 `[entries, lanes, items]`."""
        count = shape.nbytes // 8
        taken, self._words = self._words[:count], self._words[count:]
        return taken.view(tuple(shape))


def make_room(file: int, path: Path, nbytes: int, what: str) -> None:
    """Have all bytes of a file that is going to be mapped: a page without room ends the process.

    OSError with their number where there is no room for `what` is in it. Nobody writes to it yet.
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
    """The host's side of all mailboxes; `routing` is None without records of experts."""

    mailbox: Mailbox
    logprobs: Logprobs
    routing: Routing | None


def record_rings(config: EngineConfig, memory: MemoryPlan) -> Rings:
    """The shapes of an engine's mailboxes."""
    return mailboxes(
        config,
        tokens_per_step=memory.tokens_per_step,
        prefill_tokens=memory.prefill_ladder.sizes[-1],
        routed=memory.routed,
    )


def record_bytes(config: EngineConfig, memory: MemoryPlan) -> int:
    """Bytes of `RecordMemory` for them."""
    return sum(ring.nbytes for ring in record_rings(config, memory) if ring is not None)


def new_records(
    config: EngineConfig, memory: MemoryPlan, shared: RecordMemory | None = None
) -> Records:
    """The mailboxes, in `shared` or in new memory; those of log-probabilities and experts have as
    many entries as that of the tokens.
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
    routed = memory.routed
    if routed is None:
        return Records(mailbox, logprobs, None)
    assert rings.routes is not None and rings.prompt_routes is not None, f"{rings=}"
    tokens, chunks = (
        RouteMailbox(*ring, routed, device=device, words=words(ring))
        for ring in (rings.routes, rings.prompt_routes)
    )
    slots = memory.ladder.max_batch
    table = RouteTable(slots, memory.max_seq_len, routed, device=device)
    return Records(mailbox, logprobs, Routing(tokens, chunks, table))
