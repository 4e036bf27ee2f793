"""A dense decoder: grouped-query attention with RoPE, RMSNorm before each block, SwiGLU.

Llama 3, Qwen2 and Qwen3 are this program with other settings; their files map a checkpoint's config
onto `DenseConfig`. `decode` runs a few rows through five fused kernels a layer; `prefill` runs the
tokens of a chunk through the BLAS, but for gate and up where `linear_swiglu` is faster. The bits of
both depend on the number of lanes, which for a chunk follows from the prompt alone.

Letters: N lanes, H hidden, D head_dim, Q query heads, G kv heads, F ffn width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.kernels import (
    PREFILL_ARRIVALS,
    DecodeLanes,
    PrefillLanes,
    Residual,
    RopeConfig,
    decode_attention,
    decode_attention_arrivals,
    embed,
    linear,
    linear_residual,
    rms_norm,
    rope_tables,
)
from graphengine.models.contract import Linear, LinearPlans, Linears, linear_arrivals
from graphengine.models.prefill import (
    Attend,
    PrefillScratch,
    is_fused,
    prefill_attention,
    prefill_behind_attention,
)

Destinations = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """Sizes and switches of a dense decoder, as a family reads them from `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Of q, k, v and the output."""
    qkv_bias: bool = False
    """Of q, k and v alone."""
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def linears(self) -> Linears:
        """Of a decode step: those of each layer, and lm_head."""
        hidden, ffn = self.hidden_size, self.ffn_size
        return {
            "qkv": Linear("store", self.qkv_size, hidden),
            "output": Linear("residual", hidden, self.q_size),
            "gate_up": Linear("swiglu", 2 * ffn, hidden),
            "down": Linear("residual", hidden, ffn),
            "lm_head": Linear("sample", self.vocab_size, hidden),
        }

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's KV block: `[2, block_size, G, D]`."""
        return (2, block_size, self.num_kv_heads, self.head_dim)

    def rope_bytes(self, max_seq_len: int) -> int:
        """Of the float32 cosines and sines of so many positions."""
        return max_seq_len * self.head_dim * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer, laid out for the kernels: q, k and v are one matrix, gate and up another."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def named(self, config: DenseConfig, prefix: str) -> Destinations:
        """Checkpoint names under `prefix` -> the views of these weights that hold them."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
        names: Destinations = {
            f"{prefix}input_layernorm.weight": self.input_norm,
            f"{prefix}post_attention_layernorm.weight": self.ffn_norm,
            f"{attention}o_proj.weight": self.output,
            f"{mlp}down_proj.weight": self.down,
        }
        for kind, fused_qkv, fused_gate_up in (
            ("weight", self.qkv, self.gate_up),
            ("bias", self.qkv_bias, self.gate_up_bias),
        ):
            if fused_qkv is not None:
                for name, part in zip("qkv", torch.split(fused_qkv, qkv_sizes), strict=True):
                    names[f"{attention}{name}_proj.{kind}"] = part
            if fused_gate_up is not None:
                gate, up = fused_gate_up.chunk(2)
                names |= {f"{mlp}gate_proj.{kind}": gate, f"{mlp}up_proj.{kind}": up}
        optional = {
            f"{attention}o_proj.bias": self.output_bias,
            f"{mlp}down_proj.bias": self.down_bias,
            f"{attention}q_norm.weight": self.q_norm,
            f"{attention}k_norm.weight": self.k_norm,
        }
        return names | {name: tensor for name, tensor in optional.items() if tensor is not None}

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        values = (getattr(self, name) for name in LayerWeights.__slots__)
        return [value for value in values if value is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    """All weights, on one device, in the model dtype; where they are tied lm_head is embedding."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor

    def named(self, config: DenseConfig) -> Destinations:
        """Checkpoint tensor names -> the views that are to hold them."""
        names: Destinations = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        if not config.tie_embeddings:
            names["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            names |= layer.named(config, f"model.layers.{index}.")
        return names

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors()}.values())

    def tensors(self) -> list[Tensor]:
        """Every weight tensor, tied ones twice."""
        per_layer = [tensor for layer in self.layers for tensor in layer.tensors()]
        return [self.embedding, self.final_norm, self.lm_head, *per_layer]


def allocate_weights(config: DenseConfig, *, device: str, dtype: torch.dtype) -> DenseWeights:
    """Uninitialised weights of the right shapes; `device="meta"` allocates nothing."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden = config.hidden_size
    layers = tuple(
        allocate_layer(config, device=device, dtype=dtype) for _ in range(config.num_layers)
    )
    embedding = new(config.vocab_size, hidden)
    return DenseWeights(
        embedding=embedding,
        layers=layers,
        final_norm=new(hidden),
        lm_head=embedding if config.tie_embeddings else new(config.vocab_size, hidden),
    )


def allocate_layer(config: DenseConfig, *, device: str, dtype: torch.dtype) -> LayerWeights:
    """`allocate_weights` for one layer."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def maybe(condition: bool, *shape: int) -> Tensor | None:
        return new(*shape) if condition else None

    hidden, ffn = config.hidden_size, config.ffn_size
    return LayerWeights(
        input_norm=new(hidden),
        qkv=new(config.qkv_size, hidden),
        qkv_bias=maybe(config.attention_bias or config.qkv_bias, config.qkv_size),
        q_norm=maybe(config.qk_norm, config.head_dim),
        k_norm=maybe(config.qk_norm, config.head_dim),
        output=new(hidden, config.q_size),
        output_bias=maybe(config.attention_bias, hidden),
        ffn_norm=new(hidden),
        gate_up=new(2 * ffn, hidden),
        gate_up_bias=maybe(config.mlp_bias, 2 * ffn),
        down=new(hidden, ffn),
        down_bias=maybe(config.mlp_bias, hidden),
    )


def arrival_counters(config: DenseConfig, linears: Linears, plans: LinearPlans, lanes: int) -> int:
    """Counters that the kernels of a step share: what the neediest of them uses.

    linears  those of the step, a draft module's own among them
    """
    attention = decode_attention_arrivals(
        lanes, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
    )
    return max(PREFILL_ARRIVALS, attention, linear_arrivals(linears, plans))


# The fewest rows a program of a plan that splits.
_LEAST_SPLIT_ROWS = 16


def most_arrival_counters(model: DenseConfig, lanes: int) -> int:
    """What `arrival_counters` comes to at most, whatever the plans."""
    widest = max(linear.rows for linear in model.linears.values())
    attention = decode_attention_arrivals(
        lanes, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads
    )
    return max(PREFILL_ARRIVALS, attention, 2 * -(-widest // _LEAST_SPLIT_ROWS))


class DecodeLaunch(NamedTuple):
    """What the decode kernels of one engine share besides the model.

    `split_tokens` is attention's; `arrivals` is int32 and zero between kernels; `pdl` says how they
    are launched. Each `tokens_per_row` lanes are tokens of one slot, at consecutive positions.
    """

    plans: LinearPlans
    split_tokens: int
    arrivals: Tensor
    pdl: bool
    tokens_per_row: int = 1


class LayerContext(NamedTuple):
    """What the layers of a model, and those of its draft modules, have in common."""

    config: DenseConfig
    cos: Tensor
    """float32 `[P, D/2]` of P >= max_seq_len positions, and so is `sin`."""
    sin: Tensor
    max_seq_len: int


def decode_layer(
    layer: LayerWeights,
    next_norm: Tensor,
    row: DecodeLanes,
    residual: Residual,
    kv: Tensor,
    block_table: Tensor,
    context: LayerContext,
    launch: DecodeLaunch,
) -> Residual:
    """One layer for `row`'s tokens: five kernels.

    `residual` is scaled for the layer's input norm and comes back scaled for `next_norm`, updated
    in place but for its squares. `kv` is the layer's cache `[blocks, 2, block_size, G, D]`.
    """
    config, plans, slot = context.config, launch.plans, row.slot
    shared: Any = {"arrivals": launch.arrivals, "pdl": launch.pdl}
    qkv = linear(
        residual.scaled,
        layer.qkv,
        slot,
        squares_TN=residual.squares,
        eps=config.norm_eps,
        bias=layer.qkv_bias,
        plan=plans["qkv"],
        **shared,
    )
    attended = decode_attention(
        qkv,
        context.cos,
        context.sin,
        kv,
        block_table,
        slot,
        row.position,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        scale=config.attention_scale,
        max_seq_len=context.max_seq_len,
        q_norm_weight=layer.q_norm,
        k_norm_weight=layer.k_norm,
        eps=config.norm_eps,
        split_tokens=launch.split_tokens,
        tokens_per_row=launch.tokens_per_row,
        **shared,
    )
    residual = linear_residual(
        attended,
        layer.output,
        slot,
        residual,
        layer.ffn_norm,
        bias=layer.output_bias,
        plan=plans["output"],
        **shared,
    )
    gated = linear(
        residual.scaled,
        layer.gate_up,
        slot,
        squares_TN=residual.squares,
        eps=config.norm_eps,
        bias=layer.gate_up_bias,
        swiglu=True,
        plan=plans["gate_up"],
        **shared,
    )
    return linear_residual(
        gated,
        layer.down,
        slot,
        residual,
        next_norm,
        bias=layer.down_bias,
        plan=plans["down"],
        **shared,
    )


class PrefillEnd(NamedTuple):
    """What `DenseModel.prefill` leaves of a chunk of T lanes."""

    x_1H: Tensor
    """The last lane's float32 residual stream in front of the last layer's output product."""
    attended_1A: Tensor
    """Its attention in the last layer, `A = Q*D`."""
    hidden: Tensor | None
    """The stream behind the final norm `[T, H]` in the model's dtype, where it was asked for."""


def _keep_stream(x: Tensor, layer: int, streams: Mapping[int, Tensor]) -> None:
    if layer in streams:
        streams[layer][: len(x)].copy_(x)


class DenseModel:
    """Configuration, weights, RoPE tables; logits have the first `vocabulary` ids, 0 for all."""

    def __init__(
        self, config: DenseConfig, weights: DenseWeights, *, max_seq_len: int, vocabulary: int = 0
    ) -> None:
        self.config = config
        self.weights = weights
        self.lm_head = weights.lm_head[: vocabulary or None]
        cos, sin = rope_tables(
            config.rope,
            head_dim=config.head_dim,
            max_positions=max_seq_len,
            device=weights.embedding.device,
        )
        self.context = LayerContext(config, cos, sin, max_seq_len)

    @property
    def max_seq_len(self) -> int:
        return self.context.max_seq_len

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def fuses(self, lanes: int) -> bool:
        """Whether a chunk of so many lanes has gate, up and SwiGLU in one kernel."""
        return is_fused(self.weights.layers[0], lanes)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        cache: Tensor,
        block_table: Tensor,
        launch: DecodeLaunch,
    ) -> Residual:
        """The residual stream of `row`'s tokens behind the last layer, scaled for the final norm.

        `residual` comes from the embedding, scaled for the first layer's norm; it is updated in
        place. `cache` is `[L, blocks, 2, block_size, G, D]`; each live lane's keys and values are
        written at its position through `block_table` `[S, B]`.
        """
        for index, (layer, kv) in enumerate(zip(self.weights.layers, cache.unbind(0), strict=True)):
            residual = decode_layer(
                layer,
                self.norm_behind(index),
                row,
                residual,
                kv,
                block_table,
                self.context,
                launch,
            )
        return residual

    def norm_behind(self, layer: int) -> Tensor:
        """Weight of the norm that reads the residual stream behind a layer; -1: the embedding."""
        layers = self.weights.layers
        following = layer + 1
        return layers[following].input_norm if following < len(layers) else self.weights.final_norm

    def prefill(
        self,
        lanes: PrefillLanes,
        cache: Tensor,
        block_table: Tensor,
        attend: Attend,
        *,
        all_lanes: bool = False,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
        pdl: bool = False,
    ) -> PrefillEnd:
        """A prompt chunk through all layers, up to and with the attention of the last one.

        As in `decode` the cache receives the keys and values of the live lanes. What the last layer
        does behind its attention matters to the sampled token alone: `prefill_logits` does it. With
        `all_lanes` it is done for every lane as well, for a draft module that reads them; the
        logits' bits do not know of it.

        `streams[layer]`, [T or more, H], receives the residual stream behind the layer, rounded to
        its dtype; that of the last layer with `all_lanes` only.
        """
        config, context, slot = self.config, self.context, lanes.slot
        last = len(self.weights.layers) - 1
        x = embed(lanes.token, self.weights.embedding, slot)
        scratch = PrefillScratch(
            config, self.weights.layers[0], len(x), pdl=pdl, outlived=all_lanes
        )
        rms_norm(
            x,
            self.norm_behind(-1),
            slot,
            eps=config.norm_eps,
            out_dtype=self.dtype,
            out=scratch.h,
        )
        for index, (layer, kv) in enumerate(zip(self.weights.layers, cache.unbind(0), strict=True)):
            attended = prefill_attention(layer, lanes, kv, block_table, context, attend, scratch)
            if index == last:
                break
            self._behind_attention(index, x, attended, slot, scratch)
            _keep_stream(x, index, streams)
        x_1H, attended_1A = (rows.index_select(0, lanes.last) for rows in (x, attended))
        if all_lanes:
            self._behind_attention(last, x, attended, slot, scratch)
            _keep_stream(x, last, streams)
        return PrefillEnd(x_1H, attended_1A, scratch.h if all_lanes else None)

    def prefill_logits(self, end: PrefillEnd, slot_1: Tensor, *, pdl: bool = False) -> Tensor:
        """Float32 `[1, V]` of the chunk's last lane, which works for `slot_1`; uses `end` up."""
        last = len(self.weights.layers) - 1
        scratch = PrefillScratch(self.config, self.weights.layers[last], 1, pdl=pdl)
        self._behind_attention(last, end.x_1H, end.attended_1A, slot_1, scratch)
        return linear(scratch.h, self.lm_head, slot_1, out_dtype=torch.float32, pdl=pdl)

    def _behind_attention(
        self,
        index: int,
        x: Tensor,
        attended: Tensor,
        slot: Tensor,
        scratch: PrefillScratch,
    ) -> None:
        layer, norm = self.weights.layers[index], self.norm_behind(index)
        prefill_behind_attention(layer, norm, x, attended, slot, self.context, scratch)
