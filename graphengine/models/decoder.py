"""A decoder's weights, and its two programs over the layers that its config lists.

`decode` runs a few rows through fused kernels: five for a layer of attention and a SwiGLU; experts,
latents, recurrent blocks and norms after blocks take more kernels. `prefill` runs the tokens of a
chunk through the BLAS, except for gate and up where `linear_swiglu` is faster. The bits of both
depend on the number of lanes, which for a chunk follows from the prompt alone.

Letters: N lanes, T tokens of a chunk, H hidden, A columns of attention's sums, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.linear.epilogues import StoreLogits
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import PackedWeight, first_rows
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import add_given, embed
from graphengine.kernels.norm_rope.layer_norm import add_positions, layer_norm_residual
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.gqa import AttentionWeights, PagedMemory
from graphengine.models.blocks.mlp import MlpWeights
from graphengine.models.blocks.norms import LayerNorm, ReadNorm, lane_kinds
from graphengine.models.blocks.per_layer.layer_inputs import (
    LayerInputsWeights,
    LayerInputWeights,
)
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import (
    keep_stream,
    kept_rows,
    new_weight,
    norm_rows,
    tensors_of,
)
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.composition import (
    Composition,
    attention_of,
    blocks_of,
    has_local_tables,
    is_nope,
    local_attention_of,
    named_layers,
    window_of,
)
from graphengine.models.contract import ModelConfig, ModelWeights, PrefillEnd
from graphengine.models.decoder_layer import (
    LayerWeights,
    Memory,
    allocate_layer,
    attend,
    decode_block,
    prefill_block,
    prefill_feed_forward,
    prefill_scratch,
    routed_of,
)
from graphengine.models.decoder_steps import Step, computed, input_of, new_inputs, with_memory
from graphengine.models.inner.drawn import FrameWeights, allocate_frames
from graphengine.models.inner.parallel_heads import HeadsWeights
from graphengine.models.launches import (
    ONE_RANK,
    ChunkAttention,
    DecodeLaunch,
    PrefillLaunch,
)
from graphengine.models.linears import names_of_linears, refill
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.repeats import block_runner
from graphengine.models.states import StateTensors
from graphengine.models.sublayers import (
    AttendingWeights,
    Block,
    BlockWeights,
    RecurringWeights,
    packed_of,
)
from graphengine.models.weights import RoutedExperts, StoredLinear, Weight

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights(ModelWeights):
    """All weights of a decoder.

    final_bias  of the final norm; None: it has none
    positions   `[max_positions, H]`: learned positions, which are added to embeddings; None: there
                are none, or another stage adds them
    layer_inputs  weights that compute the inputs of all layers; None: layers have none
    head_bias   `[V]`, of lm_head; None: it has none, or another stage adds it
    inner_weights  of the part that draws the codes of a frame; None: a step emits tokens
    """

    config: Composition
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    final_bias: Tensor | None = None
    positions: Tensor | None = None
    layer_inputs: LayerInputsWeights | None = None
    head_bias: Tensor | None = None
    inner_weights: FrameWeights | None = None

    @property
    def own_head(self) -> AnyWeight | None:
        """lm_head; None where it is the embedding, or one of several heads."""
        shared = self.lm_head is self.embedding or isinstance(self.inner_weights, HeadsWeights)
        return None if shared else self.lm_head

    def linears(self) -> list[StoredLinear]:
        """Linears of the layers, and lm_head unless it is shared. Every rank has all of lm_head."""
        inputs = self.layer_inputs
        of_layers = [] if inputs is None else inputs.linears()
        of_layers += [each for layer in self.layers for each in layer.linears()]
        if self.own_head is None:
            return of_layers
        return [*of_layers, StoredLinear(self.own_head, ((HEAD, self.config.head_rows),))]

    def packed(self) -> list[PackedWeight | PackedExperts]:
        """The weights that are packed; those of a layer's experts are one."""
        weights = [each for block in self.blocks() for each in packed_of(block)]
        if self.layer_inputs is not None and isinstance(self.layer_inputs.projection, PackedWeight):
            weights.append(self.layer_inputs.projection)
        return [*weights, *([self.lm_head] if isinstance(self.lm_head, PackedWeight) else [])]

    def stored(self) -> dict[str, Weight]:
        """Tensors that are not packed, by name. Each rank has the whole vocabulary."""
        config = self.config
        names: dict[str, Weight] = {}
        if config.final_norm_name and config.norms != "layer_plain":
            names[f"{config.final_norm_name}.weight"] = Weight(self.final_norm)
        if self.final_bias is not None:
            names[f"{config.final_norm_name}.bias"] = Weight(self.final_bias)
        if self.positions is not None:
            names[f"{config.position_name}.weight"] = Weight(self.positions)
        if self.layer_inputs is not None:
            names |= self.layer_inputs.stored()
        if len(self.embedding) == config.embedding_rows:
            names[f"{config.embedding_name}.weight"] = Weight(self.embedding)
        if isinstance(self.own_head, Tensor):
            names[f"{HEAD}.weight"] = Weight(self.own_head)
        if self.head_bias is not None:
            names[f"{HEAD}.bias"] = Weight(self.head_bias)
        for layer in self.layers:
            names |= layer.stored()
        if self.inner_weights is not None:
            names |= self.inner_weights.stored()
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        per_layer = [tensor for layer in self.layers for tensor in layer.tensors()]
        own = tensors_of(self.embedding, self.final_norm, self.final_bias, self.positions)
        own += [] if self.layer_inputs is None else self.layer_inputs.tensors()
        own += [] if self.inner_weights is None else self.inner_weights.tensors()
        return [*own, *tensors_of(self.own_head, self.head_bias), *per_layer]

    def linear_names(self) -> Mapping[str, str]:
        """The name in `config.linears` of each linear of the layers."""
        of_model = {} if self.layer_inputs is None else self.layer_inputs.names()
        return {**of_model, **names_of_linears(self.blocks())}

    def adaptable(self) -> list[StoredLinear]:
        """The products of grouped-query attention and of dense feed-forwards."""
        kinds = AttentionWeights | SwigluWeights | MlpWeights
        blocks = [block for block in self.blocks() if isinstance(block, kinds)]
        return [linear for block in blocks for linear in block.linears()]

    def blocks(self) -> list[BlockWeights]:
        """The weights of all blocks, in the order in which they run."""
        return [each.block for layer in self.layers for each in layer.sublayers]

    @property
    def routed(self) -> RoutedExperts | None:
        """The experts of all layers that have some; None: no layer has."""
        return routed_of(self.layers)

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of every layer's keys and values, by the prefix of its attention."""
        return {
            block.prefix: block.kv_scales
            for block in self.blocks()
            if isinstance(block, AttentionWeights) and not block.block.reuses
        }

    @property
    def embedding_scale(self) -> float:
        """Factor of a token's embedding."""
        scale = self.config.embedding_scale
        if not self.config.scales_in_embedding:
            return scale
        return torch.tensor(scale, dtype=self.embedding.dtype).item()

    @property
    def given_scale(self) -> float:
        """1 where the embedding layer itself scales: then given embeddings are already scaled."""
        return 1.0 if self.config.scales_in_embedding else self.embedding_scale

    def open(self, *, max_seq_len: int, vocabulary: int = 0) -> DecoderModel:
        """The model, with attention's tables for sequences of at most this many tokens."""
        return DecoderModel(self, max_seq_len=max_seq_len, vocabulary=vocabulary)


