"""A decoder of blocks in any order: attention, recurrent blocks, feed-forwards; each after a norm.

A layer is one block (Nemotron-H), or a mixer and a feed-forward (Granite 4, Qwen3.5, LFM2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from graphengine.kernels.norm_rope.rope import RopeConfig
from graphengine.models.blocks.gated_delta import GatedDelta
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.composition import Composition, blocks_of, named_sublayers
from graphengine.models.contract import LayerSpan
from graphengine.models.decoder import DecoderConfig
from graphengine.models.linears import PLAIN, WeightForms
from graphengine.models.sublayers import ATTENTION, MLP, Block, Layer, Sublayer, layer_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig(Composition):
    """Sizes and switches of a hybrid, as a family reads them from `config.json`.

    layers           the sublayers of each layer, in the order in which they run
    attention        the block of every sublayer that attends
    norm_eps         epsilon of the norms that read the stream
    rope             of attention; None: attention knows no positions
    embedding_scale  what a token's embedding is multiplied by
    stream_scale     the model's residual stream is what is stored, times this
    logits_scale     what the logits are multiplied by
    norms_plus_one   whether norms of the stream, and of attention's heads, multiply by 1 + weight
    embedding_name, final_norm_name  in the checkpoint, without ".weight"
    span             which layers of a model these are; None: they are a whole model
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    layers: tuple[Layer, ...]
    attention: GroupedQueryAttention
    rope: RopeConfig | None = None
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    stream_scale: float = 1.0
    logits_scale: float = 1.0
    norms_plus_one: bool = False
    embedding_name: str = "model.embed_tokens"
    final_norm_name: str = "model.norm"
    forms: WeightForms = PLAIN
    span: LayerSpan | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def stage(self, span: LayerSpan) -> HybridConfig:
        """These layers of the model, as a pipeline stage has them.

        Before the last stage, the final norm is the first norm of the next stage's first layer.
        """
        stage = replace(self, layers=self.layers[span.first : span.stop], span=span)
        if span.ends:
            return stage
        following = layer_prefix(span.stop) + self.layers[span.stop][0].norm
        return replace(stage, final_norm_name=following, logits_scale=1.0)

    def untied(self) -> HybridConfig:
        """This model with a separate lm_head."""
        return replace(self, tie_embeddings=False)

    def stored_as(self, forms: WeightForms) -> HybridConfig:
        """This model with its weights stored in these forms."""
        return replace(self, forms=forms)

    def parted(self, beginning: Collection[str]) -> HybridConfig:
        """This model where each of these linears of gated delta nets begins its own product.

        beginning  names in the checkpoint; those of other blocks change nothing
        """

        def changed(prefix: str, each: Sublayer) -> Sublayer:
            if not isinstance(each.block, GatedDelta):
                return each
            below = prefix + each.prefix
            names = {name.removeprefix(below) for name in beginning if name.startswith(below)}
            return each._replace(block=each.block.parted(names))

        return self._with_sublayers(changed)

    def with_state_dtype(self, dtype: torch.dtype) -> HybridConfig:
        """This model with heads' states in this dtype; itself where no layer has any."""

        def changed(block: Block) -> Block:
            if isinstance(block, Mamba2 | GatedDelta):
                return replace(block, state_dtype=dtype)
            return block

        if not any(isinstance(block, Mamba2 | GatedDelta) for block in blocks_of(self)):
            return self
        return self.with_blocks(changed)

    def _with_sublayers(self, changed: Callable[[str, Sublayer], Sublayer]) -> HybridConfig:
        """This model with each sublayer replaced by `changed(layer's prefix, sublayer)`."""
        layers: list[Layer] = [() for _ in self.layers]
        for index, prefix, sublayer in named_sublayers(self):
            layers[index] += (changed(prefix, sublayer),)
        return replace(self, layers=tuple(layers))

    def with_blocks(self, changed: Callable[[Block], Block]) -> HybridConfig:
        """This model with each block replaced by `changed` of it."""
        return self._with_sublayers(lambda _, each: each._replace(block=changed(each.block)))

    @property
    def local_rope(self) -> None:
        """None: all layers have the same RoPE."""
        return None

    @property
    def scales_in_embedding(self) -> bool:
        """False: the model scales what the embedding gives, given embeddings too."""
        return False

    def attending_decoder(self) -> HybridConfig | DecoderConfig:
        """A one-layer decoder like the layers here that have attention and a SwiGLU.

        Draft modules have layers of this kind. Only layers with the tensor names of Llama's lineage
        count. Returns the model itself where there is none.
        """
        named = [("input_layernorm", ATTENTION), ("post_attention_layernorm", MLP)]
        for layer in self.layers:
            mixer, mlp = layer[0].block, layer[-1].block
            if mixer != self.attention or not isinstance(mlp, Swiglu):
                continue
            if [(each.norm, each.prefix) for each in layer] == named:
                return self._decoder_of(mlp)
        return self

    def _decoder_of(self, mlp: Swiglu) -> HybridConfig | DecoderConfig:
        attention = self.attention
        if self.rope is None:
            return self
        return DecoderConfig(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            ffn_size=mlp.ffn_size,
            num_layers=1,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            # The stream is stored divided by its scale.
            norm_eps=self.norm_eps * self.stream_scale**2,
            max_positions=self.max_positions,
            rope=self.rope,
            attention_bias=attention.output_bias,
            qkv_bias=attention.qkv_bias,
            mlp_bias=mlp.bias,
            qk_norm=attention.qk_norm,
            forms=self.forms,
            norms_plus_one=self.norms_plus_one,
            activation=mlp.activation,
            query_scalar=attention.scale_of,
            gated_attention=attention.gated,
        )
