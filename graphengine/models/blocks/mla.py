"""Multi-head latent attention (DeepSeek-V2): per token, a latent and one rotated key for all heads.

Both decode and prefill run the absorbed form, which `kernels/attention/latent.py` describes: six
kernels and products in decode, eight where queries have a latent of their own.

Letters: N lanes, H hidden, Q heads, R values of a latent, P values of a rotated key, E = R + P,
C values of a query that are not rotated, V values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels.attention.head_product import CHUNK_LANES, head_product
from graphengine.kernels.attention.latent import (
    LATENT_TILE,
    check_latent_sizes,
    latent_append,
)
from graphengine.kernels.attention.latent_decode import latent_values, latent_values_workspace_bytes
from graphengine.kernels.attention.latent_prefill import latent_attention
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weight,
    tensors_of,
    whole_pieces,
)
from graphengine.models.launches import ChunkAttention, DecodeLaunch, PrefillLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import Paged
from graphengine.models.weights import StoredLinear, Weight

# Epsilon of the norms of latents, whatever the config says about other norms.
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Sizes of the block.

    kv_rank      values of the latent of keys and values
    q_rank       values of the latent of queries; None: they have none
    plain_dim    values of a head's query and key that are not rotated
    rotated_dim  values of a head's query that are rotated, and of the key that all heads share
    value_dim    values of a head
    scale        factor on the scores
    norm_eps     epsilon of the norm of the block's input
    """

    hidden_size: int
    num_heads: int
    kv_rank: int
    q_rank: int | None
    plain_dim: int
    rotated_dim: int
    value_dim: int
    scale: float
    norm_eps: float

    def __post_init__(self) -> None:
        check_latent_sizes(self.kv_rank, self.rotated_dim)

    @property
    def entry(self) -> int:
        """Values of a token in the cache."""
        return self.kv_rank + self.rotated_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.plain_dim + self.rotated_dim)

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def first_size(self) -> int:
        """Values of the first product that are the queries' latent, or the queries themselves."""
        return self.q_size if self.q_rank is None else self.q_rank

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step. Ranks split heads; each rank has all latents."""
        rows = self.first_size + self.entry
        linears = {"q_kv_a": Linear("store", rows, self.hidden_size)}
        if self.q_rank is not None:
            linears["q_b"] = Linear("store", self.q_size, self.q_rank, shard="rows")
        output = Linear("residual", self.hidden_size, self.value_size, shard="columns")
        return {**linears, "output": output}

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight."""
        if self.q_rank is None:
            return {"q_kv_a": "q_proj", "output": "o_proj"}
        return {"q_kv_a": "q_a_proj", "q_b": "q_b_proj", "output": "o_proj"}

    @property
    def state(self) -> Paged:
        """A latent and a rotated key per token."""
        return Paged(1, (self.entry,))

    @property
    def table_dim(self) -> int:
        """Head dimension that RoPE's tables are for."""
        return self.rotated_dim

    @property
    def projected_width(self) -> int:
        """Values of a lane in `PrefillScratch` before its queries are absorbed."""
        through = 0 if self.q_rank is None else self.q_rank + self.q_size
        return max(self.first_size + self.entry + through, self.value_size + self.hidden_size)

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return self.projected_width + self.num_heads * (self.entry + self.kv_rank)

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of attention reads at a time."""
        return LATENT_TILE

    def workspace_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes of partial results, for this many decode lanes."""
        return latent_values_workspace_bytes(rows, num_heads=self.num_heads, rank=self.kv_rank)

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> LatentAttentionWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        weights = {
            name: new_weight(
                forms,
                prefix + self.first_linears[name],
                (linear.rows, linear.columns),
                device=device,
                dtype=dtype,
            )
            for name, linear in self.linears.items()
        }
        of_head = self.plain_dim + self.value_dim
        return LatentAttentionWeights(
            block=self,
            prefix=prefix,
            q_kv_a=weights["q_kv_a"],
            q_norm=None if self.q_rank is None else new(self.q_rank),
            q_b=weights.get("q_b"),
            kv_norm=new(self.kv_rank),
            kv_b=new(self.num_heads * of_head, self.kv_rank),
            output=weights["output"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionWeights:
    """The block's weights; the first products of queries and of latents are one matrix.

    prefix  of the names in the checkpoint: those of Hugging Face's DeepSeek-V2
    kv_b    `[Q * (C + V), R]`, from a latent to each head's key and value, in the model's dtype
    """

    block: LatentAttention
    prefix: str
    q_kv_a: AnyWeight
    q_norm: Tensor | None
    q_b: AnyWeight | None
    kv_norm: Tensor
    kv_b: Tensor
    output: AnyWeight

    @property
    def kv_scales(self) -> None:
        """None, as latents are in the model's dtype."""
        return None

    def linears(self) -> list[StoredLinear]:
        """The block's products; the products of each head use parts of one plain weight."""
        block, prefix = self.block, self.prefix
        first = (prefix + block.first_linears["q_kv_a"], block.first_size)
        latent = (f"{prefix}kv_a_proj_with_mqa", block.entry)
        # Queries belong to heads; all heads share the latents.
        shared = [latent] if self.q_b is None else [first, latent]
        linears = [
            StoredLinear(
                self.q_kv_a,
                (first, latent),
                axis=0,
                shared=frozenset(name for name, _ in shared),
            )
        ]
        if self.q_b is not None:
            linears.append(StoredLinear(self.q_b, ((f"{prefix}q_b_proj", block.q_size),), axis=0))
        of_heads = (f"{prefix}kv_b_proj", len(self.kv_b))
        linears.append(StoredLinear(self.kv_b, (of_heads,), axis=0, plain=True))
        output = (f"{prefix}o_proj", block.hidden_size)
        return [*linears, StoredLinear(self.output, (output,), axis=1)]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        names[f"{self.prefix}kv_a_layernorm.weight"] = Weight(self.kv_norm)
        if self.q_norm is not None:
            names[f"{self.prefix}q_a_layernorm.weight"] = Weight(self.q_norm)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        plain = (self.q_norm, self.kv_norm, self.kv_b)
        return tensors_of(self.q_kv_a, self.q_b, self.output, *plain)

    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """Two weights: `[Q, C, R]` from queries to latents, `[Q, R, V]` from latents to values."""
        block = self.block
        whole = self.kv_b.view(block.num_heads, -1, block.kv_rank)
        to_latents, to_values = torch.split(whole, [block.plain_dim, block.value_dim], dim=1)
        return to_latents, to_values.transpose(1, 2)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the block on `row`'s tokens: six kernels, or eight.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares. `kv`, the layer's cache `[blocks, 1, block_size, E]`, receives
        each live lane's entry at its position, through `block_table` `[S, B]`.
        """
        block, slot, pdl = self.block, row.slot, launch.pdl
        call = launch.call("q_kv_a", residual, self.q_kv_a, slot, eps=block.norm_eps)
        projected = linear(call, STORE)
        q, latent = torch.split(projected, [block.first_size, block.entry], dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q = rms_norm(q, self.q_norm, slot, eps=_EPS, out_dtype=q.dtype, pdl=pdl)
            q = linear(launch.call("q_b", q, self.q_b, slot), STORE)
        lanes, heads = len(q), block.num_heads
        absorbed = q.new_empty(lanes, heads, block.entry)
        latent_append(
            q,
            latent,
            self.kv_norm,
            tables.cos,
            tables.sin,
            kv,
            block_table,
            slot,
            row.position,
            num_heads=heads,
            eps=_EPS,
            out=absorbed,
            pdl=pdl,
        )
        to_latents, to_values = self._of_heads()
        plain = q.view(len(q), heads, -1)[:, :, : block.plain_dim]
        head_product(plain, to_latents, slot, out=absorbed[:, :, : block.kv_rank], pdl=pdl)
        values = latent_values(
            absorbed,
            kv,
            block_table,
            slot,
            row.position,
            to_values.transpose(1, 2),
            scale=block.scale,
            pdl=pdl,
        )
        call = launch.call("output", values.flatten(1), self.output, slot)
        return add_product(call, residual, next_norm, launch)

    def attend(
        self,
        lanes: PrefillLanes,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        attention: ChunkAttention,
        scratch: PrefillScratch,
    ) -> Tensor:
        """Run the first half of the block on a chunk: `[N, Q*V]`, attention of the normed
        `scratch.h`.

        `kv` receives the entries of the live lanes; each lane attends by its own slot and position,
        not by the chunk's `attention`. The result lies in `scratch`, before what the product of
        `add_output` writes.
        """
        block, slot, pdl = self.block, lanes.slot, scratch.launch.pdl
        heads, rank = block.num_heads, block.kv_rank
        width = block.first_size + block.entry
        projected = scratch.product(scratch.h, self.q_kv_a, None, out=scratch.take(width))
        q, latent = torch.split(projected, [block.first_size, block.entry], dim=1)
        if self.q_norm is not None and self.q_b is not None:
            normed = scratch.take(block.first_size, after=width)
            rms_norm(q, self.q_norm, slot, eps=_EPS, out_dtype=q.dtype, out=normed, pdl=pdl)
            q = scratch.take(block.q_size, after=width + block.first_size)
            scratch.product(normed, self.q_b, None, out=q)
        absorbed = scratch.take(heads * block.entry, after=block.projected_width)
        absorbed = absorbed.view(-1, heads, block.entry)
        latent_append(
            q,
            latent,
            self.kv_norm,
            tables.cos,
            tables.sin,
            kv,
            block_table,
            slot,
            lanes.position,
            num_heads=heads,
            eps=_EPS,
            out=absorbed,
            pdl=pdl,
        )
        to_latents, to_values = self._of_heads()
        plain = q.view(len(q), heads, -1)[:, :, : block.plain_dim]
        _chunk_head_product(plain, to_latents, slot, scratch.launch, out=absorbed[:, :, :rank])
        attended = scratch.take(heads * rank, after=block.projected_width + heads * block.entry)
        attended = attended.view(-1, heads, rank)
        latent_attention(
            absorbed,
            kv,
            block_table,
            slot,
            lanes.position,
            rank=rank,
            scale=block.scale,
            query_start_P1=scratch.launch.chunk_starts(lanes),
            out=attended,
            pdl=pdl,
        )
        values = scratch.take(block.value_size)
        out = values.view(-1, heads, block.value_dim)
        _chunk_head_product(attended, to_values, slot, scratch.launch, out=out)
        return values

    def add_output(
        self,
        attended: Tensor,
        stream: Tensor,
        next_norm: NextNorm,
        slot: Tensor,
        scratch: PrefillScratch,
    ) -> None:
        """Run the other half: update `stream`, float32, in place, and write it, normed by
        `next_norm`, to `scratch.h`.

        `attended` is overwritten if it lies in `scratch`.
        """
        block = self.block
        add_chunk_product(
            attended,
            self.output,
            None,
            stream,
            next_norm,
            slot,
            scratch,
            eps=block.norm_eps,
            out=scratch.take(block.hidden_size, after=block.value_size),
        )


def _chunk_head_product(
    x_NQK: Tensor, weight_QKM: Tensor, slot_N: Tensor, launch: PrefillLaunch, *, out: Tensor
) -> None:
    """`head_product` of a chunk: by the BLAS, padded lanes included, if bits may depend on N."""
    if launch.any_lanes:
        block = CHUNK_LANES
        head_product(x_NQK, weight_QKM, slot_N, out=out, block_lanes=block, pdl=launch.pdl)
        return
    x_NQK, weight_QMK = whole_pieces(x_NQK, weight_QKM.transpose(1, 2))
    torch.bmm(x_NQK.transpose(0, 1), weight_QMK.transpose(1, 2), out=out.transpose(0, 1))
