"""Embeddings in prompts: rows at positions where a sequence has no token.

`EMBEDDED` stands for each of them among the token ids. Rows are on the host, in the model's dtype:
a prompt is cut into chunks, kept by a session and fed again after a rewind or an eviction.

Letters: n rows, H hidden.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.norm_rope.embedding import GIVEN

EMBEDDED = -1
"""The id of a position that has an embedding and no token."""


class EmbedsSpec(NamedTuple):
    """The form of embeddings that an engine takes."""

    hidden_size: int
    dtype: torch.dtype


class Run(NamedTuple):
    """Embeddings of consecutive positions: `rows` is [n, H], dense, on the CPU, never changed."""

    start: int
    rows: Tensor

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
                cut.append(Run(start, run.rows[start - run.start : end - run.start]))
        return Embeds(tuple(cut))

    def rows(self) -> Tensor:
        """All rows in order, [n, H]; only for an `Embeds` that has some."""
        parts = [run.rows for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
            for position, row in enumerate(run.rows.view(torch.uint8).numpy(), run.start):
                digest = hashlib.blake2b(row.data, digest_size=8).digest()
                made[position] = -1 - (int.from_bytes(digest, "little") >> 2)
        return made


NO_EMBEDS = Embeds()


class PromptTokens(NamedTuple):
    """A prompt as it is fed: `EMBEDDED` among the ids stands for each of the embeddings."""

    ids: tuple[int, ...]
    embeds: Embeds = NO_EMBEDS


def embeds_at(tensor: Tensor, position: int, spec: EmbedsSpec | None) -> Embeds:
    """A caller's tensor [n, H], on any device, as the embeddings from `position` on.

    It is copied to the host and rounded to the model's dtype; a GPU's is waited for, on the current
    stream. ValueError, with the value and what is wanted, for a tensor that does not fit, and where
    `spec` is None, as the engine then takes no embeddings.
    """
    if not tensor.is_floating_point():
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} and {tensor.dtype} in a prompt: they are of "
            f"floating point, and token ids are one list, [n]"
        )
    if spec is None:
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt are for an engine that is "
            f"opened with prompt_embeds=True"
        )
    if tensor.dim() != 2 or tensor.shape[1] != spec.hidden_size:
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt: the model takes "
            f"[n, {spec.hidden_size}]"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt have the layout "
            f"{tensor.layout}: they are dense, {torch.strided}"
        )
    if tensor.is_meta:
        raise ValueError(f"embeddings of shape {list(tensor.shape)} on meta have no values")
    if not len(tensor):
        return NO_EMBEDS
    rows = tensor.detach().to("cpu", spec.dtype, copy=True).contiguous()
    finite = rows.isfinite().all(dim=1)
    if not finite.all():
        row = int(finite.int().argmin())
        raise ValueError(
            f"embeddings of shape {list(tensor.shape)} in a prompt: row {row} is not finite in "
            f"{spec.dtype}"
        )
    return Embeds((Run(position, rows),))


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
