"""Launches of the linears' decode kernels: which one runs, and how its work is cut.

`linear.py` has checked all operands. A packed weight has a kernel of its own, in both row families.
For others there is one of the family `fma`, and two of `dot`: Gluon's, which is faster, where
`linear_gluon.takes` says so; and Triton's for the rest, such as logits.

Letters: N lanes, K input features, M weight rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from graphengine.kernels.comm.items import push_options
from graphengine.kernels.core.dispatch import INTERPRETED, use_triton
from graphengine.kernels.core.launching import launcher, take_counters
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Targets, takes_sums
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.gluon.packed_gluon import packed_kernel
from graphengine.kernels.linear.linear_triton import dot_kernel, fma_kernel
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.packed_cut import PACKED_COLUMNS, PackedArgs, new_cut
from graphengine.kernels.linear.plans import arrivals_needed
from graphengine.kernels.linear.pushed_sums import take_sums

_PACKED_DTYPES = (torch.float16, torch.bfloat16)


def is_launched(call: LinearCall) -> bool:
    """Whether a kernel runs; else the reference does.

    The kernel of packed weights cannot run in Triton's interpreter.
    """
    plain = isinstance(call.weight_MK, torch.Tensor)
    return use_triton(call.x_NK) and (plain or not INTERPRETED)


def launch_linear(call: LinearCall, to: Targets) -> None:
    """Launch the kernel that serves a call.

    ValueError for too few arrivals, and for operands that the kernel of packed weights cannot take.
    """
    weight, plan = call.weight_MK, call.cut
    dtype = call.x_NK.dtype if to.out is None else to.out.dtype
    if not isinstance(weight, torch.Tensor):
        _launch_packed(call, weight, to)
    elif plan.family == "fma":
        _launch_fma(call, weight, to)
    elif to.sampler is None and linear_gluon.takes(
        weight, plan, swiglu=to.gate != 0, out_dtype=dtype
    ):
        _launch_gluon(call, weight, to)
    else:
        _launch_dot(call, weight, to)


def packed_misfit(x_NK: torch.Tensor, weight: PackedWeight) -> str | None:
    """A text about an operand that the kernel of packed weights does not take; None: it takes
    all.
    """
    if x_NK.dtype not in _PACKED_DTYPES:
        return f"packed weights take float16 and bfloat16 inputs, not {x_NK.dtype}"
    if weight.shape[1] % PACKED_COLUMNS:
        return (
            f"packed weights take a multiple of {PACKED_COLUMNS} input features on a GPU, "
            f"not K={weight.shape[1]}"
        )
    if weight.order is not None:
        return f"the decode kernels take columns in order, and {weight.order.numel()} have another"
    return None


def _launch_fma(call: LinearCall, weight: torch.Tensor, to: Targets) -> None:
    inputs = _inputs(call, weight, to)
    if takes_sums(call, to.peers):
        inputs = _inputs(call._replace(bias=None), weight, Targets())
    launcher(fma_kernel, (triton.cdiv(call.rows, call.cut.block_m),))(
        *inputs,
        *(to.sampler, to.token_ids, to.pushed, call.lanes),
        *(call.x_NK.stride(0), weight.stride(0)),
        *_numbers(call, to),
        LANES=call.lanes,
        **_sizes(call, to),
    )
    if to.peers is not None and to.stream is not None:
        take_sums(to.peers, call.slot_N, to.stream, bias=call.bias, pdl=call.launch.pdl)


def _launch_dot(call: LinearCall, weight: torch.Tensor, to: Targets) -> None:
    tiles, (splits, *workspace) = _lane_tiles(call), _split(call)
    launcher(dot_kernel, _grid(call, 16 * tiles, splits))(
        *_inputs(call, weight, to),
        *(to.sampler, to.token_ids, to.pushed, *workspace, call.lanes),
        *(call.x_NK.stride(0), weight.stride(0)),
        *_numbers(call, to),
        LANE_TILES=tiles,
        num_stages=call.cut.stages,
        **_sizes(call, to, splits),
    )


def _launch_gluon(call: LinearCall, weight: torch.Tensor, to: Targets) -> None:
    call = _aligned(call)
    plan, K = call.cut, weight.shape[1]
    L, (splits, *workspace) = 16 * _lane_tiles(call), _split(call)
    out_stride, eps, *_ = _numbers(call, to)
    launcher(linear_gluon.dot_kernel, _grid(call, L, splits))(
        *_inputs(call, weight, to),
        *(to.pushed, *workspace, call.lanes),
        *(each.stride(0) // linear_gluon.ALIGNMENT for each in (call.x_NK, weight)),
        *(out_stride, eps),
        L=L,
        STAGES=linear_gluon.fitting_stages(plan, splits, K, L, call.x_NK),
        WARPS=plan.warps,
        **_sizes(call, to, splits),
    )


def _launch_packed(call: LinearCall, weight: PackedWeight, to: Targets) -> None:
    if (misfit := packed_misfit(call.x_NK, weight)) is not None:
        raise ValueError(misfit)
    call = _aligned(call)
    plan, (M, K), (splits, *workspace) = call.cut, weight.shape, _split(call)
    L = 8 if call.lanes <= 8 else 16 if call.lanes <= 16 else 32
    given = PackedArgs(weight.codes, weight.scales, weight.zeros, weight.row_scales, weight.factors)
    launcher(packed_kernel, _grid(call, L, splits))(
        *_inputs(call, given, to),
        *(to.sampler, to.token_ids, to.pushed, *workspace, call.lanes),
        call.x_NK.stride(0) // linear_gluon.ALIGNMENT,
        *_numbers(call, to),
        new_cut(
            given,
            weight.format,
            plan,
            M=M,
            K=K,
            swiglu=to.gate,
            L=L,
            alone=call.lanes == 1,
            splits=splits,
        ),
        GROUPS=call.groups,
        SPLITS=splits,
        OVERLAP=plan.overlap,
        num_warps=plan.warps,
        **push_options(to.peers),
        **launch_options(call.launch.pdl),
    )


def _aligned(call: LinearCall) -> LinearCall:
    """The call with rows of inputs that can be copied by 16 bytes.

    The address of the inputs must not change the bits of the result.
    """
    x_NK = call.x_NK
    if linear_gluon.is_aligned(x_NK):
        return call
    return call._replace(x_NK=x_NK.clone(memory_format=torch.contiguous_format))


def _inputs(call: LinearCall, weight: torch.Tensor | PackedArgs, to: Targets) -> tuple[Any, ...]:
    """The first operands of each kernel."""
    operands = (call.x_NK, call.squares_TN, weight, call.bias, call.delta_NM, call.slot_N)
    return (*operands, to.out, to.stream)


def _numbers(call: LinearCall, to: Targets) -> tuple[int, float, int, int]:
    """Operands after the strides of the inputs."""
    return 0 if to.out is None else to.out.stride(0), call.eps, to.stop_ids, to.ahead


def _sizes(call: LinearCall, to: Targets, splits: int = 0) -> dict[str, Any]:
    """Constexprs and options of the kernels for plain weights; 0 splits: one that has none."""
    plan, K = call.cut, call.x_NK.shape[1]
    sizes = {
        "M": call.rows,
        "K": K,
        "GROUPS": call.groups,
        "SWIGLU": to.gate,
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "OVERLAP": plan.overlap,
        "num_warps": plan.warps,
        **push_options(to.peers),
        **launch_options(call.launch.pdl),
    }
    if splits:
        sizes |= {"SPLITS": splits, "EVEN_K": K % (plan.block_k * splits) == 0}
    return sizes


def _lane_tiles(call: LinearCall) -> int:
    """Tiles of 16 lanes of a program."""
    return 1 if call.lanes <= 16 else 2


def _grid(call: LinearCall, lanes: int, splits: int) -> tuple[int, int, int]:
    """Lanes count fastest, so that programs on the same weights run together and share L2."""
    return triton.cdiv(call.lanes, lanes), triton.cdiv(call.rows, call.cut.block_m), splits


def _split(call: LinearCall) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """Programs that share the columns, memory for their sums, and counters of those that ended."""
    plan, arrivals = call.cut, call.launch.arrivals
    splits = min(plan.splits, triton.cdiv(call.x_NK.shape[1], plan.block_k))
    if splits == 1:
        return 1, None, None
    arrivals = take_counters(arrivals, arrivals_needed(plan, call.rows), plan)
    rows = triton.cdiv(call.rows, plan.block_m) * plan.block_m
    partial = call.x_NK.new_empty((splits, call.lanes, rows), dtype=torch.float32)
    return splits, partial, arrivals
