"""From packed codes to the left operand of `wgmma` in registers, in Gluon.

A block of codes is laid out for `mma.sync`. Its inputs come from registers too, so that 16 columns
may come in any order, and a thread has 4 adjacent ones. `wgmma` takes inputs as they lie in shared
memory: of 16 columns a thread has 2 adjacent ones in the lower 8 and 2 in the upper 8. So here a
thread loads the codes of two threads, and takes from each the pairs that it needs.

Letters: R blocks of rows, C blocks of columns, G groups of columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.linear.gluon.packed_gluon_codes import code_bits, unpacking

UNIT = 64
"""Columns that are converted and multiplied at a time."""

_UNIT = gl.constexpr(UNIT)
# Scaled codes must be numbers that bfloat16 holds, and so must the factors that make them.
RAW_SHIFT = gl.constexpr(32)
_RAW_FACTOR = gl.constexpr(2.0 ** (126 - RAW_SHIFT.value))


@gluon.constexpr_function
def code_layout(columns, own):
    """Layout of codes [4, 4 * C, 64], halfwords in lines of 128 bytes. Of each row of 8 a thread
    holds the 16 bytes that are its `own` in `mma.sync`, or both it and its partner those of both.
    """
    blocks = _UNIT.value // columns
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + ([] if own else [[0, 0, 16]])
    lanes = [[0, 0, 8], [0, 0, 16]] if own else [[0, 0, 0], [0, 0, 8]]
    return gl.DistributedLinearLayout(
        registers + ([[0, 4, 0]] if blocks == 2 else []),
        [*lanes, [0, 0, 32], [0, 1, 0], [0, 2, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 4 * blocks, 64],
    )


@gluon.constexpr_function
def _pair_layout(columns):
    """Layout of halfwords [R, C, row of 8, source, pair, halfword]: a thread's of one source."""
    blocks = _UNIT.value // columns
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, i] for i in (1, 2, 4)] + ([[0, 1, 0, 0, 0, 0]] if blocks == 2 else []),
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]] + [[0, 0, i, 0, 0, 0] for i in (1, 2, 4)],
        [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]],
        [],
        [4, blocks, 8, 2, 2, 8],
    )


