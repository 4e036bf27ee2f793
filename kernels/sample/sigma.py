"""The floor of top-n-sigma: n standard deviations below the largest of a row's logits.

    floor = max - n * sigma,   sigma^2 = mean of (logit - mean)^2

over the row's candidates, those above -inf, clamped to the finite floats. So masked and banned
tokens take no part in it (C. Tang et al., "Top-n-sigma", arXiv:2411.07641; llama.cpp's
`llama_sampler_top_n_sigma` has the same rule).

Nothing depends on the order of summation: sums are in fixed point. The distances max - logit are
scaled by a power of two, so that the largest is in [2^39, 2^40). The integer parts of distances,
and of 2^-40 of their squared deviations, are added up. 2^22 ids cannot overflow the sums, and the
error of sigma^2 is at most 2^-40 of the squared range of the logits. The floor is rounded up: no
logit that lies more than n * sigma below the largest reaches it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from graphengine.kernels.sample.candidates import LARGEST, row_tile, sortable_key, value_of_key

# Bits of the largest distance, and the power of two that its square is divided by.
_BITS = tl.constexpr(40)
_HALF = tl.constexpr(2.0**20)
_UNIT = tl.constexpr(2.0**-40)
# The bias and the position of a float64's exponent.
_BIAS = tl.constexpr(1023)
_PLACE = tl.constexpr(52)


def sigma_floor_reference(logits_C: NDArray[np.float32], n_sigma: np.float32) -> np.float32:
    """Plain twin of `sigma_floor` for the candidates only: at least one, and no NaN."""
    value_C = np.clip(logits_C, -LARGEST.value, LARGEST.value).astype(np.float64)
    largest = value_C.max()
    _, exponent = np.frexp(largest - value_C.min())
    scale: Any = np.ldexp(1.0, _BITS.value - exponent)
    distance_C = (largest - value_C) * scale
    mean = distance_C.astype(np.int64).sum() / value_C.size
    squares = ((distance_C - mean) ** 2 * _UNIT.value).astype(np.int64).sum()
    sigma = np.sqrt(squares / value_C.size) * _HALF.value / scale
    reach = np.float64(n_sigma) * sigma
    floor = np.float32(max(largest - reach, -LARGEST.value))
    if largest - floor > reach:
        floor = np.nextafter(floor, np.float32(np.inf))
    return floor + np.float32(0.0)  # -0 becomes +0: the two have one key.


@triton.jit
def _distances(value, largest, scale):
    """Scaled distances from the largest, float64."""
    return (largest - value.to(tl.float64)) * scale


@triton.jit
def _value_tile(logits):
    """Logits within the finite floats; 0 for NaN."""
    value = tl.minimum(tl.maximum(logits, -LARGEST), LARGEST)
    return tl.where(logits == logits, value, 0.0)


@triton.jit
def sigma_floor(row, n_sigma, BLOCK: tl.constexpr):
    """The floor of a `CandidateRow` that has one, float32; `n_sigma` is above 0. Three passes."""
    high = tl.full([BLOCK], -LARGEST, tl.float32)
    low = tl.full([BLOCK], LARGEST, tl.float32)
    for start in range(0, row.width, BLOCK):
        logits = row_tile(row, start, BLOCK)
        there = logits > float("-inf")
        value = _value_tile(logits)
        high = tl.maximum(high, tl.where(there, value, -LARGEST))
        low = tl.minimum(low, tl.where(there, value, LARGEST))
    largest = tl.max(high, 0).to(tl.float64)
    spread = largest - tl.min(low, 0).to(tl.float64)
    exponent = (tl.where(spread > 0, spread, 1.0).to(tl.int64, bitcast=True) >> _PLACE) - _BIAS
    scale = ((-exponent + (_BIAS + _BITS - 1)) << _PLACE).to(tl.float64, bitcast=True)

    total = tl.zeros([BLOCK], tl.int64)
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, row.width, BLOCK):
        logits = row_tile(row, start, BLOCK)
        there = logits > float("-inf")
        distance = _distances(_value_tile(logits), largest, scale)
        total += tl.where(there, distance, 0.0).to(tl.int64)
        number += there.to(tl.int32)
    count = tl.sum(number, 0).to(tl.float64)
    mean = tl.sum(total, 0).to(tl.float64) / count

    squares = tl.zeros([BLOCK], tl.int64)
    for start in range(0, row.width, BLOCK):
        logits = row_tile(row, start, BLOCK)
        there = logits > float("-inf")
        deviation = _distances(_value_tile(logits), largest, scale) - mean
        squares += tl.where(there, deviation * deviation * _UNIT, 0.0).to(tl.int64)
    sigma = tl.sqrt(tl.sum(squares, 0).to(tl.float64) / count) * _HALF / scale
    reach = n_sigma.to(tl.float64) * sigma
    floor = tl.maximum(largest - reach, -LARGEST).to(tl.float32)
    # The next float up is the next key.
    short = (largest - floor.to(tl.float64) > reach).to(tl.int32)
    return value_of_key(sortable_key(floor) + short)
