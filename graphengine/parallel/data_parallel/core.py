"""The core of an engine whose ranks have requests of their own.

Each rank has a scheduler, like an engine of one rank. All ranks step together, as they exchange
expert inputs and outputs in each layer: every rank replays each graph that any rank needs, and a
rank without work for a graph replays it with every lane padded.

A prefill chunk always takes the graph of its own size and kind, as its bits may depend on the
graph. So a step has one prefill launch for each distinct graph of the ranks' chunks. A decode takes
the largest bucket that any rank needs, and the full sampler if one needs it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from graphengine.core.engine_core import Collected, EngineCore
from graphengine.core.waits import Waits
from graphengine.host.rank_schedulers import RankSchedulers
from graphengine.host.scheduler import Scheduler
from graphengine.host.step_plan import NOTHING, Plan, PrefillChunk, Replay
from graphengine.observe.tracing import ranged
from graphengine.opening.scheduling import new_scheduler
from graphengine.parallel.data_parallel.runtime import DataParallelRuntime, RemoteRank
from graphengine.program.fields import NO_CHUNK, chunk_adapters, chunk_updates
from graphengine.program.graph_key import GraphKey, chunk_key, decode_key
from graphengine.requests.request import Request

Plans = tuple[Plan | None, ...]
"""The plan of each rank; None for a rank that has nothing to launch."""


def _counts(core: DataParallelCore, plans: Plans) -> tuple[int, int]:
    """The largest bucket of any rank, and the rows of all ranks together."""
    live = _live(plans)
    return max(plan.bucket for plan in live), sum(len(plan.rows) for plan in live)


class RankState:
    """The core's record of a rank.

    rows  requests in the rows that the rank's decode graph was last loaded with
    fed   whether a chunk is loaded for the rank's prefill graphs
    """

    def __init__(self, scheduler: Scheduler, runtime: DataParallelRuntime | RemoteRank) -> None:
        self.scheduler, self.runtime = scheduler, runtime
        self.rows: tuple[Request, ...] = ()
        self.fed = False


class DataParallelCore(EngineCore):
    """`EngineCore` over the ranks that `runtime` leads."""

    runtime: DataParallelRuntime

    def _scheduling(self) -> RankSchedulers:
        runtime, counters = self.runtime, self.counters
        others = [
            new_scheduler(self.memory, self.config, self.needs, runtime.prefill_cut, counters)
            for _ in runtime.others
        ]
        self._rank_states = [RankState(self._own, runtime)]
        self._rank_states += [RankState(*pair) for pair in zip(others, runtime.others, strict=True)]
        self._ranks = RankSchedulers([self._own, *others], self.config.max_waiting)
        return self._ranks

    def advance(self) -> bool:
        """Plan, load and launch the next step of all ranks; False if nothing can be launched until
        a step in flight is collected.
        """
        plans = self.plan_all()
        if plans is None:
            return False
        self.launch_all(plans)
        return True

    def drop_cached_kv(self) -> None:
        """Drop the KV and states that sessions and prefixes keep on each rank."""
        for rank_state in self._rank_states:
            rank_state.runtime.copy_states(rank_state.scheduler.reuse.states.before)
            rank_state.scheduler.reuse.forget()

    @ranged("step/plan", lambda core: (0, len(core.scheduler.active)))
    def plan_all(self) -> Plans | None:
        """The next plan of each rank, all at the width that the fullest rank asks for."""
        if self.recorder.recording:
            self.recorder.planning()
        live_rows = self._ranks.fullest
        self._choose_width(live_rows)
        plans = self._ranks.plan()
        if self.gate is not None and plans is not None and _decodes(plans):
            self.gate.launched(live_rows)
        return plans

    @ranged("step/launch", _counts)
    def launch_all(self, plans: Plans) -> None:
        """Load each rank's changes, and queue the graphs of all plans on all ranks."""
        if self.recorder.recording:
            self.recorder.loading()
        keys = self._keys(plans)
        replays: list[Replay] = []
        for number, key in enumerate(keys):
            for rank_state, plan in zip(self._rank_states, plans, strict=True):
                self._load(rank_state, plan, key, first=number == 0, decodes=_decodes(plans))
            replays += self._launch_on_all(key, plans)
        self._fetch_drafts(plans)
        self.in_flight.append(tuple(replays))
        self.launches += 1

    def _keys(self, plans: Plans) -> list[GraphKey]:
        """The graphs of a step: one per kind and size of chunk, then decode."""
        live = _live(plans)
        chunks = [plan.prefill for plan in live if plan.prefill is not None]
        keys = [*dict.fromkeys(chunk_key(chunk, self.memory.prefill_ladder) for chunk in chunks)]
        if _decodes(plans):
            full, drafts = any(plan.full for plan in live), live[0].width - 1
            sampler = self.runtime.program.samplers[-1 if full else 0]
            rows = max(plan.bucket for plan in live)
            keys.append(decode_key(rows, drafts, sampler))
        return keys

    def _load(
        self, rank_state: RankState, plan: Plan | None, key: GraphKey, *, first: bool, decodes: bool
    ) -> None:
        """Load a rank's changes before a graph is replayed.

        first    whether the graph is the step's first
        decodes  whether the step has a decode
        """
        updates: dict[str, Any] = {}
        if first:
            changes = _rank_plan(rank_state, plan, decodes=decodes)
            updates = self._updates(changes, rank_state.scheduler.slots, rank_state.runtime)
        if key.kind == "prefill":
            updates |= self._chunk_updates(rank_state, plan, key)
        if updates:
            rank_state.runtime.load(updates)
            self.counters["loads"] += 1
        if first and plan is not None:
            if plan.swap_out or plan.swap_in:
                rank_state.runtime.swap(len(plan.swap_out), len(plan.swap_in))
            rank_state.runtime.copy_states(rank_state.scheduler.reuse.states.before)

    def _chunk_updates(
        self, rank_state: RankState, plan: Plan | None, key: GraphKey
    ) -> dict[str, Any]:
        """Fields that feed the rank's chunk to this graph, or clear the chunk fed before."""
        chunk = self._chunk(plan, key)
        if chunk is not None:
            rank_state.fed = True
            updates = chunk_updates(chunk, speculative=self.memory.tokens_per_step > 1)
            return updates | (chunk_adapters((chunk,)) if self.intake.adapters.slots else {})
        fed, rank_state.fed = rank_state.fed, False
        return NO_CHUNK if fed else {}

    def _chunk(self, plan: Plan | None, key: GraphKey) -> PrefillChunk | None:
        """The chunk that the plan feeds with this graph; None if there is none."""
        chunk = None if plan is None else plan.prefill
        if chunk is None or chunk_key(chunk, self.memory.prefill_ladder) != key:
            return None
        return chunk

    def _launch_on_all(self, key: GraphKey, plans: Plans) -> list[Replay]:
        """Replay a graph on all ranks; returns the replays of ranks that have requests in it."""
        of_ranks = [self._replay_of(rank, plan, key) for rank, plan in enumerate(plans)]
        replays = [replay for replay in of_ranks if replay is not None]
        self._run(key, replays)
        if key.kind == "prefill":
            for replay in replays:
                rank_state = self._rank_states[replay.rank]
                rank_state.runtime.copy_states(rank_state.scheduler.reuse.states.after)
        return replays

    def _replay_of(self, rank: int, plan: Plan | None, key: GraphKey) -> Replay | None:
        """A rank's next replay, of this graph; None where the rank has no request in it."""
        sequence = self.runtime.launched + 1
        if plan is not None and key.kind == "decode" and plan.rows:
            full = key.variant == "full"
            return Replay(
                sequence, plan.rows, plan.epochs, plan.width, key.size, full=full, rank=rank
            )
        chunk = self._chunk(plan, key) if key.kind == "prefill" else None
        if chunk is None:
            return None
        job = chunk.request.job
        full = job.processing is not None and not chunk.noted
        requests, epochs = (chunk.request,), (job.placed.epoch,)
        return Replay(sequence, requests, epochs, 1, chunk=chunk, full=full, rank=rank)

    def _fetch_drafts(self, plans: Plans) -> None:
        """Fetch the drafts of each rank whose grammar masks depend on them."""
        for rank_state, plan in zip(self._rank_states, plans, strict=True):
            if plan is not None and plan.guided:
                self.counters["guided/steps"] += 1
                rank_state.runtime.fetch_drafts()

    def _waits_of(self, replay: Replay) -> Waits:
        return self._rank_states[replay.rank].runtime

    def _together(self, records: list[Collected]) -> list[Collected]:
        return [
            _joined([*of_launch])
            for _, of_launch in groupby(records, key=lambda collected: collected[0].sequence)
        ]


