"""Collectives of ranks whose kernels push their parts into each other's memory.

All of them are launches over the tensors of `PeerTensors`: they run on GPUs that map each other's
memory, and are traced over tensors without memory. How ranks connect is not handled here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from graphengine.kernels.comm.add_parts_norm import split_has_room, split_normed
from graphengine.kernels.comm.all_reduce import all_reduce
from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.layout import PeerTensors
from graphengine.kernels.comm.push import push_gather, push_own_sum, push_sum
from graphengine.kernels.comm.push_candidates import push_candidates
from graphengine.kernels.comm.push_lanes import ExpertLanes, push_lanes
from graphengine.kernels.comm.push_residual import push_own_to_residual
from graphengine.models.launches import AddOwn, Share
from graphengine.models.splitting.split_stream import PushedStream

# Least bytes of a chunk's lanes for a split stream between two ranks. On two H100s a one-shot sum
# and a norm of all lanes take 15 us for 2 MiB, a split stream 14 us; for 4 MiB 24 and 20 us.
# Smaller sizes were not measured.
_LEAST_SPLIT = 2 * 2**20


class Pushes:
    """The `RankGroup` of ranks that push everything.

    pdl  whether launches may overlap the launches before them
    """

    # The counter of a rank's waits is in its own memory.
    waited_s: float | None = None

    def __init__(self, tensors: PeerTensors, *, pdl: bool) -> None:
        self._tensors, self._pdl = tensors, pdl
        self.share = Share(tensors.peers.rank, tensors.peers.ranks)

    @property
    def peers(self) -> Peers:
        """Peer memory that kernels push items into."""
        return self._tensors.peers

    def reduce(self, part_NH: Tensor) -> Tensor:
        """All-reduce into a new tensor; see `Reduce`."""
        summing, part_NH = self._tensors.summing, part_NH.contiguous()
        if summing is None or self.peers.hold(part_NH):
            return push_sum(self.peers, part_NH, pdl=self._pdl)
        return all_reduce(self.peers, summing, part_NH, pdl=self._pdl)

    def split_stream(self, lanes: int, hidden: int, dtype: torch.dtype) -> PushedStream | None:
        """The residual stream of a chunk split over ranks, see `OpenSplit`; None where all ranks
        keep all lanes, as two do for small chunks.
        """
        stream = self.pushed_stream(lanes, hidden, dtype)
        small = stream is not None and stream.normed_NH.nbytes < _LEAST_SPLIT
        return None if small and self.share.ranks == 2 else stream

    def pushed_stream(self, lanes: int, hidden: int, dtype: torch.dtype) -> PushedStream | None:
        """A split stream, however small; None where there is no memory for it, or where parts are
        pushed as items.
        """
        split = self._tensors.split
        if split is None or not split_has_room(split, lanes, hidden, dtype):
            return None
        normed = split_normed(split, lanes, hidden, dtype)
        if self.peers.hold(normed):
            return None
        return PushedStream(self.peers, split, normed, self.reduce, pdl=self._pdl)

    def gather(self, part_NC: Tensor) -> Tensor:
        """All-gather into a new `[ranks, N, C]`, in rank order."""
        return push_gather(self.peers, part_NC.contiguous(), pdl=self._pdl)

    def sum_own(self, parts_RNC: Tensor) -> Tensor:
        """Reduce-scatter into a new `[N, C]`, summed in rank order."""
        return push_own_sum(self.peers, parts_RNC.contiguous(), pdl=self._pdl)

    @property
    def add_own(self) -> AddOwn:
        """A kernel that pushes ranks' parts for each other in a decode step, and adds the sum to
        the residual stream.
        """
        return partial(push_own_to_residual, self.peers)

    def push_candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates of all ranks, in one launch."""
        return push_candidates(self.peers, best_NC, health_NC, pdl=self._pdl)

    def push_lanes(self, lanes: ExpertLanes) -> ExpertLanes | None:
        """The lanes of all ranks, in one launch; None where the memory is too small for them."""
        return (
            None if lanes.units > self.peers.units else push_lanes(self.peers, lanes, pdl=self._pdl)
        )
