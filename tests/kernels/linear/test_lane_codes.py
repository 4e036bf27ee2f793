"""Activations of 8 bits: what their codes mean, at any lane, poisoned."""

from __future__ import annotations

import re

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.prefill import lane_codes
from graphengine.kernels.linear.prefill.lane_codes import (
    LaneCodes,
    code_bytes,
    lane_values,
    new_lane_codes,
    quantise_lanes,
    quantise_lanes_reference,
)
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

BF16 = torch.bfloat16
NAN = float("nan")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")


def random_lanes(lanes: int, K: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Lanes of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(lanes, K, generator=generator)
    return (x * torch.logspace(-3, 3, lanes)[:, None]).to(dtype)


def room_for(lanes: int, K: int, device: str) -> tuple[torch.Tensor, LaneCodes]:
    """Memory for codes, with a byte behind them, all 77."""
    memory = torch.full((code_bytes(lanes, K) + 1,), 77, dtype=torch.uint8, device=device)
    return memory, new_lane_codes(memory, lanes, K)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")
@pytest.mark.parametrize("K", [4, 72, 1028])
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_matches_reference(device, dtypes, monkeypatch, K, poison):
    """Also where a lane is read in pieces; a poisoned lane shows in no other one."""
    monkeypatch.setattr(lane_codes, "_MAX_BLOCK", 512)
    for dtype in dtypes:
        wide = random_lanes(7, K + 8, dtype).to(device)
        wide[3] = poison
        x = wide[:, 4:-4]
        live = [0, 1, 2, 4, 5, 6]
        memory, out = room_for(7, K, device)
        assert quantise_lanes(x, out=out) is out
        _, expected = room_for(7, K, device)
        quantise_lanes_reference(x, out=expected)
        for found, wanted in zip(out, expected, strict=True):
            assert torch.equal(found[live].view(torch.uint8), wanted[live].view(torch.uint8))
        assert (out.scales[7:].view(torch.uint8) == 77).all(), "a scale of no lane was written"
        assert memory[-1] == 77
        padding = memory[: 7 * (-(-K // 16) * 16)].view(7, -1)[:, K:]
        assert (padding == 77).all(), "something between lanes was written"


def test_factors_and_scales_are_rounded_once(device):
    """The largest values have any mantissa, next to which codes would differ."""
    generator = torch.Generator().manual_seed(1)
    x = (1 + torch.rand(2000, 1, generator=generator)).expand(-1, 4) * torch.tensor(
        [1.0, 0.5 + 2**-24, -0.9375, 2**-7]
    )
    x = x.to(device)
    largest = x[:, 0].double()
    lanes = quantise_lanes(x)
    assert torch.equal(lanes.scales[:2000], (largest / 448).float())
    factor = (448 / largest).float()
    codes = (x * factor[:, None]).to(torch.float8_e4m3fn)[:, [0, 2, 1, 3]]
    assert torch.equal(lanes.codes.view(torch.uint8), codes.view(torch.uint8))


def test_a_lane_means_its_values_rounded_to_e4m3(device):
    """With a scale by which the largest is 448: 3 bits of mantissa, and 2**-9 of it below 2**-6."""
    x = random_lanes(5, 136).to(device)
    lanes = quantise_lanes(x)
    scale = x.abs().amax(dim=1, keepdim=True) / 448
    torch.testing.assert_close(lanes.scales[:5], scale[:, 0])
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(lane_values(lanes), expected)
    assert bool((lane_values(lanes) - x).abs().le(x.abs() / 15 + scale * 2**-9).all())


def test_words_have_the_order_of_packed_blocks(device):
    x = torch.tensor([[448.0, 2.0, 4.0, 8.0, -16.0, 32.0, -64.0, 128.0]], device=device)
    lanes = quantise_lanes(x)
    assert lanes.codes.float().tolist() == [[448.0, 4.0, 2.0, 8.0, -16.0, -64.0, 32.0, 128.0]]
    assert lane_values(lanes).tolist() == x.tolist()


def test_zeros_are_zeros_and_the_smallest_values_are_finite(device):
    x = torch.zeros(3, 8, device=device)
    x[1, 2], x[2, 5] = 1e-42, 3.4e38
    values = lane_values(quantise_lanes(x))
    assert values[:2].tolist() == [[0.0] * 8] * 2
    torch.testing.assert_close(values[2], x[2])


def test_nan_stays_nan(device):
    x = torch.ones(2, 8, device=device)
    x[0, 2] = NAN
    values = lane_values(quantise_lanes(x))
    assert values[0, 2].isnan() and values[1].tolist() == [1.0] * 8


def test_bits_do_not_depend_on_company(device, dtypes):
    x = random_lanes(33, 72, dtypes[-1]).to(device)
    whole = quantise_lanes(x)
    for lane_of in ([4], [32, 0, 4, 4]):
        for found, all in zip(quantise_lanes(x[lane_of]), whole, strict=True):
            found = found[: len(lane_of)]
            assert torch.equal(found.view(torch.uint8), all[lane_of].view(torch.uint8))


@pytest.mark.parametrize(
    "K, out, message",
    [
        (6, None, "take a multiple of 4 columns, not K=6"),
        (8, (3, 12), "out has codes [3, 12] and scales [256] for x [3, 8]"),
        (8, (2, 8), "out has codes [2, 8] and scales [256] for x [3, 8]"),
    ],
)
def test_what_does_not_fit_is_an_error(K, out, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantise_lanes(torch.zeros(3, K), out=None if out is None else room_for(*out, "cpu")[1])


@compiles
@pytest.mark.parametrize("K", [4096, 14336])
def test_codes_are_converted_and_exchanged_in_registers(K):
    """By the GPU's instruction, and stored as wide as they can be."""
    x = torch.empty(3, K, dtype=BF16)
    launch = record_launch(lane_codes, lambda: quantise_lanes(x, pdl=True))
    ptx, _ = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") >= 4
    assert "st.global.v2.b32" in ptx or "st.global.v4.b32" in ptx
    # Shared memory has the largest values of warps alone.
    assert not any(f"st.shared.{wide}" in ptx for wide in ("v2", "v4"))
