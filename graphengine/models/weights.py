"""Weights that a device holds, and the checkpoint tensors that each comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.checkpoints.tensor_files import ReorderedTensor, TensorSlice

Destinations = dict[str, Tensor | ReorderedTensor]
"""The tensors that a checkpoint's tensors are loaded into, by the latter's names."""


class Weight(NamedTuple):
    """A tensor of a checkpoint.

    tensor  the view that it is loaded into
    axis    the dimension along which ranks split it; None: each rank has all of it
    pieces  lengths along `axis`, each split among the ranks; empty: it is one piece
    order   int64 `[rows]`: row i is row `order[i]` of the rank's part; None: `tensor`'s view has
            the order
    """

    tensor: Tensor
    axis: int | None = None
    pieces: tuple[int, ...] = ()
    order: Tensor | None = None


class Stack(NamedTuple):
    """An expert's place in tensors with the weights of all experts: `[experts, ...]`.

    ending      of the names of tensors in the model's dtype
    transposed  whether these have columns where a linear has rows
    """

    expert: int
    experts: int
    ending: str = ""
    transposed: bool = True


class StoredLinear(NamedTuple):
    """The weight of one linear, or of several fused ones, and where a checkpoint has it.

    parts   the checkpoint linears whose rows it has, in order: names without ".weight", and rows
    swiglu  whether the parts are gates and ups
    axis    the dimension along which ranks split each part; None: each rank has all of it
    shared  names of parts that each rank has whole, whatever the axis
    pieces  for parts made of several pieces, by name: rows of each, split among the ranks
    cuts    for each part, which piece of the checkpoint's linear it is; empty: all of it
    transposed  whether the checkpoint has columns where the weight has rows
    head_rows  rows of a head, where a tensor may have all parts by head; 0: none has
    order   int64 `[rows]`: row i is row `order[i]` of the parts; None: in the parts' order.
            For a weight in the model's dtype, views say the same
    expert  whether it is one of several experts' weights, of which a lane uses some
    stack   its place in the tensors of `parts`, if all experts of a layer share them. None: the
            tensors are its own. Only these have `views`
    plain   whether it is in the model's dtype whatever the checkpoint has: 8 or 4 bits are then
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
    cuts: tuple[TensorSlice, ...] = ()
    transposed: bool = False
    head_rows: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        rows, columns = self.weight.shape
        return rows, columns

    def views(self) -> dict[str, Weight]:
        """Each part's view of the weight, by tensor name; empty for a packed weight."""
        if not isinstance(self.weight, Tensor):
            return {}
        rows = torch.split(self.weight, [count for _, count in self.parts])
        named = zip(self.parts, rows, strict=True)
        return {f"{name}.weight": self._view(name, part) for (name, _), part in named}

    def _view(self, name: str, part: Tensor) -> Weight:
        axis = None if name in self.shared else self.axis
        pieces = self.pieces.get(name, ())
        if self.transposed:
            return Weight(part.t(), None if axis is None else 1 - axis, pieces)
        return Weight(part, axis, pieces)


class RoutedExperts(NamedTuple):
    """The experts of a model; a token is routed to a few of them in each layer that has some.

    layers      layers with experts; each step runs them in order and routes once in each. The last
                one may follow in `prefill_logits` for the chunk's last lane
    experts     experts per layer, of which a token uses `chosen`
    parameters  weight values of one expert
    nbytes      bytes of all experts of all layers
    stacked     whether a checkpoint has a layer's experts in one tensor
    """

    layers: int
    experts: int
    chosen: int
    parameters: int
    nbytes: int
    stacked: bool = False

    @property
    def idle(self) -> int:
        """Weight values that a token does not use."""
        return self.layers * (self.experts - self.chosen) * self.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights(ABC):
    """Weights on one device, in the model's dtype or packed, and where in a checkpoint they come
    from.

    config  decides their shapes; equal ones have equal `repr`
    """

    config: object

    @abstractmethod
    def stored(self) -> dict[str, Weight]:
        """Every tensor of the checkpoint that is read as it is, by its name there."""

    @abstractmethod
    def linears(self) -> list[StoredLinear]:
        """The weights of all linears, in the order of the layers."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor that is held; one that is used twice may be listed twice."""

    @abstractmethod
    def kv_scales(self) -> dict[str, Tensor]:
        """KV scales, float32 `[2, G]`, of each layer with keys and values, in the cache's order.

        Keys are the checkpoint's prefixes of the layers' attention. The scales are not weights:
        they are set when an engine with an fp8 cache is opened, and nothing else reads them.
        """

    def packed(self) -> Sequence[PackedWeight | PackedExperts]:
        """The weights that are packed; those of a layer's experts are one, or one each."""
        weights = (linear.weight for linear in self.linears())
        return [weight for weight in weights if isinstance(weight, PackedWeight)]

    @property
    def routed(self) -> RoutedExperts | None:
        """The model's experts; None: it has none, and every token uses every weight."""
        return None

    @property
    def parameters(self) -> int:
        """Values of all weights; a tied one counts once, a packed one by its unpacked shape."""
        packed = [each.shape for each in self.linears() if not isinstance(each.weight, Tensor)]
        plain = sum(tensor.numel() for tensor in self.named().values())
        return plain + sum(rows * columns for rows, columns in packed)

    def named(self) -> dict[str, Tensor]:
        """The views of `stored`, by name."""
        return {name: weight.tensor for name, weight in self.stored().items()}

    def destinations(self) -> Destinations:
        """The destination of each tensor of `stored`, by name."""
        return {
            name: each.tensor if each.order is None else ReorderedTensor(each.tensor, each.order)
            for name, each in self.stored().items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; one that is used twice counts once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors()}.values())

    def bytes_by_kind(self, dtype: torch.dtype) -> dict[str, int]:
        """`nbytes` by kind: first weights in the model's `dtype`, then each format by its label."""
        packed: dict[str, int] = {}
        for weight in self.packed():
            label = weight.format.label
            packed[label] = packed.get(label, 0) + weight.nbytes
        plain = self.nbytes - sum(packed.values())
        return {str(dtype).removeprefix("torch."): plain, **packed}
