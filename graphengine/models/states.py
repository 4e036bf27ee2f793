"""The states that a model's layers keep of a sequence, and the tensors that hold them.

Letters: S slots, B blocks of a slot's table, G kv heads, D head_dim, E values of a cache entry, or
entries of a recurrent state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers


class Paged(NamedTuple):
    """State with an entry for each token, in blocks of the KV cache.

    parts  entries per token; 2: keys and values
    entry  shape of one entry: `(G, D)` of grouped-query attention, `(E,)` of a latent with its
           rotated key, which all heads share
    window tokens that a query sees, including its own; others are never read. 0: all
    """

    parts: int
    entry: tuple[int, ...]
    window: int = 0

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's block: `[parts, block_size, *entry]`."""
        return (self.parts, block_size, *self.entry)

    @property
    def kv_heads(self) -> int:
        """Heads with scales in an fp8 cache; 0: the cache cannot be fp8."""
        return self.entry[0] if len(self.entry) > 1 else 0


class Recurrent(NamedTuple):
    """State of a slot's newest tokens, `[S, E, *shape]`, owned by the device.

    Entry `position % E` belongs to the token at that position, so `kv_len` alone says where a
    sequence continues. A step that feeds W tokens from position p on reads the entries of the
    `depth` positions before p and writes one entry per token. The next step overwrites the entries
    of rejected drafts; nothing is copied.

    A sequence starts from zeros: a token at position 0 takes the entries before it as zero,
    whatever an earlier request has left there. Lanes without a slot change nothing.

    dtype   None: the model's
    depth   earlier tokens whose entries a token reads: 1 for a state that sums up all earlier
            tokens, width - 1 for a convolution's inputs
    apart   whether a step must not overwrite entries that it reads, as where several programs read
            one; else each program reads an entry before it writes it
    pieces  lengths along the first dimension, each split among the ranks; empty: it is one piece
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    depth: int = 1
    apart: bool = False
    pieces: tuple[int, ...] = ()

    def entries(self, width: int) -> int:
        """E for steps that feed at most `width` tokens of a slot."""
        return self.depth + width - (0 if self.apart else 1)


LayerStates = tuple[Paged | Recurrent, ...]
"""The states of one layer; empty for a layer without any."""


def all_lanes_reach(layers: Sequence[LayerStates], last: int) -> bool:
    """Whether prefill runs every lane past layer `last` anyway, as a later layer keeps states.

    Otherwise only the last lane goes through the layers after it, unless all lanes are asked for.
    """
    return any(layers[last + 1 :])


def kv_scale_bytes(layers: Sequence[LayerStates]) -> int:
    """Bytes of the layers' `kv_scales`: a float32 for each part of each kv head."""
    return sum(4 * state.parts * state.kv_heads for state in paged_states(layers))


def cache_shape(
    states: Sequence[LayerStates], block_size: int, *, without: Collection[int] = ()
) -> tuple[int, ...]:
    """Shape `[layers, *block]` of one block of all paged layers together, in one tensor.

    Where the layers' blocks differ in shape it is `[1, values]`: the blocks of all layers lie side
    by side, as `StateTensors.paged` finds them.

    without  indices of paged layers whose blocks are elsewhere

    ValueError if no layer is paged.
    """
    paged = paged_states(states)
    if not paged:
        raise ValueError(f"a model must have a paged layer: {len(states)} layers have none")
    apart = side_by_side(states, without=without)
    if apart:
        return (1, sum(math.prod(state.block_shape(block_size)) for state in apart))
    kept = [state for index, state in enumerate(paged) if index not in without]
    return (len(kept), *(kept or paged)[0].block_shape(block_size))


def side_by_side(
    states: Sequence[LayerStates], *, without: Collection[int] = ()
) -> tuple[Paged, ...]:
    """The paged layers' states, where their blocks differ in shape; else empty."""
    kept = tuple(state for index, state in enumerate(paged_states(states)) if index not in without)
    return kept if len({state.block_shape(1) for state in kept}) > 1 else ()


def tokens_of_block(apart: Sequence[Paged], cache: Tensor) -> int:
    """Tokens of a block of a cache `[1, blocks, values]` of layers side by side."""
    return int(cache.shape[2]) // sum(math.prod(state.block_shape(1)) for state in apart)


def paged_states(states: Sequence[LayerStates]) -> list[Paged]:
    """The paged layers' states, in order."""
    return [state for layer in states for state in layer if isinstance(state, Paged)]


