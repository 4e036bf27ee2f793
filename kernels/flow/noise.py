"""Standard normal noise by seed: a pure function of (seed, element).

Words of Philox (`core/philox.py`) become pairs of uniform numbers, and these normal ones (G. E. P.
Box and M. E. Muller, "A Note on the Generation of Random Normal Deviates", 1958):
sqrt(-2 log u) * cos(2 pi w). Element i has the words of token id i at the positions 0 and 1.

Letters: M rows, D values of a row.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.philox import philox_uint32, philox_uint32_tile

_BLOCK = 256
_WORD_TO_UNIFORM = tl.constexpr(2.0**-32)
_TURN = tl.constexpr(2 * math.pi)


def normal_noise(
    seed_1: torch.Tensor, given_MD: torch.Tensor, use_given_1: torch.Tensor, out_MD: torch.Tensor
) -> torch.Tensor:
    """Fill `out` with standard normal numbers by seed, or with noise that the caller gives.

    Args:
        seed_1: int64 [1], any value.
        given_MD: float32 [M, D], dense: read only where it is used.
        use_given_1: int32 [1]: whether `given` is used; 0: it is not.
        out_MD: float32 [M, D], dense.

    Returns:
        `out`. All are on one device. Bits of a GPU differ from those of a CPU by some ulps, as
        their logarithms and cosines do.
        ValueError for a shape or dtype that does not fit.
    """
    check_vector("seed", seed_1, 1, torch.int64)
    check_lanes(1, use_given=use_given_1)
    check_dense(given=given_MD, out=out_MD)
    if not use_triton(out_MD):
        return normal_noise_reference(seed_1, given_MD, use_given_1, out_MD)
    count = out_MD.numel()
    launcher(_noise_kernel, (triton.cdiv(count, _BLOCK),))(
        seed_1, given_MD, use_given_1, out_MD, count, BLOCK=_BLOCK
    )
    return out_MD


@triton.jit
def _noise_kernel(seed_ptr, given_ptr, use_given_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """One program for BLOCK elements."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = index < count
    use_given = tl.load(use_given_ptr) != 0
    seed = tl.load(seed_ptr)
    first = philox_uint32_tile(seed, tl.zeros_like(index), index)
    second = philox_uint32_tile(seed, tl.zeros_like(index) + 1, index)
    radius = tl.sqrt(-2.0 * tl.log((first.to(tl.float32) + 0.5) * _WORD_TO_UNIFORM))
    noise = radius * tl.cos((second.to(tl.float32) + 0.5) * _WORD_TO_UNIFORM * _TURN)
    given = tl.load(given_ptr + index, mask=there & use_given, other=0.0)
    tl.store(out_ptr + index, tl.where(use_given, given, noise), mask=there)


def normal_noise_reference(
    seed_1: torch.Tensor, given_MD: torch.Tensor, use_given_1: torch.Tensor, out_MD: torch.Tensor
) -> torch.Tensor:
    """`normal_noise` in numpy."""
    if use_given_1.item():
        return out_MD.copy_(given_MD)
    index = np.arange(out_MD.numel())
    first, second = (
        (philox_uint32(int(seed_1), position, index).astype(np.float32) + np.float32(0.5))
        * np.float32(_WORD_TO_UNIFORM.value)
        for position in (0, 1)
    )
    noise = np.sqrt(np.float32(-2) * np.log(first)) * np.cos(second * np.float32(_TURN.value))
    return out_MD.copy_(torch.from_numpy(noise).view_as(out_MD))


def check_dense(**tensors: torch.Tensor) -> None:
    """ValueError unless all are dense float32 matrices of one shape."""
    shape = next(iter(tensors.values())).shape
    for name, tensor in tensors.items():
        dense = tensor.dtype == torch.float32 and tensor.is_contiguous()
        if not dense or tensor.dim() != 2 or tensor.shape != shape:
            raise ValueError(
                f"{name} must be a dense float32 {list(shape)}, not {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
