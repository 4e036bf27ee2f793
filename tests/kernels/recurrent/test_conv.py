"""The convolution of a chunk: against its formula, however it is cut, padded lanes poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.recurrent.conv import causal_conv_chunk

# Triton's interpreter multiplies poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN = float("nan")
HUGE = 2**30
SLOTS, SLOT = 3, 1


def formula(x_TC, weight, bias, activation):
    """In float64."""
    padded = torch.nn.functional.pad(x_TC.double().t(), (weight.shape[1] - 1, 0))
    bias = None if bias is None else bias.double()
    y = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias, groups=len(weight)).t()
    return torch.nn.functional.silu(y) if activation else y


def run_chunks(x_TC, weight, bias, cuts, padding, activation, entries):
    """The outputs of all chunks, and the slots' rings."""
    ring = torch.full((SLOTS, entries, x_TC.shape[1]), NAN).to(x_TC)
    found, start = [], 0
    for count in cuts:
        # A part of wider rows, as products leave them.
        wide = torch.full((count + padding, x_TC.shape[1] + 5), NAN).to(x_TC)
        x = wide[:, 2:-3]
        x[:count] = x_TC[start : start + count]
        slot = torch.full((count + padding,), -1, dtype=torch.int32, device=x.device)
        slot[:count] = SLOT
        position = torch.full_like(slot, HUGE)
        position[:count] = torch.arange(start, start + count)
        y = causal_conv_chunk(x, weight, bias, ring, slot, position, activation=activation)
        found.append(y[:count])
        start += count
    return torch.cat(found), ring


def check(device, dtype, channels, taps, cuts, padding, bias, activation):
    generator = torch.Generator().manual_seed(sum(cuts))

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    tokens = sum(cuts)
    x, weight = random(tokens, channels), random(channels, taps)
    bias = random(channels) if bias else None
    whole, _ = run_chunks(x, weight, bias, [tokens], 0, activation, taps + 1)
    parts, ring = run_chunks(x, weight, bias, cuts, padding, activation, taps - 1)
    assert torch.equal(parts, whole)
    newest = torch.arange(max(0, tokens - taps + 1), tokens)
    assert torch.equal(ring[SLOT, newest % (taps - 1)], x[newest])
    assert ring[[0, 2]].isnan().all(), "those of other slots"
    return whole, formula(x, weight, bias, activation).to(dtype)


@settings(deadline=None, max_examples=examples(8, 60))
@given(
    channels=st.integers(1, 80),
    taps=st.integers(2, 5),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    dtype=st.integers(0, 5),
)
def test_a_prompt_has_the_formula_s_values_however_it_is_cut(
    device, dtypes, assert_products_close, channels, taps, cuts, padding, bias, activation, dtype
):
    dtype = dtypes[dtype % len(dtypes)]
    found, expected = check(device, dtype, channels, taps, cuts, padding, bias, activation)
    assert_products_close(found, expected, dtype)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_the_formula(bias, activation):
    for cuts, taps in (([1, 2, 7], 4), ([12], 2), ([1, 1, 1], 5)):
        found, expected = check("cpu", torch.float32, 9, taps, cuts, 2, bias, activation)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_TC": torch.zeros(4, 7)}, r"ring must be \[S, E, 7\], not torch.float32 \[2, 3, 8\]"),
        ({"weight_CD": torch.zeros(8, 9)}, r"2 to 8 taps, not torch.float32 \[8, 9\]"),
        ({"weight_CD": torch.zeros(7, 3)}, r"weight must be .* \[8, 3\], not .* \[7, 3\]"),
        ({"bias_C": torch.zeros(8).half()}, "bias must be .*float32 .*, not torch.float16"),
        ({"ring_SEC": torch.zeros(2, 1, 8)}, "3 taps want 2 entries of the ring, which has 1"),
        ({"position_T": torch.zeros(4)}, "position_T must be int32, not torch.float32"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    lane = torch.zeros(4, dtype=torch.int32)
    operands = {
        "x_TC": torch.zeros(4, 8),
        "weight_CD": torch.zeros(8, 3),
        "bias_C": None,
        "ring_SEC": torch.zeros(2, 3, 8),
        "slot_T": lane,
        "position_T": lane,
    }
    with pytest.raises(ValueError, match=message):
        causal_conv_chunk(**(operands | change))
