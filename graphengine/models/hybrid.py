"""A decoder of blocks in any order: attention, recurrent blocks, feed-forwards; each after a norm.

A layer is one block (Nemotron-H), or a mixer and a feed-forward (Granite 4, Qwen3.5, LFM2). Each
block adds to the residual stream, and its last kernel leaves the stream as the next block's norm
needs it.

Letters: N lanes, T tokens of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor

from graphengine.kernels import (
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
    rms_norm,
)
from graphengine.models.blocks.gated_delta import GatedDelta
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.norms import plus_one
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.squared_relu import SquaredReluWeights
from graphengine.models.blocks.streams import (
    PrefillScratch,
    coded_columns,
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
from graphengine.models.decoder import HEAD, DecoderConfig, embedding_rows
from graphengine.models.decoder_layer import ATTENTION, MLP, layer_prefix
from graphengine.models.hybrid_parts import (
    Block,
    Part,
    PartWeights,
    RecurringWeights,
    products,
    states_of,
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
from graphengine.models.weights import StoredLinear, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """Sizes and switches of a hybrid, as a family reads them from `config.json`.

    layers           the parts of each layer, in the order in which they run
    attention        the block of every part that attends
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
    layers: tuple[tuple[Part, ...], ...]
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

        def changed(prefix: str, part: Part) -> Part:
            if not isinstance(part.block, GatedDelta):
                return part
            below = prefix + part.prefix
            names = {name.removeprefix(below) for name in beginning if name.startswith(below)}
            return part._replace(block=part.block.parted(names))

        return self._with_parts(changed)

    def with_state_dtype(self, dtype: torch.dtype) -> HybridConfig:
        """This model with heads' states in this dtype; itself where no layer has any."""

        def changed(_: str, part: Part) -> Part:
            if isinstance(part.block, Mamba2 | GatedDelta):
                return part._replace(block=replace(part.block, state_dtype=dtype))
            return part

        if not any(isinstance(part.block, Mamba2 | GatedDelta) for _, _, part in self.parts()):
            return self
        return self._with_parts(changed)

    def _with_parts(self, changed: Callable[[str, Part], Part]) -> HybridConfig:
        """This model with each part replaced by `changed(layer's prefix, part)`."""
        layers: list[tuple[Part, ...]] = [() for _ in self.layers]
        for index, prefix, part in self.parts():
            layers[index] += (changed(prefix, part),)
        return replace(self, layers=tuple(layers))

    def parts(self) -> Iterator[tuple[int, str, Part]]:
        """Each part with its layer's index, and with that layer's prefix in the checkpoint."""
        first = 0 if self.span is None else self.span.first
        for index, layer in enumerate(self.layers):
            for part in layer:
                yield index, layer_prefix(first + index), part

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
            if [(part.norm, part.prefix) for part in layer] == named:
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
            norm_eps=self.norm_eps,
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

    @property
    def linears(self) -> Linears:
        """The linears of a decode step: those of each kind of block, and lm_head.

        The last block's come last, before lm_head: they write the final residual stream.
        """
        prefixes: dict[Block, list[str]] = {}
        for _, prefix, part in self.parts():
            prefixes[part.block] = [*prefixes.pop(part.block, []), prefix + part.prefix]
        linears: dict[str, Linear] = {}
        formats: dict[str, list[WeightFormat | None]] = {}
        for block, of_block in prefixes.items():
            # Different blocks may share a linear: its place is that of the last block to run.
            for name, each in block.linears.items():
                linears.pop(name, None)
                linears[name] = each
            for name, first in block.first_linears.items():
                found = [self.forms.format_of(prefix + first) for prefix in of_block]
                formats.setdefault(name, []).extend(found)
        linears[HEAD] = Linear("sample", self.vocab_size, self.hidden_size)
        formats[HEAD] = [self.forms.format_of(HEAD)]
        return in_formats(linears, formats)

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """What each layer's mixer keeps of a sequence."""
        return tuple(
            tuple(state for part in layer for state in states_of(part.block))
            for layer in self.layers
        )

    def arrivals(self, lanes: int) -> int:
        """Arrival counters that attention uses, for this many decode lanes and for a chunk."""
        return self.attention.arrivals(lanes)

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads."""
        return self.attention.split_tokens(family, dtype, tokens)

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of attention's tables for this many positions, and of norms that are recomputed."""
        norm = 4 * self.hidden_size if self.logits_scale != 1 else 0
        if self.norms_plus_one:
            blocks = [part.block for _, _, part in self.parts()]
            attending = [each for each in blocks if isinstance(each, GroupedQueryAttention)]
            heads = sum(2 * each.head_dim for each in attending if each.qk_norm)
            norm = 4 * (self.hidden_size * (len(blocks) + 1) + heads)
        return norm + RopeTables.nbytes(self.attention.table_dim, max_seq_len)

    def attention_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes of partial results of attention, for this many decode lanes or for a chunk."""
        return self.attention.workspace_bytes(rows, max_seq_len)

    @property
    def prefill_width(self) -> int:
        """Values per lane in `PrefillScratch` where nothing is fused."""
        return max(
            part.block.prefill_width()
            if isinstance(part.block, Swiglu)
            else part.block.prefill_width
            for _, _, part in self.parts()
        )

    def scan_bytes(self, lanes: int) -> int:
        """Most bytes that a layer's kernels pass to each other in a chunk of this many lanes."""
        scans = (part.block for _, _, part in self.parts())
        return max(
            (each.scan_bytes(lanes) for each in scans if isinstance(each, Mamba2 | GatedDelta)),
            default=0,
        )

    def allocate(self, *, device: str, dtype: torch.dtype) -> HybridWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden, forms = self.hidden_size, self.forms
        parts = tuple(
            PartWeights(
                layer=layer,
                norm_name=prefix + part.norm,
                norm=new(hidden),
                block=part.block.allocate(prefix + part.prefix, forms, device=device, dtype=dtype),
            )
            for layer, prefix, part in self.parts()
        )
        own_head = not self.tie_embeddings or HEAD in forms
        embedding = new(embedding_rows(self.vocab_size, self.span, own_head=own_head), hidden)
        lm_head: AnyWeight = embedding
        if own_head and (self.span is None or self.span.ends):
            shape = (self.vocab_size, hidden)
            lm_head = new_weight(forms, HEAD, shape, device=device, dtype=dtype)
        return HybridWeights(
            config=self,
            embedding=embedding,
            parts=parts,
            final_norm=new(hidden),
            lm_head=lm_head,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridWeights(ModelWeights):
    """All weights of a hybrid; `parts` are of all layers, in the order in which they run."""

    config: HybridConfig
    parts: tuple[PartWeights, ...]
    final_norm: Tensor

    def linears(self) -> list[StoredLinear]:
        """Linears of the blocks, and lm_head unless it is tied."""
        of_parts = [each for part in self.parts for each in part.block.linears()]
        if self.lm_head is self.embedding:
            return of_parts
        return [*of_parts, StoredLinear(self.lm_head, ((HEAD, self.config.vocab_size),))]

    def linear_names(self) -> Mapping[str, str]:
        """The name in `config.linears` of each linear of the blocks."""
        return names_of_linears(part.block for part in self.parts)

    def stored(self) -> dict[str, Weight]:
        """Tensors that are not packed, by name."""
        config = self.config
        names = {f"{config.final_norm_name}.weight": Weight(self.final_norm)}
        if len(self.embedding) == config.vocab_size:
            names[f"{config.embedding_name}.weight"] = Weight(self.embedding)
        if self.lm_head is not self.embedding and isinstance(self.lm_head, Tensor):
            names[f"{HEAD}.weight"] = Weight(self.lm_head)
        for part in self.parts:
            names[f"{part.norm_name}.weight"] = Weight(part.norm)
            names |= part.block.stored()
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor, tied ones twice."""
        of_parts = [tensor for part in self.parts for tensor in part.tensors()]
        return [self.embedding, self.final_norm, *tensors_of(self.lm_head), *of_parts]

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of the keys and values of each attention block, by its prefix."""
        attending = (part.block for part in self.parts)
        return {
            block.prefix: block.kv_scales
            for block in attending
            if isinstance(block, AttentionWeights)
        }

    @property
    def embedding_scale(self) -> float:
        return self.config.embedding_scale

    def open(self, *, max_seq_len: int, vocabulary: int = 0) -> HybridModel:
        """The model, with attention's tables for sequences of at most this many tokens."""
        return HybridModel(self, max_seq_len=max_seq_len, vocabulary=vocabulary)


def _computed(weights: HybridWeights) -> tuple[tuple[PartWeights, ...], Tensor]:
    """Parts and final norm to compute with: norms with 1 added or scaled are copies.

    All other tensors are those of the weights.
    """
    config, parts, final_norm = weights.config, weights.parts, weights.final_norm
    if config.norms_plus_one:
        final_norm = plus_one(final_norm)
        parts = tuple(part.with_norms_plus_one() for part in parts)
    if config.logits_scale != 1:
        final_norm = final_norm.float() * config.logits_scale
    return parts, final_norm


class HybridModel:
    """A hybrid with its weights and attention's tables.

    Logits have the first `vocabulary` ids; 0: all. `logits_scale` is applied to the final norm, in
    float32, so that the norm's output times lm_head gives scaled logits.
    """

    def __init__(self, weights: HybridWeights, *, max_seq_len: int, vocabulary: int = 0) -> None:
        self.config = config = weights.config
        self.weights = weights
        head = weights.lm_head
        self.lm_head: AnyWeight = head
        if vocabulary:
            if isinstance(head, Tensor):
                self.lm_head = head[:vocabulary]
            else:
                self.lm_head = first_rows(head, vocabulary)
        parts, final_norm = _computed(weights)
        self._blocks = parts
        keeps = AttentionWeights | RecurringWeights
        kept = [index for index, part in enumerate(parts) if isinstance(part.block, keeps)]
        # Index of the first part after the last one that keeps states.
        self._tail = 1 + kept[-1]
        norms = [part.norm for part in parts]
        self.first_norm = norms[0]
        self._norms_after = (*norms[1:], final_norm)
        head_dim, device = config.attention.table_dim, weights.embedding.device
        if config.rope is None:
            self.tables = RopeTables.still(
                head_dim=head_dim, max_seq_len=max_seq_len, device=device
            )
        else:
            self.tables = RopeTables.of(
                config.rope, head_dim=head_dim, max_seq_len=max_seq_len, device=device
            )

    def refresh(self) -> None:
        """Recompute the model's own norms in place from weights that have changed."""
        parts, final_norm = _computed(self.weights)
        for held, made in zip(self._blocks, parts, strict=True):
            refill(held.tensors(), made.tensors())
        refill(self._norms_after[-1:], [final_norm])

    @property
    def max_seq_len(self) -> int:
        return self.tables.max_seq_len

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def numerics(self, prefill_sizes: Sequence[int]) -> Mapping[str, str]:
        """Sizes of chunks whose gate and up are one kernel, which sums in another order."""
        gated = [part.block for part in self.weights.parts if isinstance(part.block, SwigluWeights)]
        plain = [block for block in gated if isinstance(block.gate_up, Tensor)][:1]
        fused = [size for size in prefill_sizes if any(block.is_fused(size) for block in plain)]
        return {"fused_swiglu": ",".join(map(str, fused))}

    def linear(self, link: int, name: str) -> tuple[AnyWeight, Tensor | None, Tensor | None]:
        """Weight, bias and next norm of one of `config.linears`; only residuals have a norm.

        link  counts the blocks of the linear's kind

        KeyError for a linear that is not there.
        """
        if linear_name(HEAD, self.lm_head) == name:
            return self.lm_head, None, None
        found = [
            (weight, bias, next_norm if linear.kind == "residual" else None)
            for part, next_norm in self._parts()
            for (base, linear), (weight, bias) in zip(
                part.block.block.linears.items(), products(part.block), strict=True
            )
            if linear_name(base, weight) == name
        ]
        if link >= len(found):
            raise KeyError(f"no linear {name} in {link=}: {', '.join(self.config.linears)}")
        return found[link]

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        states: StateTensors,
        launch: DecodeLaunch,
        *,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Residual:
        """The residual stream of `row`'s tokens after the last block, scaled for the final norm.

        `residual` comes from the embedding, scaled for the first norm; it is updated in place. Each
        live lane's keys, values and recurrent states are written at its position.

        `streams[layer]`, [N or more, H], receives the live lanes' stream after the layer, rounded
        to its dtype.
        """
        caches, scale = iter(states.paged()), self.config.stream_scale
        for index, (part, next_norm) in enumerate(self._parts()):
            block, ends = part.block, self._ends_layer(index)
            left = kept_rows(streams, part.layer, residual, scale) if ends else None
            residual = residual._replace(kept=left)
            if isinstance(block, AttentionWeights):
                kv, table = next(caches)
                residual = block.decode(row, residual, next_norm, kv, table, self.tables, launch)
            elif isinstance(block, RecurringWeights):
                kept = _recurrent(states, part.layer)
                residual = block.decode(row, residual, next_norm, kept, launch)
            else:
                residual = block.decode(row, residual, next_norm, launch)
        return residual._replace(kept=None)

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
        """Run a prompt chunk through all blocks up to the last one that keeps states.

        `stream`, float32 [T, H], is the residual stream that the preceding layers left, and is
        changed in place; None: these layers begin with the tokens' embeddings.

        The blocks after that one matter only to the sampled token: `prefill_logits` runs them. With
        `all_lanes` they run for every lane as well; the logits' bits do not depend on it.
        `streams[layer]`, [T or more, H], receives the residual stream after the layer, rounded to
        its dtype; for layers after the last one that keeps states only with `all_lanes`.
        """
        config, slot = self.config, lanes.slot
        scale, given = config.embedding_scale, launch.given
        x = stream
        if x is None:
            x = embed(lanes.token, self.weights.embedding, slot, scale=scale, given=given)
        scratch = self._scratch(len(x), launch, outlived=all_lanes)
        rms_norm(x, self.first_norm, slot, eps=config.norm_eps, out_dtype=self.dtype, out=scratch.h)
        caches, x_1H = iter(states.paged()), None
        for index, (part, next_norm) in enumerate(self._parts()):
            block = part.block
            if index == self._tail:
                x_1H = x.index_select(0, lanes.last)
                if not all_lanes:
                    break
            if isinstance(block, AttentionWeights):
                kv, table = next(caches)
                attended = block.attend(lanes, kv, table, self.tables, attention, scratch)
                block.add_output(attended, x, next_norm, slot, scratch)
            elif isinstance(block, RecurringWeights):
                kept = _recurrent(states, part.layer)
                block.prefill(lanes, x, next_norm, kept, scratch)
            else:
                block.prefill(x, next_norm, slot, scratch)
            if part.layer in streams and self._ends_layer(index):
                torch.mul(x, config.stream_scale, out=streams[part.layer][: len(x)])
        if x_1H is None:
            x_1H = x.index_select(0, lanes.last)
        if all_lanes:
            return PrefillEnd((x_1H,), scratch.h, x)
        return PrefillEnd((x_1H,), None)

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
        (x_1H,) = end.last
        norm, eps = self._norms_after[self._tail - 1], self.config.norm_eps
        scratch = self._scratch(1, launch, outlived=False)
        rms_norm(x_1H, norm, slot_1, eps=eps, out_dtype=self.dtype, out=scratch.h)
        for part, next_norm in islice(self._parts(), self._tail, None):
            block = part.block
            assert isinstance(block, SwigluWeights | SquaredReluWeights), f"{part.layer=}"
            block.prefill(x_1H, next_norm, slot_1, scratch)
        return linear(scratch.h, head, slot_1, out_dtype=torch.float32, launch=launch)

    def _parts(self) -> Iterator[tuple[PartWeights, Tensor]]:
        """Each part with the norm that reads the stream after it."""
        return zip(self._blocks, self._norms_after, strict=True)

    def _ends_layer(self, index: int) -> bool:
        parts = self.weights.parts
        return index + 1 == len(parts) or parts[index + 1].layer != parts[index].layer

    def _scratch(self, lanes: int, launch: PrefillLaunch, *, outlived: bool) -> PrefillScratch:
        blocks = [part.block for part in self.weights.parts]
        widths = [
            each.prefill_width(lanes)
            if isinstance(each, SwigluWeights)
            else each.block.prefill_width
            for each in blocks
        ]
        return PrefillScratch(
            lanes,
            self.config.hidden_size,
            max(widths),
            like=self.weights.final_norm,
            launch=launch,
            coded=coded_columns(
                (each.weight for block in blocks for each in block.linears()), launch.activations
            ),
            outlived=outlived,
        )


def _recurrent(states: StateTensors, layer: int) -> dict[str, Tensor]:
    """A layer's recurrent states, by name."""
    return {name: kept for (index, name), kept in states.recurrent.items() if index == layer}
