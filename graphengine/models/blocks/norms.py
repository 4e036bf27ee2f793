"""Norms of the stream: RMSNorm, LayerNorm, and norms on both sides of a block, as Gemma has them.

A block reads the residual stream after a norm. Where another norm follows it, the stream gets the
normed output: x += post(block(norm(x))).

Letters: H hidden.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

NormKind = Literal["rms", "layer", "layer_biased", "layer_plain"]
"""RMSNorm; or LayerNorm without a bias, with one, or without weights too."""


class LayerNorm(NamedTuple):
    """The weights [H] of a LayerNorm that reads the stream."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class Sandwich(NamedTuple):
    """The weights [H] of the norm after a block, and of the one that reads the stream next.

    eps     of the first
    normed  whether there is the second; else the stream is read as it is, and `following` is all
            ones
    factor  `[1]`: what the stream is multiplied by between the two; None: nothing
    """

    post: Tensor
    following: Tensor
    eps: float
    normed: bool = True
    factor: Tensor | None = None


ReadNorm = Tensor | LayerNorm
"""The norm that reads the stream: an RMSNorm's weight, or a LayerNorm."""
NextNorm = ReadNorm | Sandwich
"""What lies between a block and the next one: the norm that reads the stream, or two norms."""


def plus_one(weight: Tensor) -> Tensor:
    """1 + weight in float32, as transformers computes it: in 16 bits the weight loses its last
    bits.
    """
    return weight.float() + 1.0
