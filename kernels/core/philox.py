"""Philox4x32-10 and Gumbel noise: the same integers in numpy and in Triton.

A token's noise is a pure function of (seed, position, token id): it has no state, and does not
depend on the row, the bucket or the neighbours. The generator is counter-based: key = the request's
seed (low word, high word), counter = (token id, position, 0, 0), and the noise is the first output
word.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011; the constants are those of Random123's philox.h. Gumbel-max: argmax(l + g) with
independent standard Gumbel g is a draw from softmax(l) (E. J. Gumbel, 1954).

Functions named `*_tile` are called from Triton kernels; the others are their numpy twins. Words are
uint32 throughout; 32-bit products are taken in 64 bits (one `mul.wide.u32` on a GPU).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray

_ROUNDS = tl.constexpr(10)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)

_WORD = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
# 64 KB of uint64 per operand, so a round's operands stay in the L2 cache: twice as fast at
# V = 128k.
_CHUNK = 8192

# Below this, 1 - u rounds too coarsely for log(1 - u), and u + u^2 / 2 is exact to float32.
_SMALL_UNIFORM = tl.constexpr(2.0**-12)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
_WORD_TO_UNIFORM = tl.constexpr(2.0**-32)


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]
) -> tuple[NDArray[np.uint32], ...]:
    """The four output words of Philox4x32-10, for counters and keys that broadcast.

    Integers may have any dtype and sign; only their low 32 bits count.
    """
    c0, c1, c2, c3 = (_low_word(word) for word in counter)
    k0, k1 = (_low_word(word) for word in key)
    for _ in range(_ROUNDS.value):
        product_0 = c0 * np.uint64(_MULTIPLIER_0.value)
        product_1 = c2 * np.uint64(_MULTIPLIER_1.value)
        c0, c2 = (product_1 >> _32) ^ c1 ^ k0, (product_0 >> _32) ^ c3 ^ k1
        c1, c3 = product_1 & _WORD, product_0 & _WORD
        k0 = (k0 + np.uint64(_WEYL_0.value)) & _WORD
        k1 = (k1 + np.uint64(_WEYL_1.value)) & _WORD
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))


def philox_uint32(
    seed: ArrayLike | torch.Tensor,
    position: ArrayLike | torch.Tensor,
    token_id: ArrayLike | torch.Tensor,
) -> NDArray[np.uint32]:
    """The noise word of each (seed, position, token id), as a new uint32 array.

    Args:
        seed: int64, any value, negative ones too (its 64 bits are the key).
        position: the sampled token's position (its low 32 bits are used).
        token_id: the vocabulary id (its low 32 bits are used).

    The three broadcast. Tensors must be on the CPU.
    """
    # Through uint64: the shift below must bring in zeros, not the sign.
    keys = np.asarray(seed).astype(np.uint64)
    positions, ids = np.asarray(position), np.asarray(token_id)
    shape = np.broadcast_shapes(keys.shape, positions.shape, ids.shape)
    width = shape[-1] if shape else 1
    word = np.empty((*shape[:-1], width), np.uint32)
    for start in range(0, width, _CHUNK):
        part = slice(start, start + _CHUNK)
        key = _last_axis(keys, part)
        counter = (_last_axis(ids, part), _last_axis(positions, part), 0, 0)
        word[..., part] = philox4x32(counter, (key, key >> _32))[0]
    return word.reshape(shape)


def gumbel(word: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Standard Gumbel noise of uint32 words, in float32 arithmetic; finite, in [-2.82, 22.88].

    u = (word + 1/2) / 2^32, at most 1 - 2^-24; e = -log(1 - u); noise = -log(e). High words give
    low noise, and the tail that matters, u near 0, keeps the resolution of all 32 bits.
    """
    uniform = (word.astype(np.float32) + np.float32(0.5)) * np.float32(_WORD_TO_UNIFORM.value)
    uniform = np.minimum(uniform, np.float32(_LARGEST_UNIFORM.value))
    exponential = np.where(
        uniform < np.float32(_SMALL_UNIFORM.value),
        uniform + uniform * uniform * np.float32(0.5),
        -np.log(np.float32(1.0) - uniform),
    )
    noise: NDArray[np.float32] = -np.log(exponential)
    return noise


@triton.jit
def philox_uint32_tile(seed, position, token_id):
    """Triton twin of `philox_uint32`: int64, int32, int32 -> uint32, of shapes that broadcast.

    No word is broadcast wider than its operands: with seeds and positions [L, 1] and ids [1, B],
    the first rounds mostly compute L + B elements rather than L * B.
    """
    bits = seed.to(tl.uint64, bitcast=True)
    k0 = bits.to(tl.uint32)
    k1 = (bits >> 32).to(tl.uint32)
    c0 = token_id.to(tl.uint32, bitcast=True)
    c1 = position.to(tl.uint32, bitcast=True)
    c2 = tl.cast(0, tl.uint32)
    c3 = tl.cast(0, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        product_0 = c0.to(tl.uint64) * _MULTIPLIER_0
        product_1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0


@triton.jit
def gumbel_tile(word):
    """Triton twin of `gumbel`: uint32 -> float32; a GPU's log may differ by some ulps."""
    uniform = (word.to(tl.float32) + 0.5) * _WORD_TO_UNIFORM
    uniform = tl.minimum(uniform, _LARGEST_UNIFORM)
    exponential = tl.where(
        uniform < _SMALL_UNIFORM,
        uniform + uniform * uniform * 0.5,
        -tl.log(1.0 - uniform),
    )
    return -tl.log(exponential)


def _low_word(value: ArrayLike) -> NDArray[np.uint64]:
    return np.asarray(value).astype(np.uint64) & _WORD


def _last_axis(value: NDArray[Any], part: slice) -> NDArray[Any]:
    """`value[..., part]`, or `value` itself where it is broadcast along the last axis."""
    return value if value.ndim == 0 or value.shape[-1] == 1 else value[..., part]
