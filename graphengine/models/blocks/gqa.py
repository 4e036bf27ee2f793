"""Grouped-query attention with RoPE: two kernels and a product in decode, one and two in prefill.

Letters: N lanes, H hidden, D head_dim, Q query heads, G kv heads, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels import (
    FP8_KV,
    PREFILL_ARRIVALS,
    AnyWeight,
    DecodeLanes,
    PrefillLanes,
    Residual,
    RopeConfig,
    RowFamily,
    attention_split,
    decode_attention,
    decode_attention_arrivals,
    decode_attention_workspace_bytes,
    linear,
    prefill_attention_workspace_bytes,
    rope_append,
    rope_tables,
)
from graphengine.models.blocks.norms import NextNorm, plus_one
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weight,
    tensors_of,
)
from graphengine.models.contract import (
    ChunkAttention,
    DecodeLaunch,
    Linear,
    Linears,
    StoredLinear,
    Weight,
    WeightForms,
)
from graphengine.models.states import Paged


class RopeTables(NamedTuple):
    """What the attention layers of a model, and those of its draft modules, have in common.

    cos, sin  float32 `[P, D/2]` of P = max_seq_len positions
    """

    cos: Tensor
    sin: Tensor
    max_seq_len: int

    @classmethod
    def of(
        cls, rope: RopeConfig, *, head_dim: int, max_seq_len: int, device: torch.device
    ) -> RopeTables:
        """The tables of this many positions."""
        tables = rope_tables(rope, head_dim=head_dim, max_positions=max_seq_len, device=device)
        return cls(*tables, max_seq_len)

    @classmethod
    def still(cls, *, head_dim: int, max_seq_len: int, device: torch.device) -> RopeTables:
        """Tables by which nothing turns, for attention without RoPE: the bits stay as they are."""
        half = (max_seq_len, head_dim // 2)
        return cls(torch.ones(half, device=device), torch.zeros(half, device=device), max_seq_len)

    @staticmethod
    def nbytes(head_dim: int, max_seq_len: int) -> int:
        """Bytes of both tables."""
        return max_seq_len * head_dim * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQueryAttention:
    """Sizes and switches of the block.

    qk_norm   an RMSNorm on each head's query and key before RoPE
    norm_eps  of these norms, and of the one that the block's input needs
    window    tokens that a query sees, its own among them; 0: all up to its own
    half      whether RoPE turns the first half of a head alone; `RopeConfig.rotated` is then 0.5
    scale_of  scores are divided by its root; 0: head_dim
    sinks     whether each head has a learned score of no token
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    half: bool = False
    scale_of: float = 0.0
    sinks: bool = False

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
    def scale(self) -> float:
        return float((self.scale_of or self.head_dim) ** -0.5)

    @property
    def linears(self) -> Linears:
        """In the order of a step. Ranks split heads: a kv head stays with its query heads."""
        return {
            "qkv": Linear("store", self.qkv_size, self.hidden_size, shard="rows"),
            "output": Linear("residual", self.hidden_size, self.q_size, shard="columns"),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """Of each weight, the first linear of a checkpoint whose rows it has."""
        return {"qkv": "q_proj", "output": "o_proj"}

    @property
    def state(self) -> Paged:
        """A key and a value a token."""
        return Paged(2, (self.num_kv_heads, self.head_dim), self.window)

    @property
    def table_dim(self) -> int:
        """Values that RoPE's tables are for."""
        return self.head_dim

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return self.qkv_size + max(self.q_size, self.hidden_size)

    def arrivals(self, lanes: int) -> int:
        """Counters that attention uses, for this many decode lanes and for a chunk."""
        decode = decode_attention_arrivals(
            lanes, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads
        )
        return max(PREFILL_ARRIVALS, decode)

    def split_tokens(self, family: RowFamily, dtype: torch.dtype) -> int:
        """Tokens that a program of decode attention reads."""
        return attention_split(family, self.head_dim, dtype)

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

        def weight(name: str, rows: int, columns: int) -> AnyWeight:
            first = prefix + self.first_linears[name]
            return new_weight(forms, first, (rows, columns), device=device, dtype=dtype)

        hidden = self.hidden_size
        return AttentionWeights(
            block=self,
            prefix=prefix,
            qkv=weight("qkv", self.qkv_size, hidden),
            qkv_bias=new(self.qkv_bias, self.qkv_size),
            q_norm=new(self.qk_norm, self.head_dim),
            k_norm=new(self.qk_norm, self.head_dim),
            kv_scales=torch.ones((2, self.num_kv_heads), device=device),
            output=weight("output", hidden, self.q_size),
            output_bias=new(self.output_bias, hidden),
            sinks=torch.empty(self.num_heads, device=device) if self.sinks else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """The block's weights; q, k and v are one matrix.

    Where RoPE turns half of a head, the quarters 1 and 2 of queries and keys are exchanged: then
    each value that turns is half a head from its partner, as the kernels have it, and so is each of
    the others. Scores are sums over a head, and stay the same.

    prefix     of the names in the checkpoint, those of Hugging Face's decoders of Llama's lineage
    kv_scales  float32 `[2, G]`, of keys and values in an fp8 cache: 1 until somebody sets them
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
        parts = tuple((f"{self.prefix}{name}_proj", rows) for name, rows in self._qkv_rows())
        output = (f"{self.prefix}o_proj", self.block.hidden_size)
        qkv = StoredLinear(self.qkv, parts, axis=0, order=self._row_order())
        return [qkv, StoredLinear(self.output, (output,), axis=1)]

    def _row_order(self) -> Tensor | None:
        """Of each row of `qkv`, the one that it is in a checkpoint; None: all are in its order."""
        if not self.block.half:
            return None
        rows = torch.arange(self.block.qkv_size)
        turned = self.block.q_size + self.block.kv_size
        rows[:turned] = self._of_checkpoint(rows[:turned]).flatten()
        return rows

    def _of_checkpoint(self, rows: Tensor) -> Tensor:
        """Rows of queries or keys as a checkpoint has them: a view `[heads, 2, 2, D / 4, ...]`."""
        if not self.block.half:
            return rows
        return rows.view(-1, 2, 2, self.block.head_dim // 4, *rows.shape[1:]).transpose(1, 2)

    def _qkv_rows(self) -> list[tuple[str, int]]:
        return [("q", self.block.q_size), ("k", self.block.kv_size), ("v", self.block.kv_size)]

    def stored(self) -> dict[str, Weight]:
        """What is not packed, by its name."""
        prefix = self.prefix
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        for name in (f"{prefix}q_proj.weight", f"{prefix}k_proj.weight"):
            if name in names:
                names[name] = names[name]._replace(tensor=self._of_checkpoint(names[name].tensor))
        if self.qkv_bias is not None:
            named = self._qkv_rows()
            biases = torch.split(self.qkv_bias, [rows for _, rows in named])
            for (name, _), part in zip(named, biases, strict=True):
                turned = part if name == "v" else self._of_checkpoint(part)
                names[f"{prefix}{name}_proj.bias"] = Weight(turned, 0)
        for name, whole in (
            ("o_proj.bias", self.output_bias),
            ("q_norm.weight", None if self.q_norm is None else self._of_checkpoint(self.q_norm)),
            ("k_norm.weight", None if self.k_norm is None else self._of_checkpoint(self.k_norm)),
        ):
            if whole is not None:
                names[prefix + name] = Weight(whole)
        if self.sinks is not None:
            names[f"{prefix}sinks"] = Weight(self.sinks, 0)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        biases = (self.qkv_bias, self.q_norm, self.k_norm, self.output_bias, self.sinks)
        return tensors_of(self.qkv, self.output, *biases)

    def with_norms_plus_one(self) -> AttentionWeights:
        """The same where the checkpoint's norms lack 1."""
        if self.q_norm is None or self.k_norm is None:
            return self
        return replace(self, q_norm=plus_one(self.q_norm), k_norm=plus_one(self.k_norm))

    def _scales_of(self, kv: Tensor) -> Tensor | None:
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
    ) -> Residual:
        """The block for `row`'s tokens: three kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place but for its squares. `kv`, the layer's cache `[blocks, 2, block_size, G, D]`, receives
        each live lane's key and value at its position, through `block_table` `[S, B]`.
        """
        block = self.block
        qkv = linear(
            residual.scaled,
            self.qkv,
            row.slot,
            squares_TN=residual.squares,
            eps=block.norm_eps,
            bias=self.qkv_bias,
            plan=launch.plan("qkv", self.qkv),
            launch=launch,
        )
        attended = decode_attention(
            qkv,
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
            q_norm_weight=self.q_norm,
            k_norm_weight=self.k_norm,
            eps=block.norm_eps,
            kv_scales=self._scales_of(kv),
            window=block.window,
            sinks=self.sinks,
            split_tokens=launch.split_tokens,
            tokens_per_row=launch.tokens_per_row,
        )
        return add_product(
            attended,
            self.output,
            row.slot,
            residual,
            next_norm,
            bias=self.output_bias,
            plan=launch.plan("output", self.output),
            launch=launch,
        )

    def attend(
        self,
        lanes: PrefillLanes,
        kv: Tensor,
        block_table: Tensor,
        tables: RopeTables,
        attention: ChunkAttention,
        scratch: PrefillScratch,
    ) -> Tensor:
        """The first half of the block for a chunk: `[N, Q*D]` attention of the normed `scratch.h`.

        `kv` receives the keys and values of the live lanes. The result lies in `scratch`, before
        what the product of `add_output` writes.
        """
        block = self.block
        qkv = scratch.take(block.qkv_size)
        q = scratch.take(block.q_size, after=block.qkv_size)
        rope_append(
            scratch.product(scratch.h, self.qkv, self.qkv_bias, out=qkv),
            tables.cos,
            tables.sin,
            kv,
            block_table,
            lanes.slot,
            lanes.position,
            num_heads=block.num_heads,
            num_kv_heads=block.num_kv_heads,
            q_norm_weight=self.q_norm,
            k_norm_weight=self.k_norm,
            eps=block.norm_eps,
            kv_scales=self._scales_of(kv),
            out=q.view(-1, block.num_heads, block.head_dim),
            pdl=scratch.launch.pdl,
        )
        attended = scratch.take(block.q_size)
        heads = q.view(-1, block.num_heads, block.head_dim)
        return attention(
            heads,
            kv,
            block_table_SB=block_table,
            scale=block.scale,
            kv_scales=self._scales_of(kv),
            window=block.window,
            sinks=self.sinks,
            out=attended,
        )

    def add_output(
        self,
        attended: Tensor,
        stream: Tensor,
        next_norm: NextNorm,
        slot: Tensor,
        scratch: PrefillScratch,
    ) -> None:
        """The other half: `stream`, float32, in place, and `scratch.h` of it after `next_norm`.

        `attended` is lost where it lies in `scratch`.
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
