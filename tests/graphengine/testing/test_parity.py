"""assert_replay_matches_eager: its inputs, its order of work, and the state it leaves."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from graphengine.buckets import CapturedGraph, Field, StaticBuffers
from graphengine.testing import GraphCheckError, assert_replay_matches_eager

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_is_captured_and_compared_here(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).to(device)
    x = torch.ones(4, 8, device=device)
    with torch.no_grad():
        assert_replay_matches_eager(lambda: {"hidden": [model(x)]}, {"x": x})
    assert torch.equal(x, torch.ones_like(x)), "the buffers are put back"


@pytest.mark.parametrize("device", DEVICES)
def test_state_that_a_step_advances_is_put_back_between_the_runs(device: str) -> None:
    x, total = torch.zeros(4, device=device), torch.zeros(4, device=device)
    assert_replay_matches_eager(lambda: total.add_(x), {"x": x, "total": total})
    assert torch.equal(total, torch.zeros_like(total))


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_start_from_the_seed_in_both_runs(device: str) -> None:
    y = torch.zeros(8, device=device)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert_replay_matches_eager(lambda: y.uniform_(), {"y": y})
    assert torch.equal(torch.rand(1), expected), "the caller's generator is as it was"


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_graph_with_static_buffers_and_live_sizes(device: str) -> None:
    table = [
        Field(name="x", shape=(8,), dtype=torch.float32, pad=-1),
        Field(name="slot", shape=(8,), dtype=torch.int32, pad=-7),
        Field(name="y", shape=(8,), dtype=torch.float32, owner="device"),
    ]
    buffers = StaticBuffers(table, device)
    seen: list[list[float]] = []

    def step() -> None:
        torch.mul(buffers.x, 2, out=buffers.y)

    graph = CapturedGraph(step, name="b", device=device, buffers=buffers)
    graph.capture()

    class Watched:
        def replay(self) -> None:
            seen.append(buffers.x.tolist() + buffers.slot.tolist())
            graph.replay()

    options: dict[str, Any] = {"seeds": (3,), "live_sizes": (8, 2)}
    assert_replay_matches_eager(
        step, buffers, graph=Watched(), draw={"slot": range(1, 9)}, **options
    )
    full, partial = seen
    assert -1 not in full[:8] and min(full[8:]) >= 1
    assert partial[2:8] == [-1] * 6 and -1 not in partial[:2]
    assert min(partial[8:10]) >= 1 and partial[10:] == [-7] * 6
    graph.close()


def test_fill_is_called_for_every_seed_and_live_size() -> None:
    x, calls = torch.zeros(4), []

    def fill(seed: int, live: int | None) -> None:
        calls.append((seed, live))

    assert_replay_matches_eager(lambda: x.add_(1), {"x": x}, fill=fill, live_sizes=(4, 1))
    assert calls == [(seed, live) for seed in (0, 1, 2) for live in (4, 1)]


def test_a_replay_with_a_copy_of_an_integer_is_found() -> None:
    """Only the caller knows which integers are valid, so that is asked for."""
    position, out = torch.tensor(5), torch.zeros(4, dtype=torch.int32)
    rows, frozen = torch.zeros(8, 4), position.clone()
    buffers = {"position": position, "rows": rows, "out": out}

    def step(place: torch.Tensor) -> None:
        out.copy_(rows[place] > 0)

    def check(**options: Any) -> None:
        assert_replay_matches_eager(
            lambda: step(position), buffers, graph=lambda: step(frozen), **options
        )

    message = (
        r"position \(int64 \[\]\), out \(int32 \[4\]\) would keep the values of now, so a graph "
        r"that has a copy of them would pass: say which are valid, "
        r'as in draw={"position": range\(8\)}'
    )
    options: tuple[dict[str, range] | None, ...] = (None, {})
    for draw in options:
        with pytest.raises(ValueError, match=message):
            check(draw=draw)
    with pytest.raises(GraphCheckError, match="the replay differs from eager in out"):
        check(draw={"position": range(8), "out": None})
    with pytest.raises(GraphCheckError, match="the replay differs from eager in out"):
        check(fill=lambda seed, live: (position.fill_(seed), rows.normal_()))
    check(draw={"position": None, "out": None})  # said to be constant
    assert (position.item(), out.tolist()) == (5, [0] * 4)
    on = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r'as in draw=\{"on": range\(2\)\}'):
        assert_replay_matches_eager(lambda: None, {"on": on})


@pytest.mark.parametrize("values", [range(2), range(10, 0, -3), range(-(2**63), 2**63 - 1)])
def test_integers_are_of_their_range_and_change_with_every_seed(values: range) -> None:
    x, seen = torch.zeros(16, dtype=torch.int64), []

    def replay() -> None:
        seen.append(x.tolist())

    assert_replay_matches_eager(
        replay, {"x": x}, graph=replay, draw={"x": values}, seeds=(7, 3, 12)
    )
    for before, after in itertools.pairwise(seen[1::2]):  # the first seed's step is called twice
        assert all(one in values for one in after)
        assert not any(one == other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        ({"z": range(2)}, r"draw: no buffer \['z'\], there are x, ids, on"),
        ({"x": range(2)}, r"draw of 'x' \(float32 \[2\]\): range\(0, 2\) is for integers"),
        ({"ids": (0, 8)}, r"draw of 'ids' .* \(0, 8\) is neither a range nor None"),
        ({"ids": range(3, 4)}, r"range\(3, 4\) has less than 2 values"),
        ({"ids": range(-5, 8)}, r"draw of 'ids' \(uint8 \[2\]\): -5 is not within 0 to 255"),
        ({"on": range(8)}, r"draw of 'on' \(bool \[2\]\): 7 is not within 0 to 1"),
    ],
    ids=str,
)
def test_ranges_that_do_not_fit_are_refused(draw: Any, message: str) -> None:
    buffers = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.uint8)}
    buffers["on"] = torch.ones(2, dtype=torch.bool)
    valid = {"ids": range(8), "on": range(2)}
    with pytest.raises(ValueError, match=message):
        assert_replay_matches_eager(lambda: None, buffers, draw=valid | draw)
    with pytest.raises(ValueError, match=r"draw=\[1\] is no mapping from names to ranges"):
        assert_replay_matches_eager(lambda: None, buffers, draw=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fill=3 is not callable: give a function of a seed and"):
        assert_replay_matches_eager(lambda: None, buffers, fill=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"draw=.* with `fill`: the buffers are filled by one"):
        assert_replay_matches_eager(lambda: None, buffers, draw=valid, fill=lambda seed, live: None)


def test_a_step_with_state_outside_of_the_buffers_is_told() -> None:
    x, y, count = torch.ones(4), torch.zeros(4), torch.zeros(())

    def step() -> None:
        torch.mul(x, count.add_(1), out=y)

    message = (
        r"`step` is not repeatable.* differ in y \(float32 \[4\]\), .* a tensor that is not among"
    )
    with pytest.raises(ValueError, match=message):
        assert_replay_matches_eager(step, {"x": x, "y": y}, graph=step)
    assert_replay_matches_eager(step, {"x": x, "y": y, "count": count}, graph=step)


def test_what_the_capture_returned_is_compared_where_it_is_given() -> None:
    x, static_y = torch.ones(4), torch.zeros(4)

    class Graph:
        def replay(self) -> None:
            torch.add(x, 1, out=static_y)

    def step() -> torch.Tensor:
        return x + 2

    with pytest.raises(GraphCheckError, match=r"in returned \(float32 \[4\]\), first at row 0"):
        assert_replay_matches_eager(step, {"x": x}, graph=Graph(), returned=static_y)


def test_what_only_the_step_returns_is_asked_for() -> None:
    x, y = torch.ones(4), torch.zeros(4)

    class Graph:
        def replay(self) -> None:
            torch.add(x, 1, out=y)

    message = r"in no buffer, the replay none: returned\[0\] \(float32 \[4\]\); give `returned`"
    for graph in (Graph(), Graph().replay):
        with pytest.raises(ValueError, match=message):
            assert_replay_matches_eager(lambda: [x + 2], {"x": x, "y": y}, graph=graph)
    # A returned tensor in a buffer is compared there, also if it is a part of it.
    assert_replay_matches_eager(lambda: torch.add(x, 1, out=y)[1:], {"x": x, "y": y}, graph=Graph())


def test_returned_tensors_that_would_not_be_looked_at_are_refused() -> None:
    x, y = torch.ones(4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"`returned` with a callable would not be compared"):
        assert_replay_matches_eager(lambda: x + 1, {"x": x}, graph=lambda: None, returned=y)
    with pytest.raises(ValueError, match=r"`returned` with no graph would not be compared"):
        assert_replay_matches_eager(lambda: x + 1, {"x": x}, returned=y)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    rest: tuple[torch.Tensor, ...] = ()


def test_what_a_dataclass_holds_is_compared() -> None:
    x = torch.ones(4)
    assert_replay_matches_eager(lambda: Output(x + 1), {"x": x}, graph=lambda: Output(x + 1))
    with pytest.raises(GraphCheckError, match=r"in returned\.rest\[0\] \(float32 \[4\]\)"):
        assert_replay_matches_eager(
            lambda: Output(x, (x + 1,)), {"x": x}, graph=lambda: Output(x, (x + 2,))
        )


def test_what_looking_would_use_up_is_refused() -> None:
    x = torch.ones(4)

    def generator() -> Iterator[torch.Tensor]:
        yield x.add_(1)

    async def coroutine() -> None:
        x.add_(1)

    for kind, step in {"generator": generator, "coroutine": coroutine}.items():
        message = f"returned a {kind}, so none of its body ran"
        with pytest.raises(ValueError, match=message):
            assert_replay_matches_eager(step, {"x": x}, graph=lambda: None)
        with pytest.raises(ValueError, match=message):
            assert_replay_matches_eager(lambda: None, {"x": x}, graph=step)
    with pytest.raises(ValueError, match=r"returned\['y'\] is a generator: return a list"):
        assert_replay_matches_eager(lambda: {"y": (v for v in [x])}, {"x": x}, graph=lambda: None)


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_bits_are_compared(expected: float, actual: float, equal: bool, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 2, dtype=dtype)

    def write(value: float) -> None:
        x[1, 0] = value

    def check() -> None:
        assert_replay_matches_eager(
            lambda: write(expected), {"x": x}, graph=lambda: write(actual), seeds=(0,)
        )

    if equal:
        check()
        return
    with pytest.raises(GraphCheckError, match=r"row 1, element \[1, 0\].*; 1 of 4 elements"):
        check()


def test_nans_with_other_bits_differ() -> None:
    x = torch.zeros(2)
    with pytest.raises(
        GraphCheckError, match=r"eager nan \(0x7fc00000\), replay nan \(0x7fc00001\)"
    ):
        assert_replay_matches_eager(
            lambda: x.view(torch.int32).fill_(0x7FC00000),
            {"x": x},
            graph=lambda: x.view(torch.int32).fill_(0x7FC00001),
        )


def test_a_tolerance_is_kept() -> None:
    x, y = torch.ones(4), torch.zeros(4)
    buffers = {"x": x, "y": y}

    def step() -> None:
        torch.mul(x, 2, out=y)

    def replay() -> None:
        torch.mul(x, 2.001, out=y)

    assert_replay_matches_eager(step, buffers, graph=replay, rtol=1e-3)
    with pytest.raises(GraphCheckError, match="the replay differs from eager in y"):
        assert_replay_matches_eager(step, buffers, graph=replay, rtol=1e-4)


def test_another_shape_is_a_difference() -> None:
    x = torch.ones(4)
    with pytest.raises(
        GraphCheckError, match=r"eager left float32 \[4\], the replay float32 \[3\]"
    ):
        assert_replay_matches_eager(lambda: x * 1, {"x": x}, graph=lambda: x[:3] * 1)


def test_a_step_that_raises_leaves_the_buffers_as_they_were() -> None:
    x = torch.ones(4)

    def step() -> None:
        x.zero_()
        raise KeyError("x")

    with pytest.raises(KeyError):
        assert_replay_matches_eager(step, {"x": x}, graph=lambda: None)
    assert torch.equal(x, torch.ones(4))


def test_calls_that_would_compare_nothing_are_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"live_sizes=\[3\] without fill"):
        assert_replay_matches_eager(lambda: x.zero_(), {"x": x}, live_sizes=[3])
    with pytest.raises(ValueError, match="the step's inputs must be among the buffers"):
        assert_replay_matches_eager(lambda: x.zero_(), {})
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_replay_matches_eager(lambda: None, {}, graph=lambda: None)
    with pytest.raises(ValueError, match=r"no tensors, and the buffers \(e\) have no element"):
        assert_replay_matches_eager(lambda: None, {"e": torch.zeros(0, 4)}, graph=lambda: None)
    with pytest.raises(ValueError, match=r"step returned returned, the replay returned\[0\]"):
        assert_replay_matches_eager(lambda: x * 2, {"x": x}, graph=lambda: [x * 2])


LANES = [
    Field(name="x", shape=(8,), dtype=torch.float32),
    Field(name="one", shape=(1,), dtype=torch.int32),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, r"seeds=\(\) leaves nothing to check"),
        ({"seeds": 3}, "seeds=3 is no sequence"),
        ({"seeds": [0.5]}, "an element of seeds=0.5 is no integer"),
        ({"live_sizes": ()}, r"live_sizes=\(\) leaves nothing to check"),
        ({"live_sizes": iter(())}, r"live_sizes=\(\) leaves nothing to check"),
        ({"live_sizes": [-1]}, "an element of live_sizes=-1 must be at least 0"),
        ({"live_sizes": [8, 9]}, "an element of live_sizes=9 must be at most 8"),
        ({"live_sizes": ["a"]}, "an element of live_sizes='a' is no integer"),
        ({"graph": 5}, "graph=5 is neither callable nor has it a replay"),
        ({"rtol": math.nan}, "rtol=nan must be at least 0"),
        ({"atol": math.inf}, "atol=inf must be at least 0"),
        ({"atol": "1"}, "atol='1' is no number"),
        ({"atol": 10**400}, "atol=10+ must be at most 1.79769e\\+308"),
    ],
    ids=str,
)
def test_arguments_that_would_check_nothing_are_refused(
    options: dict[str, Any], message: str
) -> None:
    buffers = StaticBuffers(LANES, "cpu")
    with pytest.raises(ValueError, match=message):
        assert_replay_matches_eager(buffers.x.exp_, buffers, **{"graph": buffers.x.exp_, **options})


def test_live_sizes_may_be_given_by_an_iterator() -> None:
    x, calls = torch.zeros(4), []

    def fill(seed: int, live: int | None) -> None:
        calls.append((seed, live))

    assert_replay_matches_eager(
        lambda: x.add_(1), {"x": x}, fill=fill, seeds=iter((0, 1)), live_sizes=iter((4, 1))
    )
    assert calls == [(0, 4), (0, 1), (1, 4), (1, 1)]


@pytest.mark.parametrize("buffers", [[torch.ones(2)], torch.ones(2), None, 3])
def test_buffers_have_names(buffers: Any) -> None:
    message = f"the buffers are of type {type(buffers).__name__}: give tensors by name"
    with pytest.raises(ValueError, match=message):
        assert_replay_matches_eager(lambda: None, buffers, graph=lambda: None)


@pytest.mark.parametrize("value", [None, 3, [1.0], np.zeros(3)])
def test_a_buffer_is_a_tensor(value: Any) -> None:
    message = f"buffer 'x' is of type {type(value).__name__}, not a torch.Tensor"
    with pytest.raises(ValueError, match=message):
        assert_replay_matches_eager(lambda: None, {"x": value}, graph=lambda: None)


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


UNWRITABLE = {
    "expanded": lambda: torch.ones(1).expand(4),
    "a lazy conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "an inference tensor": inference_tensor,
    "on the device meta": lambda: torch.ones(4, device="meta"),
    "of the layout": lambda: torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("why", UNWRITABLE)
def test_a_buffer_that_cannot_be_written_is_named(why: str) -> None:
    with pytest.raises(ValueError, match=rf"buffer 'odd' \(.* \[4.*\]\) is {why}"):
        assert_replay_matches_eager(lambda: None, {"odd": UNWRITABLE[why]()}, graph=lambda: None)


def test_inference_tensors_are_compared_where_they_can_be_written() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
        assert_replay_matches_eager(lambda: x.add_(1), {"x": x})


FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*FLOAT8, torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_every_dtype_is_filled_and_compared(dtype: torch.dtype, device: str) -> None:
    x, y = torch.zeros(8, device=device).to(dtype), torch.zeros(8, device=device).to(dtype)
    buffers, seen = {"x": x, "y": y}, []

    def step() -> None:
        seen.append(x.to(torch.float32).tolist())
        y.copy_(x)

    def wrong() -> None:
        y.copy_(x)
        y.view(torch.uint8)[0] ^= 1

    draw = {} if dtype.is_floating_point else {"x": range(2), "y": None}
    assert_replay_matches_eager(step, buffers, graph=step, draw=draw)
    assert len({*map(tuple, seen)}) == (3 if dtype.is_floating_point else 2), "by the seed"
    with pytest.raises(GraphCheckError, match=r"differs from eager in y .* first at row 0"):
        assert_replay_matches_eager(step, buffers, graph=wrong, draw=draw)
    assert_replay_matches_eager(step, buffers, graph=step, rtol=0.1, draw=draw)
