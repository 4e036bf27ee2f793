"""The interface of models to the engine; `launches.py` has what the engine provides for a launch.

A family writes a `ModelConfig`, `ModelWeights` and a `Model`, and lists in them

    linears   the weights that a decode step multiplies by: plans, their sources in the tuning
              tables, arrival counters and workspaces use these names
    states    the state that each layer keeps of a sequence: caches, swap, recurrent fields and the
              budget follow from it
    weights   the checkpoint's tensors, and along which dimension ranks split each of them

so that no code outside `models/` needs to know which layers a family has.

Letters: N or T lanes, S slots, H hidden, V vocabulary, B blocks of a slot's table, P positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.inner.drawn import FrameCoder, FrameWeights
from graphengine.models.launches import (
    ONE_RANK,
    ChunkAttention,
    DecodeLaunch,
    PrefillLaunch,
)
from graphengine.models.linears import (
    Linears,
    WeightForms,
    linear_name,
)
from graphengine.models.states import LayerStates, StateTensors
from graphengine.models.weights import StoredLinear, StoredWeights


class LayerSpan(NamedTuple):
    """The layers `first` to `stop - 1` of a model with `layers` layers: one pipeline stage.

    embeds  whether the stage has the embedding even if it does not begin with it
    """

    first: int
    stop: int
    layers: int
    embeds: bool = False

    @property
    def begins(self) -> bool:
        """Whether the embedding comes before these layers."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether lm_head comes after these layers."""
        return self.stop == self.layers

    def needs_embedding(self, *, own_head: bool) -> bool:
        """Whether the stage reads the embedding; `own_head`: lm_head is another tensor."""
        return self.begins or self.embeds or (self.ends and not own_head)


class PrefillEnd(NamedTuple):
    """The results of `Model.prefill` for a chunk of T lanes.

    last    data of the chunks' last lanes for `prefill_logits`; only the model reads it
    hidden  the stream after the final norm `[T, H]` in the model's dtype, where it was asked for
    stream  float32 `[T, H]`: the stream before the final norm, where there is `hidden`
    """

    last: tuple[Tensor, ...]
    hidden: Tensor | None
    stream: Tensor | None = None


