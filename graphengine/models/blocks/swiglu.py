"""A SwiGLU feed-forward: down(silu(gate x) * up x).

Letters: N lanes, H hidden, F ffn width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels import (
    DecodeLanes,
    Residual,
    fuses_swiglu,
    linear,
    linear_swiglu,
    swiglu,
)
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    chunk_product,
)
from graphengine.models.contract import DecodeLaunch, Linear, Linears, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Swiglu:
    """Sizes and switches of the block; `norm_eps` is of the norm that its input needs."""

    hidden_size: int
    ffn_size: int
    norm_eps: float
    bias: bool = False

    @property
    def linears(self) -> Linears:
        """In the order of a step."""
        return {
            "gate_up": Linear("swiglu", 2 * self.ffn_size, self.hidden_size, shard="rows"),
            "down": Linear("residual", self.hidden_size, self.ffn_size, shard="columns"),
        }

    def prefill_width(self, *, fused: bool = False) -> int:
        """Values of a lane in `PrefillScratch`."""
        return self.ffn_size if fused else 2 * self.ffn_size

    def allocate(self, *, device: str, dtype: torch.dtype) -> SwigluWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden, ffn = self.hidden_size, self.ffn_size
        return SwigluWeights(
            block=self,
            gate_up=new(2 * ffn, hidden),
            gate_up_bias=new(2 * ffn) if self.bias else None,
            down=new(hidden, ffn),
            down_bias=new(hidden) if self.bias else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SwigluWeights:
    """The block's weights; gate and up are one matrix `[gate F | up F]`."""

    block: Swiglu
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def stored(self, prefix: str) -> dict[str, Weight]:
        """By the names that Hugging Face's decoders of Llama's lineage have under `prefix`."""
        names = {f"{prefix}down_proj.weight": Weight(self.down, 1)}
        for kind, fused in (("weight", self.gate_up), ("bias", self.gate_up_bias)):
            if fused is not None:
                gate, up = fused.chunk(2)
                names[f"{prefix}gate_proj.{kind}"] = Weight(gate, 0)
                names[f"{prefix}up_proj.{kind}"] = Weight(up, 0)
        if self.down_bias is not None:
            names[f"{prefix}down_proj.bias"] = Weight(self.down_bias)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        optional = (self.gate_up_bias, self.down_bias)
        return [self.gate_up, self.down, *(tensor for tensor in optional if tensor is not None)]

    def is_fused(self, lanes: int) -> bool:
        """Whether a chunk of this many lanes has gate, up and SwiGLU in one kernel."""
        return self.gate_up_bias is None and fuses_swiglu(self.gate_up, lanes)

    def decode(
        self, row: DecodeLanes, residual: Residual, next_norm: Tensor, launch: DecodeLaunch
    ) -> Residual:
        """The block for `row`'s tokens: two kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place but for its squares.
        """
        gated = linear(
            residual.scaled,
            self.gate_up,
            row.slot,
            squares_TN=residual.squares,
            eps=self.block.norm_eps,
            bias=self.gate_up_bias,
            swiglu=True,
            plan=launch.plans["gate_up"],
            launch=launch,
        )
        return add_product(
            gated,
            self.down,
            row.slot,
            residual,
            next_norm,
            bias=self.down_bias,
            plan=launch.plans["down"],
            launch=launch,
        )

    def prefill(
        self, stream: Tensor, next_norm: Tensor, slot: Tensor, scratch: PrefillScratch
    ) -> None:
        """The block for a chunk, of the normed `scratch.h`.

        `stream`, float32, is updated in place, and `scratch.h` becomes it after `next_norm`.
        """
        ffn, h, pdl = self.block.ffn_size, scratch.h, scratch.launch.pdl
        if scratch.fused:
            gated = scratch.take(ffn)
            linear_swiglu(h, self.gate_up, out=gated, pdl=pdl)
        else:
            gate_up = scratch.take(2 * ffn)
            chunk_product(h, self.gate_up, self.gate_up_bias, out=gate_up)
            gated = swiglu(gate_up, slot, out=gate_up[:, :ffn], pdl=pdl)
        add_chunk_product(
            gated,
            self.down,
            self.down_bias,
            stream,
            next_norm,
            slot,
            scratch,
            eps=self.block.norm_eps,
            out=h,
        )
