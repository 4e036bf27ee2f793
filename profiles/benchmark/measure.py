"""Latencies of one engine, through its public interface.

A step gives a row one token, or up to K + 1 with K drafts; they reach the caller together. So gaps
are measured between steps, and rates are given by step and by token.

Times are host times at which tokens reached the caller. Python's garbage collector is left as it
is, as a program that embeds an engine will have it on. In a long run it also has work to do.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from graphengine import Engine, Request, Result, SamplingParams, Timings
from graphengine.profiles.benchmark.eager import (
    both_ways,
    check_against_eager,
    check_run,
    drain,
    require_begins,
    require_equal,
    with_launches,
)
from graphengine.profiles.progress import SILENT, Progress
from graphengine.profiles.tables.percentiles import percentiles

Run = Callable[[Sequence[SamplingParams]], list[Result]]
"""Runs the requests of a work's rows to their end; with fewer parameters, of its first rows."""

SAMPLERS = ("fast", "full")
CHECKED_TOKENS = 64
"""New tokens of each request that eager steps must also give: at 5 to 30 ms a step they take a
second or two."""
CHECKED_FIRST_TOKENS = 4
"""New tokens checked by eager steps after each prompt whose first token is timed: decoding reads
the prompt's KV."""
ADMITTED_NEW_TOKENS = 2
DECODING_TOKENS = 8
"""New tokens that decoding requests have before another prompt is admitted."""
KEPT_TOKENS = 256
KEPT_OBJECTS = 16
"""The consumer of a long run keeps notes of `KEPT_TOKENS` steps, each of `KEPT_OBJECTS` containers.
So the youngest generation is collected some 23 times in 1,000 tokens and the next one twice, and
both show in a p99.9; a quarter more often where the engine collects early."""
COLLECTOR_THRESHOLDS = (700, 10, 10)
"""CPython's defaults, at least up to 3.12."""
TTFT_REPEATS = 4
"""First-token runs for each run: a single token takes little time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of each live row of an engine.

    sampler  "fast": greedy; "full": temperature 1 and top-k 50, each request with its seed
    """

    live: int
    prompt_tokens: int
    new_tokens: int
    runs: int
    sampler: str = "fast"

    def __post_init__(self) -> None:
        for name in ("live", "prompt_tokens", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.new_tokens < 4:
            raise ValueError(f"new_tokens={self.new_tokens}: a steady step needs at least 4")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler={self.sampler!r}; known: {', '.join(SAMPLERS)}")

    def prompts(self, vocab_size: int) -> list[list[int]]:
        return [random_prompt(vocab_size, self.prompt_tokens, row) for row in range(self.live)]

    def params(self, max_tokens: int | None = None) -> list[SamplingParams]:
        """Parameters of each row's request; end-of-sequence tokens do not end it."""
        tokens = self.new_tokens if max_tokens is None else max_tokens
        return [sampling(self.sampler, tokens, seed=row) for row in range(self.live)]


def sampling(sampler: str, max_tokens: int, seed: int) -> SamplingParams:
    """A request's parameters for one of `SAMPLERS`; end-of-sequence tokens do not end it."""
    if sampler == "fast":
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(
        temperature=1.0, top_k=50, seed=seed, max_tokens=max_tokens, ignore_eos=True
    )


def random_prompt(vocab_size: int, tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(vocab_size) for _ in range(tokens)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """The steps of one run in which every row decodes and no prompt is fed; in seconds.

    gaps             gaps between a request's steps, of all requests
    steps, seconds   number of steps, and their total time
    tokens           tokens of all steps but the last, which a request's end may cut
    longest_outside  the longest gap between two steps of a request outside these steps
    """

    gaps: list[float]
    steps: int
    seconds: float
    tokens: int
    longest_outside: float | None

    @property
    def tokens_per_step(self) -> float:
        """Tokens a step of all requests together."""
        return self.tokens / (self.steps - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step * self.steps / self.seconds


def moments(timings: Timings) -> list[float]:
    """When each of a request's steps reached the host; the tokens of a step came together."""
    return list(dict.fromkeys(timings.tokens))


def steady(results: Sequence[Result]) -> Steady:
    """The steps after the second of the request whose first token came last, until a request ends.

    ValueError if fewer than two steps are in between: `new_tokens` is too small for the batch.
    """
    times = [moments(result.timings) for result in results]
    latest = max(times, key=lambda steps: steps[0])
    # A request that drafts ended in a single step has no interval.
    begin, end = latest[min(1, len(latest) - 1)], min(steps[-1] for steps in times)
    steps = sum(begin < moment <= end for moment in latest)
    if steps < 2:
        raise ValueError(
            f"{len(results[0].token_ids)} new tokens a request leave {steps} steps in which all "
            f"{len(times)} requests decode: ask for more new tokens"
        )
    inside: list[float] = []
    outside: list[float] = []
    for request in times:
        for before, after in pairwise(request):
            (inside if begin <= before and after <= end else outside).append(after - before)
    return Steady(
        gaps=inside,
        steps=steps,
        seconds=end - begin,
        tokens=sum(begin < moment < end for result in results for moment in result.timings.tokens),
        longest_outside=max(outside, default=None),
    )


def run_of(engine: Engine, work: Work) -> Run:
    """Runs the prompts of `work` from their first token on."""
    prompts = work.prompts(engine.model.config.vocab_size)

    def run(params: Sequence[SamplingParams]) -> list[Result]:
        results: list[Result] = engine.generate(prompts[: len(params)], params)
        return results

    return run


def decode(
    engine: Engine,
    work: Work,
    expected: Sequence[Result] | None = None,
    *,
    run: Run | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Check the tokens, then run `work` once to warm up and `work.runs` times; milliseconds.

    `run` runs the requests; None: `run_of` does.

    `tokens_per_step` is for one row, `tokens_per_s` for all rows. RuntimeError if tokens differ: of
    graphs and eager steps, of two runs, of a prompt alone and in its batch, or from `expected`.

    checked  `eager_tokens` of the `tokens` of a run are also those of eager steps: the first
             `CHECKED_TOKENS` of each request; all tokens of `equal_runs` runs, and of the first
             prompt `alone`, are equal, as are `expected_tokens` of another engine
    """
    if work.prompt_tokens + work.new_tokens > engine.memory.max_seq_len:
        raise ValueError(f"{work} does not fit into max_seq_len={engine.memory.max_seq_len}")
    run, params = run or run_of(engine, work), work.params()
    checked = min(CHECKED_TOKENS, work.new_tokens)
    said = f"{work.live} live of {engine.config.max_batch}"
    progress.doing(f"{said}: checking tokens by eager steps")
    eager = check_run(engine, partial(run, work.params(checked)))
    progress.doing(f"{said}: warming up")
    warm = run(params)
    for row, (result, beginning) in enumerate(zip(warm, eager, strict=True)):
        require_begins(result, beginning, f"prompt {row}, the eager step and a whole run:")
    for row, pair in enumerate(zip(expected or (), warm, strict=expected is not None)):
        require_equal(pair, f"prompt {row} of another engine, expected and here:")
    measured = []
    for number in range(1, 1 + work.runs):
        progress.doing(f"{said}: run {number} of {work.runs}")
        measured.append(run(params))
    (alone,) = run(params[:1])
    for row, of_prompt in enumerate(zip(warm, *measured, strict=True)):
        require_equal(of_prompt, f"prompt {row}:")
    require_equal([warm[0], alone], "the first prompt in its batch and alone:")

    runs = [steady(results) for results in measured]
    outside = [each.longest_outside for each in runs if each.longest_outside is not None]
    gaps = [1e3 * gap for each in runs for gap in each.gaps]
    return {
        "ms_per_step": median(1e3 * each.seconds / each.steps for each in runs),
        "tokens_per_step": fmean(each.tokens_per_step for each in runs) / work.live,
        "tokens_per_s": median(each.tokens_per_s for each in runs),
        "itl_ms": percentiles(gaps, independent=sum(each.steps for each in runs)),
        "itl_admission_ms": 1e3 * max(outside) if outside else None,
        "checked": {
            "eager_tokens": sum(len(result.token_ids) for result in eager),
            "tokens": sum(len(result.token_ids) for result in warm),
            "equal_runs": 1 + work.runs,
            "alone": True,
            "expected_tokens": sum(len(result.token_ids) for result in expected or ()),
        },
    }


def time_to_first_token(
    engine: Engine, prompt_tokens: Sequence[int], *, runs: int, sampler: str = "fast"
) -> tuple[dict[str, float], dict[str, int]]:
    """Median milliseconds of one request on the idle engine, by the length of its prompt.

    Measured from the call to the token in the caller's hands: the check of the prompt's ids is
    included. Also returns how many tokens after each prompt were compared with eager steps: as many
    as the engine holds, up to `CHECKED_FIRST_TOKENS`. RuntimeError if they or two runs differ.
    """
    found, checked, clock = {}, {}, time.perf_counter
    for tokens in prompt_tokens:
        prompt = random_prompt(engine.model.config.vocab_size, tokens, seed=tokens)
        most = min(CHECKED_FIRST_TOKENS, engine.memory.max_seq_len - tokens)
        (eager,) = check_against_eager(engine, [prompt], [sampling(sampler, most, seed=0)])
        params, times = sampling(sampler, 1, seed=0), []
        for _ in range(1 + TTFT_REPEATS * runs):
            started = clock()
            result: Result = engine.generate(prompt, params)
            times.append(1e3 * (result.timings.tokens[0] - started))
            require_begins(eager, result, f"the first token after {tokens}:")
        # The first run was a warm-up.
        found[str(tokens)] = median(times[1:])
        checked[str(tokens)] = len(eager.token_ids)
    return found, checked


def long_run(
    engine: Engine, work: Work, tokens: int, *, kept_objects: int = KEPT_OBJECTS
) -> dict[str, Any]:
    """At least `tokens` gaps between steps, of one request after another; milliseconds.

    An engine's own steps leave Python's collector nothing to free; a host program may. So the
    consumer of the tokens keeps something from each step for a while. With 0 `kept_objects` it
    keeps the event, and the collector hardly runs; else a note of this many containers in a
    reference cycle, which only the collector frees.

    collections  how often the collector ran, by generation, whether the engine or Python called it
    pauses_ms    the longest run of each generation; None if there was none
    """
    prompt = work.prompts(engine.model.config.vocab_size)[0]
    params = work.params()[0]
    gaps: list[float] = []
    requests = 0
    kept: deque[Any] = deque(maxlen=KEPT_TOKENS)
    with collecting() as collector:
        while len(gaps) < tokens:
            request = engine.submit(prompt, params)
            while engine.busy:
                for event in engine.step():
                    kept.append(_note(event.token_ids, kept_objects) if kept_objects else event)
            steps = moments(request.timings)
            gaps += [1e3 * (after - before) for before, after in pairwise(steps)]
            requests += 1
    found = percentiles(gaps)
    return {
        "itl_ms": found,
        "p99.9/p50": found["p99.9"] / found["p50"],
        "requests": requests,
        "collector_on": True,
        "thresholds": list(COLLECTOR_THRESHOLDS),
        "kept_objects": kept_objects,
        "frozen": True,
        "collections": collector.collections,
        "pauses_ms": collector.pauses_ms,
    }


@dataclass(kw_only=True, slots=True)
class Collector:
    """Python's collector by generation: how often it ran, and the longest time it took.

    One of `gc.callbacks`.
    """

    collections: list[int] = field(default_factory=lambda: [0, 0, 0])
    pauses_ms: list[float | None] = field(default_factory=lambda: [None, None, None])
    started: float = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self.started = time.perf_counter()
            return
        took, generation = 1e3 * (time.perf_counter() - self.started), info["generation"]
        self.collections[generation] += 1
        self.pauses_ms[generation] = max(took, self.pauses_ms[generation] or 0.0)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Turn Python's collector on in the block, with `COLLECTOR_THRESHOLDS`, and watch it. Then its
    state is restored, except that a heap frozen by the caller is no longer frozen.

    Existing objects are frozen, as a program with short deadlines does: a full collection would
    traverse 200,000 objects of torch and others in 100 ms. Full collections are rare.
    """
    was_on, thresholds = gc.isenabled(), gc.get_threshold()
    # Start from empty counts, so that the first collection comes at the same place every time.
    gc.collect()
    gc.freeze()
    collector = Collector()
    gc.callbacks.append(collector)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    gc.enable()
    try:
        yield collector
    finally:
        gc.callbacks.remove(collector)
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        if not was_on:
            gc.disable()


def _note(token_ids: Sequence[int], objects: int) -> list[Any]:
    """A list that holds itself and `objects` - 1 other lists: a reference cycle."""
    note: list[Any] = [[token_ids] for _ in range(objects - 1)]
    note.append(note)
    return note


@dataclass(kw_only=True, slots=True)
class Waits:
    """The time an engine spent in its mailbox; `last` has the arguments of the latest wait."""

    seconds: float = 0.0
    calls: int = 0
    last: tuple[tuple[Any, ...], dict[str, Any]] | None = None


@contextmanager
def timed_waits(engine: Engine) -> Iterator[Waits]:
    """Time the engine's waits for its mailbox inside the block."""
    mailbox, waits, clock = engine.runtime.mailbox, Waits(), time.perf_counter
    wait = mailbox.wait

    def timed(*arguments: Any, **options: Any) -> Any:
        started = clock()
        try:
            return wait(*arguments, **options)
        finally:
            waits.seconds += clock() - started
            waits.calls += 1
            waits.last = (arguments, options)

    mailbox.wait = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        del mailbox.wait


class StepTime(NamedTuple):
    """Seconds of a step, and how many of them it spent in its wait."""

    took: float
    waited: float


def host_time(engine: Engine, work: Work) -> dict[str, float]:
    """`host_figures` of one run of `work`.

    On a CPU device the step itself runs inside `step()`, so there the figures mean little.
    """
    prompts = work.prompts(engine.model.config.vocab_size)
    requests = [
        engine.submit(prompt, params) for prompt, params in zip(prompts, work.params(), strict=True)
    ]
    clock, steps = time.perf_counter, []
    with timed_waits(engine) as waits:
        while engine.busy:
            waited, started = waits.seconds, clock()
            events = engine.step()
            step = StepTime(took=clock() - started, waited=waits.seconds - waited)
            if _is_steady(requests, len(events)):
                steps.append(step)
    if not waits.calls:
        raise RuntimeError("the engine did not wait through mailbox.wait: it cannot be timed there")
    if not steps:
        raise ValueError(f"{work} has no steady step")
    return host_figures(steps, _read_seconds(engine, waits))


def host_figures(steps: Sequence[StepTime], read: float) -> dict[str, float]:
    """Median microseconds of a steady step on the host: its own work, and its polling.

    `read` is the seconds of a wait whose record has already arrived; every step's wait includes it.

    host_us       `step()` without its wait, plus `read_us`
    read_us       the part of a wait that is not polling
    poll_us       the wait without that part
    host_max_us   the longest `host_us` among those steps, Python's collector included
    """
    own = [1e6 * (step.took - step.waited) for step in steps]
    waits = [1e6 * step.waited for step in steps]
    read_us = min(1e6 * read, *waits)
    return {
        "host_us": median(own) + read_us,
        "read_us": read_us,
        "poll_us": median(waits) - read_us,
        "host_max_us": max(own) + read_us,
    }


def _is_steady(requests: Sequence[Request], events: int) -> bool:
    """Whether the step was one of every request, and not among its first two or its last."""
    if events != len(requests) or any(request.finished for request in requests):
        return False
    # Written down at once: work between two steps shortens the wait of the next one.
    times = [request.timings.tokens for request in requests]
    return all(len(tokens) > 2 and tokens[-1] > tokens[1] for tokens in times)


def _read_seconds(engine: Engine, waits: Waits, repeats: int = 200) -> float:
    """Read the last record again, which is still in the ring; on an idle engine."""
    assert waits.last is not None, f"{waits=}"
    arguments, options = waits.last
    found, clock = [], time.perf_counter
    for _ in range(repeats):
        started = clock()
        engine.runtime.mailbox.wait(*arguments, **options)
        found.append(clock() - started)
    return median(found)


def waited_us(engine: Engine, work: Work) -> float | None:
    """Microseconds a decode step that the driver's rank waits for the parts of others, on average
    over one run of `work`; None with a single rank, or where nothing counts the wait.
    """
    group = engine.runtime.group
    before = None if group is None else group.waited_s
    if group is None or before is None:
        return None
    prompts = work.prompts(engine.model.config.vocab_size)
    _, launched = with_launches(engine, lambda: engine.generate(prompts, work.params()))
    steps = sum(count for key, count in launched.items() if key.kind == "decode")
    waited = group.waited_s
    assert waited is not None, f"{before=}"
    return 1e6 * (waited - before) / steps


class Admission(NamedTuple):
    """One run of an admission; `since` is when the prompt was submitted."""

    decoders: list[Result]
    newcomer: Result
    since: float

    @property
    def results(self) -> list[Result]:
        return [*self.decoders, self.newcomer]


def admission(engine: Engine, work: Work, *, decoding: int, admitted_tokens: int) -> dict[str, Any]:
    """How a request with a long prompt changes the gaps of `decoding` requests that decode.

    `work` gives their prompts' length, the sampler and the number of runs. Returns milliseconds:
    their longest gap from the newcomer's submission to its second token, over all runs (the first
    run warms up); their median gap outside that time; and its time to first token. RuntimeError if
    eager steps or two runs give other tokens.
    """

    def admit() -> Admission:
        return _admit(engine, work, decoding, admitted_tokens)

    replayed, eager = both_ways(engine, admit)
    runs = [admit() for _ in range(1 + work.runs)]
    results_of = [run.results for run in (eager, replayed, *runs)]
    for row, results in enumerate(zip(*results_of, strict=True)):
        require_equal(results, f"request {row} of {decoding + 1}, eagerly and by graphs:")
    longest, undisturbed, first = [], [], []
    for run in runs[1:]:
        times = [moments(result.timings) for result in run.decoders]
        inside, outside = admission_gaps(times, run.since, run.newcomer.timings.tokens[-1])
        longest.append(1e3 * max(inside))
        undisturbed.append(1e3 * median(outside))
        first.append(1e3 * (run.newcomer.timings.tokens[0] - run.since))
    return {
        "decoding": decoding,
        "prompt_tokens": work.prompt_tokens,
        "admitted_tokens": admitted_tokens,
        "sampler": work.sampler,
        "runs": work.runs,
        "longest_gap_ms": max(longest),
        "longest_gaps_ms": longest,
        "undisturbed_gap_ms": median(undisturbed),
        "ttft_ms": median(first),
        "checked": {
            "eager_tokens": sum(len(result.token_ids) for result in eager.results),
            "tokens": sum(len(result.token_ids) for result in runs[0].results),
            "equal_runs": 1 + work.runs,
        },
    }


def _admit(engine: Engine, work: Work, decoding: int, admitted_tokens: int) -> Admission:
    """One run: the decoding requests are cancelled once the newcomer has its tokens."""
    vocabulary = engine.model.config.vocab_size
    room = engine.memory.max_seq_len - work.prompt_tokens
    decoders = [
        engine.submit(
            random_prompt(vocabulary, work.prompt_tokens, row), sampling(work.sampler, room, row)
        )
        for row in range(decoding)
    ]
    while not all(len(request.token_ids) >= DECODING_TOKENS for request in decoders):
        engine.step()
    prompt = random_prompt(vocabulary, admitted_tokens, decoding)
    params = sampling(work.sampler, ADMITTED_NEW_TOKENS, decoding)
    since = time.perf_counter()
    newcomer = engine.submit(prompt, params)
    while not newcomer.finished:
        engine.step()
    if any(request.finished for request in decoders):
        raise ValueError(
            f"max_seq_len={engine.memory.max_seq_len} leaves {room} new tokens: the requests "
            f"end before a prompt of {admitted_tokens} tokens is in"
        )
    for request in decoders:
        request.cancel()
    drain(engine)
    return Admission([request.result() for request in decoders], newcomer.result(), since)


def admission_gaps(
    decoders: Iterable[Sequence[float]], since: float, until: float
) -> tuple[list[float], list[float]]:
    """Gaps between a request's steps: those that overlap the time from `since` to `until`, and the
    others. ValueError unless there are both.
    """
    inside: list[float] = []
    outside: list[float] = []
    for times in decoders:
        for before, after in pairwise(times):
            disturbed = before < until and after > since
            (inside if disturbed else outside).append(after - before)
    if not inside or not outside:
        raise ValueError(f"{len(inside)} gaps during an admission, {len(outside)} besides")
    return inside, outside
