"""SwiGLU: silu(gate) * up, for the wide products of prefill. (`linear` fuses it for decode.)

Some models have another `Activation`: Gemma's GeGLU has gelu. Other models have no gates, and apply
a squared ReLU or a gelu to the ups.

Letters: N lanes, F ffn width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

_BLOCK_F = 1024

Activation = Literal["silu", "gelu_tanh"]
"""The activation of a gate: x * sigmoid(x), or gelu(x) with its tanh approximation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedSwiglu:
    """gate * sigmoid(slope * gate) * (up + 1) of clamped gates and ups, as gpt-oss has it.

    limit  most of a gate, and of an up's magnitude
    """

    limit: float = 7.0
    slope: float = 1.702

    def __post_init__(self) -> None:
        if not (self.limit > 0 and self.slope > 0):
            raise ValueError(f"limit={self.limit} and slope={self.slope} must be positive")


Gating = Activation | ClampedSwiglu
"""An expert's function of a gate and its up: the activated gate times the up, or a clamped
SwiGLU."""

UNGATED_LIMIT = -1.0
"""A kernel's LIMIT where products have no gates, and go through a squared ReLU."""
GELU_SLOPE = -1.0
"""A kernel's SLOPE where gates go through a gelu."""

_SILU, _GELU_TANH = tl.constexpr(1), tl.constexpr(2)


def gate_code(activation: Activation | Literal[False]) -> int:
    """An activation's number in a kernel's constants; 0: there is no gate."""
    codes = {False: 0, "silu": _SILU.value, "gelu_tanh": _GELU_TANH.value}
    if activation not in codes:
        raise ValueError(f"activation={activation!r} must be 'silu' or 'gelu_tanh'")
    return int(codes[activation])


def gating_constants(gating: Gating) -> dict[str, float]:
    """Constexprs of a kernel that calls `gated`. ValueError for an activation that is not known."""
    if isinstance(gating, ClampedSwiglu):
        return {"LIMIT": gating.limit, "SLOPE": gating.slope}
    is_gelu = gate_code(gating) == _GELU_TANH.value
    return {"LIMIT": 0.0, "SLOPE": GELU_SLOPE if is_gelu else 0.0}


