"""Does anything that is padding reach a result, and does a step write where it must not?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch

from graphengine.buckets import StaticBuffers
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.tensors import (
    Buffers,
    describe,
    describe_difference,
    differing,
    named_tensors,
    restore,
    run_and_wait,
    save,
)

__tracebackhide__ = hide_frame

Region = slice | torch.Tensor | EllipsisType | tuple[slice | int | EllipsisType, ...]
"""Indexes a tensor: a slice of its lanes, a bool mask, a tuple such as `(..., slice(5, None))`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """What is written into padding: `floating` into floating-point tensors, `integer` into others.

    A finite number outside of a dtype's range becomes the nearest in it; of bool, a negative one
    is False and every other True.
    """

    name: str
    floating: float
    integer: int

    def value_for(self, dtype: torch.dtype) -> int | float | bool:
        if dtype == torch.bool:
            return self.integer >= 0
        if dtype.is_floating_point or dtype.is_complex:
            if not math.isfinite(self.floating):
                return self.floating
            limit = torch.finfo(dtype).max
            return min(max(self.floating, -limit), limit)
        limits = torch.iinfo(dtype)
        return min(max(self.integer, limits.min), limits.max)


POISONS = (
    Poison(name="NaN, largest", floating=math.nan, integer=2**63 - 1),
    Poison(name="+inf, -1", floating=math.inf, integer=-1),
    Poison(name="-inf, smallest", floating=-math.inf, integer=-(2**63)),
    Poison(name="1e30, 10**9", floating=1e30, integer=10**9),
)


def poison_padding(
    buffers: Buffers,
    run: Callable[[], object],
    *,
    padding: Mapping[str, Region] | None = None,
    live: int | Mapping[str, int] | None = None,
    values: Iterable[Poison] = POISONS,
    canaries: CanaryPages | None = None,
) -> None:
    """GraphCheckError where what padding holds changes anything that is not padding.

    `run` (a step, or `graph.replay`) is called once with the buffers as they are, and once for each
    poison with the padding overwritten. What it leaves outside of the padding, in all buffers, must
    have the same bits each time. In the end the buffers hold what they held before.

    `padding` says by the buffer's name which part of it is padding: lanes of an input past the live
    ones, tails such as the unused end of a block table, and lanes of an output that nobody reads.
    Of `StaticBuffers`, `live` says it shorter: the number of live lanes of every host-owned field,
    or of those named in a mapping; leave out fields whose pad value marks a lane as padded, as
    these mean something. `canaries` are looked at after every run.

    On a CUDA device a step that uses a poisoned integer as an index may end in a device-side
    assertion, which no later test of the process survives: see `run_isolated`. ValueError if
    nothing is padding or nothing is not.
    """
    tensors = named_tensors(buffers)
    regions = dict(padding or {}) | _past_live(buffers, live)
    if unknown := regions.keys() - tensors.keys():
        raise ValueError(f"no buffer {sorted(unknown)}: the buffers are {', '.join(tensors)}")
    masks = {name: _mask(tensors[name], region) for name, region in regions.items()}
    if not any(mask.any() for mask in masks.values()):
        raise ValueError(f"nothing to poison: {padding=} and {live=} name no element")
    if all(name in masks and masks[name].all() for name in tensors):
        raise ValueError("nothing to compare: all of all buffers is padding")
    original = save(tensors)
    try:
        run_and_wait(run)
        clean = save(tensors)
        if canaries is not None:
            canaries.check("without poison")
        for poison in values:
            restore(tensors, original)
            for name, mask in masks.items():
                tensors[name].masked_fill_(mask, poison.value_for(tensors[name].dtype))
            _run_poisoned(run, poison, regions)
            _require_same(clean, tensors, masks, poison)
            if canaries is not None:
                canaries.check(f"under poison {poison.name!r}")
    finally:
        restore(tensors, original)


def _run_poisoned(run: Callable[[], object], poison: Poison, regions: Mapping[str, Region]) -> None:
    try:
        run_and_wait(run)
    except Exception as cause:
        raise GraphCheckError(
            f"with poison {poison.name!r} in the padding of {', '.join(regions)}, the step failed: "
            f"{type(cause).__name__}: {cause}"
        ) from cause


def _require_same(
    clean: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    masks: Mapping[str, torch.Tensor],
    poison: Poison,
) -> None:
    for name, actual in tensors.items():
        wrong = differing(clean[name], actual)
        if name in masks:
            wrong &= ~masks[name]
        if wrong.any():
            sides = "unpoisoned", "poisoned"
            what = describe_difference(name, clean[name], actual, wrong, sides=sides)
            raise GraphCheckError(
                f"poison {poison.name!r} in the padding of {', '.join(masks)} changed {what}"
            )


def _past_live(buffers: Buffers, live: int | Mapping[str, int] | None) -> dict[str, Region]:
    if live is None:
        return {}
    if not isinstance(buffers, StaticBuffers):
        raise ValueError(f"{live=}: lanes are known of StaticBuffers only, so give `padding`")
    if isinstance(live, int):
        live = {field.name: live for field in buffers.fields if field.owner == "host"}
    return {name: slice(count, None) for name, count in live.items()}


def _mask(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """bool, of the tensor's shape: True in the region."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    mask[region] = True
    return mask


class CanaryPages:
    """Tensors between pages of known bytes, which show when a step writes outside of a tensor.

        pages = CanaryPages("cuda")
        y = pages.empty("y", (8, 4), torch.float32)
        ...                                  # capture and replay a step that writes y
        pages.check()

    A page of `page_bytes` stands right before the tensor's first and right behind its last byte.
    The pages live as long as this object or their tensor. What a step writes further away than a
    page, or writes there with the same bytes as before, is not seen.
    """

    def __init__(self, device: torch.device | str, *, page_bytes: int = 4096) -> None:
        if page_bytes < 1 or page_bytes % 256:
            raise ValueError(f"{page_bytes=} is no multiple of 256, so tensors would lie askew")
        # No short period: a copy of neighbouring pages or rows does not look like this one.
        numbers = torch.arange(page_bytes, dtype=torch.int64, device=device)
        self._page = ((numbers * numbers + 89 * numbers + 37) % 251).to(torch.uint8)
        self._regions: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new contiguous tensor between pages, aligned to 256 bytes; `name` is for messages."""
        size, page = math.prod(shape) * dtype.itemsize, len(self._page)
        memory = torch.empty(2 * page + size, dtype=torch.uint8, device=self._page.device)
        memory[:page] = self._page
        memory[page + size :] = self._page
        tensor = memory[page : page + size].view(dtype).view(*shape)
        self._regions.append((name, tensor, memory))
        return tensor

    def check(self, when: str = "") -> None:
        """GraphCheckError if a byte of a page has changed; waits for the device.

        `when` is put into the message.
        """
        page = len(self._page)
        for name, tensor, memory in self._regions:
            saved = save({"before": memory[:page], "behind": memory[-page:]})
            for side, found in saved.items():
                wrong = (found != self._page).nonzero().flatten().tolist()
                if wrong:
                    nearest = wrong[0] if side == "behind" else wrong[-1]
                    distance = nearest if side == "behind" else page - 1 - nearest
                    raise GraphCheckError(
                        f"a write {side} {name} ({describe(tensor)}){when and ' ' + when}: "
                        f"{len(wrong)} of {page} bytes changed, the nearest {distance} bytes from "
                        f"the tensor, from {int(self._page[nearest]):#04x} to "
                        f"{int(found[nearest]):#04x}"
                    )
