"""Checks that no padding reaches a result, and that a step writes only where it may."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphengine.testing.arguments import integer, require_callable
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.regions import Region, padding_masks
from graphengine.testing.tensors import (
    Buffers,
    bits,
    describe,
    describe_difference,
    differing,
    named_tensors,
    outside_of,
    random_state_kept,
    require_repeatable,
    require_writable,
    restore,
    returned_tensors,
    run_and_wait,
    save,
)

__tracebackhide__ = hide_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Values for padding: `floating` for floating-point tensors, `integer` for others.

    A finite number outside a dtype's range becomes the nearest in it; for bool, a negative one is
    False and every other True.
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
"""The poisons that `poison_padding` writes into padding, one after the other."""


# Any seed will do.
_SEED = 0


def poison_padding(
    buffers: Buffers,
    run: Callable[[], object],
    *,
    padding: Mapping[str, Region] | None = None,
    live: int | Mapping[str, int] | None = None,
    values: Iterable[Poison] = POISONS,
    canaries: CanaryPages | None = None,
) -> None:
    """GraphCheckError if the contents of padding change anything that is not padding.

    `run` (a step, or `graph.replay`) is called twice with the buffers as they are, and once for
    each poison with the padding overwritten. The contents of all buffers outside the padding must
    have the same bits each time. At the end the buffers hold what they held before. Returned values
    are not compared, so it has to write its results into buffers: ValueError for a returned tensor
    that is not part of one. Torch's random numbers start from the same seed each time.

    ValueError if the first two calls differ: state that `run` changes has to be among the buffers.
    GraphCheckError if it writes nothing outside the padding, as an empty graph does. If the first
    call changes nothing because all results are already in place, the last bits of each
    floating-point buffer are flipped, until a call writes one anew. Integers may be indices and are
    not flipped: for a step that writes only integers, let its outputs hold other values beforehand.

    `padding` names, for each buffer, the part that is padding: lanes of an input past the live
    ones, tails such as the unused end of a block table, and lanes of an output that are never read.
    For `StaticBuffers`, `live` is shorter: the number of live lanes of every host-owned field, or
    of those named in a mapping; leave out fields whose pad value marks a lane as padded, as it has
    a meaning. `canaries` are checked after every run.

    On a CUDA device a step that uses a poisoned integer as an index may end in a device-side
    assertion, after which every later test of the process fails: see `run_isolated`. ValueError if
    nothing is padding or everything is.
    """
    require_callable("run", run)
    poisons = _poisons(values)
    tensors = named_tensors(buffers)
    require_writable(tensors)
    masks = padding_masks(buffers, tensors, padding, live)
    original = save(tensors)
    with random_state_kept():
        try:
            torch.manual_seed(_SEED)
            result = run_and_wait(run)
            if canaries is not None:
                canaries.check("without poison")
            _require_in_buffers(tensors, result)
            clean = save(tensors)
            restore(tensors, original)
            torch.manual_seed(_SEED)
            run_and_wait(run)
            require_repeatable("run", clean, tensors, masks=masks)
            _require_writes(run, tensors, original, clean, masks)
            for poison in poisons:
                restore(tensors, original)
                for name, mask in masks.items():
                    fill(tensors[name], mask, poison)
                torch.manual_seed(_SEED)
                _run_poisoned(run, poison, masks)
                _require_same(clean, tensors, masks, poison)
                if canaries is not None:
                    canaries.check(f"under poison {poison.name!r}")
        finally:
            restore(tensors, original)


def _poisons(values: object) -> tuple[Poison, ...]:
    found = tuple(values) if isinstance(values, Iterable) else (values,)
    if not found:
        raise ValueError("values=() leaves nothing to check")
    for value in found:
        if not isinstance(value, Poison):
            raise ValueError(f"{value!r} in `values` is a {type(value).__name__}, not a Poison")
    return found


def _require_in_buffers(tensors: Mapping[str, torch.Tensor], result: object) -> None:
    if unseen := outside_of(tensors, returned_tensors(result)):
        named = ", ".join(f"{name} ({describe(tensor)})" for name, tensor in unseen.items())
        raise ValueError(
            f"`run` returned tensors that are in no buffer and would not be compared: {named}; "
            "write results into a buffer, as in `lambda: y.copy_(model(x))`"
        )


def _require_writes(
    run: Callable[[], object],
    tensors: Mapping[str, torch.Tensor],
    original: Mapping[str, torch.Tensor],
    clean: Mapping[str, torch.Tensor],
    masks: Mapping[str, torch.Tensor],
) -> None:
    """GraphCheckError unless `run`, which turns `original` into `clean`, writes live elements."""

    def changed(name: str, before: torch.Tensor, after: torch.Tensor) -> bool:
        wrong = differing(before, after)
        return bool((wrong & ~masks[name] if name in masks else wrong).any())

    if any(changed(name, original[name], clean[name]) for name in tensors):
        return
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            restore(tensors, original)
            _spoil(tensor)
            (spoilt,) = save({name: tensor}).values()
            torch.manual_seed(_SEED)
            run_and_wait(run)
            if changed(name, spoilt, tensor):
                return
    raise GraphCheckError(
        f"`run` was not seen to write anything outside of the padding: {', '.join(tensors)} hold "
        "what they held before. If it writes only integers, and these were in their place already, "
        "let them hold something else beforehand, as by `tokens.fill_(-1)`"
    )


def _spoil(tensor: torch.Tensor) -> None:
    """Flip the last bit of each number, a change that an input may well tolerate."""
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
    bits(numbers).bitwise_xor_(1)


def fill(tensor: torch.Tensor, mask: torch.Tensor, poison: Poison) -> None:
    """Write the poison where `mask` (bool, of the tensor's shape) is True."""
    value = torch.tensor(poison.value_for(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        if tensor.dtype.is_complex:
            tensor.masked_fill_(mask, value)
        else:
            # Not every dtype has a fill; integers of the same width do.
            bits(tensor).masked_fill_(mask, bits(value))


def _run_poisoned(
    run: Callable[[], object], poison: Poison, masks: Mapping[str, torch.Tensor]
) -> None:
    try:
        run_and_wait(run)
    except Exception as cause:
        raise GraphCheckError(
            f"with poison {poison.name!r} in the padding of {', '.join(masks)}, the step failed: "
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


class CanaryPages:
    """Tensors between pages of known bytes, which show when a step writes outside a tensor.

        pages = CanaryPages("cuda")
        y = pages.empty("y", (8, 4), torch.float32)
        ...                                  # capture and replay a step that writes y
        pages.check()

    A page of `page_bytes` lies right before the tensor's first byte and another right after its
    last, so only tensors that are made here can have pages. They live as long as this object or
    their tensor. Writes further away than a page, or of the same bytes as before, are not detected.
    """

    def __init__(self, device: torch.device | str, *, page_bytes: int = 4096) -> None:
        if page_bytes < 1 or page_bytes % 256:
            raise ValueError(f"{page_bytes=} is no multiple of 256, so tensors would lie askew")
        # Without a short period, so a copy of neighbouring pages or rows does not look the same.
        numbers = torch.arange(page_bytes, dtype=torch.int64, device=device)
        self._page = ((numbers * numbers + 89 * numbers + 37) % 251).to(torch.uint8)
        self._regions: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new contiguous tensor between pages, aligned to 256 bytes; `name` is for messages."""
        sizes = tuple(
            integer(f"an element of the shape of {name!r}", size, least=0) for size in shape
        )
        size, page = math.prod(sizes) * dtype.itemsize, len(self._page)
        memory = torch.empty(2 * page + size, dtype=torch.uint8, device=self._page.device)
        memory[:page] = self._page
        memory[page + size :] = self._page
        tensor = memory[page : page + size].view(dtype).view(sizes)
        self._regions.append((name, tensor, memory))
        return tensor

    def check(self, when: str = "") -> None:
        """GraphCheckError if a byte of a page has changed; waits for the device.

        `when` is put into the message. ValueError where no tensor was made by `empty`.
        """
        if not self._regions:
            raise ValueError("no canary pages to look at: make tensors by CanaryPages.empty")
        page = len(self._page)
        for name, tensor, memory in self._regions:
            saved = save({"before": memory[:page], "past": memory[-page:]})
            for side, found in saved.items():
                wrong = (found != self._page).nonzero().flatten().tolist()
                if wrong:
                    nearest = wrong[0] if side == "past" else wrong[-1]
                    distance = nearest if side == "past" else page - 1 - nearest
                    raise GraphCheckError(
                        f"a write {side} {name} ({describe(tensor)}){when and ' ' + when}: "
                        f"{len(wrong)} of {page} bytes changed, the nearest {distance} bytes from "
                        f"the tensor, from {int(self._page[nearest]):#04x} to "
                        f"{int(found[nearest]):#04x}"
                    )
