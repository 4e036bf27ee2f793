"""The router with its product, for decode: logits and the choice of experts in one launch.

A program loads the weights of a few experts into registers before it waits, and multiplies them
with one lane; the last of a lane's programs to arrive chooses. So a lane's bits do not depend on
others, and are the same in both row families.

Letters: N lanes, H hidden, E experts, k chosen of a lane, T groups of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_rows, check_vector
from graphengine.kernels.core.launching import launcher, take_counters
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.experts.experts_triton import load_rows, load_squares, multiply_rows
from graphengine.kernels.experts.router import (
    Router,
    Routes,
    check_route,
    choice_options,
    choose,
    route_reference,
)
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import LOGITS
from graphengine.kernels.linear.plans import dot_columns
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import check_squares

_ROWS = 2
"""Experts of a program."""
_COLUMNS = 2048
"""Most columns of a tile."""
_WARP_BYTES = 8192
"""Bytes of weights that a warp has in registers: with more warps the choice takes longer."""


def route_product(
    x_NH: torch.Tensor,
    gate_EH: torch.Tensor,
    slot_N: torch.Tensor,
    router: Router,
    *,
    arrivals: torch.Tensor | None,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias_E: torch.Tensor | None = None,
    correction_E: torch.Tensor | None = None,
    factor_E: torch.Tensor | None = None,
    given_Nk: torch.Tensor | None = None,
    expert_Nk: torch.Tensor | None = None,
    pdl: bool = False,
) -> Routes:
    """Run `route` on x @ gate^T / rms: one kernel on the current stream, without a host sync.

    Args:
        x_NH, gate_EH: one dtype of float32, float16, bfloat16; dense rows of x, any stride between
            them; a dense weight.
        arrivals: int32, at least N zeros, which are zeros again afterwards. None: only on a CPU.
        squares_TN, eps: as in `linear`; without them x is already normed.
        bias_E: bias of the product, in the weight's dtype.
        pdl: the launch before may still run; it writes neither weight nor bias nor correction nor
            factors.
        The others as in `route`.

    Returns:
        The result of `route` for float32 logits that are not rounded. ValueError for a shape or
        dtype that does not fit.
    """
    experts = _check_product(x_NH, gate_EH)
    lanes, hidden = x_NH.shape
    routes = check_route(
        lanes, experts, slot_N, router, correction_E, factor_E, given_Nk, expert_Nk
    )
    if bias_E is not None:
        check_vector("bias", bias_E, experts, gate_EH.dtype)
    if squares_TN is not None:
        check_squares(squares_TN, lanes)
    if not use_triton(x_NH):
        call = LinearCall(x_NH, gate_EH, slot_N, squares_TN=squares_TN, eps=eps, bias=bias_E)
        logits = linear_reference(call, LOGITS)
        return route_reference(
            logits,
            slot_N,
            router,
            correction_E=correction_E,
            factor_E=factor_E,
            given_Nk=given_Nk,
            out=routes,
        )
    arrivals = take_counters(arrivals, lanes, f"a router of {lanes} lanes")
    launcher(_route_product_kernel, (lanes, triton.cdiv(experts, _ROWS)))(
        x_NH,
        squares_TN,
        gate_EH,
        bias_E,
        correction_E,
        slot_N,
        torch.empty((lanes, experts), dtype=torch.float32, device=x_NH.device),
        arrivals,
        routes.expert,
        routes.weight,
        given_Nk,
        factor_E,
        lanes,
        x_NH.stride(0),
        eps,
        router.scale,
        K=hidden,
        GROUPS_OF_SQUARES=0 if squares_TN is None else len(squares_TN),
        BLOCK_K_CHOSEN=triton.next_power_of_2(router.top_k),
        **choice_options(router, experts),
        **_tile_options(gate_EH),
        **launch_options(pdl),
    )
    return routes


def _check_product(x_NH: torch.Tensor, gate_EH: torch.Tensor) -> int:
    """Return the number of experts; ValueError unless the weight fits the inputs."""
    check_rows(x_NH=x_NH)
    hidden = x_NH.shape[1]
    if gate_EH.dim() != 2 or gate_EH.shape[1] != hidden or not gate_EH.is_contiguous():
        raise ValueError(
            f"a router's weight must be a dense [E, {hidden}], not {list(gate_EH.shape)}"
        )
    if gate_EH.dtype != x_NH.dtype:
        raise ValueError(f"a router's weight in {gate_EH.dtype}, and inputs in {x_NH.dtype}")
    return len(gate_EH)


def _tile_options(gate_EH: torch.Tensor) -> dict[str, int]:
    """How a program cuts the rows of its experts."""
    hidden = gate_EH.shape[1]
    block_k = min(_COLUMNS, dot_columns(hidden))
    held = _ROWS * -(-hidden // block_k) * block_k * gate_EH.element_size()
    warps = min(16, triton.next_power_of_2(triton.cdiv(held, _WARP_BYTES)))
    return {"ROWS": _ROWS, "BLOCK_K": block_k, "num_warps": warps}


@triton.jit(do_not_specialize=["lanes", "eps", "scale"])
def _route_product_kernel(
    x_ptr,
    squares_ptr,
    gate_ptr,
    bias_ptr,
    correction_ptr,
    slot_ptr,
    logits_ptr,
    arrivals_ptr,
    expert_ptr,
    weight_ptr,
    given_ptr,
    factor_ptr,
    lanes,
    x_stride,
    eps,
    scale,
    K: tl.constexpr,
    GROUPS_OF_SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K_CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a lane and ROWS experts."""
    lane = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    # Rows past the end repeat the last.
    weights = load_rows(gate_ptr + tl.minimum(row, E - 1).to(tl.int64) * K, K, BLOCK_K)
    expert = tl.arange(0, BLOCK_E)
    if correction_ptr is not None:
        correction = tl.load(correction_ptr + expert, mask=expert < E, other=0.0)
    else:
        correction = tl.zeros((BLOCK_E,), tl.float32)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    squares = load_squares(
        squares_ptr,
        tl.full((1,), lane, tl.int64),
        tl.full((1,), 1, tl.int1),
        lanes,
        GROUPS_OF_SQUARES,
        1,
    )
    y = tl.sum(multiply_rows(weights, x_ptr + lane * x_stride, K, ROWS, BLOCK_K), axis=1)
    if GROUPS_OF_SQUARES > 0:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(squares) / K + eps))
    if bias_ptr is not None:
        y += tl.load(bias_ptr + tl.minimum(row, E - 1)).to(tl.float32)
    row_ptr = logits_ptr + lane * E
    tl.store(row_ptr + row, y, mask=row < E)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + lane, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrivals_ptr + lane, 0)
        choose(
            row_ptr,
            correction,
            lane,
            expert_ptr,
            weight_ptr,
            given_ptr,
            factor_ptr,
            scale,
            E,
            BLOCK_E,
            TOP_K,
            BLOCK_K_CHOSEN,
            SCORES,
            LEAST_SUM,
            correction_ptr is not None,
            GROUPS,
            BLOCK_G,
            TOP_GROUPS,
            GROUP_BEST,
        )
