"""One decoder layer: attention and a feed-forward, with norms before and in some models after.

Letters: G kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphengine.kernels import DecodeLanes, Kept, Residual
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.mla import LatentAttention, LatentAttentionWeights
from graphengine.models.blocks.norms import NextNorm, PostNorms, Sandwich, plus_one
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import PrefillScratch, coded_columns
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.contract import DecodeLaunch, PrefillLaunch
from graphengine.models.linears import WeightForms
from graphengine.models.weights import RoutedExperts, StoredLinear, Weight

ATTENTION, MLP = "self_attn.", "mlp."
"""Prefixes of a layer's blocks in the checkpoint, below the layer's own."""


def layer_prefix(index: int) -> str:
    """Prefix of a layer's tensors in the checkpoint."""
    return f"model.layers.{index}."


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's blocks, and the weights of the norms before them.

    prefix      of the layer's names in the checkpoint
    post_norms  weights of the norms after the blocks; None: there are none
    """

    prefix: str
    input_norm: Tensor
    attention: AttentionWeights | LatentAttentionWeights
    ffn_norm: Tensor
    mlp: SwigluWeights | ExpertsWeights
    post_norms: PostNorms | None = None

    def linears(self) -> list[StoredLinear]:
        """The layer's linears."""
        return self.attention.linears() + self.mlp.linears()

    def stored(self) -> dict[str, Weight]:
        """Tensors that are not packed, by name."""
        return {
            **{f"{self.prefix}{name}.weight": Weight(norm) for name, norm in self._norms().items()},
            **self.attention.stored(),
            **self.mlp.stored(),
        }

    def _norms(self) -> dict[str, Tensor]:
        if self.post_norms is None:
            return {"input_layernorm": self.input_norm, "post_attention_layernorm": self.ffn_norm}
        return {
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.post_norms.attention,
            "pre_feedforward_layernorm": self.ffn_norm,
            "post_feedforward_layernorm": self.post_norms.mlp,
        }

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [*self._norms().values(), *self.attention.tensors(), *self.mlp.tensors()]

    @property
    def may_split(self) -> bool:
        """Whether the layer's stream may be split over ranks by lanes.

        Experts, and norms after a block, sum over ranks in their own way.
        """
        return isinstance(self.mlp, SwigluWeights) and self.post_norms is None

    @property
    def after_attention(self) -> NextNorm:
        """The norm, or two norms, between the attention and the feed-forward."""
        if self.post_norms is None:
            return self.ffn_norm
        return Sandwich(self.post_norms.attention, self.ffn_norm, self.mlp.block.norm_eps)

    def after_mlp(self, following: Tensor) -> NextNorm:
        """The norm, or two norms, after the feed-forward; `following` is the next layer's."""
        if self.post_norms is None:
            return following
        return Sandwich(self.post_norms.mlp, following, self.mlp.block.norm_eps)

    def with_norms_plus_one(self) -> LayerWeights:
        """This layer with 1 added to its norms, for checkpoints whose norms lack it."""
        post, attention = self.post_norms, self.attention
        assert isinstance(attention, AttentionWeights), "latents have norms that lack nothing"
        return replace(
            self,
            input_norm=plus_one(self.input_norm),
            attention=attention.with_norms_plus_one(),
            ffn_norm=plus_one(self.ffn_norm),
            post_norms=None if post is None else PostNorms(*map(plus_one, post)),
        )


def allocate_layer(
    prefix: str,
    attention: GroupedQueryAttention | LatentAttention,
    feed_forward: Swiglu | Experts,
    forms: WeightForms,
    *,
    post_norms: bool = False,
    device: str,
    dtype: torch.dtype,
) -> LayerWeights:
    """Uninitialised weights of the layer with this prefix; `device="meta"` allocates nothing."""
    input_norm, ffn_norm, *after = (
        torch.empty(attention.hidden_size, device=device, dtype=dtype)
        for _ in range(4 if post_norms else 2)
    )
    return LayerWeights(
        prefix=prefix,
        input_norm=input_norm,
        attention=attention.allocate(prefix + ATTENTION, forms, device=device, dtype=dtype),
        ffn_norm=ffn_norm,
        mlp=feed_forward.allocate(prefix + MLP, forms, device=device, dtype=dtype),
        post_norms=PostNorms(*after) if after else None,
    )


