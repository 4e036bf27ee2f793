"""The captured programs: the stages of one replay, in order.

    decode    command, gather, embed -> layers -> lm_head, sample -> verify, commit, publish, draft
    prefill   command -> gather -> embed, layers, lm_head -> sample -> commit -> publish, draft
    note      command -> gather -> note -> publish: for tokens whose KV already exists

They end with the next replay's inputs in the buffers. Host-owned fields are only read, and
device-owned ones only written here, so that a replay may be launched before the last one was read.
An engine that speculates also verifies and drafts: a row then feeds its K drafts after its last
token, W = K + 1 lanes in all, and emits 1 to W tokens. Where drafts are trees, the accepted path's
KV is moved together after verification, and later kernels see that path as a chain. Work on logits
other than sampling is done only in the graphs of the full sampler (`logits_step.py`).

Letters: R rows of the bucket, W lanes of a row, N = R * W lanes, T tokens of the prefill bucket,
S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Mailbox, StaticBuffers
from graphengine.drafters import Drafter, PathLanes, Prefilled, Verified
from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.linear.epilogues import SampleTiles, StoreLogits
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.norm_rope.embedding import GivenRows
from graphengine.kernels.norm_rope.rope import RopeRows
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample, sample_tiles
from graphengine.kernels.step.begin import RowTrees, gather_and_embed
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.finish_reference import FinishedStep
from graphengine.kernels.step.move import move_path
from graphengine.kernels.step.publish import publish
from graphengine.kernels.step.state import (
    EMITTED,
    DecodeLanes,
    PrefillLanes,
    SlotState,
    StopTensors,
    apply_commands,
    commit_prefill,
    gather_prefill,
)
from graphengine.models.adapters.table import LaneAdapters
from graphengine.models.contract import Model
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import stream_groups
from graphengine.models.repeats import model_runner
from graphengine.models.routing import StepRoutes
from graphengine.models.states import StateTensors
from graphengine.models.vocabulary import Vocabulary
from graphengine.program.frame_step import FrameStep
from graphengine.program.graph_key import PrefillKind, Sampler, samplers
from graphengine.program.logits_step import LogitsStep, Processed
from graphengine.program.relaxed import Relaxation
from graphengine.program.routing_step import RoutingStep
from graphengine.program.stages import StepFlow

CHUNK_FIELDS = ("prefill_slot", "prefill_start", "prefill_count", "prefill_final")


class FedChunks(NamedTuple):
    """The host's fields of the chunks of P prompts, int32 [P] each; slot -1 for none."""

    slot: Tensor
    start: Tensor
    counts: Tensor
    final: Tensor


class StepOutputs(NamedTuple):
    """A step's results before it published; valid until the next step of the same pool.

    `logits` is None where the fast sampler keeps them out of memory.
    """

    logits: Tensor | None
    token: Tensor
    flags: Tensor


