"""Mamba2 against its definition in float64, poisoned, in any company, and what is compiled.

Letters: as of `kernels/recurrent/mamba2/mamba2.py`.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch.nn import functional

from extent import some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.megatron.rewind import mamba_state_selective_copy
from graphengine.kernels.recurrent.mamba2.mamba2 import (
    mamba2_decode,
    mamba2_decode_gated,
    mamba2_norm,
    mamba2_prefill,
)
from graphengine.kernels.recurrent.mamba2.mamba2_reference import (
    mamba2_decode_reference,
    mamba2_norm_reference,
    mamba2_prefill_reference,
)
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Params, Mamba2Sizes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)
from launches.emulation import run_launch

MODULE = importlib.import_module("graphengine.kernels.recurrent.mamba2.mamba2")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = {
    "odd": Mamba2Sizes(heads=4, head_dim=20, groups=2, state_size=24, width=4),
    "one group": Mamba2Sizes(heads=2, head_dim=32, groups=1, state_size=16, width=2, dt_min=0.05),
    "limits": Mamba2Sizes(
        heads=2, head_dim=5, groups=2, state_size=7, width=1, dt_min=0.3, dt_max=0.9
    ),
}


class Case:
    """`tokens` tokens of some sequences from some positions on, as operands and in float64."""

    def __init__(self, sizes, starts, tokens, device, dtype=torch.float32, seed=0, bias=True):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.sizes, self.starts, self.device = sizes, starts, device
        rows, depth = len(starts), sizes.width - 1
        # What was projected for the tokens, and before them as far as the convolution sees.
        self.inputs = random(rows, depth + tokens, sizes.channels).to(device, dtype)
        # Large ones, where softplus is the identity, and small ones.
        self.dt = (random(rows, tokens, sizes.heads) * 4 - 1).to(device, dtype)
        self.dt[0, 0, 0], self.dt[-1, -1, -1] = 25.0, -18.0
        self.before = random(rows, *sizes.state_shape).to(device)
        self.params = Mamba2Params(
            random(sizes.channels, sizes.width).to(device, dtype),
            random(sizes.channels).to(device, dtype) if bias else None,
            random(sizes.heads).to(device),
            (random(sizes.heads) - 1).to(device),
            random(sizes.heads).to(device, dtype),
        )

    def part(self, rows, first, last):
        """Some tokens of some rows."""
        part = object.__new__(Case)
        depth = self.sizes.width - 1
        part.__dict__ = self.__dict__ | {
            "inputs": self.inputs[rows, first : depth + last],
            "dt": self.dt[rows, first:last],
            "before": self.before[rows],
            "starts": [start + first for start in self.starts[rows]],
        }
        return part

    def convolved(self):
        """Float64 x, B and C of each token, in one row: `[rows, tokens, C]`."""
        depth, tokens = self.sizes.width - 1, self.dt.shape[1]
        inputs = self.inputs.double().cpu().clone()
        for row, start in enumerate(self.starts):
            inputs[row, : max(0, depth - start)] = 0
        weight = self.params.conv_weight.double().cpu()
        total = sum(inputs[:, tap : tap + tokens] * weight[:, tap] for tap in range(depth + 1))
        if self.params.conv_bias is not None:
            total = total + self.params.conv_bias.double().cpu()
        return functional.silu(total)

    def expected(self, xbc):
        """y `[rows, tokens, I]` and the states after each token, in float64."""
        sizes, (bias, a_log, skip) = (
            self.sizes,
            (each.double().cpu() for each in self.params[2:]),
        )
        parts = (sizes.inner, *[sizes.groups * sizes.state_size] * 2)
        x, b, c = xbc.double().cpu().split(parts, dim=2)
        x = x.unflatten(2, (sizes.heads, -1))
        per_group = sizes.heads // sizes.groups
        b, c = (
            each.unflatten(2, (sizes.groups, -1)).repeat_interleave(per_group, 2) for each in (b, c)
        )
        dt = functional.softplus(self.dt.double().cpu() + bias, threshold=60)
        dt = dt.clamp(sizes.dt_min, sizes.dt_max)
        h = self.before.double().cpu().clone()
        h[torch.tensor(self.starts) == 0] = 0
        ys, states = [], []
        for token in range(x.shape[1]):
            decay = torch.exp(-dt[:, token] * a_log.exp())[..., None, None]
            added = torch.einsum("rh,rhp,rhk->rhpk", dt[:, token], x[:, token], b[:, token])
            h = decay * h + added
            read = torch.einsum("rhpk,rhk->rhp", h, c[:, token])
            ys.append((read + skip[:, None] * x[:, token]).flatten(1))
            states.append(h)
        return torch.stack(ys, 1), torch.stack(states, 1)

    def kept(self, width, slots, dtype=torch.float32):
        """Ring and state for steps of `width` tokens; what nobody reads is NaN.

        Row r is that of slot `slots - 1 - r`.
        """
        depth = self.sizes.width - 1
        ring = torch.full((slots, depth + width, self.sizes.channels), torch.nan)
        ring = ring.to(self.device, self.inputs.dtype)
        state = torch.full((slots, width, *self.sizes.state_shape), torch.nan, dtype=dtype)
        state = state.to(self.device)
        for row, start in enumerate(self.starts):
            for back in range(1, min(depth, start) + 1):
                entry = (start - back) % (depth + width)
                ring[slots - 1 - row, entry] = self.inputs[row, depth - back]
            if start > 0:
                state[slots - 1 - row, (start - 1) % width] = self.before[row].to(dtype)
        return ring, state

    def lanes(self, slots, there):
        """Slot and position of each lane; of row r the first `there[r]` tokens are there."""
        tokens = self.dt.shape[1]
        slot, position = [], []
        for row, start in enumerate(self.starts):
            lives = [token < there[row] for token in range(tokens)]
            slot += [slots - 1 - row if live else -1 for live in lives]
            position += [start + token if lives[token] else 2**31 - 1 for token in range(tokens)]
        return (
            torch.tensor(each, dtype=torch.int32, device=self.device) for each in (slot, position)
        )


def decode(case, ring, state, slot, position, reference=False):
    """z and what padded lanes have is NaN."""
    sizes, tokens = case.sizes, case.dt.shape[1]
    projected = torch.full(
        (len(slot), sizes.projected), torch.nan, dtype=case.dt.dtype, device=case.device
    )
    inputs = case.inputs[:, sizes.width - 1 :]
    projected[:, sizes.inner :] = torch.cat([inputs, case.dt], dim=2).flatten(0, 1)
    projected[slot < 0] = torch.nan
    operands = (projected, ring, state, slot, position, case.params, sizes)
    if not reference:
        return mamba2_decode(*operands, tokens_per_row=tokens)
    y = torch.full((len(slot), sizes.inner), torch.nan)
    return mamba2_decode_reference(*operands, tokens_per_row=tokens, out=y)


def assert_only(found, before, changed):
    """Only these (slot, entry) pairs of a state differ from what was there."""
    before = before.clone()
    for slot, entry in changed:
        before[slot, entry] = found[slot, entry]
    assert torch.equal(found.nan_to_num(7.0), before.nan_to_num(7.0)), "somebody else's entry"


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("reference", [False, True])
def test_decode_is_the_definition(device, dtypes, name, reference):
    """From the first token on and from others; some drafts and whole rows are not there."""
    device = "cpu" if reference else device
    dtype = dtypes[len(name) % 2]
    case = Case(SIZES[name], (0, 1, 7, 100, 5), 3, device, dtype, bias=name != "one group")
    there = (3, 3, 1, 2, 0)
    ring, state = case.kept(4, 6)
    before = ring.clone(), state.clone()
    y = decode(case, ring, state, *case.lanes(6, there), reference).view(5, 3, -1).cpu()
    wanted, states = case.expected(case.convolved())
    tokens = [(row, token) for row in range(5) for token in range(there[row])]
    for row, token in tokens:
        position = case.starts[row] + token
        found = state[5 - row, position % 4].double().cpu()
        torch.testing.assert_close(found, states[row, token], rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(y[row, token].double(), wanted[row, token], rtol=3e-5, atol=3e-4)
        own = case.inputs[row, case.sizes.width - 1 + token]
        assert torch.equal(ring[5 - row, position % ring.shape[1]], own)
    for found, was in zip((ring, state), before, strict=True):
        entries = found.shape[1]
        written = [(5 - row, (case.starts[row] + token) % entries) for row, token in tokens]
        assert_only(found, was, written)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_bits_do_not_depend_on_company_nor_on_the_tokens_of_a_row(device, state_dtype, reference):
    """Three tokens in one step, with neighbours, are three steps alone, to the bit."""
    device = "cpu" if reference else device
    case = Case(SIZES["odd"], (9, 0, 3), 3, device, seed=5)
    ring, together = case.kept(3, 4, state_dtype)
    y = decode(case, ring, together, *case.lanes(4, (3, 3, 3)), reference).view(3, 3, -1)
    for row in range(3):
        kept = case.part(slice(row, row + 1), 0, 3).kept(1, 1, state_dtype)
        for token in range(3):
            alone = case.part(slice(row, row + 1), token, token + 1)
            found = decode(alone, *kept, *alone.lanes(1, (1,)), reference)
            assert torch.equal(found[0], y[row, token])
            position = case.starts[row] + token
            assert torch.equal(kept[1][0, 0], together[3 - row, position % 3])


@pytest.mark.parametrize("reference", [False, True])
def test_a_step_goes_on_from_what_megatron_copies(device, reference):
    """Its steps keep each token's state and window apart, and copy those of the accepted token;
    here the position alone says which they are. From both the next step has the same bits.
    """
    device = "cpu" if reference else device
    sizes, tokens, accepted = SIZES["odd"], 4, [0, 1, 2, 3]
    depth, rows = sizes.width - 1, len(accepted)
    case = Case(sizes, [0, 1, 7, 30], tokens, device)
    ring, state = case.kept(tokens, rows)
    decode(case, ring, state, *case.lanes(rows, [tokens] * rows), reference)

    after = Case(sizes, [s + d + 1 for s, d in zip(case.starts, accepted, strict=True)], 1, device)
    after.params, after.dt = case.params, after.dt.clamp(max=1.0)
    own_ring, own_state = after.kept(1, rows)
    slots = [rows - 1 - row for row in range(rows)]
    for row, (slot, start) in enumerate(zip(slots, case.starts, strict=True)):
        entries = [(start + token) % tokens for token in range(tokens)]
        windows = [case.inputs[row, token + 1 : token + sizes.width] for token in range(tokens)]
        window, kept = own_ring.new_empty(1, 1, *windows[0].shape), own_state[None, slot, :1]
        # A row of decode, whose states have index 0.
        none, count = (torch.tensor([n], device=device) for n in (0, accepted[row]))
        for each, current in ((torch.stack(windows), window), (state[slot, entries], kept)):
            mamba_state_selective_copy(each[None, None], current, none, none, count, 1)
        for back in range(1, depth + 1):
            own_ring[slot, (after.starts[row] - back) % (depth + 1)] = window[0, 0, depth - back]
    lanes = [*after.lanes(rows, [1] * rows)]
    y = decode(after, ring, state, *lanes, reference)
    assert torch.equal(y, decode(after, own_ring, own_state, *lanes, reference))
    for slot, position in zip(slots, after.starts, strict=True):
        assert torch.equal(state[slot, position % tokens], own_state[slot, 0])


@pytest.mark.parametrize("head_dim", [32, 40])
def test_gated_outputs_are_those_of_the_scan_times_the_gate(device, dtypes, head_dim):
    """And with their squares a product makes the norm of them; states and rings are the same."""
    sizes = Mamba2Sizes(heads=3, head_dim=head_dim, groups=1, state_size=16, width=4)
    for dtype in dtypes:
        case = Case(sizes, (5, 0, 70), 2, device, dtype, seed=3)
        slot, position = case.lanes(4, (2, 1, 0))
        inputs = torch.cat([case.inputs[:, 3:], case.dt], dim=2).flatten(0, 1)
        z = torch.randn(6, sizes.inner, generator=torch.Generator().manual_seed(1))
        projected = torch.cat([z.to(device, dtype), inputs], dim=1)
        projected[slot < 0] = torch.nan
        norm = torch.rand(sizes.inner, generator=torch.Generator().manual_seed(2)).to(device)
        both = case.kept(2, 4), case.kept(2, 4)
        where = slot, position, case.params
        y = mamba2_decode(projected, *both[0], *where, sizes, tokens_per_row=2)
        found = mamba2_decode_gated(projected, *both[1], *where, norm, sizes, tokens_per_row=2)
        for plain, gated in zip(*both, strict=True):
            assert torch.equal(plain.nan_to_num(7.0), gated.nan_to_num(7.0))
        live = slot >= 0
        u = y[live].double() * functional.silu(projected[live, : sizes.inner].double())
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        assert found.scaled.dtype == dtype
        torch.testing.assert_close(
            found.scaled[live].double(), u * norm.double(), rtol=tolerance, atol=1e-4
        )
        torch.testing.assert_close(
            found.squares[:, live].double().sum(0), u.square().sum(1), rtol=1e-5, atol=1e-6
        )


def prefill(case, xbc, state, slot, position, dtype, reference=False):
    xbc, dt = xbc[0].clone(), case.dt[0].clone()
    xbc[slot < 0], dt[slot < 0] = torch.nan, torch.nan
    out = torch.full((len(slot), case.sizes.inner), 77.0, dtype=dtype, device=case.device)
    call = mamba2_prefill_reference if reference else mamba2_prefill
    return call(xbc, dt, state, slot, position, case.params, case.sizes, out=out)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    ("name", "start", "live"),
    [("odd", 0, 70), ("odd", 50, 15), ("one group", 64, 64), ("limits", 130, 1), ("odd", 3, 150)],
)
def test_prefill_is_the_definition(device, dtypes, name, start, live, reference):
    """Pieces that begin in the chunk, before it and with it; lanes that are not there."""
    device = "cpu" if reference else device
    for dtype in dtypes[:2]:
        case = Case(SIZES[name], (start,), live + 9, device, dtype)
        _, state = case.kept(2, 3)
        before = state.clone()
        xbc = case.convolved().to(device, dtype)
        y = prefill(case, xbc, state, *case.lanes(3, (live,)), dtype, reference).cpu()
        wanted, states = case.expected(xbc)
        tolerance = TOLERANCE[dtype]
        # A GPU multiplies inputs of 16 bits, powers and states in TF32: 10 bits after the first.
        tf32 = 1e-3 if case.device != "cpu" and dtype != torch.float32 else 0.0
        # Powers of a piece are differences of sums that may be in the hundreds.
        torch.testing.assert_close(
            y[:live].double(),
            wanted[0, :live],
            rtol=tolerance,
            atol=5e-4 + tolerance + tf32 * float(wanted.abs().max()),
        )
        assert (y[live:] == 77).all()
        last, wanted_state = (start + live - 1) % 2, states[0, live - 1]
        torch.testing.assert_close(
            state[2, last].double().cpu(),
            wanted_state,
            rtol=1e-4,
            atol=1e-4 + tf32 * float(wanted_state.abs().max()),
        )
        assert_only(state, before, [(2, last)])


def test_chunks_cut_at_pieces_are_one_chunk(device):
    """A piece's sums do not depend on the chunk that it is in."""
    case = Case(SIZES["odd"], (0,), 150, device)
    xbc = case.convolved().to(device, torch.float32)
    whole, parts = (case.kept(1, 1)[1] for _ in range(2))
    slot, position = case.lanes(1, (150,))
    y = prefill(case, xbc, whole, slot, position, torch.float32)
    pieces = []
    for first, last in ((0, 64), (64, 150)):
        part, lanes = case.part(slice(0, 1), first, last), slice(first, last)
        operands = (xbc[:, lanes], parts, slot[lanes], position[lanes])
        pieces.append(prefill(part, *operands, torch.float32))
    assert torch.equal(torch.cat(pieces), y) and torch.equal(parts, whole)


