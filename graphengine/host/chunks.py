"""Cuts prompts into chunks, and packs the chunks of several prompts into one replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphengine.host.block_pool import BlockPool
from graphengine.host.reuse import Reuse
from graphengine.host.step_plan import PrefillChunk
from graphengine.options.prefill_cut import PrefillCut
from graphengine.requests.job import Job
from graphengine.requests.request import Phase, Request


class Chunks:
    """Chooses the chunks of a prefill replay, oldest request first.

    cut       where the chunks of prompts end
    largest   most tokens of a replay
    reuse     finds blocks of `pool`, of `block_size` tokens, that already hold a prompt's first
              tokens
    note_all  whether the prompt tokens that a request skips are noted on the device for every
              request; otherwise only for requests with options on their logits
    prompts   most prompts whose chunks a replay takes
    counters  counts the chunks that were `packed_chunks`: fed in a replay with an older one

    Several chunks of one replay are of requests without options on their logits. Together they have
    no more tokens than the cut allows for the one that begins furthest into its prompt, so a
    replay of them takes no longer than that one alone might. Where chunks end depends on the prompt
    alone.
    """

    def __init__(
        self,
        *,
        cut: PrefillCut | None,
        largest: int,
        reuse: Reuse,
        pool: BlockPool,
        block_size: int,
        note_all: bool,
        prompts: int,
        counters: Counter[str],
    ) -> None:
        self._cut = PrefillCut(((0, largest),)) if cut is None else cut
        # Nothing is computed for tokens that are only noted.
        self._noted_cut = PrefillCut(((0, largest),))
        self._largest = largest
        self._reuse, self._note_all = reuse, note_all
        self._pool, self._block_size = pool, block_size
        self._prompts, self._counters = prompts, counters
        self.tables_changed = False
        """Whether block tables have changed since this was set to False."""

    def next(self, active: Iterable[Request]) -> tuple[PrefillChunk, ...]:
        """The chunks of the next replay, whose tokens then count as fed; () without any.

        A prompt may share blocks that an older one fills in the same replay: each layer writes all
        chunks' keys and values before any chunk reads them. Recurrent states are copied from slot
        to slot between replays: a prompt that begins with an older one's waits for the next.
        """
        chunks: list[PrefillChunk] = []
        fed, most = 0, self._largest
        for request in active:
            if request.phase is not Phase.PREFILL:
                continue
            if chunks and not (_may_pack(request.job) and self._fits(request, fed, most)):
                break
            chunk = self._chunk(request)
            fed, most = fed + chunk.count, min(most, self._cut.tokens(chunk.start))
            self._advance(chunk)
            chunks.append(chunk)
            if len(chunks) == self._prompts or chunk.noted or not _may_pack(request.job):
                break
        if len(chunks) > 1:
            self._counters["packed_chunks"] += len(chunks) - 1
        return tuple(chunks)

    def _fits(self, request: Request, fed: int, most: int) -> bool:
        """Whether the request's next chunk fits a replay that feeds `fed` of at most `most` tokens
        without it. A chunk that is only noted fits none.
        """
        placement = request.job.placed
        if not placement.begun and not self._look_again(request):
            return False
        if placement.noted < request.cached_tokens:
            return False
        start = placement.prefilled
        count = self._end(request.job, start) - start
        return fed + count <= min(most, self._cut.tokens(start))

    def _end(self, job: Job, start: int) -> int:
        """Where the chunk of a prompt from `start` on ends."""
        return self._cut.end(start, self._reuse.stop(job, start), job.embeds.images())

    def _chunk(self, request: Request) -> PrefillChunk:
        placement = request.job.placed
        if not placement.begun:
            placement.begun = True
            self._look_again(request)
            if self._reuse.prefixes and not placement.indexed:
                self._reuse.begun(request)
            self._reuse.leave(request)
        noted = placement.noted < request.cached_tokens
        if noted:
            start = placement.noted
            end = self._noted_cut.end(start, request.cached_tokens)
        else:
            start = placement.prefilled
            end = self._end(request.job, start)
        return PrefillChunk(request=request, start=start, count=end - start, noted=noted)

    def _look_again(self, request: Request) -> bool:
        """Share the prompt's blocks that others have prefilled since the request was admitted.

        False, and nothing is shared, if the recurrent states after them are only computed by the
        replay that is being filled.
        """
        placement, reuse = request.job.placed, self._reuse
        if not (reuse.prefixes or request.job.shared) or placement.indexed:
            return True
        reused = reuse.begin_with(request)
        if reused.tokens > request.cached_tokens:
            if reused.state is not None and reuse.states.is_awaited(reused.state):
                return False
            have = request.cached_tokens // self._block_size
            more = reused.blocks[have:]
            self._pool.use(more)
            reuse.touch_cached(request, reused)
            own = placement.blocks[have : have + len(more)]
            placement.blocks[have : have + len(more)] = more
            self._pool.give_back(own)
            if not self.is_noted(request.job):
                placement.noted = reused.tokens
            placement.prefilled = reused.tokens
            reuse.begin(request, reused)
            self.tables_changed = True
        return True

    def is_noted(self, job: Job) -> bool:
        """Whether the prompt tokens that a request skips must be noted on the device."""
        return self._note_all or job.processing is not None

    def _advance(self, chunk: PrefillChunk) -> None:
        placement = chunk.request.job.placed
        if chunk.noted:
            placement.noted += chunk.count
            return
        placement.prefilled += chunk.count
        if self._reuse.prefixes or self._reuse.states or chunk.request.job.shared:
            self._reuse.fed(chunk.request)
        if chunk.final:
            placement.least = 1
            chunk.request.phase = Phase.DECODE


def _may_pack(job: Job) -> bool:
    """Whether a replay that samples without options on logits serves the request."""
    return job.processing is None
