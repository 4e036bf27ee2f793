"""log(1 + exp(x)), exact to the last bits also where exp(x) is small, and its reference.

On a CPU references take exponentials and logarithms from numpy: torch's round differently at the
end of a tensor than within it, and a row's bits must not depend on where it is.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def softplus(x):
    grown = tl.exp(tl.minimum(x, 20.0))
    # Divide out what rounding to 1 + e took from e.
    whole = 1.0 + grown
    lost = tl.where(whole == 1.0, 1.0, whole - 1.0)
    small = tl.where(whole == 1.0, grown, tl.log(whole) * (grown / lost))
    return tl.where(x > 20.0, x, small)


def softplus_reference(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, _log1p(exp_reference(x.clamp(max=20.0))))


def exp_reference(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) if x.is_cuda else torch.from_numpy(np.exp(x.numpy()))


def _log1p(x: torch.Tensor) -> torch.Tensor:
    return torch.log1p(x) if x.is_cuda else torch.from_numpy(np.log1p(x.numpy()))