@pytest.mark.parametrize("reference", [False, True])
def test_a_chunk_of_nobody_changes_nothing(device, reference):
    device = "cpu" if reference else device
    case = Case(SIZES["odd"], (0,), 20, device)
    _, state = case.kept(1, 2)
    xbc = case.convolved().to(device, torch.float32)
    y = prefill(case, xbc, state, *case.lanes(2, (0,)), torch.float32, reference)
    assert (y == 77).all() and state.isnan().all()


@pytest.mark.parametrize("reference", [False, True])
def test_the_norm_is_that_of_each_group(device, dtypes, reference):
    device = "cpu" if reference else device
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        y = torch.randn(7, 90, generator=generator).to(device)
        inputs = torch.randn(7, 100, generator=generator).to(device, dtype)
        weight = torch.randn(90, generator=generator).to(device, dtype)
        slot = torch.tensor([0, -1, 3, 2, 5, -1, 6], dtype=torch.int32, device=device)
        y[slot < 0], inputs[slot < 0] = torch.nan, torch.nan
        z, live = inputs[:, 3:93], slot >= 0
        for groups in (1, 3):
            out = torch.full((7, 90), 77.0, dtype=dtype, device=device)
            call = mamba2_norm
            if reference:
                mamba2_norm_reference(y, z, weight, slot, groups=groups, eps=1e-3, out=out)
            else:
                call(y, z, weight, slot, groups=groups, eps=1e-3, out_dtype=dtype, out=out)
            u = y.double() * functional.silu(z.double())
            u = u.unflatten(1, (groups, -1))
            u = u * (u.square().mean(2, keepdim=True) + 1e-3).rsqrt()
            wanted = u.flatten(1) * weight.double()
            tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(
                out[live].double(), wanted[live], rtol=tolerance, atol=tolerance
            )
            assert (out[~live] == 77).all()


