"""Linear layers of decode: a few lanes times a weight matrix that is streamed once.

    linear            y = W x, of a normalised input where its sums of squares are given; SwiGLU
    linear_residual   residual += W x, and what the next norm reads
    linear_sample     the best token of each tile of lm_head's logits, which never reach memory

The order in which a lane's sums are formed follows from the weight and its plan (`plans.py`), never
from N, from the lane's index, or from its neighbours. In the `dot` family each output is one chain
of `mma.sync` over the K tiles in order (one chain a split, splits summed in order). An `mma.sync`
takes 16 lanes, and a program has one or two such tiles; for 64 lanes sm_90 would use `wgmma`, which
sums in another order. In the `fma` family each output is a tile's width of multiply-adds over the K
tiles in order, then their sum.

The kernels are in `linear_triton.py`; on a GPU the family `dot` in half precision has a faster one
in `linear_gluon.py`, except for logits. `linear_gluon.takes` chooses between them.

Letters: N lanes, K input features, M weight rows, V weight rows of lm_head, F ffn width (a SwiGLU
weight is F gate rows, then F up rows), T groups of columns, C tiles of the vocabulary, S slots.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton

from graphengine.kernels.comm.items import Peers, check_part, push_options
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    check_lanes,
    check_rows,
    check_vector,
    check_weight,
    output_rows,
)
from graphengine.kernels.core.launching import ALONE, Launch, launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.linear_triton import (
    ProductArgs,
    SamplerArgs,
    StreamArgs,
    dot_kernel,
    fma_kernel,
    stream_args,
)
from graphengine.kernels.linear.plans import (
    FMA_LANES,
    LinearKind,
    LinearPlan,
    check_kind,
    heuristic_plan,
)
from graphengine.kernels.linear.pushed_sums import BLOCK_H, take_sums
from graphengine.kernels.linear.reference import (
    linear_reference,
    linear_residual_reference,
    linear_squares_reference,
)
from graphengine.kernels.linear.residual import Product, Residual, check_kept, new_product
from graphengine.kernels.norm_rope.activation import Activation, gate_code
from graphengine.kernels.sample.candidates import SamplingTensors, check_parameters, unfiltered
from graphengine.kernels.sample.sampling import sample_tiles_reference

MAX_LANES = 64


def linear(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    swiglu: bool = False,
    activation: Activation = "silu",
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> torch.Tensor:
    """y = x @ weight^T / rms (+ bias), then `silu(gate) * up` with `swiglu`.

    One kernel on the current stream, without a host sync, for 1 to 64 lanes.

    Args:
        x_NK, weight_MK: one dtype of float32, float16, bfloat16; dense rows, any stride between
            them. The weight may exceed 2**31 elements. Rows of x that do not start at multiples of
            16 bytes may cost a copy.
        slot_N: int32, -1 = padded lane.
        squares_TN: float32; a lane's product is divided by sqrt(sum(squares) / K + eps), as
            `residual.Residual` has it. None: it is not divided.
        bias: [M] in the weight's dtype.
        swiglu: weight rows are F gates, then F ups; the output is [N, F].
        activation: of the gates, in place of silu.
        out_dtype: of the output; default x's dtype.
        out: [N, M] ([N, F]), dense rows; must not overlap `x`.
        plan: how the weight is cut; default `heuristic_plan` in the family `dot`, without splits.
        launch: a plan that splits K wants at least `arrivals_needed(plan, M)` of its counters. With
            PDL the next launch too may overlap this one, if `plan.overlap`. Only weights, which no
            kernel writes, are loaded early.

    Returns:
        [N, M] ([N, F]); accumulated and finished in float32, rounded once. Padded lanes are not
        written and do not affect others. Split K allocates a float32 workspace of [N, M] a split,
        M rounded up to whole blocks.

    Raises:
        ValueError: a shape, stride or dtype that does not fit, more than 64 lanes (2 in the family
            `fma`), a plan of another family or of splits in `fma`, too few arrivals.
    """
    kind: LinearKind = "swiglu" if swiglu else "store"
    plan = _check(x_NK, weight_MK, slot_N, squares_TN, bias, kind, plan)
    outputs = weight_MK.shape[0] // 2 if swiglu else weight_MK.shape[0]
    out_dtype = x_NK.dtype if out_dtype is None else out_dtype
    out = output_rows(out, (x_NK.shape[0], outputs), dtype=out_dtype, like=x_NK)
    if not use_triton(x_NK):
        return linear_reference(
            x_NK,
            weight_MK,
            slot_N,
            squares_TN=squares_TN,
            eps=eps,
            bias=bias,
            swiglu=swiglu,
            activation=activation,
            out=out,
        )
    _launch(
        x_NK,
        weight_MK,
        slot_N,
        plan,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        swiglu=swiglu and activation,
        out=out,
        launch=launch,
    )
    return out


def linear_residual(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_M: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    peers: Peers | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> Residual:
    """Add x @ weight^T / rms (+ bias) to residual.x, and write what the norm after it needs.

    With several ranks each computes a part of the product, and all get the sum.

    Args:
        residual: `x` is updated and `scaled` written, both in place; `squares` is not read. The new
            `x` goes to `kept` too, if there is one.
        next_norm_M: weight of the RMSNorm that reads the stream next, of any float dtype.
        peers: x @ weight^T / rms is this rank's float32 part of a product, and the bias is added
            once. All ranks call it with the same numbers of lanes and outputs, after the same
            calls. Parts are summed in the order of the ranks: all get the same bits, those of
            `push_sum`. None: it is the whole product.
        The others as in `linear`.

    Returns:
        The same `x` and `scaled`, with new `squares` [residual_groups(plan, M), N]; with `peers`
        the number of groups may differ. Padded lanes are not written.

    Raises:
        ValueError: as in `linear`; more outputs than `peers` have memory for, or `peers` where no
            kernel runs.
    """
    plan = _check(x_NK, weight_MK, slot_N, squares_TN, bias, "residual", plan)
    lanes, M = x_NK.shape[0], weight_MK.shape[0]
    _check_residual(residual, lanes, M, x_NK.dtype)
    check_part(peers, (lanes, M), launched=use_triton(x_NK))
    check_weight("next_norm", next_norm_M, M)
    squares = residual.x.new_empty(_groups(peers, plan, M), lanes)
    residual = residual._replace(squares=squares)
    if not use_triton(x_NK):
        return linear_residual_reference(
            x_NK,
            weight_MK,
            slot_N,
            residual,
            next_norm_M,
            squares_TN=squares_TN,
            eps=eps,
            bias=bias,
        )
    _launch(
        x_NK,
        weight_MK,
        slot_N,
        plan,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        residual=stream_args(residual, next_norm_M),
        peers=peers,
        launch=launch,
    )
    return residual


def linear_squares(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    peers: Peers | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> Product:
    """Compute x @ weight^T (+ bias) in float32, and what an RMSNorm of it needs.

    Arguments as in `linear_residual`.

    Returns:
        New y [N, M] and squares [residual_groups(plan, M), N]. Padded lanes are not written. The
        product's bits are those that `linear_residual` adds.

    Raises:
        ValueError: as in `linear_residual`.
    """
    plan = _check(x_NK, weight_MK, slot_N, None, bias, "residual", plan)
    check_part(peers, (len(x_NK), len(weight_MK)), launched=use_triton(x_NK))
    M = weight_MK.shape[0]
    product = new_product(x_NK, M, _groups(peers, plan, M))
    if not use_triton(x_NK):
        return linear_squares_reference(x_NK, weight_MK, slot_N, product, bias=bias)
    _launch(
        x_NK,
        weight_MK,
        slot_N,
        plan,
        bias=bias,
        residual=ProductArgs(product.y, product.squares),
        peers=peers,
        launch=launch,
    )
    return product


def linear_sample(
    x_NK: torch.Tensor,
    weight_VK: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    *,
    ahead: int = 1,
    token_ids: torch.Tensor | None = None,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fast sampler folded into lm_head: greedy or by temperature, no top-k, top-p or min-p.

    Args:
        position_N: int32, of the query.
        params: by slot; the filters among them are checked, but not used.
        ahead: positions from the query to the sampled token, whose position determines its noise.
        token_ids: int32 [V], ascending: the token of each weight row, where there are fewer rows
            than tokens; None: row v is token v.
        The others as in `linear`.

    Returns:
        New best int64 [N, C] and health int32 [N, C] of each tile of `plan.block_m` logits, as
        `sample_tiles` leaves them: the same token as from the logits of `linear` with the same
        plan, in float32. Padded lanes are not written.

    Raises:
        ValueError: as in `linear`, or sampling parameters that `sample` would not take.
    """
    plan = _check(x_NK, weight_VK, slot_N, squares_TN, None, "sample", plan)
    lanes, V = x_NK.shape[0], weight_VK.shape[0]
    check_lanes(lanes, position=position_N)
    if token_ids is not None:
        check_vector("token_ids", token_ids, V, torch.int32)
    stop_ids = check_parameters(params)
    if not use_triton(x_NK):
        logits = linear_reference(
            x_NK,
            weight_VK,
            slot_N,
            squares_TN=squares_TN,
            eps=eps,
            out_dtype=torch.float32,
        )
        return sample_tiles_reference(
            logits,
            slot_N,
            position_N,
            unfiltered(params),
            tile=plan.block_m,
            ahead=ahead,
            token_ids=token_ids,
        )
    tiles = triton.cdiv(V, plan.block_m)
    best = torch.empty((lanes, tiles), dtype=torch.int64, device=x_NK.device)
    health = slot_N.new_empty(lanes, tiles)
    _launch(
        x_NK,
        weight_VK,
        slot_N,
        plan,
        squares_TN=squares_TN,
        eps=eps,
        sampler=SamplerArgs(
            position_N,
            params.temperature,
            params.seed,
            params.stop_ids,
            params.min_len,
            best,
            health,
        ),
        token_ids=token_ids,
        stop_ids=stop_ids,
        ahead=ahead,
        launch=launch,
    )
    return best, health


