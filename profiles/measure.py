"""Latencies of one engine, through its public interface.

A step gives a row one token, or up to K + 1 with K drafts; they reach the caller at once. So gaps
are those between steps, and rates are told by the step and by the token.

Times are the host's, as tokens reached the caller. Python's garbage collector is left as it is:
whoever embeds an engine will have it on.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from graphengine import Engine, Request, Result, SamplingParams, Timings
from graphengine.profiles.eager import check_against_eager, require_equal
from graphengine.profiles.percentiles import percentiles

SAMPLERS = ("fast", "full")
CHECKED_TOKENS = 16
ADMITTED_NEW_TOKENS = 2
TTFT_REPEATS = 4
"""Times the number of runs: a single token is quickly had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What each live row of an engine does.

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
        """Of each row's request; end-of-sequence tokens do not end it."""
        tokens = self.new_tokens if max_tokens is None else max_tokens
        if self.sampler == "fast":
            return [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)] * self.live
        return [
            SamplingParams(temperature=1.0, top_k=50, seed=row, max_tokens=tokens, ignore_eos=True)
            for row in range(self.live)
        ]


def random_prompt(vocab_size: int, tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(vocab_size) for _ in range(tokens)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """The steps of one run in which every row decodes and no prompt is fed; in seconds.

    gaps             between a request's steps, of all requests
    steps, seconds   how many steps there were, and how long they took together
    tokens           what all but the last of them gave: that one may be cut at a request's end
    longest_outside  the longest gap between two steps of a request outside of these steps
    """

    gaps: list[float]
    steps: int
    seconds: float
    tokens: int
    longest_outside: float | None

    @property
    def tokens_per_step(self) -> float:
        """Of all requests together."""
        return self.tokens / (self.steps - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step * self.steps / self.seconds


def moments(timings: Timings) -> list[float]:
    """When each of a request's steps reached the host; the tokens of one came at once."""
    return list(dict.fromkeys(timings.tokens))


def steady(results: Sequence[Result]) -> Steady:
    """From the second step of the last request to get a token, to the first request's last step.

    ValueError if fewer than two steps are in between: `new_tokens` is too small for the batch.
    """
    times = [moments(result.timings) for result in results]
    latest = max(times, key=lambda steps: steps[0])
    # A single step, of a request that drafts ended at once, is no interval.
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


def decode(engine: Engine, work: Work, expected: Sequence[Result] | None = None) -> dict[str, Any]:
    """Check the tokens, then run `work` once to warm up and `work.runs` times; milliseconds.

    `tokens_per_step` are one row's; `tokens_per_s` those of all rows. RuntimeError if graphs and
    eager steps, two runs, or a prompt alone and in its batch differ, or what is `expected`.
    """
    if work.prompt_tokens + work.new_tokens > engine.memory.max_seq_len:
        raise ValueError(f"{work} does not fit into max_seq_len={engine.memory.max_seq_len}")
    prompts, params = work.prompts(engine.model.config.vocab_size), work.params()
    checked = min(CHECKED_TOKENS, work.new_tokens)
    equal = check_against_eager(engine, prompts, work.params(checked))
    warm: list[Result] = engine.generate(prompts, params)
    for row, pair in enumerate(zip(expected or (), warm, strict=expected is not None)):
        require_equal(pair, f"prompt {row} of another engine, expected and here:")
    measured: list[list[Result]] = [engine.generate(prompts, params) for _ in range(work.runs)]
    alone: Result = engine.generate(prompts[0], params[0])
    for row, of_prompt in enumerate(zip(warm, *measured, strict=True)):
        require_equal(of_prompt, f"prompt {row}:")
    require_equal([warm[0], alone], "the first prompt in its batch and alone:")

    runs = [steady(results) for results in measured]
    outside = [run.longest_outside for run in runs if run.longest_outside is not None]
    gaps = [1e3 * gap for run in runs for gap in run.gaps]
    return {
        "ms_per_step": median(1e3 * run.seconds / run.steps for run in runs),
        "tokens_per_step": fmean(run.tokens_per_step for run in runs) / work.live,
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "itl_ms": percentiles(gaps, independent=sum(run.steps for run in runs)),
        "itl_admission_ms": 1e3 * max(outside) if outside else None,
        "checked": {
            "eager_tokens": equal,
            "equal_runs": 1 + work.runs,
            "alone": True,
            "expected_tokens": sum(len(result.token_ids) for result in expected or ()),
        },
    }


def time_to_first_token(
    engine: Engine, prompt_tokens: Sequence[int], *, runs: int
) -> dict[str, float]:
    """Median milliseconds of one request on the idle engine, by the length of its prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    found = {}
    for tokens in prompt_tokens:
        prompt = random_prompt(engine.model.config.vocab_size, tokens, seed=tokens)
        results: list[Result] = [
            engine.generate(prompt, params) for _ in range(1 + TTFT_REPEATS * runs)
        ]
        require_equal(results, f"the first token behind {tokens}:")
        # The first was to warm up.
        found[str(tokens)] = median(
            1e3 * (result.timings.tokens[0] - result.timings.submitted) for result in results[1:]
        )
    return found


def long_run(engine: Engine, work: Work, tokens: int) -> dict[str, Any]:
    """At least `tokens` gaps between steps, of one request after another; milliseconds.

    `collections` counts what Python's collector did meanwhile, by generation.
    """
    prompt = work.prompts(engine.model.config.vocab_size)[0]
    params = work.params()[0]
    gaps: list[float] = []
    before = [generation["collections"] for generation in gc.get_stats()]
    requests = 0
    while len(gaps) < tokens:
        steps = moments(engine.generate(prompt, params).timings)
        gaps += [1e3 * (after - before) for before, after in pairwise(steps)]
        requests += 1
    after = [generation["collections"] for generation in gc.get_stats()]
    found = percentiles(gaps)
    return {
        "itl_ms": found,
        "p99.9/p50": found["p99.9"] / found["p50"],
        "requests": requests,
        "collector_on": gc.isenabled(),
        "collections": [now - then for then, now in zip(before, after, strict=True)],
    }


@dataclass(kw_only=True, slots=True)
class Waits:
    """What an engine spent in its mailbox; `last` are the arguments of the latest wait."""

    seconds: float = 0.0
    calls: int = 0
    last: tuple[tuple[Any, ...], dict[str, Any]] | None = None


@contextmanager
def timed_waits(engine: Engine) -> Iterator[Waits]:
    """Inside, the engine's waits for its mailbox are timed."""
    mailbox, waits, clock = engine.mailbox, Waits(), time.perf_counter
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


def host_time(engine: Engine, work: Work) -> dict[str, float]:
    """Median microseconds of a steady step on the host: its own work, and its polling.

    host_us       `step()` without its wait, plus `read_us`
    read_us       a wait whose record is there already: the part of a wait that is no polling
    poll_us       the wait without that part
    host_max_us   the longest `host_us` among those steps

    On a CPU device the step itself runs inside `step()`, so there the figures mean little.
    """
    prompts = work.prompts(engine.model.config.vocab_size)
    requests = [
        engine.submit(prompt, params) for prompt, params in zip(prompts, work.params(), strict=True)
    ]
    clock, outside, inside = time.perf_counter, [], []
    with timed_waits(engine) as waits:
        while engine.busy:
            waited, started = waits.seconds, clock()
            events = engine.step()
            took, polled = clock() - started, waits.seconds - waited
            if _is_steady(requests, len(events)):
                outside.append(1e6 * (took - polled))
                inside.append(1e6 * polled)
    if not waits.calls:
        raise RuntimeError("the engine did not wait through mailbox.wait: it cannot be timed there")
    if not outside:
        raise ValueError(f"{work} has no steady step")
    read = min(_read_us(engine, waits), min(inside))
    return {
        "host_us": median(outside) + read,
        "read_us": read,
        "poll_us": median(inside) - read,
        "host_max_us": max(outside) + read,
    }


def _is_steady(requests: Sequence[Request], events: int) -> bool:
    """Whether it is a step of every request: not its first two, nor its last one."""
    if events != len(requests) or any(request.finished for request in requests):
        return False
    # Told at once: whatever the host does between two steps, the next one's wait is shorter by it.
    times = [request.timings.tokens for request in requests]
    return all(len(tokens) > 2 and tokens[-1] > tokens[1] for tokens in times)


def _read_us(engine: Engine, waits: Waits, repeats: int = 200) -> float:
    """The last record again, which is still in the ring; on an idle engine."""
    assert waits.last is not None, f"{waits=}"
    arguments, options = waits.last
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        engine.mailbox.wait(*arguments, **options)
        found.append(1e6 * (time.perf_counter() - started))
    return median(found)


def admission(
    engine: Engine, *, decoding: int, prompt_tokens: int, admitted_tokens: int, runs: int
) -> dict[str, Any]:
    """While `decoding` requests decode, one with a long prompt comes: what it does to their gaps.

    Milliseconds: the longest gap of theirs from its submission to its second token, over all runs
    (the first run warms up); their median gap meanwhile; and its time to first token.
    """
    vocabulary = engine.model.config.vocab_size
    room = engine.memory.max_seq_len - prompt_tokens
    endless = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=ADMITTED_NEW_TOKENS, ignore_eos=True)
    longest, undisturbed, first = [], [], []
    for _ in range(1 + runs):
        decoders = [
            engine.submit(random_prompt(vocabulary, prompt_tokens, row), endless)
            for row in range(decoding)
        ]
        while not all(len(request.token_ids) >= 8 for request in decoders):
            engine.step()
        newcomer = engine.submit(random_prompt(vocabulary, admitted_tokens, decoding), short)
        while not newcomer.finished:
            engine.step()
        if any(request.finished for request in decoders):
            raise ValueError(
                f"max_seq_len={engine.memory.max_seq_len} leaves {room} new tokens: the requests "
                f"end before a prompt of {admitted_tokens} tokens is in"
            )
        for request in decoders:
            request.cancel()
        while engine.busy:
            engine.step()
        since, until = newcomer.timings.submitted, newcomer.timings.tokens[-1]
        gaps = [
            (1e3 * (after - before), before <= until and after >= since)
            for request in decoders
            for before, after in pairwise(moments(request.timings))
        ]
        longest.append(max(gap for gap, disturbed in gaps if disturbed))
        undisturbed.append(median(gap for gap, disturbed in gaps if not disturbed))
        first.append(1e3 * (newcomer.timings.tokens[0] - since))
    return {
        "decoding": decoding,
        "prompt_tokens": prompt_tokens,
        "admitted_tokens": admitted_tokens,
        "runs": runs,
        "longest_gap_ms": max(longest[1:]),
        "longest_gaps_ms": longest[1:],
        "undisturbed_gap_ms": median(undisturbed[1:]),
        "ttft_ms": median(first[1:]),
    }
