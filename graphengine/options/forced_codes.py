"""The codes that a request's first frames have: `SamplingParams(forced_codes=...)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.options.checks import shown

FREE = -1
"""A code that is drawn."""


class ForcedCodes:
    """The `forced_codes` of `SamplingParams`, once they are made: `codes`, int16 [F, K], read-only.

    F frames, K codes of a frame; -1 for a code that is drawn.
    """

    __slots__ = ("codes",)
    codes: NDArray[np.int16]

    def __init__(self, given: object) -> None:
        """ValueError unless it is an array [frames, codes of a frame] of integers from -1 up."""
        if isinstance(given, ForcedCodes):
            self.codes = given.codes
            return
        try:
            # A tensor of a GPU is copied by its own method.
            array = given.detach().cpu() if isinstance(given, torch.Tensor) else given
            codes: NDArray[Any] = np.asarray(array)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"forced_codes={shown(given)} must be codes: {error}") from error
        if codes.ndim != 2 or 0 in codes.shape or codes.dtype.kind not in "iu":
            raise ValueError(
                f"forced_codes={shown(given)} must be integers [frames, codes of a frame], not "
                f"{codes.dtype} {list(codes.shape)}"
            )
        most = np.iinfo(np.int16).max
        wrong = np.argwhere((codes < FREE) | (codes > most))
        if len(wrong):
            frame, place = wrong[0]
            raise ValueError(
                f"forced_codes[{frame}][{place}]={codes[frame, place]} must be a code, or {FREE} "
                f"for one that is drawn"
            )
        self.codes = np.array(codes, dtype=np.int16, order="C")
        self.codes.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForcedCodes) and np.array_equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash((self.codes.shape, self.codes.tobytes()))

    def __repr__(self) -> str:
        return f"ForcedCodes(shape={self.codes.shape})"

    def check(self, places: int, count: int) -> None:
        """ValueError unless they fit frames of `places` codes, each below `count`."""
        frames, given = self.codes.shape
        if given != places:
            raise ValueError(
                f"forced_codes of shape [{frames}, {given}]: a frame of this model has {places} "
                f"codes"
            )
        if (most := int(self.codes.max())) >= count:
            frame, place = np.argwhere(self.codes == most)[0]
            raise ValueError(
                f"forced_codes[{frame}][{place}]={most}: a codebook of this model has {count} codes"
            )
