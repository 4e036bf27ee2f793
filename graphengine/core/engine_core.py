"""The core of an engine: it makes the decisions, and runs the loop of a step over one runtime.

    plan -> load -> replay -> collect

`Engine` is its public interface. Ways to run requests (`runs`), sessions and snapshots use the
core, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Unpack

from graphengine.buckets.mailbox import Payloads
from graphengine.buckets.threads import OwnThread
from graphengine.config import EngineConfig
from graphengine.core.commands import SlotOperations
from graphengine.core.delivery import Delivery
from graphengine.core.intake import Intake, QueueOptions, check_samples, embeds_spec
from graphengine.core.interrupts import HeldInterrupts
from graphengine.core.report import describe_engine
from graphengine.core.runtime import Runtime
from graphengine.core.waits import Waits, deadline_after, seconds_to
from graphengine.core.weight_state import WeightState
from graphengine.drafters import Drafter, NoDrafter
from graphengine.host.garbage import collect_due
from graphengine.host.gate import Gate
from graphengine.host.scheduling import Scheduling
from graphengine.host.step_plan import Plan, Replay, prefill_replay
from graphengine.observe.recorder import Recorder
from graphengine.observe.tracing import ranged, span
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.scheduling import new_scheduler
from graphengine.program.feeds import new_feeds
from graphengine.program.fields import (
    adapter_updates,
    draft_updates,
    host_updates,
    prompt_rows_updates,
    ring_updates,
    rope_updates,
    seen_updates,
)
from graphengine.program.frame_step import GIVEN_FIELD
from graphengine.program.frames import frame_updates
from graphengine.program.graph_key import GraphKey, chunk_key, decode_key
from graphengine.prompts import Prompt
from graphengine.requests.request import Event, Request
from graphengine.requests.result import TokenLogprobs
from graphengine.sampling_params import SamplingParams
from graphengine.text.tokenizer import Tokenizer

Collected = tuple[Replay, Payloads, Sequence[tuple[TokenLogprobs, ...] | None] | None]
"""A replay, its record, and the log-probabilities of its lanes."""


def _counts(core: EngineCore, plan: Plan) -> tuple[int, int]:
    return plan.bucket, len(plan.rows)


def _counts_of_oldest(core: EngineCore, timeout: float | None) -> tuple[int, int]:
    oldest = core.in_flight[0][-1]
    return oldest.rows, len(oldest.requests)


class EngineCore:
    """Scheduler, intake, delivery, gate and recorder around one `runtime`, which it closes.

    needs        the drafter's needs
    weights      the version of the weights
    in_flight    replays of each step that was launched and not yet collected, oldest first; a
                 launch may have run several steps
    launches     launches that these steps belong to
    description  what latency and numerics depend on, for reports
    interrupts   holds Ctrl-C back during a step, except in waits
    closed       whether `close()` was called
    broken       why only `close()` may still be called; None while all is well
    """

    def __init__(
        self,
        runtime: Runtime,
        memory: MemoryPlan,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        drafter: Drafter,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.runtime = runtime
        self.drafter, self.needs = drafter, drafter.needs
        self.weights = WeightState()
        # This rank's scheduler, which has all requests unless other ranks have their own.
        self._own = new_scheduler(memory, config, drafter.needs, runtime.prefill_cut)
        self.counters = self._own.counters
        self.scheduler = self._scheduling()
        self._schedule = config.schedule
        self.gate: Gate | None = None
        if config.gate_options is not None:
            self.gate = Gate(
                lengths=memory.draft_lengths,
                schedule=None if self._schedule is None else self._schedule.drafts,
                counters=self.counters,
                **asdict(config.gate_options),
            )
        self.description = describe_engine(config, memory, runtime)
        self.recorder = Recorder(
            description=self.description,
            graphs=tuple(runtime.graphs),
            captures=runtime.captures,
            lanes=config.data_parallel * config.max_batch,
            in_flight=config.mailbox_entries,
            stream=runtime.stream,
            ranks=runtime.rank_times,
        )
        forced = config.forced_acceptance is not None
        self.delivery = Delivery(
            self.scheduler,
            self.gate,
            self.recorder,
            forced=forced,
            withholds=drafter.needs.withholds,
        )
        self.intake = Intake(
            config,
            memory,
            tokenizer=tokenizer,
            vocab_size=runtime.model.config.vocab_size,
            max_prompt=runtime.model.config.max_prompt,
            vocabulary=runtime.model.lm_head.shape[0],
            eos_ids=eos_ids,
            prompts_only=drafter.needs.prompts_only,
            routed=runtime.model.weights.routed,
            inner=runtime.model.config.inner,
            embeds=embeds_spec(config, memory, runtime.model.config, runtime.prefill_cut),
            device=runtime.caches[0][0].device,
            cancelled=self.delivery.cancelled,
            defaults=defaults,
            grammar_pool=runtime.grammar_pool,
        )
        self._feeds = new_feeds(runtime.buffers.fields, config.max_batch, self.counters)
        self.in_flight: deque[tuple[Replay, ...]] = deque()
        self.launches = 0
        # The replays that the last step launched last.
        self.newest: tuple[Replay, ...] = ()
        self.closed = False
        self.broken: str | None = None
        self.interrupts = HeldInterrupts()
        self.check_thread = OwnThread("engine").check
        self._busy_in: str | None = None
        self._counter_of = {key: key.counter for key in runtime.graphs}

    def _scheduling(self) -> Scheduling:
        """The scheduler that queues and retires requests."""
        return self._own

    # Entry.

    def check_open(self) -> None:
        """Like `check_usable`; ValueError also while weights or KV cache are released."""
        # Every step asks: the checks are called only if one of them will raise.
        if self.closed or self.broken is not None or self.weights.released or self.weights.missing:
            self.check_usable()
            self.weights.check_there()
        self.check_thread()

    def check_usable(self) -> None:
        """ValueError once closed; RuntimeError once broken, or if another thread owns it."""
        if self.closed:
            raise ValueError("the engine is closed")
        if self.broken is not None:
            raise RuntimeError(f"the engine is broken, close it: {self.broken}")
        self.check_thread()

    def _break(self, error: BaseException) -> None:
        """Mark the engine as broken: after this exception host and device may disagree.

        An interrupt in a wait does not break it, as the wait can be repeated. Elsewhere in a step
        an interrupt is put off, so only a second one breaks the engine.
        """
        self.broken = f"{type(error).__name__}: {error}"

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        on_event: Callable[[Event], None] | None,
        **options: Unpack[QueueOptions],
    ) -> Request:
        """Implements `Engine.submit`."""
        return self.submit_many(prompt, params, 1, on_event, **options)[0]

    def submit_many(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        n: int,
        on_event: Callable[[Event], None] | None,
        **options: Unpack[QueueOptions],
    ) -> list[Request]:
        """Implements `Engine.submit_many`."""
        self.check_open()
        submitted = time.perf_counter()
        check_samples(n)
        self.scheduler.check_queue(n)
        params = self.intake.usual_params if params is None else params
        read = self.intake.prompt(prompt, params)
        requests = self.intake.samples(read, params, on_event, n, submitted=submitted, **options)
        for request in requests:
            self.queue(request)
        return requests

    def queue(self, request: Request) -> None:
        """Queue a request that the intake made; if anything is raised, it is not queued."""
        self.scheduler.check_fits(request)
        self.intake.place_grammar(request, self.counters)
        if request.job.prompt_rows is not None:
            self.runtime.wait_for_caller()
        self.scheduler.submit(request)
        if request.job.deadline is not None:
            self.delivery.deadlines.watch(request)

    def draft(self, request: Request, token_ids: Sequence[int]) -> None:
        """Implements `Engine.draft`."""
        self.check_open()
        self.intake.draft(request, token_ids, self.needs, unfinished=self._has(request))

    def force(self, request: Request, token_id: int) -> None:
        """Implements `Engine.force`."""
        self.check_open()
        ahead = any(
            request in replay.requests
            and all(chunk.final for chunk in replay.chunks if chunk.request is request)
            for step in self.in_flight
            for replay in step
        )
        self.intake.force(request, token_id, unfinished=self._has(request), ahead=ahead)

    def _has(self, request: Request) -> bool:
        return any(request is each for each in (*self.scheduler.active, *self.scheduler.waiting))

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished, a replay in flight, or an event not returned yet."""
        return self.scheduler.busy or bool(self.in_flight) or self.delivery.pending

    # One step, then its stages. Each stage is a range for profilers.

    def step(self, timeout: float | None) -> list[Event]:
        """Implements `Engine.step`."""
        self.check_open()
        if self._busy_in is not None:
            raise ValueError(f"step() called from inside {self._busy_in}, by an event callback")
        with self.interrupts:
            self._busy_in = "step()"
            try:
                self.scheduler.moves.clear()
                self.newest = ()
                self.delivery.end_due()
                self._launch_all(timeout)
                if self.config.steps_per_launch > 1:
                    self._collect_done(timeout)
                elif self.launches > self.scheduler.lookahead + 1:
                    self._collect_several(timeout)
                elif self.in_flight:
                    self.collect(timeout)
                self.delivery.run_callbacks()
            finally:
                self._busy_in = None
                if self.recorder.recording:
                    self.recorder.delivered()
        # An interrupt that was put off is raised above: the next step then returns the events.
        return self.delivery.take()

    def _launch_all(self, timeout: float | None) -> None:
        """Launch until as many launches are in flight as the lookahead allows."""
        scheduler = self.scheduler
        ready = not scheduler.guided or self._drafts_are_there(timeout)
        try:
            while ready and self.launches <= scheduler.lookahead:
                if not self.advance():
                    break
                self.newest = self.in_flight[-1]
        except BaseException as error:
            self._break(error)
            raise

    def end_interrupted(self, requests: Sequence[Request]) -> None:
        """Finish these cancelled requests of an interrupted call now rather than in the next step,
        and drop their events. Where no others are left, collect what is in flight.

        Does nothing inside a step.
        """
        if self.closed or self.broken or self._busy_in:
            return
        with self.interrupts:
            self.delivery.end_due()
            self.delivery.drop(requests)
            while self.in_flight and not self.scheduler.busy:
                self.collect(None)

    def settle(self, call: str) -> None:
        """Collect what is still in flight when no request is left: nothing then runs until the next
        request. Memory may be released.

        ValueError, with their number, while there are unfinished requests, and inside a step.
        """
        self.check_usable()
        if self._busy_in is not None:
            raise ValueError(f"{call}() called from inside {self._busy_in}, by an event callback")
        if self.scheduler.busy:
            requests = len(self.scheduler.active) + len(self.scheduler.waiting)
            raise ValueError(
                f"{call}() with unfinished requests ({requests}): drain() the engine first, or "
                f"cancel them and step"
            )
        with self.interrupts:
            while self.in_flight:
                self.collect(None)

    def drop_cached_kv(self) -> None:
        """Drop all KV that sessions and prefixes keep, as it was computed with older weights."""
        # Copies still pending belong to the old weights, too.
        self.runtime.copy_states(self._own.reuse.states.before)
        self._own.reuse.forget()

    def advance(self) -> bool:
        """Plan, load and launch what comes next; False if nothing can be launched until a step in
        flight is collected.
        """
        plan = self.plan()
        if plan is None:
            return False
        self.load(plan)
        self.replay(plan)
        return True

    @ranged("step/plan", lambda core: (0, len(core.scheduler.active)))
    def plan(self) -> Plan | None:
        """The scheduler's next plan, at the width that the gate and the schedule choose."""
        if self.recorder.recording:
            self.recorder.planning()
        live_rows = len(self._own.active)
        idle = self.needs.guided and not self._own.followed
        self._choose_width(live_rows, idle=idle)
        plan = self._own.plan()
        if self.gate is not None and not idle and plan is not None and plan.rows:
            self.gate.launched(live_rows, plan.steps)
        return plan

    def _choose_width(self, live_rows: int, *, idle: bool = False) -> None:
        """Set the tokens of a row to what the gate or the schedule chooses for this many requests.

        idle  whether no request has drafts

        Where the drafter's weights are stale, as few as there are graphs for.
        """
        if idle or self.weights.drafts_off:
            self.scheduler.width = 1 + self.memory.draft_lengths[0]
        elif self.gate is not None:
            self.scheduler.width = 1 + self.gate.next_drafts(live_rows)
        elif self._schedule is not None:
            self.scheduler.width = 1 + self._schedule.drafts(live_rows)
        elif self.needs.guided:
            self.scheduler.width = self.memory.tokens_per_step

    @ranged("step/load", _counts)
    def load(self, plan: Plan) -> None:
        """Copy the host-owned fields that changed to the device: one staging block, one copy."""
        if self.recorder.recording:
            self.recorder.loading()
        updates = self._updates(plan, self._own.slots, self.runtime)
        if updates:
            self.runtime.load(updates)
            self.counters["loads"] += 1

    def _updates(
        self, plan: Plan, slots: Sequence[Request | None], runtime: SlotOperations
    ) -> dict[str, Any]:
        """The host-owned fields that a rank's plan changes."""
        drafts = self.memory.tokens_per_step > 1
        updates = host_updates(plan, slots, speculative=drafts)
        if plan.slots_changed and self.memory.rings:
            updates |= ring_updates(slots, self.memory.rings, self.memory.table_blocks)
        if plan.slots_changed:
            updates |= runtime.load_routes(slots)
        if self.config.prompt_logprobs_out:
            updates |= prompt_rows_updates(plan)
        if self.intake.embeds is not None and self.intake.embeds.grids:
            updates |= rope_updates(plan, slots)
        if self.intake.embeds is not None and self.intake.embeds.images is not None:
            updates |= seen_updates(plan)
        if self.intake.adapters.slots:
            updates |= adapter_updates(plan, slots)
        if self.intake.inner is not None and plan.slots_changed:
            assert self.runtime.codes is not None, "frames have a mailbox"
            updates |= frame_updates(slots, self.intake.inner)
            updates[GIVEN_FIELD] = self.runtime.codes.given.updates(slots)
        if self._feeds is not None:
            updates |= self._feeds.updates(plan, slots)
        if plan.masks_changed:
            # Before `draft_updates` uses up the host's drafts.
            updates |= runtime.masks.updates(plan, slots)
        if self.needs.host_drafts and plan.rows:
            updates |= draft_updates(plan, slots, self.counters)
        return updates

    @ranged("step/replay", _counts)
    def replay(self, plan: Plan) -> None:
        """Queue the plan's swaps and replays on the stream."""
        if plan.swap_out or plan.swap_in:
            self.runtime.swap(len(plan.swap_out), len(plan.swap_in))
        states = self._own.reuse.states
        self.runtime.copy_states(states.before)
        replays: list[Replay] = []
        chunk = plan.prefill
        if chunk is not None:
            key = chunk_key(chunk, self.memory.prefill_ladder, plan.packed)
            with span("prefill", key.size, sum(each.count for each in plan.chunks)):
                replays.append(prefill_replay(plan, self.runtime.launched + 1))
                self._run(key, replays[-1:])
            self.runtime.copy_states(states.after)
        if plan.rows:
            rows, drafts, full = plan.bucket, plan.width - 1, plan.full
            sampler = self.runtime.program.samplers[-1 if full else 0]
            key = decode_key(rows, drafts, sampler, plan.steps)
            sequence, later = self.runtime.launched + 1, plan.steps - 1
            # Without keywords it takes half the time.
            replays.append(
                Replay(sequence, plan.rows, plan.epochs, plan.width, rows, None, full, 0, later)
            )
            self._run(key, replays[-1:])
        if plan.guided:
            self.counters["guided/steps"] += 1
            self.runtime.fetch_drafts()
        self.in_flight.append(tuple(replays))
        if plan.steps > 1:
            self.in_flight += [(step,) for step in replays[-1].following()]
        self.launches += 1

    def _run(self, key: GraphKey, replays: Sequence[Replay]) -> None:
        """Launch the graph of these replays; `replays[0]` is the first step of several."""
        if self.recorder.recording:
            live = sum(len(replay.requests) for replay in replays)
            chunks = [chunk for replay in replays for chunk in replay.chunks]
            fed = sum(chunk.count for chunk in chunks)
            if chunks and chunks[0].noted:
                # The chunk's lanes are live, but nothing is fed.
                live, fed = fed, 0
            sequence, width = replays[0].sequence, replays[0].width
            self.recorder.launch(self.runtime.replay, key, sequence, live, width, fed)
        else:
            self.runtime.replay(key)
        self.counters[self._counter_of[key]] += 1

    def _collect_done(self, timeout: float | None) -> None:
        """Read the oldest step, if its record arrives within `timeout` seconds, and the steps after
        it that are done by then.

        The host is late if there are any, so the device gets its next launch before they are read.
        """
        for number in range(len(self.in_flight)):
            oldest, before = self.in_flight[0][0], len(self.in_flight)
            if number:
                if not self.runtime.mailbox.ready(oldest.sequence, len(oldest.requests)):
                    return
                self._launch_all(0)
                before = len(self.in_flight)
            self.collect(0 if number else timeout)
            if len(self.in_flight) == before:
                return

    def _collect_several(self, timeout: float | None) -> None:
        """Read the oldest launches down to the lookahead, which a new request has lowered."""
        deadline = deadline_after(timeout)
        while before := len(self.in_flight):
            self.collect(seconds_to(deadline))
            left = len(self.in_flight)
            if left == before or left <= self.scheduler.lookahead:
                return

    @ranged("step/collect", _counts_of_oldest)
    def collect(self, timeout: float | None) -> None:
        """Read the records of the oldest step if they arrive within `timeout` seconds."""
        if self.recorder.recording:
            self.recorder.collecting()
        runtime, replays = self.runtime, self.in_flight[0]
        with self.interrupts.let_through:
            records = self._wait(replays, timeout)
        if records is None:
            return
        now = time.perf_counter()
        try:
            self.in_flight.popleft()
            self.launches -= not replays[-1].later
            runtime.acknowledge(replays[-1].sequence)
            for collected in self._together(records):
                self.delivery.read_replay(*collected, now)
        except BaseException as error:
            self._break(error)
            raise
        if self.needs.collects:
            with runtime.on_stream():
                for replay in replays:
                    if replay.chunk is not None:
                        self.drafter.collect(replay.chunk)

    def _wait(self, replays: Sequence[Replay], timeout: float | None) -> list[Collected] | None:
        """The records that the replays of a step published; None if they miss the timeout."""
        # A step without a timeout does not read the clock.
        deadline = None if timeout is None else deadline_after(timeout)
        if self.config.collect_while_waiting and (timeout is None or timeout > 0):
            arrived, first = self.runtime.mailbox.ready, replays[0]
            collect_due(arrived, first.sequence, len(first.requests))
        records: list[Collected] = []
        try:
            for replay in replays:
                waits, lanes = self._waits_of(replay), len(replay.requests)
                left = None if deadline is None else seconds_to(deadline)
                record = waits.wait_tokens(replay.sequence, lanes, left)
                if record is None:
                    return None
                logprobs = None
                if replay.full:
                    left = None if deadline is None else seconds_to(deadline)
                    logprobs = waits.wait_logprobs(replay, record, left)
                    if logprobs is None:
                        return None
                left = None if deadline is None else seconds_to(deadline)
                if waits.wait_routes(replay, record, left) is None:
                    return None
                if self.intake.inner is not None:
                    left = None if deadline is None else seconds_to(deadline)
                    if waits.wait_codes(replay, record, left) is None:
                        return None
                records.append((replay, record, logprobs))
        except Exception as error:
            self._break(error)
            raise
        return records

    def _waits_of(self, replay: Replay) -> Waits:
        """The waits on the mailboxes that a replay publishes to."""
        return self.runtime

    def _together(self, records: list[Collected]) -> list[Collected]:
        """The records of a step as they are delivered: one per launch."""
        return records

    def _drafts_are_there(self, timeout: float | None) -> bool:
        """Whether the drafts of the steps that were read arrive within `timeout` seconds."""
        try:
            with self.interrupts.let_through:
                return bool(self.runtime.wait_drafts(timeout))
        except Exception as error:
            self._break(error)
            raise

    def close(self) -> None:
        """Implements `Engine.close`."""
        if self.closed:
            return
        self.check_thread()
        if self.broken is None:
            self.runtime.synchronize()
            self.counters.update(self.drafter.counters())  # the device no longer holds them
        self.scheduler.close()
        self.closed = True
        self.recorder.close()
        self.in_flight.clear()
        self.delivery.clear()
        self.runtime.close()
        drafter, self.drafter = self.drafter, NoDrafter()
        drafter.close()
