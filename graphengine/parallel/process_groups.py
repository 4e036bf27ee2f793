"""The process groups of a rank: the ranks that split its layers, and the other pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.kernels.core.devices import overlaps_launches
from graphengine.models.launches import Share
from graphengine.models.splitting.stages import place_of_rank
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.parallel.collectives.process_group import ProcessGroup
from graphengine.parallel.stage_link import StageLink


class ProcessGroups:
    """The groups of rank `share.rank` of an engine; waits until all their ranks have joined.

    Each stage of a pipeline is a group of ranks that split its layers. All ranks of a stage have
    the same residual stream, to the bit. So each rank communicates only with the ranks of other
    stages that have the same share of the layers as itself.

    file    the beginning of the names of files through which ranks find each other
    watch   see `ProcessGroup`; used for `tensor`
    check   see `Rendezvous`
    tensor  the ranks that split this rank's layers, or its experts; None: it has them alone
    stages  the ranks of the other stages; None: there are none
    all     both groups, without those that are None

    Raises GroupError where a rank does not come; nothing is left open then.
    """

    def __init__(
        self,
        file: str,
        share: Share,
        memory: MemoryPlan,
        config: EngineConfig,
        watch: Tensor | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        place = place_of_rank(share, config.pipeline_parallel)
        self.tensor: ProcessGroup | None = None
        self.stages: StageLink | None = None
        self.all: list[ProcessGroup] = []

        def join(name: str, share: Share, **options: Any) -> ProcessGroup:
            group = ProcessGroup(
                f"{file}-{name}",
                share,
                memory.device,
                units=memory.push_units,
                summed_words=memory.summed_words,
                pdl=config.pdl and overlaps_launches(memory.device),
                check=check,
                **options,
            )
            self.all.append(group)
            return group

        try:
            if place.shard.ranks > 1:
                self.tensor = join(f"{place.pipe.rank}", place.shard, watch=watch)
            if place.pipe.ranks > 1:
                pipe = join(f"stages-{place.shard.rank}", place.pipe, stages=True)
                self.stages = StageLink(pipe, config.sends_in_flight)
        except BaseException:
            self.abandon()
            self.close()
            raise

    def wait_up_to(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds for other ranks from now on."""
        for group in self.all:
            group.limit_s = limit_s

    def waited_s(self) -> float | None:
        """Seconds spent waiting for the parts of the ranks that split this rank's layers; on a GPU,
        reads the count from the device.

        None where nothing counts it: there are no other ranks, or NCCL carries all sums.
        """
        return None if self.tensor is None else self.tensor.waited_s

    def check(self) -> None:
        """Raise GroupError once this rank has waited in vain."""
        for group in self.all:
            group.check()

    def abandon(self) -> None:
        """End the communication under way, which other ranks may never answer."""
        for group in self.all:
            group.abandon()

    def leave(self) -> None:
        """Unmap the other ranks' memory, once nothing is under way."""
        for group in self.all:
            group.leave()

    def close(self) -> None:
        """Free this rank's own memory, once the other ranks no longer map it."""
        if self.stages is not None:
            self.stages.close()
        for group in self.all:
            group.close()
