"""Loads and stores of a thread in global memory, past the L1 cache; waits for words that other
programs store there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Polls of a wait before it gives up; each is a trip to L2 of more than 300 ns. Every `_LOOK` polls
# it also gives up if another wait has done so.
_PATIENCE = 1 << 20
_LOOK = 1 << 10


@gluon.constexpr_function
def _gather_text(flagged):
    """$0: whether the wait ended in vain. $1 to $4: targets, $5 to $8: sources, $9 to $12: which
    exist, $13: the error word.
    """
    words = [[f"w{4 * k + i}" for i in range(4)] for k in range(4)]
    lines = [
        ".reg .pred v0, v1, v2, v3, late, q;",
        ".reg .b32 w<16>, n, e;",
        *(f"setp.ne.s32 v{k}, ${9 + k}, 0;" for k in range(4)),
        "mov.b32 n, 0;",
        "mov.b32 $0, 0;",
        "again:",
        *(
            f"@v{k} ld.relaxed.gpu.global.v4.b32 {{{', '.join(words[k])}}}, [${5 + k}];"
            for k in range(4)
        ),
    ]
    if flagged:
        lines += ["setp.ne.s32 late, n, n;"]
        for k in range(4):
            for word in words[k]:
                lines += [f"setp.eq.and.s32 q, {word}, -1, v{k};", "or.pred late, late, q;"]
        lines += [
            "@!late bra there;",
            "add.s32 n, n, 1;",
            f"and.b32 e, n, {_LOOK - 1};",
            "setp.ne.s32 q, e, 0;",
            "@q bra again;",
            "mov.b32 $0, 1;",
            "ld.relaxed.gpu.global.b32 e, [$13];",
            "setp.ne.s32 q, e, 0;",
            "@q bra there;",
            f"setp.ge.s32 q, n, {_PATIENCE};",
            "@q bra there;",
            "mov.b32 $0, 0;",
            "bra again;",
            "there:",
        ]
    lines += [
        "bar.warp.sync 0xffffffff;",
        *(f"@v{k} st.shared.v4.b32 [${1 + k}], {{{', '.join(words[k])}}};" for k in range(4)),
        "bar.warp.sync 0xffffffff;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def load_pieces(from_ptrs, to, there, error_ptr, FLAGGED: gl.constexpr):
    """Copy up to 4 pieces of 16 bytes a thread to shared memory, with FLAGGED once no word of them
    is all ones. Returns 1 if the wait was in vain.
    """
    a, b, c, d = from_ptrs
    return gl.inline_asm_elementwise(
        _gather_text(FLAGGED),
        "=&r,r,r,r,r,l,l,l,l,r,r,r,r,l",
        [to[0], to[1], to[2], to[3], a, b, c, d, there[0], there[1], there[2], there[3], error_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


_LOAD_PAIR = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $3, 0;
mov.f32 $0, 0f00000000;
mov.f32 $1, 0f00000000;
@p ld.relaxed.gpu.global.v2.f32 {$0, $1}, [$2];
}""")


@gluon.jit
def load_pair(ptr, mine):
    """Two floats, or zeros for a thread that has none."""
    return gl.inline_asm_elementwise(
        _LOAD_PAIR,
        "=&f,=&f,l,r",
        [ptr, mine],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


_STORE_PAIR = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $4, 0;
@p st.relaxed.gpu.global.v2.f32 [$1], {$2, $3};
mov.b32 $0, 0;
}""")


@gluon.jit
def store_pair(ptr, one, two, mine):
    """Two floats, by the threads that have some."""
    gl.inline_asm_elementwise(
        _STORE_PAIR,
        "=r,l,f,f,r",
        [ptr.to(gl.int64), one, two, mine],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


_STORE_HALVES = gl.constexpr("""{
.reg .pred p;
.reg .b32 w;
setp.ne.s32 p, $4, 0;
cvt.rn.bf16x2.f32 w, $3, $2;
@p st.relaxed.gpu.global.b32 [$1], w;
mov.b32 $0, 0;
}""")


@gluon.jit
def store_halves(ptr, one, two, mine):
    """Two floats, rounded to a word of bfloat16, by the threads that have some.

    Rounding leaves no word of all ones: a NaN becomes 0x7fff.
    """
    gl.inline_asm_elementwise(
        _STORE_HALVES,
        "=r,l,f,f,r",
        [ptr.to(gl.int64), one, two, mine],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


_STORE_WORD = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $3, 0;
@p st.relaxed.gpu.global.b32 [$1], $2;
mov.b32 $0, 0;
}""")


@gluon.jit
def store_word(ptr, word, mine):
    """A word, by the threads that have one."""
    gl.inline_asm_elementwise(
        _STORE_WORD, "=r,l,r,r", [ptr, word, mine], dtype=gl.int32, is_pure=False, pack=1
    )


_STORE_ONES = gl.constexpr("""{
.reg .b32 w;
mov.b32 w, -1;
st.global.v4.b32 [$1], {w, w, w, w};
mov.b32 $0, 0;
}""")


@gluon.jit
def store_ones(ptr):
    """16 bytes of ones."""
    gl.inline_asm_elementwise(_STORE_ONES, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)
