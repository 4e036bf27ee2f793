"""DFlash and DSpark: a few extra layers that draft a block of tokens for a target in one run.

J. Chen, Y. Liang, Z. Liu, "DFlash: Block Diffusion for Flash Speculative Decoding",
arXiv:2602.06036, with z-lab/dflash; DSpark: deepseek-ai/DeepSpec and the paper in it. With the
residual stream h_a, h_b, .. that the target's layers a, b, .. leave at each verified position,

    c = norm_h(fc [h_a; h_b; ..])
    keys, values of each layer at that position = projections of c, which no layer changes
    x = [E(newest token), E(mask), .., E(mask)] at the positions that follow
    x = x + attention(norm(x)), x + mlp(norm(x)), layer by layer
    logits = lm_head(norm_out(x))

The layers are Qwen3's. A block's lanes attend to every verified position and to the whole block; in
a causal layer they do not attend to later lanes. Each layer has its own KV cache: a block's entries
are overwritten by verified tokens or by the next block.

A DFlash block of K + 1 lanes drafts K tokens: the logits of a mask are for the token at its own
position. In a DSpark block of K lanes each lane's logits are for the token after it, and drafts are
sampled one after the other: the draft after token t from the lane's logits plus w2 w1[t], which its
checkpoint calls a Markov head. Where the checkpoint has no E or lm_head, the target's is used.

Letters: N lanes, T tokens of a chunk, R rows, B lanes of a block, H hidden, V vocabulary, A target
layers that are read, r rank of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from graphengine.drafters.block.attention import attend_block, keep_keys
from graphengine.drafters.stream_readers import StreamReaders, grouped_attention, layers_like
from graphengine.kernels.draft.block import BlockDraft
from graphengine.kernels.draft.markov import MarkovHead
from graphengine.kernels.linear.epilogues import Store
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import chunk_product
from graphengine.models.composition import blocks_of, named_layers
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig
from graphengine.models.decoder_layer import (
    LayerWeights,
    allocate_layer,
    decode_feed_forward,
)
from graphengine.models.launches import DecodeLaunch, PrefillLaunch, Share
from graphengine.models.linears import Linear, Linears
from graphengine.models.splitting.rank_sizes import split_layers
from graphengine.models.states import LayerStates
from graphengine.models.weights import StoredLinear, StoredWeights, Weight

USUAL_LAYERS = 5
"""Layers of a published drafter; it reads the stream after as many layers of its target."""


def usual_layers(target: ModelConfig) -> tuple[int, ...]:
    """Target layers that z-lab's and DeepSpec's drafters read, evenly from 1 to n - 3 of n layers.

    In a small target they are the nearest layers there are, without the last.
    """
    count = target.num_layers
    spread = (count - 4) / (USUAL_LAYERS - 1)
    numbers = (round(1 + spread * index) for index in range(USUAL_LAYERS))
    return tuple(sorted({min(max(number, 0), count - 2) for number in numbers}))


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(StreamReaders):
    """Sizes and switches of a block drafter.

    decoder          config of the drafter's layers, including their windows
    causal           for each layer, whether lanes do not attend to later lanes
    layers           target layers whose output stream is read, in the order of fc's columns
    target_width     columns of that stream
    mask_token       the token that stands for an unknown one
    trained_block    lanes per block that the layers were trained for
    from_newest      whether the newest token's lane makes a draft, as DSpark's does
    rank             of the sequential head; 0: there is none
    embedding_rows   of the checkpoint's embedding; 0: there is none
    own_head         whether the checkpoint has an lm_head
    """

    decoder: DecoderConfig
    causal: tuple[bool, ...]
    layers: tuple[int, ...]
    target_width: int
    mask_token: int
    trained_block: int
    from_newest: bool = False
    rank: int = 0
    embedding_rows: int = 0
    own_head: bool = False

    @classmethod
    def of_target(cls, target: ModelConfig, block: int, *, rank: int = 0) -> Self:
        """A drafter like those published for Qwen3-8B, with layers of the target's sizes.

        It has `USUAL_LAYERS` layers and reads as many of the target's; with a rank it is DSpark's.
        It shares the target's embedding and head. ValueError for a target with layers of a kind
        that no drafter has.
        """
        decoder = layers_like(
            target,
            "block drafter",
            architecture="DFlash",
            vocab_size=target.vocab_size,
            num_layers=USUAL_LAYERS,
            qk_norm=True,
        )
        return cls(
            decoder=decoder,
            causal=(False,) * USUAL_LAYERS,
            layers=usual_layers(target),
            target_width=target.hidden_size,
            mask_token=target.vocab_size - 1,
            trained_block=block,
            from_newest=rank > 0,
            rank=rank,
        )

    def of_rank(self, share: Share) -> Self:
        """One rank's part of the layers, split as the model's are; each rank has fc and the heads.

        ValueError for sizes that the ranks do not divide.
        """
        decoder = self.decoder
        return replace(self, decoder=split_layers(decoder, share))

    @property
    def sizes(self) -> DecoderConfig:
        return self.decoder

    @property
    def most_drafts(self) -> int:
        """Drafts of a block of the trained length."""
        return self.trained_block - (0 if self.from_newest else 1)

    def block_of(self, drafts: int) -> int:
        """B of a run that makes this many drafts."""
        return drafts + (0 if self.from_newest else 1)

    @property
    def attention(self) -> GroupedQueryAttention:
        return grouped_attention(self.decoder)

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """Keys and values of each layer."""
        return self.decoder.states

    def linears(self) -> Linears:
        """The linears of a run, in the order in which it runs them."""
        return {
            "fc": Linear("store", self.hidden_size, self.streams_width),
            "context": self.attention.context_linear,
            **self.attention.linears,
            **blocks_of(self.decoder)[-1].linears,
            "lm_head": Linear("sample", self.decoder.vocab_size, self.hidden_size),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashWeights(StoredWeights):
    """All weights of a block drafter, in the model's dtype.

    Names are those that `Checkpoint` gives to a base model saved alone: "model.layers.0." for
    "layers.0.".

    fc         `[H, A * target width]`
    markov     `[V, r]` each; None: drafts do not depend on each other
    lm_head    `[V, H]`; None: it is the target's
    embedding  `[V, H]`; None: it is the target's
    """

    config: DFlashConfig
    fc: Tensor
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    markov: MarkovHead | None
    lm_head: Tensor | None
    embedding: Tensor | None

    def linears(self) -> list[StoredLinear]:
        """The weight of every linear."""
        linears = [StoredLinear(self.fc, (("fc", len(self.fc)),))]
        linears += [each for layer in self.layers for each in layer.linears()]
        if self.lm_head is not None:
            linears.append(StoredLinear(self.lm_head, (("lm_head", len(self.lm_head)),)))
        return linears

    def _own(self) -> dict[str, Tensor]:
        """Tensors that belong to no layer, by name."""
        own: dict[str, Tensor | None] = {
            "fc.weight": self.fc,
            "hidden_norm.weight": self.hidden_norm,
            "model.norm.weight": self.final_norm,
            "lm_head.weight": self.lm_head,
            "model.embed_tokens.weight": self.embedding,
        }
        if self.markov is not None:
            own["markov_head.markov_w1.weight"] = self.markov.w1
            own["markov_head.markov_w2.weight"] = self.markov.w2
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def stored(self) -> dict[str, Weight]:
        """Every tensor by its name."""
        named = {name: Weight(tensor) for name, tensor in self._own().items()}
        for layer in self.layers:
            named |= layer.stored()
        return named

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        of_layers = [tensor for layer in self.layers for tensor in layer.tensors()]
        return [*self._own().values(), *of_layers]

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of each layer's keys and values, by the prefix of its attention."""
        return {each.prefix: each.kv_scales for each in map(attention_of, self.layers)}


