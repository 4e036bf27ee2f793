"""Frames of codes: their embedding, each code on its way to the next position, and their token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.frames import codes as codes_module
from graphengine.kernels.frames import embed as embed_module
from graphengine.kernels.frames import given as given_module
from graphengine.kernels.frames.codes import (
    FrameEnd,
    FrameToken,
    end_frame,
    end_frame_reference,
    take_code,
    take_code_reference,
)
from graphengine.kernels.frames.embed import embed_frames, embed_frames_reference
from graphengine.kernels.frames.given import given_codes, given_codes_reference
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.sample.sampling import token_of_tiles_reference
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
HUGE, LOWEST = 2**31 - 1, -(2**31)
CANARY = 776.0
UNTOUCHED = -77
CODES = 11
END = FrameEnd(code=3, judged=4, token=CODES)


@dataclass(frozen=True)
class Twin:
    """The ops, or their plain twins, on one device."""

    embed: Callable[..., None]
    take: Callable[..., torch.Tensor]
    end: Callable[..., FrameToken]
    fetch: Callable[..., torch.Tensor]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def full(self, *shape: int) -> torch.Tensor:
        """Codes that nobody has written yet."""
        return torch.full(shape, UNTOUCHED, dtype=torch.int32, device=self.device)

    def tiles(self, tokens: Sequence[int | None], tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tiles of which one has each lane's code; None: with a NaN. -1: a padded lane's poison."""
        shape = (len(tokens), tiles)
        best = torch.full(shape, -(2**63), dtype=torch.int64)
        health = torch.ones(shape, dtype=torch.int32)
        for lane, token in enumerate(tokens):
            if token is None:
                health[lane, lane % tiles] = 2
            elif token < 0:
                best[lane], health[lane] = HUGE << 32 | HUGE, HUGE
            else:
                best[lane] = (5 << 32) | (HUGE ^ (token + 1))
                best[lane, lane % tiles] = (7 << 32) | (HUGE ^ token)
        return best.to(self.device), health.to(self.device)


