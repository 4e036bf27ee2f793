"""Options that change a query's scores besides the scale: soft cap, window and sinks.

softcap  0, or c > 0: a score s becomes c * tanh(s / c), before anything is hidden (Gemma 2)
window   0, or w > 0: a query at position p sees keys p - w + 1 .. p (Mistral; Beltagy et al. 2020)
sinks    None, or float32 [Q]: for each query head one more score in the softmax's denominator,
         neither scaled nor capped, without a value (gpt-oss)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_WINDOW = 2**30
MAX_SOFTCAP = 1e6


def check_scores(
    *, window: int, sinks: torch.Tensor | None, softcap: float, heads: int, device: torch.device
) -> None:
    """Raise ValueError unless the three options are valid for this many query heads."""
    if not 0 <= window <= MAX_WINDOW:
        raise ValueError(f"window={window} must be in 0..{MAX_WINDOW}; 0 is no window")
    if not 0 <= softcap <= MAX_SOFTCAP:
        raise ValueError(f"softcap={softcap} must be in 0..{MAX_SOFTCAP:g}; 0 is no cap")
    if sinks is None:
        return
    if (
        sinks.shape != (heads,)
        or sinks.dtype != torch.float32
        or not sinks.is_contiguous()
        or sinks.device != device
    ):
        raise ValueError(
            f"sinks must be a dense {torch.float32} [{heads}] on {device}, "
            f"not {sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        )


def first_key_of(position: int, window: int) -> int:
    """The first key that a query at this position sees."""
    return max(position - window + 1, 0) if window else 0


def softmax_reference(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of `scores` [..., keys]; `sinks` broadcast with [...]."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks.expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


@triton.jit
def tanh(x):
    """Hyperbolic tangent of any float32, within 2e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
