"""Sizes and names of an inner decoder, known before anything is allocated.

Letters: K codes of a frame, V codes of a codebook, W rows of a codebook's embedding, U codes of the
first one, H the model's hidden size, I the inner decoder's, P codes that stream in, S slots.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.linears import Linear, Linears
from graphengine.models.states import Paged
from graphengine.models.sublayers import Layer

BLOCK = 16
"""Positions of a block of the inner decoder's cache."""


class InnerNames(NamedTuple):
    """Names of the tensors in a checkpoint; those of linears and norms without ".weight".

    frames      `[K * V, H]`, embeddings of the codes of a frame, whose sum the model reads; with
                "{}", `[V, H]` for each codebook by its number, from 0 on: the codebooks after the
                first, then those of codes that stream in
    codes       the same embeddings, as the inner decoder reads them
    projection  `[I, H]`, applied to all inputs of the inner decoder; "": inputs are read as they
                are, and I is H
    layers      prefix of the layers, before their numbers
    norm        of the inner decoder's output; "": there is none
    heads       `[K - 1, I, V]`, a head for each code but the first; with "{}", `[V, I]` of each
    first       `[U, I]`, the embedding of first codes that the inner decoder reads; "": the model's

    Where each run has weights of its own, linears are `[K - 1, rows, columns]`.
    """

    frames: str
    codes: str
    projection: str
    layers: str
    norm: str
    heads: str
    first: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerDecoder:
    """A decoder that is unrolled in each step of a model, with a cache that lives for one step.

    Position 0 reads the model's output after its final norm. Position k > 0 reads code k - 1, and
    head k - 1 of its output gives code k. With `per_run` there are K - 1 positions: position k
    reads both the model's output and code k, and gives code k + 1.

    steps        K, codes of a frame: the model's head gives the first, the inner decoder the others
    codes        V
    first_codes  U, codes of the first codebook, where they are the ids of the model and have its
                 embedding; 0: the first codebook has V codes, like the others
    width        H
    hidden_size  I
    layers       of a run
    per_run      whether each run has a projection, linears of layers and a head of its own; norms
                 are shared. A run then begins with the projection of the model's output and the
                 embedding of its code, of I values
    end_code     the code of the frame that ends a request; -1: no code does
    judged       a frame ends the request if its first `judged` codes are the end code
    tied         whether the model and the inner decoder share the embeddings of codes
    stored       the names under which a checkpoint has shared embeddings
    fed          whether an embedding that streams in is added to that of each frame
    fed_books    P, codebooks of somebody else's frames, whose codes stream in in place of
                 embeddings; 0: embeddings do
    begins       1: each codebook has one more embedding, W = V + 1, which stands for the time
                 before the first frame and is never drawn; and all codes of a frame of sound but
                 its first come one frame late. 0: neither
    projection_bias  whether the projection has a bias
    end_token    the id that stands for the frame that ends a request, among the model's ids
    """

    steps: int
    codes: int
    width: int
    hidden_size: int
    norm_eps: float
    layers: tuple[Layer, ...]
    rope: RopeConfig
    end_code: int
    judged: int
    names: InnerNames
    tied: bool = True
    stored: tuple[str, ...] = ()
    first_codes: int = 0
    fed: bool = False
    projection_bias: bool = False
    per_run: bool = False
    fed_books: int = 0
    begins: int = 0

    @property
    def end_token(self) -> int:
        return self.end_code if self.first_codes else self.codes

    @property
    def head_rows(self) -> int:
        """Codes that the model's own head knows."""
        return self.first_codes or self.codes

    @property
    def book_rows(self) -> int:
        """W"""
        return self.codes + self.begins

    @property
    def codebooks(self) -> tuple[int, ...]:
        """Codes of each of the K codebooks that a caller may give."""
        return (self.head_rows + self.begins, *(self.book_rows,) * (self.steps - 1))

    @property
    def runs(self) -> int:
        """How often the decoder runs in a step."""
        return self.steps - self.per_run

    @property
    def attention(self) -> GroupedQueryAttention:
        """The attention of every layer."""
        block = self.layers[0][0].block
        assert isinstance(block, GroupedQueryAttention), f"{block=}"
        return block

    @property
    def linears(self) -> Linears:
        """The linears of one run: the projection, those of the layers, and a head."""
        linears: dict[str, Linear] = {
            "projection": Linear("residual", self.hidden_size, self.width)
        }
        for layer in self.layers:
            for each in layer:
                linears |= each.block.linears
        linears["head"] = Linear("sample", self.codes, self.hidden_size)
        return linears

    def named_as(self, tensors: Collection[str]) -> Self:
        """This decoder with the names that a checkpoint with these tensors has."""
        if not self.tied or self.first_codes:
            return self
        both = f"{self.names.frames}.weight", f"{self.names.codes}.weight"
        return replace(self, stored=tuple(name for name in both if name in tensors) or both[:1])

    @property
    def blocks(self) -> int:
        """Blocks of the cache that a slot has."""
        return -(-self.steps // BLOCK)

    def cache_shape(self, slots: int) -> tuple[int, ...]:
        """`[layers, blocks, 2, BLOCK, G, D]`. Block 0 belongs to no slot and is never read."""
        block = Paged(2, self.attention.state.entry).block_shape(BLOCK)
        return (len(self.layers), 1 + slots * self.blocks, *block)

    def table_bytes(self, slots: int) -> int:
        """Bytes of RoPE's tables, of block tables and of positions."""
        tables = RopeTables.nbytes(self.attention.table_dim, self.steps)
        return tables + 4 * slots * (self.blocks + self.steps)
