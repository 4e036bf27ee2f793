"""The parts of a checkpoint that one of several ranks reads: cuts of tensors and of packed linears.

Cuts follow from the sizes of the whole model and of the rank's part (`rank_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.tensor_files import TensorSlice, spans_of
from graphengine.models.launches import WHOLE, Share
from graphengine.models.quantised.filling import dequantised_names
from graphengine.models.weights import Stack, StoredLinear, StoredWeights, Weight

Config = TypeVar("Config")


def checkpoint_of_rank(
    checkpoint: Checkpoint,
    allocate: Callable[..., StoredWeights],
    whole: Config,
    part: Config,
    share: Share,
) -> Checkpoint:
    """`cut_to` with the weights that `allocate` makes from the configs of the whole model and of
    the part.
    """
    if share == WHOLE:
        return checkpoint
    of_all, own = (allocate(each, device="meta", dtype=torch.float32) for each in (whole, part))
    return cut_to(checkpoint, of_all, own, share)


def cut_to(
    checkpoint: Checkpoint, whole: StoredWeights, part: StoredWeights, share: Share
) -> Checkpoint:
    """Cut each tensor that a rank reads as it is into `part` to the rank's share.

    whole  the weights of all ranks, for their shapes
    """
    wholes = whole.stored()
    # They are cut after dequantisation.
    in_codes = {f"{name}.weight" for name in dequantised_names(checkpoint, part.linears())}
    return checkpoint.cut(
        {
            name: _cut(checkpoint.tensors[name].shape, wholes[name], weight, share)
            for name, weight in part.stored().items()
            if weight.axis is not None and name not in in_codes
        }
    )


def _cut(shape: tuple[int, ...], whole: Weight, part: Weight, share: Share) -> TensorSlice:
    """The part of a tensor of this shape that a rank has."""
    axis = part.axis
    assert axis is not None, f"{part=}"
    if not part.pieces:
        # The views may order the tensor's dimensions differently.
        length = part.tensor.numel() * shape[axis] // whole.tensor.numel()
        return TensorSlice(axis, spans_of([shape[axis]], [length], *share), shape[axis])
    return TensorSlice(axis, spans_of(whole.pieces, part.pieces, *share), shape[axis])


def cut_linears(whole: StoredWeights, part: StoredWeights, share: Share) -> list[StoredLinear]:
    """The linears of a rank's part, with `cuts`, which say which piece of the checkpoint's linear
    each is.
    """
    wholes = {_place(linear): linear for linear in whole.linears()}
    return [
        linear
        if linear.axis is None
        else linear._replace(cuts=_cuts(wholes[_place(linear)], linear, share))
        for linear in part.linears()
    ]


def _place(linear: StoredLinear) -> tuple[str, Stack | None]:
    """A linear's place in the checkpoint, to find it in the whole: a rank may lack experts."""
    return linear.parts[0][0], linear.stack


def _cuts(whole: StoredLinear, part: StoredLinear, share: Share) -> tuple[TensorSlice, ...]:
    """One cut per part; replicated parts stay whole."""
    if part.axis == 1:
        columns = whole.shape[1]
        spans = spans_of([columns], [part.shape[1]], *share)
        return tuple(TensorSlice(1, spans, columns) for _ in part.parts)
    return tuple(
        TensorSlice(
            0,
            spans_of(whole.pieces.get(name, (rows,)), part.pieces.get(name, (own,)), *share),
            rows,
        )
        for (name, rows), (_, own) in zip(whole.parts, part.parts, strict=True)
    )
