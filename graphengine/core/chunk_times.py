"""Times prefill chunks with an engine's own prefill graphs, while the engine opens.

A chunk is loaded and replayed as for a request, with nothing else running: its time is what it adds
to the inter-token latency of other requests. No request uses yet what it changes, and everything is
cleared afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from graphengine.buckets import CapturedGraph, ReplayTimer, StaticBuffers
from graphengine.config import EngineConfig
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.program.graph_key import GraphKey

REPLAYS = 3
"""Timed replays of each graph and context; the slowest counts. On a GPU one warm-up precedes them.
"""
_SLOT = 0


def longest_prompt(memory: MemoryPlan) -> int:
    """Tokens of the longest prompt, which leaves room for one new token."""
    return memory.max_seq_len - 1


class ChunkTimer:
    """Times chunks of slot 0, whose blocks are the first of the pool: all hold KV of a real chunk.

    Zeros instead would take less power, and so let the clock rise. `clear` zeroes the blocks again;
    the caller clears the static buffers and mailboxes.

    graphs      captured graphs by key; the slowest graph of each prefill bucket counts
    vocabulary  number of ids that a prompt may have
    """

    def __init__(
        self,
        graphs: Mapping[GraphKey, CapturedGraph],
        buffers: StaticBuffers,
        caches: Sequence[tuple[Tensor, Tensor]],
        memory: MemoryPlan,
        config: EngineConfig,
        vocabulary: int,
    ) -> None:
        self._graphs = {
            tokens: [
                graph
                for key, graph in graphs.items()
                if key.kind == "prefill" and key.size == tokens and key.variant != "note"
            ]
            for tokens in memory.prefill_ladder.sizes
        }
        self._buffers, self._caches = buffers, caches
        self._longest = longest_prompt(memory)
        self._vocabulary = vocabulary
        self._blocks = min(memory.kv_blocks, memory.table_blocks)
        self._stream = next(iter(graphs.values())).stream
        self._timer = None if self._stream is None else ReplayTimer(self._stream, 1)
        self._loads = 0
        self._load(
            block_table=[[1 + at % self._blocks for at in range(memory.table_blocks)]],
            **{ring.table: [ring.table_row(0, memory.table_blocks)] for ring in memory.rings},
            command_epoch=[1],
            max_len=[memory.max_seq_len],
            logprobs_wanted=[config.max_logprobs],
            prompt_logprobs_wanted=[config.max_logprobs],
        )
        self._fill(memory)

    def __call__(self, tokens: int, start: int) -> float:
        """Milliseconds of a chunk in the bucket of `tokens` that begins at position `start`. It is
        the last chunk of its prompt, which also samples and drafts.
        """
        count = min(tokens, self._longest - start)
        warm_up = self._timer is not None
        return max(
            max([self._run(graph, start, count) for _ in range(warm_up + REPLAYS)][warm_up:])
            for graph in self._graphs[tokens]
        )

    def clear(self) -> None:
        """Zero the blocks; call it on the engine's stream."""
        for cache, _ in self._caches:
            cache[:, 1 : 1 + self._blocks].zero_()

    def _fill(self, memory: MemoryPlan) -> None:
        """Feed a chunk at position 0, and copy its blocks to all others."""
        tokens = memory.prefill_ladder.sizes[-1]
        self._run(self._graphs[tokens][-1], 0, min(tokens, self._longest))
        fed = min(max(1, tokens // memory.block_size), self._blocks)
        for cache, _ in self._caches:
            for first in range(1 + fed, 1 + self._blocks, fed):
                count = min(fed, 1 + self._blocks - first)
                cache[:, first : first + count].copy_(cache[:, 1 : 1 + count])

    def _run(self, graph: CapturedGraph, start: int, count: int) -> float:
        chunk = {
            "prefill_tokens": [7919 * at % self._vocabulary for at in range(start, start + count)],
            "prefill_slot": [_SLOT],
            "prefill_start": [start],
            "prefill_count": [count],
            "prefill_final": [1],
        }
        began = time.perf_counter()
        if self._timer is not None:
            self._timer.begin(0)
        self._load(**chunk)
        graph.replay()
        if self._timer is None or self._stream is None:
            return 1e3 * (time.perf_counter() - began)
        self._timer.end(0)
        self._stream.synchronize()
        took = 1e-3 * self._timer.microseconds(0)
        assert took > 0, f"{graph.name} took {took} ms on an idle stream"
        return took

    def _load(self, **updates: Sequence[object]) -> None:
        """Load fields as an engine does. Earlier loads have been replayed, except for the first."""
        self._buffers.acknowledge(self._loads)
        self._loads += 1
        self._buffers.load(updates, sequence=self._loads, stream=self._stream)
