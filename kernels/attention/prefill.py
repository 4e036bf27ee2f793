"""Attention over the paged cache for runs of query tokens: prompt chunks, and blocks of drafts.

FlashAttention-2 (Dao 2023) on a paged cache, as in vLLM's and FlashInfer's prefill kernels. The
rows of a tile are tokens x the query heads of one kv head (GQA), so that short chunks fill a tile
and keys are read once for the whole group. Key tiles start at position 0 and have a size fixed by
dtype and head_dim: a token's bits depend on its position and its keys, but not on how its prompt
was cut into chunks, nor on the other segments.

A segment's mask is causal, or there is none: the tokens of a drafter's block see each other. Or
each token says how many keys it sees: those of an image see the others, all others are causal.

On Hopper, chunks with many tiles of rows use another kernel with the same bits,
`prefill_gluon.py`.

A short chunk after many keys has too few tiles of rows to keep a GPU busy. With `arrivals` its
keys are split among programs as well, and the last program to arrive combines their results
(Flash-Decoding; Dao et al. 2023). Then a token's bits also depend on where its chunk begins, on N
and on P.

Letters: N lanes (tokens) of a launch, P segments, S slots, B blocks of a slot's table,
Q query heads, G kv heads, D head_dim. `paged.py` has the cache's layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.attention.decode import MAX_HEAD_DIM
from graphengine.kernels.attention.gluon.prefill_gluon import attend, takes_wgmma
from graphengine.kernels.attention.reference import (
    PrefillCall,
    paged_prefill_attention_reference,
)
from graphengine.kernels.attention.scores import check_scores
from graphengine.kernels.attention.triton.prefill_triton import (
    Shape,
    prefill_attention_kernel,
    prefill_images_kernel,
)
from graphengine.kernels.core.devices import device_of
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import ALONE, Launch, launcher, take_counters
from graphengine.kernels.core.paged import (
    check_cache,
    check_cache_dtype,
    checked_output,
    token_capacity,
)
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.plans import dot_columns


class PrefillTiles(NamedTuple):
    """Tile sizes for a dtype and padded head_dim. Only `keys` affects the bits.

    Tiles of 64 and more 16-bit rows compile to wgmma on sm_90, whose rows are independent, so
    `rows` (with `warps`) and `few_rows` (with 4 warps) agree bit for bit.
    """

    rows: int
    """Rows (tokens x heads) of a tile, if that makes at least MANY_PROGRAMS programs."""
    few_rows: int
    """Rows of a tile of a shorter chunk."""
    keys: int
    warps: int
    stages: int
    """Pipeline stages. Keys wait for the block table, so that 2n + 1 stages hold n + 1 tiles."""
    few_warps: int = 4
    """Warps of `few_rows`."""


# For 16-bit types, by padded head_dim; smaller ones use 64. Tuned on an H200 with 128 and 1,024
# tokens, after none and after thousands: 64 keys took 5 to 30 % longer, more stages just as long.
TILES_16_BIT = {
    64: PrefillTiles(64, 64, keys=128, warps=4, stages=3),
    128: PrefillTiles(128, 64, keys=128, warps=8, stages=2),
    256: PrefillTiles(128, 64, keys=32, warps=8, stages=5),
    # Not timed: the longest tiles of keys whose sums stay in the registers of 8 warps.
    512: PrefillTiles(64, 64, keys=32, warps=8, stages=2, few_warps=8),
}
# For GPUs with less shared memory; not timed on any. They fit the 99 KB that most of those have.
SMALL_TILES_16_BIT = {
    64: PrefillTiles(64, 64, keys=64, warps=4, stages=3),
    128: PrefillTiles(64, 64, keys=64, warps=4, stages=2),
    256: PrefillTiles(64, 64, keys=32, warps=8, stages=2),
    512: PrefillTiles(32, 32, keys=16, warps=8, stages=1, few_warps=8),
}
# For launches with few lanes: 50 lanes of 8 heads after 800 keys take 15 us on an H200; 30 us with
# 64 rows, as the last program of a tile adds up the parts of all its rows.
FEW_TILES_16_BIT = {256: PrefillTiles(16, 16, keys=64, warps=8, stages=2, few_warps=8)}
_LEAST_SHARED = 200 * 1024
# float32 runs on plain FMA units and spills beyond 32 rows.
TILES_32_BIT = {
    64: PrefillTiles(32, 32, keys=64, warps=4, stages=3),
    128: PrefillTiles(32, 32, keys=64, warps=4, stages=3),
    256: PrefillTiles(32, 32, keys=32, warps=4, stages=3),
    512: PrefillTiles(16, 16, keys=16, warps=4, stages=2),
}
# About the number of multiprocessors of a large GPU.
MANY_PROGRAMS = 128
# The most programs that share a tile's keys, and the fewest keys of each.
MOST_SPLITS = 16
LEAST_SPLIT = 512
# The same for launches with few lanes.
FEW_LEAST_SPLIT = 192


PREFILL_ARRIVALS = MANY_PROGRAMS // 2
"""Most counters that a launch uses to split keys."""


def paged_prefill_attention(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    seen_P: torch.Tensor | None = None,
    seen_N: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    launch: Launch = ALONE,
    few_lanes: bool = False,
) -> torch.Tensor:
    """Attention of each segment's tokens over their slot's keys 0..own position, or all seen keys.

    Segment p is lanes query_start[p] .. query_start[p + 1] - 1, consecutive tokens of slot_P[p],
    the first of them at position_P[p]. The segment's own keys and values were appended before.

    Args:
        q_NQD: [N, Q, D], heads dense, any stride on lanes. Q is a multiple of the cache's G.
        kv: one layer's cache, in q's dtype or in FP8_KV. block_table_SB: int32.
        query_start_P1: int32 [P + 1], each at most N. slot_P: int32 [P], -1 = padded segment, whose
            other numbers are ignored. position_P: int32 [P]. All on the device.
        scale: factor on the scores, above 0, usually 1/sqrt(D).
        seen_P: int32 [P], on the device: all tokens of a segment see the keys below this number,
            before and after their own, except those before their window. None: a token sees keys
            up to its own. Launches with it use `prefill_triton.py`.
        seen_N: int32 [N], on the device: a lane sees the keys below this number, its own among
            them, except those before its window. Without `seen_P`; launches with it use
            `prefill_triton.py`.
        kv_scales: float32 [2, G], all positive, of a cache of FP8_KV. Products are in q's dtype,
            which represents e4m3 exactly; the scales are applied to them in float32.
        window, sinks, softcap: as described in `scores.py`. Tiles of keys before a window are not
            read. Launches with any of them use `prefill_triton.py`.
        out: [N, Q * D] in q's dtype; may not share memory with q or kv.
        launch: with PREFILL_ARRIVALS counters, keys may be split; partial results are then in
            memory that the call allocates. With PDL the launch before, whatever it is, may still
            run.
        few_lanes: tiles are smaller and keys are split further, for a launch that has a GPU to
            itself with few lanes. Its bits are others than without.

    Returns:
        [N, Q * D] in q's dtype; softmax and sums in float32. Lanes in no segment are not written.
        Tokens past their block table are NaN.
    """
    call = PrefillCall(
        q_NQD=q_NQD,
        kv=kv,
        block_table_SB=block_table_SB,
        query_start_P1=query_start_P1,
        slot_P=slot_P,
        position_P=position_P,
        scale=scale,
        seen_P=seen_P,
        seen_N=seen_N,
        kv_scales=kv_scales,
        window=window,
        sinks=sinks,
        softcap=softcap,
    )
    _check_call(call)
    lanes, heads, head_dim = q_NQD.shape
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    if not use_triton(q_NQD):
        return paged_prefill_attention_reference(**call._asdict(), out=out)
    cut = _cut(call, shared=launch.arrivals is not None, few_lanes=few_lanes)
    if _takes_wgmma(call, cut):
        attend(
            q_NQD,
            kv,
            block_table_SB,
            query_start_P1=query_start_P1,
            slot_P=slot_P,
            position_P=position_P,
            scale=scale,
            kv_scales=kv_scales,
            out=out,
            pdl=launch.pdl,
        )
    else:
        _attend(call, cut, out, launch)
    return out


class _Cut(NamedTuple):
    """How a launch's work is divided among programs."""

    tiles: PrefillTiles
    rows: int
    """Rows of a tile."""
    warps: int
    row_tiles: int
    shares: int
    """Most parts into which a tile of rows may split its keys; follows from the number of tiles."""
    splits: int
    """Parts for which there can be keys."""
    least_split: int
    """The fewest keys of a part."""


