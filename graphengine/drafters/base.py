"""The interface of drafters, which propose a row's next tokens in the captured step.

A drafter is called at two points. `prepare` runs in the prefill graphs: it takes a prompt chunk
into the drafter's state and, after the last chunk, makes the first drafts. `propose` runs in the
decode graphs, after verification: it takes in the emitted tokens and makes the next step's drafts.
Both write `draft_tokens[slot]`, which the slot's next replay feeds and verifies; -1 is no draft.
Drafts never change a token, only how many come at once: a drafter that fails costs only speed.
Where they are trees, `draft_tokens[slot]` has every node except the root, and `trees` has their
structure; the parent of a node with a token also has a token.

Letters: S slots, R rows of a bucket, W lanes of a row, N = R * W lanes, T tokens of a prefill
bucket, H hidden, K drafts, B blocks of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels.core.tree import TreeTables
from graphengine.kernels.draft.draft import Fusion
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.logits.logits import LogitsTensors
from graphengine.kernels.norm_rope.embedding import GivenRows, embed
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.step.finish_reference import FinishedStep
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.requests.processing import logits_tensors

if TYPE_CHECKING:
    from graphengine.host.step_plan import PrefillChunk
    from graphengine.models.checkpoints.checkpoint import Checkpoint
    from graphengine.models.contract import Model
    from graphengine.models.launches import DecodeLaunch, RankGroup
    from graphengine.models.linears import LinearPlans, Linears
    from graphengine.models.states import LayerStates
    from graphengine.models.weights import Destinations, StoredLinear, StoredWeights


class PathLanes(NamedTuple):
    """Where the lanes along accepted tree paths are among all lanes of a step."""

    fed: DecodeLanes
    """All lanes that the target was fed, in the order of the hidden states."""
    source: Tensor
    """int32 [N]: the index in `fed` of each of the N lanes."""


class Verified(NamedTuple):
    """Inputs of `propose`: a decode replay's lanes and outputs, once its tokens are published."""

    lanes: DecodeLanes
    """The N lanes that were fed; lane r * W + j is token j of row r. For trees, only the accepted
    paths, as if each had been fed as a chain."""
    hidden: Residual
    """The target's residual stream of the lanes it was fed, scaled for its final norm."""
    step: FinishedStep
    """The target's token after each lane, and how many tokens each row emitted."""
    drafts: int
    """Drafts that this graph verified in each row, along one path of a tree: W = drafts + 1."""
    of_tree: PathLanes | None = None
    """None: the target was fed the N lanes, as chains."""
    filtered: bool = False
    """Whether the graph is one of the full sampler, which draws through the requests' filters."""


class Prefilled(NamedTuple):
    """Inputs of `prepare`: the chunks of P prompts that a prefill replay has run and published. P
    is 1 unless the engine packs prompts.
    """

    chunk: PrefillLanes
    next_prompt_token: Tensor | None
    """int32 [P]: the prompt's token after each chunk; it has no meaning after the last one. None
    where nothing is drafted."""
    hidden: Tensor | None
    """[T, H] in the model's dtype, after the final norm; None where `wants_hidden` is not set."""
    token: Tensor
    """int32 [P]: the sampled token; it has a meaning only after a prompt's last chunk."""
    final: Tensor
    """int32 [P]: not 0 for the last chunk."""
    attention: Callable[..., Tensor]
    """The chunk's attention, a `ChunkAttention` such as `paged_prefill_attention`; its
    segments can be replaced."""
    given: GivenRows | None = None
    """Embeddings of positions that have no token; None where each has one."""

    @property
    def following(self) -> Tensor:
        """int32 [T]: the token after each lane's token. The last lane of a prompt's last chunk has
        the sampled token.
        """
        assert self.next_prompt_token is not None, "nothing is drafted"
        return self.chunk.followed_by(
            torch.where(self.final != 0, self.token, self.next_prompt_token)
        )

    def embedded(self, token_T: Tensor, fusion: Fusion) -> tuple[Tensor, Fusion]:
        """Token ids and fusion of these tokens for `combine_hidden`.

        Where embeddings may be given in place of tokens, the fusion's table has the embedding of
        each of the chunk's lanes, and the ids are lane numbers.
        """
        if self.given is None:
            return token_T, fusion
        # Modules do not scale embeddings.
        rows = self.given._replace(scale=1.0)
        table = embed(token_T, fusion.embedding, self.chunk.slot, given=rows)
        lane = torch.arange(len(token_T), dtype=torch.int32, device=token_T.device)
        return lane, fusion._replace(embedding=table.to(fusion.embedding.dtype))

    def last_lane(self, token_T: Tensor) -> DecodeLanes:
        """The last lane of each chunk, with its token from `token_T`; padded unless the chunk is
        final.
        """
        chunk = self.chunk
        token, slot, position = (
            lanes.index_select(0, chunk.last) for lanes in (token_T, chunk.slot, chunk.position)
        )
        return DecodeLanes(token, torch.where(self.final != 0, slot, -1), position)


