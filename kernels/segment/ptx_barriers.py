"""A thread's number and clocks, barriers, and copies of rows that complete one.

In a segment's kernel a scalar is a thread's own: warps have different tasks, and meet at mbarriers
and at named barriers. Gluon's own operations would involve all warps. Shared memory is addressed in
bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# it also gives up if another wait has done so.
_PATIENCE = 1 << 20
_LOOK = 1 << 10

_NOTHING = gl.constexpr("=r,r")


@gluon.jit
def thread_number():
    """This thread's number in the program."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clock():
    """The multiprocessor's cycles, modulo 2**32."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def time_ns():
    """The GPU's time in nanoseconds, modulo 2**32."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


_INIT = gl.constexpr("""{
.reg .pred p;
setp.eq.s32 p, $3, 0;
@p mbarrier.init.shared::cta.b64 [$1], $2;
mov.b32 $0, 0;
}""")


@gluon.jit
def init_barrier(at, count, thread):
    """Thread 0 makes an mbarrier for this many arrivals."""
    gl.inline_asm_elementwise(
        _INIT, "=r,r,r,r", [at, count, thread], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def show_barriers():
    """Make new mbarriers known to the copy engine; a barrier of the program must follow."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\nmov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


_WAIT = gl.constexpr("""{
.reg .pred p;
again:
mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;
@!p bra again;
mov.b32 $0, 0;
}""")


@gluon.jit
def wait_barrier(at, parity):
    """Wait until the phase of this parity of an mbarrier is over."""
    gl.inline_asm_elementwise(_WAIT, "=r,r,r", [at, parity], dtype=gl.int32, is_pure=False, pack=1)


_ARRIVE = gl.constexpr("""{
.reg .pred p;
setp.eq.s32 p, $2, 0;
bar.warp.sync 0xffffffff;
@p mbarrier.arrive.shared::cta.b64 _, [$1];
mov.b32 $0, 0;
}""")


@gluon.jit
def arrive(at, lane):
    """The warp arrives at an mbarrier, once."""
    gl.inline_asm_elementwise(_ARRIVE, "=r,r,r", [at, lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _named(opcode, threads):
    return f"bar.{opcode} $1, {threads};\nmov.b32 $0, 0;"


@gluon.jit
def sync_named(number, THREADS: gl.constexpr):
    """Wait at a named barrier for this many threads."""
    gl.inline_asm_elementwise(
        _named("sync", THREADS), _NOTHING, [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_named(number, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting."""
    gl.inline_asm_elementwise(
        _named("arrive", THREADS), _NOTHING, [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def read_once():
    """The cache policy for data that is not read again."""
    return gl.inline_asm_elementwise(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
        "=l",
        [],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
_COPY = gl.constexpr(f"""{{
.reg .pred first, mine;
.reg .b32 all;
setp.eq.s32 first, $5, 0;
setp.lt.s32 mine, $5, 8;
shl.b32 all, $4, 3;
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], all;
bar.warp.sync 0xffffffff;
@mine {_BULK} [$2], [$3], $4, [$1], $6;
mov.b32 $0, 0;
}}""")


@gluon.jit
def load_rows(barrier, to, from_ptr, size, lane, policy):
    """Begin to copy 8 rows, one for each of a warp's first lanes: `size` bytes from `from_ptr` to
    `to`. All of them complete a phase of the mbarrier.
    """
    gl.inline_asm_elementwise(
        _COPY,
        "=r,r,r,l,r,r,l",
        [barrier, to, from_ptr, size, lane, policy],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
