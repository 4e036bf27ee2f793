"""Requests where a step emits frames: the options that make no sense there, or are not there yet,
and the embeddings that stream into frames, as the host keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.kernels.core.lanes import BITS
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.inner.parallel_heads import ParallelHeads
from graphengine.options.code_sampling import DrawnCode
from graphengine.options.frames import Feed, checked_rows
from graphengine.sampling_params import SamplingParams

_OF_TEXT = ("stop", "structured_outputs", "include_stop_str_in_output")
_OF_FIRST_CODES = (
    *("min_tokens", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_OF_TOKENS = ("bad_words", "prompt_logprobs", "forced_tokens")
_USUAL = SamplingParams()
Bits = NDArray[Any]
"""Rows of the model's dtype as integers, since NumPy does not know every dtype."""


def read_frame_params(params: SamplingParams, inner: FrameCoder | None) -> tuple[DrawnCode, ...]:
    """How each code after a frame's first is drawn; empty where a step emits tokens.

    Options of single tokens are for a frame's first code where that is one of the model's ids.

    ValueError, with name and value, for an option of text or of single tokens where it emits
    frames, and for `codes` and `forced_codes` where it does not.
    """
    if inner is None:
        for name in ("codes", "forced_codes"):
            value = getattr(params, name)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r:.99} is for models whose steps emit frames of codes: this "
                    f"one emits tokens"
                )
        return ()
    of_tokens = _OF_TOKENS if inner.first_codes else _OF_FIRST_CODES + _OF_TOKENS
    for names, why in (
        (_OF_TEXT, "frames have no text"),
        (of_tokens, "it is for tokens, and each step of this model emits a frame of codes"),
    ):
        for name in names:
            value = getattr(params, name)
            if value != getattr(_USUAL, name):
                raise ValueError(f"{name}={value!r:.99}: {why}")
    if params.logprobs:
        raise ValueError(
            f"logprobs={params.logprobs}: frames have the log-probabilities of their own codes "
            f"alone, logprobs=0"
        )
    if params.logprobs is not None:
        for name in _OF_FIRST_CODES:
            value = getattr(params, name)
            if value != getattr(_USUAL, name) and not name.startswith("stop"):
                raise ValueError(
                    f"{name}={value!r:.99} beside logprobs={params.logprobs}: log-probabilities of "
                    f"codes are those of logits that nothing has changed"
                )
    return params.drawn_codes(inner.steps - 1)


def given_frames(
    params: SamplingParams, inner: FrameCoder | None, most: int
) -> NDArray[np.int16] | None:
    """The codes that a request of at most `most` frames gives, int16 [F, K]; None if it gives none.

    ValueError for codes that the model does not have, and for too many frames.
    """
    forced = params.given_codes
    if forced is None or inner is None:
        return None
    forced.check(inner.codebooks)
    if len(forced.codes) > most:
        raise ValueError(
            f"forced_codes of {len(forced.codes)} frames: max_tokens and max_seq_len leave room "
            f"for {most}"
        )
    return forced.codes


def check_frame_prompt(prompt: Sequence[int], inner: FrameCoder | None) -> None:
    """ValueError for an id in a prompt that stands for a frame of sound."""
    if isinstance(inner, ParallelHeads):
        inner.check_prompt(prompt)


class StreamedRows:
    """The rows of one request, and the frame that each was given to; never forgotten before the
    request ends.

    pad       `[1, H]`, for frames without a row
    launched  frames whose step has been launched; rows that come later cannot change them
    bound     the frame past the last one that has a row
    loaded    the frame past the last one whose row is on its way to the device
    frames    the frame of each row, in order
    late      frames that got the pad although a row came later
    """

    __slots__ = ("_rows", "bound", "frames", "late", "launched", "loaded", "pad")

    def __init__(self, pad: Bits, rows: Bits) -> None:
        self.pad = pad
        self._rows: list[Bits] = []
        self.frames: list[int] = []
        self.launched = self.bound = self.loaded = self.late = 0
        self.add(rows)

    def add(self, rows: Bits) -> int:
        """Give these rows to the frames after those that have one, or to the first frame that has
        not been launched if that is later; returns the frame of the first row.
        """
        first = max(self.bound, self.launched)
        if len(rows):
            self.late += first - self.bound
            self.bound = first + len(rows)
            self.frames += range(first, self.bound)
            self._rows.extend(rows)
        return first

    def between(self, first: int, stop: int) -> list[Bits]:
        """The rows of frames first .. stop - 1, none of which was launched; all must have one."""
        assert self.launched <= first <= stop <= self.bound, f"{first=} {stop=} {self.launched=}"
        # Frames that were not launched have rows up to the bound, without a gap.
        end = len(self._rows) - self.bound
        return self._rows[end + first : end + stop]

    def padded(self, frames: int) -> int:
        """How many of the first `frames` frames got the pad."""
        return frames - int(np.searchsorted(self.frames, frames))

    def forget(self) -> None:
        """Give the memory of the rows back; which frames they were given to stays known."""
        self._rows.clear()


def new_streamed_rows(
    feed: Feed | None, inner: FrameCoder | None, dtype: torch.dtype
) -> StreamedRows | None:
    """The record of a request with this option; None for a model that takes no rows.

    ValueError where there are rows and the model takes none, where it takes rows and there is no
    pad, and for rows of another size.
    """
    if inner is None or not inner.fed:
        if feed is not None:
            raise ValueError(
                f"feed={feed!r} is for models that add an embedding to each frame while they "
                f"speak, such as Qwen3-Omni's talker"
            )
        return None
    if feed is None:
        raise ValueError(
            f"feed=None: this model adds an embedding of {inner.width} values to each frame, and "
            f"needs at least feed=Feed(pad), the one for frames that have no other"
        )
    return StreamedRows(
        bits_of("pad", feed.pad, inner, dtype), bits_of("rows", feed.rows, inner, dtype)
    )


def bits_of(name: str, rows: object, inner: FrameCoder, dtype: torch.dtype) -> Bits:
    """A caller's rows, rounded to the model's dtype; ValueError for rows that do not fit it."""
    found = checked_rows(name, rows)
    if found.shape[1] != inner.width:
        raise ValueError(
            f"feed: {name} of shape {list(found.shape)}: the model takes [n, {inner.width}]"
        )
    rounded = found.to(dtype)
    finite = rounded.isfinite().all(dim=1)
    if not finite.all():
        row = int(finite.int().argmin())
        raise ValueError(
            f"feed: {name} of shape {list(found.shape)}: row {row} is not finite in {dtype}"
        )
    return _as_bits(rounded)


def _as_bits(rows: Tensor) -> Bits:
    bits: Bits = rows.view(BITS[rows.element_size()]).numpy()
    return bits