def operands(**changes):
    sizes = SIZES["limits"]
    return {
        "projected_NX": torch.zeros(4, sizes.projected),
        "ring_SFC": torch.zeros(1, 2, sizes.channels),
        "state_SEHPK": torch.zeros(1, 2, *sizes.state_shape),
        "slot_N": torch.zeros(4).int(),
        "position_N": torch.zeros(4).int(),
        "params": Mamba2Params(torch.zeros(38, 1), None, *(torch.zeros(2) for _ in range(3))),
        "sizes": sizes,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projected_NX": torch.zeros(4, 37)}, r"projected must be \[4, 50\], not \[4, 37\]"),
        ({"ring_SFC": torch.zeros(1, 2, 37)}, r"the ring must be.*entries, 38\].*2, 37\]"),
        ({"state_SEHPK": torch.zeros(1, 2, 2, 5, 8)}, r"the state must be.*entries, 2, 5, 7\]"),
        ({"state_SEHPK": torch.zeros(1, 2, 2, 5, 7).int()}, "not torch.int32"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[4\]"),
        ({"tokens_per_row": 3}, "4 lanes cannot be rows of 3 tokens with 2 entries of the state"),
        ({"tokens_per_row": 4}, "4 lanes cannot be rows of 4 tokens.* 2 of a convolution of 1"),
        (
            {"params": Mamba2Params(torch.zeros(38, 2), None, *[torch.zeros(2)] * 3)},
            r"conv_weight must be a dense \[38, 1\], not \[38, 2\]",
        ),
        (
            {"params": Mamba2Params(torch.zeros(38, 1), torch.zeros(37), *[torch.zeros(2)] * 3)},
            r"conv_bias must be a dense torch.float32 \[38\]",
        ),
        (
            {"params": Mamba2Params(torch.zeros(38, 1), None, *[torch.zeros(3)] * 3)},
            r"dt_bias must be a dense torch.float32 \[2\]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        mamba2_decode(**operands(**changes))


def test_chunks_that_do_not_fit_are_an_error():
    given = operands()
    given = {
        "xbc_TC": torch.zeros(4, 38), "dt_TH": torch.zeros(4, 2), "slot_T": given["slot_N"],
        "position_T": given["position_N"],
        **{name: given[name] for name in ("state_SEHPK", "params", "sizes")},
    }  # fmt: skip
    for changes, message in (
        ({"xbc_TC": torch.zeros(4, 37)}, r"xbc must be \[4, 38\], not \[4, 37\]"),
        ({"dt_TH": torch.zeros(3, 2)}, r"dt must be \[4, 2\], not \[3, 2\]"),
        ({"out": torch.zeros(4, 9)}, r"out must be torch.float32 \[4, 10\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mamba2_prefill(**given | changes)


def test_a_gate_that_does_not_fit_is_an_error():
    given = operands(norm_I=torch.zeros(10))
    with pytest.raises(ValueError, match="that of 1 group, not of 2"):
        mamba2_decode_gated(**given)
    given["sizes"] = Mamba2Sizes(heads=2, head_dim=5, groups=1, state_size=7, width=1)
    with pytest.raises(ValueError, match=r"norm_I must be a dense.*\[10\]"):
        mamba2_decode_gated(**given | {"norm_I": torch.zeros(9)})
    with pytest.raises(ValueError, match=r"projected must be \[4, 36\], not \[4, 50\]"):
        mamba2_decode_gated(**given)


def test_sizes_that_do_not_fit_are_an_error():
    sizes = {"heads": 6, "head_dim": 4, "groups": 3, "state_size": 8, "width": 4}
    for changes, message in (
        ({"groups": 4}, "6 heads are not a multiple of 4 groups"),
        ({"state_size": 0}, "sizes must be positive"),
        ({"width": 0}, "sizes must be positive"),
        ({"dt_min": 2.0, "dt_max": 1.0}, "dt_min=2.0 and dt_max=1.0 are no limits"),
        ({"dt_min": math.nan}, "dt_min=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Mamba2Sizes(**sizes | changes)
    with pytest.raises(ValueError, match="90 values are not 4 equal groups"):
        mamba2_norm(
            torch.zeros(2, 90), torch.zeros(2, 90), torch.zeros(90), torch.zeros(2).int(),
            groups=4, eps=0.1, out_dtype=torch.float32,
        )  # fmt: skip


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of(call, state_size=128):
    """The launch for Nemotron-H's sizes, for a larger state, or with Granite 4 H's one group."""
    groups = 1 if call is mamba2_decode_gated else 8
    sizes = Mamba2Sizes(heads=128, head_dim=64, groups=groups, state_size=state_size, width=4)
    lanes = 256
    params = Mamba2Params(
        new(sizes.channels, 4), new(sizes.channels), *(new(128) for _ in range(3))
    )
    slot, position = (new(lanes, dtype=torch.int32) for _ in range(2))
    if call is mamba2_norm:
        rows = new(lanes, sizes.inner, dtype=torch.float32), new(lanes, sizes.inner)
        return mamba2_norm(
            *rows, new(sizes.inner), slot, groups=8, eps=1e-5, out_dtype=torch.bfloat16, pdl=True
        )
    state = new(1, 4, *sizes.state_shape, dtype=torch.float32)
    inputs = new(lanes, sizes.channels), new(lanes, sizes.projected)[:, -128:]
    if call in (mamba2_decode, mamba2_decode_gated):
        ring = new(1, 7, sizes.channels, dtype=torch.float32)
        inputs = new(lanes, sizes.projected), ring
    norm = (new(sizes.inner),) if call is mamba2_decode_gated else ()
    return call(*inputs, state, slot, position, params, *norm, sizes, pdl=True)


CONVOLUTION = {"layer.conv_weight", "layer.conv_bias"}
HEAD = {"layer.dt_bias", "layer.a_log"}
OF_DECODE = CONVOLUTION | HEAD | {"layer.skip"}
EARLIER = {"slot_ptr", "position_ptr", "state_ptr", "ring_ptr"}
"""What decode finds as steps before this one, or launches before the last, left it."""


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("call", "state_size", "weights"),
    [
        (mamba2_decode, 128, {"decode_kernel": OF_DECODE | EARLIER}),
        (mamba2_decode_gated, 128, {"decode_kernel": OF_DECODE | EARLIER | {"gate_ptr"}}),
        *(
            (mamba2_prefill, size, {
                "pieces_kernel": HEAD, "pass_kernel": set(),
                "outputs_kernel": HEAD | {"layer.skip"},
            })
            for size in some_of([128, 256], 0)
        ),
        (mamba2_norm, 128, {"norm_kernel": {"weight_ptr", "slot_ptr", "z_ptr"}}),
    ],
)  # fmt: skip
def test_what_is_loaded_before_the_wait(call, state_size, weights):
    """Weights, and past the L1 cache what neither of the last two launches writes."""
    launches = []
    with launches_handed_to(launches.append, MODULE):
        launch_of(call, state_size)
    assert [launch.kernel.__name__ for launch in launches] == list(weights)
    for launch in launches:
        ptx, names = compile_launch(launch)
        assert_waits_before_it_shows(ptx)
        loads = list(global_loads(ptx, names))
        early = {load.argument for load in loads if not load.after_wait}
        assert early == weights[launch.kernel.__name__]
        for load in loads:
            if not load.after_wait and load.argument in EARLIER | {"z_ptr"}:
                assert load.past_l1, f"{load.argument} of {launch.kernel.__name__}"


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_compiled_kernels_are_their_references():
    """In bfloat16: their code for sm_90, run in numpy."""
    sizes = Mamba2Sizes(heads=16, head_dim=4, groups=2, state_size=24, width=4)
    case = Case(sizes, (0, 9), 2, "cpu", torch.bfloat16)
    kept, expected = case.kept(3, 4), case.kept(3, 4)
    slot, position = case.lanes(4, (2, 1))
    with launches_handed_to(run_launch, MODULE):
        y = decode(case, *kept, slot, position)
    live = slot >= 0
    wanted = decode(case, *expected, slot, position, reference=True)[live]
    torch.testing.assert_close(y[live], wanted, rtol=1e-5, atol=1e-4)
    for found, right in zip(kept, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5, equal_nan=True)

    z, weight = case.inputs[:, 1:3].flatten(0, 1)[:, :64], case.inputs[0, 0, :64]
    options = {"groups": 2, "eps": 1e-5, "out_dtype": torch.bfloat16}
    y[~live] = torch.nan
    with launches_handed_to(run_launch, MODULE):
        normed = mamba2_norm(y, z, weight, slot, **options)
    expected = mamba2_norm(y, z, weight, slot, **options)
    torch.testing.assert_close(normed[live], expected[live], rtol=1e-2, atol=1e-2)
