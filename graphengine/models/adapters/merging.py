"""Merges one adapter into a checkpoint's weights while they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from graphengine.models.adapters.adapter import Adapter, AdapterPart, check_finite_as
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.models.quantised.config import quantisation_of

_WEIGHT = ".weight"


def with_merged(
    checkpoint: Checkpoint,
    adapter: Adapter,
    transposed: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Checkpoint:
    """The checkpoint whose linears have the adapter's products in them: W + scale * B A, computed
    in float32 and rounded to the dtype that W is stored in. Any linear with a weight of its own may
    be changed.

    transposed  names of the linears that it stores transposed
    dtype       that the engine casts weights to; None: they stay as stored

    A weight that is no longer finite, as stored or as `dtype`, is a ValueError when it is read.
    ValueError, with names and numbers, for an adapter of another base, and for quantised weights.
    """
    quantisation = quantisation_of(checkpoint)
    if quantisation is not None:
        raise ValueError(
            f"merge_adapter is for weights of 16 or 32 bits, and those of {checkpoint.path} are "
            f"quantised ({quantisation.method}): rounding them again would change the base model. "
            f"adapters= serves {adapter.folder} beside them"
        )
    shapes, others = {}, []
    for name, info in checkpoint.tensors.items():
        shape = info.stored.shape
        if name.endswith(_WEIGHT) and len(shape) == 2 and "embed" not in name:
            linear = name.removesuffix(_WEIGHT)
            rows, columns = shape[::-1] if linear in transposed else shape
            shapes[linear] = (rows, columns)
        else:
            others.append(name.removesuffix(_WEIGHT))
    adapter.check(shapes, others)
    return replace(checkpoint, merge=_Merge(adapter, transposed, dtype))


class _Merge:
    """Adds the product of an adapter's matrices to the weight that is read."""

    def __init__(
        self, adapter: Adapter, transposed: Collection[str], dtype: torch.dtype | None
    ) -> None:
        self._parts: Mapping[str, AdapterPart] = dict(adapter.parts())
        self._folder: Path = adapter.folder
        self._transposed, self._dtype = transposed, dtype

    def __call__(self, name: str, value: Tensor, cut: TensorSlice | None) -> Tensor:
        linear = name.removesuffix(_WEIGHT)
        part, transposed = self._parts.get(linear), linear in self._transposed
        if part is None or not name.endswith(_WEIGHT):
            return value
        down, up = part.down, part.up
        if cut is not None and cut.axis == (1 if transposed else 0):
            up = cut._replace(axis=0).part(up)
        elif cut is not None:
            down = cut._replace(axis=1).part(down)
        product = up.to(value.device).float() @ down.to(value.device).float()
        product = product.t() if transposed else product
        merged = (value.float() + part.scale * product).to(value.dtype)
        check_finite_as(merged, self._dtype or merged.dtype, f"{self._folder} merged into {name}")
        return merged
