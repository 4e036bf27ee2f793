"""Tables of RoPE's angles, which all attention layers of a model share.

Letters: D head_dim, P positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables


class RopeTables(NamedTuple):
    """The tables that a model's attention layers share with those of its draft modules.

    cos, sin  float32 `[P, D/2]` of P = max_seq_len positions
    """

    cos: Tensor
    sin: Tensor
    max_seq_len: int

    @classmethod
    def of(
        cls, rope: RopeConfig, *, head_dim: int, max_seq_len: int, device: torch.device
    ) -> RopeTables:
        """The tables of this many positions."""
        tables = rope_tables(rope, head_dim=head_dim, max_positions=max_seq_len, device=device)
        return cls(*tables, max_seq_len)

    @classmethod
    def still(cls, *, head_dim: int, max_seq_len: int, device: torch.device) -> RopeTables:
        """Tables that rotate nothing, for attention without RoPE: queries and keys keep their
        bits.
        """
        half = (max_seq_len, head_dim // 2)
        return cls(torch.ones(half, device=device), torch.zeros(half, device=device), max_seq_len)

    @staticmethod
    def nbytes(head_dim: int, max_seq_len: int) -> int:
        """Bytes of both tables."""
        return max_seq_len * head_dim * 4
