"""Embedding: exact, at any lane, poisoned, with ids that are not in the table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope import embedding
from graphengine.kernels.norm_rope.embedding import (
    GIVEN,
    GivenRows,
    add_given,
    add_given_reference,
    embed,
    embed_reference,
)
from launches.compilation import compile_launch, record_launch

SENTINEL = 77.0
HUGE = [2**31 - 1, -(2**31), -1, 10**9]


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 40),
    V=st.integers(1, 50),
    H=st.integers(1, 200) | st.sampled_from([1024, 1500]),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_matches_reference(device, dtypes, lanes, V, H, dtype, data):
    """Padded lanes hold huge ids; live ones may too, and are NaN then."""
    token = data.draw(
        st.lists(st.integers(0, V - 1) | st.sampled_from(HUGE), min_size=lanes, max_size=lanes)
    )
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    table = torch.randn(V, H, generator=torch.Generator().manual_seed(0))
    table = table.to(device, dtypes[dtype % len(dtypes)])
    token = torch.tensor(token, dtype=torch.int32)
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[padded] = -1

    expected = torch.full((lanes, H), float("nan"))
    known = (token >= 0) & (token < V)
    expected[known] = table.cpu().float()[token[known].long()]
    expected[padded] = SENTINEL
    for op in (embed, embed_reference):
        out = torch.full((lanes, H), SENTINEL, device=device)
        assert op(token.to(device), table, slot.to(device), out=out) is out
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_scaled_embedding_is_rounded_as_transformers_rounds_it(device, dtypes):
    gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    for dtype in dtypes:
        theirs = gemma3.Gemma3TextScaledWordEmbedding(9, 1100, None, embed_scale=1100**0.5)
        torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(0))
        theirs = theirs.to(dtype)
        scale = torch.tensor(1100**0.5, dtype=dtype).item()
        token, slot = torch.tensor([8, 0, 9, 3]).int(), torch.tensor([0, 1, 2, -1]).int()
        expected = theirs(token[:2].long()).float()
        table = theirs.weight.detach().to(device)
        for op in (embed, embed_reference):
            x = op(token.to(device), table, slot.to(device), scale=scale).cpu()
            assert torch.equal(x[:2], expected) and x[2].isnan().all()


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 20),
    M=st.integers(1, 20),
    H=st.integers(1, 60) | st.sampled_from([1500]),
    first=st.sampled_from([0, 7, 100_000]),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_given_rows_take_the_place_of_the_table(device, dtypes, lanes, M, H, first, dtype, data):
    """Tokens of rows that are not there are NaN, and what no live lane names is never read. Row 0
    may have a position by lane.
    """
    dtype, V = dtypes[dtype % len(dtypes)], 9
    rows = st.integers(first - 2, first + M + 1).map(lambda position: GIVEN - position)
    ids = st.integers(0, V - 1) | rows | st.sampled_from(HUGE)
    token = torch.tensor(
        data.draw(st.lists(ids, min_size=lanes, max_size=lanes)), dtype=torch.int32
    )
    by_lane = data.draw(st.booleans())
    shift = torch.arange(lanes, dtype=torch.int32) * 3 if by_lane else torch.zeros(1).int()
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    slot = torch.zeros(lanes, dtype=torch.int32)
    slot[padded] = -1
    noise = torch.Generator().manual_seed(0)
    table = torch.randn(V, H, generator=noise).to(dtype)
    held = torch.randn(M, H, generator=noise).to(dtype)
    expected = torch.full((lanes, H), float("nan"))
    named = set()
    for lane, id in enumerate(token.tolist()):
        if 0 <= id < V:
            expected[lane] = (table[id].float() * 1.5).to(dtype).float()
        elif 0 <= GIVEN - id - first < M:
            expected[lane] = (held[GIVEN - id - first].float() * 0.7).to(dtype).float()
            named |= set() if lane in padded else {GIVEN - id - first}
    expected[padded] = SENTINEL
    held[[row for row in range(M) if row not in named]] = float("nan")
    token = torch.where((token <= GIVEN) & (token > -(2**30)), token - shift, token)
    start = (first + shift).to(device)
    for op in (embed, embed_reference):
        out = torch.full((lanes, H), SENTINEL, device=device)
        on = GivenRows(held.to(device), start, 0.7)
        op(token.to(device), table.to(device), slot.to(device), scale=1.5, given=on, out=out)
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_strided_table(device):
    wide = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(device)
    token = torch.tensor([8, 0, 3], dtype=torch.int32, device=device)
    slot = torch.zeros(3, dtype=torch.int32, device=device)
    assert torch.equal(embed(token, wide[:, 5:25], slot), wide[token.long(), 5:25])


def test_table_beyond_int32_offsets(device):
    if device != "cuda":
        pytest.skip("needs 4.5 GB on a GPU")
    V, H = 2_200_000, 1024
    assert V * H > 2**31
    table = torch.empty(V, H, dtype=torch.bfloat16, device=device).normal_()
    token = torch.tensor([V - 1, V, 0], dtype=torch.int32, device=device)
    x = embed(token, table, torch.zeros(3, dtype=torch.int32, device=device))
    assert torch.equal(x[[0, 2]], table[[V - 1, 0]].float())
    assert x[1].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_a_kernel_without_given_rows_reads_none():
    """Compiled for sm_90."""
    on = GivenRows(torch.zeros(3, 64, dtype=torch.bfloat16), ONE, 1.0)
    tensors = torch.zeros(4).int(), torch.zeros(9, 64, dtype=torch.bfloat16), torch.zeros(4).int()
    plain, held = (
        compile_launch(record_launch(embedding, lambda rows=rows: embed(*tensors, given=rows)))
        for rows in (None, on)
    )
    assert plain[1] == ["token_ptr", "table_ptr", "slot_ptr", "out_ptr", "", "", ""]
    assert {*held[1]} == {*plain[1], "given_ptr", "first_ptr"}
    assert held[0].count("ld.global") > plain[0].count("ld.global")


ONE = torch.zeros(1).int()


def operands() -> dict[str, object]:
    return {
        "token_N": torch.zeros(2).int(),
        "table_VH": torch.zeros(5, 8),
        "slot_N": torch.zeros(2).int(),
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"token_N": torch.zeros(2).long()}, "token_N must be int32, not torch.int64"),
        ({"token_N": torch.zeros(3).int()}, r"token_N must be a dense \[2\], not \(3,\)"),
        ({"slot_N": torch.zeros(2).long()}, "slot_N must be int32, not torch.int64"),
        ({"table_VH": torch.zeros(5)}, r"\(5,\)"),
        ({"table_VH": torch.zeros(8, 5).t()}, r"strides \(1, 5\)"),
        ({"table_VH": torch.zeros(5, 8).int()}, "table_VH is torch.int32"),
        ({"given": GivenRows(torch.zeros(3, 7), ONE, 1.0)}, "given rows of 7 values .* has 8 of"),
        (
            {"given": GivenRows(torch.zeros(3, 8).half(), ONE, 1.0)},
            "8 values of torch.float16, the",
        ),
        ({"given": GivenRows(torch.zeros(3), ONE, 1.0)}, r"\(3,\)"),
        ({"given": GivenRows(torch.zeros(3, 8), ONE.long(), 1.0)}, "first must be int32, not tor"),
        (
            {"given": GivenRows(torch.zeros(3, 8), torch.zeros(3).int(), 1.0)},
            r"first must be a dense \[2\], not \(3,\)",
        ),
        ({"out": torch.zeros(2, 7)}, r"\[2, 8\].*\[2, 7\]"),
        ({"out": torch.zeros(2, 8).half()}, "out must be torch.float32.*float16"),
    ],
)
def test_bad_operands_are_errors_with_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        embed(**{**operands(), **changes})


# Features between layers.


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 30),
    H=st.integers(1, 200) | st.sampled_from([1024, 1500]),
    first=st.integers(0, 10**6),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_given_rows_are_added_to_lanes_that_have_one(device, dtypes, lanes, H, first, dtype, data):
    """Padded lanes hold huge ids, other live ones tokens; rows of no lane are NaN."""
    M = data.draw(st.integers(1, 30))
    dtype = dtypes[dtype % len(dtypes)]
    rows = torch.full((M, 3 * H), float("nan"), dtype=dtype)
    token, slot = torch.arange(lanes, dtype=torch.int32), torch.arange(lanes, dtype=torch.int32)
    x = torch.randn(lanes, H + 3, generator=torch.Generator().manual_seed(1))[:, :H]
    expected = x.clone()
    for lane in range(lanes):
        kind = data.draw(st.sampled_from(["token", "given", "unknown", "padded"]))
        row = data.draw(st.integers(0, M - 1))
        if kind == "given":
            token[lane] = GIVEN - (first + row)
            rows[row, H : 2 * H] = torch.full((H,), lane / 4).to(dtype)
        elif kind == "unknown":
            token[lane] = GIVEN - (first + M + row)
            expected[lane] = float("nan")
        elif kind == "padded":
            token[lane] = data.draw(st.sampled_from(HUGE))
            slot[lane] = -1
    for lane in range(lanes):
        row = GIVEN - int(token[lane]) - first
        if slot[lane] >= 0 and 0 <= row < M:
            expected[lane] += rows[row, H : 2 * H].float()
    by_lane = data.draw(st.booleans())
    shift = torch.arange(lanes, dtype=torch.int32) * 3 if by_lane else torch.zeros(1).int()
    token = torch.where((token <= GIVEN) & (token > -(2**30)), token - shift, token)
    here = (first + shift).to(device)
    features = GivenRows(rows.to(device)[:, H : 2 * H], here, 1.0)
    for op in (add_given, add_given_reference):
        out = torch.empty_strided(x.shape, x.stride(), device=device).copy_(x)
        op(out, token.to(device), slot.to(device), features)
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_wrong_features_are_named():
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="given rows of 7 values, the stream has 8"):
        add_given(torch.zeros(1, 8), one, one, GivenRows(torch.zeros(3, 7), one, 1.0))
    with pytest.raises(ValueError, match=r"token_N must be int32, not torch\.int64"):
        add_given(torch.zeros(1, 8), one.long(), one, GivenRows(torch.zeros(3, 8), one, 1.0))


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_adding_features_compiles_for_sm_90():
    def new(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = new(65, 4, 2560, dtype=torch.bfloat16)[:, 1]
    tensors = (new(64, 2560, dtype=torch.float32), new(64), new(64))
    for entries in (1, 64):
        given = GivenRows(rows, new(entries), 1.0)
        launch = record_launch(embedding, lambda given=given: add_given(*tensors, given))
        ptx, _ = compile_launch(launch)
        assert "ld.global" in ptx
