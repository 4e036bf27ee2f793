"""poison_padding and CanaryPages: what is poisoned with what, and what is compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
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
    assert [integer for _, integer, _ in seen] == [4, 4, 2**31 - 1, -1, -(2**31), 10**9]
    assert math.isnan(seen[2][0]) and math.isnan(seen[2][2])
    assert [floating for floating, _, _ in seen[3:5]] == [math.inf, -math.inf]
    assert seen[5][0] == pytest.approx(1e30)
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
    buffers.total.fill_(7)
    seen: list[tuple[int, int]] = []

    def step() -> None:
        seen.append((int(buffers.tokens[3]), int(buffers.slot[3])))
        buffers.total.copy_(buffers.tokens[:3].sum())

    poison_padding(buffers, step, live=live)
    assert [token for token, _ in seen] == [0, 0, 2**31 - 1, -1, -(2**31), 10**9]
    # A field that marks padded lanes by its pad value can be left out.
    assert {slot for _, slot in seen[2:]} == ({-1} if live != 3 else {t for t, _ in seen[2:]})

    def wrong() -> None:
        buffers.total.copy_(buffers.tokens[:4].sum())

    with pytest.raises(GraphCheckError, match="changed total"):
        poison_padding(buffers, wrong, live=live)


def test_a_step_that_fails_under_poison_is_a_fault() -> None:
    index, y = torch.zeros(4, dtype=torch.int64), torch.arange(4.0)
    with pytest.raises(GraphCheckError, match=r"'NaN, largest' .* of index, the step failed"):
        poison_padding(
            {"index": index, "y": y}, lambda: y.copy_(y[index]), padding={"index": UNUSED}
        )


def test_a_step_that_fails_anyway_is_not() -> None:
    def step() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        poison_padding({"x": torch.ones(4), "y": torch.ones(1)}, step, padding={"x": UNUSED})


def test_a_step_with_state_outside_of_the_buffers_is_told() -> None:
    """The poison has nothing to do with it."""
    x, y, count = torch.ones(5), torch.zeros(5), torch.zeros(())

    def step() -> None:
        torch.mul(x, count.add_(1), out=y)

    padding = {"x": UNUSED, "y": UNUSED}
    message = (
        r"`run` is not repeatable, .* differ in y \(float32 \[5\]\), first at row 0, element \[0\]"
        r": the first 1.0, the second 2.0; .* a tensor that is not among the buffers, name that"
    )
    with pytest.raises(ValueError, match=message):
        poison_padding({"x": x, "y": y}, step, padding=padding)
    poison_padding({"x": x, "y": y, "count": count}, step, padding=padding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.complex128])
def test_a_step_that_writes_nothing_live_is_told(dtype: torch.dtype, device: str) -> None:
    x, y = torch.ones(5, device=device).to(dtype), torch.ones(5, device=device).to(dtype)
    buffers, padding = {"x": x, "y": y}, {"x": UNUSED, "y": UNUSED}
    message = r"`run` was not seen to write anything outside of the padding: x, y hold what they"
    for step in (lambda: None, lambda: y[UNUSED].zero_()):
        with pytest.raises(GraphCheckError, match=message):
            poison_padding(buffers, step, padding=padding)
    assert torch.equal(x.to(torch.complex64), torch.ones(5, device=device).to(torch.complex64))
    # Also where the results are in their place already, as those of a warm-up are.
    poison_padding(buffers, lambda: y.copy_(x), padding=padding)


def test_integers_that_are_in_their_place_are_asked_to_hold_something_else() -> None:
    ids, tokens = torch.zeros(5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    buffers = {"ids": ids, "tokens": tokens}
    with pytest.raises(
        GraphCheckError, match=r"something else beforehand, as by `tokens.fill_\(-1"
    ):
        poison_padding(buffers, lambda: tokens.copy_(ids[:3]), padding={"ids": UNUSED})
    tokens.fill_(-1)
    poison_padding(buffers, lambda: tokens.copy_(ids[:3]), padding={"ids": UNUSED})


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


def test_results_that_are_only_returned_are_asked_for() -> None:
    """A model that reads its whole batch: nothing of its result would be compared."""
    x = torch.randn(5, 4)
    message = (
        r"in no buffer and would not be compared: returned\['y'\] \(float32 \[5, 4\]\); write "
        r"results into a buffer"
    )
    with pytest.raises(ValueError, match=message):
        poison_padding({"x": x}, lambda: {"y": x - x.mean(0)}, padding={"x": UNUSED})
    y = torch.zeros(5, 4)
    with pytest.raises(GraphCheckError, match="changed y"):
        poison_padding(
            {"x": x, "y": y}, lambda: y.copy_(x - x.mean(0))[:3], padding={"x": UNUSED, "y": UNUSED}
        )


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_the_same_in_every_run(device: str) -> None:
    x, y = torch.ones(5, device=device), torch.zeros(3, device=device)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    poison_padding(
        {"x": x, "y": y},
        lambda: y.copy_(torch.nn.functional.dropout(x[:3], 0.5)),
        padding={"x": UNUSED},
    )
    assert torch.equal(torch.rand(1), expected), "the caller's generator is as it was"


DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_poisoned(dtype: torch.dtype, device: str) -> None:
    x, y = torch.zeros(5, device=device).to(dtype), torch.ones(3, device=device).to(dtype)
    poison_padding({"x": x, "y": y}, lambda: y.copy_(x[:3]), padding={"x": UNUSED})
    with pytest.raises(GraphCheckError, match=r"changed y .* first at row 2"):
        poison_padding({"x": x, "y": y}, lambda: y.copy_(x[1:4]), padding={"x": UNUSED})


def test_parameters_and_transposed_tensors_are_poisoned() -> None:
    table, y = torch.nn.Embedding(5, 4).weight, torch.zeros(3, 4)
    across = torch.zeros(4, 5).t()
    seen: list[bool] = []

    def step() -> None:
        seen.append(bool(across[3:].isnan().all() and table[3:].isnan().all()))
        y.copy_(table.detach()[:3] + across[:3])

    regions = {"table": UNUSED, "across": UNUSED}
    poison_padding({"table": table, "across": across, "y": y}, step, padding=regions)
    assert seen[:3] == [False, False, True]


def test_a_buffer_that_cannot_be_written_is_named() -> None:
    odd = torch.ones(1).expand(5)
    with pytest.raises(ValueError, match=r"buffer 'odd' \(float32 \[5\]\) is expanded"):
        poison_padding({"odd": odd, "y": torch.ones(1)}, lambda: None, padding={"odd": UNUSED})


@pytest.mark.parametrize(
    "region",
    [None, True, 3, 3.0, "a", [3, 4], torch.tensor([3, 4]), np.arange(5) > 2, (True,), (None,)],
    ids=str,
)
def test_what_is_no_region_is_refused(region: Any) -> None:
    with pytest.raises(ValueError, match=r"padding of 'x' \(float32 \[5\]\): .* is no region"):
        poison_padding(
            {"x": torch.ones(5), "y": torch.ones(1)}, lambda: None, padding={"x": region}
        )


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((5,), torch.ones(3, dtype=torch.bool)),
        ((5,), (slice(None), slice(None))),
        ((), slice(0, None)),
    ],
)
def test_a_region_that_does_not_fit_names_its_buffer(shape: tuple[int, ...], region: Any) -> None:
    with pytest.raises(ValueError, match=r"padding of 'x' \(float32 \[.*\]\): .* does not index"):
        poison_padding(
            {"x": torch.ones(shape), "y": torch.ones(1)}, lambda: None, padding={"x": region}
        )


def test_memory_with_two_names_is_padding_by_both_or_by_none() -> None:
    base, y = torch.ones(8), torch.zeros(())
    tail, unused = base[5:].view(torch.int16), slice(5, None)

    def step() -> None:
        torch.sum(base[:5], 0, out=y)

    message = (
        r"6 elements of 'tail' \(int16 \[6\]\), first at \[0\], are memory of the padding of 'x': "
        r"name them in the padding of 'tail', too"
    )
    with pytest.raises(ValueError, match=message):
        poison_padding({"x": base, "tail": tail, "y": y}, step, padding={"x": unused})
    for padding in ({"x": unused, "tail": ...}, {"x": unused, "tail": slice(0, None)}):
        poison_padding({"x": base, "tail": tail, "y": y}, step, padding=padding)  # type: ignore[arg-type]
    # Tensors next to each other, or with interleaved elements, do not share memory.
    buffers = {"head": base[:5], "x": base[5:], "y": y}
    poison_padding(buffers, step, padding={"x": ...})
    columns = torch.ones(4, 6)
    left, right = columns[:, :3], columns[:, 3:]
    poison_padding({"l": left, "r": right}, lambda: left.add_(1), padding={"r": ...})


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (-1, "live=-1 must be at least 0"),
        (9, "live=9 must be at most 8"),
        (3.0, "live=3.0 is no integer"),
        (True, "live=True is no integer"),
        ("3", "live='3' is no integer"),
        ({"tokens": -1}, r"live\['tokens'\]=-1 must be at least 0"),
        ({"total": 2}, r"live\['total'\]=2 must be at most 1"),
        ({"other": 2}, r"no field \['other'\], there are tokens, slot, total"),
    ],
)
def test_live_lanes_that_are_not_there_are_refused(live: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        poison_padding(make_buffers(), lambda: None, live=live)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), r"values=\(\) leaves nothing to check"),
        ([math.nan], "nan in `values` is a float, not a Poison"),
        (math.nan, "nan in `values` is a float, not a Poison"),
    ],
)
def test_values_that_are_no_poisons_are_refused(values: Any, message: str) -> None:
    buffers = {"x": torch.ones(5), "y": torch.ones(1)}
    with pytest.raises(ValueError, match=message):
        poison_padding(buffers, lambda: None, padding={"x": UNUSED}, values=values)


def test_a_step_of_which_a_call_runs_nothing_is_refused() -> None:
    buffers = {"x": torch.ones(5), "y": torch.ones(1)}

    async def step() -> None:
        buffers["y"].add_(1)

    with pytest.raises(ValueError, match="returned a coroutine, so none of its body ran"):
        poison_padding(buffers, step, padding={"x": UNUSED})
    with pytest.raises(ValueError, match="run=None is not callable"):
        poison_padding(buffers, None, padding={"x": UNUSED})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="padding=slice"):
        poison_padding(buffers, lambda: None, padding=UNUSED)  # type: ignore[arg-type]


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
    with pytest.raises(GraphCheckError, match=r"a write past x \(.* \[3, 5\]\) after 3 steps: "):
        pages.check("after 3 steps")
    around.copy_(kept)
    pages.check()
    around[0] = 1
    with pytest.raises(GraphCheckError, match=r"a write before x .*: \d of 256 bytes changed, the"):
        pages.check()


def test_a_page_that_would_lie_askew_is_refused() -> None:
    with pytest.raises(ValueError, match="page_bytes=100 is no multiple of 256"):
        CanaryPages("cpu", page_bytes=100)


def test_tensors_of_every_shape_stand_between_pages() -> None:
    pages = CanaryPages("cpu", page_bytes=256)
    for shape in ((), (0, 4), (3,), torch.Size((2, 2))):
        assert pages.empty("x", shape, torch.float32).shape == shape
    pages.check()
    with pytest.raises(ValueError, match="of the shape of 'x'=-1 must be at least 0"):
        pages.empty("x", (-1, 4), torch.float32)


def test_pages_round_nothing_are_refused() -> None:
    pages = CanaryPages("cpu")
    with pytest.raises(ValueError, match="no canary pages to look at"):
        pages.check()
    with pytest.raises(ValueError, match="no canary pages to look at"):
        poison_padding(
            {"x": torch.ones(5), "y": torch.ones(1)},
            lambda: None,
            padding={"x": UNUSED},
            canaries=pages,
        )
