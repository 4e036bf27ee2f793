"""Weights laid out for the kernels: each code where the module says, and nothing lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.kernels.linear import packed as packed_module
from graphengine.kernels.linear.packed import (
    first_rows,
    pack,
    packed_rows,
    rows_of,
    select_rows,
    unpack,
)
from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    dequantise,
    unpacked_codes,
)
from launches.quantised import FORMATS, random_quantised


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    outputs=st.integers(1, 40),
    pairs=st.integers(1, 150),
    swiglu=st.booleans(),
)
def test_what_is_unpacked_is_what_was_packed(name, outputs, pairs, swiglu):
    M, K = 2 * outputs if swiglu else outputs, 2 * pairs
    weight = random_quantised(name, M, K)
    packed = pack(weight, swiglu=swiglu)
    again = unpack(packed)
    assert packed.shape == again.shape == (M, K)
    assert torch.equal(unpacked_codes(again), unpacked_codes(weight))
    assert torch.equal(dequantise(again), dequantise(weight))


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_rows_are_those_of_the_whole(name):
    """Also where a block has others after them, as where a tokenizer cuts a vocabulary."""
    weight = random_quantised(name, 40, 128)
    packed, expected = pack(weight), dequantise(weight)
    for rows in (1, 15, 16, 17, 39, 40):
        first = first_rows(packed, rows)
        assert first.shape == (rows, 128) and first.codes.data_ptr() == packed.codes.data_ptr()
        assert torch.equal(dequantise(unpack(first)), expected[:rows]), f"{rows=}"
    for start, rows in ((16, 20), (32, 8), (16, 3)):
        part = rows_of(packed, start, rows)
        assert torch.equal(dequantise(unpack(part)), expected[start : start + rows]), f"{start=}"
    with pytest.raises(ValueError, match="row 20 is inside of a block: these begin every 16 rows"):
        rows_of(packed, 20, 16)


def test_rows_of_a_swiglu_are_not_looked_for():
    packed = pack(random_quantised("int8", 32, 64), swiglu=True)
    with pytest.raises(ValueError, match="32 rows of a SwiGLU alternate: none are the first"):
        first_rows(packed, 16)
    with pytest.raises(ValueError, match="32 rows of a SwiGLU alternate: none can be selected"):
        select_rows(packed, torch.arange(2))


@pytest.mark.parametrize("name", FORMATS)
def test_selected_rows_mean_what_they_meant(name, monkeypatch):
    """Selected a few at a time, with a factor for each row where there is one for all scales."""
    monkeypatch.setattr(packed_module, "_SELECTED_AT_ONCE", 4)
    weight = random_quantised(name, 40, 128)
    if name == "nvfp4":
        weight = weight._replace(whole=torch.rand(40, 1) + 0.5)
    rows = torch.tensor([0, 3, 4, 15, 16, 17, 30, 38, 39])
    selected = select_rows(pack(weight), rows)
    assert selected.shape == (9, 128)
    assert torch.equal(dequantise(unpack(selected)), dequantise(weight)[rows])


def test_few_rows_are_unpacked_at_a_time(monkeypatch):
    unpacked = []

    def recorded(packed):
        unpacked.append(packed.shape[0])
        return unpack(packed)

    monkeypatch.setattr(packed_module, "unpack", recorded)
    monkeypatch.setattr(packed_module, "_SELECTED_AT_ONCE", 4)
    select_rows(pack(random_quantised("int4", 400, 128)), torch.arange(0, 400, 40))
    assert unpacked == [64, 64, 32]


def test_the_order_of_columns_is_kept():
    weight = random_quantised("int4", 16, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int()
    weight = weight._replace(order=order)
    assert torch.equal(dequantise(unpack(pack(weight))), dequantise(weight))


def place(row: int, column: int, bits: int) -> tuple[int, int, int]:
    """Block of rows, block of columns, and first bit in its block of a code: by the docstring."""
    width = 256 // bits
    at = column % width
    # Of 16 columns a thread has 4; a block has 2 or 4 times 16.
    sixteen, thread, of_thread = at // 16, at % 16 // 4, at % 4
    pair, half = of_thread // 2, of_thread % 2
    upper, of_eight = row % 16 // 8, row % 8
    if bits == 8:
        word, lower_bit = 2 * upper + sixteen, 8 * pair
    else:
        word, lower_bit = 2 * (sixteen // 2) + upper, 8 * (sixteen % 2) + 4 * pair
    byte_of_thread = 16 * (4 * of_eight + thread)
    return row // 16, column // width, 8 * (byte_of_thread + 4 * word) + 16 * half + lower_bit


@pytest.mark.parametrize("name", ["e4m3", "int4"])
def test_codes_lie_where_threads_want_them(name):
    weight = random_quantised(name, 32, 192)
    bits, codes = weight.format.bits, unpacked_codes(weight)
    blocks = pack(weight).codes.view(torch.uint8)
    assert blocks.shape == (2, 192 * bits // 256, 512)
    for row in range(0, 32, 3):
        for column in range(192):
            i, j, bit = place(row, column, bits)
            found = int(blocks[i, j, bit // 8]) >> bit % 8 & (1 << bits) - 1
            assert found == int(codes[row, column]), f"{row=} {column=}"


def test_rows_of_a_swiglu_alternate():
    assert packed_rows(24, True).view(-1, 8).tolist() == [
        [*range(8)],
        [*range(12, 20)],
        # Past the end the last output is repeated.
        [8, 9, 10, 11, 11, 11, 11, 11],
        [20, 21, 22, 23, 23, 23, 23, 23],
    ]
    assert packed_rows(18, False).tolist() == [*range(18), *[17] * 14]


def test_bytes_are_those_of_codes_and_scales():
    packed = pack(random_quantised("int4", 64, 256))
    assert packed.nbytes == 64 * 256 // 2 + 64 * 2 * 2
    packed = pack(random_quantised("e4m3", 64, 256))
    assert packed.nbytes == 64 * 256 + 64 * 4 and packed.scales is None


@pytest.mark.parametrize(
    "code, columns, message",
    [
        ("int4", 8, "groups of 8 columns of int4: the kernels have powers of two from 16 on"),
        ("int8", 8, "groups of 8 columns of int8: .* from 16 on"),
        ("int4", 96, "groups of 96 columns of int4"),
    ],
)
def test_other_groups_are_refused(code, columns, message):
    kind = WeightFormat(code, 1, columns)
    codes = torch.zeros(4, 192 * kind.bits // 8, dtype=torch.uint8)
    weight = QuantisedWeight(kind, codes, torch.ones(kind.groups(4, 192)))
    with pytest.raises(ValueError, match=message):
        pack(weight)


def test_a_scale_that_would_overflow_in_prefill_is_refused():
    weight = random_quantised("mxfp4", 4, 64)
    weight.scales[0, 1] = 160
    with pytest.raises(ValueError, match=r"a scale of 2 \*\* 33 exceeds 2 \*\* 32"):
        pack(weight)


def test_a_swiglu_of_odd_rows_is_refused():
    with pytest.raises(ValueError, match="as many gate rows as up rows, not 7 rows"):
        pack(random_quantised("int8", 7, 64), swiglu=True)


@pytest.mark.parametrize("name", FORMATS)
def test_some_rows_of_a_weight(name):
    """The first ones end inside a block, so that others follow the last."""
    weight = random_quantised(name, 131, 192)
    if weight.format.rows == 1:
        # As where several weights are one: each has a factor of its own.
        weight = weight._replace(whole=torch.linspace(0.5, 2, 131)[:, None])
    if weight.scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        weight = weight._replace(whole=None)
    values, packed = dequantise(weight), pack(weight)
    for rows in (1, 83, 128, 131):
        first = first_rows(packed, rows)
        assert first.shape == (rows, 192)
        assert torch.equal(dequantise(unpack(first)), values[:rows])
    chosen = torch.tensor([0, 7, 15, 16, 90, 130])
    selected = select_rows(packed, chosen)
    assert selected.shape == (6, 192)
    assert torch.equal(dequantise(unpack(selected)), values[chosen])
