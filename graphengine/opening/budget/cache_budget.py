"""The budget's lines for KV: how many blocks there are, and how many of them can be swapped out."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from graphengine.buckets import MemoryBudget, OutOfBudget, format_bytes
from graphengine.host.rings import WindowRing, layers_in_rings
from graphengine.kernels.core.paged import FP8_KV
from graphengine.models.states import paged_states
from graphengine.opening.budget.host_memory import host_bytes
from graphengine.opening.engine_shape import EngineShape


class FreeMemory(NamedTuple):
    """Bytes that may be planned: in the memory that replays see, and on the host."""

    available: int
    on_host: int


class BlockBytes(NamedTuple):
    """Bytes of a block of the caches.

    layers   in each layer of the target
    rings    in all layers that have rings
    own      in the target's cache of the pool, which has the layers without rings
    drafter  in the drafter's cache; 0 if it has none
    """

    layers: tuple[int, ...]
    rings: int
    own: int
    drafter: int

    @classmethod
    def of(cls, shape: EngineShape) -> BlockBytes:
        size = shape.config.block_size
        layers = tuple(
            math.prod(state.block_shape(size)) * shape.kv_dtype.itemsize
            for state in paged_states(shape.model.states)
        )
        rings = sum(layers[layer] for layer in layers_in_rings(shape.rings))
        drafter = math.prod(shape.drafter.needs.kv_block_shape(size)) * shape.kv_dtype.itemsize
        return cls(layers, rings, sum(layers) - rings, drafter)

    def of_ring(self, ring: WindowRing) -> int:
        """Bytes of a block of a ring's cache."""
        return sum(self.layers[layer] for layer in ring.layers)

    @property
    def pool(self) -> int:
        """Bytes of a block in both caches of the pool; 0 if all KV is in rings."""
        return self.own + self.drafter


class CacheBlocks(NamedTuple):
    """Blocks of the pool, without the dummy, and of the swap area."""

    pool: int
    swap: int


def add_caches(
    budget: MemoryBudget, shape: EngineShape, block: BlockBytes, room: FreeMemory, calibrated: int
) -> CacheBlocks:
    """Add rings, the pool, its swap area, and the extra KV of calibrating with `calibrated` tokens.

    OutOfBudget where the device has no room for them.
    """
    rings = _add_rings(budget, shape, block)
    blocks = _add_pool(budget, shape, block, room)
    budget.check(room.available, shape.where)
    swap_blocks = _add_swap(budget, shape, block, room, blocks)
    if calibrated:
        held = rings + (blocks + 1) * block.pool
        if not shape.on_gpu:
            held += _swap_bytes(swap_blocks, block, pinned=False)
        _add_calibration(budget, shape, block, calibrated, held)
        budget.check(room.available, shape.where)
    return CacheBlocks(blocks, swap_blocks)


def _kind(shape: EngineShape) -> str:
    return "fp8 blocks" if shape.kv_dtype == FP8_KV else "blocks"


def _add_rings(budget: MemoryBudget, shape: EngineShape, block: BlockBytes) -> int:
    """Add one ring per window and slot. Returns their bytes."""
    slots, added = shape.config.max_batch, 0
    for ring in shape.rings:
        name = f"KV of window {ring.window} ({slots} rings of {ring.blocks} {_kind(shape)}"
        size = (slots * ring.blocks + 1) * block.of_ring(ring)
        budget.add(f"{name} of {shape.config.block_size} tokens, and a dummy)", size, shape.where)
        added += size
    return added


def _add_pool(budget: MemoryBudget, shape: EngineShape, block: BlockBytes, room: FreeMemory) -> int:
    """Add as many blocks as asked for, or as fit and all slots can use. Returns how many."""
    config, one = shape.config, shape.table_blocks
    every = config.max_batch * one
    if not block.pool:
        # All KV is in rings: the pool's blocks take no memory, and are only counted.
        return every
    left = room.available - budget.total(shape.where)
    fitting = left // block.pool - 1
    asked = config.kv_blocks
    blocks = max(one, min(every, fitting)) if asked is None else asked
    name = f"KV cache ({blocks} {_kind(shape)} of {config.block_size} tokens, and a dummy)"
    budget.add(name, (blocks + 1) * block.pool, shape.where)
    if asked is None:
        _check_one_request(budget, shape, block, left)
    return blocks


