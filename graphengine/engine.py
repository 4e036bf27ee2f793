"""The engine: requests in, one graph replay a step, events out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, Unpack, overload

import torch

from graphengine.config import EngineConfig
from graphengine.core import runs
from graphengine.core.delivery import StopCallback
from graphengine.core.engine_core import EngineCore
from graphengine.core.intake import QueueOptions, check_queue_options
from graphengine.core.report import EngineReport, StepReport, describe_step, make_report, statistics
from graphengine.core.runtime import Runtime
from graphengine.core.snapshots import SessionSnapshot
from graphengine.core.weight_updates import (
    MemoryCalls,
    StaleDrafts,
    WeightSource,
    load_adapter,
    unload_adapter,
    update_weights,
)
from graphengine.drafters import Drafter
from graphengine.engine_options import EngineOptions
from graphengine.host.gate import Gate
from graphengine.host.scheduling import Scheduling
from graphengine.kernels.linear.plans import RowFamily
from graphengine.models.contract import Model
from graphengine.observe.recorder import Recorder
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.sampling_defaults import recommended_sampling
from graphengine.opening.updating import LoadedWeights
from graphengine.options.checks import check_callable, seconds
from graphengine.parallel.data_parallel.core import DataParallelCore
from graphengine.parallel.opening import open_on_ranks
from graphengine.prompts import Prompt
from graphengine.requests.acceptance import Acceptance
from graphengine.requests.adapters import LoadedAdapter
from graphengine.requests.misplaced import check_names
from graphengine.requests.request import Event, Request
from graphengine.requests.result import Result
from graphengine.sampling_params import SamplingParams
from graphengine.sessions import Session, open_session, restore_session
from graphengine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine(MemoryCalls, runs.FrameCalls):
    """Decodes up to `max_batch` requests, each step one replay of a captured graph.

    In process and single-threaded: the thread that uses it first owns it, and a call from another
    one is a RuntimeError while the owner lives. Another thread may have opened it.

    Use `from_pretrained` to make one, `close()` or a `with` block to free everything it holds. A
    ValueError means that the caller made a mistake. A failing launch or wait raises its own error
    (RuntimeError; TimeoutError for a replay that never published). From then on the engine is
    broken: every call but `close` is a RuntimeError.

    Ctrl-C does not break it: KeyboardInterrupt is raised in a wait, or once a launch has ended. A
    `generate` or `stream` then ends its requests; others go on with the next step. Only a second
    Ctrl-C before that is raised at once; inside a launch it breaks the engine.
    """

    def __init__(
        self,
        model: Model,
        memory: MemoryPlan,
        config: EngineConfig,
        *,
        drafter: Drafter,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        runtime: Runtime | None = None,
        loaded: LoadedWeights | None = None,
    ) -> None:
        if runtime is None and config.ranks > 1:
            raise ValueError(f"{config.ranks_option}: from_pretrained starts the other ranks")
        self.config = config
        self.memory = memory
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self._loaded = loaded
        defaults: dict[str, Any] = {}
        if config.sampling_defaults == "checkpoint" and loaded is not None:
            defaults = recommended_sampling(loaded.checkpoint)
        kind = DataParallelCore if config.data_parallel > 1 else EngineCore
        self.core = kind(
            runtime or Runtime(model, memory, config, drafter),
            memory,
            config,
            tokenizer=tokenizer,
            eos_ids=self.eos_ids,
            drafter=drafter,
            defaults=defaults,
        )
        for name, folder in (config.adapters or {}).items():
            self.load_adapter(name, folder)
        log.info("captured\n%s", self.report())

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: EngineConfig | None = None,
        progress: runs.Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Load a checkpoint, allocate everything, capture every bucket.

        path      a directory (`config.json`, safetensors, `tokenizer.json`), a GGUF file, a Hugging
                  Face id, or "demo", the packaged model
        config    all options in one object
        progress  called with (bytes loaded, bytes in all) as weights arrive on the device
        options   in place of `config`, the fields of `EngineConfig`

        With `tensor_parallel`, `data_parallel` or `pipeline_parallel` above 1, processes are
        spawned that import the program's main module, so that module must open the engine under `if
        __name__ == "__main__":`. If one of them fails, this call and later ones raise RankFailed, a
        RuntimeError. Where torchrun has started the ranks, none are spawned, and the call returns
        only in rank 0's process: the other processes end with that engine. Stages of a pipeline are
        always spawned.

        FileNotFoundError where there is no such directory, or no `config.json` in it; ValueError
        for anything else that is wrong with checkpoint or options.
        """
        check_names("from_pretrained", options, {field.name for field in fields(EngineConfig)})
        if config is None:
            config = EngineConfig(**options)
        elif not isinstance(config, EngineConfig):
            raise ValueError(f"config={config!r} must be an EngineConfig")
        elif options:
            raise ValueError(
                f"from_pretrained() takes config= or single options, not both: {', '.join(options)}"
            )
        check_callable("progress", progress)
        opened, runtime = open_on_ranks(path, config, progress)
        model, memory, tokenizer, eos_ids, drafter, loaded = opened
        try:
            return cls(
                model,
                memory,
                config,
                tokenizer=tokenizer,
                eos_ids=eos_ids,
                drafter=drafter,
                runtime=runtime,
                loaded=loaded,
            )
        except BaseException:
            # Also for an interrupt: nothing else would end the other ranks.
            if runtime is not None:
                runtime.close()
            raise

    @property
    def model(self) -> Model:
        """Configuration, weights and tables; ValueError once closed."""
        return self.runtime.model

    @property
    def runtime(self) -> Runtime:
        """Buffers, caches, graphs and stream, for tools; ValueError once closed."""
        if self.core.closed:
            raise ValueError("the engine is closed, and what its runtime held is freed")
        return self.core.runtime

    # The core owns these; here they can only be read.

    @property
    def scheduler(self) -> Scheduling:
        """Slots, queue and KV blocks; for tools and tests."""
        return self.core.scheduler

    @property
    def counters(self) -> Counter[str]:
        """The live counters, of which `stats()["counters"]` is a copy."""
        return self.core.counters

    @property
    def gate(self) -> Gate | None:
        """Chooses how many drafts a step has; None in an engine without a gate."""
        return self.core.gate

    @property
    def recorder(self) -> Recorder:
        """Times of each replay, once its `start()` was called."""
        return self.core.recorder

    # Calls for requests.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[QueueOptions],
    ) -> Request:
        """Queue a request; it starts at a `step()` that finds a slot and KV blocks for it.

        prompt      text, token ids, chat messages (`{"role": ..., "content": ...}`) or a `Chat`;
                    with `prompt_embeds` also `PromptParts`, or a tensor [n, H] of embeddings
        on_event    called during `step()` with each of the request's events; it may submit and
                    cancel
        priority    the waiting request with the lowest number starts first, as in vLLM; equal ones
                    start in order of arrival; no running request is paused for it
        deadline_s  seconds from now: a step that begins later finishes the request in any phase,
                    with reason "deadline", and it keeps the tokens that were read
        adapter     name of a loaded LoRA adapter that its tokens go through; None: the base model
        prompt_logprobs_out
                    for a request with `prompt_logprobs`, in an engine opened with
                    `prompt_logprobs_out`: a tensor of the caller's, float32 [tokens of the prompt,
                    `model.lm_head.shape[0]`] on the engine's device with dense rows. Row i gets the
                    log-softmax of the model's logits after token i. It is written after all work
                    that the caller's stream has queued by now. All rows are complete when the
                    request's first token arrives. The request keeps the tensor alive. So does the
                    engine while a step may still write it, even after a cancel or a deadline, until
                    `busy` is False

        ValueError, with the value and the limit, for a prompt or parameters that cannot be served;
        `QueueFull`, a RuntimeError, if `max_waiting` requests wait already.
        """
        check_queue_options("submit", options)
        return self.core.submit(prompt, params, on_event, **options)

    def submit_many(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int,
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[QueueOptions],
    ) -> list[Request]:
        """Queue `n` samples of one prompt, 1 to 65,536, that share its KV; else like `submit`.

        All are queued or none: `QueueFull` if fewer than `n` may wait.

        Sample i has the first sample's seed plus i (modulo 2**63), whether the parameters give that
        seed or the engine draws it. Its tokens are those of a single request with its seed. Each
        sample is a request of its own: it is cancelled, read and finished by itself.

        The first to start feeds the prompt. The others share its whole KV blocks, and copies of its
        recurrent states, and feed only the rest of the last block. With sliding windows in rings,
        `prompt_logprobs` or `routing` each feeds the whole prompt.
        """
        check_queue_options("submit_many", options)
        return self.core.submit_many(prompt, params, n, on_event, **options)

    def draft(self, request: Request, token_ids: Sequence[int]) -> None:
        """Propose the tokens that follow the `token_ids` of `request` so far; see `UserProvided`.

        Its next decode step verifies them. ValueError for more than k, for anything but token ids,
        for a request that is finished or of another engine, and in an engine with another drafter.
        """
        self.core.draft(request, token_ids)

    def force(self, request: Request, token_id: int) -> None:
        """Have the next step that is launched for `request` emit this token, whatever the model
        says, as if it had been sampled: it can end the request, and drafts go on after it.

        The request needs `SamplingParams(forced_tokens=True)`. Another call before that step
        replaces the token.

        ValueError for a request without that parameter, a finished one, or one of another engine;
        while a step of the request is in flight because `step(timeout=...)` did not wait for it;
        and for a token that the request cannot sample: an id outside the vocabulary, one with a
        bias of -inf, a stop token before `min_tokens`.
        """
        self.core.force(request, token_id)

    def step(self, timeout: float | None = None) -> list[Event]:
        """Launch all work that can be launched, then return the events of the oldest step in
        flight.

        With `steps_per_launch`, the events of later steps that are done by then are returned, too.
        On a CPU the launch itself computes its steps, whatever the timeout.

        timeout  seconds to wait for that step; None: until it is done; 0 or less: never blocks.
                 The list is empty if it was not done in time or only fed a part of a prompt, or if
                 drafts that a grammar's masks need did not arrive in time. A run of Python's
                 collector (`collect_while_waiting`) is part of the wait and may lengthen it.

        An exception of an event callback or of `stop_callback` is raised once every callback has
        run; the events come with the next step. Events of a `generate`, `stream` or `astream` go
        only to its caller. While one of these runs, other events that have a callback go only to
        that callback.
        """
        return self.core.step(None if timeout is None else seconds("timeout", timeout))

    def drain(self, timeout: float | None = None) -> list[Event]:
        """Step until nothing is left to do; return the events of all these steps.

        timeout  seconds after which it returns the events so far, with `busy` still True; 0 or
                 less: a single step that never blocks; None: until the end

        Requests that callbacks submit meanwhile are run as well. Exceptions are those of `step`;
        the next step then returns the events so far.
        """
        return runs.drain(self.core, None if timeout is None else seconds("timeout", timeout))

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request without any; see `EngineConfig.sampling_defaults`."""
        return self.core.intake.usual_params

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished, a step in flight, or an event not returned yet."""
        return self.core.busy

    @property
    def requests(self) -> dict[int, Request]:
        """Unfinished requests by id, including those of `generate` and sessions; a copy."""
        return {each.id: each for each in (*self.scheduler.active, *self.scheduler.waiting)}

    def last_step(self) -> StepReport:
        """The requests that the last `step()` left active, paused, resumed and finished, and the
        bucket of the decode graph that it launched.
        """
        return describe_step(self.scheduler, self.core.newest)

    @property
    def stop_callback(self) -> StopCallback | None:
        """A callback that may finish requests; None: none. ValueError if it cannot be called.

        In every `step()` that leaves a request active, it is called once, before the events'
        callbacks, with the ids of all active requests (in a slot and not paused); `requests` has
        them by id. It returns the ids of the requests to finish. They end with reason "stop", stop
        reason None and the tokens they have. Any other id is a ValueError, and then no request is
        finished. It may submit and cancel.
        """
        return self.core.delivery.stop_callback

    @stop_callback.setter
    def stop_callback(self, callback: StopCallback | None) -> None:
        check_callable("stop_callback", callback)
        self.core.check_thread()
        self.core.delivery.stop_callback = callback

    # A string is also a sequence of strings, so it fits both overloads: it is one prompt.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: runs.Progress | None = None,
        **options: Unpack[QueueOptions],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: runs.Progress | None = None,
        **options: Unpack[QueueOptions],
    ) -> list[Result]: ...
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
        options   `priority`, `deadline_s` and `adapter` of `submit`, for each prompt

        Returns a `Result`, or a list of them in the order of the prompts. Prompts beyond
        `max_waiting` are queued as others start. Other requests continue meanwhile; the next
        `step()` returns their events. An exception of `progress` or of another request's callback
        also ends this call and cancels its requests.
        """
        self.core.check_open()
        check_queue_options("generate", options)
        return runs.generate(self.core, prompts, params, progress, **options)

    @overload
    def generate_many(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int,
        progress: runs.Progress | None = None,
        **options: Unpack[QueueOptions],
    ) -> list[Result]: ...
    @overload
    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int,
        progress: runs.Progress | None = None,
        **options: Unpack[QueueOptions],
    ) -> list[list[Result]]: ...
    def generate_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int,
        progress: runs.Progress | None = None,
        **options: Unpack[QueueOptions],
    ) -> Any:
        """Run `n` samples of each prompt to the end, as `generate` runs prompts.

        The samples of a prompt are those of `submit_many`.

        Returns a list of `n` results for each prompt; one list for a single prompt.
        """
        self.core.check_open()
        check_queue_options("generate_many", options)
        return runs.generate_many(self.core, prompts, params, progress, n, **options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> Iterator[Event]:
        """Submit a request now and yield its events, which no step returns.

        Closing the iterator early cancels the request. `options` are `priority`,
        `deadline_s` and `adapter` of `submit`.
        """
        check_queue_options("stream", options)
        return runs.stream(self.core, partial(self.submit, prompt, params, **options))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> AsyncIterator[Event]:
        """Submit a request now; `async for event in engine.astream(...)` brings its events.

        It steps the engine on the caller's asyncio loop, without a thread: a step that never waits,
        then the loop's other tasks. Any number of them may run in one loop, together with a task
        that calls `step(timeout=0)`. A cancelled task, an exception, or closing the iterator early
        (`contextlib.aclosing` does so at once) cancels the request; the next step frees its slot.
        `options` as for `stream`.
        """
        check_queue_options("astream", options)
        return runs.astream(self.core, partial(self.submit, prompt, params, **options))

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """The loaded adapters by name; a copy."""
        return dict(self.core.intake.adapters.loaded)

    def load_adapter(self, name: str, path: str | PathLike[str]) -> LoadedAdapter:
        """Copy a LoRA adapter, the folder that peft saved, into a free slot; requests may run.

        Nothing is captured again. It waits for the device. ValueError, with names and numbers, if
        there is no free slot or the adapter fits neither model nor slots.
        """
        return load_adapter(self.core, self._loaded, name, path)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's slot. ValueError, with their ids, while requests use it."""
        unload_adapter(self.core, name)

    def session(self, *, adapter: str | None = None) -> Session:
        """An empty conversation, whose KV stays on the device between its turns.

        adapter  the adapter of all its turns, as for `submit`: its KV belongs to it

        ValueError in an engine that saves hidden states, which needs whole prompts.
        """
        return open_session(self.core, adapter)

    def restore_session(self, source: SessionSnapshot | str | PathLike[str]) -> Session:
        """The session that `Session.snapshot` copied, or the one in the file that it wrote.

        ValueError, with both values, for another model, dtype, `numerics_id`, device, layout or
        adapter, for damage, and for more than `max_seq_len`, `session_blocks` or the pool allows.
        """
        return restore_session(self.core, source)

    @property
    def weight_version(self) -> int:
        """Version of the weights: 0 as opened, raised by `update_weights`. Requests, events and
        results have the version that their tokens came from.
        """
        return self.core.weights.version

    def update_weights(
        self,
        source: WeightSource,
        *,
        version: int | None = None,
        stale_drafts: StaleDrafts = "off",
        draft_weights: WeightSource | None = None,
    ) -> None:
        """Put other values into the weights, in place: graphs and addresses stay as they are.

        source  pairs of a name and a tensor, or a mapping, with names and shapes of the checkpoint
                that the engine was opened from: all of its tensors or some, on any device. An
                iterator is read to its end first; to hold fewer at a time, call it in pieces, all
                with one `version`. Or the directory of a whole checkpoint of the same model
        version  the new `weight_version`, such as a trainer's step; calls with the same number are
                pieces of one update. None: one more than before
        draft_weights  the same as `source`, of a drafter with a checkpoint of its own (`Eagle3`,
                `DFlash`, `DraftModel`). With no tensors in `source`, the version stays
        stale_drafts  what to do if the drafter's weights stay older than the model's: "off" feeds
                no more drafts, "keep" goes on drafting. A warning is logged either way

        Values are cast, fused, rounded (`quantize`) and split over ranks as they were at opening.
        Tensors that are rounded together must come together: q, k and v, or gate and up. Tensors of
        the checkpoint that the engine does not use are ignored; draft modules of the checkpoint are
        updated with them. The scales of an fp8 KV cache stay.

        KV of the older weights is dropped: cached prefixes are forgotten, and sessions keep their
        tokens and are `evicted`, so that their next turn prefills them. Snapshots of the older
        weights are refused from then on. It waits for the device.

        ValueError while requests are unfinished, and, with names and both values, for tensors that
        cannot be taken, or that hold a NaN or an infinite number: then nothing is changed. An error
        while values are written breaks the engine.
        """
        update_weights(self.core, self._loaded, source, version, stale_drafts, draft_weights)

    @property
    def cache(self) -> torch.Tensor:
        """KV `[layers, blocks, 2, block_size, kv_heads, head_dim]` of the model, until `close`.

        A model with latents has `[layers, blocks, 1, block_size, values]`. Layers that keep their
        newest tokens in rings are not in it. With several ranks it is rank 0's cache.
        """
        return self.runtime.caches[0][0]

    @property
    def acceptance(self) -> Acceptance:
        """Counts of verified and accepted drafts of all requests."""
        return self.core.delivery.acceptance

    @property
    def row_family(self) -> RowFamily:
        """The arithmetic of the decode kernels, in every bucket: "fma" or "dot"."""
        return self.core.runtime.plans.family

    @property
    def numerics_id(self) -> str:
        """12 hexadecimal digits: engines of one model on one kind of GPU with equal ids give the
        same bits.
        """
        return self.core.runtime.numerics_id

    @property
    def prefill_cut(self) -> tuple[tuple[int, int], ...]:
        """Where prompts are cut into chunks: pairs (position, tokens). From each position on,
        chunks end at multiples of its number of tokens.

        Given to another engine as the option `prefill_cut`, it repeats the cut and so the bits.
        `max_prefill_ms_per_step` alone might measure another cut there.
        """
        return self.core.runtime.prefill_cut.steps

    def report(self) -> EngineReport:
        """Budget, kernels, ladder, captures and counters; print it."""
        return make_report(self.config, self.memory, self.core.runtime, self.scheduler)

    def stats(self) -> dict[str, Any]:
        """Counters and acceptance of drafts since the engine opened; a copy.

        acceptance  `Acceptance.as_dict()` of all requests: tokens a step, rates by position
        gate        the draft length in use; None without a gate
        kv          blocks of the pool: `blocks` in all, `vacant` ones, `idle` ones that sessions or
                    cached prefixes keep, and `session_blocks`, how many may be idle; None: any
                    number
        counters    tokens, replays by graph, pauses, discarded tokens, the gate's decisions, ...

        With some drafters it waits for the device, which holds a counter.
        """
        core = self.core
        return statistics(core.scheduler, self.acceptance, core.gate, core.drafter)

    def close(self) -> None:
        """Free graphs, then their pool, buffers, cache and weights. Open requests are cancelled.

        Descriptions and counters can still be read: `stats`, `report`, `numerics_id`, `last_step`,
        `acceptance`, the recorder. Calls that need the device, submit or step raise ValueError. May
        be called again.
        """
        self.core.close()
        self._loaded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
