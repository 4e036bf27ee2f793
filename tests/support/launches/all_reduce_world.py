"""Ranks of one process that sum large parts, one after the other: those that have not run yet have
stored what they give in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphengine.kernels.comm.all_reduce import (
    all_reduce,
    all_reduce_words,
    block_of,
    blocks_of,
)
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import UNIT, PeerItems, Peers
from graphengine.kernels.comm.sums import sum_parts_reference


class AllReduceWorld:
    """Ranks after as many launches as `tag` says, with garbage in all words."""

    def __init__(self, ranks: int, words: int, programs: int, tag: int = 0) -> None:
        self.ranks, self.programs = ranks, programs
        self.own = [
            torch.randint(-(2**31), 2**31, (all_reduce_words(words, ranks, programs),)).int()
            for _ in range(ranks)
        ]
        addresses = [own.data_ptr() for own in self.own]
        self.memories = [
            FlaggedMemory.over(rank, own, addresses, programs) for rank, own in enumerate(self.own)
        ]
        self.size = self.memories[0].size
        items = [torch.zeros(2, ranks, 1, UNIT, dtype=torch.int64) for _ in range(ranks)]
        at = [each.data_ptr() for each in items]
        self.peers = [
            Peers(rank, PeerItems.over_items(rank, each, at)) for rank, each in enumerate(items)
        ]
        for own, memory, peers in zip(self.own, self.memories, self.peers, strict=True):
            flags = own[2 * self.size :].view(2, -1)
            flags[:] = tag
            if ranks == 2:
                # Of two halves one has the tag before.
                flags[1 - (tag & 1)] = tag - 1
            memory.tags.fill_(tag)
            peers.tensors.watch[1] = 2**40

    def store(self, giver: int, taker: int, parts: Sequence[torch.Tensor]) -> None:
        """What one rank stores at another one of these parts of all, of one launch."""
        ranks, programs, own = self.ranks, self.programs, self.own[taker]
        one_shot = ranks == 2
        total = sum_parts_reference(torch.stack([*parts]))
        part, total = (_words(each) for each in (parts[giver], total))
        owners = 1 if one_shot else ranks
        block = block_of(len(part), ranks, programs)
        size = blocks_of(len(part), ranks, programs, block) * block
        shape = (programs, owners, size)
        pad = programs * owners * size - len(part)
        shares, sums = (
            torch.nn.functional.pad(each, (0, pad)).view(shape) for each in (part, total)
        )
        due, ahead = self.memories[giver].tags + 1, (giver - taker - 1) % ranks
        half = int(due[0]) & 1 if one_shot else 0
        flags = own[2 * self.size :].view(2, ranks, programs)
        inbox = own[half * self.size :][: (ranks - 1) * programs * size]
        inbox.view(ranks - 1, programs, size)[ahead] = shares[:, 0 if one_shot else taker]
        flags[half, ahead] = due
        if not one_shot:
            own[self.size :][: sums.numel()].view(shape)[:, giver] = sums[:, giver]
            flags[1, ahead] = due

    def sums_of(self, rank: int) -> torch.Tensor:
        """Which words of a rank's memory are sums, in two shots, or their flags."""
        words = torch.arange(self.own[rank].numel())
        flags = words[2 * self.size :].view(2, -1)
        return torch.cat([words[self.size : 2 * self.size], flags[1]])

    def sum(self, parts: Sequence[torch.Tensor], order: Sequence[int]) -> list[torch.Tensor]:
        """What each rank gets, when they come in this order."""
        found: dict[int, torch.Tensor] = {}
        for done, rank in enumerate(order):
            for other in order[done + 1 :]:
                self.store(other, rank, parts)
            # Of what those before it have stored it must take the sums, which are right only now.
            found[rank] = all_reduce(self.peers[rank], self.memories[rank], parts[rank])
        return [found[rank] for rank in range(self.ranks)]


def _words(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(-1).view(torch.int32)
