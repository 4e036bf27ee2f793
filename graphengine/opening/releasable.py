"""Memory of an engine that it can release and restore: weights, and KV caches.

Blocks allocate their tensors with `torch.empty` and `torch.zeros`. Inside `allocating` these take
pages that can be given back (`buckets/pages.py`), at addresses that stay. Nothing else of an engine
is in such pages: static fields, tables and the graphs' pool keep their memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphengine.buckets.pages import new_pages

_PIECE = 2**30
"""Bytes of a piece of the host's copy. torch rounds pinned allocations up to a power of two."""


class ReleasableMemory:
    """Memory on `device`: all that `allocating` has allocated there.

    nbytes  bytes of its tensors
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Memory that torch's allocator has cached cannot be mapped here.
        drop_cached_memory(device)
        self._pages = new_pages(device)
        self._blocks: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._host: list[Tensor] = []
        self._released = False

    @property
    def nbytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    @property
    def held(self) -> int:
        """Bytes of the device that it takes now; whole pages."""
        return self._pages.nbytes

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        block = self._pages.take(prod(shape) * dtype.itemsize)
        self._blocks.append(block)
        return block.view(dtype).view(tuple(shape))

    def save(self, keep: Callable[[Tensor], bool] | None = None) -> None:
        """Copy blocks for which `keep` is true, or all, to the host; `restore` copies them back.

        Blocks are uint8 tensors, each the memory of one tensor that was allocated. The host's copy,
        pinned on a GPU, is made by the first call and kept for the next ones. RuntimeError where
        the host lacks the memory.
        """
        saved = [block for block in self._blocks if keep is None or keep(block)]
        self._host += self._new_pieces(sum(map(len, saved)) - sum(map(len, self._host)))
        self._saved = saved
        for block, host in self._parts():
            host.copy_(block)

    def release(self) -> int:
        """Give all pages back; returns how many bytes. Nothing may be queued on them."""
        released = self.held
        self._pages.give_back()
        self._released = True
        return released

    def restore(self) -> None:
        """Map pages again, if they are released: saved blocks get their contents back, all else is
        0.

        RuntimeError, with nothing restored, where there is too little memory.
        """
        if not self._released:
            return
        drop_cached_memory(self.device)
        self._pages.have_again()
        self._released = False
        kept = {id(block) for block in self._saved}
        for block in self._blocks:
            if id(block) not in kept:
                block.zero_()
        for saved, host in self._parts():
            saved.copy_(host)

    def _new_pieces(self, nbytes: int) -> list[Tensor]:
        sizes = [min(_PIECE, nbytes - start) for start in range(0, nbytes, _PIECE)]
        pin = self.device.type == "cuda"
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a kept block, with its place on the host."""
        pieces = iter(self._host)
        host = torch.empty(0, dtype=torch.uint8)
        for block in self._saved:
            while len(block):
                if not len(host):
                    host = next(pieces)
                size = min(len(block), len(host))
                yield block[:size], host[:size]
                block, host = block[size:], host[size:]


def drop_cached_memory(device: torch.device) -> None:
    """Have torch's allocator give its cached GPU memory back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def releasable_memory(device: torch.device, *, releasable: bool) -> ReleasableMemory | None:
    """Memory for an engine that can release it; None for one that cannot."""
    return ReleasableMemory(device) if releasable else None


def allocating(memory: ReleasableMemory | None) -> AbstractContextManager[object]:
    """A context in which `torch.empty` and `torch.zeros` take this memory, if any, on its device.

    Only calls that name the device take it.
    """
    return nullcontext() if memory is None else _Allocating(memory)


class _Allocating(TorchFunctionMode):
    """Replaces the memory of new tensors."""

    def __init__(self, memory: ReleasableMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func not in (torch.empty, torch.zeros) or not self._here(given.get("device")):
            return func(*args, **given)
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        made = self._memory.new(shape, given.get("dtype") or torch.get_default_dtype())
        return made.zero_() if func is torch.zeros else made

    def _here(self, device: object) -> bool:
        if device is None:
            return False
        named, own = torch.device(str(device)), self._memory.device
        return named.type == own.type and named.index in (None, own.index)


def not_filled_by(tensors: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Whether a block has bytes outside all of these tensors. The tensors must not overlap."""
    places = {(each.data_ptr(), each.shape, each.stride()): each for each in tensors}
    starts = sorted((each.data_ptr(), each.nbytes) for each in places.values())

    def keep(block: Tensor) -> bool:
        first = bisect_left(starts, (block.data_ptr(), 0))
        stop = bisect_left(starts, (block.data_ptr() + len(block), 0))
        return sum(nbytes for _, nbytes in starts[first:stop]) < len(block)

    return keep
