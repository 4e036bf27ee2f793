"""The short convolution: against its formula, in any company, padded lanes poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.recurrent.short_conv import short_conv_decode, short_conv_prefill

# Triton's interpreter multiplies poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN = float("nan")
SLOTS = 3
HUGE = 2**30


class Layer:
    """Weights, and inputs [T, 3 * C] of a sequence for each slot."""

    def __init__(self, channels, taps, tokens, dtype, device, *, bias=True, entries=None, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.weight = random(channels, taps)
        self.bias = random(channels) if bias else None
        self.inputs = random(SLOTS, tokens, 3 * channels)
        entries = taps + 2 if entries is None else entries
        self.kept = torch.full((SLOTS, entries, channels), NAN, device=device, dtype=dtype)

    def formula(self):
        """Float64 [S, T, C] of whole sequences."""
        b, c, x = self.inputs.double().chunk(3, dim=2)
        g = (b * x).to(self.inputs.dtype).double().transpose(1, 2)
        taps = self.weight.shape[1]
        bias = None if self.bias is None else self.bias.double()
        y = torch.nn.functional.conv1d(
            torch.nn.functional.pad(g, (taps - 1, 0)),
            self.weight.double()[:, None],
            bias,
            groups=len(self.weight),
        )
        return c * y.transpose(1, 2)

    def prefill(self, slot, start, count, padding=0):
        """A chunk of one slot, with padded lanes after it."""
        lanes = count + padding
        bcx = torch.full((lanes, self.inputs.shape[2]), NAN).to(self.inputs)
        bcx[:count] = self.inputs[slot, start : start + count]
        slots = torch.full((lanes,), -1, dtype=torch.int32, device=bcx.device)
        slots[:count] = slot
        position = torch.full_like(slots, HUGE)
        position[:count] = torch.arange(start, start + count)
        out = short_conv_prefill(bcx, self.weight, self.bias, self.kept, slots, position)
        return out[:count]

    def decode(self, rows, width, live=None):
        """`rows`: (slot, position) each, or None for a padded row; `live` tokens of each row."""
        lanes = len(rows) * width
        bcx = torch.full((lanes, self.inputs.shape[2]), NAN).to(self.inputs)
        slots = torch.full((lanes,), -1, dtype=torch.int32, device=bcx.device)
        position = torch.full_like(slots, HUGE)
        for row, placed in enumerate(rows):
            if placed is None:
                continue
            slot, start = placed
            count = width if live is None else live[row]
            for token in range(count):
                lane = row * width + token
                bcx[lane] = self.inputs[slot, start + token]
                slots[lane], position[lane] = slot, start + token
        return short_conv_decode(
            bcx, self.weight, self.bias, self.kept, slots, position, tokens_per_row=width
        ).view(len(rows), width, -1)


@settings(deadline=None, max_examples=examples(8, 60))
@given(
    channels=st.integers(1, 150),
    taps=st.integers(2, 5),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    bias=st.booleans(),
    dtype=st.integers(0, 5),
)
def test_a_prompt_has_the_formula_s_values_however_it_is_cut(
    device, dtypes, assert_products_close, channels, taps, cuts, padding, bias, dtype
):
    dtype, tokens = dtypes[dtype % len(dtypes)], sum(cuts)
    layer = Layer(channels, taps, tokens, dtype, device, bias=bias)
    expected = layer.formula()
    whole = layer.prefill(1, 0, tokens)
    assert_products_close(whole, expected[1].to(dtype), dtype)
    kept = layer.kept.clone()
    layer.kept.fill_(NAN)
    parts, start = [], 0
    for count in cuts:
        parts.append(layer.prefill(1, start, count, padding))
        start += count
    assert torch.equal(torch.cat(parts), whole)
    assert layer.kept[[0, 2]].isnan().all(), "those of other slots"
    newest = torch.arange(max(0, tokens - taps + 1), tokens) % layer.kept.shape[1]
    assert torch.equal(layer.kept[1, newest], kept[1, newest])
    assert not kept[1, newest].isnan().any()


@settings(deadline=None, max_examples=examples(6, 40))
@given(
    channels=st.integers(1, 150),
    taps=st.integers(2, 5),
    width=st.integers(1, 4),
    prompt=st.integers(1, 9),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dtype=st.integers(0, 5),
)
def test_drafts_that_are_refused_leave_no_trace(
    device, dtypes, channels, taps, width, prompt, steps, dtype
):
    """Rows of several tokens, of which some are taken back: the bits are those of a prompt.

    As few entries are kept as an engine keeps.
    """
    dtype = dtypes[dtype % len(dtypes)]
    taken = [min(count, width) for count in steps]
    tokens = prompt + sum(taken) + width
    layer = Layer(channels, taps, tokens, dtype, device, entries=taps - 2 + width)
    whole = layer.prefill(0, 0, tokens)
    layer.kept.fill_(NAN)
    layer.prefill(0, 0, prompt)
    layer.prefill(2, 0, prompt)
    start = prompt
    for count in taken:
        # What is fed after those that are taken belongs to another sequence.
        inputs = layer.inputs.clone()
        layer.inputs[0, start + count :] = 7.0
        given = min(count + 1, width)
        found = layer.decode([None, (0, start), (2, prompt)], width, [0, given, width])
        assert torch.equal(found[1, :count], whole[start : start + count])
        layer.inputs = inputs
        start += count
    assert layer.kept[1].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_the_formula(bias):
    layer = Layer(20, 3, 12, torch.float32, "cpu", bias=bias, entries=2)
    expected = layer.formula().float()
    prompt = layer.prefill(2, 0, 5, padding=2)
    torch.testing.assert_close(prompt, expected[2, :5], rtol=1e-5, atol=1e-5)
    for position in range(5, 12):
        (y,) = layer.decode([(2, position)], 1)[0]
        torch.testing.assert_close(y, expected[2, position], rtol=1e-5, atol=1e-5)
    assert layer.kept[:2].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bcx_NX": torch.zeros(4, 23)}, "inputs of 23 values are not 3 of 8 channels"),
        ({"weight_CD": torch.zeros(8, 1)}, r"2 to 8 taps, not torch.float32 \[8, 1\]"),
        ({"weight_CD": torch.zeros(8, 3).half()}, r"weight must be .*float32 .*float16"),
        ({"bias_C": torch.zeros(7)}, r"bias must be a dense torch.float32 \[8\], not .* \[7\]"),
        ({"ring_SEC": torch.zeros(2, 3, 7)}, "inputs of 24 values are not 3 of 7 channels"),
        ({"ring_SEC": torch.zeros(2, 8)}, r"ring must be \[S, E, 8\], not torch.float32 \[2, 8\]"),
        ({"ring_SEC": torch.zeros(2, 2, 8)}, "4 lanes, 3 taps and 2 entries .* rows of 2"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[4\], not \(3,\)"),
        ({"tokens_per_row": 3}, "4 lanes, 3 taps and 3 entries cannot be rows of 3"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    lane = torch.zeros(4, dtype=torch.int32)
    operands = {
        "bcx_NX": torch.zeros(4, 24),
        "weight_CD": torch.zeros(8, 3),
        "bias_C": None,
        "ring_SEC": torch.zeros(2, 3, 8),
        "slot_N": lane,
        "position_N": lane,
        "tokens_per_row": 2,
    }
    with pytest.raises(ValueError, match=message):
        short_conv_decode(**(operands | change))


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
def test_a_prompt_wants_the_entries_of_its_taps():
    lane = torch.zeros(2, dtype=torch.int32)
    weight, kept = torch.zeros(8, 4), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="4 taps want 3 entries of the ring, which has 2"):
        short_conv_prefill(torch.zeros(2, 24), weight, None, kept, lane, lane)