def residual_groups(plan: LinearPlan, M: int) -> int:
    """T of the squares that `linear_residual` leaves: one sum for each program's rows."""
    return -(-M // plan.block_m)


def _groups(peers: Peers | None, plan: LinearPlan, M: int) -> int:
    """T of the squares that a launch leaves; with `fma` and peers `take_sums` leaves them."""
    if peers is not None and plan.family == "fma":
        return -(-M // BLOCK_H)
    return residual_groups(plan, M)


def arrivals_needed(plan: LinearPlan, M: int) -> int:
    """Counters that a launch with this plan uses, for any number of lanes."""
    return 2 * triton.cdiv(M, plan.block_m) if plan.splits > 1 else 0


def _launch(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    plan: LinearPlan,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    swiglu: Activation | Literal[False] = False,
    out: torch.Tensor | None = None,
    residual: StreamArgs | ProductArgs | None = None,
    sampler: SamplerArgs | None = None,
    token_ids: torch.Tensor | None = None,
    stop_ids: int = 0,
    ahead: int = 1,
    peers: Peers | None = None,
    launch: Launch = ALONE,
) -> None:
    """Launch the kernel of the plan's family, on operands that `_check` let pass.

    One of `out`, `residual` and `sampler` is given: where the product goes, or with `peers` the sum
    of all ranks' products.
    """
    lanes, K = x_NK.shape
    M = weight_MK.shape[0]
    tiles = triton.cdiv(M, plan.block_m)
    sizes: dict[str, Any] = {
        "M": M,
        "K": K,
        "GROUPS": 0 if squares_TN is None else squares_TN.shape[0],
        "SWIGLU": gate_code(swiglu),
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "OVERLAP": plan.overlap,
        "num_warps": plan.warps,
        **push_options(peers),
        **launch_options(launch.pdl),
    }
    splits = min(plan.splits, triton.cdiv(K, plan.block_k))
    in_gluon = sampler is None and linear_gluon.takes(
        weight_MK, plan, swiglu=bool(swiglu), out_dtype=x_NK.dtype if out is None else out.dtype
    )
    if in_gluon and not linear_gluon.is_aligned(x_NK):
        # The address of the inputs must not change the bits of the result.
        x_NK = x_NK.clone(memory_format=torch.contiguous_format)
    inputs = (x_NK, squares_TN, weight_MK, bias, slot_N, out, residual)
    strides = (x_NK.stride(0), weight_MK.stride(0))
    out_stride = 0 if out is None else out.stride(0)
    numbers = (lanes, *strides, out_stride, eps, stop_ids, ahead)
    pushed = None if peers is None else peers.tensors
    if plan.family == "fma":
        if peers is not None:
            # It has more programs than can be resident, so they only push.
            inputs = (x_NK, squares_TN, weight_MK, None, slot_N, None, None)
        fma = launcher(fma_kernel, (tiles,))
        fma(*inputs, sampler, token_ids, pushed, *numbers, LANES=lanes, **sizes)
        if peers is not None and residual is not None:
            take_sums(peers, slot_N, residual, bias=bias, pdl=launch.pdl)
        return
    partial = None
    if splits > 1:
        needed = arrivals_needed(plan, M)
        arrivals = launch.arrivals
        if arrivals is None or arrivals.dtype != torch.int32 or arrivals.numel() < needed:
            raise ValueError(f"{plan} wants {needed} int32 arrivals, not {_described(arrivals)}")
        partial = x_NK.new_empty((splits, lanes, tiles * plan.block_m), dtype=torch.float32)
    lane_tiles = 1 if lanes <= 16 else 2
    sizes |= {"SPLITS": splits, "EVEN_K": K % (plan.block_k * splits) == 0}
    counters = launch.arrivals if splits > 1 else None
    # Lanes count fastest, so that programs on the same weights run together and share L2.
    grid = (triton.cdiv(lanes, 16 * lane_tiles), tiles, splits)
    if not in_gluon:
        launcher(dot_kernel, grid)(
            *inputs,
            sampler,
            token_ids,
            pushed,
            partial,
            counters,
            *numbers,
            LANE_TILES=lane_tiles,
            num_stages=plan.stages,
            **sizes,
        )
        return
    launcher(linear_gluon.dot_kernel, grid)(
        *inputs,
        pushed,
        partial,
        counters,
        lanes,
        *(stride // linear_gluon.ALIGNMENT for stride in strides),
        out_stride,
        eps,
        L=16 * lane_tiles,
        STAGES=linear_gluon.fitting_stages(plan, splits, K, 16 * lane_tiles, x_NK),
        WARPS=plan.warps,
        **sizes,
    )


def _check(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    squares_TN: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: LinearKind,
    plan: LinearPlan | None,
) -> LinearPlan:
    """Raise ValueError for operands that do not fit each other; return the plan to take."""
    check_rows(x_NK=x_NK, weight_MK=weight_MK)
    (lanes, K), (M, weight_K) = x_NK.shape, weight_MK.shape
    if lanes > MAX_LANES:
        raise ValueError(f"linear takes 1 to {MAX_LANES} lanes, not {lanes}")
    if weight_K != K:
        raise ValueError(f"x has K={K} input features, the weight {weight_K}")
    if x_NK.dtype != weight_MK.dtype:
        raise ValueError(f"x is {x_NK.dtype}, the weight {weight_MK.dtype}")
    check_lanes(lanes, slot_N=slot_N)
    if squares_TN is not None and (
        squares_TN.dtype != torch.float32
        or squares_TN.dim() != 2
        or squares_TN.shape[1] != lanes
        or not squares_TN.is_contiguous()
    ):
        raise ValueError(
            f"squares must be a dense float32 [T, {lanes}], not {_described(squares_TN)}"
        )
    if bias is not None:
        check_vector("bias", bias, M, weight_MK.dtype)
    if kind == "swiglu" and M % 2:
        raise ValueError(f"swiglu needs as many gate rows as up rows, not {M} rows in all")
    if plan is None:
        return heuristic_plan(kind, M, K, weight_MK.dtype, "dot")._replace(splits=1)
    check_kind(kind, plan.family)
    if plan.family == "fma" and lanes > FMA_LANES:
        raise ValueError(f"the fma family takes 1 to {FMA_LANES} lanes, not {lanes}")
    if plan.family == "fma" and plan.splits > 1:
        raise ValueError(f"the fma family does not split K: {plan}")
    return plan


def _check_residual(residual: Residual, lanes: int, M: int, dtype: torch.dtype) -> None:
    for name, tensor, wanted in (
        ("x", residual.x, torch.float32),
        ("scaled", residual.scaled, dtype),
    ):
        if tensor.shape != (lanes, M) or tensor.dtype != wanted or not tensor.is_contiguous():
            raise ValueError(
                f"residual.{name} must be a dense {wanted} [{lanes}, {M}], not {_described(tensor)}"
            )
    check_kept(residual)


def _described(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
