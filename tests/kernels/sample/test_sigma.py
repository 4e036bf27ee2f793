"""The floor of top-n-sigma: the kernel and its twin bit for bit, and both against exact numbers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.sample.candidates import CandidateRow
from graphengine.kernels.sample.sigma import sigma_floor, sigma_floor_reference

INF, NAN = float("inf"), float("nan")
LARGEST = float(np.finfo(np.float32).max)

ORDINARY = st.floats(-30, 30, width=32)
TIED = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, -INF])
EXTREME = st.sampled_from([3e38, LARGEST, -LARGEST, 1e-45, -1e-40, 0.0, 1e20, -1e20, -INF, INF])
NARROW = st.sampled_from([1e8, 1e8 + 8, 1e8 - 16, 1e8 - 64])
ROWS = (
    st.sampled_from([ORDINARY, TIED, EXTREME, NARROW, ORDINARY | EXTREME])
    .flatmap(lambda kind: st.lists(kind, min_size=1, max_size=40))
    .filter(lambda row: max(row) > -INF)
)
SIGMAS = st.sampled_from([1e-30, 1e-3, 0.5, 1.0, 2.0, 5.5, 1e30])


@triton.jit
def floor_kernel(
    logits_ptr, out_ptr, width, n_sigma_ptr, vocabulary, waits, stop_ptr, stops, BLOCK: tl.constexpr
):
    n_sigma = tl.load(n_sigma_ptr)
    row = CandidateRow(logits_ptr, vocabulary, width, 1.0, waits != 0, stop_ptr, stops)
    floor = sigma_floor(row, n_sigma, BLOCK)
    tl.store(out_ptr, floor)


def floor_of_kernel(
    row: Sequence[float],
    n_sigma: float,
    device: str,
    *,
    block: int = 16,
    stop_ids: Sequence[int] = (),
) -> np.float32:
    logits = torch.tensor(row, dtype=torch.float32, device=device)
    out = torch.full((1,), NAN, device=device)
    stops = torch.tensor([*stop_ids, -1], dtype=torch.int32, device=device)
    width = triton.cdiv(len(row), block) * block
    n = torch.tensor([n_sigma], device=device)
    floor_kernel[(1,)](
        logits, out, width, n, len(row), int(bool(stop_ids)), stops, len(stops), BLOCK=block
    )
    return out.cpu().numpy()[0]


def floor_of_twin(row: Sequence[float], n_sigma: float) -> np.float32:
    values = np.array(row, np.float32)
    return sigma_floor_reference(values[values > -INF], np.float32(n_sigma))


def candidates(row: Sequence[float]) -> list[Fraction]:
    finite = (min(max(float(np.float32(x)), -LARGEST), LARGEST) for x in row if x > -INF)
    return [Fraction(x) for x in finite]


@given(row=ROWS, n_sigma=SIGMAS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_twin_is_exact_to_its_bound(row: list[float], n_sigma: float) -> None:
    values = candidates(row)
    mean = sum(values) / len(values)
    variance = sum((x - mean) ** 2 for x in values) / len(values)
    largest, n = max(values), Fraction(float(np.float32(n_sigma)))
    spread = largest - min(values)
    # The fixed point's error of sigma squared, and some roundings of doubles.
    slack = spread**2 * Fraction(3, 2**40)
    floor = Fraction(float(floor_of_twin(row, n_sigma)))
    below = Fraction(float(np.nextafter(np.float32(floor), np.float32(-INF)))
                     if floor > -Fraction(LARGEST) else -LARGEST)  # fmt: skip
    if floor > -Fraction(LARGEST):
        assert (largest - floor) ** 2 <= n**2 * (variance + slack)
    # And no float32 that is lower would do.
    if floor > -Fraction(LARGEST) and below > -Fraction(LARGEST):
        assert (largest - below) ** 2 >= n**2 * (variance - slack)
    assert floor <= largest


@given(row=ROWS, n_sigma=SIGMAS)
@example(row=[-0.0], n_sigma=1.0)
@settings(max_examples=extent(40, 200), deadline=None, derandomize=True)
def test_the_kernel_has_the_twins_bits(device: str, row: list[float], n_sigma: float) -> None:
    expected = floor_of_twin(row, n_sigma).view(np.int32)
    assert floor_of_kernel(row, n_sigma, device).view(np.int32) == expected


def test_no_order_of_summation_shows(device: str) -> None:
    """Any block, and any order of the ids, gives the same bits."""
    generator = torch.Generator().manual_seed(5)
    row = (4 * torch.randn(500, generator=generator)).tolist()
    expected = floor_of_twin(row, 1.25)
    assert floor_of_twin(row[::-1], 1.25) == expected
    for block in (16, 64, 512):
        assert floor_of_kernel(row, 1.25, device, block=block) == expected
        assert floor_of_kernel(row[::-1], 1.25, device, block=block) == expected


def test_what_is_no_candidate_takes_no_part(device: str) -> None:
    row = [3.0, -1.0, 0.5, 2.0, -4.0]
    expected = floor_of_twin(row, 0.75)
    masked = [-INF, 3.0, -1.0, -INF, 0.5, NAN, 2.0, -4.0, -INF]
    assert floor_of_kernel(masked, 0.75, device) == expected
    # Stop ids that wait for min_len are none either.
    assert floor_of_kernel([*row, 90.0, -90.0], 0.75, device, stop_ids=(5, 6)) == expected
    assert floor_of_kernel([*row, 90.0, -90.0], 0.75, device) != expected


@pytest.mark.parametrize(
    ("row", "n_sigma", "floor"),
    [
        ([5.0], 1.0, 5.0),
        ([2.0, 2.0, 2.0, -INF], 3.0, 2.0),
        # sigma is 1, then 2.
        ([1.0, 3.0], 1.0, 2.0),
        ([1.0, 3.0], 2.0, 1.0),
        ([0.0, 0.0, 0.0, 0.0, 5.0], 1.5, 2.0),
        # 1e8 - 12 is no float32: the one above is 1e8 - 8.
        ([1e8, 1e8 - 24], 1.0, 1e8 - 8),
        ([0.0, 1.0], 1e30, -5e29),
        ([0.0, LARGEST], 1e30, -LARGEST),
        # Infinity counts as the largest float, of which three quarters are rounded up.
        ([INF, 0.0], 0.5, 1.5 * 2.0**127),
    ],
)
def test_floors_by_hand(device: str, row: list[float], n_sigma: float, floor: float) -> None:
    for found in (floor_of_twin(row, n_sigma), floor_of_kernel(row, n_sigma, device)):
        assert found == np.float32(floor)
