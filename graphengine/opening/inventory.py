"""The one list of everything an engine holds, except weights, caches and static fields.

The budget adds these lists up, allocation makes their tensors, capture walks the graphs, and
reports count them. `engine_fields` is the list of static fields, `cache_shape` that of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphengine.buckets import BucketLadder
from graphengine.config import EngineConfig
from graphengine.drafters import DraftNeeds
from graphengine.host.rings import WindowRing, ring_blocks
from graphengine.kernels.experts.records import route_items
from graphengine.kernels.logits.logprobs_mailbox import logprob_items
from graphengine.models.contract import ModelConfig
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.states import paged_states, recurrent_states
from graphengine.models.weights import RoutedExperts
from graphengine.program.graph_key import (
    GraphKey,
    PrefillKind,
    decode_key,
    note_key,
    prefill_key,
    samplers,
)


def graph_keys(
    config: EngineConfig,
    ladder: BucketLadder,
    prefill_ladder: BucketLadder,
    draft_lengths: tuple[int, ...],
) -> tuple[GraphKey, ...]:
    """Every graph, in the order of capture: the largest of each kind first.

    draft_lengths  drafts that decode graphs verify, ascending; graphs of a bucket of `rows` verify
                   `config.drafts_of(rows)` at most
    """
    kinds: tuple[PrefillKind, ...] = ("full", "fast")
    if config.prompt_logprobs:
        kinds = ("prompt", *kinds)
    shapes = [
        (rows, drafts)
        for rows in reversed(ladder.sizes)
        for drafts in reversed(draft_lengths)
        if drafts <= config.drafts_of(rows)
    ]
    # The full sampler's graph holds logits: the fast one's can reuse its memory.
    decode = samplers(relaxed=config.relaxed_acceptance is not None)[::-1]
    return (
        *(prefill_key(tokens, kind) for tokens in reversed(prefill_ladder.sizes) for kind in kinds),
        note_key(prefill_ladder.sizes[-1]),
        *(
            decode_key(*shape, sampler, steps)
            for shape in shapes
            for sampler in decode
            for steps in reversed(config.launch_lengths)
        ),
    )


class RingShape(NamedTuple):
    """The shape of a mailbox: entries, lanes, and 64-bit items of a lane."""

    entries: int
    lanes: int
    items: int

    @property
    def nbytes(self) -> int:
        return 8 * self.entries * self.lanes * self.items


class Rings(NamedTuple):
    """The shapes of an engine's mailboxes; None for results that requests may not ask for."""

    tokens: RingShape
    logprobs: RingShape
    prompt_logprobs: RingShape | None
    routes: RingShape | None = None
    prompt_routes: RingShape | None = None
    codes: RingShape | None = None
    codes_logprobs: RingShape | None = None


def mailboxes(
    config: EngineConfig,
    *,
    tokens_per_step: int,
    prefill_tokens: int,
    routed: RoutedExperts | None = None,
    inner: FrameCoder | None = None,
) -> Rings:
    """The shapes of all mailboxes: tokens and the state of each lane; log-probabilities of new
    tokens and of prompts; experts of new tokens and of prompts; codes of frames and their
    log-probabilities.

    prefill_tokens  tokens of the largest prefill bucket
    routed          the model's experts, if they are recorded
    inner           the model's inner decoder, if a step emits frames
    """
    entries, lanes = config.mailbox_entries, config.max_batch
    items = logprob_items(config.max_logprobs)
    of_prompts = RingShape(entries, prefill_tokens, items)
    routes = prompt_routes = None
    if routed is not None:
        of_token = route_items(routed.layers, routed.chosen)
        routes = RingShape(entries, lanes, tokens_per_step * of_token)
        prompt_routes = RingShape(entries, prefill_tokens, of_token)
    codes = codes_logprobs = None
    if inner is not None:
        codes = RingShape(entries, lanes, route_items(inner.steps, 1))
        codes_logprobs = RingShape(entries, lanes, inner.steps)
    return Rings(
        tokens=RingShape(entries, lanes, tokens_per_step + 1),
        logprobs=RingShape(entries, lanes, tokens_per_step * items),
        prompt_logprobs=of_prompts if config.prompt_logprobs else None,
        routes=routes,
        prompt_routes=prompt_routes,
        codes=codes,
        codes_logprobs=codes_logprobs,
    )


class LinkShape(NamedTuple):
    """The shape of the memory that a driver shares with other ranks, in 64-bit words.

    ranks     number of ranks besides the driver
    data      words of a command's data, after its header
    stages    words for each rank's stage; the driver has such words, too
    text      words for the text of a rank
    launches  words for the times of a rank's last launches
    commands  number of commands in the ring
    header    words of a command's header
    """

    ranks: int
    data: int
    stages: int = 4
    text: int = 1024
    launches: int = 64
    commands: int = 8
    header: int = 10

    @classmethod
    def of_loads(cls, ranks: int, nbytes: int) -> LinkShape:
        """The shape for this many ranks besides the driver, and commands with `nbytes` of data."""
        return cls(ranks, -(-nbytes // 8))

    @property
    def words(self) -> int:
        ring = self.commands * (self.header + self.data)
        of_rank = self.text + self.launches
        return (1 + self.ranks) * self.stages + self.ranks * of_rank + ring


def window_rings(model: ModelConfig, config: EngineConfig, drafts: int) -> tuple[WindowRing, ...]:
    """One ring per window, where it is shorter than the longest request; none with prefix caching,
    which needs the KV of whole prompts, and none in a pipeline, whose stages differ in windows.

    drafts  most drafts of a step
    """
    if config.prefix_caching or not config.window_rings or config.pipeline_parallel > 1:
        return ()
    layers: dict[int, list[int]] = {}
    for index, state in enumerate(paged_states(model.states)):
        if state.window:
            layers.setdefault(state.window, []).append(index)
    max_seq_len, size = config.sequence_limit(model.max_positions), config.block_size
    launch = max(1 + drafts, prefill_ladder(config, max_seq_len).sizes[-1])
    rings = (
        WindowRing(window, tuple(of_window), ring_blocks(window, launch, size))
        for window, of_window in layers.items()
    )
    return tuple(ring for ring in rings if ring.blocks < -(-max_seq_len // size))


def state_places(
    model: ModelConfig, config: EngineConfig, needs: DraftNeeds, rings: Sequence[WindowRing]
) -> int:
    """Number of places that keep states of recurrent layers, for sessions and prefixes."""
    # A draft model's recurrent states are not kept; with such a draft model no states are.
    if rings or recurrent_states(needs.states) or not recurrent_states(model.states):
        return 0
    return config.session_states


def prefill_ladder(config: EngineConfig, max_seq_len: int) -> BucketLadder:
    """Tokens of the prefill graphs, none larger than a chunk may be."""
    longest_chunk = min(max_seq_len, config.max_prefill_tokens_per_step or max_seq_len)
    sizes = {min(size, longest_chunk) for size in config.prefill_buckets}
    return BucketLadder(max(sizes), tuple(sorted(sizes)))
