"""The gated delta net: against its formula, in any company, padded lanes poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from extent import LONG, examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.recurrent.conv import causal_conv_chunk
from graphengine.kernels.recurrent.gated_delta.gated_delta import (
    gated_delta_decode,
    gated_delta_prefill,
)
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import (
    GatedDeltaParams,
    GatedDeltaSizes,
)

# Triton's interpreter multiplies poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, HUGE, EPS = float("nan"), 2**30, 1e-6
SLOTS = 3


class Layer:
    """A layer, what a sequence for each slot is projected to, and what its slots keep."""

    def __init__(self, sizes, tokens, dtype, device, *, width=1, state_dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator).to(device)

        self.sizes = sizes
        heads = sizes.value_heads
        self.params = GatedDeltaParams(
            conv_weight=(random(sizes.channels, sizes.taps) * 0.5).to(dtype),
            a_log=random(heads),
            dt_bias=random(heads),
            norm=(1 + 0.1 * random(sizes.value_dim)).to(dtype),
        )
        self.inputs = random(SLOTS, tokens, sizes.projected).to(dtype)
        # As many entries as an engine keeps whose steps feed at most `width` tokens of a slot.
        self.ring = torch.full((SLOTS, sizes.taps - 1 + width, sizes.channels), NAN).to(self.inputs)
        state = torch.full((SLOTS, width, *sizes.state_shape), NAN, device=device)
        self.state = state.to(state_dtype)

    def lanes(self, count):
        slot = torch.full((count,), -1, dtype=torch.int32, device=self.inputs.device)
        poison = torch.full((count, self.sizes.projected), NAN).to(self.inputs)
        return poison, slot, torch.full_like(slot, HUGE)

    def prefill(self, slot, start, count, padding=0):
        projected, slots, position = self.lanes(count + padding)
        projected[:count] = self.inputs[slot, start : start + count]
        slots[:count], position[:count] = slot, torch.arange(start, start + count)
        qkv = causal_conv_chunk(
            projected[:, : self.sizes.channels],
            self.params.conv_weight,
            None,
            self.ring,
            slots,
            position,
            activation="silu",
        )
        where = (slots, position, self.params, self.sizes)
        return gated_delta_prefill(qkv, projected, self.state, *where, eps=EPS)[:count]

    def decode(self, rows, width, live=None):
        """`rows`: (slot, position) each, or None for a padded row; `live` tokens of each row."""
        projected, slots, position = self.lanes(len(rows) * width)
        for row, placed in enumerate(rows):
            if placed is None:
                continue
            slot, start = placed
            for token in range(width if live is None else live[row]):
                lane = row * width + token
                projected[lane] = self.inputs[slot, start + token]
                slots[lane], position[lane] = slot, start + token
        where = (slots, position, self.params, self.sizes)
        out = gated_delta_decode(
            projected, self.ring, self.state, *where, eps=EPS, tokens_per_row=width
        )
        return out.view(len(rows), width, -1)

    def after(self, slot, position):
        return self.state[slot, position % self.state.shape[1]]


def formula(layer, slot):
    """Outputs [T, I] and states [T, H, K, V] in float64, from the paper's recurrence."""
    sizes, params = layer.sizes, layer.params
    x = layer.inputs[slot].double()
    of_keys, heads = sizes.key_heads * sizes.key_dim, sizes.value_heads
    parts = (of_keys, of_keys, sizes.inner, sizes.inner, heads, heads)
    *qkv, z, b, a = x.split(parts, dim=1)
    mixed = torch.cat(qkv, dim=1).t()
    mixed = functional.conv1d(
        functional.pad(mixed, (sizes.taps - 1, 0)),
        params.conv_weight.double()[:, None],
        groups=sizes.channels,
    )
    q, k, v = functional.silu(mixed).t().split(parts[:3], dim=1)
    share = heads // sizes.key_heads

    def normed(part):
        part = part.unflatten(1, (sizes.key_heads, -1)).repeat_interleave(share, dim=1)
        return part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = normed(q) / sizes.key_dim**0.5, normed(k), v.unflatten(1, (heads, -1))
    decay = (-params.a_log.double().exp() * functional.softplus(a + params.dt_bias.double())).exp()
    state = x.new_zeros(sizes.state_shape)
    outputs, states = [], []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], wrong * b[t].sigmoid()[:, None])
        states.append(state)
        y = torch.einsum("hkv,hk->hv", state, q[t])
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * params.norm.double()
        outputs.append(y.flatten() * functional.silu(z[t]))
    return torch.stack(outputs), torch.stack(states)