def _live(plans: Plans) -> list[Plan]:
    return [plan for plan in plans if plan is not None]


def _decodes(plans: Plans) -> bool:
    return any(plan.rows for plan in _live(plans))


def _rank_plan(rank_state: RankState, plan: Plan | None, *, decodes: bool) -> Plan:
    """The changes of a step on a rank, without its chunk; rows are compared with those of the
    rank's last decode, `rank_state.rows`.
    """
    changes = NOTHING if plan is None else plan
    changed = decodes and changes.rows != rank_state.rows
    if changed:
        rank_state.rows = changes.rows
    if changes.prefill is None and changes.rows_changed == changed:
        return changes
    return replace(changes, prefill=None, rows_changed=changed)


def _joined(records: list[Collected]) -> Collected:
    """The records that all ranks published in one launch, joined rank by rank."""
    if len(records) == 1:
        return records[0]
    replays = [replay for replay, _, _ in records]
    joined = replays[0]._replace(
        requests=tuple(request for replay in replays for request in replay.requests),
        epochs=tuple(epoch for replay in replays for epoch in replay.epochs),
    )
    record = [lane for _, lanes, _ in records for lane in lanes]
    if all(logprobs is None for _, _, logprobs in records):
        return joined, record, None
    found = [each for _, lanes, logprobs in records for each in (logprobs or [None] * len(lanes))]
    return joined, record, found