def _check_one_request(
    budget: MemoryBudget, shape: EngineShape, block: BlockBytes, left: int
) -> None:
    """OutOfBudget, with the numbers, if the `left` bytes hold no request of `max_seq_len` tokens.

    If nothing is left for KV at all, the budget's own check raises a different error.
    """
    size, slots = shape.config.block_size, shape.config.max_batch
    blocks, fitting = shape.table_blocks, left // block.pool - 1
    if left < 0 or fitting >= blocks:
        return
    one, thousand = blocks * block.pool, 1000 * block.pool // size
    hint = f"; max_seq_len={fitting * size} fits" if fitting > 0 else ""
    raise OutOfBudget(
        f"max_seq_len={shape.max_seq_len}: the KV of one request needs {blocks} blocks of {size} "
        f"tokens, {format_bytes(one)} ({format_bytes(thousand)} per 1,000 tokens), of max_batch="
        f"{slots} requests {format_bytes(slots * one)}; beside the rest {format_bytes(left)} "
        f"of {shape.where} memory are left for KV{hint}\n{budget.table()}"
    )


def _add_swap(
    budget: MemoryBudget, shape: EngineShape, block: BlockBytes, room: FreeMemory, pool_blocks: int
) -> int:
    """Add as many swap blocks as asked for, or as the pool can need, within half of what may be
    planned on the host. Returns how many.
    """
    swap_blocks = shape.config.swap_blocks
    if swap_blocks is None:
        needed = _needed_swap(shape.config.max_batch, pool_blocks, shape.table_blocks)
        most = min(room.on_host // 2, room.on_host - budget.total(shape.pinned))
        swap_blocks = _fitting_swap(needed, block, most, pinned=shape.on_gpu)
    size = _swap_bytes(swap_blocks, block, pinned=shape.on_gpu)
    budget.add(f"swap ({swap_blocks} blocks)", size, shape.pinned)
    return swap_blocks


def _needed_swap(slots: int, blocks: int, one: int) -> int:
    """Swap blocks that a pool of this many blocks can need: all requests but the oldest may be
    paused, with `one` blocks each at most; 0 if all slots' requests fit.
    """
    return 0 if blocks >= slots * one else (slots - 1) * one


def _fitting_swap(needed: int, block: BlockBytes, most: int, *, pinned: bool) -> int:
    """Blocks of the swap area: as many as needed, or as fit into `most` bytes."""
    counts = range(1, needed + 1)
    return bisect_right(counts, most, key=lambda count: _swap_bytes(count, block, pinned=pinned))


def _swap_bytes(blocks: int, block: BlockBytes, *, pinned: bool) -> int:
    """Bytes of the swap areas of both caches, each an allocation of its own."""
    return sum(host_bytes(blocks * size, pinned=pinned) for size in (block.own, block.drafter))


def _add_calibration(
    budget: MemoryBudget, shape: EngineShape, block: BlockBytes, tokens: int, held: int
) -> None:
    """Add the bytes that the KV of this many tokens, in `dtype` and without rings, takes beyond the
    `held` bytes of caches. The caches are allocated only after that KV is freed.
    """
    blocks = 1 + calibration_blocks(tokens, shape.config.block_size)
    whole = block.pool + block.rings
    taken = blocks * whole * shape.dtype.itemsize // shape.kv_dtype.itemsize
    dtype = str(shape.dtype).removeprefix("torch.")
    name = f"calibration (KV of {tokens} tokens in {dtype}, beyond the caches)"
    budget.add(name, max(0, taken - held), shape.where)


def calibration_blocks(tokens: int, block_size: int) -> int:
    """Blocks, without the dummy, of the cache for calibrating with a prompt of this many tokens."""
    return -(-tokens // block_size)
