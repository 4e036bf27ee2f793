"""A decoder: layers of attention and SwiGLU, with an RMSNorm before each block or on both sides.

Layers differ in their attention window and with it their RoPE, and in whether they have a mixture
of experts instead of one SwiGLU. Llama 3, Mistral, Qwen2, Qwen3 and Qwen3-MoE are this composition
with grouped-query attention and different settings; their files map a checkpoint's config onto
`DecoderConfig`. DeepSeek-V2 and V3 have latent attention; Gemma 3 also has norms after blocks.

`decode` runs a few rows through five fused kernels a layer; experts, latents and norms after blocks
take more. `prefill` runs the tokens of a chunk through the BLAS, except for gate and up where
`linear_swiglu` is faster. The bits of both depend on the number of lanes, which for a chunk follows
from the prompt alone.

Letters: N lanes, T tokens of a chunk, H hidden, Q query heads, G kv heads, D head_dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from graphengine.kernels import (
    Activation,
    AnyWeight,
    DecodeLanes,
    PrefillLanes,
    Residual,
    RopeConfig,
    RowFamily,
    WeightFormat,
    embed,
    first_rows,
    linear,
    residual_arrivals,
    rms_norm,
)
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.blocks.norms import plus_one
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import (
    keep_stream,
    kept_rows,
    new_weight,
    tensors_of,
)
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.contract import (
    ONE_RANK,
    ChunkAttention,
    DecodeLaunch,
    LayerSpan,
    ModelWeights,
    PrefillEnd,
    PrefillLaunch,
)
from graphengine.models.decoder_layer import (
    ATTENTION,
    MLP,
    LayerWeights,
    allocate_layer,
    decode_layer,
    finish_prefill_layer,
    layer_prefix,
    prefill_scratch,
    routed_of,
)
from graphengine.models.linears import (
    PLAIN,
    Linear,
    Linears,
    WeightForms,
    in_formats,
    linear_name,
    names_of_linears,
    refill,
)
from graphengine.models.states import LayerStates, StateTensors
from graphengine.models.weights import RoutedExperts, StoredLinear, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
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
    span: LayerSpan | None = None
    """Which layers of a model these are; None: they are a whole model."""

    def window_of(self, layer: int) -> int:
        """Tokens that a query of the layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def has_local_tables(self) -> bool:
        """Whether some layers have RoPE tables of their own."""
        return self.local_rope is not None and any(self.windows)

    @property
    def attention(self) -> GroupedQueryAttention | LatentAttention:
        """Every layer's attention, without its window."""
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
        )

    def attention_of(self, layer: int) -> GroupedQueryAttention | LatentAttention:
        """The layer's attention, with its window."""
        attention = self.attention
        if isinstance(attention, LatentAttention):
            return attention
        return replace(attention, window=self.window_of(layer))

    @property
    def mlp(self) -> Swiglu:
        """The SwiGLU of every layer without experts."""
        return Swiglu(
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            norm_eps=self.norm_eps,
            bias=self.mlp_bias,
            activation=self.activation,
        )

    def feed_forward(self, layer: int) -> Swiglu | Experts:
        """What a layer does after its attention."""
        if layer not in self.expert_layers:
            return self.mlp
        assert self.experts is not None, f"{layer=} has experts of no size"
        return self.experts

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
            expert_layers=tuple(each - span.first for each in self.expert_layers if each in own),
            span=span,
        )

    @property
    def _span(self) -> LayerSpan:
        return self.span or LayerSpan(0, self.num_layers, self.num_layers)

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of the layers' tensors in the checkpoint."""
        return [layer_prefix(index) for index in range(*self._span[:2])]

    @property
    def final_norm_name(self) -> str:
        """Name of the norm that reads the stream after the last layer, without ".weight".

        For a pipeline stage before the last it is the first norm of the next stage's first layer.
        """
        span = self._span
        return "model.norm" if span.ends else f"{layer_prefix(span.stop)}input_layernorm"

    @property
    def linears(self) -> Linears:
        """The linears of a decode step: those of each layer, and lm_head, whole on every rank."""
        return self.linears_of(self.prefixes)

    def linears_of(self, prefixes: Sequence[str]) -> Linears:
        """The linears of layers with these prefixes in the checkpoint, and lm_head.

        The i-th prefix belongs to a layer like the model's i-th. Where layers differ, the linears
        of the last layer come last: they write the final residual stream.
        """
        feed_forwards: dict[Swiglu | Experts, list[str]] = {}
        for index, prefix in enumerate(prefixes):
            block = self.feed_forward(index)
            feed_forwards[block] = [*feed_forwards.pop(block, []), prefix]
        linears = dict(self.attention.linears)
        formats = self._formats(self.attention, [prefix + ATTENTION for prefix in prefixes])
        for block, of_layers in feed_forwards.items():
            linears |= block.linears
            formats |= self._formats(block, [prefix + MLP for prefix in of_layers])
        linears["lm_head"] = Linear("sample", self.vocab_size, self.hidden_size)
        formats["lm_head"] = [self.forms.format_of(HEAD)]
        return in_formats(linears, formats)

    def _formats(
        self,
        block: GroupedQueryAttention | LatentAttention | Swiglu | Experts,
        prefixes: Sequence[str],
    ) -> dict[str, list[WeightFormat | None]]:
        """How blocks with these prefixes in the checkpoint store the weights of each linear."""
        formats: dict[str, list[WeightFormat | None]] = {name: [None] for name in block.linears}
        for name, first in block.first_linears.items():
            formats[name] = [self.forms.format_of(prefix + first) for prefix in prefixes]
        return formats

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """Each layer keeps keys and values, or latents."""
        state = self.attention.state
        windows = (self.window_of(layer) for layer in range(self.num_layers))
        return tuple((state._replace(window=window),) for window in windows)

    def arrivals(self, lanes: int) -> int:
        """Most arrival counters that attention (in decode or in a chunk) or experts use."""
        counters = self.attention.arrivals(lanes)
        if not self.expert_layers:
            return counters
        # The router uses one per lane, which is fewer.
        sharing = 1 if self.experts is None else self.experts.sharing
        return max(counters, residual_arrivals(sharing * lanes, self.hidden_size))

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads."""
        return self.attention.split_tokens(family, dtype, tokens)

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of the cosines and sines for this many positions, and of norms with 1 added."""
        tables = 2 if self.has_local_tables else 1
        norms = 0
        if self.norms_plus_one:
            of_layer = (4 if self.post_norms else 2) * self.hidden_size
            of_heads = 2 * self.head_dim if self.qk_norm else 0
            norms = 4 * (self.num_layers * (of_layer + of_heads) + self.hidden_size)
        return norms + tables * RopeTables.nbytes(self.attention.table_dim, max_seq_len)

    def attention_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes of partial results of attention, for this many decode lanes or for a chunk."""
        return self.attention.workspace_bytes(rows, max_seq_len)

    @property
    def prefill_width(self) -> int:
        """Values per lane in `PrefillScratch` where nothing is fused."""
        blocks = {self.feed_forward(index) for index in range(self.num_layers)}
        widths = [block.prefill_width() for block in blocks]
        return max(self.attention.prefill_width, *widths)

    def scan_bytes(self, lanes: int) -> int:
        """0: no layer is recurrent."""
        return 0

    def allocate(self, *, device: str, dtype: torch.dtype) -> DecoderWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden = self.hidden_size
        layers = tuple(
            allocate_layer(
                prefix,
                self.attention_of(index),
                self.feed_forward(index),
                self.forms,
                post_norms=self.post_norms,
                device=device,
                dtype=dtype,
            )
            for index, prefix in enumerate(self.prefixes)
        )
        own_head = not self.tie_embeddings or HEAD in self.forms
        embedding = new(embedding_rows(self.vocab_size, self.span, own_head=own_head), hidden)
        lm_head: AnyWeight = embedding
        if own_head and self._span.ends:
            shape = (self.vocab_size, hidden)
            lm_head = new_weight(self.forms, HEAD, shape, device=device, dtype=dtype)
        return DecoderWeights(
            config=self,
            embedding=embedding,
            layers=layers,
            final_norm=new(hidden),
            lm_head=lm_head,
        )


def embedding_rows(vocab_size: int, span: LayerSpan | None, *, own_head: bool) -> int:
    """Rows of the embedding that these layers have.

    A stage that needs it neither at its beginning nor for its head has one row, whose values nobody
    uses.
    """
    if span is None or span.begins or span.embeds or (span.ends and not own_head):
        return vocab_size
    return 1


HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights(ModelWeights):
    """All weights of a decoder."""

    config: DecoderConfig
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor

    def linears(self) -> list[StoredLinear]:
        """Linears of the layers, and lm_head unless it is tied. Every rank has all of lm_head."""
        of_layers = [each for layer in self.layers for each in layer.linears()]
        if self.lm_head is self.embedding:
            return of_layers
        return [*of_layers, StoredLinear(self.lm_head, ((HEAD, self.config.vocab_size),))]

    def linear_names(self) -> Mapping[str, str]:
        """The name in `config.linears` of each linear of the layers."""
        attention = names_of_linears(layer.attention for layer in self.layers)
        return attention | names_of_linears(layer.mlp for layer in self.layers)

    def stored(self) -> dict[str, Weight]:
        """Tensors that are not packed, by name. Each rank has the whole vocabulary."""
        config = self.config
        names = {f"{config.final_norm_name}.weight": Weight(self.final_norm)}
        if len(self.embedding) == config.vocab_size:
            names[f"{config.embedding_name}.weight"] = Weight(self.embedding)
        if self.lm_head is not self.embedding and isinstance(self.lm_head, Tensor):
            names[f"{HEAD}.weight"] = Weight(self.lm_head)
        for layer in self.layers:
            names |= layer.stored()
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor, tied ones twice."""
        per_layer = [tensor for layer in self.layers for tensor in layer.tensors()]
        return [self.embedding, self.final_norm, *tensors_of(self.lm_head), *per_layer]

    @property
    def routed(self) -> RoutedExperts | None:
        """The experts of all layers that have some; None: no layer has."""
        return routed_of(self.layers)

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of every layer's keys and values, by the prefix of its attention."""
        return {
            layer.prefix + ATTENTION: scales
            for layer in self.layers
            if (scales := layer.attention.kv_scales) is not None
        }

    @property
    def embedding_scale(self) -> float:
        """What a token's embedding is multiplied by, rounded to the model's dtype."""
        return torch.tensor(self.config.embedding_scale, dtype=self.embedding.dtype).item()

    @property
    def given_scale(self) -> float:
        """1: families that scale (Gemma 3) do it in the embedding, and its output is given."""
        return 1.0

    def open(self, *, max_seq_len: int, vocabulary: int = 0) -> DecoderModel:
        """The model, with RoPE for sequences of at most this many tokens."""
        return DecoderModel(self, max_seq_len=max_seq_len, vocabulary=vocabulary)


