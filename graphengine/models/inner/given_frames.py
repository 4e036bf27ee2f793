"""Frames of codes as a caller gives them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphengine.kernels.frames.embed import sum_of_codes
from graphengine.models.contract import Model
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.inner.late_codes import delayed, undelayed
from graphengine.models.inner.parallel_heads import Codes, ParallelHeads
from graphengine.models.inner.weights import InnerWeights
from graphengine.options.callers_tensors import holds_integers, plain_tensor
from graphengine.options.checks import shown


def embed_frames(model: Model, codes: npt.ArrayLike | Tensor) -> Tensor:
    """Implements `Engine.embed_frames`."""
    inner, weights = _coder(model, "embed_frames"), model.weights.inner_weights
    assert weights is not None, f"{inner=}"
    found = torch.from_numpy(checked_codes(codes, inner, heard=True)).to(weights.frames.device)
    own, theirs = found[:, : inner.steps], found[:, inner.steps :]
    table = weights.fed_codes if isinstance(weights, InnerWeights) else None
    if not theirs.shape[1]:
        return sum_of_codes(own, weights.frames, weights.first_book)
    return sum_of_codes(own, weights.frames, weights.first_book, theirs, table)


def delay_frames(model: Model, codes: npt.ArrayLike | Tensor) -> Codes:
    """Implements `Engine.delay_frames`."""
    inner = _coder(model, "delay_frames")
    found = checked_codes(codes, inner, heard=True).astype(np.int32)
    if inner.begins:
        return delayed(found, inner.steps, begin=inner.codebooks[-1] - 1)
    return inner.delayed(found) if isinstance(inner, ParallelHeads) else found


def undelay_frames(model: Model, codes: npt.ArrayLike | Tensor) -> Codes:
    """Implements `Engine.undelay_frames`."""
    inner = _coder(model, "undelay_frames")
    found = checked_codes(codes, inner).astype(np.int32)
    if inner.begins:
        return undelayed(found)
    return inner.undelayed(found) if isinstance(inner, ParallelHeads) else found


def _coder(model: Model, call: str) -> FrameCoder:
    """The part that draws the model's frames; ValueError, with the call's name, if it emits
    tokens.
    """
    if model.config.inner is None:
        raise ValueError(
            f"{call} is for models whose steps emit frames of codes: a "
            f"{model.config.architecture} emits tokens"
        )
    return model.config.inner


def checked_codes(
    codes: npt.ArrayLike | Tensor, inner: FrameCoder, *, heard: bool = False
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Whole frames as int64 [frames, K]; ValueError, with the first wrong code, for others.

    heard  whether the P codes that stream in may follow those of a frame
    """
    theirs = inner.fed_books if heard else 0
    widths = (inner.steps, inner.steps + theirs) if theirs else (inner.steps,)
    wanted = f"integers [frames, {' or '.join(map(str, widths))}]"
    try:
        found = plain_tensor("codes", codes) if isinstance(codes, Tensor) else np.asarray(codes)
    except ValueError as error:
        raise ValueError(f"codes={shown(codes)} must be {wanted}: {error}") from error
    whole = holds_integers(found) if isinstance(found, Tensor) else found.dtype.kind in "iu"
    if found.ndim != 2 or found.shape[1] not in widths or not whole:
        raise ValueError(
            f"codes={shown(codes)} of shape {list(found.shape)} and {found.dtype} must be {wanted}"
        )
    given = found.long().cpu().numpy() if isinstance(found, Tensor) else found
    books = np.array([*inner.codebooks, *[inner.codebooks[-1]] * (given.shape[1] - inner.steps)])
    wrong = np.argwhere((given < 0) | (given >= books))
    if len(wrong):
        frame, place = wrong[0]
        raise ValueError(
            f"codes[{frame}][{place}] is {given[frame, place]}: a codebook has {books[place]} codes"
        )
    return given.astype(np.int64)
