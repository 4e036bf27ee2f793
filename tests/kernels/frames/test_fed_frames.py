"""Frames whose first codebook has a size of its own, rows and codes that are fed to frames, and
codes whose embeddings begin a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.frames import codes as codes_module
from graphengine.kernels.frames import embed as embed_module
from graphengine.kernels.frames.codes import take_code, take_code_reference
from graphengine.kernels.frames.embed import (
    FedCodes,
    FedRows,
    embed_frames,
    embed_frames_reference,
    sum_of_codes,
)
from graphengine.kernels.linear.residual import Residual
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
FIRST, CODES, SLOTS, RING = 19, 11, 6, 4
HUGE = 2**31 - 1


@dataclass(frozen=True)
class Twin:
    """The ops, or their plain twins, on one device."""

    embed: Callable[..., None]
    take: Callable[..., torch.Tensor]
    device: str


@pytest.fixture(params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(embed_frames_reference, take_code_reference, "cpu")
    return Twin(embed_frames, take_code, request.getfixturevalue("device"))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spaced(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, with poison between them."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 5), torch.nan, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def new_residual(lanes: int, hidden: int, dtype: torch.dtype, device: str) -> Residual:
    return Residual(
        torch.full((lanes, hidden), 7.0, device=device),
        torch.full((lanes, hidden), 7.0, dtype=dtype, device=device),
        torch.full((2, lanes), 7.0, device=device),
    )


POSITION = [5, HUGE, 9, 3, 0, 12]
SLOT = [3, -1, 0, 5, 2, 1]
BOUND = [10, 12, 1, 6, -9, 2]
ROW = {0: 5 % RING, 2: 9 % RING, 3: RING, 4: 0, 5: RING}
"""The row that each live lane gets: a ring's, or the pad at its end."""


@pytest.mark.parametrize(("places", "hidden"), [(2, 24), (5, 33), (17, 7)])
@pytest.mark.parametrize("own_first", [False, True])
def test_what_is_fed_is_added_to_the_rounded_sum(
    twin: Twin, dtypes: tuple[torch.dtype, ...], places: int, hidden: int, own_first: bool
) -> None:
    for dtype in (torch.float32,) if twin.embed is embed_frames_reference else dtypes:
        first = spaced(drawn(FIRST if own_first else CODES, hidden, seed=1).to(dtype))
        rest = spaced(drawn((places - 1) * CODES, hidden, seed=2).to(dtype))
        generator = torch.Generator().manual_seed(places)
        code = torch.randint(CODES, (SLOTS, places), generator=generator, dtype=torch.int32)
        code[:, 0] = torch.tensor([len(first) - 1, 0, 3, 1, HUGE, 2])
        fed = drawn(SLOTS, RING + 1, hidden, seed=3).to(dtype)
        fed[4] = torch.nan
        weight = drawn(hidden, seed=5).to(dtype)
        residual = new_residual(len(SLOT), hidden, dtype, twin.device)
        table = rest if own_first else spaced(torch.cat([first, rest]))
        ints: dict[str, torch.Tensor] = {
            name: torch.tensor(values, dtype=torch.int32, device=twin.device)
            for name, values in {"slot": SLOT, "position": POSITION, "bound": BOUND}.items()
        }
        twin.embed(
            code.to(twin.device),
            table.to(twin.device),
            ints["slot"],
            weight.to(twin.device),
            residual,
            first_UH=first.to(twin.device) if own_first else None,
            fed=FedRows(fed.to(twin.device), ints["bound"]),
            position_N=ints["position"],
        )
        for lane, slot in enumerate(SLOT):
            x, scaled = residual.x[lane].cpu(), residual.scaled[lane].cpu()
            if slot < 0:
                assert (x == 7).all() and (scaled == 7).all()
                continue
            total = first[int(code[slot, 0])].float()
            for place in range(1, places):
                total = total + rest[(place - 1) * CODES + int(code[slot, place])].float()
            wanted = (total.to(dtype).float() + fed[slot, ROW[lane]].float()).to(dtype).float()
            assert torch.equal(x, wanted), f"{lane=}"
            assert torch.equal(scaled, (wanted * weight.float()).to(dtype))


