"""Weights that a device holds, and what each of them is in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels import AnyWeight, PackedWeight
from graphengine.models.tensor_files import Cut

Destinations = dict[str, Tensor]
"""Names of a checkpoint's tensors -> the views that are to hold them."""


class Weight(NamedTuple):
    """A tensor of a checkpoint.

    tensor  the view that is to hold it
    axis    the dimension along which ranks split it; None: each has all of it
    pieces  lengths along `axis` that ranks split one by one; empty: it is one piece
    """

    tensor: Tensor
    axis: int | None = None
    pieces: tuple[int, ...] = ()


class Stack(NamedTuple):
    """Where the weight of an expert is in tensors that have those of all: `[experts, ...]`."""

    expert: int
    experts: int


class StoredLinear(NamedTuple):
    """A weight of linears, and what it is in a checkpoint.

    parts   names without ".weight", and rows, of the linears whose rows it has one after the other
    swiglu  whether these are gates and ups
    axis    the dimension along which ranks split each part; None: each has all of it
    shared  names of parts of which each rank has all, whatever the axis
    pieces  of parts that are several, by name: rows that ranks split one by one
    cuts    of each part, what of the checkpoint's linear this is; empty: all
    order   int64 `[rows]`: row i is row `order[i]` of the parts; None: they are in their order.
            A weight in the model's dtype has views that say the same
    expert  whether it is one of several, of which a lane takes some
    stack   its place in the tensors of `parts`, which all experts of a layer share and whose names
            have no ".weight"; None: they are its own. `views` are of those that are its own
    plain   whether it is in the model's dtype whatever the checkpoint has: then 8 or 4 bits are
            dequantised while they are read
    """

    weight: AnyWeight
    parts: tuple[tuple[str, int], ...]
    swiglu: bool = False
    axis: int | None = None
    order: Tensor | None = None
    expert: bool = False
    stack: Stack | None = None
    plain: bool = False
    shared: frozenset[str] = frozenset()
    pieces: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    cuts: tuple[Cut, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        rows, columns = self.weight.shape
        return rows, columns

    def views(self) -> dict[str, Weight]:
        """Of a weight in the model's dtype, each part's own; of a packed one nothing."""
        if not isinstance(self.weight, Tensor):
            return {}
        rows = torch.split(self.weight, [count for _, count in self.parts])
        named = zip(self.parts, rows, strict=True)
        return {
            f"{name}.weight": Weight(
                part, None if name in self.shared else self.axis, self.pieces.get(name, ())
            )
            for (name, _), part in named
        }


class RoutedExperts(NamedTuple):
    """The experts of a model, of which a token meets a few in each of their layers.

    layers      that have experts; each step runs them in their order, and routes in each once. The
                last one may follow in `prefill_logits` for the chunk's last lane
    experts     of a layer; `chosen` of them are a token's
    parameters  values of the weights of one
    nbytes      of all experts of all layers
    stacked     whether a checkpoint has those of a layer in one tensor, as gpt-oss has them
    """

    layers: int
    experts: int
    chosen: int
    parameters: int
    nbytes: int
    stacked: bool = False

    @property
    def idle(self) -> int:
        """Values of the weights that a token does not meet."""
        return self.layers * (self.experts - self.chosen) * self.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights(ABC):
    """Weights on one device, in the model's dtype or packed, and where in a checkpoint they are
    from.

    config  what their shapes follow from; equal ones have equal `repr`
    """

    config: object

    @abstractmethod
    def stored(self) -> dict[str, Weight]:
        """Every tensor of the checkpoint that is read as it is, by its name there."""

    @abstractmethod
    def linears(self) -> list[StoredLinear]:
        """Every weight of linears, in the order of the layers."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor that is held; one that is used twice may be there twice."""

    @abstractmethod
    def kv_scales(self) -> dict[str, Tensor]:
        """Float32 `[2, G]` of each layer that has keys and values, in the order of their cache.

        By the prefix of the layer's attention in the checkpoint. They are no weights: whoever
        opens an engine with an fp8 cache sets them, and nothing else reads them.
        """

    @property
    def routed(self) -> RoutedExperts | None:
        """Of a model with experts, how many it has; None: every token meets every weight."""
        return None

    @property
    def parameters(self) -> int:
        """Values of all weights; a tied one counts once, a packed one as what it stands for."""
        packed = [each.shape for each in self.linears() if not isinstance(each.weight, Tensor)]
        plain = sum(tensor.numel() for tensor in self.named().values())
        return plain + sum(rows * columns for rows, columns in packed)

    def named(self) -> Destinations:
        """The views of `stored`, by name."""
        return {name: weight.tensor for name, weight in self.stored().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; one that is used twice counts once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors()}.values())

    def bytes_by_kind(self, dtype: torch.dtype) -> dict[str, int]:
        """The same, apart: what is in the model's `dtype`, then of each format, by labels."""
        packed: dict[str, int] = {}
        for linear in self.linears():
            if isinstance(linear.weight, PackedWeight):
                label = linear.weight.format.label
                packed[label] = packed.get(label, 0) + linear.weight.nbytes
        plain = self.nbytes - sum(packed.values())
        return {str(dtype).removeprefix("torch."): plain, **packed}
