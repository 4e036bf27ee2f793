"""Grouped-query attention with RoPE: two kernels and a product in decode, one and two in prefill.

Letters: N lanes, H hidden, D head_dim, Q query heads, G kv heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.attention.decode import decode_attention, decode_attention_workspace_bytes
from graphengine.kernels.attention.head_gate import gate_heads
from graphengine.kernels.attention.prefill import prefill_attention_workspace_bytes
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE, Store
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import RowFamily, attention_split
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.norm_rope.rope import rope_append
from graphengine.kernels.norm_rope.value_norm import norm_values
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.head_rows import HeadRows
from graphengine.models.blocks.norms import NextNorm, plus_one
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weights,
    tensors_of,
)
from graphengine.models.launches import ChunkAttention, DecodeLaunch, PrefillLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import Paged
from graphengine.models.weights import StoredLinear, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQueryAttention:
    """Sizes and switches of the block.

    qk_norm   an RMSNorm on each head's query and key before RoPE, or "after" it
    row_norm  whether these norms are each of all heads' values of a token together
    norm_eps  epsilon of these norms, and of the norms around the block
    normed    whether there is a norm before the block
    window    tokens that a query sees, including its own; 0: all up to its own
    nope      whether heads stay as they are where others rotate them (NoPE)
    rotated   the fraction of a head that RoPE rotates, as in its `RopeConfig`; with gates, one over
              a whole number
    interleaved  whether RoPE pairs each value with its neighbour in the checkpoint, not with the
              one half a head further on
    gated     whether attention's sums are multiplied by sigmoids of gates. Each head's gates follow
              its query in the checkpoint's linear of queries
    names     of the output's linear, and of the norms of queries and of keys; or how both end
    one_linear  name of the linear in which a checkpoint has queries, keys and values, such as
              Phi-3's `qkv_proj`; "": each has its own
    transposed  whether a checkpoint has a linear's columns where others have its rows, as GPT-2's
              Conv1D has them
    projected  the linears that a checkpoint has, by the first letters of queries, keys and values.
              Without a linear of values, the values are the keys before norm and rotation. With
              queries alone, the layer uses keys and values of the last layer with the same window
              that `lends`
    lends     whether later layers read this layer's keys and values
    value_norm  whether each head's value has an RMSNorm without a weight. Then the norms of queries
              and keys are rounded once, after their weights
    role      prefix of its linears' names
    fed_size  columns of the input of queries, keys and values; 0: hidden_size, those of the normed
              stream
    scale_of  scores are divided by its square root; 0: head_dim
    sinks     whether each head has a learned score that belongs to no token
    softcap   soft cap c > 0 of scores: c * tanh(score / c); 0: none
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool | Literal["after"] = False
    row_norm: bool = False
    normed: bool = True
    window: int = 0
    nope: bool = False
    rotated: float = 1.0
    interleaved: bool = False
    scale_of: float = 0.0
    sinks: bool = False
    softcap: float = 0.0
    gated: bool = False
    names: tuple[str, str] | tuple[str, str, str] = ("o_proj", "norm")
    one_linear: str = ""
    transposed: bool = False
    fed_size: int = 0
    projected: Literal["qkv", "qk", "q"] = "qkv"
    lends: bool = False
    value_norm: bool = False
    role: str = ""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def reuses(self) -> bool:
        """Whether keys and values are those of an earlier layer."""
        return self.projected == "q"

    @property
    def projected_size(self) -> int:
        """Values that a token is projected to: queries, keys, values, then gates."""
        kept = self.kv_size * (len(self.projected) - 1)
        return self.q_size + kept + (self.q_size if self.gated else 0)

    @property
    def fed_columns(self) -> int:
        return self.fed_size or self.hidden_size

    @property
    def rows(self) -> HeadRows:
        """The rows of queries, keys, values and gates."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        # As in a head with as many parts as pairs: the rows of all first values come before those
        # of the second.
        rotated = 2 if self.interleaved else int(self.head_dim * self.rotated)
        return HeadRows(*sizes, rotated=rotated, gated=self.gated, linears=self.projected)

    @property
    def scale(self) -> float:
        return float((self.scale_of or self.head_dim) ** -0.5)

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step. Ranks split heads: a kv head and its query heads stay
        together.
        """
        return {
            f"{self.role}qkv": Linear("store", self.projected_size, self.fed_columns, shard="rows"),
            f"{self.role}output": Linear(
                "residual", self.hidden_size, self.q_size, shard="columns"
            ),
        }

    @property
    def context_linear(self) -> Linear:
        """The linear of keys and values alone; its rows are a part of `qkv`'s."""
        return Linear("store", 2 * self.kv_size, self.fed_columns)

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight."""
        firsts = (self.one_linear or "q_proj", self.names[0])
        return dict(zip(self.linears, firsts, strict=True))

    @property
    def state(self) -> Paged:
        """A key and a value per token."""
        return Paged(2, (self.num_kv_heads, self.head_dim), self.window)

    @property
    def table_dim(self) -> int:
        """Head dimension that RoPE's tables are for."""
        return self.head_dim

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        if self.gated:
            # Gates are read after attention, whose sums therefore lie after everything else.
            return self.attended_after + self.q_size
        return self.qkv_size + max(self.q_size, self.hidden_size)

    @property
    def attended_after(self) -> int:
        """Columns of `PrefillScratch` before attention's sums of a chunk."""
        if not self.gated:
            return 0
        return max(self.projected_size + self.q_size, self.qkv_size + self.hidden_size)

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads, in sequences of up to `tokens`."""
        return attention_split(family, self.head_dim, dtype, tokens)

    def workspace_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes of partial results, for this many decode lanes or for a chunk."""
        decode = decode_attention_workspace_bytes(
            rows, num_heads=self.num_heads, head_dim=self.head_dim, max_seq_len=max_seq_len
        )
        return max(decode, prefill_attention_workspace_bytes(self.head_dim))

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> AttentionWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(condition: bool, *shape: int) -> Tensor | None:
            return torch.empty(shape, device=device, dtype=dtype) if condition else None

        def norm(heads: int) -> Tensor | None:
            if not self.row_norm and not self.value_norm:
                return new(bool(self.qk_norm), self.head_dim)
            # The norm's output is rounded once, after its weight.
            size = heads * self.head_dim if self.row_norm else self.head_dim
            return torch.empty(size, device=device, dtype=torch.float32)

        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        hidden = self.hidden_size
        return AttentionWeights(
            block=self,
            prefix=prefix,
            qkv=weight(f"{self.role}qkv", self.projected_size, self.fed_columns),
            qkv_bias=new(self.qkv_bias, self.projected_size),
            q_norm=norm(self.num_heads),
            k_norm=None if self.reuses else norm(self.num_kv_heads),
            kv_scales=torch.ones((2, self.num_kv_heads), device=device),
            output=weight(f"{self.role}output", hidden, self.q_size),
            output_bias=new(self.output_bias, hidden),
            sinks=torch.empty(self.num_heads, device=device) if self.sinks else None,
        )


