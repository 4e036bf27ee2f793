"""`short_conv.py` in plain PyTorch: a token after the other, with that module's letters."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_lanes


def short_conv_reference(
    bcx_TX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    kept_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The tokens of one slot, at consecutive positions, live ones first; y into `out`."""
    lanes = live_lanes(slot_T)
    if not len(lanes):
        return out
    entries, taps = kept_SEC.shape[1], weight_CD.shape[1]
    slot, position = slot_T[:1].long(), position_T[lanes].long()
    earlier = position[0] + torch.arange(1 - taps, 0, device=position.device)
    kept = kept_SEC[slot, earlier % entries]
    kept = torch.where((earlier >= 0)[:, None], kept, torch.zeros_like(kept))
    b, c, x = bcx_TX[lanes].chunk(3, dim=1)
    g = (b.float() * x.float()).to(bcx_TX.dtype)
    window = torch.cat([kept, g]).float()
    weight = weight_CD.float()
    y = torch.zeros_like(g, dtype=torch.float32)
    if bias_C is not None:
        y += bias_C.float()
    for tap in range(taps):
        y = torch.addcmul(y, window[tap : tap + len(g)], weight[:, tap])
    out[lanes] = (c.float() * y).to(out.dtype)
    newest = slice(max(0, len(g) - entries), None)
    kept_SEC[slot, position[newest] % entries] = g[newest]
    return out
