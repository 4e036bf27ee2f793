"""KV and states of all pipeline stages, copied to and from the driver's memory in the layout of one
model: each stage has some of its layers.

The driver has the last stage. It receives each other stage's tensors, or sends them; all stages
work through the same layers in the same order. Ranks that split a stage's layers put their parts
together before a stage sends, and each takes its part after a stage has received. Bytes travel as
in a step, so only tensors of known shapes arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphengine.core.runtime import Runtime
from graphengine.models.contract import ModelConfig
from graphengine.models.splitting.stages import stage_spans
from graphengine.models.states import Recurrent, kept_shape, paged_states, recurrent_states
from graphengine.parallel.kept_parts import KeptParts
from graphengine.parallel.stage_link import StageLink


class StageParts:
    """KV and states of one stage's `runtime`, which has some layers of the `whole` model.

    own    KV and states of this stage, from all its ranks
    leads  whether this rank is the first of its stage; only that one exchanges tensors with the
           other stages

    Only the last stage has the drafter's KV.
    """

    def __init__(
        self, runtime: Runtime, link: StageLink, whole: ModelConfig, own: KeptParts, *, leads: bool
    ) -> None:
        self._runtime, self._link, self._own, self._leads = runtime, link, own, leads
        layers = [
            whole.states[span.first : span.stop] for span in stage_spans(whole, link.share.ranks)
        ]
        self._paged = [len(paged_states(each)) for each in layers]
        self._recurrent = [[*recurrent_states(each).values()] for each in layers]

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`Runtime.block_shapes` of all stages together."""
        own, *others = self._own.block_shapes
        return ((sum(self._paged), *own[1:]), *others)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`Runtime.state_shapes` of all stages together."""
        return tuple(kept_shape(state) for stage in self._recurrent for state in stage)

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """`Runtime.state_dtypes` of all stages together."""
        return tuple(self._dtype(state) for stage in self._recurrent for state in stage)

    # Every rank calls each of these with the same arguments, except for values that only the driver
    # has.

    def read_blocks(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """Read blocks as `Runtime.read_blocks`, of all stages together."""
        self._runtime.synchronize()
        own, *others = self._own.read_blocks(blocks)
        parts = [[own.new_empty((layers, *own.shape[1:]))] for layers in self._paged]
        parts[self._link.share.rank] = [own]
        if self._leads:
            self._collect(parts)
        return (torch.cat([part for (part,) in parts]), *others)

    def write_blocks(self, blocks: Sequence[int], kept: Sequence[Tensor] | None) -> None:
        """Write blocks as `Runtime.write_blocks`; `kept` is None on all ranks but the driver."""
        self._runtime.synchronize()
        (_, *block), *_ = self._own.block_shapes
        dtype, others = self._runtime.caches[0][0].dtype, list[Tensor]()
        shapes = [(layers, len(blocks), *block) for layers in self._paged]
        parts = [[torch.empty(shape, dtype=dtype)] for shape in shapes]
        if kept is not None:
            whole, *others = kept
            parts = [[part] for part in torch.split(whole, self._paged)]
        self._own.write_blocks(blocks, [*self._spread(parts), *others] if self._leads else None)

    def read_states(self, place: int) -> tuple[Tensor, ...]:
        """Read states as `Runtime.read_states`, of all stages together."""
        self._runtime.synchronize()
        parts = [[*map(self._empty, stage)] for stage in self._recurrent]
        parts[self._link.share.rank] = [*self._own.read_states(place)]
        if self._leads:
            self._collect(parts)
        return tuple(part for stage in parts for part in stage)

    def write_states(self, place: int, kept: Sequence[Tensor] | None) -> None:
        """Write states as `Runtime.write_states`; `kept` is None on all ranks but the driver."""
        self._runtime.synchronize()
        parts = [[*map(self._empty, stage)] for stage in self._recurrent]
        if kept is not None:
            left = iter(kept)
            parts = [[next(left) for _ in stage] for stage in parts]
        self._own.write_states(place, self._spread(parts) if self._leads else None)

    def _empty(self, state: Recurrent) -> Tensor:
        return torch.empty(kept_shape(state), dtype=self._dtype(state))

    def _dtype(self, state: Recurrent) -> torch.dtype:
        return state.dtype or self._runtime.model.dtype

    def _collect(self, parts: list[list[Tensor]]) -> None:
        """Bring each stage's tensors to the driver's host memory."""
        link, device = self._link, self._runtime.device
        rank, stages = link.share
        with self._runtime.on_stream():
            if rank < stages - 1:
                for part in parts[rank]:
                    link.send_to(stages - 1, part.to(device))
                return
            for stage, tensors in enumerate(parts[:-1]):
                for index, part in enumerate(tensors):
                    arrived = part.to(device)
                    link.receive_from(stage, arrived)
                    tensors[index] = arrived.cpu()

    def _spread(self, parts: list[list[Tensor]]) -> list[Tensor]:
        """Send each stage its tensors from the driver; returns this stage's, on the host."""
        link, device = self._link, self._runtime.device
        rank, stages = link.share
        with self._runtime.on_stream():
            if rank == stages - 1:
                for stage, tensors in enumerate(parts[:-1]):
                    for part in tensors:
                        link.send_to(stage, part.to(device))
                return parts[-1]
            arrived = [part.to(device) for part in parts[rank]]
            for part in arrived:
                link.receive_from(stages - 1, part)
            return [part.cpu() for part in arrived]