class StepProgram:
    """The decode and prefill steps over one set of static tensors; allocates only intermediates."""

    def __init__(
        self,
        model: Model,
        buffers: StaticBuffers,
        states: StateTensors,
        mailbox: Mailbox,
        launch: DecodeLaunch,
        logits_step: LogitsStep,
        *,
        vocabulary: Vocabulary,
        drafter: Drafter,
        relaxation: Relaxation | None = None,
        routing: RoutingStep | None = None,
        given: GivenRows | None = None,
        deepstack: Sequence[GivenRows] = (),
        rope_rows: RopeRows | None = None,
        seen: Tensor | None = None,
        forced_acceptance: int | None = None,
        flow: StepFlow | None = None,
        frames: FrameStep | None = None,
    ) -> None:
        # The source of the stream.
        self.flow = flow or StepFlow()
        self.drafter = drafter
        self.relaxation = relaxation
        self.routing = routing
        # The inner decoder; None: a step emits tokens.
        self.frames = frames
        # Embeddings for a chunk's positions that have no token; None where each has one.
        self.given = given
        # Features of each level, which are added to the stream of these positions.
        self.deepstack = tuple(deepstack)
        # Rows of RoPE's tables for the lanes of the largest chunk; None where rows are positions.
        self.rope_rows = rope_rows
        # Number of keys that each lane of the largest chunk sees; None where each sees those up to
        # its own.
        self.seen = seen
        self.samplers = samplers(relaxed=relaxation is not None)
        self.forced_acceptance = forced_acceptance
        self.model = model
        self.buffers = buffers
        self.states = states
        self.mailbox = mailbox
        self.launch = launch
        # Counted once: the lists of linears are made anew whenever they are asked for.
        self._stream_groups = stream_groups(model.config.linears, launch.plans)
        self.logits_step = logits_step
        self.vocabulary = vocabulary
        self.state = SlotState(*(buffers[name] for name in SlotState._fields))
        self.sampling = SamplingTensors(*(buffers[name] for name in SamplingTensors._fields))
        self.stopping = StopTensors(buffers["stop_ids"], buffers["max_len"])
        # A drafter of length 0 only observes.
        self._drafts = drafter.needs.length > 0

    def decode(self, rows: int, sampler: Sampler, drafts: int = 0) -> StepOutputs:
        """Advance the requests of rows `0 .. rows - 1` by one token each, or by 1 + `drafts`."""
        model, pdl = self.model, self.launch.pdl
        trees = self._trees(rows, drafts)
        lanes, residual = self._enter(rows, drafts, trees)
        routes = None
        if self.routing is not None:
            routes = self.routing.begin(lanes.slot, lanes.position, pdl=pdl)
        tree = None if trees is None else trees.lanes
        launch = replace(self.launch, tokens_per_row=1 + drafts, tree=tree, routes=routes)
        streams = self.drafter.step_streams
        run = model_runner(alike=routes is None)
        layers = partial(model.decode, streams=streams)
        residual = run(layers, (lanes, residual, self.states, launch))
        processed, best, health = self._sample(lanes, residual, sampler, drafts, tree)
        frame = relaxed = None
        if self.frames is not None:
            first = None if processed is None else processed.logits
            frame = self.frames.draw(
                best, health, lanes, residual, sampler=sampler, logits=first, pdl=pdl
            )
            best, health, _ = frame.token
        if self.relaxation is not None and drafts:
            assert processed is not None, "relaxed acceptance reads logits: those of `full`"
            relaxed = self.relaxation.judge(processed.logits, lanes, self.sampling, drafts, pdl)
        options = self.logits_step
        step = verify_commit_publish(
            best,
            health,
            lanes,
            self.state,
            self.stopping,
            self.mailbox.tensor,
            self.launch,
            num_speculative_tokens=drafts,
            relaxed_N=relaxed,
            forced=self.forced_acceptance if drafts else None,
            # The owner of the draft table clears the drafts that were used.
            draft_SK=None if self.drafter.needs.host_drafts else self._draft_table,
            sequences=None if processed is None else options.stops,
            history_SP=None if processed is None else options.history,
            tree=tree,
        )
        if step.path is not None:
            shape = {"rows": rows, "width": 1 + drafts}
            for cache in self.states.dense():
                move_path(cache, self.states.block_table, step.path, **shape, pdl=pdl)
        if processed is not None and frame is None:
            options.report(processed, step.token_N, step.count_R, path=step.path, pdl=pdl)
        if processed is not None and self._notes_first_codes:
            options.note(lanes, step.token_N, step.count_R, pdl=pdl)
        if self.routing is not None and routes is not None:
            self.routing.publish(routes, step.count_R, lanes.slot, pdl=pdl)
        if self.frames is not None and frame is not None:
            self.frames.publish(frame, step.count_R, lanes.slot, pdl=pdl)
        if self.relaxation is not None:
            self.relaxation.follow(step, lanes, pdl)
        verified = _verified(lanes, residual, step, drafts)
        self.drafter.propose(verified._replace(filtered=sampler == "full"))
        if processed is not None:
            options.draft_forced(lanes.slot, width=1 + drafts, pdl=pdl)
        logits = None if processed is None else processed.logits
        return StepOutputs(logits, step.token_N, step.flags_R)

    @property
    def _notes_first_codes(self) -> bool:
        """Whether requests have options of tokens for the first codes of frames."""
        return self.frames is not None and self.frames.first_codes > 0

    @property
    def _draft_table(self) -> Tensor | None:
        return self.buffers["draft_tokens"] if self._drafts else None

    def _enter(
        self, rows: int, drafts: int, trees: RowTrees | None = None
    ) -> tuple[DecodeLanes, Residual]:
        """The lanes that a decode step feeds, and their stream before the first layer."""
        buffers, model = self.buffers, self.model
        config = model.config
        self.flow.begin()
        residual = new_residual(
            rows * (1 + drafts),
            config.hidden_size,
            self._stream_groups,
            dtype=model.dtype,
            device=buffers.device,
        )
        embedding, norm, stream = model.weights.embedding, model.first_norm, residual
        if self.frames is not None:
            # The frame's embedding is written next; its token's embedding is not read.
            embedding, norm = embedding[:, :1], norm[:1]
            stream = new_residual(rows, 1, 1, dtype=model.dtype, device=buffers.device)
        lanes = gather_and_embed(
            self.state,
            buffers["command_epoch"],
            buffers["slot_of_row"][:rows],
            embedding,
            norm,
            stream,
            draft_SK=self._draft_table,
            max_len_S=self.stopping.max_len,
            num_speculative_tokens=drafts,
            trees=trees,
            embedding_scale=model.weights.embedding_scale,
            pdl=self.launch.pdl,
        )
        if self.frames is not None:
            self.frames.begin(lanes, model.first_norm, residual)
        return lanes, self.flow.arrive(residual, model.first_norm)

    def _trees(self, rows: int, drafts: int) -> RowTrees | None:
        """The trees whose nodes a step's lanes are; None where rows are chains."""
        tables = self.drafter.trees
        if tables is None or not drafts:
            return None
        lanes = TreeLanes.new(rows * (1 + drafts), self.drafter.needs.depth, self.buffers.device)
        return RowTrees(tables, lanes, self.model.max_seq_len)

    def _sample(
        self,
        lanes: DecodeLanes,
        residual: Residual,
        sampler: Sampler,
        drafts: int,
        tree: TreeLanes | None,
    ) -> tuple[Processed | None, Tensor, Tensor]:
        """Processed logits, then each tile's best token and health. The fast sampler keeps logits
        out of memory: None.
        """
        launch, model, vocabulary = self.launch, self.model, self.vocabulary
        eps, cap = model.config.norm_eps, model.config.logits_cap
        head, bias = vocabulary.head, vocabulary.bias
        call = launch.call("lm_head", residual, head, lanes.slot, eps=eps, bias=bias)
        if sampler == "fast":
            ids = vocabulary.token_ids
            sampling = SampleTiles(lanes.position, self.sampling, token_ids=ids, cap=cap)
            return None, *vocabulary.candidates(*linear(call, sampling))
        logits = vocabulary.logits(linear(call, StoreLogits(cap=cap)))
        processed = self.logits_step.process(logits, lanes, drafts, tree=tree, pdl=launch.pdl)
        best, health = sample_tiles(
            logits, lanes.slot, lanes.position, self.sampling, pdl=launch.pdl
        )
        return processed, best, health

    def prefill(self, tokens: int, kind: PrefillKind = "fast") -> StepOutputs:
        """Feed prompt chunks of at most `tokens` in all; each final one samples its token.

        The fast kind feeds chunks of `prompts` requests, the others one.
        """
        buffers = self.buffers
        slot, start, count, final = fed = self._chunks_of(kind)
        chunk = self._enter_chunk(tokens, fed)
        attention = self._prefill_attention(chunk, fed)
        drafter = self.drafter
        last = self._last_hidden()
        seen = self._images(attention, chunk)
        given = self._given_of(chunk)
        logits, hidden, routes = self._prefill_model(chunk, slot, seen, kind, given, last)
        position = chunk.position.index_select(0, chunk.last)
        processed = None
        if kind != "fast":
            lane = DecodeLanes(chunk.token.index_select(0, chunk.last), slot, position)
            self.logits_step.note_prompt(chunk)
            processed = self.logits_step.process(logits, lane)
        frame = None
        if self.frames is not None and last is not None:
            # Chunks before the last one have no frame: their lane is padded.
            lane = DecodeLanes(position, torch.where(final != 0, slot, -1), position)
            tiles = sample_tiles(logits, lane.slot, position, self.sampling)
            first = None if processed is None else logits
            frame = self.frames.draw(*tiles, lane, last, sampler="full", logits=first, pdl=False)
            sampled = frame.token.token
        else:
            sampled = sample(logits, slot, position, self.sampling)
        sequences = None if processed is None else self.logits_step.stops
        flags = commit_prefill(
            self.state, sampled, slot, start, count, final, self.stopping, sequences
        )
        publish(self.mailbox.tensor, self.state, sampled, flags, slot)
        if processed is not None and frame is None:
            self.logits_step.report(processed, sampled, flags & EMITTED)
        if processed is not None and self._notes_first_codes:
            self.logits_step.note(processed.lanes, sampled, flags & EMITTED)
        if kind == "prompt":
            assert hidden is not None, f"{kind=}"
            next_tokens = chunk.followed_by(buffers["prefill_next"][:1])
            reported = chunk
            if self.given is not None and not self.logits_step.writes_rows:
                # Where no token follows there is nothing to report.
                followed = torch.where(next_tokens >= 0, chunk.slot, -1)
                reported = chunk._replace(slot=followed)
            self.logits_step.report_prompt(reported, hidden, self.model, next_tokens, final)
        if self.routing is not None and routes is not None:
            self.routing.publish_prompt(routes, chunk)
        if self.frames is not None and frame is not None:
            self.frames.publish(frame, flags & EMITTED, slot, pdl=False)
        following = buffers["prefill_next"][: len(slot)] if self._drafts else None
        rows = given[0] if given else None
        prefilled = Prefilled(chunk, following, hidden, sampled, final, attention, rows)
        if self.relaxation is not None:
            self.relaxation.follow_prompt(prefilled)
        drafter.prepare(prefilled)
        if processed is not None:
            self.logits_step.draft_forced(slot, final=final)
        return StepOutputs(logits, sampled, flags)

    def _last_hidden(self) -> Tensor | None:
        """Memory for the hidden state of a chunk's last lane, for an inner decoder; None without
        one.
        """
        if self.frames is None:
            return None
        hidden = self.model.config.hidden_size
        return torch.empty((1, hidden), dtype=self.model.dtype, device=self.buffers.device)

    def _prefill_model(
        self,
        chunk: PrefillLanes,
        slot: Tensor,
        attention: Callable[..., Tensor],
        kind: PrefillKind,
        given: Sequence[GivenRows] = (),
        output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, StepRoutes | None]:
        """Logits of each chunk's last lane; hidden states and experts of all lanes, if asked for.
        `output` receives the last lane after the final norm. `slot` has the chunks' slots, and
        `given` what `_given_of` returns.

        The last layer's experts come from the pass over all lanes. Only the last lanes' come from
        the pass that computes their logits.
        """
        routes = last = None
        if self.routing is not None:
            routes = self.routing.begin(chunk.slot, chunk.position)
            last = routes.of_last_layer(chunk.last)
        launch = replace(
            self.launch.prefill,
            given=given[0] if given else None,
            deepstack=tuple(given[1:]),
            rope_rows=self._rows_of(chunk),
            adapters=self._adapters_of(chunk),
        )
        layers = partial(
            self.model.prefill,
            all_lanes=self.drafter.needs.wants_hidden or kind == "prompt" or routes is not None,
            streams=self.drafter.streams,
            stream=self.flow.arrive_chunk(chunk),
            launch=replace(launch, routes=routes),
        )
        end = model_runner(alike=routes is None)(layers, (chunk, self.states, attention))
        launch = replace(launch, routes=last, adapters=self._adapters_of(chunk, alone=True))
        vocabulary = self.vocabulary
        head, bias = vocabulary.head, vocabulary.bias
        logits = self.model.prefill_logits(
            end, slot, head=head, bias=bias, hidden=output, launch=launch
        )
        if routes is not None and last is not None:
            routes.replace_last_layer(last, chunk.last, slot)
        return vocabulary.logits(logits), end.hidden, routes

    def _given_of(self, chunk: PrefillLanes) -> tuple[GivenRows, ...]:
        """Embeddings of the chunks' positions that have no token, then each level of features; ()
        where each position has a token.
        """
        if self.given is None:
            return ()
        given = (self.given, *self.deepstack)
        if len(chunk.last) == 1:
            return given
        lane = torch.arange(len(chunk.slot), dtype=torch.int32, device=chunk.slot.device)
        # Each chunk before has a row more than it has lanes.
        first = chunk.position - lane - chunk.chunk_of_lane.to(torch.int32)
        return tuple(rows._replace(first=first) for rows in given)

    def _adapters_of(self, chunk: PrefillLanes, *, alone: bool = False) -> LaneAdapters | None:
        """The adapters of the chunks' lanes; `alone`: of the last lane of each chunk alone."""
        adapters, starts = self.launch.adapters, self.launch.prefill.chunk_starts(chunk)
        if adapters is None or starts is None:
            return adapters
        if alone:
            starts = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
        return adapters.of_chunks(starts)

    def _rows_of(self, chunk: PrefillLanes) -> RopeRows | None:
        """The rows of RoPE's tables that rotate a chunk's lanes; None: their positions."""
        rows = self.rope_rows
        return rows and rows._replace(of_axis=rows.of_axis[: len(chunk.slot)])

    def note(self, tokens: int) -> None:
        """Take in a part of a prompt, of at most `tokens`, whose KV already exists.

        The tokens go to everything that reads a prompt's tokens rather than their KV: the counts
        for penalties, the drafter, relaxed acceptance. Nothing is sampled, and the prefill that
        follows sets `kv_len`.
        """
        fed = self._chunks_of("full")
        chunk = self._enter_chunk(tokens, fed)
        self.logits_step.note_prompt(chunk)
        nothing = self._publish_nothing(fed.slot)
        attention = self._prefill_attention(chunk, fed)
        noted = Prefilled(chunk, None, None, nothing, nothing, attention)
        if self.relaxation is not None:
            self.relaxation.follow_prompt(noted)
        self.drafter.note(noted)

    def _chunks_of(self, kind: PrefillKind) -> FedChunks:
        """The fields of the chunks that a prefill of this kind feeds."""
        fields = FedChunks(*(self.buffers[name] for name in CHUNK_FIELDS))
        return fields if kind == "fast" else FedChunks(*(field[:1] for field in fields))

    def _enter_chunk(self, tokens: int, fed: FedChunks) -> PrefillLanes:
        """The lanes that a prefill feeds, once commands are applied."""
        buffers = self.buffers
        apply_commands(self.state, buffers["command_epoch"])
        return gather_prefill(buffers["prefill_tokens"][:tokens], fed.slot, fed.start, fed.counts)

    def _publish_nothing(self, slot: Tensor) -> Tensor:
        """Publish a replay that emits no token; returns the zero that counts its tokens."""
        nothing = torch.zeros_like(slot)
        publish(self.mailbox.tensor, self.state, nothing, nothing, slot)
        return nothing

    def _images(
        self, attention: Callable[..., Tensor], chunk: PrefillLanes
    ) -> Callable[..., Tensor]:
        """A chunk's attention in which embeddings of an image see each other."""
        if self.seen is None:
            return attention
        seen = partial(attention, seen_N=self.seen[: len(chunk.slot)])
        if not self.model.config.causal_without_window:
            return seen
        return partial(_attend_by_window, attention, seen)

    def _prefill_attention(self, chunk: PrefillLanes, fed: FedChunks) -> Callable[..., Tensor]:
        """The causal attention of chunks."""
        launch = self.launch
        if launch.any_lanes:
            # Split keys would make a token's bits depend on the number of lanes.
            launch = replace(launch, arrivals=None)
        return partial(
            paged_prefill_attention,
            block_table_SB=self.buffers["block_table"],
            query_start_P1=chunk.query_start,
            slot_P=fed.slot,
            position_P=fed.start,
            launch=launch,
        )


def _attend_by_window(
    without: Callable[..., Tensor],
    within: Callable[..., Tensor],
    *args: Tensor,
    window: int = 0,
    **options: Any,
) -> Tensor:
    """Attention of a layer with a window by `within`, of others by `without`."""
    return (within if window else without)(*args, window=window, **options)


def _verified(lanes: DecodeLanes, hidden: Residual, step: FinishedStep, drafts: int) -> Verified:
    """A drafter's inputs from a step of these lanes; for trees, the lanes of the accepted paths."""
    if step.path is None:
        return Verified(lanes, hidden, step, drafts)
    path = step.path
    along = path.source.numel() // step.count_R.numel() - 1
    return Verified(path.lanes, hidden, step, along, PathLanes(lanes, path.source))
