"""From packed codes to halves in registers, and from scales to float32, in Gluon.

The codes that `packed.py` lays out become the left operand of `mma.sync` without leaving their
thread: every step here is a permutation of axes that the compiler resolves within registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.linear.kinds import CODES
from graphengine.kernels.linear.packed import BLOCK_HALFWORDS

_BLOCK = gl.constexpr(BLOCK_HALFWORDS)
_BITS = {name: code.bits for name, code in CODES.items()}


# Before sm_90 only an fma multiplies or subtracts pairs of bfloat16. It gives the same bits: a
# product plus -0, and `other` times -1 plus `one`.
_BF16_MINUS_ZERO, _BF16_MINUS_ONE = 0x80008000, 0xBF80BF80


@gluon.constexpr_function
def _product(target, bf16):
    """PTX: the pair `word` times `factor`."""
    if bf16:
        return (
            f"mov.b32 third, {_BF16_MINUS_ZERO:#x};\nfma.rn.bf16x2 {target}, word, factor, third;"
        )
    return f"mul.rn.f16x2 {target}, word, factor;"


@gluon.constexpr_function
def _difference(target, bf16, one="word", other="other"):
    """PTX: the pair `one` minus the pair `other`."""
    if bf16:
        return (
            f"mov.b32 third, {_BF16_MINUS_ONE:#x};\nfma.rn.bf16x2 {target}, {other}, third, {one};"
        )
    return f"sub.rn.f16x2 {target}, {one}, {other};"


@gluon.constexpr_function
def code_bits(code):
    """Bits of a code, by its name."""
    return _BITS[code]


@gluon.constexpr_function
def unpacking(code, bf16, zeros, raw=False):
    """PTX that turns a word of codes into pairs of halves $0, $1, ..., exactly.

    Integers become the last bits of a power of two, which is subtracted again, with the 8 of those
    that have signs (with zeros of 4 bits it stays, see `without_zeros`). Floats keep their fields,
    moved to where a half has them. A product with a power of two then corrects their exponents;
    before it a number may be subnormal. With `raw`, for `e2m1` as bfloat16 alone, that product is
    left to the caller: it is by 2**126.
    """
    if code in ("int4", "uint4"):
        base = 0x43004300 if bf16 else 0x64006400
        lines = []
        for index in range(4):
            lines += [
                f"shr.u32 word, $4, {4 * index};",
                f"lop3.b32 word, word, 0x000f000f, {base:#x}, 0xea;",
                f"mov.b32 ${index}, word;" if zeros else _difference(f"${index}", bf16),
            ]
        middle = 0x00080008 if code == "int4" else 0
        lines.insert(0, f"mov.b32 other, {base + middle:#x};")
    elif code == "int8":
        lines = []
        for index in range(2):
            lines.append(f"shr.u32 word, $2, {8 * index};")
            if bf16:
                # 128 plus the lower 7 bits, minus 128, or minus 256 if the code is negative.
                lines += [
                    "lop3.b32 other, word, 0x00800080, 0x43004300, 0xea;",
                    "lop3.b32 word, word, 0x007f007f, 0x43004300, 0xea;",
                ]
            else:
                lines += [
                    "mov.b32 other, 0x64806480;",
                    "lop3.b32 word, word, 0x00ff00ff, other, 0x6a;",
                ]
            lines.append(_difference(f"${index}", bf16))
    elif code == "e4m3" and not bf16:
        lines = [
            ".reg .b16 low, high;",
            "prmt.b32 word, $2, 0, 0x3120;",
            "mov.b32 {low, high}, word;",
            "cvt.rn.f16x2.e4m3x2 $0, low;",
            "cvt.rn.f16x2.e4m3x2 $1, high;",
        ]
    elif code == "e4m3":
        lines = ["mov.b32 factor, 0x7B807B80;"]
        for index, move in enumerate(("shl.b32 word, $2, 4;", "shr.u32 word, $2, 4;")):
            lines += [
                f"shl.b32 other, $2, {8 - 8 * index};",
                "and.b32 other, other, 0x80008000;",
                move,
                "lop3.b32 word, word, 0x07F007F0, other, 0xea;",
                _product(f"${index}", True),
            ]
    else:
        lines = _unpacking_of_small_floats(bf16, raw)
    return "{\n.reg .b32 word, other, factor, third;\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _unpacking_of_small_floats(bf16, raw):
    """PTX lines for `e2m1`, whose bits lie as `packed.py` moves them: for bfloat16 all floats but
    the fourth only need a shift.
    """

    def finished(target):
        return f"mov.b32 {target}, word;" if raw else _product(target, bf16)

    if bf16:
        lines = ["mov.b32 factor, 0x7E807E80;"]
        for index in range(3):
            lines += [
                f"shl.b32 word, $4, {3 * index};",
                "and.b32 word, word, 0x81C081C0;",
                finished(f"${index}"),
            ]
        high, low = "shr.u32 word, $4, 3;", "shr.u32 word, $4, 7;"
        masks = ("0x01800180", "0x00400040")
    else:
        lines = ["mov.b32 factor, 0x74007400;"]
        for index in range(3):
            lines += [
                f"shl.b32 other, $4, {3 * index};",
                "and.b32 other, other, 0x80008000;",
                f"shl.b32 word, $4, {3 * index + 3};",
                "lop3.b32 word, word, 0x0E000E00, other, 0xea;",
                finished(f"${index}"),
            ]
        high, low = "mov.b32 word, $4;", "shr.u32 word, $4, 4;"
        masks = ("0x0C000C00", "0x02000200")
    lines += [
        "shl.b32 other, $4, 1;",
        "and.b32 other, other, 0x80008000;",
        high,
        f"lop3.b32 other, word, {masks[0]}, other, 0xea;",
        low,
        f"lop3.b32 word, word, {masks[1]}, other, 0xea;",
        finished("$3"),
    ]
    return lines


@gluon.jit
def halves_of(words, x, cut):
    """The values of codes: [streams, rows, columns] in pieces that share a scale.

    They have the dtype of `x`. `words` [streams, blocks of rows, halfwords] are of one or more
    blocks of columns; with small groups of one block, which has several pieces.
    """
    S: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    C: gl.constexpr = words.shape[2] // _BLOCK
    asm: gl.constexpr = unpacking(cut.code, x.dtype == gl.bfloat16, cut.zeros)
    half = x.dtype
    if code_bits(cut.code) == 4:
        h0, h1, h2, h3 = gl.inline_asm_elementwise(
            asm, "=r,=r,=r,=r,r", [words], dtype=(half, half, half, half), is_pure=True, pack=2
        )
        all = gl.join(gl.join(h0, h2), gl.join(h1, h3))
        # Row of 8, thread, word of a row, upper or lower row, half, byte, nibble.
        all = all.reshape([S, R, C, 8, 4, 2, 2, 2, 2, 2])
        if cut.group == 16:
            all = all.permute((0, 1, 6, 3, 2, 4, 9, 7, 5, 8)).reshape([S, R * 16, 16, 2, 2])
            even, odd = gl.split(all)
            p0, p2 = gl.split(even)
            p1, p3 = gl.split(odd)
            pieces = (p0, p1, p2, p3)
        elif cut.group == 32:
            all = all.permute((0, 1, 6, 3, 2, 9, 4, 8, 7, 5)).reshape([S, R * 16, 32, 2])
            pieces = gl.split(all)
        else:
            all = all.permute((0, 1, 6, 3, 2, 5, 9, 4, 8, 7)).reshape([S, R * 16, 64 * C])
            pieces = (all,)  # type: ignore[assignment]
    else:
        h0, h1 = gl.inline_asm_elementwise(
            asm, "=r,=r,r", [words], dtype=(half, half), is_pure=True, pack=2
        )
        # Row of 8, thread, upper or lower row, word of it, half, byte.
        all = gl.join(h0, h1).reshape([S, R, C, 8, 4, 2, 2, 2, 2])
        if cut.group == 16:
            all = all.permute((0, 1, 5, 3, 2, 4, 8, 7, 6)).reshape([S, R * 16, 16, 2])
            pieces = gl.split(all)
        else:
            all = all.permute((0, 1, 5, 3, 2, 8, 4, 6, 7)).reshape([S, R * 16, 32 * C])
            pieces = (all,)  # type: ignore[assignment]
    return pieces


@gluon.jit
def without_zeros(halves, zeros, CODE: gl.constexpr):
    """Subtract the zeros of their groups, uint8 [streams, rows], from codes."""
    bf16: gl.constexpr = halves.dtype == gl.bfloat16
    if CODE == "int4":
        base: gl.constexpr = 0x4300 if bf16 else 0x6400
        other = (zeros.to(gl.int16) | base).to(halves.dtype, bitcast=True)
    else:
        other = zeros.to(gl.int8, bitcast=True).to(gl.float32).to(halves.dtype)
    _, other = gl.broadcast(halves, other[:, :, None])
    asm: gl.constexpr = "{\n.reg .b32 third;\n" + _difference("$0", bf16, "$1", "$2") + "\n}"
    return gl.inline_asm_elementwise(
        asm, "=r,r,r", [halves, other], dtype=halves.dtype, is_pure=True, pack=2
    )


@gluon.jit
def scale_floats(scales):
    """Scales as float32; bytes, which are powers of two, come out doubled (`POWER_FACTOR`)."""
    if scales.dtype == gl.uint8:
        floats = (scales.to(gl.int32) * 0x00800000 + 0x00800000).to(gl.float32, bitcast=True)
    else:
        floats = scales.to(gl.float32)
    return floats
