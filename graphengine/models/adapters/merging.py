"""Merges one adapter into a checkpoint's weights while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from graphengine.models.adapters.adapter import Adapter, AdapterPart
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.models.quantised.config import quantisation_of

_WEIGHT = ".weight"


def with_merged(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The checkpoint whose linears have the adapter's products in them: W + scale * B A, computed
    in float32 and rounded to the dtype that W is stored in. Any linear with a weight of its own may
    be changed.

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
            shapes[name.removesuffix(_WEIGHT)] = (shape[0], shape[1])
        else:
            others.append(name.removesuffix(_WEIGHT))
    adapter.check(shapes, others)
    return replace(checkpoint, merge=_Merge(dict(adapter.parts())))


class _Merge:
    """Adds the product of an adapter's matrices to the weight that is read."""

    def __init__(self, parts: Mapping[str, AdapterPart]) -> None:
        self._parts = parts

    def __call__(self, name: str, value: Tensor, cut: TensorSlice | None) -> Tensor:
        part = self._parts.get(name.removesuffix(_WEIGHT))
        if part is None or not name.endswith(_WEIGHT):
            return value
        down, up = part.down, part.up
        if cut is not None and cut.axis == 0:
            up = cut.part(up)
        elif cut is not None:
            down = cut.part(down)
        product = up.to(value.device).float() @ down.to(value.device).float()
        return (value.float() + part.scale * product).to(value.dtype)