class Shaped(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class ModelConfig(Protocol):
    """A model's configuration as its family reads it, before anything is allocated.

    Equal configs have equal `repr`: sessions tell models apart by it.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...

    @property
    def norm_eps(self) -> float:
        """Epsilon of the final norm."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model is made for."""
        ...

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt; a sequence may go on to `max_positions`."""
        ...

    @property
    def rope_axes(self) -> tuple[int, ...] | None:
        """The axis, 0..2, by which each pair of a head rotates; None: positions have one axis."""
        ...

    @property
    def deepstack(self) -> int:
        """Levels of features that follow a picture's embeddings: level i is added after layer i."""
        ...

    @property
    def bidirectional_images(self) -> bool:
        """Whether the embeddings of an image in a prompt see each other."""
        ...

    @property
    def causal_without_window(self) -> bool:
        """Whether they do so only in layers with a window."""
        ...

    @property
    def inner(self) -> FrameCoder | None:
        """The part that draws the codes of a frame after the first; None: a step emits tokens."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether lm_head is the embedding."""
        ...

    @property
    def logits_cap(self) -> float:
        """Soft cap c > 0 of the logits: c * tanh(logit / c); 0: none."""
        ...

    @property
    def embedding_name(self) -> str:
        """The embedding's name in a checkpoint, without ".weight"."""
        ...

    def untied(self) -> Self:
        """This model with a separate lm_head."""
        ...

    @property
    def forms(self) -> WeightForms:
        """How the weights that are not in the model's dtype are stored."""
        ...

    def stored_as(self, forms: WeightForms) -> Self:
        """This model with its weights stored in these forms."""
        ...

    def named_as(self, tensors: Mapping[str, Shaped]) -> Self:
        """This model with the names and layout of a checkpoint that has these tensors."""
        ...

    def parted(self, beginning: Collection[str]) -> Self:
        """A copy in which these linears of a checkpoint begin products of their own, where
        possible.
        """
        ...

    def with_state_dtype(self, dtype: torch.dtype) -> Self:
        """This model with heads' states in this dtype; itself where no layer has any."""
        ...

    def stage(self, span: LayerSpan) -> Self:
        """These layers of the model, as a pipeline stage has them."""
        ...

    @property
    def linears(self) -> Linears:
        """The linears of a decode step: those of the layers, and `lm_head`."""
        ...

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """The state that each layer keeps of a sequence."""
        ...

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that one program of decode attention reads; 0 where no layer has attention."""
        ...

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of the tables that the model makes for this many positions when it is opened."""
        ...

    def attention_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes of attention's partial results, in the largest launch."""
        ...

    @property
    def prefill_width(self) -> int:
        """Most values per lane that prefill keeps besides the stream and the normed stream."""
        ...

    def scan_bytes(self, lanes: int, prompts: int | None = None) -> int:
        """Bytes that a recurrent layer's kernels pass to each other, in a chunk of `lanes`, or in
        the chunks of `prompts` prompts with these lanes together.
        """
        ...

    def allocate(self, *, device: str, dtype: torch.dtype) -> ModelWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights(StoredWeights):
    """All weights of a model.

    embedding  `[V, H]`
    lm_head    `[V, H]`; where the two are tied it is the embedding. Where a step emits frames it
               has a row for each code; of parallel heads it is the first
    """

    config: ModelConfig
    embedding: Tensor
    lm_head: AnyWeight

    @abstractmethod
    def linear_names(self) -> Mapping[str, str]:
        """The name in `config.linears` of each linear of the layers, as `names_of_linears` gives
        it.
        """

    def by_linear(self) -> dict[str, list[Tensor]]:
        """The tensors of each of `config.linears`, by its name: those of all layers."""
        names = self.linear_names()
        weights = [
            (names[first], linear.weight)
            for linear in self.linears()
            if (first := linear.parts[0][0]) in names
        ]
        found: dict[str, list[Tensor]] = {}
        for name, weight in [*weights, ("lm_head", self.lm_head)]:
            tensors = [weight] if isinstance(weight, Tensor) else weight.tensors
            found.setdefault(linear_name(name, weight), []).extend(tensors)
        return found

    @property
    def inner_weights(self) -> FrameWeights | None:
        """Weights of the part that draws the codes of a frame; None: a step emits tokens."""
        return None

    def adaptable(self) -> list[StoredLinear]:
        """The weights that adapters can change, in the order of a step."""
        return []

    @property
    def embedding_scale(self) -> float:
        """Factor of a token's embedding; the product is rounded to its dtype."""
        return 1.0

    @property
    def given_scale(self) -> float:
        """Factor of embeddings that the caller gives, the same as transformers applies to
        `inputs_embeds`.
        """
        return self.embedding_scale

    @abstractmethod
    def open(self, *, max_seq_len: int, vocabulary: int = 0) -> Model:
        """The model of these weights, for sequences of at most this many tokens.

        vocabulary  how many ids the logits have, from id 0 on; 0: all
        """


class Model(Protocol):
    """A model that is ready to run: weights, tables, and its two programs.

    The programs launch kernels on the current stream, allocate only intermediates, and are captured
    into graphs: no value of a tensor reaches the host.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def weights(self) -> ModelWeights: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_seq_len(self) -> int: ...

    @property
    def lm_head(self) -> AnyWeight:
        """`[V, H]`, or the first rows of it."""
        ...

    @property
    def head_bias(self) -> Tensor | None:
        """Bias of the rows of `lm_head`; None: it has none."""
        ...

    @property
    def tables(self) -> RopeTables:
        """RoPE's angles in the layers without a window."""
        ...

    @property
    def first_norm(self) -> Tensor:
        """Weight `[H]` of the RMSNorm that reads the embedding."""
        ...

    def numerics(self, prefill_sizes: Sequence[int]) -> Mapping[str, str]:
        """Facts besides plans and dtype that the bits depend on, for chunks of these sizes."""
        ...

    def refresh(self) -> None:
        """Recompute in place the tensors that were computed from the weights when the model was
        opened.

        Called after the weights have got new values; the work is queued on the current stream.
        """
        ...

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

        `residual` comes from the embedding, scaled for `first_norm`; it is updated in place. Each
        live lane's states are updated; padded lanes change nothing.

        `streams[layer]`, [N or more, H], receives the live lanes' stream after the layer, rounded
        to its dtype. No kernel is launched for that.
        """
        ...

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
        """Run a prompt chunk through the layers, as far as the states and `prefill_logits` need it.

        `stream`, float32 [T, H], is the residual stream that the preceding layers left, and is
        changed in place; None: these layers begin with the tokens' embeddings.

        The states are updated as in `decode`. With `all_lanes` every lane goes through all layers,
        for the reader of `PrefillEnd.hidden`; the logits' bits do not depend on it.

        `streams[layer]`, [T or more, H], receives the residual stream after the layer, rounded to
        its dtype; the last layer's only with `all_lanes`.
        """
        ...

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
        hidden  `[P, H]` in the model's dtype: receives the lanes after the final norm; None: they
                are not needed
        """
        ...
