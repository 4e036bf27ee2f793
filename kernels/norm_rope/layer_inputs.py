"""Per-layer embeddings, as Gemma 4 has them: inputs of each layer that depend only on the token.

    input of layer l = (norm(product_l * product_scale) + table_scale * table[token]_l) / sqrt(2)

where the product is that of the token's embedding with a linear for all layers. A layer multiplies
its gates by its input.

Letters: N lanes, L layers, P values of an input, V rows of the table, S values of a rank's share of
an input.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, check_weight, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

_HALF = math.sqrt(0.5)
_BLOCK_H = 1024


def rounded(
    x_NH: torch.Tensor, slot_N: torch.Tensor, dtype: torch.dtype, *, pdl: bool = False
) -> torch.Tensor:
    """New `[N, H]` in `dtype`: the live lanes of `x_NH`; padded ones are neither read nor written.

    x_NH    float32, dense rows
    slot_N  int32, -1: a padded lane
    """
    check_rows(x_NH=x_NH)
    lanes, H = x_NH.shape
    check_lanes(lanes, slot_N=slot_N)
    out = x_NH.new_empty(lanes, H, dtype=dtype)
    if not use_triton(x_NH):
        live = live_lanes(slot_N)
        out[live] = x_NH[live].to(dtype)
        return out
    launcher(_rounded_kernel, (lanes, triton.cdiv(H, _BLOCK_H)))(
        x_NH, slot_N, out, x_NH.stride(0), H=H, BLOCK_H=_BLOCK_H, **launch_options(pdl)
    )
    return out


@triton.jit
def _rounded_kernel(
    x_ptr, slot_ptr, out_ptr, x_stride, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    """One program a lane and BLOCK_H values."""
    lane = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) >= 0:
        x = tl.load(x_ptr + lane * x_stride + h, mask=h < H, other=0.0)
        tl.store(out_ptr + lane * H + h, x.to(out_ptr.dtype.element_ty), mask=h < H)


def layer_inputs(
    product_NM: torch.Tensor,
    table_VM: torch.Tensor,
    norm_P: torch.Tensor,
    token_N: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    product_scale: float,
    table_scale: float,
    eps: float,
    pad: int,
    first: int = 0,
    count: int | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """New [N, L, 2 * S] in the table's dtype: room for S gates, then a layer's input.

    Args:
        product_NM: [N, L * P] in the table's dtype; dense rows.
        table_VM: [V, L * P], dense rows; it may exceed 2**31 elements.
        norm_P: any float dtype.
        token_N: int32; a lane with another id than the table has gets the row `pad`, as lanes
            without a token do. slot_N: int32, -1 = padded lane.
        eps: of the norm.
        first, count: the values of each input that are made, S of P; None: all from `first` on.
        pdl: the launch before, whatever it is, may still run; it does not write the table.

    Computed in float32, rounded once. Room and padded lanes are not written. ValueError for a shape
    or dtype that does not fit.
    """
    check_rows(product_NM=product_NM, table_VM=table_VM)
    (lanes, width), rows, size = product_NM.shape, table_VM.shape[0], norm_P.shape[-1]
    check_weight("norm_P", norm_P, size)
    count = size - first if count is None else count
    if table_VM.dtype != product_NM.dtype or table_VM.shape[1] != width or width % size:
        raise ValueError(
            f"the table must be {product_NM.dtype} [V, {width}], of layers with {size} values, not "
            f"{table_VM.dtype} {list(table_VM.shape)}"
        )
    if not 0 <= first < first + count <= size or not 0 <= pad < rows:
        raise ValueError(
            f"values {first} to {first + count - 1} of {size} are wanted, and row {pad} of {rows}"
        )
    check_lanes(lanes, token_N=token_N, slot_N=slot_N)
    layers = width // size
    out = product_NM.new_empty(lanes, layers, 2 * count)
    if not use_triton(product_NM):
        made = _inputs_reference(
            product_NM, table_VM, norm_P, token_N, slot_N, product_scale, table_scale, eps, pad
        )
        live = live_lanes(slot_N)
        out[live, :, count:] = made[:, :, first : first + count]
        return out
    launcher(_layer_inputs_kernel, (lanes, layers))(
        product_NM,
        table_VM,
        norm_P,
        token_N,
        slot_N,
        out,
        product_NM.stride(0),
        table_VM.stride(0),
        rows,
        pad,
        product_scale,
        table_scale,
        eps,
        L=layers,
        P=size,
        FIRST=first,
        COUNT=count,
        BLOCK_P=triton.next_power_of_2(size),
        HALF=_HALF,
        num_warps=1 if size <= 128 else 4,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["rows", "pad", "product_scale", "table_scale", "eps"])
def _layer_inputs_kernel(
    product_ptr,
    table_ptr,
    norm_ptr,
    token_ptr,
    slot_ptr,
    out_ptr,
    product_stride,
    table_stride,
    rows,
    pad,
    product_scale,
    table_scale,
    eps,
    L: tl.constexpr,
    P: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and layer."""
    p = tl.arange(0, BLOCK_P)
    norm = tl.load(norm_ptr + p, mask=p < P, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    layer = tl.program_id(1)
    token = tl.load(token_ptr + lane)
    token = tl.where((token >= 0) & (token < rows), token, pad).to(tl.int64)
    offset = layer * P + p
    x = tl.load(product_ptr + lane * product_stride + offset, mask=p < P, other=0.0)
    row = tl.load(table_ptr + token * table_stride + offset, mask=p < P, other=0.0)
    x = x.to(tl.float32) * product_scale
    x *= 1.0 / tl.sqrt_rn(tl.sum(x * x) / P + eps) * norm
    x = (x + row.to(tl.float32) * table_scale) * HALF
    target = out_ptr + (lane * L + layer) * (2 * COUNT) + COUNT + p - FIRST
    mask = (p >= FIRST) & (p < FIRST + COUNT)
    tl.store(target, x.to(out_ptr.dtype.element_ty), mask=mask)


def _inputs_reference(
    product_NM: torch.Tensor,
    table_VM: torch.Tensor,
    norm_P: torch.Tensor,
    token_N: torch.Tensor,
    slot_N: torch.Tensor,
    product_scale: float,
    table_scale: float,
    eps: float,
    pad: int,
) -> torch.Tensor:
    """Inputs [live lanes, L, P] in plain PyTorch."""
    live, size = live_lanes(slot_N), norm_P.shape[0]
    token = token_N[live].long()
    token = torch.where((token >= 0) & (token < len(table_VM)), token, pad)
    x = product_NM[live].float().unflatten(1, (-1, size)) * product_scale
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_P.float()
    x = x + table_VM[token].float().unflatten(1, (-1, size)) * table_scale
    made: torch.Tensor = (x * _HALF).to(product_NM.dtype)
    return made
