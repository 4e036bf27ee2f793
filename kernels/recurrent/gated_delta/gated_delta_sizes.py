"""Sizes and parameters of a gated delta net; letters as in `gated_delta.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphengine.kernels.recurrent.pieces import PIECE, piece_count


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaSizes:
    """Sizes of a layer: G heads of queries and keys, H heads of values, K and V values of a head,
    and D taps of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        if min(sizes) < 1 or self.taps < 2:
            raise ValueError(f"sizes must be positive, and taps at least 2: {self}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} heads of values are no multiple of {self.key_heads} of keys"
            )

    @property
    def inner(self) -> int:
        """I: values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: queries, keys and values, in this order, which are convolved."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def projected(self) -> int:
        """X: values that a token is projected to: channels, z, b and a."""
        return self.channels + self.inner + 2 * self.value_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state's entry: `(H, K, V)`."""
        return self.value_heads, self.key_dim, self.value_dim

    def scan_shapes(self, lanes: int, prompts: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Shapes of what the kernels of a chunk pass to each other, in float32: q, k, w, u, met,
        decays, states.

        prompts  number of prompts whose chunks a launch takes; None: it takes one chunk
        """
        pieces, (H, K, V) = piece_count(lanes, prompts), self.state_shape
        return (
            *((H, lanes, K),) * 3,
            (H, lanes, V),
            (H, lanes, PIECE),
            (pieces, H),
            (pieces, H, K, V),
        )

    def scan_bytes(self, lanes: int, prompts: int | None = None) -> int:
        """Bytes of tensors with `scan_shapes`."""
        return 4 * sum(map(math.prod, self.scan_shapes(lanes, prompts)))


class GatedDeltaParams(NamedTuple):
    """A layer's weights other than those of its products.

    conv_weight  [C, D] in the model's dtype
    a_log        float32 [H]
    dt_bias      float32 [H]
    norm         [V] in the model's dtype, of the norm of each head's output
    """

    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
