"""LayerNorm and learned positions: against torch's, at any lane, poisoned."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Store
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.norm_rope import layer_norm as module
from graphengine.kernels.norm_rope.layer_norm import (
    add_layer_norm,
    add_positions,
    layer_norm,
    layer_norm_residual,
)
from launches.compilation import compile_kernel, record_launch

SENTINEL = 77.0
EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LANES = 9
PADDED = [0, 4]


def case(H, dtype, device, *, biased=True):
    """A stream with another mean in each lane, weights, and slots of which two are padded."""
    generator = torch.Generator().manual_seed(H)
    x = torch.randn(LANES, H, generator=generator) * 3 + torch.arange(-4.0, 5.0)[:, None]
    weight, bias = torch.randn(2, H, generator=generator).to(device, dtype)
    slot = torch.arange(LANES, dtype=torch.int32)
    slot[PADDED] = -1
    return x.to(device), weight, bias if biased else None, slot.to(device)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("H", [1, 7, 300, 8200])
def test_it_is_torchs(device, dtypes, H, biased):
    """Padded lanes are neither read nor written; x may be the output."""
    for dtype in dtypes:
        x, weight, bias, slot = case(H, dtype, device, biased=biased)
        wide = None if bias is None else bias.float()
        wanted = functional.layer_norm(x, (H,), weight.float(), wide, EPS).to(dtype)
        live = [lane for lane in range(LANES) if lane not in PADDED]
        outs = []
        for poison in (0.0, float("nan")):
            x[PADDED] = poison
            out = torch.full((LANES, H), SENTINEL, dtype=dtype, device=device)
            layer_norm(x, weight, bias, slot, eps=EPS, out_dtype=dtype, out=out)
            outs.append(out)
        assert torch.equal(*outs) and bool((outs[0][PADDED] == SENTINEL).all())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(outs[0][live], wanted[live], rtol=tolerance, atol=tolerance)
        same = x.clone()
        layer_norm(same, weight, bias, slot, eps=EPS, out_dtype=torch.float32, out=same)
        torch.testing.assert_close(same[live].to(dtype), outs[0][live], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("H", [7, 300, 8200])
def test_a_sum_is_normed(device, dtypes, H):
    """Bit for bit as in two steps; y may be the output, and padded lanes stay."""
    for dtype in dtypes:
        x, weight, bias, slot = case(H, dtype, device)
        y = torch.randn(LANES, H, generator=torch.Generator().manual_seed(3)).to(device, dtype)
        x[PADDED], y[PADDED] = float("nan"), SENTINEL
        total = x + y.float()
        wanted = torch.full_like(y, SENTINEL)
        layer_norm(total, weight, bias, slot, eps=EPS, out_dtype=dtype, out=wanted)
        add_layer_norm(x, y, weight, bias, slot, eps=EPS, out=y)
        assert torch.equal(y, wanted)
        assert torch.equal(x[slot >= 0], total[slot >= 0]) and bool(x[PADDED].isnan().all())


@pytest.mark.parametrize("H", [48, 9000])
def test_bits_do_not_depend_on_company(device, dtypes, H):
    x, weight, bias, _ = case(H, dtypes[-1], device)
    slots = torch.arange(LANES, dtype=torch.int32, device=device)
    options = {"eps": EPS, "out_dtype": dtypes[-1]}
    whole = layer_norm(x, weight, bias, slots, **options)
    for count in (1, 2, 5):
        order = torch.randperm(LANES)[:count].to(device)
        part = layer_norm(x[order], weight, bias, slots[:count], **options)
        assert torch.equal(part, whole[order])


def test_a_stream_is_handed_on_with_an_rms_of_1(device):
    """So that a product of it, which divides by the rms, is a product of the normed rows."""
    H = 70
    x, weight, bias, slot = case(H, torch.float32, device)
    rows = torch.randn(12, H, generator=torch.Generator().manual_seed(1)).to(device)
    for eps in (1e-5, 1e-2):
        residual = new_residual(LANES, H, 3, dtype=torch.float32, device=device)
        residual.x.copy_(x)
        residual.scaled.fill_(SENTINEL)
        normed = layer_norm_residual(residual, weight, bias, slot, eps=eps)
        assert torch.equal(normed.x, x) and normed.squares.shape == (1, LANES)
        assert bool((normed.scaled[PADDED] == SENTINEL).all())
        call = LinearCall(normed.scaled, rows, slot, normed.squares, eps)
        found = linear(call, Store())
        wanted = functional.layer_norm(x, (H,), weight, bias, eps) @ rows.t()
        live = slot >= 0
        torch.testing.assert_close(found[live], wanted[live], rtol=1e-5, atol=1e-4)


def test_positions_are_added(device, dtypes):
    """A position that has no row becomes NaN, and padded lanes stay."""
    H, P = 1100, 6
    for dtype in dtypes:
        x, *_, slot = case(H, dtype, device)
        table = torch.randn(P, H, generator=torch.Generator().manual_seed(2)).to(device, dtype)
        position = torch.tensor([9, 5, 0, 3, -7, 3, P, -1, 1], dtype=torch.int32, device=device)
        before = x.clone()
        add_positions(x, table, slot, position)
        for lane, at in enumerate(position.tolist()):
            if lane in PADDED:
                assert torch.equal(x[lane], before[lane])
            elif 0 <= at < P:
                assert torch.equal(x[lane], before[lane] + table[at].float())
            else:
                assert bool(x[lane].isnan().all())


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("kind", ["rows", "stream", "positions"])
def test_kernels_compile(kind):
    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    slot, x = new(4, dtype=torch.int32), new(4, 96, dtype=torch.float32)

    def call():
        if kind == "positions":
            add_positions(x, new(50, 96), slot, slot, pdl=True)
        elif kind == "rows":
            options = {"eps": EPS, "out_dtype": torch.bfloat16, "pdl": True}
            layer_norm(x, new(96), None, slot, **options)
        else:
            residual = new_residual(4, 96, 2, dtype=torch.bfloat16, device="meta")
            layer_norm_residual(residual, new(96), new(96), slot, eps=EPS, pdl=True)

    compiled, _ = compile_kernel(record_launch(module, call))
    assert "griddepcontrol.wait" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 8), torch.zeros(7), None, torch.zeros(2).int()), r"weight_H.*8.*7"),
        (
            (torch.zeros(2, 8), torch.zeros(8), torch.zeros(9), torch.zeros(2).int()),
            r"bias_H.*8.*9",
        ),
        ((torch.zeros(2, 8), torch.zeros(8), None, torch.zeros(3).int()), r"\[2\], not \(3,\)"),
    ],
)
def test_bad_operands_are_errors_with_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(*arguments, eps=EPS, out_dtype=torch.float32)


def test_a_sum_of_other_rows_is_an_error():
    x, weight, slot = torch.zeros(2, 8), torch.zeros(8), torch.zeros(2).int()
    with pytest.raises(ValueError, match=r"\[2, 7\] cannot be added .* torch.float32 \[2, 8\]"):
        add_layer_norm(x, torch.zeros(2, 7), weight, None, slot, eps=EPS, out=x.clone())


def test_positions_of_another_width_are_an_error():
    slot = torch.zeros(2).int()
    with pytest.raises(ValueError, match="positions have 9 values, the stream 8"):
        add_positions(torch.zeros(2, 8), torch.zeros(4, 9), slot, slot)
