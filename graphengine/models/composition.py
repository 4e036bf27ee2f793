"""The one composition of layers: linears, states and sizes of the sublayers that a config lists.

A family's config has its layers, each a tuple of sublayers, and the few values that all layers
share. Linears, states and sizes are derived from them here, and so are the configs of a pipeline
stage, of other weight formats, and of other sizes of blocks. `decoder.py` has the weights and the
programs.

Letters: N lanes, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_axes
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gated_delta import GatedDelta
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.norms import NormKind
from graphengine.models.blocks.per_layer.layer_inputs import LINEAR, PROJECTION, LayerInputs
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.swiglu import PLAIN_NAMES, Swiglu
from graphengine.models.contract import LayerSpan, ModelWeights, Shaped
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.linears import PLAIN, Linear, Linears, WeightForms, in_formats
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.states import LayerStates, side_by_side
from graphengine.models.sublayers import (
    Attending,
    Block,
    Layer,
    Sublayer,
    layer_prefix,
    states_of,
    usual_layer,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition(ABC):
    """The layers of a model and the values they share, as a family reads them from `config.json`.

    norm_eps             of the norms that read the stream
    layers               the sublayers of each layer, in the order in which they run
    mlp                  the dense feed-forward of draft modules, which have one even where every
                         layer has experts; None: draft modules cannot have this model's layers
    rope                 of attention; None: attention knows no positions
    local_rope           of layers with a window; None: the same as in the others
    embedding_scale      factor of a token's embedding
    scales_in_embedding  whether the embedding itself scales, by a factor of the model's dtype, so
                         that given embeddings come scaled
    stream_scale         the model's residual stream is the stored one times this
    logits_scale         factor of the logits
    head_bias            whether lm_head has a bias, which is added to scaled logits
    logits_cap           soft cap c > 0 of scaled logits: c * tanh(logit / c); 0: none
    deepstack            levels of features that are added to the stream at the embeddings of a
                         picture: those of level i after layer i (DeepStack)
    bidirectional_images  whether the embeddings of an image in a prompt see each other
    causal_without_window  whether they do so only in layers with a window
    layer_inputs         per-layer embeddings, which tokens add at each layer; None: none
    norms_plus_one       whether every norm multiplies by 1 + its weight
    norms                the kind of the norms that read the stream
    position_name        of the learned positions, one for each of `max_positions`, which are added
                         to embeddings; "": there are none
    embedding_name, final_norm_name  in the checkpoint, without ".weight"; the latter is "" in a
                         pipeline stage after which layers read the stream without a norm
    span                 which layers of a model these are; None: they are a whole model
    inner                the part that draws the codes of a frame after the first, where a step
                         emits frames: lm_head then has a row for each code, and `vocab_size` counts
                         the ids of prompts; None: a step emits tokens
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    layers: tuple[Layer, ...]
    mlp: Swiglu | None = None
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    scales_in_embedding: bool = False
    stream_scale: float = 1.0
    logits_scale: float = 1.0
    head_bias: bool = False
    logits_cap: float = 0.0
    norms_plus_one: bool = False
    deepstack: int = 0
    bidirectional_images: bool = False
    causal_without_window: bool = False
    norms: NormKind = "rms"
    layer_inputs: LayerInputs | None = None
    position_name: str = ""
    embedding_name: str = "model.embed_tokens"
    final_norm_name: str = "model.norm"
    forms: WeightForms = PLAIN
    span: LayerSpan | None = None
    inner: FrameCoder | None = None

    @abstractmethod
    def allocate(self, *, device: str, dtype: torch.dtype) -> ModelWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_rows(self) -> int:
        """Rows of lm_head."""
        return self.vocab_size if self.inner is None else self.inner.head_rows

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding: `vocab_size`, and one more if a special code stands for the time
        before the first frame.
        """
        return self.vocab_size + (0 if self.inner is None else self.inner.begins)

    @property
    def by_kind(self) -> bool:
        """Whether layers compute text and sound with weights of their own."""
        return any(each.text_norm for layer in self.layers for each in layer)

    # Other configs of the model.

    def untied(self) -> Self:
        """This model with a separate lm_head."""
        return replace(self, tie_embeddings=False)

    def stored_as(self, forms: WeightForms) -> Self:
        """This model with its weights stored in these forms."""
        return replace(self, forms=forms)

    def stage(self, span: LayerSpan) -> Self:
        """These layers of the model, as a pipeline stage has them.

        In every stage but the last, the final norm is the first norm of the next stage.
        """
        attends = [each for each in blocks_of(self) if isinstance(each, GroupedQueryAttention)]
        why = {
            "inputs that tokens bring to each layer": self.layer_inputs is not None,
            "layers that reuse the keys and values of others": any(each.reuses for each in attends),
            "keys and values of several shapes": bool(side_by_side(self.states)),
        }
        if any(why.values()):
            held = ", ".join(name for name, there in why.items() if there)
            raise ValueError(
                f"pipeline_parallel cuts no {self.architecture}, whose {self.num_layers} layers "
                f"have {held}"
            )
        stage = replace(self, layers=self.layers[span.first : span.stop], span=span)
        if span.ends:
            return stage
        norm = self.layers[span.stop][0].norm
        following = layer_prefix(span.stop) + norm if norm else ""
        return replace(stage, final_norm_name=following, logits_scale=1.0, head_bias=False)

    def parted(self, beginning: Collection[str]) -> Self:
        """A copy in which each of these linears of gated delta nets begins a product of its own.

        beginning  names in the checkpoint; those of other blocks change nothing
        """

        def changed(prefix: str, each: Sublayer) -> Sublayer:
            if not isinstance(each.block, GatedDelta):
                return each
            below = prefix + each.prefix
            names = {name.removeprefix(below) for name in beginning if name.startswith(below)}
            return each._replace(block=each.block.parted(names))

        return self._with_sublayers(changed)

    def named_as(
        self, tensors: Mapping[str, Shaped], prefixes: Sequence[str] | None = None
    ) -> Self:
        """A copy in which experts, and embeddings shared with an inner decoder, have the names and
        layout of a checkpoint with these tensors.

        prefixes  of the layers in the checkpoint; None: the usual ones
        """

        def changed(prefix: str, each: Sublayer) -> Sublayer:
            block = each.block
            if not isinstance(block, Experts) or (other := block.names.other) is None:
                return each
            first = f"{prefix}{each.prefix}{other.of_expert(0)[0]}{other.ending}"
            untransposed = (block.experts, block.rows, block.hidden_size)
            if first not in tensors or (
                block.names.transposed and tensors[first].shape != untransposed
            ):
                return each
            return each._replace(block=replace(block, names=other))

        named = self._with_sublayers(changed, prefixes)
        return named if self.inner is None else replace(named, inner=self.inner.named_as(tensors))

    def with_state_dtype(self, dtype: torch.dtype) -> Self:
        """This model with heads' states in this dtype; itself where no layer has any."""

        def changed(block: Block) -> Block:
            if isinstance(block, Mamba2 | GatedDelta):
                return replace(block, state_dtype=dtype)
            return block

        if not any(isinstance(block, Mamba2 | GatedDelta) for block in blocks_of(self)):
            return self
        return self.with_blocks(changed)

    def with_blocks(self, changed: Callable[[Block], Block]) -> Self:
        """This model with each block replaced by `changed(block)`."""
        return self._with_sublayers(lambda _, each: each._replace(block=changed(each.block)))

    def _with_sublayers(
        self,
        changed: Callable[[str, Sublayer], Sublayer],
        prefixes: Sequence[str] | None = None,
    ) -> Self:
        """This model with each sublayer replaced by `changed(layer's prefix, sublayer)`."""
        if prefixes is None:
            prefixes = [prefix for prefix, _ in named_layers(self)]
        layers = tuple(
            tuple(changed(prefix, each) for each in layer)
            for prefix, layer in zip(prefixes, self.layers, strict=True)
        )
        return replace(self, layers=layers)

    def attending_decoder(self) -> Self | None:
        """A decoder of one dense layer with this model's attention, for draft modules.

        It attends to all tokens, and its norms read an unscaled stream. None: draft modules cannot
        have layers like the model's.
        """
        if self.mlp is None or self.rope is None or self.norms != "rms" or self.head_bias:
            return None
        # The stored stream may be the true one divided by `stream_scale`.
        eps = self.norm_eps * self.stream_scale**2
        attention = attention_of(self)
        if isinstance(attention, GroupedQueryAttention):
            attention = replace(attention, window=0, nope=False, one_linear="")
        layer = usual_layer(
            replace(attention, norm_eps=eps),
            replace(self.mlp, norm_eps=eps, names=PLAIN_NAMES, one_linear=False),
            post_norms=False,
        )
        return replace(
            self, norm_eps=eps, layers=(layer,), local_rope=None, stream_scale=1.0, logits_scale=1.0
        )

    # Values derived from the layers.

    @property
    def rope_axes(self) -> tuple[int, ...] | None:
        """The axis by which each pair of a head rotates; None: positions have one axis."""
        if self.rope is None:
            return None
        return rope_axes(self.rope, head_dim=attention_of(self).table_dim)

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt."""
        limits = [rope.most_at_once for rope in self._ropes]
        return min(limit for limit in (self.max_positions, *limits) if limit is not None)

    def is_long(self, max_seq_len: int) -> bool:
        """Whether RoPE's tables of this many positions have longrope's long factors."""
        return any(rope.is_long(max_seq_len) for rope in self._ropes)

    @property
    def _ropes(self) -> list[RopeConfig]:
        return [rope for rope in (self.rope, self.local_rope) if rope is not None]

    @property
    def linears(self) -> Linears:
        """The linears of a decode step: those of each kind of block, and lm_head, which is whole on
        every rank.
        """
        return self.linears_of([prefix for prefix, _ in named_layers(self)])

    def linears_of(self, prefixes: Sequence[str]) -> Linears:
        """`linears` where the layers have these prefixes in the checkpoint.

        They come in the order in which a layer runs them; linears of blocks in later layers come
        last. So the last linears before lm_head write the final residual stream.
        """
        below: dict[tuple[int, Block], list[str]] = {}
        for prefix, layer in zip(prefixes, self.layers, strict=True):
            for place, each in enumerate(layer):
                key = (place, each.block)
                below[key] = [*below.pop(key, []), prefix + each.prefix]
        linears: dict[str, Linear] = {}
        formats: dict[str, list[WeightFormat | None]] = {}
        if self.layer_inputs is not None:
            linears[LINEAR] = self.layer_inputs.linear(self.num_layers, self.hidden_size)
            formats[LINEAR] = [self.forms.format_of(PROJECTION)]
        for (_, block), of_block in sorted(below.items(), key=lambda item: item[0][0]):
            # Different blocks may share a linear: it takes the place of the last block to run.
            for name, own in block.linears.items():
                linears.pop(name, None)
                linears[name] = own
                first = block.first_linears.get(name)
                found = [
                    None if first is None else self.forms.format_of(p + first) for p in of_block
                ]
                formats.setdefault(name, []).extend(found)
        linears[HEAD] = Linear("sample", self.head_rows, self.hidden_size)
        formats[HEAD] = [self.forms.format_of(HEAD)]
        return in_formats(linears, formats)

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """The state that each layer keeps of a sequence: keys and values, latents, or recurrent
        states.
        """
        return tuple(
            tuple(state for each in layer for state in states_of(each.block))
            for layer in self.layers
        )

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads."""
        return attention_of(self).split_tokens(family, dtype, tokens)

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of attention's tables for this many positions, and of norms that are recomputed."""
        norms = 1 if self.logits_scale != 1 else 0
        norms += sum(isinstance(each, Experts) and each.own_norms for each in blocks_of(self))
        heads = 0
        if self.norms_plus_one:
            sublayers = [each for layer in self.layers for each in layer]
            norms += 1 + sum(2 if each.post_norm else 1 for each in sublayers)
            blocks = [each.block for each in sublayers]
            attending = [each for each in blocks if isinstance(each, GroupedQueryAttention)]
            heads = sum(2 * each.head_dim for each in attending if each.qk_norm)
        of_others = attention_of(self).table_dim
        widths = [of_others] * (1 + any(map(is_nope, blocks_of(self))))
        widths += [local_attention_of(self).table_dim] * has_local_tables(self)
        tables = sum(RopeTables.nbytes(width, max_seq_len) for width in widths)
        return 4 * (norms * self.hidden_size + heads) + tables

    def attention_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes of partial results of attention, for this many decode lanes or for a chunk."""
        return max(block.workspace_bytes(rows, max_seq_len) for block in attending_of(self))

    @property
    def prefill_width(self) -> int:
        """Values per lane in `PrefillScratch` where nothing is fused."""
        return max(block.prefill_width for block in blocks_of(self))

    def scan_bytes(self, lanes: int, prompts: int | None = None) -> int:
        """Most bytes that a layer's kernels pass to each other in a chunk of this many lanes, or in
        the chunks of `prompts` prompts with these lanes together.
        """
        scans = [each for each in blocks_of(self) if isinstance(each, Mamba2 | GatedDelta)]
        return max((each.scan_bytes(lanes, prompts) for each in scans), default=0)


def named_layers(config: Composition) -> list[tuple[str, Layer]]:
    """Each layer with its prefix in the checkpoint."""
    first = 0 if config.span is None else config.span.first
    return [(layer_prefix(index), layer) for index, layer in enumerate(config.layers, first)]


def blocks_of(config: Composition) -> list[Block]:
    """The block of each sublayer."""
    return [each.block for layer in config.layers for each in layer]


def attending_of(config: Composition) -> list[Attending]:
    """The blocks that attend, each kind once."""
    return list(dict.fromkeys(each for each in blocks_of(config) if isinstance(each, Attending)))


def attention_of(config: Composition) -> Attending:
    """The first block that attends, without a window if there is one.

    Blocks with a window may have other heads; otherwise blocks differ only in RoPE.
    """
    blocks = attending_of(config)
    return next((block for block in blocks if not window_of(block)), blocks[0])


def local_attention_of(config: Composition) -> Attending:
    """The first block that attends, with a window if there is one."""
    blocks = attending_of(config)
    return next(filter(window_of, blocks), blocks[0])


def experts_of(config: Composition) -> Experts | None:
    """The experts of the layers that have some, which are all alike; None: no layer has."""
    return next((block for block in blocks_of(config) if isinstance(block, Experts)), None)


def windows_of(config: Composition) -> tuple[int, ...]:
    """The attention window of each layer, 0 for a layer without one."""
    return tuple(max(window_of(each.block) for each in layer) for layer in config.layers)


def window_of(block: Block) -> int:
    """Tokens that a query of the block sees; 0: all, or the block does not attend."""
    return block.window if isinstance(block, GroupedQueryAttention) else 0


def is_nope(block: Block) -> bool:
    """Whether the block attends without RoPE where others have it."""
    return isinstance(block, GroupedQueryAttention) and block.nope


def has_local_tables(config: Composition) -> bool:
    """Whether some layers have RoPE tables of their own."""
    return config.local_rope is not None and any(windows_of(config))