def swiglu(
    gate_up_N2F: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """silu(gate) * up of each live lane, where a lane of the input is [gate F | up F].

    Args:
        gate_up_N2F: float32, float16 or bfloat16; dense rows, any stride between them.
        slot_N: int32, -1 = padded lane.
        activation: in place of silu.
        out: [N, F] in the input's dtype; may be the gate half of the input itself.
        pdl: the launch before, whatever it is, may still run.

    Returns:
        [N, F] in the input's dtype, computed in float32 and rounded once. Padded lanes are neither
        read nor written. ValueError for an odd row length or a shape or dtype that does not fit.
    """
    check_rows(gate_up_N2F=gate_up_N2F)
    lanes, width = gate_up_N2F.shape
    if width % 2:
        raise ValueError(f"gate_up rows must hold two equal halves, not {width} values")
    check_lanes(lanes, slot_N=slot_N)
    out = output_rows(out, (lanes, width // 2), dtype=gate_up_N2F.dtype, like=gate_up_N2F)
    if not use_triton(gate_up_N2F):
        return swiglu_reference(gate_up_N2F, slot_N, activation=activation, out=out)
    F = width // 2
    launcher(_swiglu_kernel, (lanes, triton.cdiv(F, _BLOCK_F)))(
        gate_up_N2F,
        slot_N,
        out,
        gate_up_N2F.stride(0),
        out.stride(0),
        F=F,
        BLOCK_F=_BLOCK_F,
        ACTIVATION=gate_code(activation),
        **launch_options(pdl),
    )
    return out


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,
    slot_ptr,
    out_ptr,
    gate_up_stride,
    out_stride,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_F outputs."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = f < F
    source = gate_up_ptr + lane * gate_up_stride + f
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    y = (activated(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + lane * out_stride + f, y, mask=mask)


def _checked_elementwise(
    x_NF: torch.Tensor, slot_N: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """The output of a function of each element; ValueError for a shape or dtype that misfits."""
    check_rows(x_NF=x_NF)
    check_lanes(len(x_NF), slot_N=slot_N)
    return output_rows(out, tuple(x_NF.shape), dtype=x_NF.dtype, like=x_NF)


def squared_relu(
    x_NF: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """max(x, 0)**2 of each live lane.

    Args:
        x_NF: float32, float16 or bfloat16; dense rows, any stride between them.
        slot_N: int32, -1 = padded lane.
        out: [N, F] in the input's dtype; may be the input itself.
        pdl: as in `swiglu`.

    Returns:
        [N, F] in the input's dtype, computed in float32 and rounded once. Padded lanes are neither
        read nor written. ValueError for a shape or dtype that does not fit.
    """
    out = _checked_elementwise(x_NF, slot_N, out)
    lanes, F = x_NF.shape
    if not use_triton(x_NF):
        return squared_relu_reference(x_NF, slot_N, out=out)
    launcher(_squared_relu_kernel, (lanes, triton.cdiv(F, _BLOCK_F)))(
        x_NF,
        slot_N,
        out,
        x_NF.stride(0),
        out.stride(0),
        F=F,
        BLOCK_F=_BLOCK_F,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _squared_relu_kernel(
    x_ptr,
    slot_ptr,
    out_ptr,
    x_stride,
    out_stride,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_F outputs."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = f < F
    x = tl.load(x_ptr + lane * x_stride + f, mask=mask, other=0.0).to(tl.float32)
    y = squared(x).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + lane * out_stride + f, y, mask=mask)


@triton.jit
def squared(x):
    """max(x, 0)**2 of float32. NaN stays NaN."""
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x * x


def gelu(
    x_NF: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    tanh: bool,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x * Phi(x) of each live lane, with Phi the normal distribution.

    Args:
        tanh: take the tanh approximation of Phi.
        The others as in `squared_relu`.

    Returns:
        [N, F] in the input's dtype, computed in float32 and rounded once. Padded lanes are neither
        read nor written. ValueError for a shape or dtype that does not fit.
    """
    out = _checked_elementwise(x_NF, slot_N, out)
    lanes, F = x_NF.shape
    if not use_triton(x_NF):
        return gelu_reference(x_NF, slot_N, tanh=tanh, out=out)
    launcher(_gelu_kernel, (lanes, triton.cdiv(F, _BLOCK_F)))(
        x_NF,
        slot_N,
        out,
        x_NF.stride(0),
        out.stride(0),
        F=F,
        BLOCK_F=_BLOCK_F,
        TANH=tanh,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _gelu_kernel(
    x_ptr,
    slot_ptr,
    out_ptr,
    x_stride,
    out_stride,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    TANH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_F outputs."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = f < F
    x = tl.load(x_ptr + lane * x_stride + f, mask=mask, other=0.0).to(tl.float32)
    if TANH:
        y = activated(x, _GELU_TANH)
    else:
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + lane * out_stride + f, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu(x):
    """x * sigmoid(x) of a float32; -0.0 where exp(-x) overflows."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """A float32 after the activation of a `gate_code`; -0.0 where the exponential overflows.

    As tanh(y) = 2 sigmoid(2 y) - 1, gelu is x * sigmoid(2 y), with y the argument of its tanh.
    """
    inner = x
    if ACTIVATION == _GELU_TANH:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-inner))


@triton.jit
def soft_capped(x, cap):
    """cap * tanh(x / cap) of a float32, within 2e-7 of the cap."""
    return (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (x / cap)))) * cap


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr, SLOPE: tl.constexpr):
    """silu(gate) * up of float32, with a SLOPE below 0 gelu(gate) * up, or with a LIMIT a
    `ClampedSwiglu`. NaN stays NaN.

    Gluon compiles this text, too, and cannot call `activated`, which belongs to Triton.
    """
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate / (1.0 + tl.exp(-SLOPE * gate)) * (up + 1.0)
    elif SLOPE < 0:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-inner)) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


def gated_reference(gate: torch.Tensor, up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """`gated` in plain PyTorch."""
    if not isinstance(gating, ClampedSwiglu):
        return activated_reference(gate, gating) * up
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate / _one_and_exp(gating.slope * gate) * (up + 1.0)


def swiglu_reference(
    gate_up_N2F: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`swiglu` in plain PyTorch."""
    lanes, width = gate_up_N2F.shape
    out = output_rows(out, (lanes, width // 2), dtype=gate_up_N2F.dtype, like=gate_up_N2F)
    live = live_lanes(slot_N)
    gate, up = gate_up_N2F[live].float().chunk(2, dim=1)
    out[live] = (activated_reference(gate, activation) * up).to(out.dtype)
    return out


def squared_relu_reference(
    x_NF: torch.Tensor, slot_N: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`squared_relu` in plain PyTorch."""
    out = output_rows(out, x_NF.shape, dtype=x_NF.dtype, like=x_NF)
    live = live_lanes(slot_N)
    out[live] = x_NF[live].float().relu().square().to(out.dtype)
    return out


def gelu_reference(
    x_NF: torch.Tensor, slot_N: torch.Tensor, *, tanh: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`gelu` in plain PyTorch. In float64 the bits do not depend on where an element is."""
    out = output_rows(out, x_NF.shape, dtype=x_NF.dtype, like=x_NF)
    live = live_lanes(slot_N)
    x = x_NF[live].float()
    if tanh:
        y = activated_reference(x, "gelu_tanh")
    else:
        y = torch.nn.functional.gelu(x.double()).float()
    out[live] = y.to(out.dtype)
    return out


def silu_reference(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) of float32; the bits do not depend on where an element is."""
    return activated_reference(x, "silu")


def sigmoid_reference(x: torch.Tensor) -> torch.Tensor:
    """sigmoid(x) of float32; the bits do not depend on where an element is."""
    return 1.0 / _one_and_exp(x)


def activated_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Float32 after an activation; the bits do not depend on where an element is.

    On a CPU torch's exp rounds differently in the tail of an array than in its vectorised body, so
    a lane's bits would depend on how many lanes there are. numpy's does not.
    """
    inner = x
    if gate_code(activation) == gate_code("gelu_tanh"):
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / _one_and_exp(inner)


def soft_capped_reference(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32; x itself where the cap is 0.

    The bits do not depend on where an element is.
    """
    if not cap:
        return x
    if x.is_cuda:
        return torch.tanh(x / cap) * cap
    return torch.from_numpy(np.tanh((x / cap).numpy(), order="C")) * cap


def _one_and_exp(x: torch.Tensor) -> torch.Tensor:
    """1 + exp(-x)."""
    if x.is_cuda:
        return 1.0 + torch.exp(-x)
    with np.errstate(over="ignore"):
        return 1.0 + torch.from_numpy(np.exp(np.negative(x.numpy(), order="C")))
