"""KV and states of all ranks, copied to and from the driver's memory in the layout of one model.

Each rank has some heads of every cache, and some heads or channels of every recurrent state. With
fewer KV heads than ranks, neighbouring ranks have the same heads; latents are on every rank. All
ranks work through the same pieces in the same order, with one gather for each: to read, the driver
puts the gathered parts together; to write, all ranks get the driver's values, and each takes its
part. Bytes travel as in a step, so only tensors of known shapes arrive.

Letters: B blocks, G kv heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.core.runtime import Runtime
from graphengine.models.checkpoints.kv_scales import scales_id
from graphengine.models.checkpoints.tensor_files import spans_of
from graphengine.models.contract import RankGroup
from graphengine.models.states import LayerStates, paged_states, recurrent_states

BLOCKS_AT_ONCE = 16
"""KV blocks of a layer that one gather carries: each device holds them once per rank."""


class Pieces(NamedTuple):
    """How ranks split a tensor along a dimension.

    whole, own  lengths of consecutive pieces: of the whole tensor, and of one rank's part
    axis        the dimension, of one layer's blocks or of a place's entries
    """

    whole: tuple[int, ...]
    own: tuple[int, ...]
    axis: int

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from the shape of one rank's part."""
        shape = [*own]
        shape[self.axis] = sum(self.whole)
        return tuple(shape)

    def of_rank(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """One rank's part of the whole tensor."""
        spans = spans_of(self.whole, self.own, rank, ranks)
        return torch.cat([whole.narrow(self.axis, *span) for span in spans], self.axis)

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, put together from each rank's part."""
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            own = torch.split(part, [*self.own], self.axis)
            spans = spans_of(self.whole, self.own, rank, len(parts))
            for piece, span in zip(own, spans, strict=True):
                whole.narrow(self.axis, *span).copy_(piece)
        return whole


class KeptParts:
    """KV and state saved from one rank's `runtime`, and restored to it.

    whole  states of each layer of the whole target, and of the whole drafter
    own    states of each layer on this rank, of target and drafter
    """

    def __init__(
        self,
        runtime: Runtime,
        group: RankGroup,
        whole: tuple[Sequence[LayerStates], Sequence[LayerStates]],
        own: tuple[Sequence[LayerStates], Sequence[LayerStates]],
    ) -> None:
        self._runtime, self._group = runtime, group
        pairs = [*zip(whole, own, strict=True)]
        # A drafter without KV of its own has no cache.
        self._heads = [_heads(*pair) for pair in pairs if paged_states(pair[0])]
        self._recurrent = _recurrent(*pairs[0])

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`Runtime.block_shapes` of all ranks together."""
        shapes = [(len(cache), *cache.shape[2:]) for cache, _ in self._runtime.caches]
        return tuple(
            heads.whole_shape(shape) for shape, heads in zip(shapes, self._heads, strict=True)
        )

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`Runtime.state_shapes` of all ranks together."""
        shapes = self._runtime.kept.shapes
        pieces = self._recurrent[: len(shapes)]
        return tuple(each.whole_shape(shape) for shape, each in zip(shapes, pieces, strict=True))

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """`Runtime.state_dtypes`, which are the same on all ranks."""
        return self._runtime.kept.dtypes

    # Every rank calls each of these with the same arguments, except for values that only the driver
    # has.

    def scales_id(self) -> str:
        """`Runtime.scales_id` of all ranks together."""
        scales = self._runtime.kv_scales(self._group)
        return scales_id(
            heads._replace(axis=1).together(of_ranks)
            for cache, heads in zip(scales, self._heads, strict=True)
            for of_ranks in cache.transpose(0, 1)
        )

    def read_blocks(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """Read blocks as `Runtime.read_blocks`, of all ranks together."""
        found = []
        for own, heads in zip(Runtime.read_blocks(self._runtime, blocks), self._heads, strict=True):
            layers = [self._together(layer, heads) for layer in own]
            empty = own.new_empty(heads.whole_shape(own.shape))
            found.append(torch.stack(layers) if layers else empty)
        return tuple(found)

    def write_blocks(self, blocks: Sequence[int], kept: Sequence[Tensor] | None) -> None:
        """Write blocks as `Runtime.write_blocks`; `kept` is None on all but the group's rank 0."""
        parts = []
        for index, (cache, _) in enumerate(self._runtime.caches):
            heads, (layers, _, *block) = self._heads[index], cache.shape
            shape = heads.whole_shape((len(blocks), *block))
            of_layers = [
                self._part(None if kept is None else kept[index][layer], shape, cache.dtype, heads)
                for layer in range(layers)
            ]
            own = (0, len(blocks), *cache.shape[2:])
            empty = torch.empty(own, dtype=cache.dtype)
            parts.append(torch.stack(of_layers) if of_layers else empty)
        Runtime.write_blocks(self._runtime, blocks, parts)

    def read_states(self, place: int) -> tuple[Tensor, ...]:
        """Read states as `Runtime.read_states`, of all ranks together."""
        own = Runtime.read_states(self._runtime, place)
        return tuple(map(self._together, own, self._recurrent))

    def write_states(self, place: int, kept: Sequence[Tensor] | None) -> None:
        """Write states as `Runtime.write_states`; `kept` is None on all but the group's rank 0."""
        shapes, dtypes = self.state_shapes, self._runtime.kept.dtypes
        parts = [
            self._part(None if kept is None else kept[index], shape, dtype, pieces)
            for index, (shape, dtype, pieces) in enumerate(
                zip(shapes, dtypes, self._recurrent, strict=True)
            )
        ]
        Runtime.write_states(self._runtime, place, parts)

    def _together(self, own: Tensor, pieces: Pieces) -> Tensor:
        """The whole tensor on the host, from each rank's part on its host."""
        found = []
        for some in torch.split(own, BLOCKS_AT_ONCE):
            parts = self._gather(some) if some.numel() else [some] * self._group.share.ranks
            found.append(pieces.together([part.view(some.shape) for part in parts]))
        return torch.cat(found)

    def _part(
        self, whole: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, pieces: Pieces
    ) -> Tensor:
        """This rank's part, on the host, of rank 0's tensor."""
        sent = torch.empty(shape, dtype=dtype) if whole is None else whole
        found = []
        for some in torch.split(sent, BLOCKS_AT_ONCE):
            first = self._gather(some)[0].view(some.shape)
            found.append(pieces.of_rank(first, *self._group.share))
        return torch.cat(found)

    def _gather(self, own: Tensor) -> list[Tensor]:
        """The parts of all ranks, on the host."""
        with self._runtime.on_stream():
            sent = own.contiguous().view(torch.uint8).view(1, -1).to(self._runtime.device)
            gathered = self._group.gather(sent).cpu()
        return [part.view(own.dtype) for part in gathered.flatten(1)]


def _heads(whole: Sequence[LayerStates], own: Sequence[LayerStates]) -> Pieces:
    """How a layer's blocks `[B, parts, block_size, *entry]` are split, along the first dimension of
    an entry: heads, or the values of a latent, which every rank has. All blocks have one shape.
    """
    of_all, of_one = (paged_states(layers)[0].entry for layers in (whole, own))
    return Pieces(of_all[:1], of_one[:1], axis=-len(of_all))


def _recurrent(whole: Sequence[LayerStates], own: Sequence[LayerStates]) -> list[Pieces]:
    """How a place's entries `[depth, *shape]` are split, along the first dimension of `shape`."""
    pairs = zip(recurrent_states(whole).values(), recurrent_states(own).values(), strict=True)
    return [
        Pieces(one.pieces or one.shape[:1], part.pieces or part.shape[:1], axis=1)
        for one, part in pairs
    ]
