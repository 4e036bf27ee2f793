"""Frames whose codes are drawn together: rows with parameters of their own, and delays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.frames import delays as module
from graphengine.kernels.frames.codes import FrameToken
from graphengine.kernels.frames.delays import (
    CodeRows,
    Delays,
    DelayState,
    spread_lanes,
    take_frame,
    take_frame_reference,
)
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import token_of_tiles_reference
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
HUGE, UNTOUCHED = 2**31 - 1, -77
BEGIN, END, TOKEN = 8, 9, 11
DELAYS = Delays(BEGIN, END, TOKEN)


@dataclass(frozen=True)
class Twin:
    """The op, or its plain twin, on one device."""

    take: Callable[..., FrameToken]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tiles(self, tokens: Sequence[int], tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tiles of which one has each row's code; -1: with a NaN; -2: a padded lane's poison."""
        best = torch.full((len(tokens), tiles), -(2**63), dtype=torch.int64)
        health = torch.ones(best.shape, dtype=torch.int32)
        for row, token in enumerate(tokens):
            if token == -1:
                health[row, row % tiles] = 2
            elif token < 0:
                best[row], health[row] = HUGE << 32 | HUGE, HUGE
            else:
                best[row, row % tiles] = (7 << 32) | (HUGE ^ token)
        return best.to(self.device), health.to(self.device)


