"""Loads and stores of a thread in shared memory, which is addressed in bytes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def shared_base():
    """Address of the program's shared memory."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_shared(at):
    """The word at an address of shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


_PUT_PAIR = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $4, 0;
@p st.shared.v2.f32 [$1], {$2, $3};
mov.b32 $0, 0;
}""")


@gluon.jit
def put_pair_of(at, one, two, mine):
    """Two floats to an address of shared memory, by the threads that have some."""
    gl.inline_asm_elementwise(
        _PUT_PAIR, "=r,r,f,f,r", [at, one, two, mine], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _sum_text(count, pitch):
    lines = [".reg .f32 a, b;", "ld.shared.v2.f32 {$0, $1}, [$2];"]
    for k in range(1, count):
        lines += [
            f"ld.shared.v2.f32 {{a, b}}, [$2+{k * pitch}];",
            "add.f32 $0, $0, a;",
            "add.f32 $1, $1, b;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def sum_pairs(at, COUNT: gl.constexpr, PITCH: gl.constexpr):
    """Sums of pairs of floats in shared memory, added in order."""
    return gl.inline_asm_elementwise(
        _sum_text(COUNT, PITCH),
        "=&f,=&f,r",
        [at],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def put_four(at, v):
    """Four floats to an address of shared memory."""
    gl.inline_asm_elementwise(
        "st.shared.v4.f32 [$1], {$2, $3, $4, $5};\nmov.b32 $0, 0;",
        "=r,r,f,f,f,f",
        [at, v[0], v[1], v[2], v[3]],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take_four(at):
    """Four floats at an address of shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,r",
        [at],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


_TAKE_FOUR = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $5, 0;
mov.f32 $0, 0f00000000;
mov.f32 $1, 0f00000000;
mov.f32 $2, 0f00000000;
mov.f32 $3, 0f00000000;
@p ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];
}""")


@gluon.jit
def take_four_of(at, mine):
    """Four floats at an address of shared memory, or zeros for a thread that has none."""
    return gl.inline_asm_elementwise(
        _TAKE_FOUR,
        "=&f,=&f,=&f,=&f,r,r",
        [at, mine],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def put_float(at, value, mine):
    """A float to an address of shared memory, by the threads that have one."""
    gl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $3, 0;\n@p st.shared.f32 [$1], $2;\nmov.b32 $0, 0;\n}",
        "=r,r,f,r",
        [at, value, mine],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take_float(at):
    """The float at an address of shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1
    )
