"""Arithmetic of a thread or a warp: `mma.sync` of a tile's columns, exchanges between lanes, and
pairs of bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _multiply_text(groups, x_group, even):
    """Groups of 32 columns: weights of 8 rows, 64 bytes apart, and inputs `x_group` bytes apart."""
    lines = [
        ".reg .pred has, in;",
        f".reg .b32 w<{4 * groups}>, x<{4 * groups}>, none;",
        ".reg .f32 zero, rest0, rest1;",
        "setp.ne.s32 has, $6, 0;",
        "mov.b32 none, 0;",
        "mov.f32 zero, 0f00000000;",
        *(f"mov.f32 ${i}, ${8 + i};" for i in range(4)),
    ]
    for g in range(groups):
        w, x = ([f"{name}{4 * g + i}" for i in range(4)] for name in "wx")
        lines += [f"mov.b32 {each}, 0;" for each in x]
        guard = ""
        if not even:
            lines += [f"mov.b32 {each}, 0;" for each in w]
            lines += [f"setp.gt.s32 in, $7, {g};"]
            guard = "@in "
        lines += [
            f"{guard}ld.shared.v4.b32 {{{', '.join(w)}}}, [$4+{64 * g}];",
            f"@has ld.shared.v4.b32 {{{', '.join(x)}}}, [$5+{x_group * g}];",
        ]
    for g in range(groups):
        for half in (0, 1):
            a, b = (f"{name}{4 * g + 2 * half}" for name in "xw")
            a2, b2 = (f"{name}{4 * g + 2 * half + 1}" for name in "xw")
            c = f"${2 * half}, ${2 * half + 1}"
            if not even:
                lines += [f"setp.gt.s32 in, $7, {g};"]
            lines += [
                f"{'' if even else '@in '}mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{{c}, rest0, rest1}}, {{{a}, none, {a2}, none}}, {{{b}, {b2}}}, "
                f"{{{c}, zero, zero}};"
            ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def multiply(
    w, x, has_row, groups, sums, GROUPS: gl.constexpr, X: gl.constexpr, EVEN: gl.constexpr
):
    """Add the products of a warp's columns of a tile to its sums: two chains of two outputs each.

    A group is 32 columns: 16 bytes of weights and of inputs a thread, two `mma.sync`. Without EVEN
    only the first `groups` are there.
    """
    return gl.inline_asm_elementwise(
        _multiply_text(GROUPS, X, EVEN),
        "=&f,=&f,=&f,=&f,r,r,r,r,f,f,f,f",
        [w, x, has_row, groups, sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _exchange_text(distance):
    return f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"


@gluon.jit
def of_neighbour(value, DISTANCE: gl.constexpr):
    """The float of the thread whose lane differs in one bit."""
    return gl.inline_asm_elementwise(
        _exchange_text(DISTANCE), "=f,f", [value], dtype=gl.float32, is_pure=False, pack=1
    )
