"""SwiGLU: against its reference, at any lane, poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.activation import (
    gelu,
    gelu_reference,
    sigmoid_reference,
    silu_reference,
    squared_relu,
    squared_relu_reference,
    swiglu,
    swiglu_reference,
)

SENTINEL = 77.0
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_rows(lanes: int, width: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(lanes, width, generator=generator) * 4).to(device, dtype)


def live_slots(lanes: int, padded: set[int] | None = None, device: str = "cpu") -> torch.Tensor:
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[sorted(padded or ())] = -1
    return slot.to(device)


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 40),
    F=st.integers(1, 300) | st.sampled_from([1024, 2048, 2500]),
    dtype=st.integers(0, 2),
    poison=st.sampled_from([0.0, float("nan"), float("inf")]),
    data=st.data(),
)
def test_matches_reference(device, dtypes, lanes, F, dtype, poison, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    gate_up = random_rows(lanes, 2 * F, dtype, device)
    gate_up[sorted(padded)] = poison
    slot = live_slots(lanes, padded, device)
    outs = [torch.full((lanes, F), SENTINEL, dtype=dtype, device=device) for _ in range(2)]
    swiglu(gate_up, slot, out=outs[0])
    swiglu_reference(gate_up, slot, out=outs[1])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)
    assert (outs[0][sorted(padded)] == SENTINEL).all()


def test_bits_do_not_depend_on_company(device, dtypes):
    gate_up = random_rows(64, 2 * 1100, dtypes[-1], device)
    whole = swiglu(gate_up, live_slots(64, device=device))
    for count in (1, 8, 17, 32):
        order = torch.randperm(64)[:count].to(device)
        assert torch.equal(swiglu(gate_up[order], live_slots(count, device=device)), whole[order])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gelu_is_torchs(device, dtypes):
    for dtype in dtypes:
        gate_up = random_rows(9, 2 * 300, dtype, device)
        gate, up = gate_up.double().chunk(2, dim=1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        slot = live_slots(9, device=device)
        for call in (swiglu, swiglu_reference):
            actual = call(gate_up, slot, activation="gelu_tanh").double()
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_an_unknown_activation_is_an_error(device):
    gate_up, slot = random_rows(1, 8, torch.float32, device), live_slots(1, device=device)
    for call in (swiglu, swiglu_reference):
        with pytest.raises(ValueError, match="activation='gelu' must be 'silu' or 'gelu_tanh'"):
            call(gate_up, slot, activation="gelu")


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("activation", ["gelu_tanh"])
def test_extreme_gates_of_gelu(device, activation):
    """Powers overflow as well."""
    gate_up = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, 2.0, 2.0, 2.0, 2.0, 2.0]])
    slot = live_slots(1, device=device)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e30]], device=device)
    for call in (swiglu, swiglu_reference):
        actual = call(gate_up.to(device), slot, activation=activation)
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_gates(device):
    """exp(-gate) overflows below -88: the limit is zero, not NaN."""
    gate_up = torch.tensor([[-1e4, -100.0, -50.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]])
    slot = live_slots(1, device=device)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]], device=device)
    torch.testing.assert_close(swiglu(gate_up.to(device), slot), expected)
    torch.testing.assert_close(swiglu_reference(gate_up.to(device), slot), expected)


def test_strided_rows_and_an_output_in_place(device):
    wide = torch.zeros(3, 50, device=device)
    gate_up = wide[:, :40]
    gate_up.copy_(random_rows(3, 40, torch.float32))
    slot = live_slots(3, {1}, device)
    expected = swiglu(gate_up.clone(), slot)
    up = gate_up[:, 20:].clone()
    kept = gate_up[1].clone()
    swiglu(gate_up, slot, out=gate_up[:, :20])
    assert torch.equal(gate_up[[0, 2], :20], expected[[0, 2]])
    assert torch.equal(gate_up[:, 20:], up)
    assert torch.equal(gate_up[1], kept)
    assert (wide[:, 40:] == 0).all()


def test_reference_matches_torch():
    x = random_rows(5, 333, torch.float32)
    torch.testing.assert_close(silu_reference(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(sigmoid_reference(x), torch.sigmoid(x))
    # Torch's own rounds differently at the end of an array.
    alone = [sigmoid_reference(value) for value in x.flatten().split(1)]
    assert torch.equal(torch.cat(alone), sigmoid_reference(x).flatten())


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@settings(deadline=None, max_examples=extent(20, 60))
@given(
    lanes=st.integers(2, 20),
    F=st.integers(1, 600) | st.sampled_from([4096, 20_001]),
    num_threads=st.sampled_from([1, 2]),
)
def test_reference_bits_do_not_depend_on_company(lanes, F, num_threads):
    gate_up = random_rows(lanes, 2 * F, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = swiglu_reference(gate_up, live_slots(lanes))
        for lane in {0, 1, lanes - 1}:
            alone = swiglu_reference(gate_up[lane : lane + 1], live_slots(1))
            assert torch.equal(alone[0], whole[lane])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "gate_up, slot, out, message",
    [
        (torch.zeros(2, 7), torch.zeros(2).int(), None, "two equal halves, not 7 values"),
        (torch.zeros(7), torch.zeros(7).int(), None, r"\(7,\)"),
        (torch.zeros(6, 2).t(), torch.zeros(2).int(), None, r"strides \(1, 2\)"),
        (torch.zeros(2, 6).int(), torch.zeros(2).int(), None, "is torch.int32"),
        (torch.zeros(2, 6), torch.zeros(3).int(), None, r"\[2\], not \(3,\)"),
        (torch.zeros(2, 6), torch.zeros(2).long(), None, "slot_N must be int32, not torch.int64"),
        (torch.zeros(2, 6), torch.zeros(2).int(), torch.zeros(2, 6), r"\[2, 3\].*\[2, 6\]"),
        (torch.zeros(2, 6), torch.zeros(2).int(), torch.zeros(2, 3).half(), "float32.*float16"),
    ],
)
def test_bad_operands_are_errors_with_numbers(gate_up, slot, out, message):
    with pytest.raises(ValueError, match=message):
        swiglu(gate_up, slot, out=out)


@pytest.mark.parametrize("F", [1, 300, 2500])
def test_squared_relu_is_torchs(device, dtypes, F):
    """In place too, for live lanes alone, and NaN stays NaN."""
    for dtype in dtypes:
        x = random_rows(5, F, dtype, device)
        x[0, 0] = float("nan")
        wanted = x.float().relu().square().to(dtype)
        x[3] = float("inf")
        slot = live_slots(5, {3}, device)
        for call in (squared_relu, squared_relu_reference):
            out = torch.full((5, F), SENTINEL, dtype=dtype, device=device)
            call(x, slot, out=out)
            again = x.clone()
            call(again, slot, out=again)
            for lane in (0, 1, 2, 4):
                assert torch.equal(out[lane].nan_to_num(9.0), wanted[lane].nan_to_num(9.0))
                assert torch.equal(again[lane].nan_to_num(9.0), wanted[lane].nan_to_num(9.0))
            assert (out[3] == SENTINEL).all() and torch.equal(again[3], x[3])


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("F", [1, 300, 2500])
def test_ungated_gelu_is_torchs(device, dtypes, F, tanh):
    """In place too, for live lanes alone; a lane's bits do not depend on its neighbours."""
    for dtype in dtypes:
        x = random_rows(5, F, dtype, device)
        form = "tanh" if tanh else "none"
        wanted = torch.nn.functional.gelu(x.float(), approximate=form).to(dtype)
        x[3] = float("nan")
        slot, live = live_slots(5, {3}, device), [0, 1, 2, 4]
        tolerance = TOLERANCE[dtype]
        for call in (gelu, gelu_reference):
            out = torch.full((5, F), SENTINEL, dtype=dtype, device=device)
            call(x, slot, tanh=tanh, out=out)
            torch.testing.assert_close(out[live], wanted[live], rtol=tolerance, atol=tolerance)
            assert (out[3] == SENTINEL).all()
            again = x[2:3].clone()
            call(again, slot[2:3], tanh=tanh, out=again)
            assert torch.equal(again[0], out[2])


def test_a_gelu_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"out must be torch.float32 \[2, 8\]"):
        gelu(torch.zeros(2, 8), torch.zeros(2).int(), tanh=True, out=torch.zeros(2, 7))


def test_a_squared_relu_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"out must be torch.float32 \[2, 8\]"):
        squared_relu(torch.zeros(2, 8), torch.zeros(2).int(), out=torch.zeros(2, 7))
