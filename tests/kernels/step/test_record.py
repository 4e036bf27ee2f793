"""The codec of a lane's state word, on the host; `test_state` and `test_finish` see what kernels
pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.step.record import (
    COUNT_MASK,
    EPOCH_BITS,
    EPOCH_MASK,
    EPOCH_SHIFT,
    FLAG_MASK,
    FLAGS_AND_COUNT,
    FLAGS_AND_COUNT_MASK,
    MAX_DRAFTS,
    LaneState,
    fed_of,
    pack_state,
    tag_items,
    unpack_state,
)

COUNTS = st.integers(0, COUNT_MASK)


def test_the_fields_fill_a_payload_and_hold_the_longest_drafts():
    assert EPOCH_SHIFT + EPOCH_BITS == 32
    assert EPOCH_BITS >= 16
    assert MAX_DRAFTS + 1 <= COUNT_MASK
    assert 2 * (MAX_DRAFTS + 1) == MAX_LANES


def test_each_field_has_its_own_bits():
    """To the bit, once."""
    assert pack_state(0x12345, 32, 31, 9) == 0x2345 << 16 | 32 << 10 | 31 << 4 | 9
    assert unpack_state(0xFFFF_FFFF) == LaneState(15, 63, 63, 0xFFFF)


@given(epoch=st.integers(-(2**31), 2**31 - 1), fed=COUNTS, count=COUNTS, flags=st.integers(0, 15))
def test_what_is_packed_is_unpacked(epoch: int, fed: int, count: int, flags: int):
    state = pack_state(epoch, fed, count, flags)
    assert 0 <= state < 2**32
    assert unpack_state(state) == LaneState(flags, count, fed, epoch & EPOCH_MASK)
    assert FLAGS_AND_COUNT[state & FLAGS_AND_COUNT_MASK] == (flags, count)
    assert fed_of(state) == fed and state & FLAG_MASK == flags


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_many_are_packed_like_one(make: Any):
    fields = ([0, -1, 0x12345], [1, 32, 0], [1, 32, 0], [1, 5, 8])
    packed = pack_state(*map(make, fields))
    assert packed.tolist() == [pack_state(*lane) for lane in zip(*fields, strict=True)]


def test_a_tag_is_the_low_half_of_the_sequence_number():
    assert tag_items(torch.tensor([3, 2**32 + 5])).tolist() == [3 << 32, 5 << 32]
