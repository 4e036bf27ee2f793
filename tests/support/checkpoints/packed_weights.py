"""Packers of 4 and 8 bits as AWQ's and GPTQ's documents describe them, number by number.

They are slow and plain: what reads such tensors is compared with what went in here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each place of a word holds, from the lowest bits, in AWQ's gemm."""


def packed_words(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Int32 [rows, columns * bits / 32] of numbers [rows, columns], the first in the lowest bits.

    order  which of a word's numbers each of its places holds
    """
    per_word = 32 // bits
    order = order or range(per_word)
    rows = []
    for row in numbers.tolist():
        words = []
        for start in range(0, len(row), per_word):
            word = sum(row[start + which] << bits * place for place, which in enumerate(order))
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def meaning(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Float32 [M, K] of codes [M, K], where column k is of group `groups[k]`.

    zeros, scales  [M, G]
    """
    return (codes - zeros[:, groups]).float() * scales[:, groups].float()


def awq_tensors(linear: str, codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Tensors of the gemm layout: all transposed, and packed along the rows of the weight."""
    return {
        f"{linear}.qweight": packed_words(codes.T, 4, AWQ_ORDER),
        f"{linear}.qzeros": packed_words(zeros.T, 4, AWQ_ORDER),
        f"{linear}.scales": scales.T.contiguous(),
    }


def gptq_tensors(
    linear: str,
    codes: Tensor,
    zeros: Tensor,
    scales: Tensor,
    groups: Tensor,
    bits: int,
    *,
    less_one: bool,
) -> dict[str, Tensor]:
    """Tensors of GPTQ: all transposed, codes packed along columns, zero points along rows.

    less_one  whether stored zero points are one less than they are, as in the first version
    """
    return {
        f"{linear}.qweight": packed_words(codes, bits).T.contiguous(),
        f"{linear}.qzeros": packed_words(zeros.T - int(less_one), bits),
        f"{linear}.scales": scales.T.contiguous(),
        f"{linear}.g_idx": groups.int(),
    }