@pytest.fixture(params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        references = take_code_reference, end_frame_reference, given_codes_reference
        return Twin(embed_frames_reference, *references, "cpu")
    device = request.getfixturevalue("device")
    return Twin(embed_frames, take_code, end_frame, given_codes, device)


def table_of(places: int, hidden: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A view with rows far apart, between which is poison."""
    wide = torch.full((places * CODES, hidden + 3), torch.nan)
    wide[:, :hidden] = torch.randn(
        places * CODES, hidden, generator=torch.Generator().manual_seed(places)
    )
    return wide.to(dtype)[:, :hidden]


@pytest.mark.parametrize(("places", "hidden"), [(2, 24), (5, 33), (33, 7)])
def test_a_frame_begins_a_stream_with_the_sum_of_its_embeddings(
    twin: Twin, dtypes: tuple[torch.dtype, ...], places: int, hidden: int
) -> None:
    for dtype in (torch.float32,) if twin.embed is embed_frames_reference else dtypes:
        draw = torch.Generator().manual_seed(hidden)
        table = table_of(places, hidden, dtype)
        code = torch.randint(CODES, (6, places), generator=draw, dtype=torch.int32)
        code[4, places - 1] = CODES
        code[5, 0] = -1
        slot = [3, -1, 0, 4, 5]
        weight = torch.randn(hidden, generator=draw).to(dtype)
        wide = torch.full((2, 5, hidden + 5), CANARY, device=twin.device)
        residual = Residual(
            x=wide[0, :, :hidden],
            scaled=wide[1].to(dtype)[:, :hidden],
            squares=torch.full((3, 5), CANARY, device=twin.device),
        )
        device = twin.device
        twin.embed(code.to(device), table.to(device), twin.ints(slot), weight.to(device), residual)
        for lane, of in enumerate(slot):
            x, scaled, squares = (
                each.cpu() for each in (residual.x[lane], residual.scaled[lane],
                                        residual.squares[:, lane])
            )  # fmt: skip
            if of < 0:
                assert all((each == CANARY).all() for each in (x, scaled, squares))
                continue
            if of >= 4:
                assert x.isnan().all() and scaled.isnan().all()
                continue
            wanted = torch.zeros(hidden)
            for place in range(places):
                wanted += table[place * CODES + int(code[of, place])].float()
            rounded = wanted.to(dtype).float()
            assert torch.equal(x, rounded)
            assert torch.equal(scaled, (rounded * weight.float()).to(dtype))
            torch.testing.assert_close(squares, torch.tensor([(rounded**2).sum(), 0.0, 0.0]))


@pytest.mark.parametrize(("places", "place", "tiles"), [(2, 0, 1), (5, 3, 3), (33, 31, 17)])
def test_a_code_is_noted_and_embedded(
    twin: Twin, dtypes: tuple[torch.dtype, ...], places: int, place: int, tiles: int
) -> None:
    """Everything of padded lanes, of other slots and of other places of the frame stays."""
    hidden, inner = 21, 10
    for dtype in (torch.float32,) if twin.take is take_code_reference else dtypes:
        table = table_of(places, hidden, dtype)
        tokens = [4, -1, CODES - 1, None, 0]
        slot = [2, -1, 0, 5, 3]
        frame, code = twin.full(places, 5), twin.full(6, places)
        x = torch.full((2, 5, inner), CANARY, device=twin.device)
        embedded = twin.take(
            *twin.tiles(tokens, tiles),
            twin.ints(slot),
            frame,
            code,
            table.to(twin.device),
            x,
            place=place,
        ).cpu()
        wanted = [-1 if token is None else token for token in tokens]
        found = frame.cpu()
        assert found[place].tolist() == [
            UNTOUCHED if of < 0 else token for token, of in zip(wanted, slot, strict=True)
        ]
        found[place] = UNTOUCHED
        assert (found == UNTOUCHED).all()
        noted = code.cpu()
        for of, token in zip(slot, wanted, strict=True):
            if of >= 0:
                assert noted[of, place] == token
                noted[of, place] = UNTOUCHED
        assert (noted == UNTOUCHED).all()
        for lane, (of, token) in enumerate(zip(slot, wanted, strict=True)):
            assert (x[:, lane] == (CANARY if of < 0 else 0)).all()
            if of >= 0 and token < 0:
                assert embedded[lane].isnan().all()
            elif of >= 0:
                assert torch.equal(embedded[lane], table[place * CODES + token])
        assert embedded.dtype == dtype


FRAMES: list[tuple[list[int], int]] = [
    ([3, 3, 3, 3, 3], END.token),
    # The last code is not judged.
    ([3, 3, 3, 3, 9], END.token),
    ([3, 3, 3, 9, 3], 3),
    ([9, 3, 3, 3, 3], 9),
    ([0, 1, 2, 3, 4], 0),
    ([3, 3, -1, 3, 3], -1),
    ([3, 3, 3, 3, -1], -1),
    ([-1, 3, 3, 3, 3], -1),
]
"""Codes of a frame, and the token that it has."""


def test_given_codes_stand(twin: Twin) -> None:
    """In place of drawn ones, and of ones that could not be drawn."""
    slot, drawn, given = [1, -1, 0, 2], [4, -1, None, 6], [7, 5, 8, -1]
    wanted = [7, HUGE, 8, 6]
    frame, code = twin.full(3, 4), twin.full(3, 3)
    frame[1] = twin.ints([7, HUGE, 8, -1])
    x = torch.zeros(1, 4, 4, device=twin.device)
    table = table_of(3, 6).to(twin.device)
    tiles = twin.tiles(drawn, 2)
    embedded = twin.take(*tiles, twin.ints(slot), frame, code, table, x, place=1)
    assert frame[1].tolist() == wanted and code[:, 1].tolist() == [8, 7, 6]
    for lane in (0, 2, 3):
        assert torch.equal(embedded[lane], table[CODES + wanted[lane]])
    frame = twin.full(3, 4)
    frame[:2], frame[2] = 1, twin.ints(given)
    token = twin.end(*tiles, twin.ints(slot), frame, code, FrameEnd(9, 2, CODES))
    assert frame[2].tolist() == [7, 5, 8, 6] and code[:, 2].tolist() == [8, 7, 6]
    assert [token.token[lane].item() for lane in (0, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("places", [2, 5, 33])
def test_given_codes_are_fetched_by_slot_and_position(twin: Twin, places: int) -> None:
    """Past a slot's end, and in slots without given codes, all are drawn."""
    draw = torch.Generator().manual_seed(places)
    table = torch.randint(-1, 30_000, (4, 9, places), generator=draw, dtype=torch.int16)
    slot, position = [2, -1, 0, 2, 3, 1], [4, HUGE, 3, 6, 0, 7]
    frame = twin.fetch(
        table.to(twin.device), twin.ints([0, 9, 7, 1]), twin.ints(slot), twin.ints(position)
    )
    assert frame.shape == (places, 6) and frame.dtype == torch.int32
    assert frame[:, 0].tolist() == table[2, 5].tolist()
    assert frame[:, 5].tolist() == table[1, 8].tolist()
    for lane in (2, 3, 4):
        assert frame[:, lane].tolist() == [-1] * places


@pytest.mark.parametrize("tiles", [1, 3])
def test_a_frame_has_its_first_code_or_the_end_as_its_token(twin: Twin, tiles: int) -> None:
    lanes = len(FRAMES) + 1
    slot = [*range(len(FRAMES) - 1, -1, -1), -1]
    frame, code = twin.full(5, lanes), twin.full(lanes, 5)
    for lane, (codes, _) in enumerate(FRAMES):
        frame[:4, lane] = twin.ints(codes[:4])
    frame[:, -1] = LOWEST
    last = [None if codes[4] < 0 else codes[4] for codes, _ in FRAMES]
    token = twin.end(*twin.tiles([*last, -1], tiles), twin.ints(slot), frame, code, END)
    wanted = [found for _, found in FRAMES]
    assert token.token[:-1].tolist() == wanted
    best, health = token.best[:-1].cpu(), token.health[:-1].cpu()
    assert token_of_tiles_reference(best, health).tolist() == wanted
    assert frame[4].tolist() == [*(codes[4] for codes, _ in FRAMES), LOWEST]
    noted = code.cpu()
    for of, (codes, _) in zip(slot, FRAMES, strict=False):
        assert noted[of].tolist() == [UNTOUCHED] * 4 + [codes[4]]
    assert (noted[-1] == UNTOUCHED).all()


def arguments(**changed: Any) -> dict[str, Any]:
    """Arguments of `take_code` that fit each other, but for those that are changed."""
    given = {
        "best": torch.zeros(2, 1, dtype=torch.int64),
        "health": torch.ones(2, 1, dtype=torch.int32),
        "slot": torch.zeros(2, dtype=torch.int32),
        "frame": torch.zeros(3, 2, dtype=torch.int32),
        "code": torch.zeros(4, 3, dtype=torch.int32),
        "table": torch.zeros(6, 8),
        "x": torch.zeros(1, 2, 4),
    }
    return given | changed


@pytest.mark.parametrize(
    ("changed", "place", "message"),
    [
        ({"table": torch.zeros(7, 8)}, 0, "a table of 7 rows is none of 3 codebooks"),
        ({"code": torch.zeros(4, 3)}, 0, r"code must be a dense int32 \[S, K\], not torch.float32"),
        ({"frame": torch.zeros(2, 2, dtype=torch.int32)}, 0, r"frame must be a dense int32 \[3, 2"),
        ({"x": torch.zeros(1, 3, 4)}, 0, r"x must be a dense float32 \[J, 2, I\], not"),
        ({"best": torch.zeros(3, 1, dtype=torch.int64)}, 0, r"best must be \[2, C\]"),
        ({}, 2, "place=2 of a frame of 3 codes: 0 to 1 are embedded"),
        ({}, -1, "place=-1 of a frame of 3 codes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changed: dict[str, Any], place: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        take_code(*arguments(**changed).values(), place=place)


def test_tables_of_given_codes_that_do_not_fit_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    for table, message in (
        (torch.zeros(2, 4, 3), r"table must be a dense int16 \[2, P, K\], not torch.float32"),
        (torch.zeros(3, 4, 3, dtype=torch.int16), r"int16 \[2, P, K\], not torch.int16 \(3, 4, 3"),
    ):
        with pytest.raises(ValueError, match=message):
            given_codes(table, ints, ints, ints)


@pytest.mark.parametrize("judged", [0, 4])
def test_an_end_of_other_codes_is_refused(judged: int) -> None:
    given = [*arguments().values()][:5]
    with pytest.raises(ValueError, match=f"judged={judged} of a frame of 3 codes"):
        end_frame(*given, FrameEnd(0, judged, 9))


@compiles
def test_the_kernels_wait_before_they_store() -> None:
    """As compiled for sm_90."""
    meta = {name: tensor.to("meta") for name, tensor in arguments().items()}
    best, health, slot, frame, code, table, x = meta.values()
    residual = Residual(x[0].new_empty(2, 8), x[0].new_empty(2, 8), x[0].new_empty(1, 2))
    given = torch.zeros(2, 4, 3, dtype=torch.int16, device="meta")
    calls: list[tuple[Any, Callable[[], object]]] = [
        (given_module, lambda: given_codes(given, slot, slot, slot, pdl=True)),
        (embed_module, lambda: embed_frames(code, table, slot, table[0], residual, pdl=True)),
        (
            codes_module,
            lambda: take_code(best, health, slot, frame, code, table, x, place=1, pdl=True),
        ),
        (
            codes_module,
            lambda: end_frame(best, health, slot, frame, code, FrameEnd(0, 2, 9), pdl=True),
        ),
    ]
    for module, call in calls:
        ptx, _ = compile_launch(record_launch(module, call))
        assert_waits_before_it_shows(ptx)
