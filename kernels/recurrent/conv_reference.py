"""`conv.py` in plain PyTorch; letters as there."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_lanes


def causal_conv_reference(
    x_LC: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
) -> torch.Tensor:
    """Convolve the live lanes' inputs [L, C], tokens of one slot at consecutive positions, into
    float32 [L, C]. The newest inputs are written to the ring, as many as it holds.
    """
    count, entries, taps = len(x_LC), ring_SEC.shape[1], weight_CD.shape[1]
    if not count:
        return x_LC.float()
    lanes = live_lanes(slot_T)
    slot, position = slot_T[lanes[:1]].long(), position_T[lanes].long()
    earlier = position[0] + torch.arange(1 - taps, 0, device=position.device)
    before = ring_SEC[slot, earlier % entries]
    before = torch.where((earlier >= 0)[:, None], before, torch.zeros_like(before))
    window, weight = torch.cat([before, x_LC]).float(), weight_CD.float()
    y = torch.zeros_like(x_LC, dtype=torch.float32)
    if bias_C is not None:
        y += bias_C.float()
    for tap in range(taps):
        y = torch.addcmul(y, window[tap : tap + count], weight[:, tap])
    newest = slice(max(0, count - entries), None)
    ring_SEC[slot, position[newest] % entries] = x_LC[newest]
    return y
