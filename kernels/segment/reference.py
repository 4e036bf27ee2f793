"""`segment.py` in plain PyTorch.

Letters: N lanes, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from graphengine.kernels.core.lanes import live_rows
from graphengine.kernels.segment.units import Stage


def segment_reference(
    x_NK: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor | None],
    stages: Sequence[Stage],
    slot_N: torch.Tensor,
    stream_NH: torch.Tensor,
    out: torch.Tensor,
    squares_TN: torch.Tensor | None,
    *,
    eps: float,
) -> None:
    """Run the stages of live lanes one after the other; inputs of a product are rounded."""
    live = live_rows(slot_N)
    x, dtype = x_NK[live], x_NK.dtype
    for stage, weight, norm in zip(stages, weights, norms, strict=True):
        y = x.float() @ weight.float().t()
        if stage.normed:
            mean = stream_NH[live].square().mean(dim=1, keepdim=True)
            y = y / torch.sqrt(mean + eps)
        if stage.kind == "swiglu":
            gate, up = y.chunk(2, dim=1)
            y = functional.silu(gate) * up
        elif stage.kind == "residual":
            assert norm is not None, f"{stage=}"
            stream_NH[live] += y
            y = stream_NH[live] * norm.float()
        x = y.to(dtype)
    out[live] = x
    if squares_TN is not None:
        groups = stream_NH[live].square().unflatten(1, (len(squares_TN), -1)).sum(dim=2)
        squares_TN[:, live] = groups.t()