class Lent(NamedTuple):
    """The keys and values that a layer lends to later layers.

    weights  of its attention
    qkv      `[N, (Q + 2G) * D]`: its lanes' keys, before norm and rotation, and values, after the
             queries of the layer that ran last; None in a chunk, whose keys are in the cache
    """

    weights: AttentionWeights
    qkv: Tensor | None


class PagedMemory(NamedTuple):
    """The per-sequence memory of an attention block.

    lent  keys and values lent to later layers, or by an earlier one; None: none
    """

    kv: Tensor
    block_table: Tensor
    lent: Lent | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """The block's weights; q, k, v and gates are one matrix, in the order of `HeadRows`.

    prefix     of the names in the checkpoint: those of Hugging Face's decoders of Llama's lineage
    kv_scales  float32 `[2, G]`, of keys and values in an fp8 cache: 1 until they are set
    sinks      float32 `[Q]`
    """

    block: GroupedQueryAttention
    prefix: str
    qkv: AnyWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    kv_scales: Tensor
    output: AnyWeight
    output_bias: Tensor | None
    sinks: Tensor | None = None

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        of_heads = self.block.rows
        parts = tuple((f"{self.prefix}{name}_proj", rows) for name, rows in of_heads.of_linears)
        output = (f"{self.prefix}{self.block.names[0]}", self.block.hidden_size)
        pieces: dict[str, tuple[int, ...]] = {}
        if self.block.one_linear:
            rows = tuple(rows for _, rows in parts)
            name = self.prefix + self.block.one_linear
            parts, pieces = ((name, sum(rows)),), {name: rows}
        qkv = StoredLinear(
            self.qkv,
            parts,
            axis=0,
            order=of_heads.order(),
            pieces=pieces,
            transposed=self.block.transposed,
            head_rows=self.block.head_dim,
        )
        return [qkv, StoredLinear(self.output, (output,), axis=1, transposed=qkv.transposed)]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        prefix, of_heads, one = self.prefix, self.block.rows, self.block.one_linear
        qkv, output = self.linears()
        names = output.views()
        if isinstance(self.qkv, Tensor):
            order, fused = of_heads.order(), qkv.views()
            fused = {name: rows._replace(order=order) for name, rows in fused.items()}
            names |= fused if one else of_heads.stored(f"{prefix}{{}}_proj.weight", self.qkv)
        if self.qkv_bias is not None:
            fused = {f"{prefix}{one}.bias": of_heads.fused(self.qkv_bias)}
            names |= fused if one else of_heads.stored(f"{prefix}{{}}_proj.bias", self.qkv_bias)
        last, *norms = self.block.names
        q_norm, k_norm = norms if len(norms) > 1 else (f"q_{norms[0]}", f"k_{norms[0]}")
        for name, of_rows in ((q_norm, self.q_norm), (k_norm, self.k_norm)):
            if of_rows is not None:
                names[f"{prefix}{name}.weight"] = of_heads.vector(of_rows)
        if self.output_bias is not None:
            names[f"{prefix}{last}.bias"] = Weight(self.output_bias)
        if self.sinks is not None:
            names[f"{prefix}sinks"] = Weight(self.sinks, 0)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        biases = (self.qkv_bias, self.q_norm, self.k_norm, self.output_bias, self.sinks)
        return tensors_of(self.qkv, self.output, *biases)

    def with_norms_plus_one(self) -> AttentionWeights:
        """A copy with 1 added to the heads' norms, for checkpoints that store them less 1."""
        if self.q_norm is None or self.k_norm is None:
            return self
        return replace(self, q_norm=plus_one(self.q_norm), k_norm=plus_one(self.k_norm))

    def scales_of(self, kv: Tensor) -> Tensor | None:
        """Scales of keys and values, if `kv` needs some."""
        return self.kv_scales if kv.dtype == FP8_KV else None

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        launch: DecodeLaunch,
        *,
        fed: Tensor | None = None,
        lent: Lent | None = None,
    ) -> Residual:
        """Run the block on `row`'s tokens: three kernels, and one more with gates or normed values.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares. `kv`, the layer's cache `[blocks, 2, block_size, G, D]`,
        receives each live lane's key and value at its position, through `block_table` `[S, B]`.

        fed  `[N, fed_columns]`: the input of queries, keys and values in place of the normed
             stream; the stream is then only added to
        lent  as `PagedMemory` has it
        """
        made = None if lent is None else lent.qkv
        qkv = self.qkv_product(residual if fed is None else fed, row.slot, launch, made)
        attended = self.attend_rows(qkv, row, kv, block_table, tables, launch, lent)
        return self.add(attended, residual, next_norm, row.slot, launch)

    def attend_rows(
        self,
        qkv: Tensor,
        row: DecodeLanes,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        launch: DecodeLaunch,
        lent: Lent | None = None,
    ) -> Tensor:
        """Run the part of `decode` between its two products: attention of `qkv`, `[N, Q*D]`. It may
        change `qkv`.
        """
        block = self.block
        self._norm_rows(qkv, row.slot, pdl=launch.pdl)
        keys = self if lent is None else lent.weights
        attended = decode_attention(
            qkv[:, : block.qkv_size],
            tables.cos,
            tables.sin,
            kv,
            block_table,
            row.slot,
            row.position,
            launch,
            num_heads=block.num_heads,
            num_kv_heads=block.num_kv_heads,
            scale=block.scale,
            max_seq_len=tables.max_seq_len,
            q_norm_weight=None if block.row_norm else self.q_norm,
            k_norm_weight=None if block.row_norm else keys.k_norm,
            eps=block.norm_eps,
            norm_after=block.qk_norm == "after",
            kv_scales=keys.scales_of(kv),
            window=block.window,
            sinks=self.sinks,
            softcap=block.softcap,
            split_tokens=self._split_tokens(launch, qkv.dtype),
            tokens_per_row=launch.tokens_per_row,
            tree=launch.tree,
            rope_shift_S=launch.rope_shift,
        )
        self._gate(attended, qkv, row.slot, pdl=launch.pdl)
        return attended

    def add(
        self,
        attended: Tensor,
        residual: Residual,
        next_norm: NextNorm,
        slot: Tensor,
        launch: DecodeLaunch,
    ) -> Residual:
        """Add the output product of attention's sums to `residual`, scaled for `next_norm`."""
        name, bias = f"{self.block.role}output", self.output_bias
        call = launch.call(name, attended, self.output, slot, bias=bias)
        return add_product(call, residual, next_norm, launch)

    def append(
        self,
        qkv: Tensor,
        heads: int,
        slot: Tensor,
        position: Tensor,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        launch: DecodeLaunch | PrefillLaunch,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a product's queries, of this many `heads`, rotated; append the rest to `kv`."""
        block = self.block
        k_norm = self.q_norm if block.reuses else self.k_norm
        return rope_append(
            qkv,
            tables.cos,
            tables.sin,
            kv,
            block_table,
            slot,
            position,
            num_heads=heads,
            num_kv_heads=0 if block.reuses else block.num_kv_heads,
            q_norm_weight=None if block.row_norm else self.q_norm,
            k_norm_weight=None if block.row_norm else k_norm,
            eps=block.norm_eps,
            norm_after=block.qk_norm == "after",
            kv_scales=self.scales_of(kv),
            rows=launch.rope_rows if isinstance(launch, PrefillLaunch) else None,
            shift_S=launch.rope_shift if isinstance(launch, DecodeLaunch) else None,
            out=out,
            pdl=launch.pdl,
        )

    def qkv_product(
        self,
        inputs: Tensor | Residual,
        slot: Tensor,
        launch: DecodeLaunch,
        made: Tensor | None = None,
    ) -> Tensor:
        """Queries, keys and values of decode lanes, side by side, and gates after them.

        made  memory for them; a layer that reuses keys and values finds them there
        """
        block, bias = self.block, self.qkv_bias
        if isinstance(inputs, Residual) and not block.normed:
            inputs = inputs.scaled
        call = launch.call(
            f"{block.role}qkv", inputs, self.qkv, slot, eps=block.norm_eps, bias=bias
        )
        if made is None and block.projected == "qkv":
            qkv = linear(call, STORE)
        else:
            qkv = call.x_NK.new_empty(call.lanes, block.qkv_size) if made is None else made
            linear(call, Store(out=qkv[:, : call.rows]))
        self._norm_values(qkv, slot, pdl=launch.pdl)
        return qkv

    def _norm_values(self, qkv: Tensor, slot: Tensor, *, pdl: bool) -> None:
        """Copy values from keys, or norm them, where the block does so and the values are its
        own.
        """
        block = self.block
        if block.value_norm and not block.reuses:
            norm_values(
                qkv[:, : block.qkv_size],
                slot,
                num_heads=block.num_heads,
                num_kv_heads=block.num_kv_heads,
                eps=block.norm_eps,
                of_keys=block.projected == "qk",
                pdl=pdl,
            )

    def _split_tokens(self, launch: DecodeLaunch, dtype: torch.dtype) -> int:
        """`launch.split_tokens`, or a value for the window, which stays short however long
        sequences get.
        """
        block = self.block
        if not block.window:
            return launch.split_tokens
        return block.split_tokens(launch.plans.family, dtype, block.window)

    def attend(
        self,
        lanes: PrefillLanes,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        attention: ChunkAttention,
        scratch: PrefillScratch,
        *,
        fed: Tensor | None = None,
        lent: Lent | None = None,
    ) -> Tensor:
        """Run the first half of the block on a chunk: `[N, Q*D]`, attention of the normed
        `scratch.h`, or of `fed`.

        `kv` receives the keys and values of the live lanes. The result lies in `scratch`, before
        the memory that `add_output` writes its product to.
        """
        block = self.block
        width = block.q_size if block.reuses else max(block.projected_size, block.qkv_size)
        qkv = scratch.take(width)
        q = scratch.take(block.q_size, after=width)
        x = scratch.h if fed is None else fed
        scratch.product(x, self.qkv, self.qkv_bias, out=qkv[:, : block.projected_size])
        self._norm_values(qkv, lanes.slot, pdl=scratch.launch.pdl)
        self._norm_rows(qkv, lanes.slot, pdl=scratch.launch.pdl)
        heads = self.append(
            qkv[:, : block.qkv_size],
            block.num_heads,
            lanes.slot,
            lanes.position,
            kv,
            block_table,
            tables,
            scratch.launch,
            out=q.view(-1, block.num_heads, block.head_dim),
        )
        keys = self if lent is None else lent.weights
        attended = attention(
            heads,
            kv,
            block_table_SB=block_table,
            scale=block.scale,
            kv_scales=keys.scales_of(kv),
            window=block.window,
            sinks=self.sinks,
            softcap=block.softcap,
            out=scratch.take(block.q_size, after=block.attended_after),
        )
        self._gate(attended, qkv, lanes.slot, pdl=scratch.launch.pdl)
        return attended

    def _norm_rows(self, qkv: Tensor, slot: Tensor, *, pdl: bool) -> None:
        """Norm all queries of a lane together, and all keys, where the block does so, in place."""
        block = self.block
        if not block.row_norm:
            return
        parts = qkv[:, : block.q_size], qkv[:, block.q_size : block.q_size + block.kv_size]
        for part, norm in zip(parts, (self.q_norm, self.k_norm), strict=True):
            assert norm is not None
            rms_norm(part, norm, slot, eps=block.norm_eps, out_dtype=part.dtype, out=part, pdl=pdl)

    def _gate(self, attended: Tensor, qkv: Tensor, slot: Tensor, *, pdl: bool) -> None:
        """Multiply attention's sums by their gates, where there are some, in place."""
        block = self.block
        if block.gated:
            gates = qkv[:, block.qkv_size :]
            parts = block.rows.parts
            gate_heads(attended, gates, slot, head_dim=block.head_dim, parts=parts, pdl=pdl)

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
            self.output_bias,
            stream,
            next_norm,
            slot,
            scratch,
            eps=block.norm_eps,
            out=scratch.take(block.hidden_size, after=block.qkv_size),
        )
