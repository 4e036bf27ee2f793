"""The Triton kernels of `linear.py`: a product in two row families, and one epilogue for both.

Both stream a weight [M, K] once for all lanes. `dot_kernel` runs a pipelined loop of `tl.dot` over
the K tiles; K may be split among programs, of which the last to arrive sums the parts in order. It
is for float32, logits, the interpreter, and all else that `linear_gluon.takes` does not take.
`fma_kernel` holds whole weight rows in registers before it waits for its inputs. SWIGLU is 0,
or the `gate_code` of a SwiGLU. With RANKS the product is this rank's part, which is pushed into the
memory of `peers`; `dot` then continues with the sum of all ranks' parts. SIZE is the words of that
memory.

Letters: N lanes, L lanes of a tile, K input features, M weight rows, B outputs of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.comm.items import begin_sum, push_part, sum_of_ranks
from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.linear.operands import KEEPING_FIELDS, SAMPLER_FIELDS, STREAM_FIELDS
from graphengine.kernels.norm_rope.activation import activated, soft_capped
from graphengine.kernels.sample.tiles import best_of_tile


@triton.jit(do_not_specialize=["lanes", "eps", "stop_ids", "ahead"])
def dot_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    delta_ptr,
    slot_ptr,
    out_ptr,
    residual,
    sampler,
    token_ids_ptr,
    peers,
    partial_ptr,
    arrivals_ptr,
    lanes,
    x_stride,
    weight_stride,
    out_stride,
    eps,
    stop_ids,
    ahead,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLITS: tl.constexpr,
    LANE_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for LANE_TILES (1 or 2) times 16 lanes, BLOCK_M weight rows, and a part of K.

    Every tile of 16 lanes goes through the same operations on the same shapes, so that its bits do
    not depend on there being a second one.
    """
    SPLIT_TILES: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    OUTPUTS: tl.constexpr = M // 2 if SWIGLU else M
    B: tl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    lane_0 = tl.program_id(0) * (LANE_TILES * 16) + tl.arange(0, 16)
    lane_1 = lane_0 + 16
    tile = tl.program_id(1)
    split = tl.program_id(2)
    row_ptrs = _row_ptrs(weight_ptr, weight_stride, tile, OUTPUTS, BLOCK_M, SWIGLU)
    k = split * (SPLIT_TILES * BLOCK_K) + tl.arange(0, BLOCK_K)
    norm = _load_norm(residual, tile, OUTPUTS, B)
    wait_for_inputs(PDL, OVERLAP)

    early_0 = _load_lanes(
        lane_0,
        lanes,
        tile,
        slot_ptr,
        squares_ptr,
        residual,
        delta_ptr,
        peers,
        GROUPS,
        OUTPUTS,
        B,
        RANKS,
    )
    early_1 = early_0
    if LANE_TILES == 2:
        early_1 = _load_lanes(
            lane_1,
            lanes,
            tile,
            slot_ptr,
            squares_ptr,
            residual,
            delta_ptr,
            peers,
            GROUPS,
            OUTPUTS,
            B,
            RANKS,
        )
    # Padded lanes hold anything: a row of a product touches no other row.
    x_ptrs_0 = x_ptr + lane_0.to(tl.int64) * x_stride
    x_ptrs_1 = x_ptr + lane_1.to(tl.int64) * x_stride
    y_0 = tl.zeros((16, BLOCK_M), dtype=tl.float32)
    y_1 = y_0
    for _ in range(SPLIT_TILES):
        if EVEN_K:
            weight = tl.load(row_ptrs[None, :] + k[:, None], eviction_policy="evict_first")
        else:
            weight = tl.load(
                row_ptrs[None, :] + k[:, None],
                mask=(k < K)[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
        x = _input_tile(x_ptrs_0, lane_0 < lanes, k, K, EVEN_K)
        y_0 = tl.dot(x, weight, y_0, input_precision="ieee")
        if LANE_TILES == 2:
            x = _input_tile(x_ptrs_1, lane_1 < lanes, k, K, EVEN_K)
            y_1 = tl.dot(x, weight, y_1, input_precision="ieee")
        k += BLOCK_K

    partial_0 = partial_ptr
    partial_1 = partial_ptr
    last = SPLITS == 1
    if SPLITS > 1:
        column = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        width = tl.num_programs(1) * BLOCK_M
        partial_0 = partial_ptr + lane_0.to(tl.int64)[:, None] * width + column[None, :]
        partial_1 = partial_ptr + lane_1.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(partial_0 + split * lanes * width, y_0, mask=(lane_0 < lanes)[:, None])
        if LANE_TILES == 2:
            tl.store(partial_1 + split * lanes * width, y_1, mask=(lane_1 < lanes)[:, None])
        arrival_ptr = arrivals_ptr + tile * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()
        last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(arrival_ptr, 0)
    if last:
        for index in tl.static_range(LANE_TILES):
            lane = lane_0 if index == 0 else lane_1
            y = y_0 if index == 0 else y_1
            if SPLITS > 1:
                partial = partial_0 if index == 0 else partial_1
                y = _sum_splits(partial, (lane < lanes)[:, None], lanes * width, SPLITS, BLOCK_M)
            gate = y
            up = y
            if SWIGLU:
                gate, up = tl.split(tl.reshape(y, (16, B, 2)))
            _epilogue(
                gate,
                up,
                norm,
                early_0 if index == 0 else early_1,
                lane,
                tile,
                lanes,
                eps,
                bias_ptr,
                delta_ptr,
                out_ptr,
                out_stride,
                residual,
                sampler,
                token_ids_ptr,
                stop_ids,
                ahead,
                peers,
                K,
                GROUPS,
                OUTPUTS,
                B,
                SWIGLU,
                RANKS,
                SIZE,
                TIMED,
            )


@triton.jit
def _sum_splits(partial_ptrs, mask, split_stride, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Add up the parts [16, BLOCK_M] of a product that other programs stored, in order."""
    y = tl.zeros((16, BLOCK_M), dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        y += tl.load(partial_ptrs + part * split_stride, mask=mask, other=0.0, cache_modifier=".cg")
    return y


@triton.jit(do_not_specialize=["lanes", "eps", "stop_ids", "ahead"])
def fma_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    delta_ptr,
    slot_ptr,
    out_ptr,
    residual,
    sampler,
    token_ids_ptr,
    peers,
    lanes,
    x_stride,
    weight_stride,
    out_stride,
    eps,
    stop_ids,
    ahead,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SWIGLU: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for BLOCK_M weight rows and LANES lanes, one lane after the other.

    With RANKS the part is only pushed, and `take_sums` does the rest.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    OUTPUTS: tl.constexpr = M // 2 if SWIGLU else M
    BLOCK_OUTPUTS: tl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    tile = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    row_ptrs = _row_ptrs(weight_ptr, weight_stride, tile, OUTPUTS, BLOCK_M, SWIGLU)
    weights = ()
    for step in tl.static_range(TILES):
        weight_ptrs = row_ptrs[:, None] + (step * BLOCK_K + k)[None, :]
        if (step + 1) * BLOCK_K <= K:
            tile_weights = tl.load(weight_ptrs, eviction_policy="evict_first")
        else:
            in_k = (step * BLOCK_K + k < K)[None, :]
            tile_weights = tl.load(weight_ptrs, mask=in_k, other=0.0, eviction_policy="evict_first")
        weights += (tile_weights,)  # type: ignore[assignment]
    norm = _load_norm(residual, tile, OUTPUTS, BLOCK_OUTPUTS)
    wait_for_inputs(PDL, OVERLAP)

    for index in tl.static_range(LANES):
        lane = tl.full((1,), index, tl.int32)
        early = _load_lanes(
            lane,
            lanes,
            tile,
            slot_ptr,
            squares_ptr,
            residual,
            delta_ptr,
            peers,
            GROUPS,
            OUTPUTS,
            BLOCK_OUTPUTS,
            RANKS,
        )
        sums = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        for step in tl.static_range(TILES):
            in_k = step * BLOCK_K + k < K
            x = tl.load(x_ptr + index * x_stride + step * BLOCK_K + k, mask=in_k, other=0.0)
            sums += weights[step].to(tl.float32) * x.to(tl.float32)[None, :]
        y = tl.sum(sums, axis=1)
        if RANKS > 0:
            part = y[None, :] * _inverse_rms(early[1], eps, K, GROUPS)[:, None]
            word, there = _words(lane, tile, lanes, OUTPUTS, BLOCK_OUTPUTS)
            if delta_ptr is not None:
                part += tl.load(delta_ptr + word, mask=there, other=0.0).to(tl.float32)
            push_part(early[3], part, word, there, RANKS, SIZE)
        else:
            gate = y
            up = y
            if SWIGLU:
                gate, up = tl.split(tl.reshape(y, (BLOCK_OUTPUTS, 2)))
            _epilogue(
                gate[None, :],
                up[None, :],
                norm,
                early,
                lane,
                tile,
                lanes,
                eps,
                bias_ptr,
                delta_ptr,
                out_ptr,
                out_stride,
                residual,
                sampler,
                token_ids_ptr,
                stop_ids,
                ahead,
                peers,
                K,
                GROUPS,
                OUTPUTS,
                BLOCK_OUTPUTS,
                SWIGLU,
                0,
                0,
                TIMED,
            )


@triton.jit
def _row_ptrs(
    weight_ptr,
    weight_stride,
    tile,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Where the BLOCK_M weight rows of a tile start.

    Rows past the end repeat the last one: cheaper than a mask on the loads, and never stored. In a
    SwiGLU gate and up rows alternate: one product serves both, and a thread holds the pair.
    """
    row = tl.arange(0, BLOCK_M)
    if SWIGLU:
        first = tile * (BLOCK_M // 2)
        row = tl.minimum(first + row // 2, OUTPUTS - 1) + row % 2 * OUTPUTS
    else:
        row = tl.minimum(tile * BLOCK_M + row, OUTPUTS - 1)
    return weight_ptr + row.to(tl.int64) * weight_stride


@triton.constexpr_function
def _chunk(groups, lanes):
    """Groups whose partial sums one tile holds: at most 4,096 numbers for all its lanes."""
    return max(1, min(triton.next_power_of_2(groups), 4096 // lanes))


@triton.jit
def _input_tile(row_ptrs, inside, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns `k` of the lanes, as [16, BLOCK_K]; 0 past K and past the last lane."""
    mask = inside[:, None]
    if not EVEN_K:
        mask = mask & (k < K)[None, :]
    return tl.load(row_ptrs[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_lanes(
    lane,
    lanes,
    tile,
    slot_ptr,
    squares_ptr,
    residual,
    delta_ptr,
    peers,
    GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    B: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Load what the epilogue needs of its lanes, before the product: slot [L], partial sums of
    squares [chunk, L] (later chunks added to the first), the residual stream [L, B], and what a sum
    over ranks begins with.

    The stream has the delta already: adding it to the product would keep the compiler from fusing
    that sum with the product's last factor, which changes bits.
    """
    L: tl.constexpr = lane.shape[0]
    CHUNK: tl.constexpr = _chunk(GROUPS, L)
    inside = lane < lanes
    slot = tl.load(slot_ptr + lane, mask=inside, other=-1)
    squares = tl.zeros((CHUNK, L), tl.float32)
    for chunk in tl.static_range((GROUPS + CHUNK - 1) // CHUNK):
        group = chunk * CHUNK + tl.arange(0, CHUNK)
        squares += tl.load(
            squares_ptr + group[:, None] * lanes + lane[None, :],
            mask=(group < GROUPS)[:, None] & inside[None, :],
            other=0.0,
        )
    base = tl.zeros((L, B), tl.float32)
    if residual is not None and len(residual) >= STREAM_FIELDS:
        output = tile * B + tl.arange(0, B)
        base = tl.load(
            residual.x + lane.to(tl.int64)[:, None] * OUTPUTS + output[None, :],
            mask=inside[:, None] & (output < OUTPUTS)[None, :],
            other=0.0,
        )
    if delta_ptr is not None and residual is not None and RANKS == 0:
        _, there = _words(lane, tile, lanes, OUTPUTS, B)
        base += load_delta(delta_ptr, lane, tile * B + tl.arange(0, B), there, OUTPUTS)
    begun = ()
    if RANKS > 0:
        word, there = _words(lane, tile, lanes, OUTPUTS, B)
        begun = begin_sum(peers, word, there, RANKS)
    return slot, squares, base, begun


@triton.jit
def load_delta(delta_ptr, lane, column, there, COLUMNS: tl.constexpr):
    """The delta of the products of these lanes and columns, as float32 [L, B]."""
    at = lane.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(delta_ptr + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _words(lane, tile, lanes, OUTPUTS: tl.constexpr, B: tl.constexpr):
    """The words of a tile [L, B] in the ranks' memory, and which of them exist."""
    output = tile * B + tl.arange(0, B)
    word = lane[:, None] * OUTPUTS + output[None, :]
    return word, (lane < lanes)[:, None] & (output < OUTPUTS)[None, :]


@triton.jit
def _inverse_rms(squares, eps, K: tl.constexpr, GROUPS: tl.constexpr):
    """1 / rms of each lane [L] from its partial sums; 1 without them."""
    total = tl.sum(squares, axis=0)
    if GROUPS > 0:
        total = 1.0 / tl.sqrt_rn(total / K + eps)
    else:
        total += 1.0
    return total


@triton.jit
def _load_norm(residual, tile, OUTPUTS: tl.constexpr, B: tl.constexpr):
    """The weights [B] of the norm after the residual stream; zeros where there is no stream."""
    output = tile * B + tl.arange(0, B)
    norm = tl.zeros((B,), tl.float32)
    if residual is not None and len(residual) >= STREAM_FIELDS:
        norm = tl.load(residual.next_norm + output, mask=output < OUTPUTS, other=0.0)
    return norm


@triton.jit
def _epilogue(
    y,
    up,
    norm,
    early,
    lane,
    tile,
    lanes,
    eps,
    bias_ptr,
    delta_ptr,
    out_ptr,
    out_stride,
    residual,
    sampler,
    token_ids_ptr,
    stop_ids,
    ahead,
    peers,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    B: tl.constexpr,
    SWIGLU: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Apply the epilogue to float32 sums [L, B]; a SwiGLU passes its gates as `y`."""
    slot, squares, base, begun = early
    scale = _inverse_rms(squares, eps, K, GROUPS)
    output = tile * B + tl.arange(0, B)
    wide_lane = lane.to(tl.int64)[:, None]
    live = slot >= 0
    in_row = (output < OUTPUTS)[None, :]
    stored = live[:, None] & in_row
    y = y * scale[:, None]
    if RANKS > 0:
        word, there = _words(lane, tile, lanes, OUTPUTS, B)
        if delta_ptr is not None:
            y += tl.load(delta_ptr + word, mask=there, other=0.0).to(tl.float32)
        y = sum_of_ranks(peers, begun, y, word, there, RANKS, SIZE, TIMED)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        y += bias[None, :]
    if delta_ptr is not None and residual is None:
        y += load_delta(delta_ptr, lane, output, stored, 2 * OUTPUTS if SWIGLU else OUTPUTS)
    if SWIGLU:
        up = up * scale[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + OUTPUTS + output, mask=output < OUTPUTS, other=0.0)
            up += bias.to(tl.float32)[None, :]
        if delta_ptr is not None:
            up += load_delta(delta_ptr, lane, OUTPUTS + output, stored, 2 * OUTPUTS)
        y = activated(y, SWIGLU) * up

    if sampler is not None and len(sampler) != SAMPLER_FIELDS:
        y = soft_capped(y, sampler.cap)
    if sampler is not None and len(sampler) >= SAMPLER_FIELDS:
        position = tl.load(sampler.position + lane, mask=live, other=0) + ahead
        ids = output
        if token_ids_ptr is not None:
            ids = tl.load(token_ids_ptr + output, mask=output < OUTPUTS, other=0)
        best, health = best_of_tile(
            y,
            ids[None, :],
            in_row,
            slot[:, None],
            position[:, None],
            live[:, None],
            sampler.temperature,
            sampler.seed,
            sampler.stop_ids,
            sampler.min_len,
            stop_ids,
        )
        TILES: tl.constexpr = (OUTPUTS + B - 1) // B
        at = lane * TILES + tile
        tl.store(sampler.best + at, best, mask=live)
        tl.store(sampler.health + at, health, mask=live)
    elif residual is not None:
        x = base + y
        tl.store(residual.x + wide_lane * OUTPUTS + output[None, :], x, mask=stored)
        if len(residual) >= STREAM_FIELDS:
            scaled = (x * norm.to(tl.float32)[None, :]).to(residual.scaled.dtype.element_ty)
            tl.store(residual.scaled + wide_lane * OUTPUTS + output[None, :], scaled, mask=stored)
        if len(residual) == KEEPING_FIELDS:
            kept = (x * residual.kept_scale).to(residual.kept.dtype.element_ty)
            kept_ptrs = residual.kept + wide_lane * residual.kept_stride + output[None, :]
            tl.store(kept_ptrs, kept, mask=stored)
        squares = tl.sum(tl.where(in_row, x * x, 0.0), axis=1)
        tl.store(residual.squares + tile * lanes + lane, squares, mask=live)
    else:
        out_ptrs = out_ptr + wide_lane * out_stride + output[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)