def _computed(weights: DecoderWeights) -> tuple[tuple[LayerWeights, ...], Tensor]:
    """Layers and final norm to compute with: norms are copies with 1 added where they need it.

    All other tensors are those of the weights.
    """
    if not weights.config.norms_plus_one:
        return weights.layers, weights.final_norm
    layers = tuple(layer.with_norms_plus_one() for layer in weights.layers)
    return layers, plus_one(weights.final_norm)


class DecoderModel:
    """A decoder with its weights and RoPE tables; logits have the first `vocabulary` ids, 0: all.

    It computes with the tensors of the weights, except that norms that need 1 added are copies.
    """

    def __init__(self, weights: DecoderWeights, *, max_seq_len: int, vocabulary: int = 0) -> None:
        self.config = config = weights.config
        self.weights = weights
        self._layers, self._final_norm = _computed(weights)
        head = weights.lm_head
        self.lm_head: AnyWeight = head
        if vocabulary:
            if isinstance(head, Tensor):
                self.lm_head = head[:vocabulary]
            else:
                self.lm_head = first_rows(head, vocabulary)
        self.tables = self._new_tables(config.rope, max_seq_len)
        self.local_tables = self.tables
        if config.has_local_tables and config.local_rope is not None:
            self.local_tables = self._new_tables(config.local_rope, max_seq_len)

    def refresh(self) -> None:
        """Recompute the model's own norms in place from weights that have changed."""
        layers, final_norm = _computed(self.weights)
        for held, made in zip(self._layers, layers, strict=True):
            refill(held.tensors(), made.tensors())
        refill([self._final_norm], [final_norm])

    def _new_tables(self, rope: RopeConfig, max_seq_len: int) -> RopeTables:
        return RopeTables.of(
            rope,
            head_dim=self.config.attention.table_dim,
            max_seq_len=max_seq_len,
            device=self.weights.embedding.device,
        )

    def tables_of(self, layer: int) -> RopeTables:
        """Cosines and sines of a layer's positions."""
        return self.local_tables if self.config.window_of(layer) else self.tables

    @property
    def max_seq_len(self) -> int:
        return self.tables.max_seq_len

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def first_norm(self) -> Tensor:
        """Weight of the norm that reads the embedding."""
        return self.norm_after(-1)

    def norm_after(self, layer: int) -> Tensor:
        """Weight of the norm that reads the residual stream after a layer; -1: the embedding."""
        following = layer + 1
        if following < len(self._layers):
            return self._layers[following].input_norm
        return self._final_norm

    def fuses(self, lanes: int) -> bool:
        """Whether unpacked gates and ups are one kernel in a chunk of this many lanes.

        Packed ones are one kernel at all sizes.
        """
        blocks = [each.mlp for each in self.weights.layers if isinstance(each.mlp, SwigluWeights)]
        plain = [block for block in blocks if isinstance(block.gate_up, Tensor)]
        return bool(plain) and plain[0].is_fused(lanes)

    def numerics(self, prefill_sizes: Sequence[int]) -> Mapping[str, str]:
        """Sizes of chunks whose gate and up are one kernel, which sums in another order."""
        return {"fused_swiglu": ",".join(str(size) for size in prefill_sizes if self.fuses(size))}

    def linear(self, link: int, name: str) -> tuple[AnyWeight, Tensor | None, Tensor | None]:
        """Weight, bias and next norm of one of a layer's `config.linears`; only residuals have a
        norm. KeyError for a linear that is not there.
        """
        of_layer = self.weights.layers[link]
        attention, mlp = of_layer.attention, of_layer.mlp
        assert isinstance(attention, AttentionWeights), f"a chain of latent attention: {link=}"
        there: dict[str, tuple[AnyWeight, Tensor | None, Tensor | None]] = {
            "qkv": (attention.qkv, attention.qkv_bias, None),
            "output": (attention.output, attention.output_bias, of_layer.ffn_norm),
            "lm_head": (self.weights.lm_head, None, None),
        }
        if isinstance(mlp, SwigluWeights):
            there["gate_up"] = (mlp.gate_up, mlp.gate_up_bias, None)
            there["down"] = (mlp.down, mlp.down_bias, self.norm_after(link).to(self.dtype))
        for base, found in there.items():
            if linear_name(base, found[0]) == name:
                return found
        raise KeyError(f"no linear {name} in layer {link}: {', '.join(self.config.linears)}")

    def experts(self, layer: int) -> tuple[ExpertsWeights, Tensor]:
        """The experts of a layer that has some, and the weight of the norm after them."""
        experts = self.weights.layers[layer].mlp
        assert isinstance(experts, ExpertsWeights), f"{layer=} has no experts"
        return experts, self.norm_after(layer)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        states: StateTensors,
        launch: DecodeLaunch,
        *,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Residual:
        """The residual stream of `row`'s tokens after the last layer, scaled for the final norm.

        `residual` comes from the embedding, scaled for the first layer's norm; it is updated in
        place. A layer's cache is `[blocks, 2, block_size, G, D]`; each live lane's keys and values
        are written at its position through the layer's block table `[S, B]`.

        `streams[layer]`, [N or more, H], receives the live lanes' stream after the layer, rounded
        to its dtype.
        """
        caches = states.paged()
        for index, (layer, (kv, table)) in enumerate(zip(self._layers, caches, strict=True)):
            residual = decode_layer(
                layer,
                self.norm_after(index),
                row,
                residual,
                kv,
                table,
                self.tables_of(index),
                launch,
                kept=kept_rows(streams, index, residual),
            )
        return residual

    def prefill(
        self,
        lanes: PrefillLanes,
        states: StateTensors,
        attention: ChunkAttention,
        *,
        all_lanes: bool = False,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
        stream: Tensor | None = None,
        launch: PrefillLaunch = ONE_RANK,
    ) -> PrefillEnd:
        """Run a prompt chunk through all layers, up to and including the last one's attention.

        `stream`, float32 [T, H], is the residual stream that the preceding layers left, and is
        changed in place; None: these layers begin with the tokens' embeddings.

        As in `decode` the cache receives the keys and values of the live lanes. What the last layer
        does after its attention matters only to the sampled token: `prefill_logits` does it. With
        `all_lanes` it is done for every lane as well, for a draft module that reads them; the
        logits' bits do not depend on it.

        `streams[layer]`, [T or more, H], receives the residual stream after the layer, rounded to
        its dtype; the last layer's only with `all_lanes`.
        """
        config, weights, slot = self.config, self.weights, lanes.slot
        last = len(self._layers) - 1
        scale, given = weights.embedding_scale, launch.given
        x = stream
        if x is None:
            x = embed(lanes.token, weights.embedding, slot, scale=scale, given=given)
        scratch = prefill_scratch(
            weights.layers,
            len(x),
            like=weights.embedding,
            launch=launch,
            outlived=all_lanes,
            may_split=not (all_lanes or streams),
        )
        rms_norm(x, self.first_norm, slot, eps=config.norm_eps, out_dtype=self.dtype, out=scratch.h)
        caches = states.paged()
        for index, (layer, (kv, table)) in enumerate(zip(self._layers, caches, strict=True)):
            attended = layer.attention.attend(
                lanes, kv, table, self.tables_of(index), attention, scratch
            )
            if index == last:
                break
            finish_prefill_layer(layer, self.norm_after(index), x, attended, slot, scratch)
            keep_stream(x, index, streams)
        x_1H = scratch.lane_of(x, lanes.last)
        attended_1A = attended.index_select(0, lanes.last)
        if all_lanes:
            finish_prefill_layer(
                self._layers[last], self.norm_after(last), x, attended, slot, scratch
            )
            keep_stream(x, last, streams)
            return PrefillEnd((x_1H, attended_1A), scratch.h, x)
        return PrefillEnd((x_1H, attended_1A), None)

    def prefill_logits(
        self,
        end: PrefillEnd,
        slot_1: Tensor,
        *,
        head: AnyWeight,
        launch: PrefillLaunch = ONE_RANK,
    ) -> Tensor:
        """Logits of the chunk's last lane, float32 `[1, V]`; the lane is of slot `slot_1`.

        `end` is used up.

        head  `lm_head`, or some of its rows
        """
        last = self._layers[-1]
        x_1H, attended_1A = end.last
        weights = self.weights
        scratch = prefill_scratch(weights.layers[-1:], 1, like=weights.embedding, launch=launch)
        finish_prefill_layer(last, self._final_norm, x_1H, attended_1A, slot_1, scratch)
        return linear(scratch.h, head, slot_1, out_dtype=torch.float32, launch=launch)
