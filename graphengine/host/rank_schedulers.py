"""The schedulers of data parallel ranks, each with requests of its own, and their common queue.

A request waits in one queue until a rank has a vacant slot for it, goes to the rank with the fewest
requests, and stays there. A turn of a session goes to the rank that has the session's KV; while
that rank is full, later requests overtake it. A sample of a prompt goes to the rank that has the
prompt's KV; while that rank is full, it goes to another one, and feeds the prompt again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from graphengine.host.block_pool import BlockPool
from graphengine.host.scheduler import Move, Scheduler, finish
from graphengine.host.step_plan import Plan, must_read
from graphengine.host.waiting import check_queue, enqueue, has_room
from graphengine.requests.context import Context
from graphengine.requests.request import Request


class RankSchedulers:
    """`Scheduling` over `ranks`, which are set up alike and share their counters.

    max_waiting  most requests that may wait for a slot of any rank; None: no limit
    """

    def __init__(self, ranks: Sequence[Scheduler], max_waiting: int | None) -> None:
        self.ranks = tuple(ranks)
        self.counters = self.ranks[0].counters
        self.moves: list[tuple[Move, int]] = []
        for each in self.ranks:
            assert each.counters is self.counters, "ranks count apart"
            each.moves = self.moves
        self._max_waiting = max_waiting
        self._queue: deque[Request] = deque()
        # The rank of each request that was handed to one.
        self._rank_of: dict[Request, int] = {}

    @property
    def active(self) -> list[Request]:
        """Active requests of all ranks, rank by rank."""
        return [request for each in self.ranks for request in each.active]

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait in a rank, then those that have no rank yet."""
        return [*(request for each in self.ranks for request in each.waiting), *self._queue]

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(each.busy for each in self.ranks)

    @property
    def guided(self) -> int:
        return sum(each.guided for each in self.ranks)

    @property
    def lookahead(self) -> int:
        return min(each.lookahead for each in self.ranks)

    @property
    def width(self) -> int:
        return self.ranks[0].width

    @width.setter
    def width(self, width: int) -> None:
        for each in self.ranks:
            each.width = width

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        return tuple(each.pool for each in self.ranks)

    @property
    def fullest(self) -> int:
        """Active requests of the rank that has the most."""
        return max(len(each.active) for each in self.ranks)

    def home(self, context: Context) -> Scheduler:
        """The scheduler of the context's rank; any if it has no rank, and so keeps nothing."""
        return self.ranks[context.rank or 0]

    def check_queue(self, count: int = 1) -> None:
        """`Scheduler.check_queue` for all ranks together."""
        check_queue(len(self.waiting), self._vacant, self._max_waiting, count)

    @property
    def has_room(self) -> bool:
        """`Scheduler.has_room` for all ranks together."""
        return has_room(len(self.waiting), self._vacant, self._max_waiting)

    @property
    def _vacant(self) -> int:
        return sum(each.slots.count(None) for each in self.ranks)

    def check_fits(self, request: Request) -> None:
        """ValueError if the request could not run with the whole pool of a rank."""
        self.ranks[0].check_fits(request)

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if it could not run with the whole pool of a rank."""
        self.check_fits(request)
        enqueue(self._queue, request)

    def collected(self, request: Request, width: int, count: int) -> None:
        """Tell the request's rank; see `Scheduler.collected`."""
        rank = self._rank_of.get(request)
        if rank is not None:
            self.ranks[rank].collected(request, width, count)

    def retire(self, request: Request) -> None:
        """Remove a request in any phase, and free what it holds."""
        rank = self._rank_of.pop(request, None)
        if rank is not None:
            self.ranks[rank].retire(request)
            return
        self._queue.remove(request)
        self._leave(request)
        finish(request)
        self.moves.append(("finished", request.id))

    def close(self) -> None:
        """Cancel and retire all requests, and release the blocks of all sessions."""
        for request in [*self._queue]:
            request.cancel()
            self.retire(request)
        for each in self.ranks:
            each.close()
        self._rank_of.clear()

    def plan(self) -> tuple[Plan | None, ...] | None:
        """The next step of each rank, None for a rank that has nothing to launch; None if all have
        nothing, or the host must read what is in flight first.
        """
        self._hand_out()
        if self.guided and must_read(self.active):
            return None
        plans = tuple(each.plan() for each in self.ranks)
        return plans if any(plan is not None for plan in plans) else None

    def _hand_out(self) -> None:
        """Give waiting requests to ranks that have a vacant slot, first come, first served."""
        if not self._queue:
            return
        for request in [*self._queue]:
            rank = self._rank_for(request)
            if rank is not None:
                self._queue.remove(request)
                self._rank_of[request] = rank
                self.ranks[rank].submit(request)

    def _rank_for(self, request: Request) -> int | None:
        """The rank for a request: among those with room, the one with the fewest requests, then the
        most free blocks. None without room.
        """
        context = request.job.context
        if context is not None and context.rank is not None:
            return context.rank if _has_room(self.ranks[context.rank]) else None
        shared = request.job.shared
        if shared is not None and shared.rank is not None:
            if _has_room(self.ranks[shared.rank]):
                return shared.rank
            self._leave(request)
            request.job.shared = shared = None
        vacant = [rank for rank, each in enumerate(self.ranks) if _has_room(each)]
        if not vacant:
            return None
        rank = min(vacant, key=lambda rank: _load(self.ranks[rank]))
        if context is not None:
            context.rank = rank
        if shared is not None:
            shared.rank = rank
        return rank

    def _leave(self, request: Request) -> None:
        if request.job.shared is not None:
            self.home(request.job.shared).reuse.leave(request)


def _has_room(rank: Scheduler) -> bool:
    return len(rank.active) + len(rank.waiting) < len(rank.slots)


def _load(rank: Scheduler) -> tuple[int, int]:
    return len(rank.active) + len(rank.waiting), -rank.pool.free
