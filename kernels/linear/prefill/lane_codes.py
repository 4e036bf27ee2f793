"""Activations in 8 bits: each lane's values as e4m3, with a scale of its own.

In every 4 columns the second and the third change places. So a word of 4 codes has the same columns
as a word of `packed.pack`'s blocks, and the weight's codes go to the tensor cores as they are.

Letters: N lanes, K input features.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import INTERPRETED, use_triton
from graphengine.kernels.core.lanes import check_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import FP8_KV, FP8_MAX, quantise, quantised_bits
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

ActivationKind = Literal["fp8"]
"""The format that prefill's activations can be rounded to: e4m3, with a scale a lane."""
WORD = 4
"""Columns that are reordered together; K is a multiple of it."""
LANES_AT_ONCE = 256
"""Lanes whose scales a program reads together, even if there are fewer."""
# For the TMA rows lie a multiple of this many bytes apart.
_PITCH = 16
# A lane's largest magnitude counts as at least this, so that no scale is 0 or subnormal.
_LEAST = 2.0**-100
# A longer lane is read twice.
_MAX_BLOCK = 16384

_INTERPRETED = tl.constexpr(INTERPRETED)
_LARGEST = tl.constexpr(FP8_MAX)
_SMALLEST = tl.constexpr(_LEAST)


class LaneCodes(NamedTuple):
    """Lanes as codes times scales.

    codes   `torch.float8_e4m3fn` [N, K], with columns in the order that the module describes; dense
            rows that begin at multiples of 16 bytes
    scales  float32 [P], P being N rounded up to a multiple of `LANES_AT_ONCE`: the lane's largest
            magnitude over 448; past N anything
    """

    codes: torch.Tensor
    scales: torch.Tensor


def code_bytes(lanes: int, columns: int) -> int:
    """Bytes of `LaneCodes` of this many lanes and columns."""
    return lanes * _pitch(columns) + 4 * _scales(lanes)


def new_lane_codes(memory: torch.Tensor, lanes: int, columns: int) -> LaneCodes:
    """Uninitialised codes in the first `code_bytes` of `memory`: uint8, aligned to 16 bytes."""
    pitch = _pitch(columns)
    sizes = [lanes * pitch, 4 * _scales(lanes)]
    codes, scales = memory[: sum(sizes)].split(sizes)
    codes = codes.view(FP8_KV).view(lanes, pitch)[:, :columns]
    return LaneCodes(codes, scales.view(torch.float32))


def _scales(lanes: int) -> int:
    return -(-lanes // LANES_AT_ONCE) * LANES_AT_ONCE


def _pitch(columns: int) -> int:
    return -(-columns // _PITCH) * _PITCH


def quantise_lanes(
    x_NK: torch.Tensor, *, out: LaneCodes | None = None, pdl: bool = False
) -> LaneCodes:
    """Round each lane to 8 bits, relative to its largest magnitude, which becomes 448.

    Args:
        x_NK: dense rows, any stride between them. Padded lanes hold anything; no lane's codes
            depend on another lane.
        out: tensors to write; None: new ones.
        pdl: the launch before may still run.

    A code is the e4m3 nearest to `x * (448 / max|x|)`, ties to even. A lane of zeros has codes of
    zero, and NaN stays NaN. ValueError unless K is a multiple of 4, and for an `out` of another
    shape.
    """
    check_rows(x_NK=x_NK)
    lanes, K = x_NK.shape
    if K % WORD:
        raise ValueError(f"activations of 8 bits take a multiple of {WORD} columns, not K={K}")
    if out is None:
        memory = torch.empty(code_bytes(lanes, K), dtype=torch.uint8, device=x_NK.device)
        out = new_lane_codes(memory, lanes, K)
    if out.codes.shape != x_NK.shape or out.scales.shape != (_scales(lanes),):
        raise ValueError(
            f"out has codes {list(out.codes.shape)} and scales {list(out.scales.shape)} for x "
            f"{list(x_NK.shape)}"
        )
    if not use_triton(x_NK):
        return quantise_lanes_reference(x_NK, out=out)
    block = min(triton.next_power_of_2(K), _MAX_BLOCK)
    codes = out.codes.view(torch.uint8)
    launcher(_quantise_lanes_kernel, (lanes,))(
        x_NK,
        codes,
        out.scales,
        x_NK.stride(0),
        codes.stride(0),
        K=K,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(pdl),
    )
    return out


def quantise_lanes_reference(x_NK: torch.Tensor, *, out: LaneCodes) -> LaneCodes:
    """`quantise_lanes` in plain PyTorch."""
    x = x_NK.float()
    largest = x.abs().amax(dim=1).clamp_(min=_LEAST)
    # Divide by a tensor: by a number torch multiplies by the reciprocal, which is rounded twice.
    most = torch.full_like(largest, FP8_MAX)
    codes = quantise(x * (most / largest)[:, None], torch.ones(1, device=x.device))
    out.codes.view(torch.uint8).copy_(_exchanged(codes.view(torch.uint8)))
    out.scales[: len(x)].copy_(largest / most)
    return out


def lane_values(lanes: LaneCodes) -> torch.Tensor:
    """Dequantise lanes: float32 [N, K], with columns back in the model's order."""
    codes = _exchanged(lanes.codes.view(torch.uint8)).view(FP8_KV)
    return codes.float() * lanes.scales[: len(codes), None]


def _exchanged(codes: torch.Tensor) -> torch.Tensor:
    """Exchange the second and third of every 4 bytes in rows of bytes [N, K]."""
    lanes, K = codes.shape
    return codes.reshape(lanes, K // WORD, 2, 2).transpose(2, 3).reshape(lanes, K)


@triton.jit
def _quantise_lanes_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    codes_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    source = x_ptr + lane * x_stride
    target = codes_ptr + lane * codes_stride
    k = tl.arange(0, BLOCK)
    x = tl.load(source + k, mask=k < K, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    for start in tl.range(BLOCK, K, BLOCK):
        more = tl.load(source + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        magnitude = tl.maximum(magnitude, tl.abs(more))
    largest = tl.maximum(tl.max(magnitude), _SMALLEST)
    tl.store(scales_ptr + lane, tl.div_rn(largest, _LARGEST))

    factor = tl.div_rn(_LARGEST, largest)
    tl.store(target + k, _word_codes(x * factor, BLOCK), mask=k < K)
    for start in tl.range(BLOCK, K, BLOCK):
        more = tl.load(source + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        tl.store(target + start + k, _word_codes(more * factor, BLOCK), mask=start + k < K)


@triton.jit
def _word_codes(x, BLOCK: tl.constexpr):
    """Round float32 [BLOCK] to bytes of e4m3, with the second and third of every 4 exchanged."""
    if _INTERPRETED:
        codes = quantised_bits(x, 1.0)
    else:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes.reshape([BLOCK // 4, 2, 2]).permute((0, 2, 1)).reshape([BLOCK])
