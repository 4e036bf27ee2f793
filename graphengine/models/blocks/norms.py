"""Norms on both sides of a block, as Gemma has them, and norm weights that are stored less 1.

A block reads the residual stream after a norm. Where another norm follows it, the stream gets the
normed output: x += post(block(norm(x))).

Letters: H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sandwich(NamedTuple):
    """The weights [H] of the norm after a block, and of the one that reads the stream next.

    eps     of the first
    normed  whether there is the second; else the stream is read as it is, and `following` is all
            ones
    """

    post: Tensor
    following: Tensor
    eps: float
    normed: bool = True


NextNorm = Tensor | Sandwich
"""What lies between a block and the next one: the norm that reads the stream, or two norms."""


def plus_one(weight: Tensor) -> Tensor:
    """1 + weight in float32, as transformers computes it: in 16 bits the weight loses its last
    bits.
    """
    return weight.float() + 1.0
