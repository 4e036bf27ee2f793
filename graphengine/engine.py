"""The engine: requests in, one graph replay a step, events out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from graphengine import runs
from graphengine.acceptance import Acceptance
from graphengine.allocation import (
    allocate,
    compile_steps,
    graph_steps,
    new_scheduler,
    swap_blocks,
)
from graphengine.buckets import capture_all
from graphengine.checkpoint import Checkpoint, stored_dtype
from graphengine.checks import seconds
from graphengine.closing import Closable
from graphengine.config import EngineConfig, EngineOptions
from graphengine.delivery import Delivery, StopCallback
from graphengine.drafters import Drafter, make_drafter
from graphengine.fields import draft_updates, host_updates
from graphengine.garbage import collect_due
from graphengine.gate import Gate
from graphengine.intake import Intake, QueueOptions
from graphengine.kernels import RowFamily
from graphengine.memory import MemoryPlan, plan_memory
from graphengine.models.dense import DenseModel, allocate_weights
from graphengine.models.stored import destinations, read_eos_ids, read_model
from graphengine.prompts import Prompt
from graphengine.recorder import Recorder
from graphengine.replay import Replay
from graphengine.report import (
    EngineReport,
    StepReport,
    describe_engine,
    describe_numerics,
    describe_step,
    make_report,
    statistics,
)
from graphengine.request import Event, Request
from graphengine.sampling_params import SamplingParams
from graphengine.scheduler import Plan, PrefillChunk
from graphengine.sessions import Session, open_session, restore_session
from graphengine.snapshots import SessionSnapshot
from graphengine.step import (
    chunk_bucket,
    decode_bucket,
    draft_bucket,
)
from graphengine.text import Tokenizer
from graphengine.tracing import ranged, span

log = logging.getLogger(__name__)


def _counts(engine: Engine, plan: Plan) -> tuple[int, int]:
    return plan.bucket, len(plan.rows)


def _counts_of_oldest(engine: Engine, timeout: float | None) -> tuple[int, int]:
    oldest = engine._in_flight[0][-1]
    return oldest.rows, len(oldest.requests)


class Engine(Closable):
    """Decodes up to `max_batch` requests, each step one replay of a captured graph.

    In process and single-threaded: call every method from one thread. Use `from_pretrained` to make
    one, `close()` or a `with` block to free everything it holds. ValueError for what the caller
    did. A failing launch or wait raises its own error (RuntimeError; TimeoutError for a replay that
    never published); from then on every call is a RuntimeError and the engine only closes. So does
    an interrupt (Ctrl-C) inside a launch, which on a CPU is where the time goes: nobody can tell
    how far the step had come. One inside a wait does no harm.
    """

    def __init__(
        self,
        model: DenseModel,
        memory: MemoryPlan,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.scheduler = new_scheduler(memory, config, drafter)
        gate = config.gate_options
        self.gate: Gate | None = None
        if gate is not None:
            self.gate = Gate(
                lengths=memory.draft_lengths, counters=self.scheduler.counters, **asdict(gate)
            )
        self.counters = self.scheduler.counters
        self._in_flight: deque[tuple[Replay, ...]] = deque()
        self._launched = 0
        self._busy_in: str | None = None
        self._closed = False
        self._broken: str | None = None
        self._allocate(model)
        self._capture()
        self.recorder = Recorder(
            description=describe_engine(self),
            captures=[graph.report for graph in self._graphs.values()],
            lanes=config.max_batch,
            in_flight=3 * (config.lookahead + 1),
            stream=self._cuda_stream,
        )
        forced = config.forced_acceptance is not None
        self._delivery = Delivery(self.scheduler, self.gate, self.recorder, forced=forced)
        self._intake = Intake(
            config,
            memory,
            tokenizer=tokenizer,
            vocab_size=model.config.vocab_size,
            vocabulary=model.lm_head.shape[0],
            eos_ids=self.eos_ids,
            prompts_only=drafter is not None and drafter.prompts_only,
            cancelled=self._delivery.cancelled,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        progress: runs.Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Load a checkpoint, allocate everything, capture every bucket.

        path      a directory (`config.json`, safetensors, `tokenizer.json`), or a Hugging Face id
        progress  called with (bytes loaded, bytes in all) as weights arrive on the device
        options   the fields of `EngineConfig`
        """
        config = EngineConfig(**options)
        checkpoint = Checkpoint.open(path)
        model_config = read_model(checkpoint)
        eos_ids = config.check_eos_ids(read_eos_ids(checkpoint, model_config))
        drafter = make_drafter(config, checkpoint, model_config)
        memory = plan_memory(
            model_config, config, checkpoint_dtype=stored_dtype(checkpoint), drafter=drafter
        )
        log.info("memory budget\n%s", memory.budget.table())
        with span("load"):
            weights = allocate_weights(model_config, device=config.device, dtype=memory.dtype)
            wanted = destinations(checkpoint, model_config, weights)
            if drafter is not None:
                wanted |= drafter.allocate(memory.device, memory.dtype, config.family)
            unused = checkpoint.load(wanted, progress)
        if unused:
            log.info("tensors of the checkpoint that the model does not use: %s", ", ".join(unused))
        tokenizer = Tokenizer.from_directory(checkpoint.path) if checkpoint.has_tokenizer else None
        model = DenseModel(
            model_config,
            weights,
            max_seq_len=memory.max_seq_len,
            vocabulary=0 if tokenizer is None else 1 + max((tokenizer.largest_id, *eos_ids)),
        )
        return cls(model, memory, config, tokenizer=tokenizer, eos_ids=eos_ids, drafter=drafter)

    def _allocate(self, model: DenseModel) -> None:
        held = allocate(model, self.memory, self.config, self.drafter)
        self.model = model
        self.plans, self.plan_sources = held.plans, held.plan_sources
        self.buffers, self.mailbox, self.logprobs = held.buffers, held.mailbox, held.logprobs
        self._masks = held.masks
        self._caches, self.program = held.caches, held.program
        self._cuda_stream = held.stream
        self._numerics_id = describe_numerics(self.memory, model, held)

    def _capture(self) -> None:
        """Compile, warm up and capture every bucket, largest first, on padded rows alone."""
        memory = self.memory
        steps = graph_steps(self.program, memory)
        # The pairs are padded, so nothing moves.
        pairs = min(1, memory.swap_blocks)
        swap = partial(swap_blocks, self._caches, self.buffers, pairs, pairs)
        with self._on_stream():
            self.buffers.reset()
            self.compilation = compile_steps({"swap": swap} | steps, memory.device)
            self.buffers.reset()
            swap()
            self._graphs = capture_all(
                steps,
                device=memory.device,
                stream=self._cuda_stream,
                buffers=self.buffers,
                around=lambda bucket: span(f"capture/{bucket}"),
            )
            self.buffers.reset()
        if self._cuda_stream is not None:
            self._cuda_stream.synchronize()
        self.mailbox.clear()
        self.logprobs.clear()
        log.info("captured\n%s", self.report())

    # What a caller does with requests.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[QueueOptions],
    ) -> Request:
        """Queue a request; it starts at a `step()` that finds a slot and KV blocks for it.

        prompt      text, token ids, chat messages (`{"role": ..., "content": ...}`) or a `Chat`
        on_event    called during `step()` with each of the request's events; it may submit and
                    cancel
        priority    of those that wait the lowest number starts first, as in vLLM, and the first
                    come among equals; who has started is paused for nobody's priority
        deadline_s  seconds from now: a step that begins later finishes the request with reason
                    "deadline", wherever it stands, and it keeps the tokens that were read

        ValueError, with the value and the limit, for a prompt or parameters that cannot be served;
        `QueueFull`, a RuntimeError, where `max_waiting` requests wait already.
        """
        self._check_open()
        submitted = time.perf_counter()
        self.scheduler.check_queue()
        params = self._intake.usual_params if params is None else params
        ids = self._intake.prompt_ids(prompt, params)
        request = self._intake.request(ids, params, on_event, submitted=submitted, **options)
        self._queue(request)
        return request

    def _queue(self, request: Request) -> None:
        self.scheduler.submit(request)
        if request.deadline is not None:
            self._delivery.deadlines.watch(request)

    def draft(self, request: Request, token_ids: Sequence[int]) -> None:
        """Propose what `request` says behind its `token_ids` so far; `UserProvided` says more.

        Its next decode step verifies them. ValueError for more than k, for anything but token ids,
        for a request that is finished or of another engine, and in an engine of other drafts.
        """
        self._check_open()
        self._intake.draft(request, token_ids, self.drafter)

    def step(self, timeout: float | None = None) -> list[Event]:
        """Launch what can be launched, then return the events of the oldest replay in flight.

        timeout  seconds to wait for that replay; None: until it is done; 0 or less: never blocks.
                 An empty list where it was not done in time, or only fed a part of a prompt, or
                 where the drafts that a grammar's masks follow were not there in time. A run of
                 Python's collector (`EngineConfig.collect_while_waiting`), with its finalizers and
                 callbacks, is a part of the wait, which it may lengthen.

        What an event callback or `stop_callback` raises goes on to the caller once every callback
        has run; the events come with the next step. Events of a `generate`, `stream` or `astream`
        go to its caller alone; those that come while one of these runs, and have a callback, to
        that alone.
        """
        timeout = None if timeout is None else seconds("timeout", timeout)
        self._enter("step()")
        try:
            scheduler = self.scheduler
            scheduler.moves.clear()
            self._delivery.end_due()
            ready = not scheduler.guided or self._drafts_are_there(timeout)
            try:
                while ready and len(self._in_flight) <= scheduler.lookahead:
                    plan = self._plan()
                    if plan is None:
                        break
                    self._load(plan)
                    self._in_flight.append(self._replay(plan))
            except BaseException as error:
                self._break(error)
                raise
            if self._in_flight:
                self._collect(timeout)
            return self._delivery.run_callbacks()
        finally:
            self._busy_in = None
            if self.recorder.recording:
                self.recorder.delivered()

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished, a replay in flight, or an event not returned yet."""
        return self.scheduler.busy or bool(self._in_flight) or self._delivery.pending

    @property
    def requests(self) -> dict[int, Request]:
        """By id, the requests that are not finished, of `generate` and sessions too; a copy."""
        return {each.id: each for each in (*self.scheduler.active, *self.scheduler.waiting)}

    def last_step(self) -> StepReport:
        """Who the last `step()` left active, and who it paused, resumed and finished."""
        return describe_step(self)

    @property
    def stop_callback(self) -> StopCallback | None:
        """Who else ends requests; None: nobody. ValueError for what cannot be called.

        Once in every `step()` that leaves a request active, in front of the events' callbacks, it
        is called with the ids of all that are active (in a slot and not paused); `requests` has
        them by id. It returns those to finish: with reason "stop", stop reason None and the tokens
        they have. Any other id is a ValueError, and then nobody is finished. It may submit and
        cancel.
        """
        return self._delivery.stop_callback

    @stop_callback.setter
    def stop_callback(self, callback: StopCallback | None) -> None:
        if callback is not None and not callable(callback):
            raise ValueError(f"stop_callback={callback!r} cannot be called")
        self._delivery.stop_callback = callback

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: runs.Progress | None = None,
        **options: Unpack[QueueOptions],
    ) -> Any:
        """Run one prompt, or a list of them as a batch, to the end.

        progress  called with (requests finished, requests) after each step that finished one
        options   `priority` and `deadline_s` of `submit`, for each of them

        Returns a `Result`, or a list of them in the order of the prompts. Other requests go on
        meanwhile; the next `step()` returns their events. What `progress` or one of their callbacks
        raises ends this call, too, and cancels its requests.
        """
        self._check_open()
        return runs.generate(self, prompts, params, progress, **options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> Iterator[Event]:
        """Submit a request now and yield its events, which no step returns.

        Closing the iterator early cancels the request. `options` are `priority` and `deadline_s` of
        `submit`.
        """
        return runs.stream(self, partial(self.submit, prompt, params, **options))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> AsyncIterator[Event]:
        """Submit a request now; `async for event in engine.astream(...)` brings its events.

        It steps the engine on the caller's asyncio loop, without a thread: a step that never waits,
        then the loop's other tasks. Any number of them may run in one loop, beside a task that
        calls `step(timeout=0)`. A task that is cancelled, an exception, or closing the iterator
        early (`contextlib.aclosing` does so at once) cancels the request; whoever steps next frees
        its slot. `options` as for `stream`.
        """
        return runs.astream(self, partial(self.submit, prompt, params, **options))

    def session(self) -> Session:
        """An empty conversation, whose KV stays on the device between its turns.

        ValueError in an engine that saves hidden states, which needs whole prompts.
        """
        return open_session(self)

    def restore_session(self, source: SessionSnapshot | str | PathLike[str]) -> Session:
        """The session that `Session.snapshot` copied, or the one in the file that it wrote.

        ValueError, with both values, for another model, dtype, `numerics_id`, device or layout, for
        damage, and where it exceeds `max_seq_len`, the pool's free blocks or `session_blocks`.
        """
        return restore_session(self, source)

    @property
    def cache(self) -> torch.Tensor:
        """KV `[layers, blocks, 2, block_size, kv_heads, head_dim]` of the model, until `close`."""
        return self._caches[0][0]

    @property
    def acceptance(self) -> Acceptance:
        """What became of the drafts of all requests."""
        return self._delivery.acceptance

    @property
    def row_family(self) -> RowFamily:
        """The arithmetic of the decode kernels, in every bucket: "fma" or "dot"."""
        return self.plans.family

    @property
    def numerics_id(self) -> str:
        """12 hexadecimal digits: engines of one model on one kind of GPU with equal ids give the
        same bits.
        """
        return self._numerics_id

    def report(self) -> EngineReport:
        """Budget, kernels, ladder, captures and counters; print it."""
        return make_report(self, [graph.report for graph in self._graphs.values()])

    def stats(self) -> dict[str, Any]:
        """Counters, and what became of the drafts, since the engine opened; a copy.

        acceptance  `Acceptance.as_dict()` of all requests: tokens a step, rates by position
        gate        the draft length in use; None without a gate
        kv          blocks of the pool: `blocks` in all, `vacant` ones, `idle` ones that sessions or
                    cached prefixes keep, of which `session_blocks` may be idle; None: any number
        counters    tokens, replays by graph, pauses, discarded tokens, what the gate did, ...

        Of some drafters it waits for the device, which holds a counter.
        """
        return statistics(self)

    def close(self) -> None:
        """Free graphs, then their pool, buffers, cache and weights. Open requests are cancelled.

        What describes the engine can still be read: `stats`, `report`, `numerics_id`, `last_step`,
        the recorder. All else is a ValueError. Calling again is fine.
        """
        if self._closed:
            return
        if self._cuda_stream is not None and self._broken is None:
            self._cuda_stream.synchronize()
        if self.drafter is not None and self._broken is None:
            self.counters.update(self.drafter.counters())  # the device holds them no longer
        self.scheduler.close()
        self._closed = True
        self.recorder.close()
        for graph in self._graphs.values():
            graph.close()
        self._in_flight.clear()
        self._delivery.clear()
        self.buffers.close()
        self._free()
        drafter, self.drafter = self.drafter, None
        if drafter is not None:
            drafter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # One step, piece by piece. Each is a range for profilers, and timed while recording.

    @ranged("step/plan", lambda engine: (0, len(engine.scheduler.active)))
    def _plan(self) -> Plan | None:
        """The scheduler's next plan, at the width that the gate allows."""
        if self.recorder.recording:
            self.recorder.planning()
        if self.gate is None:
            return self.scheduler.plan()
        live_rows = len(self.scheduler.active)
        self.scheduler.width = 1 + self.gate.next_drafts(live_rows)
        plan = self.scheduler.plan()
        if plan is not None and plan.rows:
            self.gate.launched(live_rows)
        return plan

    @ranged("step/load", _counts)
    def _load(self, plan: Plan) -> None:
        """Bring the host-owned fields that changed to the device: one staging block, one copy."""
        if self.recorder.recording:
            self.recorder.loading()
        drafter = self.drafter
        drafts = self.memory.tokens_per_step > 1
        updates = host_updates(plan, self.scheduler.slots, speculative=drafts)
        if plan.masks_changed:
            # Before drafts of the host are used up.
            updates |= self._masks.updates(plan, self.scheduler.slots)
        if drafter is not None and drafter.host_drafts and plan.rows:
            updates |= draft_updates(plan, self.scheduler.slots, self.counters)
        if updates:
            self.buffers.load(updates, sequence=self._launched + 1, stream=self._cuda_stream)
            self.counters["loads"] += 1

    @ranged("step/replay", _counts)
    def _replay(self, plan: Plan) -> tuple[Replay, ...]:
        """Queue the plan's swaps and replays on the stream; the graphs know theirs."""
        if plan.swap_out or plan.swap_in:
            with self._on_stream():
                swap_blocks(self._caches, self.buffers, len(plan.swap_out), len(plan.swap_in))
        replays = []
        chunk = plan.prefill
        if chunk is not None:
            request = chunk.request
            requests, epochs = (request,), (request.placed.epoch,)
            tokens, bucket = chunk_bucket(chunk, self.memory.prefill_ladder)
            full = request.processing is not None and not chunk.noted
            with span("prefill", tokens, chunk.count):
                replays.append(self._launch(bucket, requests, epochs, 1, 0, chunk, full))
        if plan.rows:
            rows, drafts = plan.bucket, plan.width - 1
            bucket = decode_bucket(rows, drafts, self.program.samplers[-1 if plan.full else 0])
            full, live = plan.full, plan.rows
            replays.append(self._launch(bucket, live, plan.epochs, plan.width, rows, None, full))
            if self.drafter is not None and self.drafter.own_graph:
                # It publishes nothing, so nobody waits for it.
                self._run(draft_bucket(rows, drafts), replays[-1])
        if plan.masks_changed and self.scheduler.guided:
            self.counters["guided/steps"] += 1
            with self._on_stream():
                self._masks.fetch_drafts()
        return tuple(replays)

    def _launch(
        self,
        bucket: str,
        requests: tuple[Request, ...],
        epochs: tuple[int, ...],
        width: int,
        rows: int,
        chunk: PrefillChunk | None,
        full: bool,
    ) -> Replay:
        replay = Replay(self._launched + 1, requests, epochs, width, rows, chunk, full)
        self._run(bucket, replay)
        self._launched += 1
        return replay

    def _run(self, bucket: str, replay: Replay) -> None:
        """Launch a graph, that of `replay` or the drafter's own behind it."""
        graph = self._graphs[bucket]
        if self.recorder.recording:
            chunk, live = replay.chunk, len(replay.requests)
            fed = 0 if chunk is None else chunk.count
            if chunk is not None and chunk.noted:
                # Its lanes are live, but nothing is fed.
                live, fed = fed, 0
            self.recorder.launch(graph.replay, bucket, replay.sequence, live, replay.width, fed)
        else:
            graph.replay()
        self.counters[f"replays/{bucket}"] += 1

    @ranged("step/collect", _counts_of_oldest)
    def _collect(self, timeout: float | None) -> None:
        """Read the oldest launch, unless it is not done within `timeout` seconds."""
        if self.recorder.recording:
            self.recorder.collecting()
        replays = self._in_flight[0]
        deadline = None if timeout is None else time.perf_counter() + timeout
        if self.config.collect_while_waiting and (timeout is None or timeout > 0):
            collect_due(self.mailbox.ready, replays[0].sequence, len(replays[0].requests))
        records = []
        for replay in replays:
            left = None if deadline is None else max(0.0, deadline - time.perf_counter())
            record = self._wait(self.mailbox.wait, replay.sequence, len(replay.requests), left)
            if record is None:
                return
            logprobs = None
            if replay.full:
                published = replay, record
                logprobs = self._wait(self.logprobs.wait, replay.sequence, published, left)
                if logprobs is None:
                    return
            records.append((replay, record, logprobs))
        now = time.perf_counter()
        try:
            self._in_flight.popleft()
            self.buffers.acknowledge(replays[-1].sequence)
            for replay, record, logprobs in records:
                self._delivery.read_replay(replay, record, logprobs, now)
        except BaseException as error:
            self._break(error)
            raise
        if self.drafter is not None:
            with self._on_stream():
                for replay in replays:
                    if replay.chunk is not None:
                        self.drafter.collect(replay.chunk)

    def _drafts_are_there(self, timeout: float | None) -> bool:
        """Whether nothing is in flight and, within `timeout` seconds, what was drafted is here."""
        there = not self._in_flight
        return there and bool(self._wait(self._masks.wait, self._launched, None, timeout))

    def _wait(
        self, wait: Callable[..., Any], sequence: int, lanes: Any, timeout: float | None
    ) -> Any:
        """What a mailbox has of a replay's lanes; None if it is not there within `timeout`."""
        try:
            return wait(
                sequence,
                lanes,
                timeout=timeout,
                mode=self.config.wait,
                stream=self._cuda_stream,
                limit=self.config.wait_limit_s,
            )
        except Exception as error:  # an interrupt does no harm: the wait can be repeated
            self._break(error)
            raise

    # Checks at the door.

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed")
        if self._broken is not None:
            raise RuntimeError(f"the engine is broken, close it: {self._broken}")

    def _enter(self, call: str) -> None:
        """Refuse a call that would run inside another; whoever enters clears `_busy_in`."""
        self._check_open()
        if self._busy_in is not None:
            raise ValueError(f"{call} called from inside {self._busy_in}, by an event callback")
        self._busy_in = call

    def _break(self, error: BaseException) -> None:
        """Past such an exception nobody knows what host and device agree on: only close is left.

        An interrupt breaks a launch and a delivery, but not a wait, which can be repeated.
        """
        self._broken = f"{type(error).__name__}: {error}"

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._cuda_stream is None else torch.cuda.stream(self._cuda_stream)
