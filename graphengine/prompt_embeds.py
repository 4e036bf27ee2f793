"""Embeddings in prompts: rows at positions where a sequence has no token.

`EMBEDDED` stands for each of them among the token ids. Rows are on the host, in the model's dtype:
a prompt is cut into chunks, kept by a session and fed again after a rewind or an eviction.

A picture's rows may be a grid (`GridEmbeds`), for models whose positions have three axes, in time,
height and width (M-RoPE; Wang et al. 2024, "Qwen2-VL"). Rows of RoPE's tables are counted as in
Qwen's own code: each axis of a grid begins at the row that a token would have there, and the
position after the grid follows the greatest row of any axis. transformers does the same, except
that 5.23 ignores how long a video is: the position after it follows its height and width.

An image's rows may see each other (`ImageEmbeds`), for models that attend in both directions within
an image. They are fed in one chunk, and the KV of each depends on all of them.

For models that add a tower's features to the stream after their first layers (DeepStack), a row
holds the embedding and then the features of each level, which are 0 for embeddings without
features.

Letters: n rows, H hidden.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphengine.kernels.norm_rope.embedding import GIVEN
from graphengine.options.callers_tensors import plain_tensor
from graphengine.options.checks import is_int, is_number
from graphengine.options.prefill_cut import PrefillCut

_MOST_STEP = 1e6
EMBEDDED = -1
"""The id of a position that has an embedding and no token."""


class EmbedsSpec(NamedTuple):
    """The form of embeddings that an engine takes."""

    hidden_size: int
    dtype: torch.dtype
    grids: bool = False
    """Whether positions have three axes, so that embeddings may be a grid."""
    images: PrefillCut | None = None
    """Where prompts are cut, if embeddings may be an image whose rows see each other."""
    levels: int = 0
    """Levels of DeepStack features that come with a grid's embeddings."""

    @property
    def width(self) -> int:
        """Values of a position's row."""
        return (1 + self.levels) * self.hidden_size


class Grid(NamedTuple):
    """The places of embeddings in time, height and width, the width running fastest.

    step  rows of RoPE's tables from one time to the next, rounded down for each time
    """

    time: int
    height: int
    width: int
    step: float = 1.0

    @property
    def size(self) -> int:
        return self.time * self.height * self.width

    def places(self, first: int, stop: int) -> npt.NDArray[np.int32]:
        """Rows [stop - first, 3] by axis, of the grid's embeddings first .. stop - 1, from 0 on."""
        index = np.arange(first, stop)
        time, place = np.divmod(index, self.height * self.width)
        height, width = np.divmod(place, self.width)
        return np.stack([np.floor(time * self.step), height, width], axis=1).astype(np.int32)


class Image(NamedTuple):
    """An image of `size` embeddings that see each other; `digest` covers all of them."""

    size: int
    digest: bytes


class Run(NamedTuple):
    """Embeddings of consecutive positions: `rows` is [n, H], dense, on the CPU, never changed.

    grid    their places; None: they follow one another as tokens do
    offset  the grid's or image's embeddings that come before them, in the run before
    image   the image that they belong to; None: they see no later embedding
    """

    start: int
    rows: Tensor
    grid: Grid | None = None
    offset: int = 0
    image: Image | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True)