def routed_of(layers: Sequence[LayerWeights]) -> RoutedExperts | None:
    """The experts of the layers that have some; None: no layer has."""
    held = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsWeights)]
    if not held:
        return None
    block = held[0].block
    return RoutedExperts(
        layers=len(held),
        experts=block.experts,
        chosen=block.router.top_k,
        parameters=block.expert_parameters,
        nbytes=sum(each.experts_bytes for each in held),
        stacked=block.stacked,
    )


def decode_layer(
    layer: LayerWeights,
    next_norm: Tensor,
    row: DecodeLanes,
    residual: Residual,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch,
    *,
    kept: Kept | None = None,
) -> Residual:
    """One layer for `row`'s tokens: five kernels, or seven where norms follow the blocks.

    `residual` is scaled for the layer's input norm and comes back scaled for `next_norm`; all but
    its squares is updated in place. `kv` is the layer's cache `[blocks, 2, block_size, G, D]`. The
    stream after the layer is also left in `kept`.
    """
    residual = layer.attention.decode(
        row, residual, layer.after_attention, kv, block_table, tables, launch
    )
    return decode_feed_forward(layer, next_norm, row, residual, launch, kept=kept)


def decode_feed_forward(
    layer: LayerWeights,
    next_norm: Tensor,
    row: DecodeLanes,
    residual: Residual,
    launch: DecodeLaunch,
    *,
    kept: Kept | None = None,
) -> Residual:
    """Run the part of `decode_layer` that follows attention."""
    residual = residual._replace(kept=kept)
    if isinstance(layer.mlp, ExpertsWeights):
        residual = layer.mlp.decode(row, residual, next_norm, launch)
    else:
        residual = layer.mlp.decode(row, residual, layer.after_mlp(next_norm), launch)
    return residual._replace(kept=None)


def prefill_scratch(
    layers: Sequence[LayerWeights],
    lanes: int,
    *,
    like: Tensor,
    launch: PrefillLaunch,
    outlived: bool = False,
    may_split: bool = False,
) -> PrefillScratch:
    """The memory in which these layers compute a chunk, in the dtype of `like`, on its device.

    may_split  whether nobody else reads the chunk's stream, so that ranks may split it by lanes
    """
    attention = layers[0].attention.block
    split = None
    if may_split and launch.split is not None and all(layer.may_split for layer in layers):
        split = launch.split(lanes, attention.hidden_size, like.dtype)
    widths = [layer.mlp.prefill_width(lanes) for layer in layers]
    return PrefillScratch(
        lanes,
        attention.hidden_size,
        max(attention.prefill_width, *widths),
        like=like,
        launch=launch,
        coded=coded_columns(
            (each.weight for layer in layers for each in layer.linears() if not each.expert),
            launch.activations,
        ),
        outlived=outlived,
        split=split,
    )


def finish_prefill_layer(
    layer: LayerWeights,
    next_norm: Tensor,
    stream: Tensor,
    attended: Tensor,
    slot: Tensor,
    scratch: PrefillScratch,
) -> None:
    """Run the part of a layer that follows a chunk's attention.

    `stream`, float32, is updated in place, and `scratch.h` becomes `stream` after `next_norm`.
    `attended` is overwritten where it lies in `scratch`.
    """
    layer.attention.add_output(attended, stream, layer.after_attention, slot, scratch)
    if isinstance(layer.mlp, ExpertsWeights):
        layer.mlp.prefill(stream, next_norm, slot, scratch)
    else:
        layer.mlp.prefill(stream, layer.after_mlp(next_norm), slot, scratch)
