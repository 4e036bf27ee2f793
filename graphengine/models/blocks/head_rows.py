"""In which order the rows of queries, keys, values and gates lie in one matrix.

Where RoPE rotates one of n parts of a head, the 2 * n pieces of queries and keys are reordered: the
even ones come first. Then each rotated value is half a head from its partner, as the kernels have
it. Where RoPE pairs neighbours, a head has a part for each pair of them, all of which are rotated.
Scores are sums over a head, and stay the same. Gates are reordered like queries, with which
they share a tensor in checkpoints, and `gate_heads` finds them again.

Where RoPE rotates another part of a head, the rest follows each half of that part by halves.

Letters: D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.models.weights import Weight


class HeadRows(NamedTuple):
    """Sizes of a matrix of queries, keys and values, and gates after them.

    rotated  values of a head that RoPE rotates, the first ones in a checkpoint
    gated    whether there are gates; each head's follow its query in a checkpoint
    linears  the linears that exist, by the first letters of queries, keys and values
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated: int
    gated: bool
    linears: str = "qkv"

    @property
    def parts(self) -> int:
        """How many parts a head has, of which RoPE rotates the first; 0: it does not divide into
        whole parts.
        """
        return 0 if self.head_dim % self.rotated else self.head_dim // self.rotated

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def of_linears(self) -> list[tuple[str, int]]:
        """The rows of each of a checkpoint's linears, by the first letter of its name."""
        queries = self.q_size * (2 if self.gated else 1)
        rows = [("q", queries), ("k", self.kv_size), ("v", self.kv_size)]
        return rows[: len(self.linears)]

    def order(self) -> Tensor | None:
        """The checkpoint's row for each row; None: rows are in the checkpoint's order."""
        if self.parts == 1 and not self.gated:
            return None
        if not self.parts:
            turned = self.order_of(self.num_heads + self.num_kv_heads)
            assert turned is not None, f"{self=}"
            start = len(turned)
            return torch.cat((turned, torch.arange(start, start + self.kv_size)))
        order = torch.empty(sum(rows for _, rows in self.of_linears), dtype=torch.int64)
        start = 0
        for (_, rows), view in zip(self.of_linears, self.of_checkpoint(order), strict=True):
            view.copy_(torch.arange(start, start + rows).view(view.shape))
            start += rows
        return order

    def order_of(self, heads: int) -> Tensor | None:
        """The checkpoint's row for each row of this many heads; None: a view gives the order."""
        if self.parts:
            return None
        rest = self.head_dim - self.rotated
        sizes = [self.rotated // 2] * 2 + [rest // 2] * 2
        parts = torch.split(torch.arange(self.head_dim), sizes)
        of_head = torch.cat([parts[index] for index in (0, 2, 1, 3)])
        return (torch.arange(heads)[:, None] * self.head_dim + of_head).flatten()

    def of_checkpoint(self, rows: Tensor) -> list[Tensor]:
        """Rows as a checkpoint has them: a view for each of its linears."""
        if not self.gated:
            q, *others = torch.split(rows, [count for _, count in self.of_linears])
            return [self.of_heads(q), *map(self.of_heads, others[:1]), *others[1:]]
        q, k, v, _ = torch.split(rows, [self.q_size, self.kv_size, self.kv_size, self.q_size])
        # The distance from a head's query to its gates is the same for all heads.
        of_heads = self.of_heads(q, always=True)
        row = rows.stride(0)
        q = rows.as_strided(
            (self.num_heads, 2, *of_heads.shape[1:]),
            (self.head_dim * row, (self.q_size + 2 * self.kv_size) * row, *of_heads.stride()[1:]),
            rows.storage_offset(),
        )
        return [q, self.of_heads(k), v]

    def of_heads(self, rows: Tensor, *, always: bool = False) -> Tensor:
        """Rows of heads as a checkpoint has them: a view `[heads, parts, 2, D / parts / 2, ...]`.

        Returns the rows themselves where `order_of` gives the order.

        always  make the view even where the rows are in the checkpoint's order
        """
        if not self.parts or (self.parts == 1 and not always):
            return rows
        width = self.head_dim // (2 * self.parts)
        return rows.view(-1, 2, self.parts, width, *rows.shape[1:]).transpose(1, 2)

    def stored(self, pattern: str, rows: Tensor) -> dict[str, Weight]:
        """Where a checkpoint has the weight or the bias of each linear.

        pattern  its name there, with "{}" for the first letter of the linear's
        """
        counts = (self.num_heads, self.num_kv_heads, 0)
        return {
            pattern.format(name): Weight(part, 0, order=self.order_of(count) if count else None)
            for name, part, count in zip(
                self.linears, self.of_checkpoint(rows), counts, strict=False
            )
        }

    def fused(self, bias: Tensor) -> Weight:
        """Where a checkpoint has the bias of one linear of queries, keys and values."""
        return Weight(bias, 0, tuple(count for _, count in self.of_linears), self.order())

    def vector(self, norm: Tensor) -> Weight:
        """Where a checkpoint has the weight of a norm of one head, or of several together."""
        order = self.order_of(len(norm) // self.head_dim)
        return Weight(self.of_heads(norm), order=order)