class Embeds:
    """The embeddings of a sequence: runs in the order of their positions, which are all different.

    It is falsy if there are none. It never changes: sessions and requests share it.
    """

    runs: tuple[Run, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.runs)

    def then(self, later: Embeds) -> Embeds:
        """These embeddings, followed by those of later positions."""
        return Embeds(self.runs + later.runs)

    def within(self, first: int, stop: int) -> Embeds:
        """The embeddings of positions first .. stop - 1; the rows are views."""
        cut = []
        for run in self.runs:
            start, end = max(run.start, first), min(run.stop, stop)
            if start < end:
                skipped = start - run.start
                rows = run.rows[skipped : end - run.start]
                offset = run.offset + skipped if run.grid or run.image else 0
                cut.append(run._replace(start=start, rows=rows, offset=offset))
        return Embeds(tuple(cut))

    def rows(self) -> Tensor:
        """All rows in order, [n, H]; only for an `Embeds` that has some."""
        parts = [run.rows for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shift(self) -> int:
        """The row of RoPE's tables minus the position, past these embeddings."""
        *_, (_, _, shift) = ((None, None, 0), *self._placed())
        return shift

    def last_row(self) -> int:
        """The greatest row of RoPE's tables that a grid's embeddings turn by; -1 without grids."""
        return max((int(places.max()) for _, places, _ in self._placed()), default=-1)

    def images(self) -> tuple[tuple[int, int], ...]:
        """The first position and the one past the last, of each image whose rows see each other."""
        begins = ((run.start - run.offset, run.image) for run in self.runs)
        found = ((begin, begin + image.size) for begin, image in begins if image is not None)
        # An image that was cut has several runs.
        return tuple(dict.fromkeys(found))

    def seen(self, first: int, stop: int) -> npt.NDArray[np.int32]:
        """How many keys each of the positions first .. stop - 1 sees: its own, or its image's, is
        the last.
        """
        counts = np.arange(first + 1, stop + 1, dtype=np.int32)
        for begin, end in self.images():
            counts[max(begin - first, 0) : max(end - first, 0)] = end
        return counts

    def places(self) -> tuple[Place, ...]:
        """The runs without their rows, if one is a grid or an image; else none.

        A sequence may end inside a grid, but not inside an image: each run is a whole grid or
        image, or the beginning of a grid.
        """
        if not self.has_grids() and not self.images():
            return ()
        return tuple(
            Place(run.start, len(run.rows), run.grid, run.image is not None) for run in self.runs
        )

    def has_grids(self) -> bool:
        return any(run.grid is not None for run in self.runs)

    def rope_rows(self, first: int, stop: int) -> npt.NDArray[np.int32]:
        """The rows of RoPE's tables [stop - first, 3], by axis, of positions first .. stop - 1.

        All embeddings before them must be here.
        """
        rows = np.repeat(np.arange(first, stop, dtype=np.int32)[:, None], 3, axis=1)
        for run, places, shift in self._placed():
            begin, end = max(run.start, first), min(run.stop, stop)
            if begin < end:
                rows[begin - first : end - first] = places[begin - run.start : end - run.start]
            rows[max(run.stop - first, 0) :] = (
                np.arange(max(run.stop, first), stop, dtype=np.int32)[:, None] + shift
            )
        return rows

    def _placed(self) -> Iterator[tuple[Run, npt.NDArray[np.int32], int]]:
        """Each run of a grid, its rows of RoPE's tables, and the shift of the positions after
        it.
        """
        shift = base = 0
        for run in self.runs:
            if run.grid is None:
                continue
            if run.offset == 0:
                base = run.start + shift
            # Of a grid that was cut, only the embeddings so far count.
            there = base + run.grid.places(0, run.offset + len(run.rows))
            shift = int(there.max()) + 1 - run.stop
            yield run, there[run.offset :], shift

    def tokens(self, ids: Sequence[int], first: int) -> list[int]:
        """The `ids` of positions from `first` on, as the device gets them (`kernels.GIVEN`)."""
        return [
            GIVEN - position if token == EMBEDDED else token
            for position, token in enumerate(ids, first)
        ]

    def identity(self, ids: Sequence[int]) -> array[int]:
        """The `ids` of positions from 0 on, with a digest below 0 for each embedding.

        Two sequences with the same identities up to a position have the same KV there. A digest has
        62 bits: among a million rows, two collide by chance once in nine million times.
        """
        made = array("q", ids)
        for run in self.within(0, len(made)).runs:
            # Equal rows on different grids, or in different images, have different keys.
            salt = b"" if run.grid is None else repr(run.grid).encode()
            salt += b"" if run.image is None else run.image.digest
            begin = run.start - run.offset
            for position, row in enumerate(run.rows.view(torch.uint8).numpy(), run.start):
                place = salt and salt + str(position - begin).encode()
                digest = hashlib.blake2b(row.data, digest_size=8, key=_key(place)).digest()
                made[position] = -1 - (int.from_bytes(digest, "little") >> 2)
        return made


def _key(place: bytes) -> bytes:
    """A key of BLAKE2 from the place of an embedding; none without a grid."""
    return place and hashlib.blake2b(place, digest_size=16).digest()


NO_EMBEDS = Embeds()


class Place(NamedTuple):
    """A run without its rows, as snapshots keep it: `length` embeddings from position `start` on.

    grid   their places, from its first one on; None: they follow one another as tokens do
    image  whether they are an image, and see each other
    """

    start: int
    length: int
    grid: Grid | None
    image: bool


def placed_embeds(places: Sequence[Place], ids: Sequence[int], rows: Tensor) -> Embeds:
    """Put the rows that `Embeds.rows` returned back at these places of `ids`.

    ValueError for places that these ids do not have, and for wrong grids.
    """
    for place in places:
        grid = place.grid
        if grid is not None and not (
            all(map(_is_size, grid[:3])) and is_number(grid.step) and 0 <= grid.step <= _MOST_STEP
        ):
            raise ValueError(f"{grid} must have sizes of 1 or more, and a step from 0 to 1e6")
        if grid is not None and place.length > grid.size:
            raise ValueError(f"{place.length} embeddings for the {grid.size} places of {grid}")
    wanted = [position for position, token in enumerate(ids) if token == EMBEDDED]
    runs = (range(each.start, each.start + each.length) for each in places)
    # A wrong length may be any number.
    found = [*islice(chain.from_iterable(runs), len(wanted) + 1)]
    if found != wanted or len(rows) != len(wanted):
        raise ValueError(
            f"{len(rows)} embeddings at {len(found)} places, the first of them {found[:3]}, for "
            f"{len(wanted)} positions without a token, the first of them {wanted[:3]}"
        )
    parts = torch.split(rows, [each.length for each in places])
    return Embeds(
        tuple(
            Run(each.start, part, each.grid, 0, _image_of(part) if each.image else None)
            for each, part in zip(places, parts, strict=True)
        )
    )


def _image_of(rows: Tensor) -> Image:
    digest = hashlib.blake2b(rows.contiguous().view(torch.uint8).numpy().data, digest_size=16)
    return Image(len(rows), digest.digest())


class PromptTokens(NamedTuple):
    """A prompt as it is fed: `EMBEDDED` among the ids stands for each of the embeddings."""

    ids: tuple[int, ...]
    embeds: Embeds = NO_EMBEDS


class ImageEmbeds:
    """Embeddings of an image as a part of a prompt, which see each other: [n, H].

        PromptParts("Describe: ", ImageEmbeds(image), " in a word.")

    For models that attend in both directions within an image, as Gemma 3 does. The embeddings are
    fed in one chunk: an image may not be longer than a chunk at its position, at most the largest
    of `prefill_buckets`.

    Args:
        rows: [n, H] of floating point, on the CPU or a GPU.

    Arguments are checked only when the prompt is used; then every error is a ValueError.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return f"ImageEmbeds({_shape_of(self.rows)})"


def image_at(part: ImageEmbeds, position: int, spec: EmbedsSpec | None) -> Embeds:
    """A caller's image as the embeddings from `position` on; ValueError for one that is wrong."""
    if not isinstance(part.rows, Tensor):
        raise ValueError(f"rows={part.rows!r:.99} of an image must be a tensor [n, H]")
    found = embeds_at(part.rows, position, spec)
    if spec is not None and spec.images is None:
        raise ValueError(
            f"an image of {len(part.rows)} embeddings that see each other is for a model with "
            f"bidirectional attention in images: give this model the tensor alone"
        )
    if spec is None or spec.images is None or not found:
        return found
    (run,) = found.runs
    size, most = len(run.rows), spec.images.tokens(position)
    if size > most:
        raise ValueError(
            f"an image of {size} embeddings at position {position} is fed in one chunk, and a "
            f"chunk has at most {most} tokens there: open the engine with larger prefill_buckets"
        )
    return Embeds((run._replace(image=_image_of(run.rows)),))


def _shape_of(rows: object) -> str:
    shape = getattr(rows, "shape", None)
    return f"tensor{None if shape is None else list(shape)}"


class GridEmbeds:
    """Embeddings of a picture or a video as a part of a prompt, with their places.

        PromptParts("Describe: ", GridEmbeds(image, (1, 12, 16)))

    For models whose positions have three axes (M-RoPE), as Qwen2-VL's.

    Args:
        rows: [n, H] of floating point, on the CPU or a GPU, the width running fastest; a vision
            tower's output for the picture, merged.
        grid: times, height and width of the merged picture; n is their product.
        time_step: rows of RoPE's tables from one time to the next, rounded down for each:
            `second_per_grid_t * tokens_per_second` of Qwen2.5-VL.
        deepstack: [levels, n, H], for models that add features of several levels of their tower to
            the stream after their first layers, as Qwen3-VL does (`deepstack_features` of
            transformers, stacked). None for other models.

    Arguments are checked only when the prompt is used; then every error is a ValueError.
    """

    __slots__ = ("deepstack", "grid", "rows", "time_step")

    def __init__(
        self,
        rows: Tensor,
        grid: tuple[int, int, int],
        *,
        time_step: float = 1.0,
        deepstack: Tensor | None = None,
    ) -> None:
        self.rows, self.grid, self.time_step = rows, grid, time_step
        self.deepstack = deepstack

    def __repr__(self) -> str:
        return f"GridEmbeds({_shape_of(self.rows)}, {self.grid})"


def grid_at(part: GridEmbeds, position: int, spec: EmbedsSpec | None) -> Embeds:
    """A caller's grid as the embeddings from `position` on; ValueError for one that is wrong."""
    if not isinstance(part.rows, Tensor):
        raise ValueError(f"rows={part.rows!r:.99} of a grid must be a tensor [n, H]")
    found = embeds_at(part.rows, position, spec)
    if spec is not None and not spec.grids:
        raise ValueError(
            f"a grid of embeddings {part.grid} is for a model whose positions have three axes "
            f"(M-RoPE), without data_parallel: give this one the tensor alone"
        )
    grid = part.grid
    if not isinstance(grid, tuple | list) or len(grid) != 3 or not all(map(_is_size, grid)):
        raise ValueError(f"grid={grid!r} must be three sizes of 1 or more: time, height and width")
    step = part.time_step
    if not is_number(step) or not 0 <= step <= _MOST_STEP:
        raise ValueError(f"time_step={step!r} must be a number from 0 to 1e6")
    time, height, width = map(int, grid)
    placed = Grid(time, height, width, float(step))
    if placed.size != len(part.rows):
        raise ValueError(
            f"grid={tuple(grid)} has {placed.size} places for {len(part.rows)} embeddings"
        )
    features = None if spec is None else _features(part.deepstack, len(part.rows), spec)
    (run,) = found.runs
    if features is not None and spec is not None:
        run.rows[:, spec.hidden_size :] = features
    return Embeds((run._replace(grid=placed),))


def _features(given: object, n: int, spec: EmbedsSpec) -> Tensor | None:
    """A caller's features of n embeddings, [n, levels * H] on the host; None where there are none.

    ValueError, with the shapes, for features that the model does not take, and for none where it
    takes some.
    """
    if isinstance(given, Tensor):
        given = plain_tensor("deepstack", given)
    shape = getattr(given, "shape", None)
    told = f"deepstack={given!r:.99}" if shape is None else f"deepstack of shape {list(shape)}"
    if not spec.levels:
        if given is not None:
            raise ValueError(f"{told}: this model adds no features after its first layers")
        return None
    wanted = (spec.levels, n, spec.hidden_size)
    if not isinstance(given, Tensor) or shape != wanted or not given.is_floating_point():
        raise ValueError(f"{told}: the model takes floating point {list(wanted)} with this grid")
    rows = given.to("cpu", spec.dtype)
    finite = rows.isfinite().all(dim=2)
    if not finite.all():
        level, row = divmod(int(finite.flatten().int().argmin()), n)
        raise ValueError(f"{told}: row {row} of level {level} is not finite in {spec.dtype}")
    return rows.transpose(0, 1).flatten(1)


PlacedEmbeds = GridEmbeds | ImageEmbeds
"""Embeddings in a prompt that say more than a tensor does."""


def part_at(part: Tensor | PlacedEmbeds, position: int, spec: EmbedsSpec | None) -> Embeds:
    """A part of a prompt as the embeddings from `position` on; ValueError for one that is wrong."""
    match part:
        case GridEmbeds():
            return grid_at(part, position, spec)
        case ImageEmbeds():
            return image_at(part, position, spec)
        case _:
            return embeds_at(part, position, spec)


def _is_size(value: object) -> bool:
    return is_int(value) and value >= 1


def embeds_at(tensor: Tensor, position: int, spec: EmbedsSpec | None) -> Embeds:
    """A caller's tensor [n, H], on any device, as the embeddings from `position` on.

    It is copied to the host and rounded to the model's dtype; a GPU's is waited for, on the current
    stream. ValueError, with the value and what is wanted, for a tensor that does not fit, and where
    `spec` is None, as the engine then takes no embeddings.
    """
    if spec is None and tensor.is_floating_point():
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt are for an engine that is "
            f"opened with prompt_embeds=True"
        )
    check_embeds(tensor, 0 if spec is None else spec.hidden_size)
    assert spec is not None, "integers are no embeddings"
    if not len(tensor):
        return NO_EMBEDS
    rows = rows_on_host(tensor, spec.dtype)
    if spec.levels:
        rows = torch.nn.functional.pad(rows, (0, spec.width - spec.hidden_size))
    return Embeds((Run(position, rows),))