@gluon.constexpr_function
def half_layout(group):
    """Layout of halves [64, G, group] of 64 columns: the left operand of `wgmma`."""

    def column(k):
        return [0, k // group, k % group]

    return gl.DistributedLinearLayout(
        [column(1), [8, 0, 0], column(8), column(16), column(32)],
        [column(2), column(4), [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, _UNIT.value // group, group],
    )


@gluon.constexpr_function
def _choice(bits):
    """PTX that puts a pair from each of the source words $1 and $2 into $0, in the order that one
    thread's pairs have. $3 says which pair.
    """
    if bits == 8:
        return "prmt.b32 $0, $1, $2, $3;"
    return """{
        .reg .b32 one, two, up;
        shf.r.wrap.b32 one, $1, $1, $3;
        xor.b32 up, $3, 4;
        shf.l.wrap.b32 two, $2, $2, up;
        lop3.b32 $0, one, two, 0x0f0f0f0f, 0xe4;
        }"""


@gluon.constexpr_function
def _float_choice(bf16, raw):
    """PTX for the halves of 4-bit floats, whose bits lie as `packed.py` moves them; `raw` as in
    `unpacking`.

    $6 to $9 choose the pairs of $4 and $5: they are how far to rotate the bits.
    """
    kind, factor = ("bf16x2", 0x7E807E80) if bf16 else ("f16x2", 0x74007400)
    lines = [f"mov.b32 factor, {factor:#x};"]
    high, low = (0x01800180, 0x00400040) if bf16 else (0x0C000C00, 0x02000200)

    def finished(target):
        return f"mov.b32 {target}, word;" if raw else f"mul.rn.{kind} {target}, word, factor;"

    for index, source in enumerate(("$4", "$5")):
        lines.append(f"shf.l.wrap.b32 word, {source}, {source}, $6;")
        if bf16:
            lines.append("and.b32 word, word, 0x81C081C0;")
        else:
            lines += [
                "and.b32 other, word, 0x80008000;",
                "shl.b32 word, word, 3;",
                "lop3.b32 word, word, 0x0E000E00, other, 0xea;",
            ]
        lines += [
            finished(f"${index}"),
            f"shf.l.wrap.b32 word, {source}, {source}, $7;",
            "and.b32 other, word, 0x80008000;",
            f"shf.l.wrap.b32 word, {source}, {source}, $8;",
            f"lop3.b32 other, word, {high:#x}, other, 0xea;",
            f"shf.l.wrap.b32 word, {source}, {source}, $9;",
            f"lop3.b32 word, word, {low:#x}, other, 0xea;",
            finished(f"${2 + index}"),
        ]
    return "{\n.reg .b32 word, other, factor;\n" + "\n".join(lines) + "\n}"


@gluon.jit
def unit_halves(
    codes,
    inputs,
    CODE: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    OWN: gl.constexpr,
    RAW: gl.constexpr,
):
    """The values of 64 columns of codes [4, 4 * C, 64]: [64, G, GROUP], in `half_layout`.

    They have the dtype of `inputs`. With OWN a thread converts its own codes of `mma.sync`, which
    puts column b0 + 4 b1 + 8 b2 + 2 b3 (bits) of each 16 at place b0 + 2 b1 + 4 b2 + 8 b3: inputs
    must come in that order, too. Otherwise columns stay in order. With ZEROS a power of two is
    still added to codes of 4 bits, as `without_zeros` wants them; with RAW values are 2**126 times
    too small, as `scaled_halves` wants them.
    """
    BITS: gl.constexpr = code_bits(CODE)
    half = inputs.dtype
    BF16: gl.constexpr = half == gl.bfloat16
    loaded = codes.load(code_layout(256 // BITS, OWN))
    loaded = loaded.reshape([4, BITS // 4, 8, 2, 2, 8])
    if OWN:
        words = gl.convert_layout(loaded, _pair_layout(256 // BITS), assert_trivial=True)
        halves = _unpacked(words, inputs, CODE, ZEROS, RAW)
    elif CODE == "e2m1":
        lower, upper, pair = _both_sources(loaded, BITS)
        turns = _turns(pair, BF16)
        halves = gl.inline_asm_elementwise(
            _float_choice(BF16, RAW),
            "=r,=r,=r,=r,r,r,r,r,r,r",
            [lower, upper, turns[0], turns[1], turns[2], turns[3]],
            dtype=(half, half, half, half),
            is_pure=True,
            pack=2,
        )
    else:
        lower, upper, pair = _both_sources(loaded, BITS)
        words = gl.inline_asm_elementwise(
            _choice(BITS),
            "=r,r,r,r",
            [lower, upper, (pair * 0x1111 + 0x6240) if BITS == 8 else pair * 4],
            dtype=gl.int16,
            is_pure=True,
            pack=2,
        )
        halves = _unpacked(words, inputs, CODE, ZEROS, RAW)
    return _in_rows(halves, BITS, GROUP)


@gluon.jit
def _both_sources(loaded, BITS: gl.constexpr):
    """The halfwords of the lower and of the upper columns [4, C, 8, 2, 2, 8], and which pair of
    them a thread takes.
    """
    pairs: gl.constexpr = _pair_layout(256 // BITS)
    # Codes of the lower and of the upper columns.
    lower, upper = gl.split(loaded.permute((0, 1, 2, 4, 5, 3)))
    lower = gl.convert_layout(lower, gl.SliceLayout(4, pairs), assert_trivial=True)
    upper = gl.convert_layout(upper, gl.SliceLayout(4, pairs), assert_trivial=True)
    pair = gl.arange(0, 2, _axis(pairs, 4)).to(gl.int16)[None, None, None, None, :, None]
    zero = gl.zeros([4, BITS // 4, 8, 2, 2, 8], gl.int16, pairs)
    return gl.expand_dims(lower, 4) | zero, gl.expand_dims(upper, 4) | zero, pair | zero


@gluon.jit
def _unpacked(words, inputs, CODE: gl.constexpr, ZEROS: gl.constexpr, RAW: gl.constexpr):
    """The values of halfwords of codes: 4 tensors of halves for 4 bits, 2 for 8."""
    half = inputs.dtype
    asm: gl.constexpr = unpacking(CODE, half == gl.bfloat16, ZEROS, RAW)
    if code_bits(CODE) == 4:
        halves = gl.inline_asm_elementwise(
            asm, "=r,=r,=r,=r,r", [words], dtype=(half, half, half, half), is_pure=True, pack=2
        )
    else:
        halves = gl.inline_asm_elementwise(
            asm, "=r,=r,r", [words], dtype=(half, half), is_pure=True, pack=2
        )
    return halves


@gluon.jit
def _in_rows(halves, BITS: gl.constexpr, GROUP: gl.constexpr):
    """Halves [64, G, GROUP] in `half_layout`, of those of halfwords [4, C, 8, 2, 2, 8]."""
    if BITS == 4:
        # Row of 8, source, pair, 32 columns, upper row, half, upper columns, 16 columns.
        all = gl.join(gl.join(halves[0], halves[1]), gl.join(halves[2], halves[3])).reshape(
            [4, 8, 2, 2, 2, 2, 2, 2, 2]
        )
        all = all.permute((0, 5, 1, 4, 8, 7, 2, 3, 6))
    else:
        # 32 columns, row of 8, source, pair, upper row, 16 columns, half, upper columns.
        all = gl.join(halves[0], halves[1]).reshape([4, 2, 8, 2, 2, 2, 2, 2, 2])
        all = all.permute((0, 5, 2, 1, 6, 8, 3, 4, 7))
    all = all.reshape([64, 64 // GROUP, GROUP])
    return gl.convert_layout(all, half_layout(GROUP), assert_trivial=True)


@gluon.constexpr_function
def _axis(layout, axis):
    """The layout of one axis of six."""
    for other in range(5, -1, -1):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _turns(pair, BF16: gl.constexpr):
    """How far `_float_choice` rotates for `pair`, which is 0 or 1."""
    if BF16:
        turns = (pair * 3, 6 - pair * 5, 6 + pair * 23, 6 + pair * 19)
    else:
        turns = (pair * 3, 6 - pair * 5, 9 - pair * 9, 9 + pair * 19)
    return turns


@gluon.constexpr_function
def is_raw(code, dtype, folds):
    """Whether one product both scales a code and corrects its exponent: then sums are
    2**-RAW_SHIFT of what they should be.
    """
    return folds and code == "e2m1" and dtype == gl.bfloat16


@gluon.jit
def scaled_halves(halves, scales, RAW: gl.constexpr):
    """Multiply halves [64, G, group] by the values of scales [64, G], where that is exact.

    Scales that are powers of two are doubled, as in `scale_floats`. RAW halves are 2**126 times too
    small, and come out 2**RAW_SHIFT times too small; `pack` refuses scales for which that would
    overflow.
    """
    dtype = halves.dtype
    if scales.dtype == gl.uint8:
        exponent = scales.to(gl.int32) + (127 - RAW_SHIFT if RAW else 1)
        factor = (exponent << 7).to(gl.int16).to(dtype, bitcast=True)
    elif RAW:
        factor = (scales.to(gl.float32) * _RAW_FACTOR).to(dtype)
    else:
        factor = scales.to(gl.float32).to(dtype)
    _, factor = gl.broadcast(halves, factor[:, :, None])
    asm: gl.constexpr = (
        "mul.rn.bf16x2 $0, $1, $2;" if dtype == gl.bfloat16 else "mul.rn.f16x2 $0, $1, $2;"
    )
    return gl.inline_asm_elementwise(
        asm, "=r,r,r", [halves, factor], dtype=dtype, is_pure=True, pack=2
    )
