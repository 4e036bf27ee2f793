"""A dense decoder: grouped-query attention with RoPE, RMSNorm before each block, SwiGLU.

Llama 3 and Qwen3 are this program with other settings; their files map a checkpoint's config onto
`DenseConfig`. Decode rows and prefill tokens run through the same `forward`: a lane is one token of
one request, and a `Phase` says which linear and which attention serve the lanes.

Letters: N lanes, H hidden, D head_dim, Q query heads, G kv heads, F ffn width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graphengine.kernels import RopeConfig, embed, linear, rms_norm, rope_append, rope_tables
from graphengine.kernels import swiglu as apply_swiglu

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


class Lanes(NamedTuple):
    """The tokens of one launch; int32 `[N]` each. A lane with slot -1 is padding."""

    token: Tensor
    slot: Tensor
    position: Tensor


class Linear(Protocol):
    """`kernels.linear`, or a stand-in with its signature."""

    def __call__(
        self,
        x_NK: Tensor,
        weight_MK: Tensor,
        slot_N: Tensor,
        /,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        swiglu: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...


class Phase(NamedTuple):
    """What differs between decode and prefill.

    `attend(q_NQD, kv)` returns `[N, Q*D]` attention over one layer's cache
    `kv = [blocks, 2, block_size, G, D]`, which already holds the lanes' own keys and values.
    """

    linear: Linear
    attend: Callable[[Tensor, Tensor], Tensor]


class DenseModel:
    """A configuration, its weights, and the RoPE tables for `max_seq_len` positions."""

    def __init__(self, config: DenseConfig, weights: DenseWeights, *, max_seq_len: int) -> None:
        self.config = config
        self.weights = weights
        self.cos, self.sin = rope_tables(
            config.rope,
            head_dim=config.head_dim,
            max_positions=max_seq_len,
            device=weights.embedding.device,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, lanes: Lanes, cache: Tensor, block_table: Tensor, phase: Phase) -> Tensor:
        """Residual stream after the last layer: float32 `[N, H]`, before the final norm.

        `cache` is `[L, blocks, 2, block_size, G, D]`; each live lane's keys and values are written
        at its position through `block_table` `[S, B]`.
        """
        config, slot = self.config, lanes.slot
        x = embed(lanes.token, self.weights.embedding, slot)
        for layer, kv in zip(self.weights.layers, cache.unbind(0), strict=True):
            h = rms_norm(x, layer.input_norm, slot, eps=config.norm_eps, out_dtype=self.dtype)
            qkv = phase.linear(h, layer.qkv, slot, bias=layer.qkv_bias)
            q = rope_append(
                qkv,
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
            attended = phase.attend(q, kv)
            phase.linear(attended, layer.output, slot, bias=layer.output_bias, residual=x, out=x)
            h = rms_norm(x, layer.ffn_norm, slot, eps=config.norm_eps, out_dtype=self.dtype)
            gated = phase.linear(h, layer.gate_up, slot, bias=layer.gate_up_bias, swiglu=True)
            phase.linear(gated, layer.down, slot, bias=layer.down_bias, residual=x, out=x)
        return x

    def logits(self, x_NH: Tensor, slot_R: Tensor, *, row_of_lane: Tensor | None = None) -> Tensor:
        """Final norm and lm_head: float32 `[R, V]`. Row i reads lane `row_of_lane[i]`, else i."""
        h = rms_norm(
            x_NH,
            self.weights.final_norm,
            slot_R,
            eps=self.config.norm_eps,
            out_dtype=self.dtype,
            row_of_lane=row_of_lane,
        )
        return linear(h, self.weights.lm_head, slot_R, out_dtype=torch.float32)


def wide_linear(
    x_NK: Tensor,
    weight_MK: Tensor,
    slot_N: Tensor,
    /,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`kernels.linear` for the many lanes of a prefill chunk, through the BLAS.

    Its bits depend on the number of lanes, which for a chunk follows from the prompt alone. Padded
    lanes hold garbage that touches no other lane. `residual` is updated in place.
    """
    y = torch.nn.functional.linear(x_NK, weight_MK, bias)
    if swiglu:
        return apply_swiglu(y, slot_N)
    if residual is None:
        return y
    assert out is residual, "wide_linear adds to the residual in place"
    return residual.add_(y)