def sizes_of(key_heads, share, key_dim, value_dim, taps):
    return GatedDeltaSizes(
        key_heads=key_heads,
        value_heads=key_heads * share,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=taps,
    )


ANY_SIZES = st.builds(
    sizes_of, st.integers(1, 2), st.integers(1, 3), st.integers(3, 20), st.integers(3, 40),
    st.integers(2, 4),
)  # fmt: skip
# On a GPU each other size is a kernel that takes seconds to compile.
SOME_SIZES = (
    st.sampled_from([sizes_of(1, 2, 20, 12, 3), sizes_of(2, 3, 20, 37, 4)])
    if torch.cuda.is_available() and not LONG
    else ANY_SIZES
)


def assert_near(found, expected, dtype, more=1.0):
    tolerance = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}[dtype] * more
    size = expected.abs().amax().item()
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance * max(size, 1.0)
    )


@settings(deadline=None, max_examples=examples(4, 40))
@given(
    sizes=SOME_SIZES,
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    dtype=st.integers(0, 5),
)
def test_prompts_have_the_formula_s_values(device, dtypes, sizes, cuts, padding, dtype):
    dtype = dtypes[dtype % len(dtypes)]
    layer = Layer(sizes, sum(cuts), dtype, device)
    expected, states = formula(layer, 1)
    found, start = [], 0
    for count in cuts:
        found.append(layer.prefill(1, start, count, padding))
        start += count
    assert_near(torch.cat(found), expected, dtype)
    assert_near(layer.after(1, start - 1), states[-1], dtype)
    assert layer.state[[0, 2]].isnan().all() and layer.ring[[0, 2]].isnan().all()


