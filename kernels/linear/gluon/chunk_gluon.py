"""Code shared by the persistent products of many lanes on Hopper, in Gluon: requests of inputs and
weights some steps ahead, the product of a tile, and its store.

A program goes through its tiles of lanes and outputs, and through the columns of each, as one
sequence of steps, each of `BLOCK_K` columns in a stage of shared memory whose barrier expects
inputs and weights. Running programs take tiles of the same outputs, so that they share weights. A
weight's rows come as one box, or as two that are `SECOND` rows apart: a gate's and an up's.

Source: the persistent matmuls of Triton's and Gluon's tutorials, which are CUTLASS's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphengine.kernels.core.triton_versions import load_tile, store_tile, sync_threads


@gluon.jit
def ask_weights(
    inputs,
    weights,
    w,
    arrived,
    step,
    steps,
    SECOND: gl.constexpr,
    LANE_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Request a step's weights for its stage, whose barrier expects the inputs as well.

    SECOND  rows from the first box to the second; 0: there is one box
    """
    B: gl.constexpr = weights.block_shape[0]
    BLOCK_K: gl.constexpr = weights.block_shape[1]
    there = step < steps
    stage = step % STAGES
    barrier = arrived.index(stage)
    bytes: gl.constexpr = (inputs.block_shape[0] + (2 * B if SECOND else B)) * BLOCK_K * 2
    mbarrier.expect(barrier, bytes, pred=there)
    tile = gl.program_id(0) + step // STEPS * gl.num_programs(0)
    output = tile // LANE_TILES * B
    k = step % STEPS * BLOCK_K
    if SECOND:
        load_tile(weights, [output, k], barrier, w.index(stage).slice(0, B), pred=there)
        load_tile(weights, [SECOND + output, k], barrier, w.index(stage).slice(B, B), pred=there)
    else:
        load_tile(weights, [output, k], barrier, w.index(stage), pred=there)


@gluon.jit
def ask_inputs(
    inputs,
    x,
    arrived,
    step,
    steps,
    LANE_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Request a step's inputs for its stage."""
    stage = step % STAGES
    tile = gl.program_id(0) + step // STEPS * gl.num_programs(0)
    lane = tile % LANE_TILES * inputs.block_shape[0]
    at = [lane, step % STEPS * inputs.block_shape[1]]
    load_tile(inputs, at, arrived.index(stage), x.index(stage), pred=step < steps)


@gluon.jit
def multiply_tile(
    inputs,
    weights,
    x,
    w,
    arrived,
    sums,
    step,
    steps,
    SECOND: gl.constexpr,
    LANE_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add the products of a tile's steps, from `step` on, to `sums`, and request later ones.

    Returns the sums, and the step after the tile's.
    """
    for _ in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        sums = warpgroup_mma(x.index(stage), w.index(stage).permute((1, 0)), sums, is_async=True)
        # The `wgmma` of the step before is done in both warp groups: its stage is free.
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        sync_threads()
        ahead = step + STAGES - 1
        ask_weights(inputs, weights, w, arrived, ahead, steps, SECOND, LANE_TILES, STEPS, STAGES)
        ask_inputs(inputs, x, arrived, ahead, steps, LANE_TILES, STEPS, STAGES)
        step += 1
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    return sums, step


@gluon.jit
def store_piece(piece, y, out, at):
    """Store a piece of a result from `y`, once the one before it has been stored from there."""
    tma.store_wait(0)
    sync_threads()
    y.store(piece)
    fence_async_shared()
    sync_threads()
    store_tile(out, at, y)
