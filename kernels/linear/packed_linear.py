"""The linears of decode with weights of 8 and 4 bits, laid out by `packed.pack`.

The contract is that of `linear.py`: the order in which a lane's sums are formed follows from the
weight, its format and its plan. Both row families run the kernel of `packed_gluon.py`, each with
plans of its own. On a CPU the references dequantise the weight at every call.

A tile's columns are divided into `streams`, whose number follows from the plan's `block_m` and
`warps`. So both are part of the numerics here.

Letters: N lanes, K input features, M weight rows, F ffn width, T groups of columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from graphengine.kernels.comm.items import Peers, check_part, push_options
from graphengine.kernels.core.devices import processors_of
from graphengine.kernels.core.dispatch import INTERPRETED, use_gluon, use_triton
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
from graphengine.kernels.linear.gluon.packed_gluon import packed_kernel
from graphengine.kernels.linear.linear import MAX_LANES, arrivals_needed, residual_groups
from graphengine.kernels.linear.linear_triton import (
    ProductArgs,
    SamplerArgs,
    StreamArgs,
    stream_args,
)
from graphengine.kernels.linear.packed import BLOCK_ROWS, PackedWeight, block_columns, unpack
from graphengine.kernels.linear.packed_cut import PackedArgs, new_cut, streams
from graphengine.kernels.linear.plans import (
    FMA_LANES,
    USUAL_PROCESSORS,
    LinearPlan,
    RowFamily,
    least_programs,
)
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, dequantise
from graphengine.kernels.linear.reference import (
    linear_reference,
    linear_residual_reference,
    linear_squares_reference,
)
from graphengine.kernels.linear.residual import Product, Residual, check_kept, new_product
from graphengine.kernels.norm_rope.activation import Activation, gate_code
from graphengine.kernels.sample.candidates import SamplingTensors, check_parameters, unfiltered
from graphengine.kernels.sample.sampling import sample_tiles_reference

PACKED_COLUMNS = linear_gluon.ALIGNMENT
"""On a GPU the number of a weight's columns must be a multiple of this."""

LEAST_STREAM = 64
"""Fewest columns of a tile that a stream takes."""

_DTYPES = (torch.float16, torch.bfloat16)
# Bytes of a program's ring: two programs fit an SM, and with `fma` their successors do too.
_RING_BYTES: Mapping[RowFamily, int] = {"fma": 48 * 1024, "dot": 96 * 1024}


