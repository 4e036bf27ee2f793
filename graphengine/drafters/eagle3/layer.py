"""EAGLE3: an extra layer that reads the target's residual stream after a few of its layers.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language
Models via Training-Time Test", arXiv:2503.01840. For the token at position p and the one after it:

    g = fc [h_a; h_b; h_c]           where the target has run; else y of the previous run
                                     EAGLE 3.1 norms each h first (`fc_norm`); with
                                     `norm_before_fc` one norm covers all of them
    a = attention of [norm_e(E(token)); norm_h(g)], which is 2H wide
    r = g + a                        or norm_h(g) + a, as `norm_before_residual` says
    y = r + mlp(norm(r))
    logits = lm_head(norm_out(y))    over the draft vocabulary

h_a, h_b and h_c are the residual stream after the target's layers a, b and c, before any norm. The
next run reads y as it is, or norm_out(y), as `norm_output` says. Where the checkpoint has no E or
lm_head, the target's is used.

Letters: N lanes, T tokens of a chunk, H hidden, D draft vocabulary, V vocabulary, A target layers
that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from graphengine.drafters.stream_readers import StreamReaders, grouped_attention, layers_like
from graphengine.kernels.linear.epilogues import StoreSquares
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import chunk_product
from graphengine.models.composition import blocks_of
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig
from graphengine.models.decoder_layer import (
    LayerWeights,
    allocate_layer,
    decode_feed_forward,
    finish_prefill_layer,
    prefill_scratch,
)
from graphengine.models.launches import (
    ChunkAttention,
    DecodeLaunch,
    PrefillLaunch,
    Share,
)
from graphengine.models.linears import PLAIN, Linear, Linears
from graphengine.models.splitting.rank_sizes import split_layers
from graphengine.models.states import LayerStates
from graphengine.models.weights import StoredLinear, StoredWeights, Weight


def usual_layers(target: ModelConfig) -> tuple[int, ...]:
    """Target layers that heads read by default; a small target does not have all of them."""
    count = target.num_layers
    return (1, count // 2 - 1, count - 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Names:
    """Names in the checkpoint, without ".weight"; None where the target's tensor is used.

    layer         prefix of the layer's tensors
    stream_norms  norms of fc's input, each for an equal share of its columns; empty: there are none
    """

    layer: str
    fc: str
    final_norm: str
    lm_head: str | None
    embedding: str | None
    stream_norms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(StreamReaders):
    """Sizes and switches of an EAGLE3 head.

    layer           config of the layer; its vocabulary is the draft vocabulary
    layers          target layers whose output stream is read, in the order of fc's columns
    target_width    columns of that stream
    embedding_rows  of the checkpoint's embedding; 0: there is none
    fc_bias         whether fc has a bias
    normed_stream   whether the layer adds to norm_h(g) in place of g
    normed_output   whether the next run reads norm_out(y) in place of y
    """

    layer: DecoderConfig
    names: Eagle3Names
    layers: tuple[int, ...]
    target_width: int
    embedding_rows: int = 0
    fc_bias: bool = False
    normed_stream: bool = False
    normed_output: bool = False

    @classmethod
    def of_target(cls, target: ModelConfig, draft_vocabulary: int) -> Self:
        """A head as SpecForge configures it: a dense layer of the target's sizes.

        It reads the usual layers, or in a small target the nearest ones. ValueError for a target
        with layers of a kind that no head has.
        """
        layer = layers_like(
            target, "EAGLE3 head", architecture="Eagle3", vocab_size=draft_vocabulary
        )
        last = target.num_layers - 1
        usual = {min(max(each, 0), last) for each in usual_layers(target)}
        return cls(
            layer=layer,
            names=Eagle3Names(
                layer="midlayer.", fc="fc", final_norm="norm", lm_head="lm_head", embedding=None
            ),
            layers=tuple(sorted(usual)),
            target_width=target.hidden_size,
        )

    def of_rank(self, share: Share) -> Self:
        """One rank's part of the layer, split as the model's are; each rank has fc and lm_head.

        ValueError for sizes that the ranks do not divide.
        """
        layer = self.layer
        return replace(self, layer=split_layers(layer, share))

    @property
    def sizes(self) -> DecoderConfig:
        return self.layer

    @property
    def draft_vocabulary(self) -> int:
        """D, the tokens that can be drafted."""
        return self.layer.vocab_size

    @property
    def attention(self) -> GroupedQueryAttention:
        return replace(grouped_attention(self.layer), fed_size=2 * self.hidden_size)

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """Keys and values of the one layer."""
        return ((self.attention.state,),)

    def linears(self) -> Linears:
        """The linears of a run, in its order; fc's product is not added to anything."""
        return {
            "fc": Linear("residual", self.hidden_size, self.streams_width),
            **self.attention.linears,
            **blocks_of(self.layer)[-1].linears,
            "lm_head": Linear("sample", self.draft_vocabulary, self.hidden_size),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Weights(StoredWeights):
    """All weights of an EAGLE3 head, in the model's dtype; `layer.input_norm` norms the embedding.

    fc            `[H, A * target width]`
    stream_norms  `[A * target width]` together, in the order of fc's columns
    lm_head       `[D, H]`, its rows in the order of their tokens; None: it is the target's
    embedding     `[V, H]`; None: it is the target's
    """

    config: Eagle3Config
    fc: Tensor
    fc_bias: Tensor | None
    stream_norms: tuple[Tensor, ...]
    hidden_norm: Tensor
    layer: LayerWeights
    final_norm: Tensor
    lm_head: Tensor | None
    embedding: Tensor | None

    @property
    def attention(self) -> AttentionWeights:
        """The layer's attention."""
        attention = self.layer.attention
        assert isinstance(attention, AttentionWeights), f"{attention=}"
        return attention

    def linears(self) -> list[StoredLinear]:
        """The weight of every linear."""
        names = self.config.names
        linears = [StoredLinear(self.fc, ((names.fc, len(self.fc)),)), *self.layer.linears()]
        if self.lm_head is not None and names.lm_head is not None:
            linears.append(StoredLinear(self.lm_head, ((names.lm_head, len(self.lm_head)),)))
        return linears

    def stored(self) -> dict[str, Weight]:
        """Every tensor by its name."""
        names = self.config.names
        named: dict[str, Tensor | None] = {
            f"{names.fc}.weight": self.fc,
            f"{names.fc}.bias": self.fc_bias,
            f"{names.layer}hidden_norm.weight": self.hidden_norm,
            f"{names.final_norm}.weight": self.final_norm,
            f"{names.lm_head}.weight": self.lm_head,
            f"{names.embedding}.weight": self.embedding,
        }
        norms = zip(names.stream_norms, self.stream_norms, strict=True)
        named |= {f"{name}.weight": norm for name, norm in norms}
        own = {name: Weight(tensor) for name, tensor in named.items() if tensor is not None}
        return own | self.layer.stored()

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        own = (self.fc, self.fc_bias, self.hidden_norm, self.final_norm, self.lm_head)
        there = [tensor for tensor in (*own, self.embedding) if tensor is not None]
        return [*there, *self.stream_norms, *self.layer.tensors()]

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of the layer's keys and values, by the prefix of its attention."""
        return {self.attention.prefix: self.attention.kv_scales}


def allocate_eagle3_weights(
    config: Eagle3Config, *, device: str, dtype: torch.dtype
) -> Eagle3Weights:
    """Uninitialised weights of the right shapes; `device="meta"` allocates nothing."""
    hidden, names = config.hidden_size, config.names

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    ((attention, mlp),) = config.layer.layers
    sublayers = (attention._replace(block=config.attention), mlp)
    layer = allocate_layer(names.layer, sublayers, hidden, PLAIN, device=device, dtype=dtype)
    return Eagle3Weights(
        config=config,
        fc=new(hidden, config.streams_width),
        fc_bias=new(hidden) if config.fc_bias else None,
        stream_norms=tuple(
            new(config.streams_width // len(names.stream_norms)) for _ in names.stream_norms
        ),
        hidden_norm=new(hidden),
        layer=layer,
        final_norm=new(hidden),
        lm_head=None if names.lm_head is None else new(config.draft_vocabulary, hidden),
        embedding=new(config.embedding_rows, hidden) if config.embedding_rows else None,
    )


def fuse_streams(
    weights: Eagle3Weights, streams_NS: Tensor, slot_N: Tensor, launch: DecodeLaunch
) -> Tensor:
    """Compute g for decode lanes, float32 `[N, H]`. Padded lanes hold anything.

    streams_NS  the streams that the target's layers left, side by side
    """
    normed = _normed_streams(weights, streams_NS, slot_N, launch.pdl)
    call = launch.call("fc", normed, weights.fc, slot_N, bias=weights.fc_bias)
    return linear(call, StoreSquares()).y


def fuse_chunk(
    weights: Eagle3Weights, streams_TS: Tensor, slot_T: Tensor, launch: PrefillLaunch
) -> Tensor:
    """Compute g for a chunk's lanes, in the model's dtype; otherwise like `fuse_streams`."""
    normed = _normed_streams(weights, streams_TS, slot_T, launch.pdl)
    g = streams_TS.new_empty(len(streams_TS), weights.config.hidden_size)
    return chunk_product(
        normed, weights.fc, weights.fc_bias, out=g, pdl=launch.pdl, any_lanes=launch.any_lanes
    )


def _normed_streams(
    weights: Eagle3Weights, streams_NS: Tensor, slot_N: Tensor, pdl: bool
) -> Tensor:
    """fc's input: the streams, in new memory where they have norms. Padded lanes hold anything."""
    norms = weights.stream_norms
    if not norms:
        return streams_NS
    normed, eps = torch.empty_like(streams_NS), weights.config.layer.norm_eps
    shares = (each.chunk(len(norms), dim=1) for each in (streams_NS, normed))
    for norm, source, out in zip(norms, *shares, strict=True):
        rms_norm(source, norm, slot_N, eps=eps, out_dtype=out.dtype, out=out, pdl=pdl)
    return normed


def eagle3_decode(
    weights: Eagle3Weights,
    combined_N2H: Tensor,
    residual: Residual,
    row: DecodeLanes,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch,
) -> Residual:
    """Run the layer on `row`'s lanes; returns y, and y scaled for the final norm.

    combined_N2H  the normed embedding and hidden state
    residual      `x` is the stream that the layer adds to; updated in place. The other parts are
                  not read.
    kv            the layer's cache: each live lane's keys and values are written at `row.position`
    launch        with plans of `Eagle3Config.linears`
    """
    layer = weights.layer
    residual = weights.attention.decode(
        row,
        residual,
        layer.after_attention,
        kv,
        block_table,
        tables,
        launch,
        fed=combined_N2H,
    )
    return decode_feed_forward(layer, weights.final_norm, row, residual, launch)


def eagle3_prefill(
    weights: Eagle3Weights,
    combined_T2H: Tensor,
    stream_TH: Tensor,
    chunk: PrefillLanes,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    attention: ChunkAttention,
    *,
    launch: PrefillLaunch,
) -> Tensor:
    """Run the layer on a chunk's lanes; returns y `[T, H]` after the final norm, in model dtype.

    stream_TH  float32, the stream that the layer adds to; it becomes y. Padded lanes hold anything.
    Other arguments as in `eagle3_decode`; `attention` as in `Model.prefill`.
    """
    layer = weights.layer
    scratch = prefill_scratch([layer], len(stream_TH), like=combined_T2H, launch=launch)
    attended = weights.attention.attend(
        chunk, kv, block_table, tables, attention, scratch, fed=combined_T2H
    )
    finish_prefill_layer(layer, weights.final_norm, stream_TH, attended, chunk.slot, scratch)
    return scratch.h
