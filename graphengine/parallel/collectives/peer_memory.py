"""GPU memory of all ranks of one host, mapped by each of them, so that kernels can push into it.

Ranks exchange handles at their rendezvous, and agree whether mapping worked: if one rank cannot map
another's memory, no rank uses mapped memory.
"""

from __future__ import annotations

import contextlib

import torch

from graphengine.buckets.shared_memory import ExportedMemory, MappedMemory
from graphengine.kernels.comm.layout import PeerLayout, PeerTensors
from graphengine.parallel.collectives.rendezvous import Rendezvous

_MAPPED = b"mapped"


class PeerMemory:
    """Exchanges memory with all other ranks: for `units` units of items, and for sums of parts of
    up to `summed_words` words that are too large for items. Its layout is `PeerLayout`.

    `watch` is passed to `PeerItems.over_items`.

    tensors   memory that kernels push into; None where mapping failed on any rank, and after
              `leave()`
    problem   why mapping failed, from the first rank where it did; "" where it worked
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        units: int,
        watch: torch.Tensor | None = None,
        *,
        summed_words: int = 0,
    ) -> None:
        self.tensors: PeerTensors | None = None
        share, exchange = rendezvous.share, rendezvous.exchange
        layout = PeerLayout.of(share.ranks, units, summed_words)
        self._device = device
        self._own: ExportedMemory | None = None
        self._mapped: list[MappedMemory] = []
        outcome, addresses = _MAPPED, [0] * share.ranks
        try:
            self._own = ExportedMemory((layout.nbytes // 8,), device)
            addresses[share.rank] = self._own.address
        except RuntimeError as error:
            outcome = f"rank {share.rank} ({device}) exports no memory: {error}".encode()
        handle = b"none" if self._own is None else self._own.handle
        for other, found in enumerate(exchange("memory", handle)):
            if other == share.rank or outcome != _MAPPED:
                continue
            try:
                self._mapped.append(MappedMemory(found, device))
                addresses[other] = self._mapped[-1].address
            except RuntimeError as error:
                outcome = (
                    f"rank {share.rank} ({device}) cannot map the memory of rank {other}: {error}"
                ).encode()
        # No rank pushes before all ranks have mapped everything.
        outcomes = exchange("mapped", outcome)
        self.problem = next((each.decode() for each in outcomes if each != _MAPPED), "")
        if self.problem:
            self.close()
            return
        assert self._own is not None, f"{outcomes=}"
        words = self._own.tensor.view(torch.int32)
        self.tensors = PeerTensors.over(share.rank, layout, words, addresses, watch)

    def leave(self) -> None:
        """Wait for queued work, then unmap the others' memory: no kernel may use it again."""
        self.tensors = None
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        for each in self._mapped:
            # A broken device has unmapped it already.
            with contextlib.suppress(RuntimeError):
                each.close()
        self._mapped.clear()

    def close(self) -> None:
        """Unmap the others' memory and free this rank's own; the others have left, or are gone."""
        self.leave()
        if self._own is not None:
            with contextlib.suppress(RuntimeError):
                self._own.close()
        self._own = None


def devices_of(rendezvous: Rendezvous, device: torch.device) -> list[str]:
    """The identity of each rank's GPU."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    return [each.decode() for each in rendezvous.exchange("device", own.encode())]