def attention_of(layer: LayerWeights) -> AttentionWeights:
    """A layer's attention, which is always grouped-query attention."""
    assert isinstance(layer.attention, AttentionWeights), f"{layer.attention=}"
    return layer.attention


def allocate_dflash_weights(
    config: DFlashConfig, *, device: str, dtype: torch.dtype
) -> DFlashWeights:
    """Uninitialised weights of the right shapes; `device="meta"` allocates nothing."""
    hidden, decoder = config.hidden_size, config.decoder

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    layers = tuple(
        allocate_layer(prefix, layer, hidden, decoder.forms, device=device, dtype=dtype)
        for prefix, layer in named_layers(decoder)
    )
    factor = (decoder.vocab_size, config.rank)
    return DFlashWeights(
        config=config,
        fc=new(hidden, config.streams_width),
        hidden_norm=new(hidden),
        layers=layers,
        final_norm=new(hidden),
        markov=MarkovHead(new(*factor), new(*factor)) if config.rank else None,
        lm_head=new(decoder.vocab_size, hidden) if config.own_head else None,
        embedding=new(config.embedding_rows, hidden) if config.embedding_rows else None,
    )


def dflash_context(
    weights: DFlashWeights, streams_NS: Tensor, slot_N: Tensor, launch: DecodeLaunch
) -> Tensor:
    """Compute c for decode lanes, `[N, H]` in the model's dtype. Padded lanes hold anything.

    streams_NS  the streams that the target's layers left, side by side
    """
    call = launch.call("fc", streams_NS, weights.fc, slot_N)
    product = linear(call, Store(dtype=torch.float32))
    return _normed(weights, product, slot_N, streams_NS.dtype, pdl=launch.pdl)


