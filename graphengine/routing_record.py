"""The record of experts that a request replays, as its caller gives it.

Letters: T tokens, L layers with experts, E experts of a layer, k experts chosen for a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.options.checks import shown

Ids = NDArray[np.int16]
_SHAPE = "[tokens, layers with experts, experts of a token]"
UNKNOWN = -1
"""Replaces each id of a token whose experts were not recorded."""


class RoutingRecord:
    """The `routing` of `SamplingParams`, once they are made: `ids`, int16 [T, L, k], read-only."""

    __slots__ = ("ids",)
    ids: Ids

    def __init__(self, given: object) -> None:
        """ValueError unless it is an array [tokens, layers, k] of integers that int16 holds."""
        if isinstance(given, RoutingRecord):
            self.ids = given.ids
            return
        try:
            # A tensor of a GPU is copied by its own method.
            array = given.detach().cpu() if isinstance(given, torch.Tensor) else given
            ids: NDArray[Any] = np.asarray(array)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise _wrong(given, f"expert ids: {error}") from error
        if ids.ndim != 3 or 0 in ids.shape:
            raise _wrong(given, f"{_SHAPE}, none of them 0: it is of shape {ids.shape}")
        if ids.dtype.kind not in "iu":
            raise _wrong(given, f"integers, not {ids.dtype}")
        for value in (int(ids.min()), int(ids.max())):
            if not UNKNOWN <= value <= np.iinfo(np.int16).max:
                raise _wrong(given, f"expert ids, which {value} is not")
        self.ids = np.array(ids, dtype=np.int16, order="C")
        self.ids.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutingRecord) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.ids.shape, self.ids.tobytes()))

    def __repr__(self) -> str:
        return f"RoutingRecord(shape={self.ids.shape})"

    def check(self, layers: int, experts: int, top_k: int) -> None:
        """ValueError unless the ids fit a model with these numbers of layers and experts."""
        ids = self.ids
        for name, count, wanted in (("layers", ids.shape[1], layers), ("ids", ids.shape[2], top_k)):
            if count != wanted:
                raise ValueError(
                    f"routing of shape {ids.shape} has {count} {name} of a token: the model has "
                    f"{layers} layers with experts, and takes {top_k} in each"
                )
        if (most := int(ids.max())) >= experts:
            where = _first(ids == most)
            raise ValueError(f"routing{where} holds {most}: a layer has {experts} experts")
        ordered = np.sort(ids, axis=2)
        unknown = ordered == UNKNOWN
        in_part = unknown.any(axis=2) & ~unknown.all(axis=2)
        if in_part.any():
            where = _first(in_part)
            raise ValueError(
                f"routing{where} holds {UNKNOWN}, which stands for a token whose experts are not "
                f"known: then all of them are {UNKNOWN}"
            )
        twice = ((np.diff(ordered, axis=2) == 0) & (ordered[..., 1:] != UNKNOWN)).any(axis=2)
        if twice.any():
            where = _first(twice)
            token, layer = np.argwhere(twice)[0]
            raise ValueError(f"routing{where} holds an expert twice: {ids[token, layer].tolist()}")


def _wrong(given: object, must_be: str) -> ValueError:
    return ValueError(f"routing={shown(given)} must be {must_be}")


def _first(found: NDArray[np.bool_]) -> str:
    """The first place that was found, as text: `[token][layer]`."""
    token, layer = np.argwhere(found)[0][:2]
    return f"[{token}][{layer}]"
