"""Code shared by prefill's kernels for Hopper: descriptors; tiles and operands of packed weights.

Letters: N lanes, K input features, M weight rows, F ffn width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine.kernels.linear.gluon.packed_chunk_gluon import Factors
from graphengine.kernels.linear.packed import BLOCK_ROWS, PackedWeight
from graphengine.kernels.norm_rope.activation import Activation

# Programs a multiprocessor -> bytes of shared memory that each may use.
_SHARED = {1: 226 * 1024, 2: 113 * 1024 - 512}
# Registers a thread when a program of one warp group begins; it then takes those of other threads.
_REGISTERS = 128
_LEAST_STAGES, _MOST_STAGES = 3, 8


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that a program multiplies at a time; it does not affect the numerics.

    lanes        a power of two from 16 to 256
    warp_groups  of 64 rows each: 1 or 2, and 2 or 3 for packed experts
    """

    lanes: int
    warp_groups: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.warp_groups

    @property
    def programs(self) -> int:
        """Programs of a multiprocessor."""
        return 2 if self.warp_groups == 1 and self.lanes <= 64 else 1

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options."""
        return {"num_warps": 4, "maxnreg": _REGISTERS if self.warp_groups == 1 else None}

    def stages_of(self, step: int, outputs: int) -> int:
        """Steps of `step` bytes that fit shared memory, less `outputs` bytes on their way out.

        ValueError for too few.
        """
        stages = min(_MOST_STAGES, (_SHARED[self.programs] - outputs) // step)
        if stages < _LEAST_STAGES:
            raise ValueError(f"{self}: {stages} of {_LEAST_STAGES} steps of {step} bytes fit")
        return stages


class ChunkProduct(NamedTuple):
    """A product of a chunk's lanes, whose operands have been checked.

    x     [N, K]: values, or the codes of `LaneCodes`
    gate  of a SwiGLU, whose outputs are [N, F]; False: `out` is [N, M]
    delta [N, M], added to the products
    """

    x: torch.Tensor
    weight: PackedWeight
    bias: torch.Tensor | None
    out: torch.Tensor
    gate: Activation | Literal[False]
    pdl: bool
    delta: torch.Tensor | None = None

    @property
    def factors(self) -> Factors:
        """The factors on the products."""
        weight = self.weight
        return Factors(weight.scales, weight.zeros, weight.row_scales, self.bias, self.delta)

    def grid(self, tile: Tile, processors: int) -> tuple[int]:
        """Programs that go through all tiles, all running at once."""
        rows = triton.cdiv(len(self.weight.codes), tile.rows // BLOCK_ROWS)
        tiles = rows * triton.cdiv(len(self.x), tile.lanes)
        return (min(tiles, processors * tile.programs),)


def described(tensor: torch.Tensor, box: list[int], dtype: gl.dtype) -> TensorDescriptor:
    """A tensor's descriptor for the TMA. Past the edges it reads zeros and writes nothing."""
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor.from_tensor(tensor, box, layout)
