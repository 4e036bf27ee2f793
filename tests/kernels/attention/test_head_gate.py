"""The gate of attention's heads, whatever order its gates lie in; padded lanes poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.attention.head_gate import gate_heads
from graphengine.kernels.core.dispatch import INTERPRETED

NAN = float("nan")


def check(device, dtype, lanes, heads, parts, width, padded, assert_close):
    generator = torch.Generator().manual_seed(lanes)
    head_dim = 2 * parts * width
    # A part of wider rows, as products leave them.
    wide = torch.randn(lanes, heads * head_dim + 7, generator=generator).to(device, dtype)
    x = torch.randn(lanes, heads * head_dim, generator=generator).to(device, dtype)
    slot = torch.arange(lanes, dtype=torch.int32, device=device)
    wide[padded], x[padded], slot[padded] = NAN, NAN, -1
    gate = wide[:, 3:-4]
    # The gate of value (i, j, k) is gate (j, i, k).
    ordered = gate.double().reshape(lanes, heads, 2, parts, width).transpose(2, 3).flatten(1)
    expected = (x.double() * torch.sigmoid(ordered)).to(dtype)
    found = gate_heads(x, gate, slot, head_dim=head_dim, parts=parts)
    assert found is x
    live = slot >= 0
    assert_close(found[live], expected[live], dtype)
    assert found[~live].isnan().all()


@settings(deadline=None, max_examples=examples(6, 40))
@given(
    lanes=st.integers(1, 5),
    heads=st.integers(1, 6),
    parts=st.sampled_from([1, 2, 4]),
    width=st.integers(1, 40),
    padded=st.sets(st.integers(0, 4)),
    dtype=st.integers(0, 5),
)
def test_values_are_gated(
    device, dtypes, assert_products_close, lanes, heads, parts, width, padded, dtype
):
    rows = sorted(lane for lane in padded if lane < lanes)
    dtype = dtypes[dtype % len(dtypes)]
    check(device, dtype, lanes, heads, parts, width, rows, assert_products_close)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize("parts", [1, 4])
def test_reference(parts):
    def close(found, expected, dtype):
        torch.testing.assert_close(found, expected)

    check("cpu", torch.float32, 4, 3, parts, 5, [1], close)


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_NA": torch.zeros(2, 15)}, r"gates are .* \[2, 15\], values .* \[2, 16\]"),
        ({"gate_NA": torch.zeros(2, 16).half()}, "gates are torch.float16"),
        ({"head_dim": 6}, "16 values are no heads of head_dim=6 with 4 equal pieces"),
        ({"parts": 3}, "head_dim=8 with 6 equal pieces"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    operands = {
        "x_NA": torch.zeros(2, 16),
        "gate_NA": torch.zeros(2, 16),
        "slot_N": torch.zeros(2, dtype=torch.int32),
        "head_dim": 8,
        "parts": 2,
    }
    with pytest.raises(ValueError, match=message):
        gate_heads(**(operands | change))
