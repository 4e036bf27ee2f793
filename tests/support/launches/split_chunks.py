"""A chunk whose stream is split, and what two kernels make of it on a rank that has all of it."""

from __future__ import annotations

import torch

from graphengine.kernels.comm.add_parts_norm import (
    add_parts_rms_norm,
    split_lanes,
    split_normed,
)
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.sums import sum_parts_reference
from graphengine.kernels.norm_rope.norm import add_rms_norm

EPS = 1e-5


class SplitChunk:
    """A chunk that is equal on all ranks that give it equal numbers; some of its lanes are padded,
    and hold NaN.
    """

    def __init__(
        self,
        ranks: int,
        *,
        lanes: int,
        hidden: int,
        dtype: torch.dtype,
        biased: bool,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        dice = torch.Generator().manual_seed(seed)
        scale = 3 ** torch.arange(ranks)[:, None, None]
        self.ranks, self.dtype = ranks, dtype
        parts = torch.randn(ranks, lanes, hidden, generator=dice) * scale
        stream = torch.randn(lanes, hidden, generator=dice)
        slot = torch.where(torch.rand(lanes, generator=dice) < 0.2, -1, 1)
        parts[:, slot < 0], stream[slot < 0] = float("nan"), float("nan")
        norm = torch.randn(hidden, generator=dice)
        bias = torch.randn(hidden, generator=dice) if biased else None
        self.parts, self.stream = parts.to(device, dtype), stream.to(device)
        self.slot = slot.to(device, torch.int32)
        self.norm = norm.to(device, dtype)
        self.bias = None if bias is None else bias.to(device)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream after the sum, and what the norm makes of it, 0 in padded lanes."""
        stream, whole = self.stream.clone(), sum_parts_reference(self.parts)
        if self.bias is not None:
            whole = (whole.float() + self.bias).to(self.dtype)
        normed = torch.zeros_like(whole)
        add_rms_norm(stream, whole, self.norm, self.slot, eps=EPS, out_dtype=self.dtype, out=normed)
        return stream, normed

    def split(self, peers: Peers, memory: FlaggedMemory) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream as `add_parts_rms_norm` leaves it at this rank."""
        stream = self.stream.clone()
        normed = add_parts_rms_norm(
            peers,
            memory,
            self.parts[peers.rank].contiguous(),
            stream,
            self.norm,
            self.slot,
            eps=EPS,
            bias_H=self.bias,
        )
        return stream, normed

    def assert_is_whole(self, peers: Peers, memory: FlaggedMemory) -> None:
        """This rank's lanes of the stream, and all normed ones, are those of `whole`; what is
        padded, or another rank's, is as it was.
        """
        kept = split_normed(memory, *self.stream.shape, self.dtype).clone()
        (stream, normed), (expected, all_normed) = self.split(peers, memory), self.whole()
        live, own = self.slot >= 0, split_lanes(len(stream), peers.rank, self.ranks)
        after = self.stream.clone()
        after[own] = expected[own]
        torch.testing.assert_close(stream, after, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(normed[live], all_normed[live])
        assert torch.equal(_bits(normed[~live]), _bits(kept[~live]))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
