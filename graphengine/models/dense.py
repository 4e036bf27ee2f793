"""A dense decoder: grouped-query attention with RoPE, RMSNorm before each block, SwiGLU.

Llama 3 and Qwen3 are this program with other settings; their files map a checkpoint's config onto
`DenseConfig`. `decode` runs a few rows through five fused kernels a layer; `prefill` runs the
tokens of a chunk through the BLAS, whose bits depend on the number of lanes, which for a chunk
follows from the prompt alone.

Letters: N lanes, H hidden, D head_dim, Q query heads, G kv heads, F ffn width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphengine.kernels import (
    DecodeLanes,
    LinearKind,
    LinearPlan,
    PrefillLanes,
    Residual,
    RopeConfig,
    RowFamily,
    add_rms_norm,
    decode_attention,
    embed,
    heuristic_plan,
    linear,
    linear_residual,
    rms_norm,
    rope_append,
    rope_tables,
    swiglu,
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
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's KV block: `[2, block_size, G, D]`."""
        return (2, block_size, self.num_kv_heads, self.head_dim)


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
        per_layer = [
            value
            for layer in self.layers
            for value in (getattr(layer, name) for name in LayerWeights.__slots__)
            if value is not None
        ]
        return [self.embedding, self.final_norm, self.lm_head, *per_layer]


def allocate_weights(config: DenseConfig, *, device: str, dtype: torch.dtype) -> DenseWeights:
    """Uninitialised weights of the right shapes; `device="meta"` allocates nothing."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def maybe(condition: bool, *shape: int) -> Tensor | None:
        return new(*shape) if condition else None

    hidden, ffn = config.hidden_size, config.ffn_size
    qkv_size = config.q_size + 2 * config.kv_size
    layers = tuple(
        LayerWeights(
            input_norm=new(hidden),
            qkv=new(qkv_size, hidden),
            qkv_bias=maybe(config.attention_bias, qkv_size),
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
        for _ in range(config.num_layers)
    )
    embedding = new(config.vocab_size, hidden)
    return DenseWeights(
        embedding=embedding,
        layers=layers,
        final_norm=new(hidden),
        lm_head=embedding if config.tie_embeddings else new(config.vocab_size, hidden),
    )


class DecodePlans(NamedTuple):
    """How each linear of the decode step is cut; one set serves every bucket."""

    qkv: LinearPlan
    output: LinearPlan
    gate_up: LinearPlan
    down: LinearPlan
    lm_head: LinearPlan

    @property
    def family(self) -> RowFamily:
        return self.qkv.family


def decode_shapes(config: DenseConfig) -> dict[str, tuple[LinearKind, int, int]]:
    """Kind, rows and columns of the weight behind each field of `DecodePlans`."""
    hidden, ffn = config.hidden_size, config.ffn_size
    return {
        "qkv": ("store", config.q_size + 2 * config.kv_size, hidden),
        "output": ("residual", hidden, config.q_size),
        "gate_up": ("swiglu", 2 * ffn, hidden),
        "down": ("residual", hidden, ffn),
        "lm_head": ("sample", config.vocab_size, hidden),
    }


def heuristic_plans(config: DenseConfig, dtype: torch.dtype, family: RowFamily) -> DecodePlans:
    """Plans for a model that no tuning table knows."""
    plans = {
        name: heuristic_plan(kind, M, K, dtype, family)
        for name, (kind, M, K) in decode_shapes(config).items()
    }
    return DecodePlans(**plans)


class DecodeLaunch(NamedTuple):
    """What the decode kernels of one engine share besides the model.

    `split_tokens` is attention's; `arrivals` is int32 and zero between kernels; `pdl` says how they
    are launched.
    """

    plans: DecodePlans
    split_tokens: int
    arrivals: Tensor
    pdl: bool


Attend = Callable[[Tensor, Tensor], Tensor]
"""`attend(q_NQD, kv)`: `[N, Q*D]` attention of a chunk over one layer's cache
`kv = [blocks, 2, block_size, G, D]`, which already holds the lanes' own keys and values."""


class PrefillEnd(NamedTuple):
    """What `DenseModel.prefill` leaves of a chunk's T lanes for the one that is sampled."""

    x: Tensor
    """The float32 residual stream `[T, H]` in front of the last layer's output product."""
    attended: Tensor
    """The last layer's attention `[T, Q*D]`."""


