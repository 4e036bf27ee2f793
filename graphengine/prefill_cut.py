"""Where prompts are cut into chunks, of which a step feeds one. Pure Python: no tensor, no device.

Products of another number of lanes round in other places, so a token's bits depend on its chunk.
They must not depend on who else runs. So the cut is a function of the position alone, and is fixed
when the engine opens: each chunk ends at the next absolute multiple of a size that holds from some
position on, or at the prompt's end, where the smallest bucket that holds the rest serves it. A
prompt whose first tokens have KV already begins in the middle of a chunk and ends that chunk at the
same place, so from there on it is cut like the whole prompt.

`max_prefill_ms_per_step` bounds the time of a chunk, and that grows with the tokens before it: the
products take as long after any context, and attention reads each earlier token once more. So the
engine times each bucket after a few contexts, takes times in between to be linear, and cuts at each
position by the largest bucket within the bound (`cut_within`). This also costs time where nobody
else decodes: a chunk that waits for nobody would have to be larger, and would have other bits.
Times differ from run to run, and the cut with them. It is part of `numerics_id`, and
`EngineConfig.prefill_cut` asks for a known one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

from graphengine.checks import INT32_MAX, is_int

ChunkTimes = Mapping[int, Sequence[tuple[int, float]]]
"""By bucket (start, milliseconds): of a chunk that begins there, starts ascending from 0."""

HEADROOM = 1.05
"""What a gap may grow beyond the time of a chunk's replay, as measured alone: the decode step after
it finds other data in the caches, and clocks vary."""


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """Chunks end at multiples of `tokens`, for chunks that begin at `position` or later, until the
    next of the `steps` (position, tokens).

    ValueError unless positions ascend from 0, each of them a multiple of the tokens before it.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = self.steps
        begins = bool(steps) and steps[0][0] == 0 and all(tokens >= 1 for _, tokens in steps)
        if not begins or max(map(max, steps)) > INT32_MAX:
            raise ValueError(
                f"prefill_cut={steps} must begin at position 0, with 1 to {INT32_MAX} tokens a "
                f"chunk and no greater positions"
            )
        for (before, tokens), (position, _) in pairwise(steps):
            if position <= before or position % tokens:
                raise ValueError(
                    f"prefill_cut={steps} must change at ascending multiples of the tokens before: "
                    f"{position} is no multiple of {tokens} after {before}"
                )

    @classmethod
    def read(cls, value: object) -> Self:
        """From pairs of integers in tuples or lists. ValueError for anything else."""
        pairs: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
        if not all(
            isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_int, pair))
            for pair in pairs
        ):
            raise ValueError(
                f"prefill_cut={value!r} must be pairs (position, tokens) of integers, such as "
                f"((0, 1024), (8192, 512))"
            )
        return cls(tuple((int(position), int(tokens)) for position, tokens in pairs))

    def end(self, start: int, prompt_len: int) -> int:
        """Where the chunk of a prompt that begins at `start` ends."""
        last = bisect_right(self.steps, start, key=lambda step: step[0]) - 1
        tokens = self.steps[last][1]
        return min((start // tokens + 1) * tokens, prompt_len)

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """ValueError for a chunk size that is none of the buckets."""
        for position, tokens in self.steps:
            if tokens not in sizes:
                raise ValueError(
                    f"prefill_cut={self.steps} has chunks of {tokens} tokens from position "
                    f"{position} on, the engine buckets of {', '.join(map(str, sizes))}"
                )

    def __str__(self) -> str:
        return ", ".join(f"{tokens} from {position} on" for position, tokens in self.steps)


def chunk_starts(tokens: int, longest: int) -> list[int]:
    """Where chunks of a bucket are timed: without a context, before the end of the `longest`
    prompt, and between. A chunk that begins later has fewer tokens, and reads no more.
    """
    last = max(0, longest - tokens)
    return sorted({0, last // 2, last})


def measure_chunks(
    chunk_ms: Callable[[int, int], float], sizes: Sequence[int], *, longest: int, bound: float
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Times of chunks of the ascending `sizes`, as far as they can be within `bound` milliseconds.

    chunk_ms(tokens, start)  milliseconds of a chunk of this bucket that begins at `start`
    longest                  tokens of the longest prompt

    What takes too long is measured once: neither longer contexts nor larger buckets are then
    needed, and the times of large chunks after long contexts would be seconds.
    """
    times: dict[int, tuple[tuple[int, float], ...]] = {}
    for tokens in sizes:
        points: list[tuple[int, float]] = []
        for start in chunk_starts(tokens, longest):
            points.append((start, chunk_ms(tokens, start)))
            if points[-1][1] * HEADROOM > bound:
                break
        times[tokens] = tuple(points)
        if points[0][1] * HEADROOM > bound:
            break
    return times


def cut_within(times: ChunkTimes, *, longest: int, bound: float) -> PrefillCut:
    """Each chunk of the largest bucket that takes at most `bound` milliseconds where it begins, for
    prompts of at most `longest` tokens.

    Measured times may fall where true ones cannot. So a chunk counts as slow as a smaller one, and
    as one after fewer tokens. ValueError, with the numbers, where the smallest takes too long.
    """
    sizes = sorted(times)
    rising = {tokens: _rising(times[tokens]) for tokens in sizes}
    steps: list[tuple[int, int]] = []
    position = 0
    while position < longest:
        fitting = 0
        for tokens in sizes:
            if _at(rising[tokens], position) * HEADROOM > bound:
                break
            fitting = tokens
        if not fitting:
            took = _at(rising[sizes[0]], position)
            raise ValueError(
                f"max_prefill_ms_per_step={bound:g} is too short: a chunk of {sizes[0]} tokens, "
                f"the smallest of prefill_buckets, takes {took:.3g} ms after {position} of up to "
                f"{longest} tokens, and counts {HEADROOM:g} times"
            )
        if not steps or steps[-1][1] != fitting:
            steps.append((position, fitting))
        position = (position // fitting + 1) * fitting
    return PrefillCut(tuple(steps))


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points, each at least as high as those before it."""
    starts, times = zip(*points, strict=True)
    return list(zip(starts, accumulate(times, max), strict=True))


def _at(points: Sequence[tuple[int, float]], position: int) -> float:
    """On the line through the points; after the last one as high as that."""
    after = bisect_right(points, position, key=lambda point: point[0])
    (start, low), (end, high) = points[after - 1], points[min(after, len(points) - 1)]
    share = (position - start) / (end - start) if end > start else 0.0
    return low + share * (high - low)
