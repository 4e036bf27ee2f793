"""The e4m3 of an FP8 cache: what is stored, by the reference and in a kernel."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.paged import FP8_KV, FP8_MAX, gather_cache, quantise, quantised_bits


def finite_values() -> torch.Tensor:
    """Every finite e4m3, ascending; +0 alone of the zeros."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8_KV).float()
    return values[values.isfinite()].unique()


def hard_values() -> torch.Tensor:
    """All of e4m3, the ties between neighbours and what is next to them, and what has no place."""
    exact = finite_values()
    ties = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    others = torch.tensor([464.0, 464.1, 1e30, torch.inf, torch.nan, 2.0**-11, 1e-42, -0.0])
    return torch.cat([exact, ties, *beside, others, -others])


def test_the_nearest_value_is_stored_and_ties_go_to_the_even_one() -> None:
    exact = finite_values()
    assert torch.equal(quantise(exact, torch.tensor(1.0)).float(), exact)
    lower, upper = exact[:-1], exact[1:]
    ties = (lower + upper) / 2
    stored = quantise(ties, torch.tensor(1.0))
    assert bool((stored.view(torch.uint8) % 2 == 0).all())
    assert bool(((stored.float() == lower) | (stored.float() == upper)).all())


def test_too_large_values_saturate_and_nan_stays() -> None:
    x = torch.tensor([449.0, 1e9, torch.inf, -torch.inf, torch.nan])
    stored = quantise(x, torch.tensor(1.0)).float()
    assert stored[:4].tolist() == [FP8_MAX, FP8_MAX, FP8_MAX, -FP8_MAX]
    assert bool(stored[4].isnan())


def test_what_is_read_is_what_is_stored_times_the_scale() -> None:
    kv = torch.full((2, 2, 8, 3, 4), 3.0).to(FP8_KV)
    scales = torch.tensor([[1.0, 2.0, 0.5], [10.0, 20.0, 30.0]])
    table = torch.ones(1, 1, dtype=torch.int32)
    keys, values = gather_cache(kv, table, 0, 5, scales)
    assert torch.equal(keys[4, :, 0], torch.tensor([3.0, 6.0, 1.5]))
    assert torch.equal(values[4, :, 3], torch.tensor([30.0, 60.0, 90.0]))


@triton.jit
def _quantise_kernel(x_ptr, scale_ptr, out_ptr, N, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < N, other=0.0)
    scale = tl.load(scale_ptr + index, mask=index < N, other=1.0)
    tl.store(out_ptr + index, quantised_bits(x, scale), mask=index < N)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_kernel_stores_the_same_bytes(device: str, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-20, 14, (2000,), generator=generator)
    x = torch.cat([hard_values(), torch.randn(2000, generator=generator) * 2.0**exponents])
    scale = torch.rand(x.shape, generator=generator) + 0.01 if scaled else torch.ones_like(x)
    x, scale = x.to(device), scale.to(device)
    out = torch.zeros(x.shape, dtype=torch.uint8, device=device)
    _quantise_kernel[(triton.cdiv(len(x), 256),)](x, scale, out, len(x), BLOCK=256)
    wanted = quantise(x, scale)
    is_nan = wanted.float().isnan()
    assert torch.equal(out.view(FP8_KV).float().isnan(), is_nan)
    assert torch.equal(out[~is_nan], wanted.view(torch.uint8)[~is_nan])
