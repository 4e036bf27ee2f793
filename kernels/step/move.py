"""Move keys and values of an accepted path to where a chain has them.

Node i of a tree has its cache entry i after the root's, so other nodes' entries lie between those
of the path. After the move the path's j-th token has its entry j after the root's, in every layer,
as if nothing had been drafted.

Letters: L layers, S slots, B blocks of a slot's table, R rows, W nodes of a tree, P tokens of a
path at most, E values of an entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import BITS, check_int32, check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import cache_offsets
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.step.walk import AcceptedPath

_BLOCK_E = 512


def move_path(
    cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    path: AcceptedPath,
    *,
    rows: int,
    width: int,
    pdl: bool = False,
) -> None:
    """Move the entries of each row's accepted path together, in place; one launch for all layers.

    Args:
        cache: [L, blocks, parts, block_size, *entry] of any dtype, dense within a layer's block.
        block_table_SB: int32, dense rows.
        path: of `rows` rows, from `verify_commit_publish`. The first lane of a row is its root's.
        width: W.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`, and `path` may be
            as new as that one.

    ValueError for a shape or dtype that does not fit.
    """
    lanes = path.source.numel()
    check_lanes(lanes, source=path.source, **path.lanes._asdict())
    check_int32(block_table_SB=block_table_SB)
    if rows < 1 or lanes % rows or not 1 <= lanes // rows <= width:
        raise ValueError(
            f"{lanes} lanes are no paths of {rows} rows, of 1 to {width} tokens in trees of {width}"
        )
    if cache.dim() < 5 or not cache[:1, :1].is_contiguous() or block_table_SB.stride(1) != 1:
        raise ValueError(
            f"a cache must be [L, blocks, parts, block_size, *entry], dense within a layer's "
            f"block, and its table have dense rows: {tuple(cache.shape)} has strides "
            f"{cache.stride()}, {tuple(block_table_SB.shape)} has {block_table_SB.stride()}"
        )
    if not use_triton(cache):
        move_path_reference(cache, block_table_SB, path, rows=rows, width=width)
        return
    layers, _, parts, block_size = cache.shape[:4]
    entry = cache[0, 0, 0, 0].numel()
    block_e = min(triton.next_power_of_2(entry), _BLOCK_E)
    launcher(_move_path_kernel, (rows, layers, parts * triton.cdiv(entry, block_e)))(
        cache.view(BITS[cache.dtype.itemsize]),
        block_table_SB,
        path.lanes.slot,
        path.lanes.position,
        path.source,
        cache.stride(0),
        cache.stride(1),
        block_table_SB.stride(0),
        W=width,
        P=lanes // rows,
        PARTS=parts,
        BLOCK_SIZE=block_size,
        E=entry,
        BLOCK_E=block_e,
        num_warps=4,
        **launch_options(pdl),
    )


def move_path_reference(
    cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    path: AcceptedPath,
    *,
    rows: int,
    width: int,
) -> None:
    """Plain twin of `move_path`."""
    block_size, length = cache.shape[3], path.source.numel() // rows
    slots, positions = path.lanes.slot.tolist(), path.lanes.position.tolist()
    sources = path.source.tolist()
    for row in range(rows):
        first = row * length
        tokens = sum(slot >= 0 for slot in slots[first : first + length])
        if not tokens:
            continue
        root, table = positions[first], block_table_SB[slots[first]].long()
        to = root + torch.arange(tokens, device=table.device)
        nodes = [source - row * width for source in sources[first : first + tokens]]
        at = root + torch.tensor(nodes, device=table.device)
        held = cache[:, table[at // block_size], :, at % block_size]
        cache[:, table[to // block_size], :, to % block_size] = held


@triton.jit
def _move_path_kernel(
    cache_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    source_ptr,
    layer_stride,
    block_stride,
    table_stride,
    W: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, layer, and BLOCK_E values of a part's entries."""
    row = tl.program_id(0)
    part = tl.program_id(2) % PARTS
    e = tl.program_id(2) // PARTS * BLOCK_E + tl.arange(0, BLOCK_E)
    cache_ptr += tl.program_id(1).to(tl.int64) * layer_stride + part * (BLOCK_SIZE * E) + e
    wait_for_inputs(PDL)

    slot = tl.load(slot_ptr + row * P)
    if slot >= 0:
        root = tl.load(position_ptr + row * P)
        table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
        held = ()
        moves = ()
        for j in tl.static_range(1, P):
            node = tl.load(source_ptr + row * P + j) - row * W
            moved = (tl.load(slot_ptr + row * P + j) >= 0) & (node != j)
            at = cache_offsets(table_row_ptr, root + node, moved, block_stride, BLOCK_SIZE, E)
            held += (tl.load(cache_ptr + at, mask=moved & (e < E)),)  # type: ignore[assignment]
            moves += (moved,)  # type: ignore[assignment]
        # One entry may lie where another one goes: all are read before the first is written.
        tl.debug_barrier()
        for j in tl.static_range(1, P):
            to = cache_offsets(table_row_ptr, root + j, moves[j - 1], block_stride, BLOCK_SIZE, E)
            tl.store(cache_ptr + to, held[j - 1], mask=moves[j - 1] & (e < E))
