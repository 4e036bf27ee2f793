"""The linears of a decode step by name: their sizes, how they are stored, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from graphengine.kernels.core.devices import H200, Device
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.plans import expert_plan
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedForm, PackedWeight
from graphengine.kernels.linear.packed_cut import packed_plan
from graphengine.kernels.linear.plans import (
    LinearKind,
    LinearPlan,
    RowFamily,
    heuristic_plan,
    residual_groups,
)
from graphengine.kernels.linear.quantised import WeightFormat

ShardAxis = Literal["rows", "columns"]
"""How ranks split a weight: with `rows` each rank computes its own outputs, with `columns` a part
of every sum."""


class Linear(NamedTuple):
    """A weight `[rows, columns]` of the decode step.

    kind     names the epilogue of its kernel
    weight   its format in 8 or 4 bits; None: it is in the model's dtype
    shard    the axis along which ranks split it; None: each rank has all of it. `reduce` sums the
             products of a weight that is split by columns
    experts  weights of this shape in a layer, of which each lane uses some; 0: one weight for all
             lanes
    """

    kind: LinearKind
    rows: int
    columns: int
    weight: WeightFormat | None = None
    shard: ShardAxis | None = None
    experts: int = 0


Linears = Mapping[str, Linear]
"""Linears by name, in the order in which a step runs them."""


def linear_name(name: str, weight: AnyWeight | PackedExperts | WeightFormat | None) -> str:
    """The name of a linear with this weight, in `Linears` and in plans.

    Layers may store the same linear in different formats: each format has its own plan.
    """
    if weight is None or isinstance(weight, Tensor):
        return name
    if isinstance(weight, PackedWeight | PackedExperts):
        weight = weight.format
    return f"{name}.{weight.label}"


class _Sizes(Protocol):
    @property
    def first_linears(self) -> Mapping[str, str]: ...


class NamedBlock(Protocol):
    """Weights of a block of a layer; `prefix` begins their names in the checkpoint."""

    @property
    def prefix(self) -> str: ...
    @property
    def block(self) -> _Sizes: ...


def names_of_linears(blocks: Iterable[NamedBlock]) -> dict[str, str]:
    """Names in `Linears`, without a format, by the checkpoint's name of the first fused linear."""
    return {
        block.prefix + first: name
        for block in blocks
        for name, first in block.block.first_linears.items()
    }


Value = TypeVar("Value")


class ByLinear(Mapping[str, Value]):
    """A value for each linear of a model, by name. Immutable; hashable if its values are.

    Equality ignores the order, as for every mapping.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"{type(self).__name__}({values})"

    def replace(self, changes: Mapping[str, Value]) -> Self:
        """A copy with other values for some names. KeyError for a name that is not there."""
        unknown = changes.keys() - self.keys()
        if unknown:
            raise KeyError(f"no linear {', '.join(sorted(unknown))}; there are {', '.join(self)}")
        return type(self)({**self, **changes})


class LinearPlans(ByLinear[LinearPlan]):
    """The plan of each linear of a decode step; one set serves every bucket."""

    __slots__ = ()

    @property
    def family(self) -> RowFamily:
        """The row family, which all linears of an engine share, except some of the experts'."""
        return next(iter(self.values())).family


def heuristic_plans(linears: Linears, dtype: torch.dtype, family: RowFamily) -> LinearPlans:
    """Plans for linears that no tuning table knows."""
    return LinearPlans(
        {name: heuristic_linear_plan(linear, dtype, family) for name, linear in linears.items()}
    )


def heuristic_linear_plan(
    linear: Linear,
    dtype: torch.dtype,
    family: RowFamily,
    device: Device = H200,
) -> LinearPlan:
    """The plan of a linear that no tuning table knows, on this GPU."""
    shape = (linear.kind, linear.rows, linear.columns)
    if linear.experts:
        return expert_plan(*shape, dtype, family, linear.weight, device)
    if linear.weight is None:
        return heuristic_plan(*shape, dtype, family, device)
    return packed_plan(linear.weight, linear.rows, linear.columns, family, device)


class WeightForms(ByLinear[PackedForm]):
    """How packed weights are stored, that is, those not in the model's dtype.

    Keys are the checkpoint name of the weight's first linear, without ".weight": the query linear
    stands for keys and values too, and the gate for the up.
    """

    __slots__ = ()

    def format_of(self, linear: str) -> WeightFormat | None:
        """The format of this linear's weight; None: it is in the model's dtype."""
        form = self.get(linear)
        return None if form is None else form.format


PLAIN = WeightForms({})
"""All weights are in the model's dtype."""


def in_formats(linears: Linears, formats: Mapping[str, Sequence[WeightFormat | None]]) -> Linears:
    """Give each linear one entry per format in which some layer stores its weight."""
    return {
        linear_name(name, weight): linear._replace(weight=weight)
        for name, linear in linears.items()
        for weight in dict.fromkeys(formats[name])
    }


def stream_groups(linears: Linears, plans: LinearPlans) -> int:
    """Groups (T) of the `squares` in a step's residual stream, as its last writer leaves them."""
    groups = [
        residual_groups(plans[name], linear.rows)
        for name, linear in linears.items()
        if linear.kind == "residual"
    ]
    return groups[-1] if groups else 1


def refill(held: Iterable[Tensor], made: Iterable[Tensor]) -> None:
    """Copy each tensor of `made` into its counterpart in `held`; skip a tensor that is its own
    counterpart.
    """
    for into, source in zip(held, made, strict=True):
        if into is not source:
            into.copy_(source)