class DecoderModel:
    """A decoder with its weights and attention's tables.

    Logits have the first `vocabulary` ids; 0: all. It computes with the tensors of the weights,
    except that norms that need 1 added are copies, and that `logits_scale` is applied to a copy of
    the final norm, in float32, so that the norm's output times lm_head gives scaled logits.

    steps  all blocks, in the order in which they run
    """

    def __init__(self, weights: DecoderWeights, *, max_seq_len: int, vocabulary: int = 0) -> None:
        self.config = weights.config
        self.weights = weights
        if self.config.is_long(max_seq_len):
            log.info(
                "RoPE of type 'longrope' has its long factors for all requests, as "
                "max_seq_len=%d exceeds its original_max_position_embeddings",
                max_seq_len,
            )
        head = weights.lm_head
        self.lm_head: AnyWeight = head
        if vocabulary:
            if isinstance(head, Tensor):
                self.lm_head = head[:vocabulary]
            else:
                self.lm_head = first_rows(head, vocabulary)
        bias = weights.head_bias
        self.head_bias = bias[:vocabulary] if vocabulary and bias is not None else bias
        config = self.config
        width = attention_of(config).table_dim
        self.tables = self._new_tables(config.rope, width, max_seq_len)
        self.local_tables = self.tables
        if has_local_tables(config):
            width = local_attention_of(config).table_dim
            self.local_tables = self._new_tables(config.local_rope, width, max_seq_len)
        self._still_tables = self.tables
        if any(map(is_nope, blocks_of(config))):
            width = attention_of(config).table_dim
            self._still_tables = self._new_tables(None, width, max_seq_len)
        self._layers, self._final_norm, self._final_bias = computed(
            weights.config, weights.layers, weights.final_norm, weights.final_bias
        )
        self.steps = tuple(self._new_steps())
        kept = AttendingWeights | RecurringWeights
        keeping = [index for index, step in enumerate(self.steps) if isinstance(step.block, kept)]
        # The last block that keeps states. Only the last lane needs the work after its states.
        self._last_kept = keeping[-1]

    def refresh(self) -> None:
        """Recompute the model's own norms in place from weights that have changed."""
        weights = self.weights
        layers, *final = computed(
            weights.config, weights.layers, weights.final_norm, weights.final_bias
        )
        for held, made in zip(self._layers, layers, strict=True):
            refill(held.tensors(), made.tensors())
        refill(tensors_of(self._final_norm, self._final_bias), tensors_of(*final))

    def _new_tables(self, rope: RopeConfig | None, head_dim: int, max_seq_len: int) -> RopeTables:
        device = self.weights.embedding.device
        if rope is None:
            return RopeTables.still(head_dim=head_dim, max_seq_len=max_seq_len, device=device)
        return RopeTables.of(rope, head_dim=head_dim, max_seq_len=max_seq_len, device=device)

    def _new_steps(self) -> Iterator[Step]:
        for index, layer in enumerate(self._layers):
            last = layer.sublayers[-1]
            norm, normed = self._read_norm_after(index), self._is_normed_after(index)
            after = [*layer.sublayers[1:], None]
            steps = zip(layer.followed(norm, normed=normed), after, strict=True)
            for (each, next_norm), then in steps:
                tables = self._tables_of(each.block.block)
                aside = then.read_norm if then is not None and then.parallel else None
                yield Step(index, each.block, next_norm, tables, each is last, aside)

    def _tables_of(self, block: Block) -> RopeTables:
        if is_nope(block):
            return self._still_tables
        return self.local_tables if window_of(block) else self.tables

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

    def _read_norm_after(self, layer: int) -> ReadNorm:
        """The norm that reads the residual stream after a layer; -1: the embedding.

        The next pipeline stage begins with a LayerNorm of its own.
        """
        following, config = layer + 1, self.config
        if following < len(self._layers):
            return self._layers[following].sublayers[0].read_norm
        if config.norms == "rms" or not (config.span is None or config.span.ends):
            return self._final_norm
        return LayerNorm(self._final_norm, self._final_bias, config.norm_eps)

    def _is_normed_after(self, layer: int) -> bool:
        """Whether a norm reads the residual stream after a layer; else `norm_after` is all ones."""
        following = layer + 1
        if following < len(self._layers):
            return self._layers[following].input_normed
        return bool(self.config.final_norm_name)

    def numerics(self, prefill_sizes: Sequence[int]) -> Mapping[str, str]:
        """Sizes of chunks whose gate and up are one kernel, which sums in another order, and which
        factors longrope has.
        """
        fused = ",".join(str(size) for size in prefill_sizes if self.fuses(size))
        long = self.config.is_long(self.max_seq_len)
        return {"fused_swiglu": fused} | ({"longrope": "long"} if long else {})

    def fuses(self, lanes: int) -> bool:
        """Whether unpacked gates and ups are one kernel in a chunk of this many lanes.

        Packed ones are one kernel at all sizes.
        """
        gated = [block for block in self.weights.blocks() if isinstance(block, SwigluWeights)]
        plain = [block for block in gated if isinstance(block.gate_up, Tensor)]
        return bool(plain) and plain[0].is_fused(lanes)

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
        are written at its position through the layer's block table `[S, B]`, and so are recurrent
        states.

        `streams[layer]`, [N or more, H], receives the live lanes' stream after the layer, rounded
        to its dtype.
        """
        scale = self.config.stream_scale
        # Routes are kept layer by layer.
        run = block_runner(alike=launch.routes is None)
        inputs = new_inputs(self.weights.layer_inputs, residual.x, row, launch, self.config)
        residual = self._begin(row, residual, launch)
        like, lanes = residual.scaled, len(residual.x)
        for step, memory in with_memory(self.steps, states, inputs, like, lanes):
            left = kept_rows(streams, step.layer, residual, scale) if step.ends else None
            residual = residual._replace(kept=left)
            aside = self._decoded_aside(step, row, residual, launch)
            given = step.block, step.next_norm, residual, memory, step.tables
            residual = run(decode_block, given, (row, launch))
            if aside is not None:
                residual = residual._replace(scaled=aside.scaled, squares=aside.squares)
        return residual._replace(kept=None)

    def _decoded_aside(
        self, step: Step, row: DecodeLanes, residual: Residual, launch: DecodeLaunch
    ) -> Residual | None:
        """The stream as the block after `step` reads it, if both read the same."""
        if step.aside is None:
            return None
        assert isinstance(step.aside, LayerNorm), f"{step.aside=}"
        weight, bias, eps = step.aside
        other = residual._replace(scaled=torch.empty_like(residual.scaled))
        return layer_norm_residual(other, weight, bias, row.slot, eps=eps, pdl=launch.pdl)

    def _prefilled_aside(self, step: Step, x: Tensor, slot: Tensor, *, pdl: bool) -> Tensor | None:
        """A chunk as the block after `step` reads it, normed, if both read the same stream."""
        if step.aside is None:
            return None
        out = torch.empty_like(x, dtype=self.dtype)
        norm_rows(x, step.aside, slot, eps=self.config.norm_eps, out=out, pdl=pdl)
        return out

    def _begin(self, row: DecodeLanes, residual: Residual, launch: DecodeLaunch) -> Residual:
        """The stream that the first layer reads: with learned positions, and after a LayerNorm."""
        norm, positions = self._read_norm_after(-1), self.weights.positions
        if positions is not None:
            add_positions(residual.x, positions, row.slot, row.position, pdl=launch.pdl)
        if not isinstance(norm, LayerNorm):
            return residual
        return layer_norm_residual(
            residual, norm.weight, norm.bias, row.slot, eps=norm.eps, pdl=launch.pdl
        )

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
        """Run a prompt chunk through all layers, up to and including the last states.

        `stream`, float32 [T, H], is the residual stream that the preceding layers left, and is
        changed in place; None: these layers begin with the tokens' embeddings.

        As in `decode`, the live lanes' states are written. The work after the last states matters
        only to the sampled token, so `prefill_logits` does it. If the last states are attention's,
        only attention's sums are computed here; its output product is left to `prefill_logits`,
        too. With `all_lanes` that work is also done here for every lane, for a draft module that
        reads them; the logits' bits do not depend on it.

        `streams[layer]`, [T or more, H], receives the residual stream after the layer, rounded to
        its dtype; for layers with the last states or after them only with `all_lanes`.
        """
        config, weights, slot = self.config, self.weights, lanes.slot
        x = self._embedded(lanes, launch) if stream is None else stream
        inputs = new_inputs(weights.layer_inputs, x, lanes, launch, config)
        scratch = prefill_scratch(
            weights.layers,
            len(x),
            like=weights.embedding,
            launch=launch,
            outlived=all_lanes,
            may_split=not (all_lanes or streams or launch.deepstack),
            kinds=lane_kinds(lanes.token, slot) if config.by_kind else None,
        )
        if self._is_normed_after(-1):
            norm, kinds = self._read_norm_after(-1), scratch.kinds
            norm_rows(x, norm, slot, eps=config.norm_eps, out=scratch.h, kinds=kinds)
        else:
            scratch.h.copy_(x)
        end: tuple[Tensor, ...] = ()
        run = block_runner(alike=launch.routes is None)
        steps = with_memory(self.steps, states, inputs, weights.embedding)
        for index, (step, memory) in enumerate(steps):
            block, tables = step.block, step.tables
            aside = self._prefilled_aside(step, x, slot, pdl=launch.pdl)
            if index < self._last_kept or not isinstance(block, AttendingWeights):
                given = block, step.next_norm, memory, tables
                run(prefill_block, given, (lanes, x, attention, scratch))
                if index == self._last_kept:
                    end = (scratch.lane_of(x, lanes.last),)
            else:
                assert isinstance(memory, PagedMemory), "attention has a cache"
                attended = attend(block, memory, tables, lanes, attention, scratch)
                end = (scratch.lane_of(x, lanes.last), attended.index_select(0, lanes.last))
                if inputs is not None:
                    end = (*end, inputs.index_select(0, lanes.last))
                if config.by_kind:
                    end = (*end, lanes.token.index_select(0, lanes.last))
                if all_lanes:
                    block.add_output(attended, x, step.next_norm, slot, scratch)
            if aside is not None:
                scratch.h.copy_(aside)
            if end and not all_lanes:
                break
            if step.ends and step.layer < len(launch.deepstack):
                add_given(x, lanes.token, slot, launch.deepstack[step.layer])
                norm = self._read_norm_after(step.layer)
                norm_rows(x, norm, slot, eps=config.norm_eps, out=scratch.h)
            if step.ends:
                keep_stream(x, step.layer, streams, config.stream_scale)
        return PrefillEnd(end, scratch.h, x) if all_lanes else PrefillEnd(end, None)

    def _embedded(self, lanes: PrefillLanes, launch: PrefillLaunch) -> Tensor:
        """A chunk's residual stream before the first layer."""
        weights, slot = self.weights, lanes.slot
        scale = weights.embedding_scale
        x = embed(lanes.token, weights.embedding, slot, scale=scale, given=launch.given)
        if weights.positions is not None:
            add_positions(x, weights.positions, slot, lanes.position, pdl=launch.pdl)
        return x

    def prefill_logits(
        self,
        end: PrefillEnd,
        slot_P: Tensor,
        *,
        head: AnyWeight,
        bias: Tensor | None = None,
        hidden: Tensor | None = None,
        launch: PrefillLaunch = ONE_RANK,
    ) -> Tensor:
        """Logits of the chunks' last lanes, float32 `[P, V]`; the lanes are of slots `slot_P`.

        `end` must not be used afterwards.

        head    `lm_head`, or some of its rows
        bias    `head_bias`, or its values for those rows
        hidden  `[P, H]`: receives the lanes after the final norm; None: they are not needed
        """
        weights, (last, *rest) = self.weights, self.steps[self._last_kept :]
        x_PH = end.last[0]
        layers = weights.layers[last.layer :]
        kinds = lane_kinds(end.last[-1], slot_P) if self.config.by_kind else None
        count = len(slot_P)
        scratch = prefill_scratch(layers, count, like=weights.embedding, launch=launch, kinds=kinds)
        aside = self._prefilled_aside(last, x_PH, slot_P, pdl=launch.pdl)
        if isinstance(last.block, AttendingWeights):
            last.block.add_output(end.last[1], x_PH, last.next_norm, slot_P, scratch)
        else:
            assert isinstance(last.next_norm, Tensor), "no norm follows recurrent blocks"
            eps = self.config.norm_eps
            rms_norm(x_PH, last.next_norm, slot_P, eps=eps, out_dtype=self.dtype, out=scratch.h)
        if aside is not None:
            scratch.h.copy_(aside)
        for step in rest:
            memory: Memory = None
            if isinstance(step.block, LayerInputWeights):
                memory = input_of(step, end.last[-1])
            prefill_feed_forward(step.block, step.next_norm, x_PH, slot_P, scratch, memory)
        if hidden is not None:
            hidden.copy_(scratch.h)
        call = LinearCall(scratch.h, head, slot_P, bias=bias, launch=launch)
        return linear(call, StoreLogits(cap=self.config.logits_cap))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(Composition):
    """The config of every family: the layers, and the weights for them."""

    def allocate(self, *, device: str, dtype: torch.dtype) -> DecoderWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden, forms, span = self.hidden_size, self.forms, self.span
        layers = tuple(
            allocate_layer(
                prefix, layer, hidden, forms, device=device, dtype=dtype, norms=self.norms
            )
            for prefix, layer in named_layers(self)
        )
        own_head = not self.tie_embeddings or HEAD in forms
        # The values of an embedding of one row are not used.
        embeds = span is None or span.needs_embedding(own_head=own_head)
        embedding = new(self.embedding_rows if embeds else 1, hidden)
        inner = None
        if self.inner is not None:
            inner = allocate_frames(self.inner, embedding, device=device, dtype=dtype)
        lm_head: AnyWeight = embedding
        if isinstance(inner, HeadsWeights):
            lm_head = inner.first
        elif own_head and (span is None or span.ends):
            shape = (self.head_rows, hidden)
            lm_head = new_weight(forms, HEAD, shape, device=device, dtype=dtype)
        final_norm = new(hidden)
        if not self.final_norm_name or self.norms == "layer_plain":
            final_norm = torch.ones_like(final_norm)
        biased = self.norms == "layer_biased" and (span is None or span.ends)
        placed = self.position_name and (span is None or span.begins)
        return DecoderWeights(
            config=self,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            final_bias=new(hidden) if biased else None,
            positions=new(self.max_positions, hidden) if placed else None,
            head_bias=new(self.head_rows) if self.head_bias else None,
            lm_head=lm_head,
            inner_weights=inner,
            layer_inputs=None
            if self.layer_inputs is None
            else self.layer_inputs.allocate(len(layers), hidden, forms, device=device, dtype=dtype),
        )


def as_decoder(config: ModelConfig) -> DecoderConfig | None:
    """The config, if its layers are listed; None for a family with a class of its own."""
    return config if isinstance(config, DecoderConfig) else None
