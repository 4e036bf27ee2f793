"""Chooses a plan for each of decode's linears, and fingerprints all that a step's bits depend on.

The user's table of measured plans wins over the shipped one (`tuning_tables.py`); linears in
neither table get `heuristic_plan`. Nothing is measured here.

Plans are part of the numerics: another plan may round differently and so, now and then, give other
tokens. `numerics_id` names all that the bits depend on, and a damaged table is an error rather than
a reason to fall back silently.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Literal

import torch

from graphengine.kernels.core.devices import H200, Device, device_of
from graphengine.kernels.linear.plans import LinearPlan, RowFamily
from graphengine.models.linears import ByLinear, LinearPlans, Linears, heuristic_linear_plan
from graphengine.models.plans.tuning_tables import (
    Table,
    TuningKey,
    device_name,
    dtype_name,
    read_user_table,
    shipped_table,
)

log = logging.getLogger(__name__)

PlanSource = Literal["user", "shipped", "heuristic"]

NUMERICS_VERSION = 12
"""Raise it with every change to a kernel, also of prefill, that may change the bits of a result
while all plans stay the same: another order of summation, another rounding, another formula or
constant, such as those of `kernels/attention/prefill.py`."""


class PlanOrigins(ByLinear[PlanSource]):
    """Where each plan of a `LinearPlans` came from."""

    __slots__ = ()

    @property
    def untuned(self) -> tuple[str, ...]:
        """Linears that got the heuristic."""
        return tuple(name for name, source in self.items() if source == "heuristic")

    def __str__(self) -> str:
        different = set(self.values())
        if len(different) == 1:
            return different.pop()
        return ", ".join(f"{name} {source}" for name, source in self.items())


def choose_plans(
    linears: Linears, dtype: torch.dtype, family: RowFamily, device: torch.device | str
) -> tuple[LinearPlans, PlanOrigins]:
    """A plan for each linear of a decode step: the user's, else the shipped, else the heuristic.

    On a GPU, linears that no table knows are logged at INFO. (On a CPU, plans are unused.)

    Raises:
        ValueError: a table is malformed or cannot be read; the message has its path. It is not
            skipped: other plans may give other tokens. (If the user has no cache directory, or may
            not enter it, there is no table.)
    """
    gpu = device_name(device)
    tables: dict[PlanSource, Table] = {
        "user": read_user_table(gpu),
        "shipped": shipped_table(gpu),
    }
    found = device_of(torch.device(device)) or H200
    plans: dict[str, LinearPlan] = {}
    sources: dict[str, PlanSource] = {}
    for name, linear in linears.items():
        key = TuningKey.of(linear, family, dtype)
        plans[name], sources[name] = choose_plan(key, tables, found)
    chosen = PlanOrigins(sources)
    if chosen.untuned and torch.device(device).type == "cuda":
        missing = (
            f"{name} {linears[name].rows} x {linears[name].columns}" for name in chosen.untuned
        )
        log.info(
            "no tuned plan on %s for %s %s: %s; `graphengine tune --family %s` with `--checkpoint` "
            "or `--shape` measures them",
            gpu,
            family,
            dtype_name(dtype),
            ", ".join(missing),
            family,
        )
    return LinearPlans(plans), chosen


def choose_plan(
    key: TuningKey, tables: Mapping[PlanSource, Table], device: Device = H200
) -> tuple[LinearPlan, PlanSource]:
    """The plan of the first table that knows the weight, else the heuristic for this GPU."""
    for source, table in tables.items():
        if key in table:
            return table[key].plan, source
    return heuristic_linear_plan(key.linear, key.dtype, key.family, device), "heuristic"


def numerics_id(
    linears: Linears,
    plans: LinearPlans,
    *,
    dtype: torch.dtype,
    extra: Mapping[str, str | int | float | bool | None],
) -> str:
    """Fingerprint, 12 hexadecimal digits, of all that a step's bits depend on except the model.

    Two engines with equal ids, on one kind of GPU, compute the same bits. Settings that change only
    the speed are left out. `extra` adds facts from outside the linears, such as the length of
    attention's splits and, on a GPU, the version of Triton.
    """
    facts = {
        "version": NUMERICS_VERSION,
        "dtype": dtype_name(dtype),
        "linears": {
            name: _numerics(
                plan,
                leaves_squares=linears[name].kind == "residual",
                packed=linears[name].weight is not None,
            )
            for name, plan in plans.items()
        },
        "extra": dict(extra),
    }
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _numerics(
    plan: LinearPlan, *, leaves_squares: bool, packed: bool = False
) -> dict[str, str | int]:
    """The fields of a plan that place the elements of a sum.

    packed          whether the weight is packed, so that `block_m` decides the streams of a tile
    leaves_squares  whether the programs write sums of squares of their output, as programs with a
                    residual epilogue do (`kernels/linear/residual.py`)

    Warps matter in `dot` too: sums of squares are reduced over a tile that is spread over them.
    In `fma`, `block_m` decides how a tile is spread over threads; in both families it decides how
    many columns a sum of squares covers.
    """
    names = ["family", "block_k", "splits", "warps"]
    if plan.family == "fma" or leaves_squares or packed:
        names.append("block_m")
    return {name: getattr(plan, name) for name in names}
