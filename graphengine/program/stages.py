"""The steps of a pipeline's stages, each with some of a model's layers.

    begin     before a decode step all stages copy the last one's state
    arrive    the residual stream comes from the previous stage
    leave     it goes to the next stage; the last one samples, and publishes

The inputs of a decode step follow from the device-owned state: the sampled tokens, drafts, and how
far each slot is. Only the last stage commits tokens. So at the beginning of a decode step all
stages copy its state: a few numbers a slot, and no logits. The chunks of a prompt do not need it,
so a stage may feed the next chunk while the stage after it still works on the current one.

Letters: R rows of the bucket, W lanes of a row, N = R * W lanes, T tokens of a prefill bucket,
S slots, H hidden.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers
from graphengine.kernels.linear.residual import Residual, sums_of_squares
from graphengine.kernels.step.state import PrefillLanes, SlotState
from graphengine.models.launches import Share

# The fields of `SlotState` that the last stage commits; each stage counts its replays itself.
_COMMITTED = SlotState._fields[:-1]


class StageGroup(Protocol):
    """How one stage of a pipeline communicates with the others in a step."""

    @property
    def share(self) -> Share:
        """The number of this stage, and how many there are."""
        ...

    def receive(self, tensor: Tensor, /) -> None:
        """Wait for the previous stage's tensor, which has this shape and dtype."""
        ...

    def send(self, tensor: Tensor, /) -> None:
        """Send to the next stage without waiting for it. Nobody changes the tensor afterwards."""
        ...

    def spread(self, tensor: Tensor, /) -> None:
        """On the last stage, send this to all others; on the others, wait for it."""
        ...

    def receive_count(self, device: torch.device, /) -> int:
        """Wait for a number that the previous stage sends; not in a captured step."""
        ...

    def send_count(self, count: int, device: torch.device, /) -> None:
        """Send a number to the next stage, as its `receive_count` expects."""
        ...


class StepFlow:
    """The stream of a model without pipeline stages: nothing is received or sent."""

    def is_common(self, field: Field) -> bool:
        """Whether this field is the same on all ranks between two steps, after `begin`."""
        return field.owner == "device" and field.replicated

    def begin(self) -> None:
        """Called before a decode step."""

    def arrive(self, residual: Residual, norm_H: Tensor) -> Residual:
        """A decode step's stream before the first layer, scaled for its norm."""
        return residual

    def arrive_chunk(self, chunk: PrefillLanes) -> Tensor | None:
        """Float32 [T, H]: a chunk's stream before the first layer; None: it is the embeddings."""
        return None


class StageFlow(StepFlow):
    """One stage's part in passing state and the residual stream along a pipeline.

    hidden  H
    drafts  whether the device owns drafts, which are among a step's inputs
    """

    def __init__(
        self, group: StageGroup, buffers: StaticBuffers, hidden: int, *, drafts: bool
    ) -> None:
        self._group, self._hidden = group, hidden
        names = [*_COMMITTED, *(["draft_tokens"] if drafts else [])]
        self._fed = {name: buffers[name] for name in names}
        # Groups of squares that the previous stage leaves; whether the next one knows our number.
        self._groups, self._told = 0, False

    @property
    def _first(self) -> bool:
        return self._group.share.rank == 0

    @property
    def last(self) -> bool:
        rank, stages = self._group.share
        return rank == stages - 1

    def is_common(self, field: Field) -> bool:
        return field.name in self._fed

    def begin(self) -> None:
        columns = [field.view(len(field), -1) for field in self._fed.values()]
        told = torch.cat(columns, dim=1)
        self._group.spread(told)
        if self.last:
            return
        parts = torch.split(told, [column.shape[1] for column in columns], dim=1)
        for column, part in zip(columns, parts, strict=True):
            column.copy_(part)

    def arrive(self, residual: Residual, norm_H: Tensor) -> Residual:
        if self._first:
            return residual
        self._group.receive(residual.x)
        if not self._groups:
            # Received once, in the very first step, which is not in a graph.
            self._groups = self._group.receive_count(residual.x.device)
        torch.mul(residual.x, norm_H, out=residual.scaled)
        squares = sums_of_squares(residual.x, self._groups)
        return residual._replace(squares=squares.contiguous())

    def arrive_chunk(self, chunk: PrefillLanes) -> Tensor | None:
        if self._first:
            return None
        shape = (len(chunk.token), self._hidden)
        stream = torch.empty(shape, dtype=torch.float32, device=chunk.token.device)
        self._group.receive(stream)
        return stream

    def leave(self, residual: Residual) -> None:
        """Pass on a decode step's stream, which is not changed afterwards."""
        self._group.send(residual.x)
        if not self._told:
            self._group.send_count(len(residual.squares), residual.x.device)
            self._told = True

    def leave_chunk(self, stream_TH: Tensor) -> None:
        """Pass on a chunk's float32 stream, which is not changed afterwards."""
        self._group.send(stream_TH)