def dflash_chunk_context(
    weights: DFlashWeights, streams_TS: Tensor, slot_T: Tensor, launch: PrefillLaunch
) -> Tensor:
    """Compute c for a chunk's lanes, otherwise like `dflash_context`."""
    product = streams_TS.new_empty(len(streams_TS), weights.config.hidden_size)
    chunk_product(
        streams_TS, weights.fc, None, out=product, pdl=launch.pdl, any_lanes=launch.any_lanes
    )
    return _normed(weights, product, slot_T, streams_TS.dtype, pdl=launch.pdl)


def _normed(
    weights: DFlashWeights, product: Tensor, slot: Tensor, dtype: torch.dtype, *, pdl: bool
) -> Tensor:
    eps = weights.config.output_eps
    return rms_norm(product, weights.hidden_norm, slot, eps=eps, out_dtype=dtype, pdl=pdl)


def keep_context(
    weights: DFlashWeights,
    context_NH: Tensor,
    slot_N: Tensor,
    position_N: Tensor,
    cache: Sequence[Tensor],
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch | PrefillLaunch,
) -> None:
    """Write the keys and values of c into each layer's cache, at the lanes' positions.

    slot_N  -1 for lanes that are not kept, as their drafts were rejected
    launch  for decode lanes, with plans of `DFlashConfig.linears`, or for a chunk
    """
    for layer, kv in zip(weights.layers, cache, strict=True):
        attention = attention_of(layer)
        keep_keys(attention, context_NH, slot_N, position_N, kv, block_table, tables, launch)


def run_block(
    weights: DFlashWeights,
    begun: BlockDraft,
    residual: Residual,
    cache: Sequence[Tensor],
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch,
) -> Residual:
    """Run the layers on the blocks of `begun`; returns their stream, scaled for the final norm.

    residual  R * B lanes, scaled for the first layer; updated in place
    cache     of all layers; it holds the context, and the block's keys and values are written after
              it
    """
    layers = weights.layers
    following = [*(layer.input_norm for layer in layers[1:]), weights.final_norm]
    for layer, kv, causal, next_norm in zip(
        layers, cache, weights.config.causal, following, strict=True
    ):
        residual = attend_block(
            attention_of(layer),
            begun,
            residual,
            layer.after_attention,
            kv,
            block_table,
            tables,
            launch,
            causal=causal,
        )
        residual = decode_feed_forward(layer, next_norm, begun.lanes, residual, launch)
    return residual
