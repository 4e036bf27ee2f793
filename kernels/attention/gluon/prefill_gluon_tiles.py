"""Copies of key and value tiles to shared memory, for `prefill_gluon.py`.

One warp requests them, one cache block at a time. With an e4m3 cache four warps copy and convert
them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from graphengine.kernels.core.triton_versions import (
    load_async,
    load_tile,
    reinterpret,
    sync_threads,
)

# 16-bit columns in a row of shared memory, as the TMA and wgmma take it.
COLUMNS = gl.constexpr(64)
# Four e4m3 numbers in one integer become two pairs. The compiler would handle bytes one by one.
_FROM_E4M3 = {
    "fp16": """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
    # An e4m3 number's bits, put in their places in a bfloat16, mean the number times 2**-120.
    "bf16": """{
        .reg .b32 x<2>, signs<2>, power;
        mov.b32 power, 0x7B807B80;
        prmt.b32 signs0, $2, 0, 0x1404;
        prmt.b32 signs1, $2, 0, 0x3424;
        shr.b32 x0, signs0, 4;
        shr.b32 x1, signs1, 4;
        and.b32 x0, x0, 0x07F007F0;
        and.b32 x1, x1, 0x07F007F0;
        lop3.b32 x0, signs0, 0x80008000, x0, 0xEA;
        lop3.b32 x1, signs1, 0x80008000, x1, 0xEA;
        mul.rn.bf16x2 $0, x0, power;
        mul.rn.bf16x2 $1, x1, power;
        }""",
}


@gluon.constexpr_function
def _from_e4m3(dtype):
    return _FROM_E4M3[dtype.name]


@gluon.jit
def bring_tiles(brought, D: gl.constexpr):
    """Code of one warp: bring each tile of keys, then of values, as soon as it has room."""
    source, keys, values, barriers, tiles = brought
    keys_there, values_there, keys_free, values_free, _ = barriers
    for tile in range(tiles):
        _bring_tile(source, keys, keys_there, keys_free, tile, 0, D)
        _bring_tile(source, values, values_there, values_free, tile, 1, D)


@gluon.jit
def _bring_tile(source, buffer, there, free, tile, WHICH: gl.constexpr, D: gl.constexpr):
    """Begin to copy a tile of keys (WHICH 0) or values (1) to its stage."""
    cache, table_row_ptr, last_block, block_rows, column = source
    BLOCK_SIZE: gl.constexpr = cache.block_shape[0]
    TILE: gl.constexpr = buffer.shape[1]
    HALVES: gl.constexpr = D // COLUMNS
    STAGES: gl.constexpr = buffer.shape[0] // HALVES
    stage = tile % STAGES
    # The first use of a stage does not wait: the phase before a barrier's first counts as over.
    mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
    mbarrier.expect(there.index(stage), TILE * D * 2)
    for piece in gl.static_range(TILE // BLOCK_SIZE):
        # After the segment's last block, the last block is copied again.
        index = gl.minimum(tile * (TILE // BLOCK_SIZE) + piece, last_block)
        row = gl.load(table_row_ptr + index) * block_rows + WHICH * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            part = buffer.index(stage * HALVES + half).slice(piece * BLOCK_SIZE, BLOCK_SIZE)
            at = [row, column + half * COLUMNS]
            load_tile(cache, at, there.index(stage), part)


@gluon.jit
def convert_tiles(brought, written, BLOCK_SIZE: gl.constexpr, D: gl.constexpr, G: gl.constexpr):
    """Code of four warps: bring and convert each e4m3 tile of keys, then of values. Two of each are
    being copied to `raw`, where each thread reads only what it copied. Keys and values that were
    not appended are 0.
    """
    source, keys, values, barriers, tiles = brought
    keys_there, values_there, keys_free, values_free, _ = barriers
    TILE: gl.constexpr = keys.shape[1]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    raw = gl.allocate_shared_memory(gl.int32, [4, TILE, D // 4], plain)
    for tile in gl.static_range(2):
        block = _find_blocks(source, tile, written, TILE, BLOCK_SIZE, D)
        _ask_tile(raw, source, block, tile, 0, BLOCK_SIZE, D, G)
        _ask_tile(raw, source, block, tile, 1, BLOCK_SIZE, D, G)
    for tile in range(tiles):
        block = _find_blocks(source, tile + 2, written, TILE, BLOCK_SIZE, D)
        _put_tile(keys, raw, keys_there, keys_free, tile, 0, D)
        _ask_tile(raw, source, block, tile + 2, 0, BLOCK_SIZE, D, G)
        _put_tile(values, raw, values_there, values_free, tile, 1, D)
        _ask_tile(raw, source, block, tile + 2, 1, BLOCK_SIZE, D, G)
    async_copy.wait_group(0)


@gluon.constexpr_function
def _raw_layout(D):
    """Layout of an e4m3 tile as integers of four numbers each: [T, D / 4]."""
    return gl.BlockedLayout([1, 4], [512 // D, D // 16], [4, 1], [1, 0])


@gluon.jit
def _find_blocks(
    source, tile, written, TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, D: gl.constexpr
):
    """The block of each key of a tile; -1 for keys that were not appended."""
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, _raw_layout(D)))
    return gl.load(source[1] + key // BLOCK_SIZE, mask=key < written, other=-1)


@gluon.jit
def _ask_tile(
    raw,
    source,
    block,
    tile,
    WHICH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
):
    """Begin to copy a tile of keys (WHICH 0) or values (1). Tiles begin where blocks do."""
    cache_ptr, _, _, block_rows, column = source
    layout: gl.constexpr = _raw_layout(D)
    key = gl.arange(0, raw.shape[1], gl.SliceLayout(1, layout))
    row = block.to(gl.int64) * block_rows + (WHICH * BLOCK_SIZE + key % BLOCK_SIZE)
    four = column // 4 + gl.arange(0, D // 4, gl.SliceLayout(0, layout))
    ptrs = cache_ptr + (row * (G * D // 4))[:, None] + four[None, :]
    stage = raw.index(tile % 2 * 2 + WHICH)
    load_async(stage, ptrs, mask=(block >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _put_tile(buffer, raw, there, free, tile, WHICH: gl.constexpr, D: gl.constexpr):
    """Convert an e4m3 tile to the buffer's dtype and store it in its stage once it has room."""
    TILE: gl.constexpr = buffer.shape[1]
    STAGES: gl.constexpr = buffer.shape[0] // (D // COLUMNS)
    # Waits for the oldest of four copies.
    async_copy.wait_group(3)
    low, high = gl.inline_asm_elementwise(
        _from_e4m3(buffer.dtype),
        "=r,=r,r",
        [raw.index(tile % 2 * 2 + WHICH).load(_raw_layout(D))],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.join(low, high).reshape([TILE, D // 2])
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D // 2], gl.int32)
    stage = tile % STAGES
    mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
    reinterpret(buffer, gl.int32, [STAGES, TILE, D // 2], layout).index(stage).store(pairs)
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(there.index(stage), count=1)
