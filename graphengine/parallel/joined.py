"""Whom a rank meets: the ranks that split its layers, and those that have the other stages."""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.kernels import ExpertLanes, Peers, overlaps_launches
from graphengine.models.contract import WHOLE, AddOwn, RankGroup, Share
from graphengine.models.stages import place_of_rank
from graphengine.opening.loading import Found
from graphengine.opening.memory import MemoryPlan
from graphengine.parallel.kept_parts import KeptParts
from graphengine.parallel.meeting import Meeting
from graphengine.parallel.stage_link import StageLink
from graphengine.parallel.stage_parts import StageParts


class Joined:
    """What rank `share.rank` of an engine has joined; waits until all whom it meets have, too.

    Each stage of a pipeline is a group of ranks that split its layers. All of them have the same
    stream, to the bit: so each meets the ranks of other stages that have the same share of the
    layers as itself, and nobody else.

    file    the beginning of the names of files through which ranks find each other
    watch   as of a `Meeting`, of the ranks that split its layers
    group   the ranks that split its layers; None: it has them alone
    stages  those with the other stages; None: there are none

    MeetingFailed where a rank does not come; nothing is left open then.
    """

    def __init__(
        self,
        file: str,
        share: Share,
        memory: MemoryPlan,
        config: EngineConfig,
        watch: Tensor | None = None,
    ) -> None:
        place = place_of_rank(share, config.pipeline_parallel)
        self.group: Meeting | None = None
        self.stages: StageLink | None = None
        self._meetings: list[Meeting] = []
        try:
            if place.shard.ranks > 1:
                name = f"{file}-{place.pipe.rank}"
                self.group = self._meet(name, place.shard, memory, config, watch)
            if place.pipe.ranks > 1:
                name = f"{file}-stages-{place.shard.rank}"
                pipe = self._meet(name, place.pipe, memory, config, stages=True)
                self.stages = StageLink(pipe, config.mailbox_entries)
        except BaseException:
            self.abandon()
            self.close()
            raise

    def _meet(
        self,
        file: str,
        share: Share,
        memory: MemoryPlan,
        config: EngineConfig,
        watch: Tensor | None = None,
        *,
        stages: bool = False,
    ) -> Meeting:
        meeting = Meeting(
            file,
            share,
            memory.device,
            units=memory.push_units,
            summed_words=memory.summed_words,
            pdl=config.pdl and overlaps_launches(memory.device),
            watch=watch,
            stages=stages,
        )
        self._meetings.append(meeting)
        return meeting

    def wait_up_to(self, limit_s: float) -> None:
        """From now on wait no longer for others."""
        for meeting in self._meetings:
            meeting.limit_s = limit_s

    def waited_s(self) -> float | None:
        """For which this rank has waited for the parts of those that split its layers; reads it
        from a GPU.

        None where nothing counts it: there are no others, or NCCL carries all that they sum.
        """
        return None if self.group is None else self.group.waited_s

    def check(self) -> None:
        """MeetingFailed once this rank has waited in vain."""
        for meeting in self._meetings:
            meeting.check()

    def abandon(self) -> None:
        """End what is under way, which others may never answer."""
        for meeting in self._meetings:
            meeting.abandon()

    def leave(self) -> None:
        """Let the others' memory go, once nothing is under way."""
        for meeting in self._meetings:
            meeting.leave()

    def close(self) -> None:
        """Free what others no longer have."""
        if self.stages is not None:
            self.stages.close()
        for meeting in self._meetings:
            meeting.close()

    def kept_parts(self, runtime: Runtime, found: Found) -> KeptParts | StageParts:
        """What this rank has of all that the model of `found`, and its drafter, keep."""
        model, drafter = found.model, found.drafter
        whole = found.whole_stage.states, drafter.whole_states
        group = _Alone() if self.group is None else self.group
        parts = KeptParts(runtime, group, whole=whole, own=(model.states, drafter.needs.states))
        if self.stages is None:
            return parts
        return StageParts(runtime, self.stages, found.whole, parts, leads=group.share.rank == 0)


class _Alone(RankGroup):
    """The group of a rank that has its layers alone."""

    share = WHOLE
    waited_s = 0.0
    peers: Peers | None = None
    add_own: AddOwn | None = None

    def reduce(self, part_NH: Tensor) -> Tensor:
        return part_NH

    def split_stream(self, lanes: int, hidden: int, dtype: torch.dtype) -> None:
        return None

    def gather(self, part_NC: Tensor) -> Tensor:
        return part_NC.unsqueeze(0)

    def sum_own(self, parts_RNC: Tensor) -> Tensor:
        return parts_RNC[0]

    def push_candidates(self, best_NC: Tensor, health_NC: Tensor) -> None:
        return None

    def push_lanes(self, lanes: ExpertLanes) -> ExpertLanes | None:
        return None
