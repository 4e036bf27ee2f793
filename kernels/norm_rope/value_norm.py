"""RMSNorm without a weight of each head's value, as Gemma 4 has it, before attention.

Where a layer has no linear of values, its values are the normed outputs of the linear of keys.

Letters: N lanes, Q query heads, G kv heads, D head_dim, X = (Q + 2G) * D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

# Values of a program: 8 for each thread of 4 warps.
_BLOCK = 1024


def norm_values(
    qkv_NX: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    of_keys: bool = False,
    pdl: bool = False,
) -> None:
    """v = v / sqrt(mean(v**2) + eps) of each head's value of each live lane, in place.

    Args:
        qkv_NX: [N, (Q + 2G) * D] of any float dtype, a lane is [queries | keys | values]; dense
            rows, any stride between them.
        slot_N: int32, -1 = padded lane.
        of_keys: whether values are the normed keys instead; the old values are not read.
        pdl: the launch before, whatever it is, may still run.

    Computed in float32, rounded once. Padded lanes are neither read nor written. ValueError for a
    shape or dtype that does not fit.
    """
    check_rows(qkv_NX=qkv_NX)
    lanes, width = qkv_NX.shape
    all_heads = num_heads + 2 * num_kv_heads
    if num_kv_heads < 1 or width % all_heads:
        raise ValueError(
            f"qkv rows of {width} values are not those of {num_heads} + 2 * {num_kv_heads} heads"
        )
    check_lanes(lanes, slot_N=slot_N)
    if not use_triton(qkv_NX):
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        norm_values_reference(qkv_NX, slot_N, **sizes, eps=eps, of_keys=of_keys)
        return
    head_dim = width // all_heads
    block_d = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_kv_heads), max(1, _BLOCK // block_d))
    launcher(_norm_values_kernel, (lanes, triton.cdiv(num_kv_heads, heads)))(
        qkv_NX,
        slot_N,
        qkv_NX.stride(0),
        eps,
        G=num_kv_heads,
        D=head_dim,
        SOURCE=(num_heads + (0 if of_keys else num_kv_heads)) * head_dim,
        TARGET=(num_heads + num_kv_heads) * head_dim,
        HEADS=heads,
        BLOCK_D=block_d,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _norm_values_kernel(
    qkv_ptr,
    slot_ptr,
    stride,
    eps,
    G: tl.constexpr,
    D: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and HEADS kv heads."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    mask = (head < G)[:, None] & (d < D)[None, :]
    offset = lane * stride + head[:, None] * D + d[None, :]
    x = tl.load(qkv_ptr + offset + SOURCE, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)
    normed = (x * scale[:, None]).to(qkv_ptr.dtype.element_ty)
    tl.store(qkv_ptr + offset + TARGET, normed, mask=mask)


def norm_values_reference(
    qkv_NX: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    of_keys: bool = False,
) -> None:
    """`norm_values` in plain PyTorch."""
    live = live_lanes(slot_N)
    heads = qkv_NX.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    first = num_heads + num_kv_heads
    source = num_heads if of_keys else first
    x = heads[live, source : source + num_kv_heads].float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    heads[live, first:] = normed.to(qkv_NX.dtype)