class DenseModel:
    """A configuration, its weights, and the RoPE tables for `max_seq_len` positions."""

    def __init__(self, config: DenseConfig, weights: DenseWeights, *, max_seq_len: int) -> None:
        self.config = config
        self.weights = weights
        self.max_seq_len = max_seq_len
        self.cos, self.sin = rope_tables(
            config.rope,
            head_dim=config.head_dim,
            max_positions=max_seq_len,
            device=weights.embedding.device,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

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
        place. `cache` is `[L, blocks, 2, block_size, G, D]`; each live row's keys and values are
        written at its position through `block_table` `[S, B]`.
        """
        config, weights, plans = self.config, self.weights, launch.plans
        eps, slot = config.norm_eps, row.slot
        shared: Any = {"arrivals": launch.arrivals, "pdl": launch.pdl}
        for index, (layer, kv) in enumerate(zip(weights.layers, cache.unbind(0), strict=True)):
            qkv = linear(
                residual.scaled,
                layer.qkv,
                slot,
                squares_TN=residual.squares,
                eps=eps,
                bias=layer.qkv_bias,
                plan=plans.qkv,
                **shared,
            )
            attended = decode_attention(
                qkv,
                self.cos,
                self.sin,
                kv,
                block_table,
                slot,
                row.position,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                scale=config.attention_scale,
                max_seq_len=self.max_seq_len,
                q_norm_weight=layer.q_norm,
                k_norm_weight=layer.k_norm,
                eps=eps,
                split_tokens=launch.split_tokens,
                **shared,
            )
            residual = linear_residual(
                attended,
                layer.output,
                slot,
                residual,
                layer.ffn_norm,
                bias=layer.output_bias,
                plan=plans.output,
                **shared,
            )
            gated = linear(
                residual.scaled,
                layer.gate_up,
                slot,
                squares_TN=residual.squares,
                eps=eps,
                bias=layer.gate_up_bias,
                swiglu=True,
                plan=plans.gate_up,
                **shared,
            )
            residual = linear_residual(
                gated,
                layer.down,
                slot,
                residual,
                self.norm_behind(index),
                bias=layer.down_bias,
                plan=plans.down,
                **shared,
            )
        return residual

    def norm_behind(self, layer: int) -> Tensor:
        """Weight of the norm that reads the residual stream behind a layer; -1: the embedding."""
        layers = self.weights.layers
        following = layer + 1
        return layers[following].input_norm if following < len(layers) else self.weights.final_norm

    def prefill(
        self, lanes: PrefillLanes, cache: Tensor, block_table: Tensor, attend: Attend
    ) -> PrefillEnd:
        """A prompt chunk through all layers, up to and with the attention of the last one.

        As in `decode` the cache receives the keys and values of the live lanes. What the last layer
        does behind its attention matters to the sampled token alone: `prefill_logits` does it.
        """
        config, weights, slot = self.config, self.weights, lanes.slot
        x = embed(lanes.token, weights.embedding, slot)
        h = rms_norm(x, self.norm_behind(-1), slot, eps=config.norm_eps, out_dtype=self.dtype)
        for index, (layer, kv) in enumerate(zip(weights.layers, cache.unbind(0), strict=True)):
            q = rope_append(
                functional.linear(h, layer.qkv, layer.qkv_bias),
                self.cos,
                self.sin,
                kv,
                block_table,
                slot,
                lanes.position,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                q_norm_weight=layer.q_norm,
                k_norm_weight=layer.k_norm,
                eps=config.norm_eps,
            )
            attended = attend(q, kv)
            if index + 1 < len(weights.layers):
                h = self._behind_attention(index, x, attended, slot)
        return PrefillEnd(x, attended)

    def prefill_logits(self, end: PrefillEnd, slot_1: Tensor, lane_1: Tensor) -> Tensor:
        """Float32 `[1, V]` of the chunk's lane `lane_1`, which works for `slot_1`."""
        x_1H, attended_1A = (lanes.index_select(0, lane_1) for lanes in end)
        h = self._behind_attention(len(self.weights.layers) - 1, x_1H, attended_1A, slot_1)
        return linear(h, self.weights.lm_head, slot_1, out_dtype=torch.float32)

    def _behind_attention(self, index: int, x: Tensor, attended: Tensor, slot: Tensor) -> Tensor:
        """The rest of a layer for `x`, which is updated in place, and the norm behind it."""
        layer = self.weights.layers[index]
        norm: Any = {"eps": self.config.norm_eps, "out_dtype": self.dtype}
        output = functional.linear(attended, layer.output, layer.output_bias)
        h = add_rms_norm(x, output, layer.ffn_norm, slot, **norm)
        gated = swiglu(functional.linear(h, layer.gate_up, layer.gate_up_bias), slot)
        down = functional.linear(gated, layer.down, layer.down_bias)
        return add_rms_norm(x, down, self.norm_behind(index), slot, **norm)
