"""Where prompts are cut into chunks. A step feeds one chunk. Pure Python: no tensor, no device.

A matrix product over another number of tokens rounds differently, so where a prompt is cut changes
its bits. These must not depend on which other requests run. So the cut follows from the position in
the prompt alone, and it is fixed when the engine opens.

A cut is a list of pairs (position, tokens). With (0, 1024), (8192, 512) a chunk that begins before
position 8,192 ends at the next multiple of 1,024, and one that begins there or later at the next
multiple of 512. The last chunk ends with its prompt. Each chunk runs in the smallest bucket that
holds it. Multiples are counted from the prompt's beginning. So a prompt whose first tokens have KV
already, from a session or a shared prefix, is cut at the same places as one that has none. No image
whose tokens see each other is cut: a chunk ends before it, or after it.

`max_prefill_ms_per_step` bounds the time of a chunk. Its matrix products take the same time
anywhere, but attention reads the KV of all tokens before it, so a chunk takes longer the later it
begins. When the engine opens, it times each bucket after contexts of a few lengths, and
interpolates linearly between them. At each position it then cuts by the largest bucket within the
bound (`cut_within`). Smaller chunks feed a prompt more slowly. They are used even when no other
request runs, as larger ones would give other bits.

Times vary from run to run, and the cut with them. It is a part of `numerics_id`, and the option
`EngineConfig.prefill_cut` repeats the cut of an earlier engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

from graphengine.options.checks import INT32_MAX, is_int, shown

ChunkTimes = Mapping[int, Sequence[tuple[int, float]]]
"""For each bucket, pairs (start, milliseconds): the time of a chunk that begins at `start`. Starts
ascend from 0."""

HEADROOM = 1.05
"""Measured times are multiplied by this. A chunk lengthens the gap of other requests by more than
its own time: the decode step after it finds other data in the GPU's caches, and clocks vary."""


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """Where chunks end: `steps` are pairs (position, tokens), in ascending order.

    A chunk that begins at a step's position or later, but before the next step's position, ends at
    the next multiple of the step's tokens.

    ValueError unless the first position is 0, and each other one a multiple of the tokens of the
    step before it: a chunk must end where the next step begins.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0][0] != 0:
            raise self._wrong("must begin with a pair (0, tokens)")
        for position, tokens in self.steps:
            if not 1 <= tokens <= INT32_MAX or position > INT32_MAX:
                raise self._wrong(
                    f"must have tokens from 1 to {INT32_MAX} and positions up to that, not the "
                    f"pair ({position}, {tokens})"
                )
        for (before, tokens), (position, _) in pairwise(self.steps):
            if position <= before:
                raise self._wrong(f"must have ascending positions, not {position} after {before}")
            if position % tokens:
                raise self._wrong(
                    f"must change where a chunk ends: position {position} is no multiple of the "
                    f"{tokens} tokens of the pair before it"
                )

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"prefill_cut={shown(self.steps)} {why}")

    @classmethod
    def read(cls, value: object) -> Self:
        """Read pairs of integers in tuples or lists. ValueError for anything else."""
        pairs: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        for pair in pairs:
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_int, pair))):
                raise ValueError(
                    f"prefill_cut={shown(value)} must be pairs (position, tokens) of integers, "
                    f"such as ((0, 1024), (8192, 512)): {shown(pair)} is none"
                )
        return cls(tuple((int(position), int(tokens)) for position, tokens in pairs))

    @classmethod
    def given(cls, value: object, bound_ms: float | None) -> Self:
        """Read the cut that a config names. ValueError for a bound on a step's time besides."""
        cut = cls.read(value)
        if bound_ms is not None:
            raise ValueError(
                f"prefill_cut={shown(cut.steps)} says where prompts are cut, and "
                f"max_prefill_ms_per_step={bound_ms:g} has that measured: give one of them"
            )
        return cut

    def tokens(self, start: int) -> int:
        """Most tokens of a chunk that begins at `start`."""
        return self.steps[bisect_right(self.steps, start, key=lambda step: step[0]) - 1][1]

    def end(self, start: int, prompt_len: int, whole: Sequence[tuple[int, int]] = ()) -> int:
        """Where the chunk of a prompt that begins at `start` ends.

        whole  positions (first, stop) of spans that are fed in one chunk: a chunk ends before a
               span that would be cut, or after it if it begins with it. A chunk that begins inside
               a span, because earlier tokens have KV already, ends where the chunk of the whole
               span would.
        """
        start = next((first for first, stop in whole if first < start < stop), start)
        end = min(_next_multiple(start, self.tokens(start)), prompt_len)
        for first, stop in whole:
            if first < end < stop:
                return first if start < first else stop
        return end

    def within(self, longest: int, largest: int = INT32_MAX) -> Self:
        """An equivalent cut for prompts of at most `longest` tokens, without steps that change
        nothing there.

        largest  the largest bucket: it replaces larger sizes, which exceed the longest prompt
        """
        (start, first) = self.steps[0]
        kept = [(start, min(first, largest))]
        ends = [*(position for position, _ in self.steps[2:]), longest]
        for (position, tokens), end in zip(self.steps[1:], ends, strict=False):
            if position >= longest:
                break
            before, tokens = kept[-1][1], min(tokens, largest)
            if not _cut_alike(position, min(end, longest), before, tokens, last=end >= longest):
                kept.append((position, tokens))
        return type(self)(tuple(kept))

    def check_sizes(
        self, sizes: Sequence[int], beyond: Collection[int] = (), limit: str | None = None
    ) -> None:
        """ValueError for a chunk size that is none of the buckets.

        beyond  configured buckets larger than any prompt, which a smaller one replaces
        limit   the option that made buckets smaller than they were given; None: none did
        """
        for position, tokens in self.steps:
            if tokens not in sizes and tokens not in beyond:
                buckets = f"are {', '.join(map(str, sizes))}"
                raise self._wrong(
                    f"has chunks of {tokens} tokens from position {position} on, but the prefill "
                    f"buckets {buckets}" + ("" if limit is None else f", which {limit} limits")
                )

    def __str__(self) -> str:
        return ", ".join(f"{tokens} from {position} on" for position, tokens in self.steps)