class FieldSizes(NamedTuple):
    """The sizes that decide the shapes of a drafter's static fields."""

    slots: int
    max_seq_len: int
    prefill_tokens: int
    """Tokens of the largest prefill bucket."""
    dtype: torch.dtype
    """The target's dtype."""


class DraftSetting(NamedTuple):
    """The engine's parts that a drafter uses, once the engine is allocated."""

    model: Model
    buffers: StaticBuffers
    launch: DecodeLaunch
    group: RankGroup | None = None
    """The target's ranks; None: there is one."""
    most_split: int | None = None
    """Tokens in a split of decode attention, at most; None: any number."""

    @property
    def limit(self) -> int:
        """Positions that a cache holds."""
        return self.model.max_seq_len

    def launch_with(self, plans: LinearPlans) -> DecodeLaunch:
        """How the drafter's own decode kernels are launched, with these plans."""
        return replace(self.launch, plans=plans)

    @property
    def sampling(self) -> SamplingTensors:
        """The target's sampling parameters, by slot."""
        return SamplingTensors(*(self.buffers[name] for name in SamplingTensors._fields))

    @property
    def options(self) -> LogitsTensors:
        """The options on the target's logits, by slot."""
        return logits_tensors(self.buffers)


class StepSizes(NamedTuple):
    """A step whose bytes are counted."""

    rows: int
    context: float
    """Mean number of tokens that a row attends to."""
    kv_dtype: torch.dtype
    lm_head: AnyWeight
    """The target's lm_head."""
    experts: float
    """Experts that all runs of draft modules read together."""


