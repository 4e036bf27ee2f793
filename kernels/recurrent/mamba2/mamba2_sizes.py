"""Sizes and parameters of a Mamba2 layer; letters as in `mamba2.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphengine.kernels.recurrent.pieces import piece_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Sizes:
    """Sizes of a layer: H heads of P values, G groups, K values of state; and the limits of dt.

    width  tokens that the convolution sees, its own among them
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    width: int
    dt_min: float = 0.0
    dt_max: float = math.inf

    def __post_init__(self) -> None:
        if min(self.heads, self.head_dim, self.groups, self.state_size, self.width) < 1:
            raise ValueError(f"sizes must be positive: {self}")
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads are not a multiple of {self.groups} groups")
        if not 0 <= self.dt_min <= self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} and dt_max={self.dt_max} are no limits of dt")

    @property
    def inner(self) -> int:
        """I: values of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """C: values of x, B and C, in this order."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """X: values of z, of the convolution's inputs and of dt, in this order."""
        return self.inner + self.channels + self.heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state's entry: `(H, P, K)`."""
        return self.heads, self.head_dim, self.state_size

    def scan_shapes(self, lanes: int, prompts: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Shapes of what the kernels of a chunk pass to each other, in float32: states, decays.

        prompts  number of prompts whose chunks a launch takes; None: it takes one chunk
        """
        pieces = piece_count(lanes, prompts)
        return (pieces, *self.state_shape), (pieces, self.heads)

    def scan_bytes(self, lanes: int, prompts: int | None = None) -> int:
        """Bytes of tensors with `scan_shapes`."""
        return 4 * sum(map(math.prod, self.scan_shapes(lanes, prompts)))


class Mamba2Params(NamedTuple):
    """A layer's weights other than those of its products and its norm; any float dtype, dense.

    conv_weight  `[C, D]`, the oldest token first
    conv_bias    `[C]`; None: there is none
    dt_bias, a_log, skip  `[H]`; the last is known as D
    """

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    a_log: torch.Tensor
    skip: torch.Tensor