def test_a_chunk_s_bits_follow_from_absolute_pieces(device):
    """Whatever is fed at once: pieces end at multiples of 64."""
    sizes = sizes_of(1, 2, 20, 12, 3)
    layer = Layer(sizes, 150, torch.float32, device)
    whole, state = layer.prefill(0, 0, 150), layer.after(0, 149).clone()
    parts = [layer.prefill(0, start, count) for start, count in ((0, 64), (64, 64), (128, 22))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(layer.after(0, 149), state)


def test_keys_that_repeat_do_not_add_up_errors(device):
    """In a text that repeats a token, below the diagonal all numbers are near 1."""
    sizes = sizes_of(1, 2, 20, 12, 3)
    layer = Layer(sizes, 130, torch.float32, device)
    heads = sizes.value_heads
    layer.inputs[:] = layer.inputs[:, 5:6].clone()
    # beta near 1, and decays near 1.
    layer.inputs[:, :, -2 * heads : -heads] = 8.0
    layer.inputs[:, :, -heads:] = -8.0
    expected, states = formula(layer, 1)
    assert_near(layer.prefill(1, 0, 130, 2), expected, torch.float32)
    assert_near(layer.after(1, 129), states[-1], torch.float32)


@settings(deadline=None, max_examples=examples(4, 40))
@given(
    sizes=SOME_SIZES,
    width=st.integers(1, 4),
    prompt=st.integers(1, 9),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    halved=st.booleans(),
    dtype=st.integers(0, 5),
)
def test_drafts_that_are_refused_leave_no_trace(
    device, dtypes, sizes, width, prompt, steps, halved, dtype
):
    """Rows of several tokens, of which some are taken back, have the bits of tokens one by one."""
    dtype = dtypes[dtype % len(dtypes)]
    taken = [min(count, width) for count in steps]
    tokens = prompt + sum(taken) + width
    state_dtype = torch.float16 if halved else torch.float32
    options = {"state_dtype": state_dtype}
    alone = Layer(sizes, tokens, dtype, device, **options)
    layer = Layer(sizes, tokens, dtype, device, width=width, **options)
    for each in (alone, layer):
        each.prefill(0, 0, prompt)
    layer.prefill(2, 0, prompt)
    expected, states = formula(alone, 0)
    start = prompt
    for count in taken:
        inputs = layer.inputs.clone()
        # What is fed after those that are taken belongs to another sequence.
        layer.inputs[0, start + count :] = 0.5
        given = min(count + 1, width)
        found = layer.decode([None, (0, start), (2, prompt)], width, [0, given, width])
        for token in range(count):
            wanted = alone.decode([(0, start + token)], 1)[0, 0]
            assert torch.equal(found[1, token], wanted)
            if not halved:
                assert_near(wanted, expected[start + token], dtype, 2)
        layer.inputs = inputs
        start += count
        assert torch.equal(layer.after(0, start - 1), alone.after(0, start - 1))
    if not halved:
        assert_near(layer.after(0, start - 1), states[start - 1], dtype, 2)
    assert layer.state[1].isnan().all() and layer.ring[1].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize("share", [1, 3])
def test_reference_is_the_formula(share):
    layer = Layer(sizes_of(2, share, 6, 10, 4), 20, torch.float32, "cpu", width=2)
    expected, states = formula(layer, 2)
    assert_near(layer.prefill(2, 0, 7, padding=2), expected[:7], torch.float32)
    for position in range(7, 19, 2):
        found = layer.decode([(2, position), None], 2)[0]
        assert_near(found, expected[position : position + 2], torch.float32)
        assert_near(layer.after(2, position), states[position], torch.float32)
    assert layer.state[:2].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected_NX": torch.zeros(4, 29)}, r"projected must be \[4, 30\], not \[4, 29\]"),
        ({"ring_SEC": torch.zeros(2, 4, 19)}, r"ring must be \[S, E, 20\], not .* \[2, 4, 19\]"),
        ({"ring_SEC": torch.zeros(2, 3, 20)}, "2 entries and of rings with 3 cannot be rows of 2"),
        ({"state_SEHKV": torch.zeros(2, 1, 1, 6, 8)}, "1 entries .* cannot be rows of 2"),
        ({"state_SEHKV": torch.zeros(2, 2, 1, 8, 6)}, r"dense \[S, E, 1, 6, 8\] .* not torch"),
        ({"tokens_per_row": 3}, "4 lanes of states with 2 entries .* rows of 3"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[4\], not \(3,\)"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    sizes = sizes_of(1, 1, 6, 8, 3)
    lane = torch.zeros(4, dtype=torch.int32)
    operands = {
        "projected_NX": torch.zeros(4, 30),
        "ring_SEC": torch.zeros(2, 4, 20),
        "state_SEHKV": torch.zeros(2, 2, 1, 6, 8),
        "slot_N": lane,
        "position_N": lane,
        "params": GatedDeltaParams(
            torch.zeros(20, 3), torch.zeros(1), torch.zeros(1), torch.zeros(8)
        ),
        "sizes": sizes,
        "tokens_per_row": 2,
    }
    with pytest.raises(ValueError, match=message):
        gated_delta_decode(**(operands | change), eps=EPS)


def test_sizes_that_do_not_fit_each_other_are_errors():
    with pytest.raises(ValueError, match="3 heads of values are no multiple of 2 of keys"):
        GatedDeltaSizes(key_heads=2, value_heads=3, key_dim=4, value_dim=4, taps=4)
    with pytest.raises(ValueError, match=r"taps at least 2.*taps=1"):
        sizes_of(1, 1, 4, 4, 1)
