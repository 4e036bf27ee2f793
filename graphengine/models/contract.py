"""What a model tells the engine about itself: its linears by name, and what goes by these names.

A model, and a draft module, lists the weights that a decode step multiplies by. Plans, their
sources in the tuning tables, arrival counters and workspaces follow from that list alone, so that
nobody else needs to know which products a family has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self, TypeVar

import torch

from graphengine.kernels import (
    LinearKind,
    LinearPlan,
    RowFamily,
    arrivals_needed,
    heuristic_plan,
)


class Linear(NamedTuple):
    """A weight `[rows, columns]` of the decode step; `kind` names the epilogue of its kernel."""

    kind: LinearKind
    rows: int
    columns: int


Linears = Mapping[str, Linear]
"""By name, in the order in which a step runs them."""

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
        """The row family, which all linears of an engine share."""
        return next(iter(self.values())).family


def heuristic_plans(linears: Linears, dtype: torch.dtype, family: RowFamily) -> LinearPlans:
    """Plans for linears that no tuning table knows."""
    return LinearPlans(
        {
            name: heuristic_plan(linear.kind, linear.rows, linear.columns, dtype, family)
            for name, linear in linears.items()
        }
    )


def linear_arrivals(linears: Linears, plans: LinearPlans) -> int:
    """Arrival counters that the neediest of the linears uses; they share them."""
    return max(arrivals_needed(plans[name], linear.rows) for name, linear in linears.items())
