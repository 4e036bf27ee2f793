"""A chunk's residual stream of which each rank has some lanes, on GPUs and on a CPU.

On GPUs one kernel sums up, adds and norms in memory that all ranks map. On a CPU parts and normed
lanes are gathered; that is no faster than sums of all lanes on each rank, and is there so that what
GPUs do is seen without them.

Letters: N lanes, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphengine.kernels import (
    FlaggedMemory,
    Peers,
    add_parts_rms_norm,
    add_rms_norm,
    split_lanes,
    sum_parts,
)
from graphengine.models.contract import Reduce, Share


class _SplitStream:
    """What both have: `reduce` is that of the group."""

    def __init__(self, share: Share, normed_NH: Tensor, reduce: Reduce) -> None:
        self._share, self._reduce = share, reduce
        self.normed_NH = normed_NH

    def gather_lane(self, stream_NH: Tensor, index_1: Tensor) -> Tensor:
        """The lane of the rank that has it: the sum of it and zeros."""
        first = split_lanes(len(stream_NH), *self._share)
        own = (index_1 >= first.start) & (index_1 < first.stop)
        # What another rank's lane holds here is nothing.
        return self._reduce(torch.where(own[:, None], stream_NH.index_select(0, index_1), 0.0))


class PushedStream(_SplitStream):
    """By pushes. All have the same memory: it is valid until the next chunk's is opened."""

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
    """By gathers."""

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
        # As many from each rank, of which the last ones may have fewer.
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