def check_embeds(tensor: Tensor, hidden_size: int) -> None:
    """ValueError, with the wanted shape, unless a tensor has rows of this many values."""
    if tensor.is_nested:
        raise ValueError("embeddings in a prompt are a nested tensor: give each part as [n, H]")
    if not tensor.is_floating_point():
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} and {tensor.dtype} in a prompt: they are of "
            f"floating point, and token ids are one list, [n]"
        )
    if tensor.dim() != 2 or tensor.shape[1] != hidden_size:
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt: the model takes "
            f"[n, {hidden_size}]"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt have the layout "
            f"{tensor.layout}: they are dense, {torch.strided}"
        )
    if tensor.is_meta:
        raise ValueError(f"embeddings of shape {list(tensor.shape)} on meta have no values")


def rows_on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense copy of embeddings, rounded to the model's dtype. ValueError if it is not finite."""
    rows = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    finite = rows.isfinite().all(dim=1)
    if not finite.all():
        row = int(finite.int().argmin())
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt: row {row} is not finite in "
            f"{dtype}"
        )
    return rows


def embeds_of(ids: Sequence[int], rows: Tensor) -> Embeds:
    """Put the rows that `Embeds.rows` returned back where `ids` have no token.

    ValueError if their numbers differ.
    """
    places = [position for position, token in enumerate(ids) if token == EMBEDDED]
    if len(places) != len(rows):
        raise ValueError(f"{len(rows)} embeddings for {len(places)} positions without a token")
    runs: list[Run] = []
    begin = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            runs.append(Run(places[begin], rows[begin:index]))
            begin = index
    return Embeds(tuple(runs))
