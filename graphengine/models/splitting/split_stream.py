"""A chunk's residual stream, with its lanes split over ranks, on GPUs and on a CPU.

On GPUs, one kernel reduces, adds and norms in memory that all ranks map. On a CPU, parts and normed
lanes are gathered; that is no faster than summing all lanes on each rank, and exists so that the
scheme of GPUs can be tested without them.

Letters: N lanes, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphengine.kernels.comm.add_parts_norm import add_parts_rms_norm, split_lanes
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.sums import sum_parts
from graphengine.kernels.norm_rope.norm import add_rms_norm
from graphengine.models.launches import Reduce, Share


class _SplitStream:
    """The part common to both streams; `reduce` is the group's."""

    def __init__(self, share: Share, normed_NH: Tensor, reduce: Reduce) -> None:
        self._share, self._reduce = share, reduce
        self.normed_NH = normed_NH

    def gather_lane(self, stream_NH: Tensor, index_1: Tensor) -> Tensor:
        """The lane from the rank that has it: an all-reduce of the lane and other ranks' zeros."""
        first = split_lanes(len(stream_NH), *self._share)
        own = (index_1 >= first.start) & (index_1 < first.stop)
        # This rank's stream has no valid values in other ranks' lanes.
        return self._reduce(torch.where(own[:, None], stream_NH.index_select(0, index_1), 0.0))


class PushedStream(_SplitStream):
    """A split stream by pushes. All streams use the same memory: one is valid until the next
    chunk's is opened.
    """

    def __init__(
        self,
        peers: Peers,
        memory: FlaggedMemory,
        normed_NH: Tensor,
        reduce: Reduce,
        *,
        pdl: bool,
    ) -> None:
        super().__init__(Share(peers.rank, peers.ranks), normed_NH, reduce)
        self._peers, self._memory, self._pdl = peers, memory, pdl

    def add(
        self,
        part_NH: Tensor,
        stream_NH: Tensor,
        next_norm_H: Tensor,
        slot_N: Tensor,
        bias_H: Tensor | None,
        eps: float,
    ) -> None:
        add_parts_rms_norm(
            self._peers,
            self._memory,
            part_NH,
            stream_NH,
            next_norm_H,
            slot_N,
            eps=eps,
            bias_H=bias_H,
            pdl=self._pdl,
        )


class GatheredStream(_SplitStream):
    """A split stream by gathers."""

    def __init__(
        self,
        share: Share,
        normed_NH: Tensor,
        reduce: Reduce,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(share, normed_NH, reduce)
        self._gather = gather

    def add(
        self,
        part_NH: Tensor,
        stream_NH: Tensor,
        next_norm_H: Tensor,
        slot_N: Tensor,
        bias_H: Tensor | None,
        eps: float,
    ) -> None:
        whole = sum_parts(self._gather(part_NH))
        if bias_H is not None:
            whole = (whole.float() + bias_H.float()).to(whole.dtype)
        normed, (lanes, hidden) = self.normed_NH, self.normed_NH.shape
        own = split_lanes(lanes, *self._share)
        # Every rank sends equally many lanes; the last ranks may have fewer of their own.
        sent = normed.new_zeros(-(-lanes // self._share.ranks), hidden)
        if own.start < own.stop:
            add_rms_norm(
                stream_NH[own],
                whole[own],
                next_norm_H,
                slot_N[own],
                eps=eps,
                out_dtype=normed.dtype,
                out=sent[: own.stop - own.start],
            )
        live = slot_N >= 0
        normed[live] = self._gather(sent).flatten(0, 1)[:lanes][live]