@pytest.fixture(params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(take_frame_reference, "cpu")
    return Twin(take_frame, request.getfixturevalue("device"))


class Sequences:
    """A few slots that draw frames, one lane a slot, with a padded lane among them."""

    def __init__(self, twin: Twin, places: int, begun: Sequence[int], tiles: int = 2) -> None:
        self.twin, self.places, self.tiles = twin, places, tiles
        slots = len(begun) + 1
        # Slots run against the lanes; the last one has no lane.
        self.slot = [*range(len(begun) - 1, -1, -1)]
        self.start = [10 * slot for slot in range(slots)]
        self.code = torch.full((slots, places), UNTOUCHED, dtype=torch.int32, device=twin.device)
        self.state = DelayState(
            twin.ints(self.start), twin.ints([*begun[::-1], 5]), twin.ints([77] * slots)
        )
        self.step = 0

    def draw(
        self, frames: Sequence[Sequence[int]], given: Sequence[Sequence[int]] | None = None
    ) -> tuple[list[list[int]], list[int]]:
        """Each sequence's codes and token of its next frame, where these are drawn or given."""
        twin, padded = self.twin, [-2] * self.places
        lanes = [frames[0], padded, *frames[1:]]
        slot = [self.slot[0], -1, *self.slot[1:]]
        position = [HUGE if of < 0 else self.start[of] + self.step for of in slot]
        first = twin.tiles([codes[0] for codes in lanes], self.tiles)
        rest = [code for codes in lanes for code in codes[1:]] or [-2]
        given = given or [[-1] * self.places] * len(frames)
        frame = twin.ints([given[0], [UNTOUCHED] * self.places, *given[1:]]).T.contiguous()
        token = twin.take(
            *first, *twin.tiles(rest, self.tiles + 1), twin.ints(slot), twin.ints(position), frame,
            self.code, self.state, DELAYS,
        )  # fmt: skip
        self.step += 1
        live = [lane for lane, of in enumerate(slot) if of >= 0]
        found = frame.T.cpu()
        assert (found[1] == UNTOUCHED).all()
        assert torch.equal(found[live], self.code[self.slot].cpu())
        assert (self.code[-1] == UNTOUCHED).all() and int(self.state.ending[-1]) == 77
        best, health = token.best.cpu()[live], token.health.cpu()[live]
        assert token_of_tiles_reference(best, health).tolist() == token.token[live].tolist()
        return found[live].tolist(), token.token[live].tolist()


@pytest.mark.parametrize(("places", "tiles"), [(1, 1), (2, 3), (5, 2), (9, 1)])
def test_codes_begin_one_after_the_other(twin: Twin, places: int, tiles: int) -> None:
    """After no begin id, after one that ends the prompt, and in the middle of a delay."""
    begun = [0, 1, min(3, places)]
    sequences = Sequences(twin, places, begun, tiles)
    for step in range(places + 2):
        drawn = [[(step + place + lane) % 7 for place in range(places)] for lane in range(3)]
        codes, tokens = sequences.draw(drawn)
        for lane, count in enumerate(begun):
            kept = count + step - 1 if count else places * (step > 0)
            wanted = [code if place < kept else BEGIN for place, code in enumerate(drawn[lane])]
            assert codes[lane] == wanted, f"{step=} {lane=}"
            assert tokens[lane] == wanted[0]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_end_code_anywhere_ends_the_codes_one_after_the_other(twin: Twin, place: int) -> None:
    """The other sequence goes on, and the ended one stays at its end."""
    places = 5
    sequences = Sequences(twin, places, [1, 1])
    for step in range(8):
        sequences.draw([[3] * places, [step % 7] * places])
    drawn = [3] * places
    drawn[place] = END
    assert sequences.draw([drawn, [4] * places]) == ([drawn, [4] * places], [drawn[0], 4])
    for ended in range(1, places + 3):
        codes, tokens = sequences.draw([[5] * places, [6] * places])
        count = min(ended, places)
        assert codes == [[END] * count + [5] * (places - count), [6] * places]
        assert tokens == [TOKEN if ended >= places else END, 6]


def test_a_sequence_begins_without_the_end_of_the_one_before(twin: Twin) -> None:
    sequences = Sequences(twin, 3, [1])
    assert int(sequences.state.ending[0]) == 77
    sequences.draw([[3] * 3])
    assert int(sequences.state.ending[0]) == 0
    for _ in range(4):
        sequences.draw([[END] * 3])
    assert int(sequences.state.ending[0]) > 0
    sequences.step = 0
    assert sequences.draw([[3] * 3]) == ([[BEGIN] * 3], [BEGIN])
    assert sequences.draw([[3] * 3]) == ([[3, BEGIN, BEGIN]], [3])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_code_that_cannot_be_drawn_leaves_no_token(twin: Twin, place: int) -> None:
    """Neither where it would have been drawn, nor where a delay fills its place."""
    sequences = Sequences(twin, 3, [1, 1])
    drawn = [4, 4, 4]
    drawn[place] = -1
    for _ in range(5):
        codes, tokens = sequences.draw([drawn, [5] * 3])
        assert codes[0][place] == -1 and tokens[0] == -1
        assert min(codes[1]) >= 0 and tokens[1] == codes[1][0]


def test_given_codes_are_neither_drawn_nor_delayed(twin: Twin) -> None:
    """A given end code ends the sound like one that is drawn, in its own sequence alone."""
    sequences = Sequences(twin, 3, [1, 1])
    codes, tokens = sequences.draw([[1, -1, 2], [5] * 3], [[-1, 6, -1], [-1] * 3])
    assert codes == [[BEGIN, 6, BEGIN], [BEGIN] * 3] and tokens == [BEGIN, BEGIN]
    codes, _ = sequences.draw([[1, 1, 2], [5] * 3], [[0, -1, END], [-1] * 3])
    assert codes == [[0, BEGIN, END], [5, BEGIN, BEGIN]]
    codes, tokens = sequences.draw([[4] * 3, [5] * 3], [[-1, 7, -1], [-1] * 3])
    assert codes == [[END, 7, BEGIN], [5, 5, BEGIN]] and tokens == [END, 5]


@pytest.mark.parametrize("codes", [1, 2, 8])
def test_each_code_has_a_row_with_its_own_parameters(device: str, codes: int) -> None:
    slots, lanes, stride = 4, 3, 1000
    params, drawn = SamplingTensors.neutral(slots), SamplingTensors.neutral(slots)
    for slot in range(slots):
        for name, value in (("min_p", 0.1), ("top_n_sigma", 2.0), ("seed", 2**40)):
            getattr(params, name)[slot] = value + slot
    own = torch.arange(codes * slots).view(codes, slots)
    drawn = drawn._replace(
        temperature=own.float() + 0.5, top_k=own.int() + 100, top_p=own.float() / 64
    )
    neutral = SamplingTensors.neutral(slots * codes, device=device)
    params, drawn = (
        SamplingTensors(*(tensor.to(device) for tensor in each)) for each in (params, drawn)
    )
    slot = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    position = torch.tensor([7, HUGE, 9], dtype=torch.int32, device=device)
    rows = spread_lanes(slot, position, params, drawn, neutral, stride=stride)
    assert isinstance(rows, CodeRows) and rows.slot.numel() == lanes * codes
    sampling = rows.sampling
    assert (sampling.min_len == 0).all() and (sampling.stop_ids == -1).all()
    for lane, of in enumerate(slot.tolist()):
        for place in range(codes):
            row = lane * codes + place
            assert int(rows.slot[row]) == (row if of >= 0 else -1)
            if of < 0:
                continue
            assert int(rows.position[row]) == int(position[lane]) + (place + 1) * stride
            for name in ("temperature", "top_k", "top_p"):
                assert getattr(sampling, name)[row] == getattr(drawn, name)[place, of]
            for name in ("min_p", "top_n_sigma", "seed"):
                assert getattr(sampling, name)[row] == getattr(params, name)[of]


def arguments(**changed: Any) -> dict[str, Any]:
    """Arguments of `take_frame` that fit each other, but for those that are changed."""
    ints = {"dtype": torch.int32}
    state = DelayState(*(torch.zeros(4, **ints) for _ in range(3)))
    given = {
        "best": torch.zeros(2, 1, dtype=torch.int64),
        "health": torch.ones(2, 1, **ints),
        "row_best": torch.zeros(4, 2, dtype=torch.int64),
        "row_health": torch.ones(4, 2, **ints),
        "slot": torch.zeros(2, **ints),
        "position": torch.zeros(2, **ints),
        "frame": torch.zeros(3, 2, **ints),
        "code": torch.zeros(4, 3, **ints),
        "state": state,
    }
    return given | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"code": torch.zeros(4, 3)}, r"code must be a dense int32 \[S, K\], not torch.float32"),
        ({"frame": torch.zeros(2, 2, dtype=torch.int32)}, r"frame must be a dense int32 \[3, 2"),
        ({"row_best": torch.zeros(2, 2, dtype=torch.int64)}, r"best must be \[4, C\]"),
        ({"position": torch.zeros(3, dtype=torch.int32)}, r"position must be a dense \[2\]"),
        ({"code": torch.zeros(5, 3, dtype=torch.int32)}, r"start must be a dense \[5\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_frame(*arguments(**changed).values(), DELAYS)


def test_parameters_of_codes_that_do_not_fit_are_refused() -> None:
    slot = torch.zeros(2, dtype=torch.int32)
    params = SamplingTensors.neutral(3)
    drawn = params._replace(**{name: getattr(params, name).repeat(2, 1) for name in
                               ("temperature", "top_k", "top_p")})  # fmt: skip
    short = drawn._replace(top_k=drawn.top_k[:1])
    with pytest.raises(ValueError, match=r"top_k of codes must be a dense \[2, 3\], not \[1, 3\]"):
        spread_lanes(slot, slot, params, short, SamplingTensors.neutral(4), stride=1)
    with pytest.raises(ValueError, match="neutral parameters of 3 rows for 4"):
        spread_lanes(slot, slot, params, drawn, params, stride=1)


@compiles
def test_the_kernels_wait_before_they_store() -> None:
    """As compiled for sm_90."""
    given = arguments()
    state = DelayState(*(tensor.to("meta") for tensor in given.pop("state")))
    meta = {name: tensor.to("meta") for name, tensor in given.items()}
    slot, position = meta["slot"], meta["position"]
    params = SamplingTensors(*(tensor.to("meta") for tensor in SamplingTensors.neutral(4)))
    drawn = params._replace(
        temperature=params.temperature.new_empty(2, 4),
        top_k=params.top_k.new_empty(2, 4),
        top_p=params.top_p.new_empty(2, 4),
    )
    calls: list[Callable[[], object]] = [
        lambda: take_frame(*meta.values(), state, DELAYS, pdl=True),
        lambda: spread_lanes(slot, position, params, drawn, params, stride=2**24, pdl=True),
    ]
    for call in calls:
        ptx, _ = compile_launch(record_launch(module, call))
        assert_waits_before_it_shows(ptx)
