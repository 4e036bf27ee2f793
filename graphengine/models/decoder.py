"""A decoder whose layers are alike: attention and a feed-forward, with norms before or around them.

Layers differ in their attention window and with it their RoPE, and in whether they have a mixture
of experts instead of one SwiGLU. Llama 3, Mistral, Qwen2, Qwen3 and Qwen3-MoE are this composition
with grouped-query attention and different settings; their files map a checkpoint's config onto
`DecoderConfig`. DeepSeek-V2 and V3 have latent attention; Gemma 3 also has norms after blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphengine.kernels.norm_rope.activation import Activation
from graphengine.kernels.norm_rope.rope import RopeConfig
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.blocks.swiglu import PLAIN_NAMES, Swiglu
from graphengine.models.composition import Composition, linears_of
from graphengine.models.contract import LayerSpan
from graphengine.models.linears import PLAIN, Linears, WeightForms
from graphengine.models.sublayers import Layer, layer_prefix, usual_layer


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(Composition):
    """Sizes and switches of a decoder, as a family reads them from `config.json`."""

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
    """Whether q, k, v and the output have biases."""
    qkv_bias: bool = False
    """Whether q, k and v have biases, even if the output has none."""
    mlp_bias: bool = False
    qk_norm: bool = False
    latent: LatentAttention | None = None
    """Latent attention in every layer, in place of grouped-query attention; None: there is none."""
    experts: Experts | None = None
    """The experts of `expert_layers`, in place of `mlp`."""
    expert_layers: tuple[int, ...] = ()
    """Indices of the layers that have experts, ascending."""
    forms: WeightForms = PLAIN
    windows: tuple[int, ...] = ()
    """Attention window of each layer, 0 for a layer without one; empty: no layer has a window."""
    nope_layers: tuple[int, ...] = ()
    """Indices of the layers without RoPE, ascending."""
    local_rope: RopeConfig | None = None
    """RoPE of the layers with a window; None: the same as in the others."""
    post_norms: bool = False
    """Whether norms also follow attention and the feed-forward, before their sums."""
    norms_plus_one: bool = False
    """Whether every norm multiplies by 1 + its weight."""
    embedding_scale: float = 1.0
    """Factor of the embeddings; it and its product are rounded to the model's dtype."""
    activation: Activation = "silu"
    """Activation of the gates of `mlp`."""
    query_scalar: float = 0.0
    """Attention's scores are divided by its square root; 0: by that of head_dim."""
    sinks: bool = False
    """Whether each head has an attention sink: a learned score that belongs to no token."""
    gated_attention: bool = False
    """Whether attention's sums are multiplied by sigmoids of gates."""
    stored_fused: bool = False
    """Whether a checkpoint has q, k and v in one linear, and gates and ups in one, as Phi-3's."""
    span: LayerSpan | None = None
    """Which layers of a model these are; None: they are a whole model."""

    def window_of(self, layer: int) -> int:
        """Tokens that a query of the layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def attention(self) -> GroupedQueryAttention | LatentAttention:
        """Every layer's attention, without what differs: its window, and whether it has RoPE."""
        if self.latent is not None:
            return self.latent
        return GroupedQueryAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            qkv_bias=self.attention_bias or self.qkv_bias,
            output_bias=self.attention_bias,
            qk_norm=self.qk_norm,
            rotated=self.rope.rotated,
            scale_of=self.query_scalar,
            sinks=self.sinks,
            gated=self.gated_attention,
            one_linear=self.stored_fused,
        )

    def attention_of(self, layer: int) -> GroupedQueryAttention | LatentAttention:
        """The layer's attention, with its window."""
        attention = self.attention
        if isinstance(attention, LatentAttention):
            return attention
        return replace(attention, window=self.window_of(layer), nope=layer in self.nope_layers)

    @property
    def mlp(self) -> Swiglu:
        """The SwiGLU of every layer without experts."""
        return Swiglu(
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            norm_eps=self.norm_eps,
            bias=self.mlp_bias,
            activation=self.activation,
            names=("gate_up_proj", "", "down_proj") if self.stored_fused else PLAIN_NAMES,
            one_linear=self.stored_fused,
        )

    def feed_forward(self, layer: int) -> Swiglu | Experts:
        """What a layer does after its attention."""
        if layer not in self.expert_layers:
            return self.mlp
        assert self.experts is not None, f"{layer=} has experts of no size"
        return self.experts

    def layer(self, index: int) -> Layer:
        """The sublayers of a layer, or of a draft module's layer like it."""
        return usual_layer(
            self.attention_of(index), self.feed_forward(index), post_norms=self.post_norms
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The sublayers of each layer."""
        return tuple(map(self.layer, range(self.num_layers)))

    def attending_decoder(self) -> DecoderConfig:
        """This model: all its layers attend."""
        return self

    @property
    def stream_scale(self) -> float:
        """1: the residual stream is stored as it is."""
        return 1.0

    @property
    def logits_scale(self) -> float:
        """1: the logits are lm_head's."""
        return 1.0

    @property
    def scales_in_embedding(self) -> bool:
        """True: the embedding itself scales, as in Gemma."""
        return True

    @property
    def embedding_name(self) -> str:
        """The embedding's name in a checkpoint, without ".weight"."""
        return "model.embed_tokens"

    def untied(self) -> DecoderConfig:
        """This model with a separate lm_head."""
        return replace(self, tie_embeddings=False)

    def stored_as(self, forms: WeightForms) -> DecoderConfig:
        """This model with its weights stored in these forms."""
        return replace(self, forms=forms)

    def stage(self, span: LayerSpan) -> DecoderConfig:
        """These layers of the model, as a pipeline stage has them."""
        own = range(span.first, span.stop)
        return replace(
            self,
            num_layers=len(own),
            windows=self.windows[span.first : span.stop],
            nope_layers=tuple(each - span.first for each in self.nope_layers if each in own),
            expert_layers=tuple(each - span.first for each in self.expert_layers if each in own),
            span=span,
        )

    @property
    def _span(self) -> LayerSpan:
        return self.span or LayerSpan(0, self.num_layers, self.num_layers)

    @property
    def final_norm_name(self) -> str:
        """Name of the norm that reads the stream after the last layer, without ".weight".

        For a pipeline stage before the last it is the first norm of the next stage's first layer.
        """
        span = self._span
        return "model.norm" if span.ends else f"{layer_prefix(span.stop)}input_layernorm"

    def linears_of(self, prefixes: Sequence[str]) -> Linears:
        """The linears of layers with these prefixes in the checkpoint, and lm_head.

        The i-th prefix belongs to a layer like the model's i-th.
        """
        named = [(prefix, self.layer(index)) for index, prefix in enumerate(prefixes)]
        return linears_of(named, self.vocab_size, self.hidden_size, self.forms)