def _next_multiple(start: int, tokens: int) -> int:
    return (start // tokens + 1) * tokens


def _cut_alike(start: int, end: int, one: int, other: int, *, last: bool) -> bool:
    """Whether chunks of either size end at the same places from `start` to `end`.

    At `end` a whole chunk ends; with `last`, the prompt's last chunk, which may have any size.
    """
    if one == other:
        return True
    if not last and (end % one or end % other):
        return False
    # Two chunks suffice: if the first ones end together, at a multiple of both sizes, the second
    # ones end apart unless both reach the end.
    for _ in range(2):
        ends = {min(_next_multiple(start, tokens), end) for tokens in (one, other)}
        start = ends.pop()
        if ends:
            return False
    return True


def chunk_starts(tokens: int, longest: int) -> list[int]:
    """Starts at which a bucket of `tokens` is timed: 0, the start of a whole chunk that ends with
    the `longest` prompt, and halfway between. A chunk that begins later has fewer tokens, and reads
    no more KV.
    """
    last = max(0, longest - tokens)
    return sorted({0, last // 2, last})


def measure_chunks(
    chunk_ms: Callable[[int, int], float], sizes: Sequence[int], *, longest: int, bound: float
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Measure the chunk times of the ascending `sizes` for `cut_within`.

    chunk_ms(tokens, start)  measures the milliseconds of a chunk of this bucket at `start`
    longest                  tokens of the longest prompt
    bound                    milliseconds that a chunk may take

    Once a bucket is too slow, it is not timed after longer contexts. If it is too slow even without
    a context, no larger bucket is timed: large chunks after long contexts may take seconds.
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
    """Cut prompts of at most `longest` tokens: at each position by the largest bucket that takes at
    most `bound` milliseconds there.

    A chunk cannot take less time than a smaller one, or than one of its size after fewer tokens.
    Where measured times say that it does, the longer time counts. ValueError, with the numbers,
    where the smallest bucket takes too long.
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
                f"the smallest of prefill_buckets, takes {took:.3g} ms after a context of "
                f"{position} tokens, and {HEADROOM:g} times that must fit; prompts may have "
                f"{longest} tokens"
            )
        if not steps or steps[-1][1] != fitting:
            steps.append((position, fitting))
        position = _next_multiple(position, fitting)
    return PrefillCut(tuple(steps))


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points, each at least as high as those before it."""
    starts, times = zip(*points, strict=True)
    return list(zip(starts, accumulate(times, max), strict=True))


def _at(points: Sequence[tuple[int, float]], position: int) -> float:
    """The points, linearly interpolated at `position`; constant after the last point."""
    after = bisect_right(points, position, key=lambda point: point[0])
    (start, low), (end, high) = points[after - 1], points[min(after, len(points) - 1)]
    share = (position - start) / (end - start) if end > start else 0.0
    return low + share * (high - low)