def packed_linear(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> torch.Tensor:
    """`linear` with a packed weight, which says whether it is a SwiGLU.

    On a GPU x is float16 or bfloat16, codes become that dtype exactly, and K must be a multiple
    of 8.

    Raises:
        ValueError: as in `linear`; a plan that the weight does not fit; columns in another order.
    """
    plan = _check(x_NK, weight, slot_N, squares_TN, bias, plan)
    M = weight.shape[0]
    shape = (x_NK.shape[0], M // 2 if weight.swiglu else M)
    out = output_rows(out, shape, dtype=out_dtype or x_NK.dtype, like=x_NK)
    if not _is_launched(x_NK):
        return packed_linear_reference(
            x_NK,
            weight,
            slot_N,
            squares_TN=squares_TN,
            eps=eps,
            bias=bias,
            activation=activation,
            out=out,
        )
    _launch(
        x_NK,
        weight,
        slot_N,
        plan,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        activation=activation,
        out=out,
        launch=launch,
    )
    return out


def packed_linear_residual(
    x_NK: torch.Tensor,
    weight: PackedWeight,
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
    """`linear_residual` with a packed weight.

    Raises:
        ValueError: as in `packed_linear` and `linear_residual`, and for a SwiGLU.
    """
    if weight.swiglu:
        raise ValueError(f"a SwiGLU of {weight.shape[0]} rows is no sum for a residual stream")
    plan = _check(x_NK, weight, slot_N, squares_TN, bias, plan)
    lanes, M = x_NK.shape[0], weight.shape[0]
    check_part(peers, (lanes, M), launched=_is_launched(x_NK))
    for name, tensor, dtype in (
        ("x", residual.x, torch.float32),
        ("scaled", residual.scaled, x_NK.dtype),
    ):
        if tensor.shape != (lanes, M) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"residual.{name} must be a dense {dtype} [{lanes}, {M}], not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    check_weight("next_norm", next_norm_M, M)
    check_kept(residual)
    squares = residual.x.new_empty(residual_groups(plan, M), lanes)
    residual = residual._replace(squares=squares)
    if not _is_launched(x_NK):
        floats = dequantise(unpack(weight))
        return linear_residual_reference(
            x_NK,
            floats,
            slot_N,
            residual,
            next_norm_M,
            squares_TN=squares_TN,
            eps=eps,
            bias=bias,
        )
    _launch(
        x_NK,
        weight,
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


def packed_linear_squares(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    slot_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    peers: Peers | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> Product:
    """`linear_squares` with a packed weight.

    Raises:
        ValueError: as in `packed_linear` and `linear_squares`, and for a SwiGLU.
    """
    if weight.swiglu:
        raise ValueError(f"a SwiGLU of {weight.shape[0]} rows is no sum for a residual stream")
    plan = _check(x_NK, weight, slot_N, None, bias, plan)
    check_part(peers, (len(x_NK), weight.shape[0]), launched=_is_launched(x_NK))
    product = new_product(x_NK, weight.shape[0], residual_groups(plan, weight.shape[0]))
    if not _is_launched(x_NK):
        floats = dequantise(unpack(weight))
        return linear_squares_reference(x_NK, floats, slot_N, product, bias=bias)
    _launch(
        x_NK,
        weight,
        slot_N,
        plan,
        bias=bias,
        residual=ProductArgs(product.y, product.squares),
        peers=peers,
        launch=launch,
    )
    return product


def packed_linear_sample(
    x_NK: torch.Tensor,
    weight: PackedWeight,
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
    """`linear_sample` with a packed weight: the token is that of `packed_linear`'s float32 logits.

    Raises:
        ValueError: as in `packed_linear` and `linear_sample`, and for a SwiGLU.
    """
    if weight.swiglu:
        raise ValueError(f"a SwiGLU of {weight.shape[0]} rows makes no logits")
    plan = _check(x_NK, weight, slot_N, squares_TN, None, plan)
    lanes, V = x_NK.shape[0], weight.shape[0]
    check_lanes(lanes, position=position_N)
    if token_ids is not None:
        check_vector("token_ids", token_ids, V, torch.int32)
    stop_ids = check_parameters(params)
    if not _is_launched(x_NK):
        logits = x_NK.new_empty((lanes, V), dtype=torch.float32)
        packed_linear_reference(x_NK, weight, slot_N, squares_TN=squares_TN, eps=eps, out=logits)
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
    sampler = SamplerArgs(
        position_N,
        params.temperature,
        params.seed,
        params.stop_ids,
        params.min_len,
        best,
        health,
    )
    _launch(
        x_NK,
        weight,
        slot_N,
        plan,
        squares_TN=squares_TN,
        eps=eps,
        sampler=sampler,
        token_ids=token_ids,
        stop_ids=stop_ids,
        ahead=ahead,
        launch=launch,
    )
    return best, health


def takes_chunk(x_NK: torch.Tensor, weight: PackedWeight) -> bool:
    """Whether `packed_linear_chunk` can run."""
    return use_gluon(x_NK) and _misfit(x_NK, weight) is None


def packed_linear_chunk(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """`packed_linear` of any number of lanes, all live, into `out`; operands have been checked.

    For GPUs on which the kernels of `packed_chunk.py` do not run. Programs that read the same
    weights for different lanes run together, so weights are read from memory about once.
    """
    lanes, (M, K) = len(x_NK), weight.shape
    plan = packed_plan(weight.format, M, K, "dot", processors_of(x_NK))
    live = torch.zeros(lanes, dtype=torch.int32, device=x_NK.device)
    _launch(x_NK, weight, live, plan, bias=bias, activation=activation, out=out)


def packed_linear_reference(
    x_NK: torch.Tensor,
    weight: PackedWeight | QuantisedWeight,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    swiglu: bool = False,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`packed_linear` in plain PyTorch: `linear_reference` of the weight in float32."""
    if isinstance(weight, PackedWeight):
        swiglu, weight = weight.swiglu, unpack(weight)
    return linear_reference(
        x_NK,
        dequantise(weight),
        slot_N,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        swiglu=swiglu,
        activation=activation,
        out=out,
    )


def check_packed_plan(plan: LinearPlan, kind: WeightFormat) -> None:
    """ValueError for a plan that the kernel cannot run with a weight of this format."""
    rows, parts = plan.block_m, streams(plan)
    if rows < BLOCK_ROWS or rows & (rows - 1) or plan.warps & (plan.warps - 1):
        raise ValueError(
            f"{plan}: packed weights take a power of two of at least {BLOCK_ROWS} rows a program "
            "and of warps"
        )
    least = max(LEAST_STREAM, block_columns(kind))
    if plan.block_k & (plan.block_k - 1) or plan.block_k < parts * least:
        raise ValueError(
            f"{plan}: {parts} streams of packed {kind.code} want a power of two of at least "
            f"{parts * least} columns a tile"
        )


def packed_plan(
    kind: WeightFormat, M: int, K: int, family: RowFamily, processors: int = USUAL_PROCESSORS
) -> LinearPlan:
    """A plan for a weight that no tuning table knows, on so many multiprocessors."""
    warps, lanes = 4, 1 if family == "fma" else 32
    if family == "fma":
        block_m = BLOCK_ROWS
    else:
        block_m = 64 if least_programs(processors) <= -(-M // 64) else 32
    parts = warps * BLOCK_ROWS // block_m
    column_bytes = block_m * kind.bits // 8
    # With one lane a stream needs enough columns to hide the other costs of a tile.
    block_k = parts * (max(LEAST_STREAM, 2048 // column_bytes) if lanes == 1 else 128)
    while block_k > LEAST_STREAM * parts and block_k >= 2 * K:
        block_k //= 2
    stages = max(2, min(8, _RING_BYTES[family] // (block_k * (column_bytes + 2 * lanes))))
    return LinearPlan(family, block_m, block_k, stages=stages, warps=warps)


def _check(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    slot_N: torch.Tensor,
    squares_TN: torch.Tensor | None,
    bias: torch.Tensor | None,
    plan: LinearPlan | None,
) -> LinearPlan:
    """Raise ValueError for operands that do not fit each other; return the plan to take."""
    check_rows(x_NK=x_NK)
    (lanes, columns), (M, K) = x_NK.shape, weight.shape
    if lanes > MAX_LANES:
        raise ValueError(f"packed_linear takes 1 to {MAX_LANES} lanes, not {lanes}")
    if columns != K:
        raise ValueError(f"x has K={columns} input features, the weight {K}")
    check_lanes(lanes, slot_N=slot_N)
    if squares_TN is not None and (
        squares_TN.dtype != torch.float32
        or squares_TN.shape[1:] != (lanes,)
        or not squares_TN.is_contiguous()
    ):
        raise ValueError(
            f"squares must be a dense float32 [T, {lanes}], not {squares_TN.dtype} "
            f"{list(squares_TN.shape)}"
        )
    if bias is not None:
        check_vector("bias", bias, M, x_NK.dtype)
    if plan is None:
        plan = packed_plan(weight.format, M, K, "dot")
    check_packed_plan(plan, weight.format)
    if plan.family == "fma" and lanes > FMA_LANES:
        raise ValueError(f"the fma family takes 1 to {FMA_LANES} lanes, not {lanes}")
    if _is_launched(x_NK) and (misfit := _misfit(x_NK, weight)) is not None:
        raise ValueError(misfit)
    return plan


def _is_launched(x_NK: torch.Tensor) -> bool:
    """Whether the kernel runs; else the reference does, as Gluon has no interpreter."""
    return use_triton(x_NK) and not INTERPRETED


def _misfit(x_NK: torch.Tensor, weight: PackedWeight) -> str | None:
    """What the kernel does not take of these operands; None: nothing."""
    if x_NK.dtype not in _DTYPES:
        return f"packed weights take float16 and bfloat16 inputs, not {x_NK.dtype}"
    if weight.shape[1] % PACKED_COLUMNS:
        return (
            f"packed weights take a multiple of {PACKED_COLUMNS} input features on a GPU, "
            f"not K={weight.shape[1]}"
        )
    if weight.order is not None:
        return f"the decode kernels take columns in order, and {weight.order.numel()} have another"
    return None


def _launch(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    slot_N: torch.Tensor,
    plan: LinearPlan,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    residual: StreamArgs | ProductArgs | None = None,
    sampler: SamplerArgs | None = None,
    token_ids: torch.Tensor | None = None,
    stop_ids: int = 0,
    ahead: int = 1,
    peers: Peers | None = None,
    launch: Launch = ALONE,
) -> None:
    """Launch the kernel on operands that `_check` let pass.

    One of `out`, `residual` and `sampler` is given: where the product goes, or with `peers` the sum
    of all ranks' products.
    """
    (lanes, K), M, kind = x_NK.shape, weight.shape[0], weight.format
    if not linear_gluon.is_aligned(x_NK):
        # The address of the inputs must not change the bits of the result.
        x_NK = x_NK.clone(memory_format=torch.contiguous_format)
    tiles = triton.cdiv(M, plan.block_m)
    splits = min(plan.splits, triton.cdiv(K, plan.block_k))
    partial = counters = None
    if splits > 1:
        needed, counters = arrivals_needed(plan, M), launch.arrivals
        if counters is None or counters.dtype != torch.int32 or counters.numel() < needed:
            raise ValueError(f"{plan} wants {needed} int32 arrivals")
        partial = x_NK.new_empty((splits, lanes, tiles * plan.block_m), dtype=torch.float32)
    L = 8 if lanes <= 8 else 16 if lanes <= 16 else 32
    given = PackedArgs(weight.codes, weight.scales, weight.zeros, weight.row_scales)
    # Lanes count fastest, so that programs on the same weights run together and share L2.
    launcher(packed_kernel, (triton.cdiv(lanes, L), tiles, splits))(
        x_NK,
        squares_TN,
        given,
        bias,
        slot_N,
        out,
        residual,
        sampler,
        token_ids,
        None if peers is None else peers.tensors,
        partial,
        counters,
        lanes,
        x_NK.stride(0) // linear_gluon.ALIGNMENT,
        0 if out is None else out.stride(0),
        eps,
        stop_ids,
        ahead,
        new_cut(
            given,
            kind,
            plan,
            M=M,
            K=K,
            swiglu=gate_code(weight.swiglu and activation),
            L=L,
            alone=lanes == 1,
            splits=splits,
        ),
        GROUPS=0 if squares_TN is None else squares_TN.shape[0],
        SPLITS=splits,
        OVERLAP=plan.overlap,
        num_warps=plan.warps,
        **push_options(peers),
        **launch_options(launch.pdl),
    )
