"""The kernel of `ceiling.sum_stream`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def sum_stream_kernel(x_ptr, sum_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for index in range(ROUNDS):
        start = tl.cast(index * tl.num_programs(0) + program, tl.int64) * BLOCK
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK))
    tl.store(sum_ptr + program, tl.sum(total))
