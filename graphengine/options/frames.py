"""A caller's parts of frames: the codes of the first frames, `SamplingParams(forced_codes=...)`,
and rows that stream into a reply while it is spoken, `SamplingParams(feed=Feed(...))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.options.callers_tensors import holds_integers, plain_tensor
from graphengine.options.checks import shown

FREE = -1
"""A code that is drawn."""
Rows = Tensor | NDArray[Any]


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

    def check(self, codebooks: Sequence[int]) -> None:
        """ValueError unless they fit frames with a code of each of the codebooks of these sizes."""
        frames, given = self.codes.shape
        if given != len(codebooks):
            raise ValueError(
                f"forced_codes of shape [{frames}, {given}]: a frame of this model has "
                f"{len(codebooks)} codes"
            )
        wrong = np.argwhere(self.codes >= np.array(codebooks))
        if len(wrong):
            frame, place = wrong[0]
            raise ValueError(
                f"forced_codes[{frame}][{place}]={self.codes[frame, place]}: a codebook of this "
                f"model has {codebooks[place]} codes"
            )


class Feed:
    """Rows that stream into the frames of a reply: embeddings, such as those of the text to be
    spoken, or codes, such as those of another speaker's sound.

        SamplingParams(feed=Feed(pad, rows))

    Row i is added to the embedding of frame i, counted from 0, which the step that makes frame
    i + 1 reads; `Engine.feed` gives the rows after these. A frame without a row gets the pad. For
    Qwen3-Omni's talker, the rows are transformers' `trailing_text_hidden`, the pad its
    `tts_pad_embed`. For Moshi, they are frames of the user's codes, the pad is a frame of silence,
    and all codes of a frame but its first are heard one frame later, as Moshi says its own.

    Args:
        pad: [H] or [1, H] of floating point, on the CPU or a GPU; or integers [P], a frame's codes.
        rows: [n, H], or integers [n, P]; None: none are known yet.
        before: for codes, [P], the frame before the first row, at the end of the prompt; its first
            code is not read. None: no frame comes before it.

    All are copied at once. ValueError, with the shape, for anything else; the engine checks H, P
    and that codes are known.
    """

    __slots__ = ("before", "pad", "rows")
    pad: Tensor
    rows: Tensor
    before: Tensor | None

    def __init__(self, pad: Rows, rows: Rows | None = None, *, before: Rows | None = None) -> None:
        self.pad = _one_row("pad", pad)
        self.rows = self.pad[:0] if rows is None else checked_rows("rows", rows)
        if self.rows.shape[1] != self.pad.shape[1]:
            raise ValueError(
                f"feed: rows of {self.rows.shape[1]} values and a pad of {self.pad.shape[1]} must "
                f"have as many"
            )
        codes = not self.pad.is_floating_point()
        if codes == self.rows.is_floating_point():
            raise ValueError(
                f"feed: rows of {self.rows.dtype} and a pad of {self.pad.dtype} must both be "
                f"embeddings, or both codes"
            )
        self.before = None if before is None else _one_row("before", before)
        if self.before is not None and (
            not codes or self.before.dtype != self.pad.dtype or self.before.shape != self.pad.shape
        ):
            raise ValueError(
                f"feed: before of shape {list(self.before.shape)} and {self.before.dtype} is for "
                f"a pad of as many codes, not of {list(self.pad.shape)} and {self.pad.dtype}"
            )

    def __repr__(self) -> str:
        return f"Feed(pad=tensor{list(self.pad.shape[1:])}, rows=tensor{list(self.rows.shape)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Feed):
            return NotImplemented
        if (self.before is None) != (other.before is None):
            return False
        pairs = [(self.pad, other.pad), (self.rows, other.rows)]
        if self.before is not None and other.before is not None:
            pairs.append((self.before, other.before))
        return all(torch.equal(*pair) for pair in pairs)

    __hash__ = None  # type: ignore[assignment]


def _one_row(name: str, row: object) -> Tensor:
    """`checked_rows` of one row, which may come without its first dimension."""
    found = _plain_rows(name, row)
    found = checked_rows(name, found[None] if found.dim() == 1 else found)
    if len(found) != 1:
        raise ValueError(f"feed: {name} of shape {list(found.shape)} must be one row, [H]")
    return found


def checked_rows(name: str, rows: object) -> Tensor:
    """A copy on the host of a caller's rows; ValueError unless they are [n, H] of floating point,
    or codes [n, P], which become int64.

    name  of the rows, for errors
    """
    found = _plain_rows(name, rows)
    codes = holds_integers(found)
    if not (found.is_floating_point() or codes) or found.dim() != 2 or not found.shape[1]:
        raise ValueError(
            f"feed: {name} of shape {list(found.shape)} and {found.dtype} must be of floating "
            f"point, [n, H], or codes, integers [n, P]"
        )
    if codes:
        found = found.long()
    return found.to("cpu", copy=True).contiguous()


def _plain_rows(name: str, rows: object) -> Tensor:
    if not isinstance(rows, Tensor | np.ndarray):
        raise ValueError(f"feed: {name}={shown(rows)} must be a tensor or an array, [n, H]")
    return plain_tensor(f"feed: {name}", rows)
