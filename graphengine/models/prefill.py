"""A prompt's chunk through a layer of a dense decoder: products by the BLAS, the rest by kernels.

Letters: N or T lanes, H hidden, D head_dim, Q query heads, G kv heads, B KV blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from graphengine.kernels import (
    PrefillLanes,
    add_rms_norm,
    fuses_swiglu,
    linear_swiglu,
    rope_append,
    swiglu,
)

if TYPE_CHECKING:
    from graphengine.models.dense import DenseConfig, LayerContext, LayerWeights


class Attend(Protocol):
    """Attention of a chunk over one layer's cache, which holds the lanes' own keys and values."""

    def __call__(self, q_NQD: Tensor, kv: Tensor, *, out: Tensor) -> Tensor:
        """`out` `[N, Q*D]`, of `kv = [blocks, 2, block_size, G, D]`."""
        ...


def is_fused(layer: LayerWeights, lanes: int) -> bool:
    """Whether a chunk of so many lanes has gate, up and SwiGLU of a layer in one kernel."""
    return layer.gate_up_bias is None and fuses_swiglu(layer.gate_up, lanes)


class PrefillScratch:
    """What the layers of a chunk of T lanes compute in, one behind the other.

    One piece of memory, since each product's result is needed until the next one has read it and no
    longer: queries, keys and values, then the queries behind RoPE beside them, attention in place
    of the first and its output product in place of the second, gate and up in place of all, or what
    one kernel makes of them where it is `fused`.

    h         `[T, H]` in the dtype of `layer`'s weights: what each layer reads
    pdl       whether the kernels of a layer may be launched before what is in front of them is done
    outlived  whether `h` is memory of its own, so that keeping it does not keep the rest
    """

    def __init__(
        self,
        config: DenseConfig,
        layer: LayerWeights,
        lanes: int,
        *,
        pdl: bool = False,
        outlived: bool = False,
    ) -> None:
        self._lanes = lanes
        self.pdl = pdl
        self.fused = is_fused(layer, lanes)
        width = prefill_scratch_width(config, fused=self.fused)
        new, sizes = layer.gate_up.new_empty, [lanes * config.hidden_size, lanes * width]
        if outlived:
            h, self._memory = map(new, sizes)
        else:
            # One allocation: of 1 to 10 MB each takes 20 of a graph's pool.
            h, self._memory = torch.split(new(sum(sizes)), sizes)
        self.h = h.view(lanes, -1)

    def take(self, columns: int, *, behind: int = 0) -> Tensor:
        """`[T, columns]`, dense, behind as many columns' memory; it holds anything."""
        start = self._lanes * behind
        return self._memory[start : start + self._lanes * columns].view(self._lanes, columns)


def prefill_scratch_width(config: DenseConfig, *, fused: bool = False) -> int:
    """Values that `PrefillScratch` holds for each lane, beside `h`."""
    attention = config.qkv_size + max(config.q_size, config.hidden_size)
    return max(attention, config.ffn_size if fused else 2 * config.ffn_size)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def prefill_attention(
    layer: LayerWeights,
    lanes: PrefillLanes,
    kv: Tensor,
    block_table: Tensor,
    context: LayerContext,
    attend: Attend,
    scratch: PrefillScratch,
) -> Tensor:
    """The first half of a layer for a chunk: `[T, Q*D]` attention of the normed `scratch.h`.

    `kv`, the layer's cache, receives the keys and values of the live lanes. The result lies in
    `scratch`, in front of what the first product of `prefill_behind_attention` writes.
    """
    config = context.config
    qkv = scratch.take(config.qkv_size)
    q = scratch.take(config.q_size, behind=config.qkv_size)
    rope_append(
        _product(scratch.h, layer.qkv, layer.qkv_bias, qkv),
        context.cos,
        context.sin,
        kv,
        block_table,
        lanes.slot,
        lanes.position,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        q_norm_weight=layer.q_norm,
        k_norm_weight=layer.k_norm,
        eps=config.norm_eps,
        out=q.view(-1, config.num_heads, config.head_dim),
        pdl=scratch.pdl,
    )
    attended = scratch.take(config.q_size)
    return attend(q.view(-1, config.num_heads, config.head_dim), kv, out=attended)


def prefill_behind_attention(
    layer: LayerWeights,
    next_norm: Tensor,
    x: Tensor,
    attended: Tensor,
    slot: Tensor,
    context: LayerContext,
    scratch: PrefillScratch,
) -> None:
    """The other half: `scratch.h` becomes `x` behind `next_norm`.

    `x`, the float32 residual stream, is updated in place; `attended` is lost where it lies in
    `scratch`.
    """
    config, h = context.config, scratch.h
    norm: Any = {"eps": config.norm_eps, "out_dtype": h.dtype, "out": h, "pdl": scratch.pdl}
    output = scratch.take(config.hidden_size, behind=config.qkv_size)
    _product(attended, layer.output, layer.output_bias, output)
    add_rms_norm(x, output, layer.ffn_norm, slot, **norm)
    if scratch.fused:
        gated = scratch.take(config.ffn_size)
        linear_swiglu(h, layer.gate_up, out=gated, pdl=scratch.pdl)
    else:
        gate_up = scratch.take(2 * config.ffn_size)
        _product(h, layer.gate_up, layer.gate_up_bias, gate_up)
        gated = swiglu(gate_up, slot, out=gate_up[:, : config.ffn_size], pdl=scratch.pdl)
    _product(gated, layer.down, layer.down_bias, h)
    add_rms_norm(x, h, next_norm, slot, **norm)