@pytest.mark.parametrize(("places", "fed_places", "hidden"), [(2, 1, 24), (4, 5, 33), (9, 8, 7)])
def test_codes_that_are_fed_are_the_last_of_the_sum(
    twin: Twin, dtypes: tuple[torch.dtype, ...], places: int, fed_places: int, hidden: int
) -> None:
    """Each lane has those of its place in the ring, or the pad; one code that is none gives NaN."""
    theirs = CODES + 3
    for dtype in (torch.float32,) if twin.embed is embed_frames_reference else dtypes:
        first = spaced(drawn(FIRST, hidden, seed=1).to(dtype))
        rest = spaced(drawn((places - 1) * CODES, hidden, seed=2).to(dtype))
        table = spaced(drawn(fed_places * theirs, hidden, seed=3).to(dtype))
        generator = torch.Generator().manual_seed(places)
        code = torch.randint(CODES, (SLOTS, places), generator=generator, dtype=torch.int32)
        fed = torch.randint(theirs, (SLOTS, RING + 1, fed_places), generator=generator)
        fed[4] = HUGE
        fed[0, ROW[2], -1] = theirs
        weight = drawn(hidden, seed=5).to(dtype)
        residual = new_residual(len(SLOT), hidden, dtype, twin.device)
        slot, position, bound, rows = (
            torch.as_tensor(values).to(torch.int32).to(twin.device)
            for values in (SLOT, POSITION, BOUND, fed)
        )
        twin.embed(
            *(each.to(twin.device) for each in (code, rest)),
            slot,
            weight.to(twin.device),
            residual,
            first_UH=first.to(twin.device),
            fed=FedCodes(rows, bound, table.to(twin.device)),
            position_N=position,
        )
        for lane, of_slot in enumerate(SLOT):
            x = residual.x[lane].cpu()
            if of_slot < 0:
                assert (x == 7).all()
                continue
            if lane == 2:
                assert x.isnan().all()
                continue
            total = first[int(code[of_slot, 0])].float()
            for place in range(1, places):
                total = total + rest[(place - 1) * CODES + int(code[of_slot, place])].float()
            for place, said in enumerate(fed[of_slot, ROW[lane]].tolist()):
                total = total + table[place * theirs + said].float()
            assert torch.equal(x, total.to(dtype).float()), f"{lane=}"


@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_embedding_of_a_code_begins_a_stream(
    twin: Twin, dtypes: tuple[torch.dtype, ...], place: int
) -> None:
    """The table lacks the last codebook, and has a row more than codes are drawn for."""
    hidden, places, rows = 21, 5, CODES + 1
    most = FIRST if place == 0 else rows
    for dtype in (torch.float32,) if twin.take is take_code_reference else dtypes:
        first = spaced(drawn(FIRST, hidden, seed=1).to(dtype))
        rest = spaced(drawn((places - 2) * rows, hidden, seed=2).to(dtype))
        tokens, slot = [most - 1, most, 0, 4], [2, 0, 3, -1]
        best = torch.tensor([[(5 << 32) | (HUGE ^ token)] for token in tokens])
        x = torch.full((1, 4, hidden), 7.0, device=twin.device)
        made = twin.take(
            best.to(twin.device),
            torch.ones(4, 1, dtype=torch.int32, device=twin.device),
            torch.tensor(slot, dtype=torch.int32, device=twin.device),
            torch.full((places, 4), -1, dtype=torch.int32, device=twin.device),
            torch.zeros(SLOTS, places, dtype=torch.int32, device=twin.device),
            rest.to(twin.device),
            x,
            place=place,
            first_UH=first.to(twin.device),
            book_rows=rows,
            seeds=True,
        )
        table = first if place == 0 else rest[(place - 1) * rows : place * rows]
        assert made.data_ptr() == x.data_ptr() and made.shape == (4, hidden)
        assert torch.equal(x[0, 0].cpu(), table[most - 1].float())
        assert torch.equal(x[0, 2].cpu(), table[0].float())
        assert x[0, 1].isnan().all() and (x[0, 3] == 7).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 2, 8)}, r"\[1, 2, 8\] to begin with embeddings, not .*\(2, 2, 8\)"),
        ({"x": torch.zeros(1, 2, 7)}, r"\[1, 2, 8\] to begin with embeddings"),
        ({"table": torch.zeros(CODES, 8)}, "a table of 11 rows is none of 2 or 3 codebooks of 12"),
    ],
)
def test_streams_that_cannot_begin_with_an_embedding(changed: dict[str, Any], message: str) -> None:
    given = {"table": torch.zeros(2 * 12, 8), "x": torch.zeros(1, 2, 8)} | changed
    ints = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        take_code(
            *(ints.long(), ints, ints[:, 0], ints.new_zeros(4, 2), ints.new_zeros(3, 4)),
            *given.values(),
            place=1,
            first_UH=torch.zeros(FIRST, 8),
            book_rows=12,
            seeds=True,
        )


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_code_is_embedded_by_its_own_codebook(
    twin: Twin, dtypes: tuple[torch.dtype, ...], place: int
) -> None:
    """The largest code of the codebook, one past it, and one that could not be drawn."""
    hidden, places = 21, 5
    most = FIRST if place == 0 else CODES
    for dtype in (torch.float32,) if twin.take is take_code_reference else dtypes:
        first = spaced(drawn(FIRST, hidden, seed=1).to(dtype))
        rest = spaced(drawn((places - 1) * CODES, hidden, seed=2).to(dtype))
        tokens, slot = [most - 1, most, 0, 4], [2, 0, 3, -1]
        best = torch.tensor([[(5 << 32) | (HUGE ^ token)] for token in tokens])
        health = torch.ones(4, 1, dtype=torch.int32)
        health[2] = 2
        embedded = twin.take(
            best.to(twin.device),
            health.to(twin.device),
            torch.tensor(slot, dtype=torch.int32, device=twin.device),
            torch.full((places, 4), -1, dtype=torch.int32, device=twin.device),
            torch.zeros(SLOTS, places, dtype=torch.int32, device=twin.device),
            rest.to(twin.device),
            torch.full((1, 4, 8), 7.0, device=twin.device),
            place=place,
            first_UH=first.to(twin.device),
        ).cpu()
        table = first if place == 0 else rest[(place - 1) * CODES : place * CODES]
        assert torch.equal(embedded[0], table[most - 1])
        assert embedded[1:3].isnan().all()