def recurrent_states(states: Sequence[LayerStates]) -> dict[tuple[int, str], Recurrent]:
    """Every recurrent state of a model, by its layer's index and its name."""
    return {
        (index, state.name): state
        for index, layer in enumerate(states)
        for state in layer
        if isinstance(state, Recurrent)
    }


def recurrent_field(layer: int, name: str, whose: str = "") -> str:
    """Name of a recurrent state's static field; `whose` is a prefix for another model's layers."""
    return f"{whose}recurrent_{layer}_{name}"


def recurrent_fields(
    states: Sequence[LayerStates], slots: int, width: int, dtype: torch.dtype, whose: str = ""
) -> list[Field]:
    """Static fields of a model's recurrent states, for steps of at most `width` tokens of a slot.

    dtype  the model's

    A pause does not touch them: a paused request keeps its slot.
    """
    return [
        Field(
            name=recurrent_field(layer, name, whose),
            shape=(slots, state.entries(width), *state.shape),
            dtype=state.dtype or dtype,
            owner="device",
            meaning=f"{name} state of layer {layer}, that of a position in entry position % E",
            # Each rank has its own heads, or channels.
            replicated=False,
        )
        for (layer, name), state in recurrent_states(states).items()
    ]


def recurrent_tensors(
    states: Sequence[LayerStates], buffers: StaticBuffers, whose: str = ""
) -> dict[tuple[int, str], Tensor]:
    """The fields' tensors, by layer and name, as `StateTensors.recurrent` has them."""
    return {key: buffers[recurrent_field(*key, whose)] for key in recurrent_states(states)}


def checkpoint_shape(state: Recurrent) -> tuple[int, ...]:
    """Shape `[depth, *shape]` of the newest tokens' entries, from which a sequence continues."""
    return (state.depth, *state.shape)


def checkpoint_bytes(states: Sequence[LayerStates], dtype: torch.dtype) -> int:
    """Bytes of all recurrent states after one token, for a model in this dtype."""
    return sum(
        math.prod(checkpoint_shape(state)) * (state.dtype or dtype).itemsize
        for state in recurrent_states(states).values()
    )


class RingTensors(NamedTuple):
    """Cache of the layers with one window size, which keep only the newest tokens.

    layers       their indices among the paged layers
    cache        `[L, blocks, *block]` of these layers; block 0 is the dummy
    block_table  int32 `[S, B]`, whose rows repeat the blocks of a ring
    """

    layers: tuple[int, ...]
    cache: Tensor
    block_table: Tensor


class StateTensors(NamedTuple):
    """The tensors that hold the layers' states.

    cache        `[L, blocks, *block]` of the L paged layers that are in no ring, in their order;
                 block 0 is the dummy
    block_table  int32 `[S, B]`
    recurrent    `[S, E, *shape]` of each recurrent state, by its layer's index and its name
    rings        the caches of paged layers that keep only the newest tokens
    apart        the L layers' states, where their blocks differ in shape: then `cache` is
                 `[1, blocks, values]`, whose blocks have those of all layers side by side
    """

    cache: Tensor
    block_table: Tensor
    recurrent: Mapping[tuple[int, str], Tensor] = MappingProxyType({})
    rings: tuple[RingTensors, ...] = ()
    apart: tuple[Paged, ...] = ()

    def pooled(self) -> list[Tensor]:
        """`[blocks, *block]` of each layer in `cache`, in their order."""
        if not self.apart:
            return list(self.cache.unbind(0))
        size = tokens_of_block(self.apart, self.cache)
        shapes = [state.block_shape(size) for state in self.apart]
        parts = torch.split(self.cache[0], [math.prod(shape) for shape in shapes], dim=1)
        return [part.view(len(part), *shape) for part, shape in zip(parts, shapes, strict=True)]

    def dense(self) -> list[Tensor]:
        """The pool's layers as tensors `[L, blocks, *block]`, each of layers with one shape."""
        return [each[None] for each in self.pooled()] if self.apart else [self.cache]

    def paged(self) -> list[tuple[Tensor, Tensor]]:
        """Cache `[blocks, *block]` and block table of each paged layer, in their order."""
        found = {
            layer: (kv, ring.block_table)
            for ring in self.rings
            for layer, kv in zip(ring.layers, ring.cache.unbind(0), strict=True)
        }
        pooled = self.pooled()
        others = (layer for layer in range(len(pooled) + len(found)) if layer not in found)
        found |= {layer: (kv, self.block_table) for layer, kv in zip(others, pooled, strict=True)}
        return [found[layer] for layer in range(len(found))]
