"""A step of flow matching: against the definition, with rows that are fixed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.flow.euler import euler_step, euler_step_reference

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@settings(deadline=None, max_examples=extent(5, 60))
@given(
    rows=st.integers(1, 8),
    columns=st.sampled_from([1, 6, 32, 50]),
    fixed=st.integers(0, 9),
    time=st.floats(0, 1, width=32),
    dtype=st.integers(0, 2),
)
def test_a_step_is_the_definition(device, dtypes, rows, columns, fixed, time, dtype):
    dtype = dtypes[dtype % len(dtypes)]
    generator = torch.Generator().manual_seed(rows + columns)
    x, noise, held = torch.randn(3, rows, columns, generator=generator)
    # Rows of a wider tensor.
    wide = torch.randn(rows, columns + 3, generator=generator).to(dtype)
    velocity = wide[:, :columns]
    wanted = x.double() - 0.1 * velocity.double()
    wanted[:fixed] = (time * noise.double() + (1 - time) * held.double())[:fixed]
    for step in (euler_step, euler_step_reference):
        # What is not read may be anything: fixed values behind the fixed rows, x in these.
        got, poisoned = x.clone(), held.clone()
        poisoned[fixed:] = torch.nan
        got[:fixed] = torch.nan
        out = torch.full((rows, columns), torch.nan, dtype=dtype, device=device)
        got, rest = got.to(device), poisoned.to(device)
        tensors = {
            "noise_MD": noise.to(device), "fixed_MD": rest, "out_MD": out,
            "fixed_1": torch.tensor([fixed], dtype=torch.int32, device=device),
        }  # fmt: skip
        step(got, wide.to(device)[:, :columns], dt=-0.1, time=time, **tensors)
        torch.testing.assert_close(got.double().cpu(), wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(out, got.to(dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_MD": torch.zeros(2, 4).double()}, "x must be a dense float32"),
        ({"noise_MD": torch.zeros(3, 4)}, r"noise must be a dense float32 \[2, 4\], not .*\[3, 4"),
        ({"fixed_1": torch.zeros(1)}, "fixed"),
        ({"velocity_MD": torch.zeros(2, 5)}, r"velocity \[2, 5\] and out \[2, 4\]"),
        ({"out_MD": torch.zeros(2, 5)[:, :4]}, r"out \[2, 4\], which must be dense"),
    ],
)
def test_what_does_not_fit_is_an_error(changes, message):
    options = {
        "x_MD": torch.zeros(2, 4), "velocity_MD": torch.zeros(2, 4), "noise_MD": torch.zeros(2, 4),
        "fixed_MD": torch.zeros(2, 4), "fixed_1": torch.zeros(1).int(), "out_MD": torch.zeros(2, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        euler_step(**options | changes, dt=-0.1, time=0.5)
