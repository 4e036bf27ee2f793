"""The driver's view of the runtimes of ranks that have requests of their own.

Each rank is told what its own slots hold, and all ranks are told which graph is next. A rank
publishes its requests' tokens into a mailbox that the driver maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphengine.buckets import Copied, StaticBuffers
from graphengine.buckets.mailbox import Payloads
from graphengine.config import EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.core.waits import Waits, deadline_after, seconds_to
from graphengine.host.kept_states import Copy, StateCopy
from graphengine.host.masks import MaskTable
from graphengine.host.plan import Replay
from graphengine.models.contract import Share
from graphengine.opening.loading import Found, Opened
from graphengine.opening.memory import MemoryPlan
from graphengine.opening.records import new_records
from graphengine.parallel.collectives.process_group import check_watch
from graphengine.parallel.data_parallel.shared_records import SharedRecords
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.parallel.link import Kind
from graphengine.parallel.ranks import Ranks
from graphengine.requests.request import Request
from graphengine.requests.result import TokenLogprobs

_DRAFTS = "draft_tokens"


class DataParallelRuntime(DriverRuntime):
    """The runtime of rank 0, which has requests like the others; it also leads all ranks' replays.

    others  the runtimes of the other ranks, rank 1 first
    """

    def __init__(
        self,
        opened: Opened,
        memory: MemoryPlan,
        config: EngineConfig,
        ranks: Ranks,
        found: Found,
    ) -> None:
        # Map them before `super().__init__` removes the ranks' folder.
        mapped = [
            SharedRecords.of_rank(ranks.rendezvous, rank, config, memory)
            for rank in range(1, config.ranks)
        ]
        super().__init__(opened, memory, config, ranks, found)
        self.others = tuple(
            RemoteRank(rank, self, shared, config, memory)
            for rank, shared in enumerate(mapped, start=1)
        )

    # Operations on rank 0 alone.

    def load(self, updates: Mapping[str, Any]) -> list[Copied]:
        """Copy host-owned fields that changed to this rank's device."""
        return Runtime.load(self, updates)

    def load_routes(self, slots: Sequence[Request | None]) -> dict[str, Any]:
        """Store the expert routes that this rank's requests replay; returns the fields to load."""
        return Runtime.load_routes(self, slots)

    def swap(self, out: int, back: int) -> None:
        """Queue the copies of `Runtime.swap` on this rank."""
        Runtime.swap(self, out, back)

    def copy_kept(self, copies: list[Copy]) -> None:
        """Queue the copies of `Runtime.copy_kept` on this rank."""
        Runtime.copy_kept(self, copies)

    # Operations on all ranks.

    def wait_drafts(self, timeout: float | None) -> bool | None:
        """True once the requested drafts of the last replay are on the host."""
        deadline = deadline_after(timeout)
        own = super().wait_drafts(timeout)
        return own and (all(each.wait_drafts(seconds_to(deadline)) for each in self.others) or None)

    def acknowledge(self, sequence: int) -> None:
        """Note that replays up to this one were published by a rank; the others have published
        them, too, or are about to.
        """
        self.wait_tokens(sequence, 1, None)
        super().acknowledge(sequence)
        for each in self.others:
            each.buffers.acknowledge(sequence)

    def close(self) -> None:
        """End the other ranks, and free what this one holds. Nothing works afterwards."""
        super().close()
        for each in self.others:
            each.close()


