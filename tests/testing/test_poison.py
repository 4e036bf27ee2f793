"""poison_padding and CanaryPages: what is poisoned with what, and what is compared."""

from __future__ import annotations

import math

import pytest
import torch

from graphengine.buckets import Field, StaticBuffers
from graphengine.testing import POISONS, CanaryPages, GraphCheckError, Poison, poison_padding

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNUSED = slice(3, None)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sound_step_sees_every_poison_and_passes(device: str) -> None:
    x = torch.ones(5, device=device)
    slot = torch.arange(5, dtype=torch.int32, device=device)
    y = torch.zeros(5, device=device)
    seen: list[list[float]] = []

    def step() -> None:
        seen.append([x[4].item(), slot[4].item(), y[4].item()])
        torch.mul(x, 2, out=y)

    poison_padding(
        {"x": x, "slot": slot, "y": y}, step, padding=dict.fromkeys(("x", "slot", "y"), UNUSED)
    )
    assert [integer for _, integer, _ in seen] == [4, 2**31 - 1, -1, -(2**31), 10**9]
    assert math.isnan(seen[1][0]) and math.isnan(seen[1][2])
    assert [floating for floating, _, _ in seen[2:4]] == [math.inf, -math.inf]
    assert seen[4][0] == pytest.approx(1e30)
    assert (x.tolist(), slot.tolist(), y.tolist()) == ([1] * 5, [0, 1, 2, 3, 4], [0] * 5)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.bool, [True, False, False, True]),
        (torch.uint8, [255, 0, 0, 255]),
        (torch.int64, [2**63 - 1, -1, -(2**63), 10**9]),
        (torch.float16, [math.inf, -math.inf, 65504.0]),
    ],
)
def test_a_poison_fits_its_dtype(dtype: torch.dtype, values: list[float]) -> None:
    found = [poison.value_for(dtype) for poison in POISONS]
    assert found[-len(values) :] == values
    for value in found:
        torch.zeros(1, dtype=dtype).fill_(value)


def test_a_fault_names_poison_buffer_and_element() -> None:
    x, y = torch.ones(5), torch.zeros(5, 2)
    poison = Poison(name="seven", floating=7.0, integer=7)

    def step() -> None:
        y[1, 1] = x.sum()

    message = (
        r"poison 'seven' in the padding of x changed y \(float32 \[5, 2\]\), first at row 1, "
        r"element \[1, 1\]: unpoisoned 5.0, poisoned 17.0; 1 of 10 elements differ"
    )
    with pytest.raises(GraphCheckError, match=message):
        poison_padding({"x": x, "y": y}, step, padding={"x": UNUSED}, values=[poison])
    assert torch.equal(x, torch.ones(5)) and torch.equal(y, torch.zeros(5, 2))


@pytest.mark.parametrize(
    "region", [UNUSED, torch.arange(5) > 2, (slice(3, None),), (UNUSED, ...), (..., UNUSED)]
)
def test_regions_of_every_kind(region: object) -> None:
    x, y = torch.ones(5), torch.zeros(())
    poison_padding(
        {"x": x, "y": y},
        lambda: torch.sum(x[:3], 0, out=y),
        padding={"x": region},  # type: ignore[dict-item]
    )


def make_buffers() -> StaticBuffers:
    table = [
        Field(name="tokens", shape=(8,), dtype=torch.int32),
        Field(name="slot", shape=(8,), dtype=torch.int32, pad=-1),
        Field(name="total", shape=(1,), dtype=torch.int32, owner="device"),
    ]
    return StaticBuffers(table, "cpu")


@pytest.mark.parametrize("live", [3, {"tokens": 3}])
def test_lanes_past_the_live_ones_follow_from_the_table(live: int | dict[str, int]) -> None:
    buffers = make_buffers()
    seen: list[tuple[int, int]] = []

    def step() -> None:
        seen.append((int(buffers.tokens[3]), int(buffers.slot[3])))
        buffers.total.copy_(buffers.tokens[:3].sum())

    poison_padding(buffers, step, live=live)
    assert [token for token, _ in seen] == [0, 2**31 - 1, -1, -(2**31), 10**9]
    # A field that marks padded lanes by its pad value can be left out.
    assert {slot for _, slot in seen[1:]} == ({-1} if live != 3 else {t for t, _ in seen[1:]})

    def wrong() -> None:
        buffers.total.copy_(buffers.tokens[:4].sum())

    with pytest.raises(GraphCheckError, match="changed total"):
        poison_padding(buffers, wrong, live=live)


def test_a_step_that_fails_under_poison_is_a_fault() -> None:
    index, y = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    with pytest.raises(GraphCheckError, match=r"'NaN, largest' .* of index, the step failed"):
        poison_padding(
            {"index": index, "y": y}, lambda: y.copy_(y[index]), padding={"index": UNUSED}
        )


def test_a_step_that_fails_anyway_is_not() -> None:
    def step() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        poison_padding({"x": torch.ones(4), "y": torch.ones(1)}, step, padding={"x": UNUSED})


def test_calls_that_would_check_nothing_are_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="nothing to poison"):
        poison_padding({"x": x}, lambda: None, padding={"x": UNUSED})
    with pytest.raises(ValueError, match="nothing to poison"):
        poison_padding({"x": x}, lambda: None)
    with pytest.raises(ValueError, match="nothing to compare"):
        poison_padding({"x": x}, lambda: None, padding={"x": ...})
    with pytest.raises(ValueError, match=r"no buffer \['z'\]: the buffers are x"):
        poison_padding({"x": x}, lambda: None, padding={"z": UNUSED})
    with pytest.raises(ValueError, match="live=2: lanes are known of StaticBuffers only"):
        poison_padding({"x": x}, lambda: None, live=2)


# Canary pages.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_writes_on_both_sides_of_a_tensor_are_seen(device: str, dtype: torch.dtype) -> None:
    pages = CanaryPages(device, page_bytes=256)
    pages.empty("other", (3,), torch.int32)
    x = pages.empty("x", (3, 5), dtype)
    assert x.is_contiguous() and x.data_ptr() % dtype.itemsize == 0
    x.fill_(1)
    pages.check()

    around = x.as_strided((17,), (1,), x.storage_offset() - 1)
    kept = around.clone()
    around[-1] = 1
    with pytest.raises(GraphCheckError, match=r"a write behind x \(.* \[3, 5\]\) after 3 steps: "):
        pages.check("after 3 steps")
    around.copy_(kept)
    pages.check()
    around[0] = 1
    with pytest.raises(GraphCheckError, match=r"a write before x .*: \d of 256 bytes changed, the"):
        pages.check()


def test_a_page_that_would_lie_askew_is_refused() -> None:
    with pytest.raises(ValueError, match="page_bytes=100 is no multiple of 256"):
        CanaryPages("cpu", page_bytes=100)
