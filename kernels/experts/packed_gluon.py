"""Products of decode with experts in 8 and 4 bits, in Gluon: `linear/packed_gluon_product.py` with
an expert's codes, and lanes that are pairs.

A program takes one pair, or a block of pairs of one expert, whose codes are then read once. A
pair's sum is a column of every `mma.sync`, which no other column touches: so both forms give it the
same bits, in blocks of any size.

Which experts there are is known to down two launches earlier: its codes are asked for before the
launch waits for its inputs. Gates and ups follow the router itself and wait for it.

Letters: N lanes, k experts of a lane, P = N * k pairs, L pairs of a program, K input features, M
rows of an expert's weight, B outputs of a program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.experts.held import place_of_expert
from graphengine.kernels.linear.linear_gluon_epilogue import (
    load_rows,
    load_squares,
    rms_factor,
    row_layout,
    squares_layout,
)
from graphengine.kernels.linear.linear_triton import KEEPING_FIELDS, STREAM_FIELDS
from graphengine.kernels.linear.packed_gluon_product import (
    ask_codes,
    ask_scales,
    code_places,
    input_layout,
    inputs_inside,
    load_row_scales,
    multiply_tile,
    new_ring,
    product_layout,
    shared_inputs_layout,
    sum_streams,
)
from graphengine.kernels.norm_rope.activation import gated

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_gated = gluon.jit(gated.fn)
_place_of_expert = gluon.jit(place_of_expert.fn)


@gluon.jit(do_not_specialize=["lanes", "x_pitch", "eps"])
def packed_experts_kernel(
    x_ptr,
    squares_ptr,
    weight,
    bias_ptr,
    slot_ptr,
    expert_ptr,
    share_ptr,
    order_ptr,
    blocks_ptr,
    out_ptr,
    arrivals_ptr,
    stream,
    lanes,
    x_pitch,
    eps,
    M: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    GROUPS: gl.constexpr,
    SWIGLU: gl.constexpr,
    LIMIT: gl.constexpr,
    SLOPE: gl.constexpr,
    L: gl.constexpr,
    CODE: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    STREAMS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN_K: gl.constexpr,
    WARPS: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
    PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program for a block of L (8, 16 or 32) pairs and BLOCK_M weight rows of their expert.

    Without blocks a program takes a single pair, straight from the router. A SwiGLU reads the rows
    of lanes and stores its outputs. Down, which has a stream, reads those of pairs; the last of a
    lane's pairs to arrive adds all of them to the stream, or stores their sum in place of one.
    Pairs of experts that other ranks have arrive with nothing. The other arguments are those of
    `packed_gluon.packed_kernel` and `experts_triton.down_kernel`.
    """
    TILES: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    gl.static_assert(STAGES <= TILES and (STAGES > 1 or TILES == 1))
    OUTPUTS: gl.constexpr = M // 2 if SWIGLU else M
    B: gl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    STREAM: gl.constexpr = BLOCK_K // STREAMS
    BLOCKS_M: gl.constexpr = (OUTPUTS + 7) // 8 if SWIGLU else (OUTPUTS + 15) // 16
    BLOCKS_K: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    R: gl.constexpr = BLOCK_M // 16
    # An only pair is alone in shared memory.
    X_LANES: gl.constexpr = 1 if order_ptr is None else L
    copied: gl.constexpr = input_layout(STREAM, STREAMS, WARPS)
    rows: gl.constexpr = row_layout(B, WARPS)
    codes = new_ring(STAGES, STREAMS, R, STREAM, COLUMNS)
    inputs = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty,
        [STAGES, STREAMS, X_LANES, STREAM],
        shared_inputs_layout(X_LANES),
    )
    tile = gl.program_id(0)

    if SWIGLU:
        _wait_for_inputs(PDL, OVERLAP)
    block = _block(slot_ptr, expert_ptr, blocks_ptr, TOP_K, FIRST, HELD)
    expert = block[0]
    if SWIGLU and expert < 0:
        return
    # Of down a program without an expert asks for nothing, and waits.
    some = expert >= 0
    index = gl.maximum(expert, 0).to(gl.int64)
    if HELD > 0:
        if SWIGLU and expert >= HELD:
            return
        some = some & (expert < HELD)
        index = gl.where(some, expert, 0).to(gl.int64)
    columns = gl.where(some, BLOCKS_K, 0)
    codes_ptr = weight.codes + index * (BLOCKS_M * BLOCKS_K * 256)
    places = code_places(
        codes_ptr, tile * R, BLOCKS_M, 0, BLOCKS_K, STREAMS, R, STREAM, COLUMNS, WARPS
    )
    # In the place of scales that there are not.
    scales, zeros = codes, codes
    for stage in gl.static_range(STAGES):
        ask_codes(codes.index(stage), places, stage, columns, COLUMNS, BLOCK_K, False)
        if stage == 0 and GROUP > 0:
            # With the first tile, which needs some of them.
            of_expert: gl.constexpr = BLOCKS_M * ((K + GROUP - 1) // GROUP) * 16
            scales, zeros = ask_scales(
                weight.scales + index * of_expert,
                weight.zeros + index * of_expert if ZEROS else weight.scales,
                tile * R,
                BLOCKS_M,
                0,
                gl.where(some, (K + GROUP - 1) // GROUP, 0),
                K,
                TILES,
                STREAMS,
                R,
                STREAM,
                GROUP,
                ZEROS,
                WARPS,
            )
        # The last group is closed in the loop, which then has one for each of its tiles.
        if stage < STAGES - 1 or STAGES == 1:
            async_copy.commit_group()
    output = tile * B + gl.arange(0, B, gl.SliceLayout(0, rows))
    row_scales_ptr = weight.row_scales
    if row_scales_ptr is not None:
        row_scales_ptr += index * (BLOCKS_M * 16)
    row_scale, up_scale = load_row_scales(row_scales_ptr, output, BLOCKS_M, SWIGLU)
    if bias_ptr is not None:
        bias_ptr += index * M
    norm, bias, up_bias = load_rows(stream, bias_ptr, output, OUTPUTS, SWIGLU)
    x_at: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, copied))
    x_pair, x_there = _pairs(order_ptr, block, X_LANES, x_at)
    pair, there = _pairs(order_ptr, block, L, gl.SliceLayout(1, rows))
    if not SWIGLU:
        _wait_for_inputs(PDL, OVERLAP)
        if expert < 0:
            return
        if HELD > 0 and expert >= HELD:
            _arrive(
                pair,
                there,
                tile,
                output,
                norm,
                out_ptr,
                share_ptr,
                expert_ptr,
                arrivals_ptr,
                lanes,
                stream,
                M,
                TOP_K,
                FIRST,
                HELD,
            )
            return

    x_row = x_pair // TOP_K if SWIGLU else x_pair
    x_stream = gl.arange(0, STREAMS, gl.SliceLayout(1, gl.SliceLayout(2, copied)))
    k = gl.arange(0, STREAM, gl.SliceLayout(0, gl.SliceLayout(1, copied)))
    k = x_stream[:, None, None] * STREAM + k[None, None, :]
    x_ptrs = x_ptr + (x_row.to(gl.int64) * (x_pitch.to(gl.int64) * 8))[None, :, None] + k
    x_inside = x_there[None, :, None]
    early_x = ()
    for stage in gl.static_range(STAGES):
        inside = inputs_inside(x_inside, k + stage * BLOCK_K, K, EVEN_K)
        x = gl.load(x_ptrs + stage * BLOCK_K, mask=inside, other=0.0, cache_modifier=".cg")
        early_x += (x,)  # type: ignore[assignment]
    squares_at: gl.constexpr = gl.SliceLayout(0, squares_layout(WARPS))
    squares_pair, squares_there = _pairs(order_ptr, block, L, squares_at)
    squares = load_squares(squares_ptr, squares_pair // TOP_K, squares_there, lanes, GROUPS, WARPS)
    for stage in gl.static_range(STAGES):
        inputs.index(stage).store(early_x[stage])

    y = gl.zeros([STREAMS, BLOCK_M, L], gl.float32, product_layout(STREAMS, WARPS))
    for t in range(TILES):
        # Groups complete in order: those of the tiles up to this one have.
        async_copy.wait_group(max(STAGES - 2, 0))
        gl.thread_barrier()
        if TILES > STAGES:
            # The previous tile is no longer read.
            ahead = t + STAGES - 1
            if (t > 0) & (ahead < TILES):
                free = ahead % STAGES
                ask_codes(codes.index(free), places, ahead, columns, COLUMNS, BLOCK_K, False)
                inside = inputs_inside(x_inside, k + ahead * BLOCK_K, K, EVEN_K)
                async_copy.async_copy_global_to_shared(
                    inputs.index(free), x_ptrs + ahead * BLOCK_K, inside
                )
        async_copy.commit_group()
        y = multiply_tile(
            codes.index(t % STAGES),
            inputs.index(t % STAGES),
            scales,
            zeros,
            t,
            y,
            x_ptr,
            CODE,
            COLUMNS,
            GROUP,
            ZEROS,
            WARPS,
        )

    whole, up = sum_streams(y, B, WARPS, SWIGLU)
    whole *= row_scale[None, :]
    up *= up_scale[None, :]
    if GROUPS > 0:
        factor = rms_factor(squares, pair, K, eps)
        whole *= factor[:, None]
        up *= factor[:, None]
    whole += bias[None, :]
    up += up_bias[None, :]
    stored = there[:, None] & (output < OUTPUTS)[None, :]
    out_ptrs = out_ptr + pair.to(gl.int64)[:, None] * OUTPUTS + output[None, :]
    if SWIGLU:
        a = _gated(whole, up, LIMIT, SLOPE)
        gl.store(out_ptrs, a.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        gl.store(out_ptrs, whole, mask=stored)
        gl.thread_barrier()
        _arrive(
            pair,
            there,
            tile,
            output,
            norm,
            out_ptr,
            share_ptr,
            expert_ptr,
            arrivals_ptr,
            lanes,
            stream,
            M,
            TOP_K,
            FIRST,
            HELD,
        )


@gluon.jit
def _arrive(
    pair,
    there,
    tile,
    output,
    norm,
    y_ptr,
    share_ptr,
    expert_ptr,
    arrivals_ptr,
    lanes,
    stream,
    M: gl.constexpr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
):
    """Pairs have what they add, if anything; the last of a lane's adds all of it up."""
    lane = pair // TOP_K
    arrival_ptrs = arrivals_ptr + lane * gl.num_programs(0) + tile
    one = gl.full_like(pair, 1)
    arrived = gl.atomic_add(arrival_ptrs, one, mask=there, sem="acq_rel")
    done = there & (arrived == TOP_K - 1)
    if gl.max(done.to(gl.int32), axis=0) > 0:
        gl.store(arrival_ptrs, gl.zeros_like(pair), mask=done)
        _add_pairs(
            y_ptr,
            share_ptr,
            expert_ptr,
            lane,
            done,
            output,
            norm,
            tile,
            lanes,
            stream,
            M,
            TOP_K,
            FIRST,
            HELD,
        )


@gluon.jit
def _block(
    slot_ptr,
    expert_ptr,
    blocks_ptr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
):
    """The place of the program's expert, -1 where it has none, the first place of its pairs, and
    how many.
    """
    start = gl.program_id(1)
    if blocks_ptr is not None:
        at = blocks_ptr + start
        expert = gl.load(at, cache_modifier=".cg")
        start = gl.load(at + gl.num_programs(1), cache_modifier=".cg")
        count = gl.load(at + 2 * gl.num_programs(1), cache_modifier=".cg")
        # The others of a program without an expert may be anything.
        count = gl.where(expert >= 0, count, 0)
    else:
        # Both at once. The expert of a padded lane may be anything.
        slot = gl.load(slot_ptr + start // TOP_K, cache_modifier=".cg")
        expert = _place_of_expert(gl.load(expert_ptr + start, cache_modifier=".cg"), FIRST, HELD)
        expert = gl.where(slot >= 0, expert, -1)
        count = 1
    return expert, start, count


@gluon.jit
def _pairs(order_ptr, block, L: gl.constexpr, layout: gl.constexpr):
    """The pairs [L] of a program, and which of them are there."""
    _, start, count = block
    row = gl.arange(0, L, layout)
    there = row < count
    pair = start + row
    if order_ptr is not None:
        pair = gl.load(order_ptr + pair, mask=there, other=0, cache_modifier=".cg")
    return pair, there


@gluon.jit
def _add_pairs(
    y_ptr,
    share_ptr,
    expert_ptr,
    lane,
    live,
    output,
    norm,
    tile,
    lanes,
    stream,
    M: gl.constexpr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
):
    """Add the products of lanes' pairs, each by its share and in the order of ranks, to the
    residual stream, and leave what the next norm needs; or store their sum, in place of a stream.
    Pairs of experts that other ranks have add nothing.
    """
    stored = live[:, None] & (output < M)[None, :]
    at = lane.to(gl.int64)[:, None] * M + output[None, :]
    base = gl.zeros_like(at, dtype=gl.float32)
    if len(stream) >= STREAM_FIELDS:
        base = gl.load(stream.x + at, mask=stored, other=0.0)
    products, shares = (), ()
    for rank in gl.static_range(TOP_K):
        pair = lane * TOP_K + rank
        shares += (gl.load(share_ptr + pair, mask=live, other=0.0),)  # type: ignore[assignment]
        y_ptrs = y_ptr + pair.to(gl.int64)[:, None] * M + output[None, :]
        if HELD > 0:
            expert = gl.load(expert_ptr + pair, mask=live, other=0)
            here = _place_of_expert(expert, FIRST, HELD) < HELD
            mask = stored & here[:, None]
            y = gl.load(y_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        else:
            y = gl.load(y_ptrs, mask=stored, other=0.0, cache_modifier=".cg")
        products += (y,)  # type: ignore[assignment]
    total = gl.zeros_like(base)
    for rank in gl.static_range(TOP_K):
        share = gl.broadcast(shares[rank][:, None], total)[0]
        total = gl.fma(share, products[rank], total)
    x = base + total
    gl.store(stream.x + at, x, mask=stored)
    if len(stream) >= STREAM_FIELDS:
        scaled = (x * norm[None, :]).to(stream.scaled.dtype.element_ty)
        gl.store(stream.scaled + at, scaled, mask=stored)
        if len(stream) == KEEPING_FIELDS:
            kept = (x * stream.kept_scale).to(stream.kept.dtype.element_ty)
            kept_rows = lane.to(gl.int64)[:, None] * stream.kept_stride
            gl.store(stream.kept + kept_rows + output[None, :], kept, mask=stored)
        sums = gl.sum(gl.where(stored, x * x, 0.0), axis=1)
        gl.store(stream.squares + tile * lanes + lane, sums, mask=live)
