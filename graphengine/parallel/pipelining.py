"""A pipeline of stages: memory plans of all stages, and the runtime of the last, the driver's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from graphengine.buckets import HostQueue
from graphengine.buckets.mailbox import Payloads
from graphengine.config import EngineConfig
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.loading import (
    CheckpointContents,
    Opened,
    plan_checkpoint,
    read_checkpoint,
    stage_contents,
)
from graphengine.parallel.driver_runtime import DriverRuntime, lead_ranks
from graphengine.parallel.ranks import Ranks, rank_devices
from graphengine.parallel.torchrun import processes_of_torchrun
from graphengine.program.graph_key import GraphKey


def open_pipeline(
    path: str | Path, config: EngineConfig, progress: Callable[[int, int], None] | None
) -> tuple[Opened, DriverRuntime]:
    """Open a checkpoint as the last of `config.pipeline_parallel` stages, like `open_checkpoint`,
    with the runtime that leads all ranks.

    ValueError, before a process is started, for a model that cannot be cut into stages; RankFailed
    if a rank fails.
    """
    started = processes_of_torchrun()
    if started is not None:
        raise ValueError(
            f"pipeline_parallel={config.pipeline_parallel} starts processes of its own, and "
            f"torchrun has started {started}"
        )
    devices = rank_devices(config)
    contents = read_checkpoint(path, config, Share(0, config.ranks))
    memories = plan_stages(contents, config)
    of_ranks = [memory for memory in memories for _ in range(config.tensor_parallel)]
    ranks = Ranks(contents.checkpoint, config, of_ranks, devices)
    return lead_ranks(ranks, contents, memories[0], config, progress, PipelineRuntime)


def plan_stages(contents: CheckpointContents, config: EngineConfig) -> list[MemoryPlan]:
    """The memory plan of a rank of each stage, rank 0's first, from the contents that rank 0 has
    read.

    All stages have as many blocks as the one with the least room, and equally many places for
    states. Raises ValueError and OutOfBudget like `plan_checkpoint`.
    """
    count = config.pipeline_parallel
    stages = [stage_contents(contents, Share(rank, count)) for rank in range(count)]
    plans = [plan_checkpoint(stage, config) for stage in stages]
    least = replace(
        config,
        kv_blocks=min(plan.kv_blocks for plan in plans),
        swap_blocks=min(plan.swap_blocks for plan in plans),
    )
    recurrent = any(plan.recurrent for plan in plans)
    places = max(plan.state_places for plan in plans)
    return [
        replace(
            plan_checkpoint(stage, least, plan.footprint),
            recurrent=recurrent,
            state_places=places,
        )
        for stage, plan in zip(stages, plans, strict=True)
    ]


class PipelineRuntime(DriverRuntime):
    """The runtime of the last stage, which sends the earlier stages each load, swap and replay.

    On a CPU its own work is queued, and done when the caller waits for it: until then it sends the
    other stages their next commands, so the first stage may start a chunk before this one has
    started the previous chunk.

    queue  this stage's work still to be done; always empty on a GPU, whose stream is the queue
    """

    def __init__(
        self,
        opened: Opened,
        memory: MemoryPlan,
        config: EngineConfig,
        ranks: Ranks,
        contents: CheckpointContents,
    ) -> None:
        self.queue = HostQueue()
        # Number of calls queued up to each step, by the step's sequence number.
        self._ends: dict[int, int] = {}
        # For each copy of drafts still to be waited for: the step before it, and its number.
        self._fetches: deque[tuple[int, int]] = deque()
        super().__init__(opened, memory, config, ranks, contents)
        if self.stream is None:
            self._copies = self.queue
            ranks.before_waiting = self.queue.run

    def _launch(self, work: Callable[[], object]) -> None:
        if self.stream is None:
            self.queue.add(work)
        else:
            work()

    def replay(self, key: GraphKey) -> None:
        """Queue a graph on all ranks."""
        first = self.next_replay
        super().replay(key)
        self._ends.update(dict.fromkeys(range(first, self.next_replay), self.queue.queued))

    def synchronize(self) -> None:
        """Do everything that was queued, and wait for it; does nothing after a rank has failed."""
        if self.ranks.broken:
            return
        with self.ranks.explained():
            self.queue.run()
            super().synchronize()

    def wait_tokens(self, sequence: int, lanes: int, timeout: float | None) -> Payloads | None:
        """The first `lanes` lanes published by replay `sequence`."""
        with self.ranks.explained():
            self.queue.run(self._ends.get(sequence, 0))
            self._ends.pop(sequence, None)
        return super().wait_tokens(sequence, lanes, timeout)

    def fetch_drafts(self) -> None:
        """Queue the copy of the drafts to the host, and note its place in the queue."""
        super().fetch_drafts()
        self._fetches.append((self.launched, self.queue.queued))

    def wait_drafts(self, timeout: float | None) -> bool | None:
        """True once the drafts fetched after acknowledged replays are on the host."""
        while self._fetches and self._fetches[0][0] <= self.buffers.acknowledged:
            with self.ranks.explained():
                self.queue.run(self._fetches.popleft()[1])
        return super().wait_drafts(timeout)
