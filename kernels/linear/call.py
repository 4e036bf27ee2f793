"""The operands and launch options of one linear of decode, and their checks.

Letters: N lanes, K input features, M weight rows, T groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels.core.devices import H200, device_of
from graphengine.kernels.core.lanes import check_lanes, check_rows, check_vector
from graphengine.kernels.core.launching import ALONE, Launch
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.packed_cut import check_packed_plan, packed_plan
from graphengine.kernels.linear.plans import (
    FMA_LANES,
    LinearKind,
    LinearPlan,
    check_kind,
    heuristic_plan,
)
from graphengine.kernels.linear.residual import check_squares

MAX_LANES = 64
"""Most lanes of a linear."""

AnyWeight = torch.Tensor | PackedWeight
"""A linear's weight [M, K]: in 16 or 32 bits, or packed in 8 or 4."""


class LinearCall(NamedTuple):
    """The product x @ weight^T / rms (+ delta + bias) of each live lane."""

    x_NK: torch.Tensor
    """float32, float16 or bfloat16; dense rows, any stride between them. Rows that do not start at
    multiples of 16 bytes may cost a copy."""
    weight_MK: AnyWeight
    """In x's dtype, dense rows, any stride between them; it may exceed 2**31 elements. Or packed:
    then on a GPU x has 16 bits, and K is a multiple of 8."""
    slot_N: torch.Tensor
    """int32, -1 = padded lane."""
    squares_TN: torch.Tensor | None = None
    """float32: rms is sqrt(sum(squares) / K + eps), as `residual.Residual` has it. None: it is 1.
    """
    eps: float = 0.0
    bias: torch.Tensor | None = None
    """[M] in x's dtype."""
    delta_NM: torch.Tensor | None = None
    """Dense, of x's dtype or float32: added to each lane's product, before parts of it are added up
    over ranks. Adding -0.0 changes no bit."""
    plan: LinearPlan | None = None
    """How the weight is cut; None: heuristically, in the family `dot`, without splits."""
    launch: Launch = ALONE
    """A plan that splits K wants at least `arrivals_needed(plan, M)` of its counters. With PDL the
    next launch too may overlap this one, if `plan.overlap`. Only weights, which no kernel writes,
    are loaded early."""

    @property
    def lanes(self) -> int:
        return self.x_NK.shape[0]

    @property
    def rows(self) -> int:
        return self.weight_MK.shape[0]

    @property
    def groups(self) -> int:
        """T; 0 without squares."""
        return 0 if self.squares_TN is None else self.squares_TN.shape[0]

    @property
    def cut(self) -> LinearPlan:
        """The plan of a call that has one."""
        assert self.plan is not None, "neither checked nor planned"
        return self.plan

    def planned(self, kind: LinearKind) -> LinearCall:
        """This call with a plan: its own, or a heuristic one."""
        if self.plan is not None:
            return self
        weight_MK, (M, K) = self.weight_MK, self.weight_MK.shape
        device = device_of(self.x_NK) or H200
        if isinstance(weight_MK, torch.Tensor):
            plan = heuristic_plan(kind, M, K, weight_MK.dtype, "dot", device)._replace(splits=1)
        else:
            plan = packed_plan(weight_MK.format, M, K, "dot", device)
        return self._replace(plan=plan)

    def checked(self, kind: LinearKind) -> LinearCall:
        """This call with a plan, and with its inputs in the order of the weight's columns.

        ValueError for operands that do not fit each other.
        """
        x_NK, weight_MK = self.x_NK, self.weight_MK
        check_rows(x_NK=x_NK)
        _check_weight(x_NK, weight_MK, kind)
        lanes, K = x_NK.shape
        if lanes > MAX_LANES:
            raise ValueError(f"linear takes 1 to {MAX_LANES} lanes, not {lanes}")
        if weight_MK.shape[1] != K:
            raise ValueError(f"x has K={K} input features, the weight {weight_MK.shape[1]}")
        check_lanes(lanes, slot_N=self.slot_N)
        if self.squares_TN is not None:
            check_squares(self.squares_TN, lanes)
        if self.bias is not None:
            check_vector("bias", self.bias, self.rows, x_NK.dtype)
        if self.delta_NM is not None:
            _check_delta(self.delta_NM, x_NK, self.rows)
        call = self.planned(kind)
        _check_plan(call.cut, kind, weight_MK, lanes)
        if isinstance(weight_MK, torch.Tensor):
            return call
        x_NK, weight_MK = in_order(x_NK, weight_MK)
        return call._replace(x_NK=x_NK, weight_MK=weight_MK)


def _check_delta(delta_NM: torch.Tensor, x_NK: torch.Tensor, rows: int) -> None:
    shape, dtypes = (len(x_NK), rows), (x_NK.dtype, torch.float32)
    if delta_NM.shape != shape or delta_NM.dtype not in dtypes or not delta_NM.is_contiguous():
        raise ValueError(
            f"delta must be a dense {x_NK.dtype} or float32 {list(shape)}, not {delta_NM.dtype} "
            f"{list(delta_NM.shape)} with strides {delta_NM.stride()}"
        )


def in_order(x_NK: torch.Tensor, weight_MK: PackedWeight) -> tuple[torch.Tensor, PackedWeight]:
    """The inputs in the order of the weight's columns, and the weight without its `order`."""
    if weight_MK.order is None:
        return x_NK, weight_MK
    return x_NK.index_select(1, weight_MK.order), weight_MK._replace(order=None)


def _check_weight(x_NK: torch.Tensor, weight_MK: AnyWeight, kind: LinearKind) -> None:
    M = weight_MK.shape[0]
    if not isinstance(weight_MK, torch.Tensor):
        if weight_MK.swiglu != (kind == "swiglu"):
            raise ValueError(
                f"{M} packed rows with swiglu={weight_MK.swiglu} do not fit the epilogue {kind}"
            )
        return
    check_rows(weight_MK=weight_MK)
    if x_NK.dtype != weight_MK.dtype:
        raise ValueError(f"x is {x_NK.dtype}, the weight {weight_MK.dtype}")
    if kind == "swiglu" and M % 2:
        raise ValueError(f"swiglu needs as many gate rows as up rows, not {M} rows in all")


def _check_plan(plan: LinearPlan, kind: LinearKind, weight_MK: AnyWeight, lanes: int) -> None:
    check_kind(kind, plan.family)
    if plan.family == "fma" and lanes > FMA_LANES:
        raise ValueError(f"the fma family takes 1 to {FMA_LANES} lanes, not {lanes}")
    if not isinstance(weight_MK, torch.Tensor):
        check_packed_plan(plan, weight_MK.format)
    elif plan.family == "fma" and plan.splits > 1:
        raise ValueError(f"the fma family does not split K: {plan}")
