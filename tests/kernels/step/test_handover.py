"""A verified step left in static tensors: what is there, and that a draft begins there too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft.draft import Fusion, begin_module_draft
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.step import handover as module
from graphengine.kernels.step.handover import HandOver, hand_over, hand_over_reference
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)
# Exact in every dtype.
CANARY = 776.0
NOTHING = -77
HIDDEN = 24
EPS = 0.25
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Step:
    """A verified step of rows of W lanes, whose padded lanes hold poison."""

    target: torch.Tensor
    count: torch.Tensor
    lanes: DecodeLanes
    hidden: Residual

    @property
    def live(self) -> list[int]:
        return (self.lanes.slot >= 0).nonzero()[:, 0].tolist()


def make_step(
    W: int,
    slots: Sequence[int],
    live: Sequence[int],
    counts: Sequence[int],
    *,
    device: str = "cpu",
    H: int = HIDDEN,
    groups: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """`slots` and `counts` of the rows, and how many lanes of each are `live`."""
    fields: list[list[int]] = [[], [], [], []]
    for slot, number in zip(slots, live, strict=True):
        for lane in range(W):
            fed = slot >= 0 and lane < number
            values = (slot + lane, slot, 10 * slot + lane, slot + 20 + lane)
            for field, value in zip(
                fields, values if fed else (HUGE, -1, LOWEST, HUGE), strict=True
            ):
                field.append(value)
    token, slot_N, position, target = (
        torch.tensor(field, dtype=torch.int32, device=device) for field in fields
    )
    N = W * len(slots)
    draw = torch.Generator().manual_seed(N)
    wide = torch.randn(N, H + 5, generator=draw).to(device, dtype)
    squares = ((torch.rand(groups, N, generator=draw) + 0.5) * H / groups).to(device)
    wide[slot_N < 0] = math.nan
    squares[:, slot_N < 0] = math.nan
    poisoned = [count if slot >= 0 else HUGE for slot, count in zip(slots, counts, strict=True)]
    return Step(
        target,
        torch.tensor(poisoned, dtype=torch.int32, device=device),
        DecodeLanes(token, slot_N, position),
        Residual(wide.float(), wide[:, :H], squares),
    )


def new_hand_over(step: Step, room: int = 0) -> HandOver:
    """As an earlier step of other lanes left it, with `room` more rows and lanes; rows apart."""
    N, H = step.hidden.scaled.shape
    ints = [step.target.new_full((N + room,), NOTHING) for _ in range(4)]
    hidden = step.hidden.scaled.new_full((N + room, H + 3), CANARY)
    return HandOver(
        *ints, step.count.new_full((step.count.numel() + room,), NOTHING), hidden[:, :H]
    )


def run(twin: Callable[..., None], step: Step, into: HandOver) -> None:
    twin(step.target, step.count, step.lanes, step.hidden, into, hidden_eps=EPS)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> tuple[Callable[..., None], str]:
    if request.param == "reference":
        return hand_over_reference, "cpu"
    return hand_over, request.getfixturevalue("device")


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int]]:
    W = draw(st.integers(1, 5))
    slots = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True))
    slots = [draw(st.sampled_from([slot, slot, -1])) for slot in slots]
    live = [draw(st.integers(1, W)) if slot >= 0 else 0 for slot in slots]
    return W, slots, live, [draw(st.integers(0, number)) for number in live]


@settings(deadline=None, max_examples=extent(13, 40))
@given(drawn=steps(), room=st.integers(0, 2))
def test_live_lanes_are_left_and_padded_ones_say_so(twin, drawn, room):
    W, slots, _, counts = drawn
    step = make_step(*drawn, device=twin[1])
    room *= W
    whole = new_hand_over(step, room)
    run(twin[0], step, whole.first(len(slots), W))

    N = W * len(slots)
    expected = torch.full((N + room,), NOTHING)
    expected[:N] = step.lanes.slot.cpu()
    assert whole.slot.tolist() == expected.tolist()
    for got, field in (
        (whole.token, step.lanes.token),
        (whole.position, step.lanes.position),
        (whole.target, step.target),
    ):
        expected = torch.full((N + room,), NOTHING)
        expected[step.live] = field.cpu()[step.live].long()
        assert got.tolist() == expected.tolist()
    emitted = [count if slot >= 0 else 0 for slot, count in zip(slots, counts, strict=True)]
    assert whole.emitted.tolist() == emitted + [NOTHING] * room
    untouched = [lane for lane in range(N + room) if lane not in step.live]
    assert (whole.hidden[untouched] == CANARY).all()
    H = whole.hidden.shape[1]
    assert (whole.hidden.as_strided((N + room, 3), (H + 3, 1), H) == CANARY).all()


def test_a_step_may_leave_its_hidden_states_elsewhere(twin):
    step = make_step(3, [4, -1, 0], [3, 0, 2], [1, 0, 2], device=twin[1])
    whole, without = new_hand_over(step), new_hand_over(step)._replace(hidden=None)
    run(twin[0], step, whole)
    twin[0](step.target, step.count, step.lanes, None, without)
    for name in set(HandOver._fields) - {"hidden"}:
        assert torch.equal(getattr(whole, name), getattr(without, name)), name


def test_hidden_states_and_their_room_go_together():
    step = make_step(3, [4], [3], [1])
    into = new_hand_over(step)
    with pytest.raises(ValueError, match="no hidden states are handed over, and there is some"):
        hand_over(step.target, step.count, step.lanes, None, into)
    with pytest.raises(ValueError, match="some hidden states are handed over, and there is no"):
        run(hand_over, step, into._replace(hidden=None))


def test_hidden_states_are_after_the_final_norm(twin, dtypes):
    for dtype in dtypes:
        step = make_step(3, [4, -1, 0], [3, 0, 2], [1, 0, 2], device=twin[1], dtype=dtype)
        into = new_hand_over(step)
        run(twin[0], step, into)
        assert into.hidden.dtype == dtype and into.lanes.slot.tolist()[:3] == [4, 4, 4]
        for lane in step.live:
            square = step.hidden.squares[:, lane].double().sum() / HIDDEN
            expected = step.hidden.scaled[lane].double() / (square + EPS).sqrt()
            torch.testing.assert_close(
                into.hidden[lane].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


@pytest.mark.parametrize("H, groups", [(8, 1), (1000, 40), (5000, 157)])
def test_a_draft_begins_as_from_the_step_itself(device, dtypes, H, groups):
    """Bit for bit, row of no token included."""
    for dtype in dtypes:
        step = make_step(
            3,
            [4, -1, 0, 2],
            [3, 0, 2, 2],
            [2, 0, 2, 0],
            device=device,
            H=H,
            groups=groups,
            dtype=dtype,
        )
        into = new_hand_over(step)
        run(hand_over, step, into)
        draw = torch.Generator().manual_seed(H)
        embedding = torch.randn(50, H, generator=draw).to(device, dtype)
        norms = torch.randn(2, H, generator=draw).to(device, dtype)
        fusion = Fusion(embedding, norms[0], norms[1], eps=1e-5)
        firsts = [
            begin_module_draft(
                target,
                count,
                lanes,
                hidden,
                fusion,
                hidden_eps=eps,
                residual=new_residual(12, H, 1, dtype=dtype, device=device),
            )
            for target, count, lanes, hidden, eps in (
                (step.target, step.count, step.lanes, step.hidden, EPS),
                (into.target, into.emitted, into.lanes, into.hidden, 0.0),
            )
        ]
        there, here = firsts
        assert torch.equal(there.lanes.slot, here.lanes.slot)
        assert torch.equal(there.rows.slot, here.rows.slot)
        assert torch.equal(there.source, here.source)
        live, rows = there.lanes.slot >= 0, there.rows.slot >= 0
        assert torch.equal(there.combined[live], here.combined[live])
        for lanes, other, mask in (
            (there.lanes, here.lanes, live),
            (there.rows, here.rows, rows),
        ):
            assert torch.equal(lanes.token[mask], other.token[mask])
            assert torch.equal(lanes.position[mask], other.position[mask])


def test_what_does_not_fit_is_refused():
    step = make_step(2, [0, 1], [2, 2], [1, 2])
    into = new_hand_over(step)
    with pytest.raises(ValueError, match=r"slot must be a dense \[4\], not \(3,\)"):
        run(hand_over, step, into._replace(slot=into.slot[:3]))
    with pytest.raises(ValueError, match="target must be int32"):
        run(hand_over, step, into._replace(target=into.target.long()))
    with pytest.raises(ValueError, match=r"emitted must be a dense \[2\]"):
        run(hand_over, step, into._replace(emitted=into.token))
    with pytest.raises(ValueError, match=r"out must be torch\.float32"):
        run(hand_over, step, into._replace(hidden=into.hidden.half()))
    squares = step.hidden.squares[:, :3].contiguous()
    hidden = step.hidden._replace(squares=squares)
    with pytest.raises(
        ValueError, match=r"a stream of 4 lanes, not \[4, 24\] with squares \[3, 3\]"
    ):
        hand_over(step.target, step.count, step.lanes, hidden, into, hidden_eps=EPS)


@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
def test_what_it_reads_before_the_wait():
    """Neither the target's tokens nor the counts; all else past the L1 cache."""
    step = make_step(4, range(8), [4] * 8, [2] * 8, H=2048, groups=16, dtype=torch.bfloat16)
    launch = record_launch(
        module,
        lambda: hand_over(
            step.target,
            step.count,
            step.lanes,
            step.hidden,
            new_hand_over(step),
            hidden_eps=EPS,
            pdl=True,
        ),
    )
    assert launch.grid == (32,)
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    late = {load.argument for load in loads if load.after_wait}
    assert late == {"target_ptr", "count_ptr"}
    assert all(load.past_l1 for load in loads if not load.after_wait)