class RemoteRank(Waits):
    """The driver's side of rank `rank`, led by `leading`: loads go to the rank, results come back.

    buffers  copies of the rank's host-owned fields and its draft tokens, which are as the rank
             copied them last
    """

    def __init__(
        self,
        rank: int,
        leading: DataParallelRuntime,
        shared: SharedRecords,
        config: EngineConfig,
        memory: MemoryPlan,
    ) -> None:
        self._rank, self._leading, self._ranks = rank, leading, leading.ranks
        fields = [
            field
            for field in leading.buffers.fields
            if field.owner == "host" or field.name == _DRAFTS
        ]
        self.buffers = StaticBuffers(fields, "cpu", staging_blocks=config.staging_blocks)
        self._host_drafts = all(field.owner == "host" for field in fields)
        self.masks = MaskTable(self.buffers, host_drafts=self._host_drafts)
        self._drafts, self._waits = shared.drafts, shared.watch.numpy()
        self._share = Share(rank, config.ranks)
        # The number of the command that asked for drafts, until they arrive.
        self._asked: int | None = None
        self.mailbox, self.logprobs, self.routing = new_records(config, memory, shared.mailboxes)
        self._mode, self._limit = config.wait, config.wait_limit_s
        self._watched = _Working(self._ranks)

    def load(self, updates: Mapping[str, Any]) -> None:
        """Send the rank the host-owned fields that changed; see `Runtime.load`."""
        sequence, acknowledged = self._leading.launched + 1, self.buffers.acknowledged
        with self._ranks.explained():
            for each in self.buffers.load(updates, sequence=sequence):
                numbers = (*each, sequence, acknowledged)
                self._ranks.send(Kind.LOAD, numbers, self.buffers.image(each), to=self._rank)

    def load_routes(self, slots: Sequence[Request | None]) -> dict[str, Any]:
        """Send the rank the expert routes that its requests replay; see `Runtime.load_routes`."""
        if self.routing is None:
            return {}
        updates = self.routing.table.updates(slots)
        with self._ranks.explained():
            for slot in self.routing.table.written:
                self._leading.send_record(
                    self.routing.table, slot, updates["routing_len"][slot], to=self._rank
                )
        return updates

    def swap(self, out: int, back: int) -> None:
        """Have the rank queue the copies of `Runtime.swap`."""
        with self._ranks.explained():
            self._ranks.send(Kind.SWAP, (out, back), to=self._rank)

    def copy_kept(self, copies: list[Copy]) -> None:
        """Have the rank queue the copies of `Runtime.copy_kept`."""
        with self._ranks.explained():
            for each in copies:
                kind = Kind.COPY_STATE if isinstance(each, StateCopy) else Kind.COPY_BLOCK
                self._ranks.send(kind, tuple(map(int, each)), to=self._rank)
        copies.clear()

    def fetch_drafts(self) -> None:
        """Ask for the drafts of the rank's last replay."""
        if not self._host_drafts:
            with self._ranks.explained():
                self._asked = self._ranks.send(Kind.DRAFTS, to=self._rank)

    def wait_drafts(self, timeout: float | None) -> bool | None:
        """True once the requested drafts have arrived; see `Runtime.wait_drafts`."""
        if self._asked is None:
            return True
        with self._ranks.explained():
            if not self._ranks.wait_done(self._rank, self._asked, timeout):
                return None
        self.buffers[_DRAFTS].copy_(self._drafts)
        self.masks.fetch_drafts()
        self._asked = None
        return True

    def wait_tokens(self, sequence: int, lanes: int, timeout: float | None) -> Payloads | None:
        """The first `lanes` lanes that the rank published in replay `sequence`."""
        with self._ranks.explained():
            found = super().wait_tokens(sequence, lanes, timeout)
            check_watch(self._waits, self._share, self._limit)
            return found

    def wait_logprobs(
        self, replay: Replay, record: Payloads, timeout: float | None
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """The log-probabilities of each lane of a replay that published `record`."""
        with self._ranks.explained():
            found = super().wait_logprobs(replay, record, timeout)
            check_watch(self._waits, self._share, self._limit)
            return found

    def wait_routes(self, replay: Replay, record: Payloads, timeout: float | None) -> bool | None:
        """True once the requests of a replay that published `record` have their tokens' experts."""
        with self._ranks.explained():
            return super().wait_routes(replay, record, timeout)

    def close(self) -> None:
        """Release the mapped memory."""
        self.buffers.close()
        del self.mailbox, self.logprobs, self.routing, self.masks, self._drafts, self._waits


class _Working:
    """A stand-in for a stream that the mailbox queries: never idle, raises once a rank failed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def query(self) -> bool:
        self._ranks.check()
        return False
