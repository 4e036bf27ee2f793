"""Decode attention over the paged cache: one query token a lane, keys split among programs.

FlashDecoding (Dao, Haziza, Massa, Sizov 2023): a lane's keys are cut into splits of SPLIT_TOKENS,
each program attends one split for the query heads of one kv head (GQA) and leaves a partial result,
and a second kernel combines the partials. Splits have a fixed length counted from position 0 and
tiles a size fixed by dtype and head_dim, so that the order of summation of a lane is a function of
its own position alone.

Letters: N lanes of a launch, S slots, B blocks of a slot's table, Q query heads, G kv heads,
D head_dim, C splits. `paged.py` has the cache's layout.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.dispatch import use_triton
from graphengine.kernels.lanes import check_lanes
from graphengine.kernels.paged import (
    cache_offsets,
    check_cache,
    checked_output,
    gather_cache,
    token_capacity,
)

SPLIT_TOKENS = 256
MAX_HEAD_DIM = 256

# `tl.dot` wants 16 rows: the query heads of one kv head, padded. 16 rows compile to mma.sync.
_GROUP_ROWS = 16
_COMBINE_TILE = 16


def paged_attention(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend keys 0..position of each lane's slot; the token at `position` was appended before.

    Args:
        q_NQD: [N, Q, D], heads dense, any stride on lanes. Q is a multiple of the cache's G.
        kv: one layer's cache, in q's dtype. block_table_SB: int32.
        slot_N: int32, -1 = padded lane. position_N: int32, position of the lane's query.
        scale: factor on the scores, 1/sqrt(D) as a rule.
        max_seq_len: positions stay below it. It sets the grid and the workspace
            (`paged_attention_workspace_bytes`), never the result.
        out: [N, Q * D] in q's dtype; may not share memory with q or kv.

    Returns:
        [N, Q * D] in q's dtype; softmax and sums in float32. A padded lane reads and writes
        nothing. A live lane whose position is negative, max_seq_len or more, or past its block
        table is NaN.
    """
    lanes, heads, head_dim = check_query(q_NQD, kv, block_table_SB)
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len={max_seq_len} must be at least 1")
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    if not use_triton(q_NQD):
        return paged_attention_reference(
            q_NQD,
            kv,
            block_table_SB,
            slot_N,
            position_N,
            scale=scale,
            max_seq_len=max_seq_len,
            out=out,
        )
    block_size, kv_heads = kv.shape[2:4]
    splits = _split_count(max_seq_len)
    position_limit = min(max_seq_len, token_capacity(kv, block_table_SB))
    head_tiles = triton.cdiv(heads // kv_heads, _GROUP_ROWS)
    dim_padded = padded_dim(head_dim)
    # Uninitialised: the combine kernel reads only what the programs of the lane's own splits wrote.
    acc_NQCD = q_NQD.new_empty(lanes, heads, splits, head_dim, dtype=torch.float32)
    max_NQC = q_NQD.new_empty(lanes, heads, splits, dtype=torch.float32)
    sum_NQC = torch.empty_like(max_NQC)
    _split_kernel[(lanes, kv_heads * head_tiles, splits)](
        q_NQD,
        kv,
        block_table_SB,
        slot_N,
        position_N,
        acc_NQCD,
        max_NQC,
        sum_NQC,
        scale * math.log2(math.e),
        q_NQD.stride(0),
        kv.stride(0),
        block_table_SB.stride(0),
        splits,
        position_limit,
        Q=heads,
        G=kv_heads,
        D=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        GROUP_ROWS=_GROUP_ROWS,
        SPLIT=SPLIT_TOKENS,
        TILE=key_tile(q_NQD.dtype, dim_padded),
        num_warps=4,
        num_stages=2,
    )
    _combine_kernel[(lanes, heads)](
        acc_NQCD,
        max_NQC,
        sum_NQC,
        slot_N,
        position_N,
        out,
        splits,
        position_limit,
        Q=heads,
        D=head_dim,
        DIM_PADDED=dim_padded,
        SPLIT=SPLIT_TOKENS,
        TILE=_COMBINE_TILE,
        num_warps=4,
    )
    return out


def paged_attention_workspace_bytes(
    lanes: int, *, heads: int, head_dim: int, max_seq_len: int
) -> int:
    """Bytes of float32 workspace that one `paged_attention` call allocates (for the budget)."""
    return lanes * heads * _split_count(max_seq_len) * (head_dim + 2) * 4


def _split_count(max_seq_len: int) -> int:
    return -(-max_seq_len // SPLIT_TOKENS)


def padded_dim(head_dim: int) -> int:
    """Columns of a tile: `tl.dot` wants a power of two of at least 16, the rest is masked."""
    return max(16, 1 << (head_dim - 1).bit_length())


def key_tile(dtype: torch.dtype, dim_padded: int) -> int:
    """Keys of one tile: as many as leave two stages of keys and values in shared memory."""
    return 64 if dim_padded * dtype.itemsize <= 512 else 32


@triton.jit(do_not_specialize=["splits", "position_limit"])
def _split_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    scale_log2,
    q_stride,
    kv_block_stride,
    table_stride,
    splits,
    position_limit,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a lane, kv head (GROUP_ROWS of its query heads) and split: unnormalised partials.

    Per head: the largest score (in log2 units), the sum of weights and the weighted sum of values.
    """
    lane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    slot = tl.load(slot_ptr + lane)
    if slot < 0:
        return
    position = tl.load(position_ptr + lane)
    # A negative position ends here too.
    if (split * SPLIT > position) | (position >= position_limit):
        return

    GROUP: tl.constexpr = Q // G
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_ROWS - 1) // GROUP_ROWS
    kv_head = tl.program_id(1) // HEAD_TILES
    row = (tl.program_id(1) % HEAD_TILES) * GROUP_ROWS + tl.arange(0, GROUP_ROWS)
    row_mask = row < GROUP
    head = kv_head * GROUP + row
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < D
    head_mask = row_mask[:, None] & dim_mask[None, :]
    q = tl.load(
        q_ptr + lane * q_stride + head[:, None] * D + dim[None, :], mask=head_mask, other=0.0
    )

    running_max = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, DIM_PADDED], tl.float32)
    table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    end = tl.minimum((split + 1) * SPLIT, position + 1)
    for start in range(split * SPLIT, end, TILE):
        token = start + tl.arange(0, TILE)
        token_mask = token < end
        entry = cache_offsets(table_row_ptr, token, token_mask, kv_block_stride, BLOCK_SIZE, G * D)
        running_max, running_sum, acc = attend_tile(
            q,
            kv_ptr + (entry + kv_head * D)[:, None] + dim[None, :],
            token_mask[:, None] & dim_mask[None, :],
            token_mask[None, :],
            scale_log2,
            running_max,
            running_sum,
            acc,
            BLOCK_SIZE * G * D,
        )

    partial = (lane * Q + head) * splits + split
    tl.store(max_ptr + partial, running_max, mask=row_mask)
    tl.store(sum_ptr + partial, running_sum, mask=row_mask)
    tl.store(acc_ptr + partial[:, None] * D + dim[None, :], acc, mask=head_mask)


@triton.jit
def attend_tile(
    q,
    key_ptrs,
    load_mask,
    score_mask,
    scale_log2,
    running_max,
    running_sum,
    acc,
    VALUE_OFFSET: tl.constexpr,
):
    """One step of the online softmax (FlashAttention-2, Dao 2023) over a tile of keys and values.

    q [rows, D'] against keys at `key_ptrs` [keys, D'] and values VALUE_OFFSET elements behind them;
    what `load_mask` leaves out counts as 0, scores that `score_mask` leaves out as -inf. The tile
    must show every row at least one key, in this tile or an earlier one. A row that sees no key of
    this tile keeps its bits.
    """
    k = tl.load(key_ptrs, mask=load_mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(score_mask, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    v = tl.load(key_ptrs + VALUE_OFFSET, mask=load_mask, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_max, running_sum * rescale + tl.sum(weights, axis=1), acc


@triton.jit(do_not_specialize=["splits", "position_limit"])
def _combine_kernel(
    acc_ptr,
    max_ptr,
    sum_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    splits,
    position_limit,
    Q: tl.constexpr,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a lane and head: weigh the partials of its splits by their largest scores.

    A lane with one split passes through exactly: weight 1, and only zeros are added.
    """
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + lane)
    if slot < 0:
        return
    position = tl.load(position_ptr + lane)
    # No split was attended outside the limits: 0 / 0 below is the NaN that the contract promises.
    inside = (position >= 0) & (position < position_limit)
    used = tl.where(inside, position // SPLIT + 1, 0)

    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < D
    running_max = float("-inf")
    running_sum = 0.0
    acc = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, used, TILE):
        split = start + tl.arange(0, TILE)
        split_mask = split < used
        partial = (lane * Q + head) * splits + split
        split_max = tl.load(max_ptr + partial, mask=split_mask, other=float("-inf"))
        split_sum = tl.load(sum_ptr + partial, mask=split_mask, other=0.0)
        split_acc = tl.load(
            acc_ptr + partial[:, None] * D + dim[None, :],
            mask=split_mask[:, None] & dim_mask[None, :],
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(split_max, axis=0))
        weight = tl.exp2(split_max - new_max)
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weight * split_sum, axis=0)
        acc = acc * rescale + tl.sum(weight[:, None] * split_acc, axis=0)
        running_max = new_max
    tl.store(out_ptr + (lane * Q + head) * D + dim, acc / running_sum, mask=dim_mask)


def paged_attention_reference(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` in plain PyTorch, lane by lane so that no lane's bits depend on others."""
    lanes, heads, head_dim = q_NQD.shape
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    position_limit = min(max_seq_len, token_capacity(kv, block_table_SB))
    slots, positions = slot_N.tolist(), position_N.tolist()
    for lane, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            continue
        if not 0 <= position < position_limit:
            out[lane] = math.nan
            continue
        keys, values = gather_cache(kv, block_table_SB, slot, position + 1)
        # One query token: [G, group, D] x [G, D, keys].
        q = q_NQD[lane].float().view(keys.shape[1], -1, head_dim)
        weights = torch.softmax(q @ keys.permute(1, 2, 0) * scale, dim=-1)
        out[lane] = (weights @ values.transpose(0, 1)).view(-1).to(out.dtype)
    return out


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
