"""Low-rank adapters of one linear, in static slots (Hu et al., LoRA, 2021).

A slot holds one adapter's A and B for the linear: y += scale * B (A x). A weight that is several
linears of a checkpoint (queries, keys and values; gates and ups) has an A for each of these parts,
and every row of B belongs to one part. B keeps the checkpoint's bits, as the scale multiplies the
float32 values between the two. An adapter of a lower rank has zeros after its own rows of A.

Letters: N lanes, K input features, M weight rows, A slots of adapters, P parts, R rank of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels.core.lanes import check_int32, check_rows, check_vector


class LoraSlots(NamedTuple):
    """One linear's matrices in every slot; their contents change, their addresses do not.

    down_AQK   [A, P * R, K] in x's dtype, dense: part p has rows p * R to p * R + R - 1
    up_AMR     [A, M, R] in x's dtype, dense
    scale_AP   float32, dense: factor of the part's product
    part_M     int32: the part that each weight row belongs to
    """

    down_AQK: torch.Tensor
    up_AMR: torch.Tensor
    scale_AP: torch.Tensor
    part_M: torch.Tensor

    @classmethod
    def new(
        cls,
        slots: int,
        part_M: torch.Tensor,
        *,
        parts: int,
        columns: int,
        rank: int,
        dtype: torch.dtype,
    ) -> LoraSlots:
        """Slots without an adapter, all zeros; on the device "meta" nothing is allocated."""
        device = part_M.device
        return cls(
            torch.zeros(slots, parts * rank, columns, dtype=dtype, device=device),
            torch.zeros(slots, len(part_M), rank, dtype=dtype, device=device),
            torch.zeros(slots, parts, device=device),
            part_M,
        )

    @property
    def rank(self) -> int:
        """R"""
        return self.up_AMR.shape[2]

    @property
    def parts(self) -> int:
        """P"""
        return self.scale_AP.shape[1]

    @property
    def rows(self) -> int:
        """M"""
        return self.up_AMR.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self)

    def check(self, x_NK: torch.Tensor) -> None:
        """ValueError, with both sizes, unless the slots fit each other and these inputs."""
        check_rows(x_NK=x_NK)
        slots, K = len(self.up_AMR), x_NK.shape[1]
        shapes = {
            "down": (self.down_AQK, (slots, self.parts * self.rank, K), x_NK.dtype),
            "up": (self.up_AMR, (slots, self.rows, self.rank), x_NK.dtype),
            "scale": (self.scale_AP, (slots, self.parts), torch.float32),
        }
        for name, (tensor, shape, dtype) in shapes.items():
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of {slots} slots must be a dense {dtype} {list(shape)}, not "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )
        check_int32(part_M=self.part_M)
        check_vector("part_M", self.part_M, self.rows, torch.int32)