class Drafter(ABC):
    """A way to propose `needs.length` tokens a step; `graphengine.speculative` has its options.

    Each states its `needs` and has `prepare` and `propose`. The other methods are for drafters with
    weights, fields or files of their own; the defaults hold and do nothing.
    """

    needs: DraftNeeds
    weights: StoredWeights | None = None
    """The weights that its KV depends on, once `allocate` has made them."""
    own_checkpoint: Checkpoint | None = None
    """The checkpoint that `weights` are read from; None: the target's."""
    whole_checkpoint: Checkpoint | None = None
    """The checkpoint of all ranks' `whole_weights`; None: the target's."""
    streams: Mapping[int, Tensor] = MappingProxyType({})
    """[T or more, H] by layer of the target: where prefill leaves the stream after that layer.
    Known once it is opened."""
    step_streams: Mapping[int, Tensor] = MappingProxyType({})
    """[N or more, H] by layer of the target: where a decode step leaves the stream after that
    layer. Known once it is opened."""

    trees: TreeTables | None = None
    """The tree of each slot's drafts, where `needs.depth` says that they are trees. Known once the
    drafter is opened. If it changes them, a replay reads what the replay before wrote."""
    parents: Tensor | tuple[int, ...] = ()
    """For trees, the number of each node's parent, from node 1 on; the root is node 0. The same in
    every step, or int32 [S, K], written as `trees` are. Known once the drafter is opened."""

    @property
    def length(self) -> int:
        """K: drafts a step, at most."""
        return self.needs.length

    def whole_weights(self, dtype: torch.dtype) -> StoredWeights | None:
        """The weights of all ranks together, on the device "meta". None where ranks do not split
        them, or a checkpoint does not have them as they are: this rank's `weights` count then.
        """
        return None

    @property
    def whole_states(self) -> tuple[LayerStates, ...]:
        """The states of its layers on all ranks together; `needs.states` has this rank's."""
        return self.needs.states

    # Costs. The engine asks before anything is allocated, except where stated.

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of weights that it adds to the target's."""
        return 0

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of the tables that it makes when it is opened."""
        return 0

    def fields(self, sizes: FieldSizes) -> list[Field]:
        """Its own static fields."""
        return []

    @property
    def chunk_linears(self) -> Linears:
        """Its linears by which a prefill multiplies, and maybe others."""
        return {}

    def bytes_read(self, step: StepSizes) -> int | None:
        """Bytes that the drafts of a step must read. None: with these weights it is not known.

        Known once it is allocated.
        """
        return None if self.needs.states else 0

    # Opening.

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        family: RowFamily,
        chain_family: RowFamily,
    ) -> Destinations:
        """Allocate its weights and choose its kernels' plans, where it has any.

        family        of launches with all lanes of a step
        chain_family  of launches with one lane a row

        Returns the destinations of the tensors that it takes from the target's checkpoint.
        """
        return {}

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        """The target's checkpoint, its tensors that `allocate` named cut to this rank's part."""
        return checkpoint

    def linears(self) -> list[StoredLinear]:
        """Its linear weights that are read from the target's checkpoint, once allocated."""
        return []

    def own_destinations(self) -> Destinations:
        """Where the tensors of its `own_checkpoint` go, once it is allocated."""
        return {}

    def filled(self, names: Collection[str]) -> None:  # noqa: B027
        """Recompute in place everything made from these tensors of `own_checkpoint`, which have
        been loaded again. Queued on the current stream.
        """

    def open(self, setting: DraftSetting, cache: Tensor) -> None:  # noqa: B027
        """Take the engine's parts; `cache` is [layers, B + 1, 2, block_size, G, D], with the same
        blocks as the target's cache, or empty.
        """

    def refresh(self) -> None:  # noqa: B027
        """Recompute in place everything that `open` made from the target's weights, or from its own
        weights that come from the target's checkpoint. Queued on the current stream.
        """

    # Captured.

    @abstractmethod
    def prepare(self, prefilled: Prefilled) -> None:
        """Take in a prompt chunk; after the last one, write the first drafts."""

    def note(self, noted: Prefilled) -> None:  # noqa: B027
        """Take in a part of a prompt, not the last, whose KV (its own too) already exists.

        Only the chunk of `noted` has a meaning; it has no hidden states and no following tokens.
        """

    @abstractmethod
    def propose(self, verified: Verified) -> None:
        """Take in a step's emitted tokens, and write the next step's drafts.

        After a graph that verified no drafts (K = 0), only the drafter's state advances. After one
        that verified fewer drafts than it can make, it need make only as many: the next step most
        often has the same number.
        """

    # On the host.

    def counters(self) -> dict[str, int]:
        """Its counts on the device; reading them waits for the device."""
        return {}

    def collect(self, chunk: PrefillChunk) -> None:
        """Called once the host has read a prompt chunk's replay, on the stream of the replays."""
        raise NotImplementedError(f"{type(self).__name__} collects nothing")

    def close(self) -> None:  # noqa: B027
        """Called when the engine closes; its buffers and the device must not be used any more."""