def _cut(call: PrefillCall, *, shared: bool, few_lanes: bool) -> _Cut:
    """Divide the work of a launch; `shared`: keys may be split among programs."""
    lanes, heads, _ = call.q_NQD.shape
    group = heads // call.kv_heads
    least_split = FEW_LEAST_SPLIT if few_lanes else LEAST_SPLIT
    groups = call.segments * call.kv_heads
    tiles, rows, warps = _pick_tiles(call.q_NQD, lanes * group, groups, few_lanes=few_lanes)
    row_tiles = triton.cdiv(lanes * group, rows)
    if not shared:
        return _Cut(tiles, rows, warps, row_tiles, shares=1, splits=1, least_split=least_split)
    shares = _pick_shares(call.kv_heads * row_tiles * call.segments)
    reach = token_capacity(call.kv, call.block_table_SB)
    if call.window and call.causal:
        # The kernel counts the keys of a tile of rows in the same way.
        reach = min(reach, call.window + rows // group + 1 + tiles.keys)
    splits = min(shares, -(-reach // least_split))
    return _Cut(tiles, rows, warps, row_tiles, shares, splits, least_split)


def _takes_wgmma(call: PrefillCall, cut: _Cut) -> bool:
    """Whether `prefill_gluon.py` serves the launch."""
    plain = call.plain and cut.splits == 1 and call.block_table_SB.numel() > 0
    return plain and takes_wgmma(call.q_NQD, call.kv, call.segments)


def _attend(call: PrefillCall, cut: _Cut, out: torch.Tensor, launch: Launch) -> None:
    """Run `paged_prefill_attention` for a checked call with the kernel of `prefill_triton.py`."""
    q, kv, splits = call.q_NQD, call.kv, cut.splits
    grid = (call.kv_heads, cut.row_tiles, splits * call.segments)
    shape = _shape(call, cut)
    parts = arrivals = None
    if splits > 1:
        arrivals = take_counters(launch.arrivals, PREFILL_ARRIVALS, "attention of a chunk")
        size = math.prod(grid) * (shape.padded + 2) * cut.rows
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
    launched = (
        launcher(prefill_attention_kernel, grid)
        if call.seen_N is None
        else launcher(prefill_images_kernel, grid)
    )
    launched(
        q,
        kv,
        call.block_table_SB,
        call.query_start_P1,
        call.slot_P,
        call.position_P,
        call.seen_P if call.seen_N is None else call.seen_N,
        call.kv_scales,
        call.sinks,
        out,
        parts,
        arrivals,
        call.scale * math.log2(math.e),
        q.stride(0),
        kv.stride(0),
        call.block_table_SB.stride(0),
        token_capacity(kv, call.block_table_SB),
        Shape(*(tl.constexpr(value) for value in shape)),
        num_warps=cut.warps,
        **launch_options(launch.pdl),
    )


def _shape(call: PrefillCall, cut: _Cut) -> Shape:
    """Compile-time constants of the kernel."""
    heads, head_dim = call.q_NQD.shape[1:]
    return Shape(
        Q=heads,
        G=call.kv_heads,
        D=head_dim,
        padded=dot_columns(head_dim),
        block_size=call.kv.shape[2],
        group=heads // call.kv_heads,
        rows=cut.rows,
        tile=cut.tiles.keys,
        stages=cut.tiles.stages,
        shares=cut.shares,
        splits=cut.splits,
        least_split=cut.least_split,
        fp8=call.kv_scales is not None,
        window=call.window,
        softcap=float(call.softcap),
    )


def _pick_tiles(
    q_NQD: torch.Tensor, group_rows: int, groups: int, *, few_lanes: bool = False
) -> tuple[PrefillTiles, int, int]:
    """Tiles, rows and warps for `groups` (kv heads of segments) of `group_rows` rows."""
    device, padded = device_of(q_NQD), max(64, dot_columns(q_NQD.shape[2]))
    if few_lanes and q_NQD.dtype != torch.float32 and padded in FEW_TILES_16_BIT:
        tiles = FEW_TILES_16_BIT[padded]
        return tiles, tiles.few_rows, tiles.few_warps
    if q_NQD.dtype == torch.float32:
        by_dim = TILES_32_BIT
    elif device is not None and device.shared_bytes < _LEAST_SHARED:
        by_dim = SMALL_TILES_16_BIT
    else:
        by_dim = TILES_16_BIT
    tiles = by_dim[padded]
    if triton.cdiv(group_rows, tiles.rows) * groups >= MANY_PROGRAMS:
        return tiles, tiles.rows, tiles.warps
    return tiles, tiles.few_rows, tiles.few_warps


def prefill_attention_workspace_bytes(head_dim: int) -> int:
    """Most bytes of workspace that a launch with `arrivals` uses."""
    rows = max(tiles.few_rows for tiles in TILES_16_BIT.values())
    return MANY_PROGRAMS * rows * (dot_columns(head_dim) + 2) * 4


def _pick_shares(programs: int) -> int:
    """Parts into which each of this many tiles splits its keys: one program per multiprocessor.

    With two per multiprocessor, parts cost more than the better balance gains (64 to 256 tokens on
    an H200).
    """
    return max(1, min(MOST_SPLITS, MANY_PROGRAMS // programs))


def _check_call(call: PrefillCall) -> None:
    """Raise ValueError unless queries, cache and segments fit each other."""
    q = call.q_NQD
    _check_query(q, call.kv, call.block_table_SB, call.kv_scales)
    if not call.scale > 0:
        raise ValueError(f"scale={call.scale} must be above 0")
    check_scores(
        window=call.window,
        sinks=call.sinks,
        softcap=call.softcap,
        heads=q.shape[1],
        device=q.device,
    )
    check_lanes(call.segments, slot_P=call.slot_P, position_P=call.position_P)
    if call.seen_P is not None:
        check_lanes(call.segments, seen_P=call.seen_P)
    if call.seen_N is not None:
        check_lanes(q.shape[0], seen_N=call.seen_N)
        if call.seen_P is not None:
            raise ValueError(f"seen_P of {call.segments} segments beside seen_N of each lane")
    check_lanes(call.segments + 1, query_start_P1=call.query_start_P1)


def _check_query(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the queries fit the cache."""
    if q_NQD.dim() != 3:
        raise ValueError(f"q must be [N, Q, D], not {tuple(q_NQD.shape)}")
    _, heads, head_dim = q_NQD.shape
    if q_NQD.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q must have dense heads, not strides {q_NQD.stride()}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim} is outside 1..{MAX_HEAD_DIM}")
    kv_heads = kv.shape[3] if kv.dim() == 5 else 1
    check_cache_dtype(kv, kv_scales, "q", q_NQD.dtype, kv_heads)
    check_cache(kv, block_table_SB, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
