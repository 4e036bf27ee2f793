"""Static slots of adapters next to a model's weights, and how a step reads them.

Letters: N or T lanes, S slots of requests, M weight rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.lora.chunk import add_chunk_delta, chunk_delta
from graphengine.kernels.lora.decode import lora_delta
from graphengine.kernels.lora.slots import LoraSlots
from graphengine.models.adapters.adapter import AdapterPart
from graphengine.models.weights import StoredLinear


class AdapterSizes(NamedTuple):
    """How many adapters an engine holds, and of which sizes.

    slots    adapters that are loaded at the same time
    rank     highest rank
    targets  last parts of the names of the linears that they may change, such as "q_proj"; empty:
             all that adapters can change
    """

    slots: int
    rank: int
    targets: frozenset[str] = frozenset()

    def touches(self, linear: StoredLinear) -> bool:
        """Whether an adapter may change a part of this weight."""
        names = {name.rpartition(".")[2] for name, _ in linear.parts}
        return not self.targets or bool(names & self.targets)


class AdapterTable:
    """The matrices of all loaded adapters, in slots beside each weight that they may change.

    Adapters are copied into slots, whose addresses never change: graphs that were captured before
    serve them. Slots are found by the weight's identity, so a product needs no name for its weight.

    linears  weights that adapters can change, in the order of a step; those that `sizes` leaves out
             get no slots
    """

    def __init__(
        self,
        linears: Sequence[StoredLinear],
        sizes: AdapterSizes,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.sizes = sizes
        self._held: dict[int, tuple[StoredLinear, LoraSlots]] = {
            id(linear.weight): (linear, _new_slots(linear, sizes, device, dtype))
            for linear in linears
            if sizes.touches(linear)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.nbytes for _, slots in self._held.values())

    @property
    def first(self) -> LoraSlots | None:
        """The slots that a step uses first; None: there are none."""
        return next((slots for _, slots in self._held.values()), None)

    def of(self, weight: AnyWeight) -> LoraSlots | None:
        """The slots beside a weight; None: no adapter changes it."""
        found = self._held.get(id(weight))
        return None if found is None else found[1]

    def fill(
        self, slot: int, parts: Mapping[str, AdapterPart], linears: Sequence[StoredLinear]
    ) -> None:
        """Copy an adapter into a slot, over its old contents, on the current stream.

        linears  the weights with the `cuts` of this rank, if there are several
        """
        cut = {id(linear.weight): linear for linear in linears}
        for key, (linear, slots) in self._held.items():
            _fill(slots, slot, cut.get(key, linear), parts)


def _new_slots(
    linear: StoredLinear, sizes: AdapterSizes, device: torch.device, dtype: torch.dtype
) -> LoraSlots:
    rows = [count for _, count in linear.parts]
    part_M = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(rows))
    if linear.order is not None:
        part_M = part_M[linear.order]
    return LoraSlots.new(
        sizes.slots,
        part_M.to(device),
        parts=len(rows),
        columns=linear.shape[1],
        rank=sizes.rank,
        dtype=dtype,
    )


def _fill(
    slots: LoraSlots, slot: int, linear: StoredLinear, parts: Mapping[str, AdapterPart]
) -> None:
    """Copy the matrices of a weight's parts; those that the adapter leaves alone are zero."""
    rank, dtype = slots.rank, slots.up_AMR.dtype
    down = torch.zeros(slots.down_AQK.shape[1:], dtype=dtype)
    up = torch.zeros(slots.up_AMR.shape[1:], dtype=dtype)
    scale, start = torch.zeros(slots.parts), 0
    for index, (name, rows) in enumerate(linear.parts):
        part = parts.get(name)
        if part is not None:
            of_down, of_up = part.down, part.own_up(linear.head_rows)
            if linear.cuts:
                cut = linear.cuts[index]
                of_down = cut.part(of_down) if linear.axis == 1 else of_down
                of_up = cut.part(of_up) if linear.axis == 0 else of_up
            own = len(of_down)
            down[index * rank : index * rank + own] = of_down
            up[start : start + rows, :own] = of_up
            scale[index] = part.scale
        start += rows
    if linear.order is not None:
        up = up[linear.order]
    for held, made in zip(slots[:3], (down, up, scale), strict=True):
        held[slot].copy_(made)


class LaneAdapters(NamedTuple):
    """The adapters of a step's lanes.

    of_slot_S    int32: the slot of the adapter of each request's slot; -1: none
    of_chunk_P   int32: the adapter's slot of each chunk's request; -1: none
    starts_P1    int32: lane where each chunk begins, then where the last one ends; None: all lanes
                 are of one chunk
    """

    table: AdapterTable
    of_slot_S: Tensor
    of_chunk_P: Tensor
    starts_P1: Tensor | None = None

    def of_chunks(self, starts_P1: Tensor) -> LaneAdapters:
        """The adapters of lanes that are those of P chunks, which begin at these."""
        return self._replace(of_chunk_P=self.of_chunk_P[: len(starts_P1) - 1], starts_P1=starts_P1)

    def added(self, call: LinearCall) -> LinearCall:
        """A decode product with the adapters' additions: two launches before its own."""
        slots = self.table.of(call.weight_MK)
        if slots is None:
            return call
        # The launch before the first product writes the slots of lanes, which both launches read.
        starts_early = slots is not self.table.first
        delta = lora_delta(call, slots, self.of_slot_S, starts_early=starts_early)
        return call._replace(delta_NM=delta)

    def chunk_delta(self, x_TK: Tensor, weight: AnyWeight, *, pdl: bool) -> Tensor | None:
        """New `[T, M]`: the chunks' adapters' additions to a product; None: no adapter changes
        it.
        """
        slots = self.table.of(weight)
        if slots is None:
            return None
        return chunk_delta(x_TK, slots, self.of_chunk_P, self.starts_P1, pdl=pdl)

    def add_to_chunk(self, out_TM: Tensor, x_TK: Tensor, weight: AnyWeight, *, pdl: bool) -> None:
        """Add the adapters' parts to the chunks' product in place."""
        slots = self.table.of(weight)
        if slots is not None:
            add_chunk_delta(out_TM, x_TK, slots, self.of_chunk_P, self.starts_P1, pdl=pdl)