def test_sums_of_whole_frames_know_the_first_codebook() -> None:
    first, rest = drawn(FIRST, 8, seed=1), drawn(2 * CODES, 8, seed=2)
    code = torch.tensor([[FIRST - 1, 0, CODES - 1], [FIRST, 0, 0], [0, CODES, 0]])
    found = sum_of_codes(code, rest, first)
    assert torch.equal(found[0], first[-1] + rest[0] + rest[-1])
    assert found[1:].isnan().all()


def given(**changed: Any) -> dict[str, Any]:
    """Arguments of `embed_frames` that fit each other, but for those that are changed."""
    ints = {"dtype": torch.int32}
    return {
        "code_SK": torch.zeros(4, 3, **ints),
        "table_MH": torch.zeros(2 * CODES, 8),
        "slot_N": torch.zeros(2, **ints),
        "norm_weight_H": torch.ones(8),
        "residual": new_residual(2, 8, torch.float32, "cpu"),
        "first_UH": torch.zeros(FIRST, 8),
        "fed": FedRows(torch.zeros(4, RING + 1, 8), torch.zeros(4, **ints)),
        "position_N": torch.zeros(2, **ints),
    } | changed


BOUNDS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"table_MH": torch.zeros(21, 8)}, "a table of 21 rows is none of 2 codebooks"),
        ({"first_UH": torch.zeros(FIRST, 7)}, r"first codebook's torch.float32 \[19, 7\] must"),
        ({"first_UH": torch.zeros(FIRST, 8).half()}, "first codebook's torch.float16"),
        ({"fed": FedRows(torch.zeros(3, 5, 8), BOUNDS)}, r"\[4, 2 or more, 8\], not .*\(3, 5, 8\)"),
        ({"fed": FedRows(torch.zeros(4, 1, 8), BOUNDS)}, r"\[4, 2 or more, 8\], not .*\(4, 1, 8\)"),
        ({"fed": FedRows(torch.zeros(4, 5, 8).half(), BOUNDS)}, "not torch.float16"),
        ({"fed": FedRows(torch.zeros(4, 5, 8), BOUNDS[:3])}, r"dense int32 \[4\], not .*\(3,\)"),
        (
            {"fed": FedCodes(BOUNDS.view(4, 1, 1), BOUNDS, torch.zeros(5, 8))},
            r"dense torch.int32 \[4, 2 or more, P\], not .*\(4, 1, 1\)",
        ),
        ({"fed": FedCodes(torch.zeros(4, 5, 2), BOUNDS, torch.zeros(6, 8))}, "not torch.float32"),
        (
            {"fed": FedCodes(torch.zeros(4, 5, 2).int(), BOUNDS, torch.zeros(5, 8))},
            r"the table of 2 fed codes must be torch.float32 \[2 \* W, 8\], not .*\(5, 8\)",
        ),
        ({"position_N": None}, "position_N must be given"),
        ({"position_N": torch.zeros(3, dtype=torch.int32)}, r"position must be a dense \[2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed_frames(**given(**changed))


@compiles
def test_the_kernels_wait_before_they_store() -> None:
    """As compiled for sm_90."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return type(value)(*map(on_meta, value)) if isinstance(value, tuple) else value

    meta: dict[str, Any] = {name: on_meta(value) for name, value in given().items()}
    code, table, slot, first = (
        meta[name] for name in ("code_SK", "table_MH", "slot_N", "first_UH")
    )
    best = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    frame, x = code.new_empty(3, 2), table.new_empty(1, 2, 4)
    theirs = FedCodes(code.new_empty(4, 5, 2), code.new_empty(4), table[: 2 * CODES])
    calls: list[tuple[Any, Callable[[], object]]] = [
        (embed_module, lambda: embed_frames(**meta, pdl=True)),
        (embed_module, lambda: embed_frames(**meta | {"fed": theirs}, pdl=True)),
        (
            codes_module,
            lambda: take_code(
                *(best, best.int(), slot, frame, code, table, table.new_empty(1, 2, 8)),
                place=0,
                first_UH=first,
                seeds=True,
                pdl=True,
            ),
        ),
        *(
            (
                codes_module,
                lambda place=place: take_code(
                    *(best, best.int(), slot, frame, code, table, x),
                    place=place,
                    first_UH=first,
                    pdl=True,
                ),
            )
            for place in (0, 1)
        ),
    ]
    for module, call in calls:
        ptx, _ = compile_launch(record_launch(module, call))
        assert_waits_before_it_shows(ptx)
