"""`short_conv.py` in plain PyTorch; letters as there."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_lanes
from graphengine.kernels.recurrent.conv_reference import causal_conv_reference


def short_conv_reference(
    bcx_TX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Convolve tokens of one slot, at consecutive positions, live ones first; y goes to `out`."""
    lanes = live_lanes(slot_T)
    b, c, x = bcx_TX[lanes].chunk(3, dim=1)
    g = (b.float() * x.float()).to(bcx_TX.dtype)
    y = causal_conv_reference(g, weight_CD, bias_C, ring_SEC, slot_T, position_T)
    out[lanes] = (c.float() * y).to(out.dtype)
    return out
