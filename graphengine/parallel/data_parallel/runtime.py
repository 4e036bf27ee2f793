"""The driver's view of the runtimes of ranks that have requests of their own.

The driver sends each rank the contents of its own slots, and tells all ranks which graph is next. A
rank publishes its requests' tokens into a mailbox that the driver maps.
"""

from __future__ import annotations

from collections import deque

from graphengine.buckets import StaticBuffers
from graphengine.config import EngineConfig
from graphengine.core.commands import Command, FetchDrafts, OfSlots, SlotOperations
from graphengine.core.waits import deadline_after, seconds_to
from graphengine.host.masks import MaskTable
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.loading import CheckpointContents, Opened
from graphengine.opening.records import new_records
from graphengine.parallel.collectives.process_group import check_watch
from graphengine.parallel.data_parallel.shared_records import SharedRecords
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.parallel.ranks import Ranks
from graphengine.parallel.watched_waits import WatchedStream, WatchedWaits

_DRAFTS = "draft_tokens"


class DataParallelRuntime(DriverRuntime):
    """The runtime of rank 0, which has requests like the others; it also leads all ranks' replays.

    others  the runtimes of the other ranks, rank 1 first
    """

    _repeated = False

    def __init__(
        self,
        opened: Opened,
        memory: MemoryPlan,
        config: EngineConfig,
        ranks: Ranks,
        contents: CheckpointContents,
    ) -> None:
        # Map them before `super().__init__` removes the ranks' folder.
        mapped = [
            SharedRecords.of_rank(ranks.rendezvous, rank, config, memory)
            for rank in range(1, config.ranks)
        ]
        super().__init__(opened, memory, config, ranks, contents)
        self.others = tuple(
            RemoteRank(rank, self, shared, config, memory)
            for rank, shared in enumerate(mapped, start=1)
        )

    def _send(self, command: Command) -> None:
        """Send a command to all other ranks, unless it concerns the requests of rank 0."""
        if not isinstance(command, OfSlots):
            super()._send(command)

    def wait_drafts(self, timeout: float | None) -> bool | None:
        """True once the drafts requested after acknowledged replays are on the host."""
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
        """End the other ranks, and free this rank's resources. No other call works afterwards."""
        super().close()
        for each in self.others:
            each.close()


class RemoteRank(SlotOperations, WatchedWaits):
    """The driver's side of rank `rank`: commands go to the rank, results come back.

    buffers  copies of the rank's host-owned fields and of its draft tokens; the latter as of the
             rank's last copy
    """

    def __init__(
        self,
        rank: int,
        driver: DataParallelRuntime,
        shared: SharedRecords,
        config: EngineConfig,
        memory: MemoryPlan,
    ) -> None:
        self._rank, self._driver, self.ranks = rank, driver, driver.ranks
        fields = [
            field
            for field in driver.buffers.fields
            if field.owner == "host" or field.name == _DRAFTS
        ]
        self.buffers = StaticBuffers(fields, "cpu", staging_blocks=config.staging_blocks)
        self._host_drafts = all(field.owner == "host" for field in fields)
        self.masks = MaskTable(self.buffers, host_drafts=self._host_drafts)
        self._drafts, self._waits = shared.drafts, shared.watch.numpy()
        self._share = Share(rank, config.ranks)
        # For each command that asked for drafts which have not arrived, oldest first: the replay
        # before it, and the command's number.
        self._asked: deque[tuple[int, int]] = deque()
        records = new_records(config, memory, shared.mailboxes)
        self.mailbox, self.logprobs, self.routing = records[:3]
        self.data_room = driver.data_room
        self._mode, self._limit = config.wait, config.wait_limit_s
        self._watched = WatchedStream(driver.ranks)

    @property
    def next_replay(self) -> int:
        """The sequence number of the next replay."""
        return self._driver.next_replay

    _repeated = True

    def run(self, command: Command) -> int:
        """Have the rank execute a command; returns its number."""
        with self.ranks.explained():
            return self.ranks.send(command, to=self._rank)

    def _send(self, command: Command) -> None:
        self.run(command)

    def fetch_drafts(self) -> None:
        """Ask for the drafts of the rank's last replay."""
        if not self._host_drafts:
            self._asked.append((self.next_replay - 1, self.run(FetchDrafts())))

    def wait_drafts(self, timeout: float | None) -> bool | None:
        """True once the requested drafts have arrived; see `Runtime.wait_drafts`."""
        read = self.buffers.acknowledged
        due = [number for sequence, number in self._asked if sequence <= read]
        if not due:
            return True
        with self.ranks.explained():
            if not self.ranks.wait_done(self._rank, due[-1], timeout):
                return None
        for _ in due:
            self._asked.popleft()
        self.buffers[_DRAFTS].copy_(self._drafts)
        self.masks.fetch_drafts(read)
        return True

    def check_group(self) -> None:
        """Raise GroupError once the rank has waited in vain for the others."""
        check_watch(self._waits, self._share, self._limit)

    def close(self) -> None:
        """Release the mapped memory."""
        self.buffers.close()
        del self.mailbox, self.logprobs, self.routing, self.masks, self._drafts, self._waits
