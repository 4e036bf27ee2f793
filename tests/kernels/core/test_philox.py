"""Philox: Random123's known answers, and the same integers in numpy and Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.philox import (
    gumbel,
    gumbel_tile,
    philox4x32,
    philox_uint32,
    philox_uint32_tile,
)

BLOCK = 64
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
EULER_GAMMA = 0.5772156649


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, token_ptr, word_ptr, noise_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word = philox_uint32_tile(tl.load(seed_ptr), tl.load(position_ptr), tl.load(token_ptr + lane))
    tl.store(word_ptr + lane, word.to(tl.int32, bitcast=True))
    tl.store(noise_ptr + lane, gumbel_tile(word))


@triton.jit
def _triton_philox_kernel(seed_ptr, position_ptr, token_ptr, word_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + lane)
    zero = token * 0
    word, _, _, _ = tl.philox(tl.load(seed_ptr), token, zero + tl.load(position_ptr), zero, zero)
    tl.store(word_ptr + lane, word.to(tl.int32, bitcast=True))


def _inputs(seed: int, position: int, tokens: np.ndarray, device: str) -> list[torch.Tensor]:
    return [
        torch.tensor([seed], dtype=torch.int64, device=device),
        torch.tensor([position], dtype=torch.int32, device=device),
        torch.from_numpy(tokens).to(device),
    ]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, words):
    """kat_vectors of Random123, `philox4x32 10`."""
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


@given(seed=INT64, position=INT32, tokens=st.lists(INT32, min_size=1, max_size=5))
@example(seed=-1, position=-1, tokens=[-1, 0])
def test_key_and_counter_layout(seed, position, tokens):
    """Key (seed low, seed high), counter (token id, position, 0, 0), the first word."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    expected = philox4x32((np.array(tokens), position, 0, 0), (low, high))[0]
    np.testing.assert_array_equal(philox_uint32(seed, position, tokens), expected)


def test_arguments_broadcast_and_long_rows_are_cut_unseen():
    seeds = torch.tensor([3, -3, 2**62])[:, None]
    positions = np.array([[0], [7], [2**31 - 1]])
    tokens = np.arange(20_000)
    words = philox_uint32(seeds, positions, tokens)
    assert words.shape == (3, 20_000)
    for row in range(3):
        for token in (0, 8191, 8192, 19_999):
            alone = philox_uint32(int(seeds[row, 0]), positions[row, 0], token)
            assert alone.shape == ()
            assert words[row, token] == alone


@given(seed=INT64, position=INT32, first=INT32, step=st.integers(1, 2**25))
@example(seed=-(2**63), position=2**31 - 1, first=-(2**31), step=2**25)
@example(seed=2**63 - 1, position=0, first=0, step=1)
@settings(max_examples=extent(16, 50), deadline=None)
def test_triton_gives_the_same_integers(device, seed, position, first, step):
    tokens = (first + step * np.arange(BLOCK)).astype(np.int64).astype(np.int32)
    inputs = _inputs(seed, position, tokens, device)
    word = torch.empty(BLOCK, dtype=torch.int32, device=device)
    theirs = torch.empty_like(word)
    noise = torch.empty(BLOCK, dtype=torch.float32, device=device)
    _noise_kernel[(1,)](*inputs, word, noise, BLOCK=BLOCK)
    _triton_philox_kernel[(1,)](*inputs, theirs, BLOCK=BLOCK)

    expected = philox_uint32(seed, position, tokens)
    np.testing.assert_array_equal(word.cpu().numpy().view(np.uint32), expected)
    np.testing.assert_array_equal(theirs.cpu().numpy().view(np.uint32), expected)
    # The logarithms of two libraries differ by ulps; an ulp of e is at most one of 2^-24 in noise.
    np.testing.assert_allclose(noise.cpu().numpy(), gumbel(expected), rtol=2e-6, atol=2e-6)


def test_extreme_words_give_finite_noise():
    words = np.array([0, 1, 2**20 - 1, 2**20, 2**31, 2**32 - 129, 2**32 - 1], np.uint32)
    noise = gumbel(words)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all(), "noise falls as the word grows"
    np.testing.assert_allclose(noise[0], np.log(2.0**33), rtol=1e-6)
    np.testing.assert_allclose(noise[-1], -np.log(24 * np.log(2.0)), rtol=1e-6)


def test_both_forms_of_the_exponential_meet():
    """Against float64, on both sides of the switch at u = 2^-12 (word 2^20)."""
    words = np.array([5, 2**10, 2**20 - 64, 2**20 + 64, 2**24, 2**28, 2**31], np.uint32)
    uniform = (words.astype(np.float64) + 0.5) / 2.0**32
    exact = -np.log(-np.log1p(-uniform))
    # Just above the switch, 1 - u has an error of 2^-25 against u = 2^-12.
    np.testing.assert_allclose(gumbel(words), exact, atol=2.0**-12)


def test_noise_has_the_moments_of_a_gumbel_distribution():
    noise = gumbel(philox_uint32(2026, np.arange(1000)[:, None], np.arange(1000))).astype(float)
    standard_error = np.pi / np.sqrt(6) / np.sqrt(noise.size)
    assert abs(noise.mean() - EULER_GAMMA) < 4 * standard_error
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    # Neighbouring ids, positions and seeds are unrelated.
    other_seed = gumbel(philox_uint32(2027, np.arange(1000)[:, None], np.arange(1000)))
    for other in (np.roll(noise, 1, axis=0), np.roll(noise, 1, axis=1), other_seed):
        assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 4e-3
