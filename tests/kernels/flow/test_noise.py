"""Normal noise by seed: the distribution, that it follows from the seed alone, and given noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.flow.noise import normal_noise, normal_noise_reference


def noise(seed, shape, device, *, function=normal_noise, given=None):
    held = torch.full(shape, torch.nan) if given is None else given
    out = torch.full(shape, torch.nan, device=device)
    use = torch.tensor([int(given is not None)], dtype=torch.int32, device=device)
    seeds = torch.tensor([seed], device=device)
    assert function(seeds, held.to(device), use, out) is out
    return out.cpu()


@settings(deadline=None, max_examples=extent(8, 40))
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 3, 32, 61]),
)
def test_it_is_its_reference_and_a_start_of_longer_noise(device, seed, rows, columns):
    found = noise(seed, (rows, columns), device)
    wanted = noise(seed, (rows, columns), "cpu", function=normal_noise_reference)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    longer = noise(seed, (rows + 2, columns), device)
    assert torch.equal(longer[:rows], found)


def test_it_is_normal(device):
    """Mean, variance, tails and neighbours of 20,000 numbers, in bounds of five deviations."""
    found = noise(7, (200, 100), device).double().flatten()
    count = len(found)
    assert abs(found.mean()) < 5 / count**0.5
    assert abs(found.var() - 1) < 5 * (2 / count) ** 0.5
    for bound, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        outside = (found.abs() > bound).double().mean()
        assert abs(outside - share) < 5 * (share * (1 - share) / count) ** 0.5
    assert abs((found[1:] * found[:-1]).mean()) < 5 / count**0.5
    assert not torch.equal(noise(8, (200, 100), device).double().flatten(), found)


def test_given_noise_is_taken_bit_by_bit(device):
    given = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    for function, where in ((normal_noise, device), (normal_noise_reference, "cpu")):
        assert torch.equal(noise(4, (3, 5), where, function=function, given=given), given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed_1": torch.zeros(2).long()}, r"seed must be a dense torch.int64 \[1\]"),
        ({"use_given_1": torch.zeros(1)}, "use_given"),
        ({"given_MD": torch.zeros(3, 4)}, r"out must be a dense float32 \[3, 4\], not .*\[2, 4\]"),
        ({"out_MD": torch.zeros(4, 2).t()}, r"out must be a dense float32 .*strides \(1, 2\)"),
    ],
)
def test_what_does_not_fit_is_an_error(changes, message):
    options = {
        "seed_1": torch.zeros(1).long(), "given_MD": torch.zeros(2, 4),
        "use_given_1": torch.zeros(1).int(), "out_MD": torch.zeros(2, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        normal_noise(**options | changes)
