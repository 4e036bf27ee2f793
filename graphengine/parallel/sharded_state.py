"""KV and recurrent states that are split over ranks: gathered to the driver in the layout of one
model, and scattered from it.

Ranks of a stage split its layers: each has some heads of every cache, and some heads or channels of
every recurrent state. With fewer KV heads than ranks, neighbouring ranks have the same heads;
latents are on every rank. Stages of a pipeline have some of the layers each, and the driver has the
last stage. First the ranks of each stage gather its layers, then the first rank of each stage sends
them to the driver. To scatter, the driver sends each stage its layers, and each rank takes its
shard.

All ranks call the same methods with the same arguments, except for values that only the driver has.
They work through the same tensors in the same order, one collective after the other. Bytes travel
as in a step, so only tensors of known shapes arrive.

Letters: B blocks, G kv heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.core.runtime import Runtime
from graphengine.models.checkpoints.kv_scales import scales_id
from graphengine.models.checkpoints.tensor_files import spans_of
from graphengine.models.launches import WHOLE
from graphengine.models.splitting.stages import stage_spans
from graphengine.models.states import (
    LayerStates,
    Recurrent,
    checkpoint_shape,
    paged_states,
    recurrent_states,
    side_by_side,
    tokens_of_block,
)
from graphengine.opening.loading import CheckpointContents
from graphengine.parallel.process_groups import ProcessGroups

ROWS_AT_ONCE = 16
"""KV blocks of a layer that one gather carries: each device holds them once per rank."""


class ShardedAxis(NamedTuple):
    """How ranks split a tensor along a dimension.

    whole, own  lengths of consecutive pieces: of the whole tensor, and of one rank's shard
    axis        the dimension
    """

    whole: tuple[int, ...]
    own: tuple[int, ...]
    axis: int

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from the shape of one rank's shard."""
        shape = [*own]
        shape[self.axis] = sum(self.whole)
        return tuple(shape)

    def shard(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """One rank's shard of the whole tensor."""
        spans = spans_of(self.whole, self.own, rank, ranks)
        return torch.cat([whole.narrow(self.axis, *span) for span in spans], self.axis)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from each rank's shard."""
        whole = shards[0].new_empty(self.whole_shape(shards[0].shape))
        for rank, shard in enumerate(shards):
            own = torch.split(shard, [*self.own], self.axis)
            spans = spans_of(self.whole, self.own, rank, len(shards))
            for piece, span in zip(own, spans, strict=True):
                whole.narrow(self.axis, *span).copy_(piece)
        return whole


class ShardedState:
    """The KV and states of a model, of which `runtime` has one rank's shard.

    Each stage has a tensor of the target's cache, and one of each of its recurrent states. The
    drafter's cache is on the driver's stage alone.

    contents  the checkpoint's contents, as this rank has read them
    places    how many states of a sequence are kept; 0: no recurrent states are
    """

    def __init__(
        self, runtime: Runtime, contents: CheckpointContents, groups: ProcessGroups, places: int
    ) -> None:
        self._runtime, self._group, self._stages = runtime, groups.tensor, groups.stages
        self._share = WHOLE if groups.tensor is None else groups.tensor.share
        layers = [contents.whole.states]
        if self._stages is not None:
            spans = stage_spans(contents.whole, self._stages.share.ranks)
            layers = [contents.whole.states[span.first : span.stop] for span in spans]
        # For each stage, the layers with KV, and the recurrent states.
        self._paged = [len(paged_states(each)) for each in layers]
        self._states = [[*recurrent_states(each).values()] if places else [] for each in layers]
        target = contents.whole_stage.states, contents.model.states
        drafter = contents.drafter.whole_states, contents.drafter.needs.states
        # A drafter without KV of its own has no cache.
        caches = [cache for cache, _ in runtime.caches]
        pairs = [pair for pair in (target, drafter) if paged_states(pair[0])]
        # The drafter's layers have no rings.
        in_rings = {each for ring in runtime.program.states.rings for each in ring.layers}
        self._heads = [
            _heads(*each, cache, without)
            for each, cache, without in zip(pairs, caches, (in_rings, ()), strict=False)
        ]
        self._recurrent = _recurrent(*target) if places else []

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`Runtime.block_shapes` of all ranks together."""
        target, *drafter = self._cache_shapes
        return (target if self._stages is None else (sum(self._paged), *target[1:]), *drafter)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`Runtime.state_shapes` of all ranks together."""
        return tuple(checkpoint_shape(state) for stage in self._states for state in stage)

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """`Runtime.state_dtypes` of all ranks together."""
        return tuple(self._dtype(state) for stage in self._states for state in stage)

    def scales_id(self) -> str:
        """Digest of the scales of fp8 caches that one rank with all heads would have."""
        scales = self._runtime.kv_scales(self._group)
        return scales_id(
            heads._replace(axis=1).join(of_ranks)
            for cache, heads in zip(scales, self._heads, strict=True)
            for of_ranks in cache.transpose(0, 1)
        )

    def gather_blocks(self, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Blocks of all ranks on the driver, from those of this rank."""
        target, *drafter = (
            _as_cache(self._join(cache.flatten(0, 1), heads), cache)
            for cache, heads in zip(own, self._heads, strict=True)
        )
        stages = self._collect([target], self._blocks_of_stages(target.shape[1]))
        return (torch.cat([cache for (cache,) in stages]), *drafter)

    def scatter_blocks(self, count: int, whole: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """This rank's shard of `count` blocks; `whole` is None on all ranks but the driver."""
        drafter: Sequence[Tensor] = ()
        of_stages = None
        if whole is not None:
            target, *drafter = whole
            layers = self._paged if self._stages is not None else [len(target)]
            of_stages = [[cache] for cache in torch.split(target, layers)]
        mine = self._spread(of_stages, self._blocks_of_stages(count))
        caches = self._blocks(count) if mine is None else [*mine, *drafter]
        return tuple(
            _as_cache(self._shard(cache.flatten(0, 1), heads), cache)
            for cache, heads in zip(caches, self._heads, strict=True)
        )

    def gather_states(self, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """A place's states of all ranks on the driver, from those of this rank."""
        joined = [self._join(*pair) for pair in zip(own, self._recurrent, strict=True)]
        stages = self._collect(joined, self._states_of_stages())
        return tuple(state for stage in stages for state in stage)

    def scatter_states(self, whole: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """This rank's shard of states; `whole` is None on all ranks but the driver."""
        layout, of_stages = self._states_of_stages(), None
        if whole is not None:
            left = iter(whole)
            of_stages = [[next(left) for _ in stage] for stage in layout]
        mine = self._spread(of_stages, layout)
        states = layout[self._stage] if mine is None else mine
        return tuple(self._shard(*pair) for pair in zip(states, self._recurrent, strict=True))

    # Layouts: empty tensors, whose values arrive from other ranks.

    @property
    def _cache_shapes(self) -> list[tuple[int, ...]]:
        """`Runtime.block_shapes` of all ranks of this stage together."""
        caches = [cache for cache, _ in self._runtime.caches]
        pairs = zip(caches, self._heads, strict=True)
        return [heads.whole_shape((len(cache), *cache.shape[2:])) for cache, heads in pairs]

    def _blocks(self, count: int) -> list[Tensor]:
        """Empty tensors for `count` blocks of each cache of this stage."""
        pairs = zip(self._cache_shapes, self._runtime.caches, strict=True)
        return [
            torch.empty((layers, count, *block), dtype=cache.dtype)
            for (layers, *block), (cache, _) in pairs
        ]

    def _blocks_of_stages(self, count: int) -> list[list[Tensor]]:
        """Empty tensors for `count` blocks of the target's cache of each stage."""
        (_, *block), dtype = self._cache_shapes[0], self._runtime.caches[0][0].dtype
        return [[torch.empty((layers, count, *block), dtype=dtype)] for layers in self._paged]

    def _states_of_stages(self) -> list[list[Tensor]]:
        return [
            [torch.empty(checkpoint_shape(state), dtype=self._dtype(state)) for state in stage]
            for stage in self._states
        ]

    def _dtype(self, state: Recurrent) -> torch.dtype:
        return state.dtype or self._runtime.model.dtype

    # Between the ranks of a stage.

    def _join(self, own: Tensor, axis: ShardedAxis) -> Tensor:
        """The whole tensor on the host, from each rank's shard on its host."""
        found = []
        for rows in torch.split(own, ROWS_AT_ONCE):
            shards = self._gather(rows) if rows.numel() else [rows] * self._share.ranks
            found.append(axis.join([shard.view(rows.shape) for shard in shards]))
        return torch.cat(found)

    def _shard(self, whole: Tensor, axis: ShardedAxis) -> Tensor:
        """This rank's shard, on the host, of the tensor of the stage's first rank."""
        found = []
        for rows in torch.split(whole, ROWS_AT_ONCE):
            first = self._gather(rows)[0].view(rows.shape) if rows.numel() else rows
            found.append(axis.shard(first, *self._share))
        return torch.cat(found)

    def _gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks of this stage, on the host."""
        if self._group is None:
            return [own]
        with self._runtime.on_stream():
            sent = own.contiguous().view(torch.uint8).view(1, -1).to(self._runtime.device)
            gathered = self._group.gather(sent).cpu()
        return [part.view(own.dtype) for part in gathered.flatten(1)]

    # Between the first ranks of the stages.

    @property
    def _stage(self) -> int:
        return 0 if self._stages is None else self._stages.share.rank

    def _collect(self, own: list[Tensor], layout: list[list[Tensor]]) -> list[list[Tensor]]:
        """The tensors of all stages on the driver's host, from those of this stage."""
        layout[self._stage] = own
        link, device = self._stages, self._runtime.device
        if link is None or self._share.rank:
            return layout
        last = link.share.ranks - 1
        with self._runtime.on_stream():
            if self._stage < last:
                for tensor in own:
                    link.send_to(last, tensor.to(device))
                return layout
            for stage, tensors in enumerate(layout[:last]):
                for index, tensor in enumerate(tensors):
                    arrived = tensor.to(device)
                    link.receive_from(stage, arrived)
                    tensors[index] = arrived.cpu()
        return layout

    def _spread(
        self, whole: list[list[Tensor]] | None, layout: list[list[Tensor]]
    ) -> list[Tensor] | None:
        """This stage's tensors on the host of its first rank, from the driver's; None elsewhere."""
        link, device = self._stages, self._runtime.device
        if link is None or self._share.rank:
            return None if whole is None else whole[self._stage]
        last = link.share.ranks - 1
        with self._runtime.on_stream():
            if whole is not None:
                for stage, tensors in enumerate(whole[:last]):
                    for tensor in tensors:
                        link.send_to(stage, tensor.to(device))
                return whole[last]
            arrived = [tensor.to(device) for tensor in layout[self._stage]]
            for tensor in arrived:
                link.receive_from(last, tensor)
            return [tensor.cpu() for tensor in arrived]


def _as_cache(rows: Tensor, cache: Tensor) -> Tensor:
    """Blocks `[L * B, ...]` as `[L, B, ...]`, like those of `cache`."""
    return rows.view((*cache.shape[:2], *rows.shape[1:]))


def _heads(
    whole: Sequence[LayerStates],
    own: Sequence[LayerStates],
    cache: Tensor,
    without: Collection[int] = (),
) -> ShardedAxis:
    """How a layer's blocks `[B, parts, block_size, *entry]` are split, along the first dimension of
    an entry: heads, or the values of a latent, which every rank has.

    Where layers lie side by side in a block, each of their entries is split.

    without  indices of paged layers that are not in `cache`
    """
    apart = side_by_side(own, without=without)
    pairs = [
        (one, part)
        for index, (one, part) in enumerate(
            zip(paged_states(whole), paged_states(own), strict=True)
        )
        if index not in without or len(cache) == 0
    ]
    if apart:
        size = tokens_of_block(apart, cache)
        pieces = [pair for pair in pairs for _ in range(pair[0].parts * size)]
        of_all, of_one = (
            tuple(math.prod(state.entry) for state in each) for each in zip(*pieces, strict=True)
        )
        return ShardedAxis(of_all, of_one, axis=-1)
    of_all, of_one = (state.entry for state in pairs[0])
    return ShardedAxis(of_all[:1], of_one[:1], axis=-len(of_all))


def _recurrent(whole: Sequence[LayerStates], own: Sequence[LayerStates]) -> list[ShardedAxis]:
    """How a place's entries `[depth, *shape]` are split, along the first dimension of `shape`."""
    pairs = zip(recurrent_states(whole).values(), recurrent_states(own).values(), strict=True)
    return [
        ShardedAxis(one.pieces or one.shape[:1], part.pieces or part.shape[:1], axis=1)
        for one, part in pairs
    ]
