"""How a segment is divided: stages, units of 8 weight rows, tiles, and each program's units.

A unit is 8 rows of a stage's weight, times all of its columns; a SwiGLU's has 4 gates and their ups
in turn. It is streamed in tiles of `TILE_COLUMNS` columns, of which each consumer warp multiplies a
share. Where all inputs of a stage do not fit shared memory its columns are cut into parts, and a
program multiplies one part of all its units after the other.

Letters: P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from graphengine.kernels.core.devices import H200

StageKind = Literal["store", "residual", "swiglu"]
UNIT_ROWS = 8
TILE_COLUMNS = 1024
ROW_PITCH = 2 * TILE_COLUMNS + 64
"""Bytes from row to row of a tile in shared memory: two rows of 64 bytes share no bank."""
TILE_BYTES = UNIT_ROWS * ROW_PITCH
COLUMNS_OF = 32
"""Columns of a weight come in multiples of this: two `mma.sync` of 16."""
MAX_ROWS = 8
"""Most lanes of a segment: rows of an `mma.sync` of which half are empty."""
MAX_STAGES = 4
MAX_SLOTS = 12
"""Most tiles of a ring: there is a named barrier for each and one more, of the 16 of a program."""


USUAL_SLOTS = 9
"""Tiles of a ring where they fit: 149 KB, beside which an H200's multiprocessor has room for a
program of attention.
"""


class Stage(NamedTuple):
    """One product of a segment, and its epilogue.

    kind      "store": y itself; "residual": added to the stream; "swiglu": silu(gate) * up
    rows      of the weight; of a SwiGLU gates and ups together
    columns   of the weight
    normed    whether the product is divided by the rms of the stream before it
    """

    kind: StageKind
    rows: int
    columns: int
    normed: bool = False

    @property
    def units(self) -> int:
        return self.rows // UNIT_ROWS

    @property
    def tiles(self) -> int:
        """Tiles of a unit."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.kind == "swiglu" else self.rows


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A `Stage` with the places of its inputs and outputs, for the kernel.

    Places are words of the set in which programs pass on inputs; -1: a tensor of the launch's.
    `squares_at` is where the sums of squares lie that a normed stage reads.
    """

    kind: str
    units: int
    rows: int
    columns: int
    tiles: int
    parts: int
    part_tiles: int
    normed: bool
    in_at: int
    squares_at: int
    out_at: int
    out_squares_at: int


class SegmentCut(NamedTuple):
    """Sizes of a launch.

    rows        lanes
    consumers   warps that multiply: part of the numerics
    slots       tiles of the ring
    flight      most tiles of a program on their way
    held        units whose sums a program keeps from one part to the next; 0: there is one part
    part_tiles  most tiles of a part
    words       words of a set of inputs
    """

    rows: int
    consumers: int
    slots: int
    flight: int
    held: int
    part_tiles: int
    words: int

    @property
    def sums(self) -> int:
        """Units whose sums may be in shared memory: none is overwritten, as no warp can be a whole
        ring ahead of another.
        """
        return self.slots + 1

    @property
    def groups(self) -> int:
        """Groups of 32 columns of a tile, for each consumer."""
        return TILE_COLUMNS // self.consumers // COLUMNS_OF

    @property
    def x_bytes(self) -> int:
        """Inputs of a consumer in shared memory."""
        return self.part_tiles * self.groups * self.rows * 64

    @property
    def sum_bytes(self) -> int:
        """A consumer's sums of a unit: 8 outputs of each lane."""
        return self.rows * 32

    # Offsets in shared memory.

    @property
    def x_at(self) -> int:
        return self.slots * TILE_BYTES

    @property
    def held_at(self) -> int:
        return self.x_at + self.consumers * self.x_bytes

    @property
    def sums_at(self) -> int:
        return self.held_at + self.consumers * self.held * 512

    @property
    def squares_at(self) -> int:
        return self.sums_at + self.sums * self.consumers * self.sum_bytes

    @property
    def factors_at(self) -> int:
        return self.squares_at + min(self.rows, self.consumers) * 2048

    @property
    def barriers_at(self) -> int:
        return self.factors_at + 64

    @property
    def shared_bytes(self) -> int:
        return -(-(self.barriers_at + 16 * self.slots) // 2048) * 2048


def check_stages(stages: Sequence[Stage]) -> None:
    """ValueError for sizes that do not fit, or stages that do not follow each other."""
    if not 1 <= len(stages) <= MAX_STAGES:
        raise ValueError(f"a segment has 1 to {MAX_STAGES} stages, not {len(stages)}")
    for number, stage in enumerate(stages):
        if stage.rows % UNIT_ROWS or stage.columns % COLUMNS_OF:
            raise ValueError(
                f"stage {number}: {stage.rows} rows must be a multiple of {UNIT_ROWS}, and "
                f"{stage.columns} columns one of {COLUMNS_OF}"
            )
        before = stages[number - 1] if number else None
        if before is not None and before.outputs != stage.columns:
            raise ValueError(
                f"stage {number} has {stage.columns} columns, the one before "
                f"{before.outputs} outputs"
            )
        if stage.normed and (before is None or before.kind != "residual"):
            raise ValueError(f"stage {number} is normed, and no stage before it adds to the stream")
        if stage.kind == "residual" and number and stage.rows != _stream(stages):
            raise ValueError(f"stage {number}: {stage.rows} rows, the stream has {_stream(stages)}")
        if stage.kind == "store" and number + 1 < len(stages):
            raise ValueError(f"stage {number} of {len(stages)} stores its product: it must be last")


def _stream(stages: Sequence[Stage]) -> int:
    return next(stage.rows for stage in stages if stage.kind == "residual")


def deal_units(stages: Sequence[Stage], programs: int) -> torch.Tensor:
    """int32 [stages, P, 2]: the first unit of each program and how many it has.

    All programs stream about alike: what is left over goes to those with the fewest tiles so far.
    Stages that add to the stream are dealt alike, so that a program's rows of it stay its own.
    """
    table = torch.zeros((len(stages), programs, 2), dtype=torch.int32)
    streamed = [0] * programs
    residual: list[int] | None = None
    order = sorted(range(len(stages)), key=lambda n: stages[n].kind != "residual")
    for number in order:
        stage = stages[number]
        if stage.kind == "residual" and residual is not None:
            counts = residual
        else:
            each, more = divmod(stage.units, programs)
            chosen = set(sorted(range(programs), key=lambda p: (streamed[p], p))[:more])
            counts = [each + (p in chosen) for p in range(programs)]
            if stage.kind == "residual":
                residual = counts
        first = 0
        for program, count in enumerate(counts):
            table[number, program, 0], table[number, program, 1] = first, count
            first += count
            streamed[program] += count * stage.tiles
    return table


def place_stages(
    stages: Sequence[Stage],
    *,
    rows: int,
    programs: int,
    consumers: int = 8,
    slots: int | None = None,
    flight: int = 3,
    x_bytes: int = 64 * 1024,
    shared_bytes: int = H200.shared_bytes,
) -> tuple[tuple[PlacedStage, ...], SegmentCut]:
    """The stages as the kernel takes them, for this many rows and programs.

    slots    None: as many as fit, `USUAL_SLOTS` at most
    x_bytes  most inputs of a program in shared memory; no bit depends on it

    ValueError for stages that `check_stages` does not take, a ring of more than `MAX_SLOTS` tiles
    or fewer than are on their way, and for more shared memory than a program has.
    """
    check_stages(stages)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"a segment takes 1 to {MAX_ROWS} rows, not {rows}")
    if not 1 <= flight <= (slots or USUAL_SLOTS) <= MAX_SLOTS:
        raise ValueError(f"{flight=} must be 1 to {slots=}, which must be at most {MAX_SLOTS}")
    most = max(1, x_bytes // (rows * 2 * TILE_COLUMNS))
    parts = [-(-stage.tiles // most) for stage in stages]
    part_tiles = [-(-stage.tiles // n) for stage, n in zip(stages, parts, strict=True)]
    held = max(
        (-(-stage.units // programs) for stage, n in zip(stages, parts, strict=True) if n > 1),
        default=0,
    )
    placed, at, in_at, squares_at = [], 0, -1, -1
    for number, stage in enumerate(stages):
        last = number + 1 == len(stages)
        out_at = out_squares_at = -1
        if not last:
            out_at = at
            at += -(-rows * stage.outputs // 8) * 4
            if stage.kind == "residual":
                out_squares_at = at
                at += -(-rows * stage.units // 4) * 4
        placed.append(
            PlacedStage(
                stage.kind,
                stage.units,
                stage.rows,
                stage.columns,
                stage.tiles,
                -(-stage.tiles // part_tiles[number]),
                part_tiles[number],
                stage.normed,
                in_at,
                squares_at if stage.normed else -1,
                out_at,
                out_squares_at,
            )
        )
        in_at, squares_at = out_at, out_squares_at
    cut = SegmentCut(rows, consumers, slots or USUAL_SLOTS, flight, held, max(part_tiles), at)
    while slots is None and cut.shared_bytes > shared_bytes and cut.slots > flight:
        cut = cut._replace(slots=cut.slots - 1)
    if cut.shared_bytes > shared_bytes:
        raise ValueError(
            f"a segment of {rows} rows takes {cut.shared_bytes} bytes of shared memory with "
            f"{cut.slots} tiles, and a program of this GPU has {shared_bytes}"
        )
    return tuple(placed), cut
