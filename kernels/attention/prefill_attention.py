"""Prefill attention over the paged cache: the query tokens of prompt chunks, causal.

FlashAttention-2 (Dao 2023) on a paged cache, as vLLM's and FlashInfer's prefill kernels do. The
rows of a tile are tokens x the query heads of one kv head (GQA), so that short chunks fill a tile
and keys are read once for the whole group. Key tiles start at position 0 and have a size fixed by
dtype and head_dim: a token's bits are a function of its position and its keys, not of how its
prompt was cut into chunks, nor of the other segments.

On Hopper chunks with many tiles of rows take another kernel, `prefill_attention_gluon.py`, with the
same bits.

A short chunk after many keys has too few tiles of rows to keep a GPU busy. With `arrivals` its
keys are split among programs as well, and the last of them to arrive puts their results together
(Flash-Decoding; Dao et al. 2023). Then a token's bits are also a function of where its chunk
begins, of N and of P.

Letters: N lanes (tokens) of a launch, P segments, S slots, B blocks of a slot's table,
Q query heads, G kv heads, D head_dim. `paged.py` has the cache's layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.attention.attention import MAX_HEAD_DIM
from graphengine.kernels.attention.prefill_attention_gluon import attend, takes_wgmma
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import ALONE, Launch, launcher
from graphengine.kernels.core.paged import (
    cache_offsets,
    check_cache,
    checked_output,
    gather_cache,
    token_capacity,
)
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.plans import dot_columns


class PrefillTiles(NamedTuple):
    """How the work of a dtype and padded head_dim is cut. Only `keys` is seen in the bits.

    16-bit rows of 64 and more compile to wgmma on sm_90, whose rows know nothing of each other, so
    that `rows` (with `warps`) and `few_rows` (with 4 warps) agree bit for bit.
    """

    rows: int
    """Rows (tokens x heads) of a tile, as long as that makes MANY_PROGRAMS programs."""
    few_rows: int
    """Rows of a tile of a shorter chunk."""
    keys: int
    warps: int
    stages: int
    """Keys wait for the block table, so that 2n + 1 stages hold n + 1 tiles."""


# 16-bit types by padded head_dim; a smaller one is as 64. Found on an H200 at 128 and 1,024 tokens,
# after none and thousands: 64 keys took 5 to 30 % longer there, more stages as long.
TILES_16_BIT = {
    64: PrefillTiles(64, 64, keys=128, warps=4, stages=3),
    128: PrefillTiles(128, 64, keys=128, warps=8, stages=2),
    256: PrefillTiles(128, 64, keys=32, warps=8, stages=5),
}
# float32 runs on plain FMA units and spills beyond 32 rows.
TILES_32_BIT = {
    64: PrefillTiles(32, 32, keys=64, warps=4, stages=3),
    128: PrefillTiles(32, 32, keys=64, warps=4, stages=3),
    256: PrefillTiles(32, 32, keys=32, warps=4, stages=3),
}
# About the multiprocessors of a large GPU.
MANY_PROGRAMS = 128
# The most programs that share a tile's keys, and the fewest keys of each.
MOST_SPLITS = 16
LEAST_SPLIT = 512

# Below any score, and finite: -inf less itself is NaN.
LOWEST = tl.constexpr(-1.0e30)

PREFILL_ARRIVALS = MANY_PROGRAMS // 2
"""Counters that a launch that splits keys uses at most."""


def paged_prefill_attention(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    launch: Launch = ALONE,
) -> torch.Tensor:
    """Each token of each segment attends its slot's keys 0..its own position.

    Segment p is lanes query_start[p] .. query_start[p + 1] - 1, consecutive tokens of slot_P[p],
    the first of them at position_P[p]. Keys and values of the segment itself were appended before.

    Args:
        q_NQD: [N, Q, D], heads dense, any stride on lanes. Q is a multiple of the cache's G.
        kv: one layer's cache, in q's dtype. block_table_SB: int32.
        query_start_P1: int32 [P + 1], each at most N. slot_P: int32 [P], -1 = padded segment, whose
            other numbers do not count. position_P: int32 [P]. All on the device.
        scale: factor on the scores, above 0, 1/sqrt(D) as a rule.
        out: [N, Q * D] in q's dtype; may not share memory with q or kv.
        launch: with counters, PREFILL_ARRIVALS of them, keys may be split, in memory of its own.
            With PDL the launch before, whatever it is, may still run.

    Returns:
        [N, Q * D] in q's dtype; softmax and sums in float32. Lanes in no segment are not written.
        Tokens past their block table are NaN.
    """
    lanes, heads, head_dim = check_query(q_NQD, kv, block_table_SB)
    if not scale > 0:
        raise ValueError(f"scale={scale} must be above 0")
    segments = slot_P.shape[0]
    check_lanes(segments, slot_P=slot_P, position_P=position_P)
    check_lanes(segments + 1, query_start_P1=query_start_P1)
    arrivals = launch.arrivals
    if arrivals is not None:
        _check_arrivals(arrivals)
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    if not use_triton(q_NQD):
        return paged_prefill_attention_reference(
            q_NQD,
            kv,
            block_table_SB,
            query_start_P1=query_start_P1,
            slot_P=slot_P,
            position_P=position_P,
            scale=scale,
            out=out,
        )
    kv_heads = kv.shape[3]
    group_rows = lanes * (heads // kv_heads)
    tiles, rows, warps = _pick_tiles(q_NQD.dtype, head_dim, group_rows, segments * kv_heads)
    row_tiles = triton.cdiv(group_rows, rows)
    shares = splits = 1
    if arrivals is not None:
        shares = _pick_shares(kv_heads * row_tiles * segments)
        splits = min(shares, -(-token_capacity(kv, block_table_SB) // LEAST_SPLIT))
    if splits == 1 and block_table_SB.numel() and takes_wgmma(q_NQD, kv, segments):
        attend(
            q_NQD,
            kv,
            block_table_SB,
            query_start_P1=query_start_P1,
            slot_P=slot_P,
            position_P=position_P,
            scale=scale,
            out=out,
            pdl=launch.pdl,
        )
        return out
    grid = (kv_heads, row_tiles, splits * segments)
    parts = None
    if splits > 1:
        columns = dot_columns(head_dim) + 2
        size = math.prod(grid) * columns * rows
        parts = torch.empty(size, dtype=torch.float32, device=q_NQD.device)
    launcher(_prefill_kernel, grid)(
        q_NQD,
        kv,
        block_table_SB,
        query_start_P1,
        slot_P,
        position_P,
        out,
        parts,
        arrivals if splits > 1 else None,
        scale * math.log2(math.e),
        q_NQD.stride(0),
        kv.stride(0),
        block_table_SB.stride(0),
        token_capacity(kv, block_table_SB),
        Q=heads,
        G=kv_heads,
        D=head_dim,
        DIM_PADDED=dot_columns(head_dim),
        BLOCK_SIZE=kv.shape[2],
        ROWS=rows,
        TILE=tiles.keys,
        STAGES=tiles.stages,
        SHARES=shares,
        SPLITS=splits,
        LEAST_SPLIT=LEAST_SPLIT,
        num_warps=warps,
        **launch_options(launch.pdl),
    )
    return out


def _pick_tiles(
    dtype: torch.dtype, head_dim: int, group_rows: int, groups: int
) -> tuple[PrefillTiles, int, int]:
    """Tiles, rows and warps for `groups` (kv heads of segments) of `group_rows` rows."""
    by_dim = TILES_32_BIT if dtype == torch.float32 else TILES_16_BIT
    tiles = by_dim[max(64, dot_columns(head_dim))]
    if triton.cdiv(group_rows, tiles.rows) * groups >= MANY_PROGRAMS:
        return tiles, tiles.rows, tiles.warps
    return tiles, tiles.few_rows, 4


def prefill_attention_workspace_bytes(head_dim: int) -> int:
    """The most memory that a launch with `arrivals` works in."""
    rows = max(tiles.few_rows for tiles in TILES_16_BIT.values())
    return MANY_PROGRAMS * rows * (dot_columns(head_dim) + 2) * 4


def _pick_shares(programs: int) -> int:
    """Parts into which each of this many tiles splits its keys: one program a multiprocessor.

    With two of them parts cost more than the better balance brings (64 to 256 tokens on an H200).
    """
    return max(1, min(MOST_SPLITS, MANY_PROGRAMS // programs))


def _check_arrivals(arrivals: torch.Tensor) -> None:
    if arrivals.dtype != torch.int32 or arrivals.numel() < PREFILL_ARRIVALS:
        raise ValueError(
            f"arrivals must be int32 and {PREFILL_ARRIVALS} or more, not {arrivals.numel()} of "
            f"{arrivals.dtype}"
        )


@triton.jit(do_not_specialize=["position_limit"])
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    query_start_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    part_ptr,
    arrivals_ptr,
    scale_log2,
    q_stride,
    kv_block_stride,
    table_stride,
    position_limit,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SHARES: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a kv head, tile of (token, head of the group) rows, segment, and split of keys.

    The last tiles of a segment have most keys and start first, as do the first keys of all. SPLITS
    of SHARES are launched: as many as a block table has keys for, which no token's bits know of.
    """
    kv_head = tl.program_id(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    segments = tl.num_programs(2) // SPLITS
    segment = tl.program_id(2) % segments
    split = tl.program_id(2) // segments
    wait_for_inputs(PDL)
    # Loaded together: one after the other would cost more trips to L2.
    slot = tl.load(slot_ptr + segment)
    first_position = tl.load(position_ptr + segment)
    first_lane = tl.load(query_start_ptr + segment)
    tokens = tl.load(query_start_ptr + segment + 1) - first_lane
    GROUP: tl.constexpr = Q // G
    if (slot < 0) | (first_row >= tokens * GROUP):
        return

    row = first_row + tl.arange(0, ROWS)
    row_token = row // GROUP
    row_position = first_position + row_token
    head = kv_head * GROUP + row % GROUP
    lane = (first_lane + row_token).to(tl.int64)
    dim = tl.arange(0, DIM_PADDED)
    mask = (row_token < tokens)[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + (lane * q_stride + head * D)[:, None] + dim[None, :], mask=mask, other=0.0)

    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    # No row of this tile attends to keys after the tile's last token.
    last_token = tl.minimum(tokens - 1, (first_row + ROWS - 1) // GROUP)
    end = tl.minimum(first_position + last_token + 1, position_limit)
    # Keys before this are seen by all rows.
    common_end = tl.minimum(first_position + first_row // GROUP + 1, end)
    key_ptr = kv_ptr + kv_head * D
    first_key = 0
    end_key = end
    used = 1
    if SPLITS > 1:
        # The same for all tiles of the segment, however many of its lanes are live.
        reach = first_position + tl.num_programs(1) * ROWS // GROUP
        split_keys = tl.maximum(tl.cdiv(tl.cdiv(reach, SHARES), TILE) * TILE, LEAST_SPLIT)
        used = tl.maximum(tl.cdiv(end, split_keys), 1)
        if split >= used:
            return
        first_key = split * split_keys
        end_key = tl.minimum(first_key + split_keys, end)
    for start in tl.range(first_key, end_key, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        token_mask = token < end
        entry = cache_offsets(table_row_ptr, token, token_mask, kv_block_stride, BLOCK_SIZE, G * D)
        key_ptrs = key_ptr + entry[:, None] + dim[None, :]
        load_mask = token_mask[:, None] & (dim < D)[None, :]
        keys = tl.load(key_ptrs, mask=load_mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if start + TILE > common_end:
            seen = token_mask[None, :] & (token[None, :] <= row_position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        # The maximum stays in the scores' own units: scaled and subtracted in one operation.
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        if SPLITS > 1:
            # A row may see no key of its split: its weights are 0 then, and never NaN.
            new_max = tl.maximum(new_max, LOWEST)
        weights = tl.exp2(tl.fma(scores, scale_log2, -(new_max * scale_log2)[:, None]))
        rescale = tl.exp2((running_max - new_max) * scale_log2)
        values = tl.load(key_ptrs + BLOCK_SIZE * G * D, mask=load_mask, other=0.0)
        acc *= rescale[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        running_max = new_max

    # Not one `if`: where nothing is split there are no parts.
    if SPLITS > 1:  # noqa: SIM102
        if used > 1:
            unit = (segment * tl.num_programs(1) + tl.program_id(1)) * G + kv_head
            part = (unit * SPLITS).to(tl.int64) * ((DIM_PADDED + 2) * ROWS)
            parts_ptr = part_ptr + part
            _store_part(parts_ptr, split, acc, running_max, running_sum, ROWS, DIM_PADDED)
            # The barrier puts the stores of the whole program before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel") < used - 1:
                return
            tl.store(arrivals_ptr + unit, 0)
            acc, running_sum = _merge_parts(parts_ptr, used, scale_log2, ROWS, DIM_PADDED)

    result = acc * (1.0 / running_sum)[:, None]
    inside = (row_position >= 0) & (row_position < position_limit)
    result = tl.where(inside[:, None], result, float("nan"))
    target = out_ptr + (lane * (Q * D) + head * D)[:, None] + dim[None, :]
    tl.store(target, result, mask=mask)


@triton.jit
def _store_part(
    parts_ptr, split, acc, largest, total, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """What a split found: weighted values, and for each row its largest score and its sum."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    own_ptr = parts_ptr + split * ((DIM_PADDED + 2) * ROWS)
    tl.store(own_ptr + row[:, None] * DIM_PADDED + dim[None, :], acc)
    tl.store(own_ptr + DIM_PADDED * ROWS + row, largest)
    tl.store(own_ptr + (DIM_PADDED + 1) * ROWS + row, total)


@triton.jit
def _merge_parts(parts_ptr, used, scale_log2, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Weighted values and sums of `used` splits, weighed by their largest scores, in order.

    Loads of 4 bytes go through L1 when they are pipelined, whatever is asked. It holds no part: the
    launch reads none before, and the counter's acquire comes in front.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for split in tl.range(0, used, 1, num_stages=4):
        own_ptr = parts_ptr + split * ((DIM_PADDED + 2) * ROWS)
        largest = tl.load(own_ptr + DIM_PADDED * ROWS + row, cache_modifier=".cg")
        total = tl.load(own_ptr + (DIM_PADDED + 1) * ROWS + row, cache_modifier=".cg")
        values = tl.load(own_ptr + row[:, None] * DIM_PADDED + dim[None, :], cache_modifier=".cg")
        new_max = tl.maximum(running_max, largest)
        rescale = tl.exp2((running_max - new_max) * scale_log2)
        weight = tl.exp2((largest - new_max) * scale_log2)
        acc = acc * rescale[:, None] + values * weight[:, None]
        running_sum = running_sum * rescale + total * weight
        running_max = new_max
    return acc, running_sum


def paged_prefill_attention_reference(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_prefill_attention` in plain PyTorch, a segment at a time."""
    lanes, heads, head_dim = q_NQD.shape
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    starts = query_start_P1.tolist()
    for segment, (slot, first_position) in enumerate(
        zip(slot_P.tolist(), position_P.tolist(), strict=True)
    ):
        first, last = starts[segment], starts[segment + 1]
        if slot < 0 or last <= first:
            continue
        out[first:last] = _segment_reference(
            q_NQD[first:last], kv, block_table_SB, slot, first_position, scale
        ).to(out.dtype)
    return out


def _segment_reference(
    q_TQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot: int,
    first_position: int,
    scale: float,
) -> torch.Tensor:
    """Float32 [T, Q * D] for the T tokens of one segment."""
    tokens, heads, head_dim = q_TQD.shape
    capacity = token_capacity(kv, block_table_SB)
    position_T = first_position + torch.arange(tokens, device=q_TQD.device)
    length = min(first_position + tokens, capacity)
    keys, values = gather_cache(kv, block_table_SB, slot, max(length, 0))
    group = heads // keys.shape[1]
    key_position = torch.arange(len(keys), device=q_TQD.device)
    hidden = key_position[None, :] > position_T[:, None]

    q = q_TQD.float().transpose(0, 1)
    keys = keys.transpose(0, 1).repeat_interleave(group, dim=0)
    values = values.transpose(0, 1).repeat_interleave(group, dim=0)
    scores = (q @ keys.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
    result = (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)
    outside = (position_T < 0) | (position_T >= capacity)
    return result.masked_fill(outside[:, None, None], math.nan).reshape(tokens, heads * head_dim)


def check_query(
    q_NQD: torch.Tensor, kv: torch.Tensor, block_table_SB: torch.Tensor
) -> tuple[int, int, int]:
    """Raise ValueError unless the queries fit the cache; return (N, Q, D)."""
    if q_NQD.dim() != 3:
        raise ValueError(f"q must be [N, Q, D], not {tuple(q_NQD.shape)}")
    lanes, heads, head_dim = q_NQD.shape
    if q_NQD.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q must have dense heads, not strides {q_NQD.stride()}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim} is outside 1..{MAX_HEAD_DIM}")
    if kv.dtype != q_NQD.dtype:
        raise ValueError(f"kv is {kv.dtype}, q {q_NQD.dtype}")
    kv_heads = kv.shape[3] if kv.dim() == 5 else 1
    check_cache(kv, block_table_SB, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return lanes, heads, head_dim
