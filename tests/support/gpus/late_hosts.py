"""What a late host costs the device: gaps between steps, their tail, and grammars of one row.

    python tests/support/gpus/late_hosts.py --out late.jsonl
    python tests/support/gpus/late_hosts.py --cases gaps --shape tiny --device cpu

    gaps      one row; the host idle, or busy with 3 ms of Python at random and a garbage collector
              that has cycles to collect; one step a launch and 16
    sleeps    eight rows, whose host sleeps 5 ms at random, or never; one step a launch and 16
    grammars  eight rows: none with a JSON schema, one that the device follows, one that the host
              follows
    objects   one row that writes a JSON object of 20 fields, whose schema the host or the device
              follows, with jump-forward too

Times are those of CUDA events around each launch, so a CPU gives the host's. Random weights: what a
schema asks for is written, its values are noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from engines.churn import write_tokenizer
from graphengine import Engine, JumpForward, SamplingParams, StructuredOutputsParams
from graphengine.buckets import ReplayTimer
from graphengine.observe.environment import environment
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.benchmark.stored_shape import stored_shape

FIELDS = 20
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        f"measured_field_{index}": {"enum": ["low", "medium", "high"]}
        if index % 2
        else {"type": "integer", "minimum": 0, "maximum": 999}
        for index in range(FIELDS)
    },
    "required": [f"measured_field_{index}" for index in range(FIELDS)],
    "additionalProperties": False,
}
BURN_S, SLEEP_S, CHANCE = 0.003, 0.005, 0.05
POOL_MIB = 64
# Beyond this many launches the oldest events are used again.
_PAIRS = 20_000
# The first steps still fill the pipeline, the last ones are decided on the host.
_ENDS = 40
_NEIGHBOURS = 32

Disturb = Callable[[random.Random], None]


def leave_alone(dice: random.Random) -> None:
    """An idle host."""


def burn(dice: random.Random) -> None:
    """A busy host: cycles for the garbage collector, and at times 3 ms of Python."""
    for _ in range(20):
        cycle: list[Any] = [0]
        cycle.append(cycle)
    if dice.random() < CHANCE:
        until = time.perf_counter() + BURN_S
        while time.perf_counter() < until:
            pass


def sleep(dice: random.Random) -> None:
    """A host that is away for 5 ms at random."""
    if dice.random() < CHANCE:
        time.sleep(SLEEP_S)


class Timeline(ReplayTimer):
    """Events of all launches, kept until the run has ended."""

    def of_launches(self, launches: int) -> tuple[list[float], list[float]]:
        """Microseconds of each launch but the first, and of the gap before it."""
        torch.cuda.synchronize()
        took = [self.microseconds(pair) for pair in range(1, launches)]
        waited = [
            1e3 * self._events[2 * pair - 1].elapsed_time(self._events[2 * pair])
            for pair in range(1, launches)
        ]
        return took, waited


@contextmanager
def timed(engine: Engine) -> Iterator[Callable[[], tuple[list[float], list[float]]]]:
    """Record the launches of the block; its value gives their times and gaps afterwards."""
    recorder = engine.recorder
    recorder.clear()
    recorder.start(capacity=_PAIRS)
    stream = recorder._stream
    timeline = None if stream is None else Timeline(stream, _PAIRS)
    recorder._timer, recorder._timed = timeline, 0

    def times() -> tuple[list[float], list[float]]:
        records = recorder.replays()
        if timeline is not None:
            return timeline.of_launches(recorder._timed)
        began, ended = records["replay"] / 1e3, records["launched"] / 1e3
        waited = (began[1:] - ended[:-1]).tolist()
        return (ended - began)[1:].tolist(), waited

    yield times
    recorder.stop()
    recorder._timer = None


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    ranks = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    found = {name: ordered[int(rank * (len(ordered) - 1))] for name, rank in ranks.items()}
    return {name: round(value, 3) for name, value in (found | {"max": ordered[-1]}).items()}


def unevenness(values: Sequence[float]) -> dict[str, float]:
    """Percentiles of each value divided by the median of those around it: steps become longer with
    the context, which is no unevenness.
    """
    around = [
        statistics.median(values[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1])
        for place in range(len(values))
    ]
    return percentiles([value / median for value, median in zip(values, around, strict=True)])


def warm(engine: Engine, rows: int) -> None:
    """Decode until clocks and caches are warm."""
    for row in range(rows):
        engine.submit([*range(5, 45 + row)], plain(200))
    while engine.busy:
        engine.step()


def run(
    engine: Engine, requests: Sequence[SamplingParams], disturb: Disturb, *, timeout: float | None
) -> dict[str, Any]:
    """Decode these requests to their ends: the device's steps and gaps, and tokens a second."""
    dice = random.Random(3)
    gc.collect()
    gc.freeze()
    with timed(engine) as times:
        made = [engine.submit([*range(5, 45 + row)], params) for row, params in enumerate(requests)]
        begun = time.perf_counter()
        while engine.busy:
            engine.step(timeout=timeout)
            disturb(dice)
        seconds = time.perf_counter() - begun
        records = engine.recorder.replays()["steps"]
        took, waited = times()
    gc.unfreeze()
    # A launch of several steps has a record for each; on a CPU each step is a launch.
    steps = [*_launches(records.tolist())] if len(took) < len(records) - 1 else [1] * len(records)
    ends = -(-_ENDS // max(steps))
    triples = [*zip(took, waited, steps[1:], strict=False)]
    ends = min(ends, len(triples) // 4)
    triples = triples[ends : len(triples) - ends]
    each_step = [(t + w) / n for t, w, n in triples]
    counts = [len(each.result().token_ids) for each in made]
    return {
        "step_us": percentiles(each_step),
        "unevenness": unevenness(each_step),
        "inside_us": round(statistics.median(t / n for t, _, n in triples), 3),
        "gap_us": percentiles([w for _, w, _ in triples]),
        "launches": len(triples),
        "tokens": counts,
        "tokens_per_s": round(sum(counts) / seconds, 1),
        "jumped": engine.counters.get("jumped_tokens"),
    }


def _launches(steps: Sequence[int]) -> Iterator[int]:
    """Steps of each launch, from the steps that each record says its launch has."""
    place = 0
    while place < len(steps):
        yield steps[place]
        place += steps[place]


@contextmanager
def opened(shape: str, device: str, **options: Any) -> Iterator[Engine]:
    """An engine of a shape with random weights and a byte-level tokenizer."""
    with stored_shape(Subject.of_shape(shape)) as subject:
        assert subject.checkpoint is not None
        write_tokenizer(subject.checkpoint, subject.model.vocab_size, eos=0)
        config = subject.checkpoint / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 0}))
        most = subject.model.max_positions
        sizes = {"max_seq_len": min(4096, most), "prefill_buckets": (64,)}
        given = {"device": device, "dtype": "bfloat16", **sizes, **options}
        engine, _ = build_engine(subject, given)
        with engine:
            yield engine
    gc.collect()


