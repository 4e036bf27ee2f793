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
from graphengine.options.frames import FREE, Feed, checked_rows
from graphengine.sampling_params import SamplingParams

_OF_TEXT = ("stop", "structured_outputs", "include_stop_str_in_output")
_OF_FIRST_CODES = (
    *("min_tokens", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_OF_TOKENS = ("bad_words", "prompt_logprobs", "forced_tokens")
_USUAL = SamplingParams()
Bits = NDArray[Any]
"""Rows of the model's dtype as integers, since NumPy does not know every dtype; or codes, int32."""


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

    Where codes come late, those of the first frame whose sound is before it are those of a
    beginning, unless they are given.

    ValueError for codes that the model does not have, and for too many frames.
    """
    forced = params.given_codes
    if inner is not None and forced is None and inner.begins and most:
        first = np.array([[*[FREE] * 2, *(rows - 1 for rows in inner.codebooks[2:])]], np.int16)
        return first
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
    """ValueError for an id in a prompt that stands for a frame of sound, and for any id where each
    position has codes beside its token.
    """
    if isinstance(inner, ParallelHeads):
        inner.check_prompt(prompt)
    if inner is not None and inner.begins:
        for index, token in enumerate(prompt):
            if token >= 0:
                raise ValueError(
                    f"token {index} of the prompt is {token}: each position of this model has "
                    f"{inner.steps - 1} codes beside its token, so give frames as embeddings "
                    f"(`Engine.embed_frames`)"
                )


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

    @property
    def ready(self) -> int:
        """The frame past the last one whose row may go to the device."""
        return self.bound

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


class StreamedCodes(StreamedRows):
    """Rows of codes, all of which but the first of each are heard one frame late.

    So the frame after the last row has its other codes, beside the pad's first one: it is a row
    too, until the next one comes or its step is launched.

    before  `[1, P]`, of the frame before the first
    """

    __slots__ = ("_last", "_pad_codes")

    def __init__(self, pad: Bits, rows: Bits, before: Bits) -> None:
        self._last = before[0]
        self._pad_codes = pad[0]
        super().__init__(pad, rows)

    @property
    def ready(self) -> int:
        return self.bound + 1

    def add(self, rows: Bits) -> int:
        """Give these rows to frames, as for embeddings; a frame not given in time has the pad's."""
        if not len(rows):
            return super().add(rows)
        late = self.launched > self.bound
        before = self._pad_codes if late else self._last
        others = np.concatenate([before[None], rows[:-1]])
        heard = np.concatenate([rows[:, :1], others[:, 1:]], axis=1)
        # The row that a new one replaces may have been copied already.
        self.loaded = min(self.loaded, self.bound)
        self._last = rows[-1]
        return super().add(heard)

    def between(self, first: int, stop: int) -> list[Bits]:
        if stop <= self.bound:
            return super().between(first, stop)
        rest = np.concatenate([self._pad_codes[:1], self._last[1:]])
        return [*super().between(first, self.bound), rest] if first <= self.bound else []


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
    books = inner.fed_books
    if feed is None and books:
        raise ValueError(
            f"feed=None: this model hears {books} codes beside each frame, and needs at least "
            f"feed=Feed(pad), the codes of silence, for frames that have no others"
        )
    if feed is None:
        raise ValueError(
            f"feed=None: this model adds an embedding of {inner.width} values to each frame, and "
            f"needs at least feed=Feed(pad), the one for frames that have no other"
        )
    pad, rows = (
        bits_of(name, given, inner, dtype)
        for name, given in (("pad", feed.pad), ("rows", feed.rows))
    )
    if not books:
        return StreamedRows(pad, rows)
    before = np.full((1, books), inner.codebooks[-1] - 1, np.int32)
    if feed.before is not None:
        # Its first code was not late: the prompt has it.
        late = feed.before.clone()
        late[:, 0] = 0
        before = bits_of("before", late, inner, dtype)
    return StreamedCodes(pad, rows, before)


def bits_of(name: str, rows: object, inner: FrameCoder, dtype: torch.dtype) -> Bits:
    """A caller's rows, rounded to the model's dtype, or codes; ValueError for others."""
    found, books = checked_rows(name, rows), inner.fed_books
    told = f"feed: {name} of shape {list(found.shape)}"
    of_a_kind = found.is_floating_point() != bool(books)
    if found.shape[1] != (books or inner.width) or not of_a_kind:
        takes = f"codes, [n, {books}]" if books else f"[n, {inner.width}]"
        raise ValueError(
            f"{told}: the model takes {takes}{'' if of_a_kind else f', not {found.dtype}'}"
        )
    if books:
        most = inner.codebooks[-1]
        wrong = ((found < 0) | (found >= most)).nonzero().tolist()
        if wrong:
            row, place = wrong[0]
            raise ValueError(
                f"{told} has code {int(found[row, place])} in row {row}: a codebook has {most}"
            )
        codes: Bits = found.int().numpy()
        return codes
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
