"""The linears of a decode step by name: their sizes, how they are stored, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from graphengine.kernels import (
    USUAL_PROCESSORS,
    AnyWeight,
    LinearKind,
    LinearPlan,
    PackedExperts,
    PackedForm,
    PackedWeight,
    RowFamily,
    WeightFormat,
    arrivals_needed,
    expert_plan,
    heuristic_plan,
    packed_plan,
    residual_groups,
)

ShardAxis = Literal["rows", "columns"]
"""How ranks split a weight: by `rows` each has outputs of its own, by `columns` each has a
part of every sum."""


class Linear(NamedTuple):
    """A weight `[rows, columns]` of the decode step.

    kind     names the epilogue of its kernel
    weight   how it is stored in 8 or 4 bits; None: in the model's dtype
    shard    along what ranks split it; None: each has all of it. `reduce` sums the products of a
             weight that is split by columns
    experts  how many weights of this shape a layer has, of which each lane takes some; 0: there is
             one, for all lanes
    """

    kind: LinearKind
    rows: int
    columns: int
    weight: WeightFormat | None = None
    shard: ShardAxis | None = None
    experts: int = 0


Linears = Mapping[str, Linear]
"""By name, in the order in which a step runs them."""


def linear_name(name: str, weight: AnyWeight | PackedExperts | WeightFormat | None) -> str:
    """The name that a linear has in `Linears` and in plans where its weight is stored so.

    Layers may store theirs in different ways: each way has a plan.
    """
    if weight is None or isinstance(weight, Tensor):
        return name
    if isinstance(weight, PackedWeight | PackedExperts):
        weight = weight.format
    return f"{name}.{weight.label}"


Value = TypeVar("Value")


class ByLinear(Mapping[str, Value]):
    """Something for each linear of a model, by its name. Immutable, and as hashable as its values.

    As of every mapping, the order does not matter to equality.
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
    """How each linear of a decode step is cut; one set serves every bucket."""

    __slots__ = ()

    @property
    def family(self) -> RowFamily:
        """The row family, which all linears of an engine share but for some of experts."""
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
    processors: int = USUAL_PROCESSORS,
) -> LinearPlan:
    """The plan of a linear that no tuning table knows, on so many multiprocessors."""
    if linear.experts:
        return expert_plan(linear.kind, linear.rows, linear.columns, dtype, family, linear.weight)
    if linear.weight is None:
        shape = (linear.kind, linear.rows, linear.columns)
        return heuristic_plan(*shape, dtype, family, processors)
    return packed_plan(linear.weight, linear.rows, linear.columns, family, processors)


class WeightForms(ByLinear[PackedForm]):
    """How weights are stored that are not in the model's dtype.

    By the name in the checkpoint of the weight's first linear, without ".weight": queries stand for
    keys and values too, and gates for ups.
    """

    __slots__ = ()

    def format_of(self, linear: str) -> WeightFormat | None:
        """None: it is in the model's dtype."""
        form = self.get(linear)
        return None if form is None else form.format


PLAIN = WeightForms({})
"""All weights are in the model's dtype."""


def in_formats(linears: Linears, formats: Mapping[str, Sequence[WeightFormat | None]]) -> Linears:
    """Linears with an entry for each way in which some layer stores the weight of that name."""
    return {
        linear_name(name, weight): linear._replace(weight=weight)
        for name, linear in linears.items()
        for weight in dict.fromkeys(formats[name])
    }


def linear_arrivals(linears: Linears, plans: LinearPlans) -> int:
    """Arrival counters that the neediest of the linears uses; they share them."""
    return max(arrivals_needed(plans[name], linear.rows) for name, linear in linears.items())


def stream_groups(linears: Linears, plans: LinearPlans) -> int:
    """Groups of squares that a step's residual stream has: those that its last writer leaves."""
    groups = [
        residual_groups(plans[name], linear.rows)
        for name, linear in linears.items()
        if linear.kind == "residual"
    ]
    return groups[-1] if groups else 1


def refill(held: Iterable[Tensor], made: Iterable[Tensor]) -> None:
    """Copy tensors into those that are held for the same; those that are the same one are left."""
    for into, source in zip(held, made, strict=True):
        if into is not source:
            into.copy_(source)
