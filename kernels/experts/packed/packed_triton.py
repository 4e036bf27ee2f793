"""The loop over K of `experts_triton.py` for weights of 8 and 4 bits: for prompt chunks, and for
decode where `packed_gluon.py` does not run.

Codes become numbers of the inputs' dtype in registers, exactly: 16-bit numbers by the bit
operations of the packed linears (`linear/gluon/packed_gluon_codes.py`); in the interpreter or for
float32 inputs one by one. Scales multiply the sums of their groups in float32, so a weight has the
same value as in a linear (`linear/quantised.py`).

Letters: L lanes of a tile, K input features, M rows of an expert's weight, R blocks of 16 rows and
C blocks of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.gluon.packed_gluon_codes import code_bits, unpacking
from graphengine.kernels.linear.packed import BLOCK_HALFWORDS

_BLOCK = tl.constexpr(BLOCK_HALFWORDS)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def packed_chain(
    x_ptrs,
    weight,
    expert,
    tile,
    there,
    M: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Products [L, BLOCK_M] of lanes with weight rows in float32; gates and ups of a SwiGLU
    alternate.

    STEP columns are multiplied at a time, GROUP columns share a scale (0: all), and BLOCK columns
    factors on scales (0: there are none). With MINIMUMS a group has a minimum beside its scale.
    """
    R: tl.constexpr = BLOCK_M // 16
    COLUMNS: tl.constexpr = 256 // code_bits(CODE)
    C: tl.constexpr = STEP // COLUMNS
    BLOCKS_M: tl.constexpr = (M // 2 + 7) // 8 if SWIGLU else (M + 15) // 16
    BLOCKS_K: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    # The codes stand in for missing tensors.
    SCALED: tl.constexpr = weight.scales.dtype.element_ty != tl.int16
    ZEROS: tl.constexpr = weight.zeros.dtype.element_ty != tl.int16
    ROW_SCALED: tl.constexpr = weight.row_scales.dtype.element_ty != tl.int16
    FACTORS: tl.constexpr = (K + BLOCK - 1) // BLOCK if BLOCK > 0 else 1
    # Values of a group: its rows' scales, then their minimums.
    PITCH: tl.constexpr = 32 if MINIMUMS else 16
    # Groups of a step: 2 or 4 in a block of 64 columns, 2 in a block of 32, or 1.
    PIECES: tl.constexpr = STEP // GROUP if GROUP > 0 and GROUP < STEP else 1
    PIECE: tl.constexpr = STEP // PIECES
    # Blocks past the end repeat the last one, whose rows are never stored.
    block = tl.minimum(tile * R + tl.arange(0, R), BLOCKS_M - 1)
    block = expert.to(tl.int64) * BLOCKS_M + block
    row = tl.arange(0, BLOCK_M)
    of_row = tl.minimum(tile * R + row // 16, BLOCKS_M - 1)
    of_row = expert.to(tl.int64) * BLOCKS_M + of_row
    at = tl.arange(0, C * _BLOCK)
    k = tl.arange(0, PIECE)
    y = tl.zeros((L, BLOCK_M), dtype=tl.float32)
    for step in range((K + STEP - 1) // STEP):
        column = at // _BLOCK + step * C
        words = tl.load(
            weight.codes
            + (block * (BLOCKS_K * _BLOCK))[:, None]
            + (at + step * (C * _BLOCK))[None, :],
            mask=(column < BLOCKS_K)[None, :] & (block >= 0)[:, None],
            other=0,
        )
        pieces = _pieces(words, x_ptrs, CODE, PIECES)
        for piece in tl.static_range(PIECES):
            start = step * STEP + piece * PIECE
            inside = there[:, None] & (start + k < K)[None, :]
            x = tl.load(x_ptrs[:, None] + (start + k)[None, :], mask=inside, other=0.0)
            part = pieces[piece]
            if not SCALED:
                y = tl.dot(x, tl.trans(part), y, input_precision="ieee")
            else:
                group = start // GROUP if GROUP > 0 else step * 0
                in_k = group < GROUPS
                if ZEROS:
                    of_zeros = (of_row * GROUPS + group) * 16 + row % 16
                    zeros = tl.load(weight.zeros + of_zeros, mask=in_k & (row >= 0), other=0)
                    part = (part.to(tl.float32) - _zeros(zeros, CODE)[:, None]).to(x.dtype)
                product = tl.dot(x, tl.trans(part), input_precision="ieee")
                of_group = (of_row * GROUPS + group) * PITCH + row % 16
                of_block = of_row
                if BLOCK > 0:
                    of_block = (of_row * FACTORS + start // BLOCK) * PITCH + row % 16
                scales = _floats_of_groups(weight, of_group, of_block, in_k, BLOCK)
                y = tl.fma(product, tl.broadcast_to(scales[None, :], (L, BLOCK_M)), y)
                if MINIMUMS:
                    minimums = _floats_of_groups(weight, of_group + 16, of_block + 16, in_k, BLOCK)
                    sums = tl.broadcast_to(tl.sum(x.to(tl.float32), 1)[:, None], (L, BLOCK_M))
                    y = tl.fma(sums, tl.broadcast_to(-minimums[None, :], (L, BLOCK_M)), y)
    if ROW_SCALED:
        y = y * tl.load(weight.row_scales + of_row * 16 + row % 16)[None, :]
    if SWIGLU:
        y = tl.reshape(tl.permute(tl.reshape(y, (L, R, 2, 8)), (0, 1, 3, 2)), (L, BLOCK_M))
    return y


@triton.jit
def _pieces(words, x_ptrs, CODE: tl.constexpr, PIECES: tl.constexpr):
    """The numbers that the codes in halfwords [R, C * 256] stand for: a tuple of consecutive
    [16 * R, columns].

    A 4-bit integer code stands for itself minus 8; `linear/packed.py` defines the layout of codes.
    """
    R: tl.constexpr = words.shape[0]
    C: tl.constexpr = words.shape[1] // _BLOCK
    if code_bits(CODE) == 4:
        n0, n1, n2, n3 = _numbers_of_4_bits(words, x_ptrs, CODE)
        # Row of 8, thread, word of a row, upper or lower row, half, byte, nibble.
        all = tl.join(tl.join(n0, n2), tl.join(n1, n3))
        all = tl.reshape(all, (R, C, 8, 4, 2, 2, 2, 2, 2))
        if PIECES == 4:
            all = tl.permute(all, (0, 5, 2, 1, 3, 8, 6, 7, 4))
            halves = tl.split(tl.reshape(all, (R * 16, 16, 2, 2)))
            p0, p1 = tl.split(halves[0])
            p2, p3 = tl.split(halves[1])
            pieces = (p0, p1, p2, p3)
        elif PIECES == 2:
            all = tl.permute(all, (0, 5, 2, 1, 7, 3, 8, 6, 4))
            pieces = tl.split(tl.reshape(all, (R * 16, 32, 2)))
        else:
            all = tl.permute(all, (0, 5, 2, 1, 4, 7, 3, 8, 6))
            pieces = (tl.reshape(all, (R * 16, C * 64)),)  # type: ignore[assignment]
    else:
        n0, n1 = _numbers_of_8_bits(words, x_ptrs, CODE)
        # Row of 8, thread, upper or lower row, word of it, half, byte.
        all = tl.reshape(tl.join(n0, n1), (R, C, 8, 4, 2, 2, 2, 2))
        if PIECES == 2:
            all = tl.permute(all, (0, 4, 2, 1, 3, 7, 6, 5))
            pieces = tl.split(tl.reshape(all, (R * 16, 16, 2)))
        else:
            all = tl.permute(all, (0, 4, 2, 1, 5, 3, 7, 6))
            pieces = (tl.reshape(all, (R * 16, C * 32)),)  # type: ignore[assignment]
    return pieces


@triton.jit
def _numbers_of_4_bits(words, x_ptrs, CODE: tl.constexpr):
    """The four numbers of each halfword, in the dtype of x."""
    dtype = x_ptrs.dtype.element_ty
    if _INTERPRETED or dtype == tl.float32:
        words = words.to(tl.int32) & 0xFFFF
        if CODE == "int4" or CODE == "uint4":
            middle: tl.constexpr = 8 if CODE == "int4" else 0
            n0 = ((words & 15) - middle).to(dtype)
            n1 = ((words >> 4 & 15) - middle).to(dtype)
            n2 = ((words >> 8 & 15) - middle).to(dtype)
            n3 = ((words >> 12) - middle).to(dtype)
        else:
            n0 = _small_float(words >> 6 & 7, words >> 15).to(dtype)
            n1 = _small_float(words >> 3 & 7, words >> 12 & 1).to(dtype)
            n2 = _small_float(words & 7, words >> 9 & 1).to(dtype)
            n3 = _small_float(words >> 13 & 1 | (words >> 10 & 3) << 1, words >> 14 & 1).to(dtype)
    else:
        asm: tl.constexpr = unpacking(CODE, dtype == tl.bfloat16, False)
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            asm, "=r,=r,=r,=r,r", [words], dtype=(dtype, dtype, dtype, dtype), is_pure=True, pack=2
        )
    return n0, n1, n2, n3


@triton.jit
def _numbers_of_8_bits(words, x_ptrs, CODE: tl.constexpr):
    """The two numbers of each halfword, in the dtype of x."""
    dtype = x_ptrs.dtype.element_ty
    if _INTERPRETED or dtype == tl.float32:
        words = words.to(tl.int32) & 0xFFFF
        n0 = _number_of_byte(words & 255, CODE).to(dtype)
        n1 = _number_of_byte(words >> 8, CODE).to(dtype)
    else:
        asm: tl.constexpr = unpacking(CODE, dtype == tl.bfloat16, False)
        n0, n1 = tl.inline_asm_elementwise(
            asm, "=r,=r,r", [words], dtype=(dtype, dtype), is_pure=True, pack=2
        )
    return n0, n1


@triton.jit
def _small_float(magnitude, sign):
    """The value of a 4-bit float, computed as half of an integer: twice the value is an integer."""
    exponent = magnitude >> 1
    digit = magnitude & 1
    doubled = tl.where(exponent == 0, digit, (2 + digit) << tl.maximum(exponent - 1, 0))
    return tl.where(sign == 1, -doubled, doubled).to(tl.float32) * 0.5


@triton.jit
def _number_of_byte(byte, CODE: tl.constexpr):
    """The float32 value of an 8-bit code."""
    if CODE == "int8":
        number = (byte - ((byte & 128) << 1)).to(tl.float32)
    else:
        number = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _zeros(zeros, CODE: tl.constexpr):
    if CODE == "int4":
        number = (zeros.to(tl.int32) - 8).to(tl.float32)
    else:
        number = _number_of_byte(zeros.to(tl.int32), CODE)
    return number


@triton.jit
def _floats_of_groups(weight, of_group, of_block, in_k, BLOCK: tl.constexpr):
    """The values [BLOCK_M] of groups, times their blocks' factors; 0 past the last column."""
    scales = tl.load(weight.scales + of_group, mask=in_k & (of_group >= 0), other=0.0)
    floats = _scale_floats(scales)
    if BLOCK > 0:
        factors = tl.load(weight.factors + of_block, mask=in_k & (of_block >= 0), other=0.0)
        floats = floats * factors.to(tl.float32)
    return floats


@triton.jit
def _scale_floats(scales):
    """Scales as float32; scales that are powers of two, stored as bytes, become twice as large
    (`POWER_FACTOR`).
    """
    if scales.dtype == tl.uint8:
        floats = (scales.to(tl.int32) * 0x00800000 + 0x00800000).to(tl.float32, bitcast=True)
    else:
        floats = scales.to(tl.float32)
    return floats