def plain(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def gaps(shape: str, device: str, tokens: int) -> Iterator[dict[str, Any]]:
    for steps in (1, 16):
        with opened(shape, device, max_batch=1, steps_per_launch=steps) as engine:
            for disturb in (leave_alone, burn):
                warm(engine, 1)
                found = run(engine, [plain(tokens)], disturb, timeout=None)
                yield {"steps_per_launch": steps, "host": disturb.__name__, **found}


def sleeps(shape: str, device: str, tokens: int) -> Iterator[dict[str, Any]]:
    for steps in (1, 16):
        with opened(shape, device, max_batch=8, steps_per_launch=steps) as engine:
            warm(engine, 8)
            for disturb in (leave_alone, sleep):
                found = run(engine, [plain(tokens)] * 8, disturb, timeout=0)
                yield {"steps_per_launch": steps, "host": disturb.__name__, **found}


def with_schema(tokens: int) -> SamplingParams:
    asked = StructuredOutputsParams(json=dict(SCHEMA), disable_any_whitespace=True)
    return SamplingParams(temperature=1, seed=5, max_tokens=tokens, structured_outputs=asked)


def followed(params: SamplingParams, engine: Engine) -> str:
    """Who follows this request's grammar: "device" or "host"; the request is cancelled."""
    request = engine.submit([5, 6, 7], params)
    request.cancel()
    while engine.busy:
        engine.step()
    return str(request.grammar)


def grammars(shape: str, device: str, tokens: int) -> Iterator[dict[str, Any]]:
    for pool in (0, POOL_MIB):
        with opened(shape, device, max_batch=8, grammar_pool_mib=pool) as engine:
            # A long string, so that the row with a schema lasts as long as the others.
            asked = StructuredOutputsParams(regex=f"[a-z ]{{{tokens}}}")
            guided = SamplingParams(temperature=0, max_tokens=tokens, structured_outputs=asked)
            warm(engine, 8)
            for rows in ([plain(tokens)] * 8, [guided, *[plain(tokens)] * 7]):
                follows = followed(rows[0], engine) if rows[0] is guided else None
                found = run(engine, rows, leave_alone, timeout=None)
                yield {"pool_mib": pool, "follows": follows, **found}


def objects(shape: str, device: str, tokens: int) -> Iterator[dict[str, Any]]:
    jumps = {"speculative": JumpForward(k=8)}
    for pool, drafts in ((0, {}), (POOL_MIB, {}), (POOL_MIB, jumps)):
        with opened(shape, device, max_batch=1, grammar_pool_mib=pool, **drafts) as engine:
            params = with_schema(tokens)
            begun = time.perf_counter()
            follows = followed(params, engine)
            cold = time.perf_counter() - begun
            begun = time.perf_counter()
            followed(params, engine)
            cached = time.perf_counter() - begun
            found = run(engine, [params], leave_alone, timeout=None)
            compile_s = {"cold_s": round(cold, 3), "cached_s": round(cached, 4)}
            yield {"pool_mib": pool, "follows": follows, **compile_s, **found}


CASES: Mapping[str, tuple[Callable[[str, str, int], Iterator[dict[str, Any]]], str, int]] = {
    "gaps": (gaps, "llama-1b", 3800),
    "sleeps": (sleeps, "llama-8b", 1000),
    "grammars": (grammars, "llama-8b", 600),
    "objects": (objects, "llama-8b", 1000),
}
"""By name: what measures it, of which shape, and tokens of a request."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--shape", help="instead of each case's own")
    parser.add_argument("--tokens", type=int, help="of each request, instead of each case's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each")
    options = parser.parse_args(arguments)
    for name in options.cases:
        case, shape, tokens = CASES[name]
        shape = options.shape or shape
        for found in case(shape, options.device, options.tokens or tokens):
            facts = {"case": name, "shape": shape, **found}
            line = json.dumps(facts | {"environment": environment(options.device)})
            print(json.dumps(facts), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
