"""The tensors of state checkpoints, and the copies between them and the slots.

Letters: P places, S slots, E entries of a slot, D earlier tokens whose entries a token reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from graphengine.buckets import StaticBuffers
from graphengine.host.state_checkpoints import BlockCopy, Copy, StateCopy
from graphengine.kernels.core.lanes import BITS
from graphengine.models.states import (
    LayerStates,
    Recurrent,
    checkpoint_shape,
    recurrent_states,
    recurrent_tensors,
)


class StateCheckpointTensors:
    """`[P, D, *shape]` of each recurrent state of the target; a place has the entries of the newest
    D tokens, oldest first.

    It does not depend on E, and so not on the tokens of a step. Entries of positions below 0 are
    left as they are, and never read.
    """

    def __init__(
        self,
        states: Sequence[LayerStates],
        buffers: StaticBuffers,
        places: int,
        caches: Sequence[Tensor],
    ) -> None:
        self._states: dict[tuple[int, str], Recurrent] = recurrent_states(states) if places else {}
        self._slots = recurrent_tensors(states, buffers) if places else {}
        self._caches = [cache for cache in caches if len(cache)]
        self._kept = {
            key: torch.zeros(
                (places, *checkpoint_shape(self._states[key])),
                dtype=field.dtype,
                device=field.device,
            )
            for key, field in self._slots.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a place's part in each state."""
        return tuple(tuple(kept.shape[1:]) for kept in self._kept.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(kept.dtype for kept in self._kept.values())

    def copy(self, copies: Iterable[Copy]) -> None:
        """Queue these copies on the current stream."""
        for each in copies:
            if isinstance(each, BlockCopy):
                for cache in self._caches:
                    bits = cache.view(BITS[cache.element_size()])
                    bits[:, each.destination].copy_(bits[:, each.source])
                continue
            for held, entry in self._entries(each):
                if each.back:
                    entry.copy_(held)
                else:
                    held.copy_(entry)

    def _entries(self, copy: StateCopy) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a place's entry and the slot's entry, each of one token."""
        for key, kept_PD in self._kept.items():
            field_SE, depth = self._slots[key], self._states[key].depth
            for index in range(depth):
                position = copy.position - depth + index
                if position >= 0:
                    entry = position % field_SE.shape[1]
                    yield kept_PD[copy.place, index], field_SE[copy.slot, entry]

    def read(self, place: int) -> tuple[Tensor, ...]:
        """Copies of a place's parts on the host; waits for them."""
        return tuple(kept[place].clone().cpu() for kept in self._kept.values())

    def write(self, place: int, parts: Sequence[Tensor]) -> None:
        """Queue the copy back of the parts that `read` returned."""
        for kept, part in zip(self._kept.values(), parts, strict=True):
            kept[place].copy_(part)
