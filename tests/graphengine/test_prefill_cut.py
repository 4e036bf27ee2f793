"""Where prompts are cut: at absolute positions, each chunk within its bound, whoever runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines.simulated_blocks import ALPHABET, Sharing
from extent import extent
from graphengine import SamplingParams
from graphengine.options.prefill_cut import (
    HEADROOM,
    ChunkTimes,
    PrefillCut,
    chunk_starts,
    cut_within,
    measure_chunks,
)

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)


def chunks(cut: PrefillCut, prompt_len: int, start: int = 0) -> list[tuple[int, int]]:
    found = []
    while start < prompt_len:
        end = cut.end(start, prompt_len)
        found.append((start, end))
        start = end
    return found


def model(
    base: float, per_token: float, per_key: float, longest: int = 10**6
) -> Callable[[int, int], float]:
    """The time of a bucket: products of all lanes, and attention of live ones to what is before."""

    def chunk_ms(tokens: int, start: int) -> float:
        live = min(tokens, longest - start)
        return base + tokens * per_token + live * (start + live) * per_key

    return chunk_ms


def measured(
    chunk_ms: Callable[[int, int], float], sizes: list[int], longest: int, bound: float
) -> PrefillCut:
    times = measure_chunks(chunk_ms, sizes, longest=longest, bound=bound)
    return cut_within(times, longest=longest, bound=bound)


def fed_within(times: ChunkTimes, longest: int, bound: float) -> list[tuple[int, int, int]]:
    """(start, end, size) chunk by chunk, of times that rise with the size and the start: each of
    the largest size within the bound at its start, up to where a multiple of this size is met.
    """
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < longest:
        took = {
            size: HEADROOM * np.interp(start, *zip(*times[size], strict=True)) for size in times
        }
        # Sums of other roundings decide at the bound itself.
        assume(all(abs(each - bound) > 1e-9 * bound for each in took.values()))
        tokens = max(size for size in took if took[size] <= bound)
        end = start + 1
        while end % tokens and end < longest:
            end += 1
        found.append((start, end, tokens))
        start = end
    return found


@given(
    sizes=SIZES,
    longest=st.integers(1, 400),
    base=st.floats(0, 2),
    per_token=st.floats(0, 0.3),
    per_key=st.floats(0, 0.01),
    share=st.floats(1, 30),
)
@settings(deadline=None)
def test_chunks_cover_a_prompt_at_absolute_positions_within_the_bound(
    sizes: list[int], longest: int, base: float, per_token: float, per_key: float, share: float
) -> None:
    chunk_ms = model(base, per_token, per_key, longest)
    last = chunk_starts(sizes[0], longest)[-1]
    bound = share * HEADROOM * (chunk_ms(sizes[0], last) + 1e-6)
    times = measure_chunks(chunk_ms, sizes, longest=longest, bound=bound)
    cut = cut_within(times, longest=longest, bound=bound)
    whole = chunks(cut, longest)
    fed = fed_within(times, longest, bound)
    assert whole == [(start, end) for start, end, _ in fed]
    assert cut.steps == tuple(
        (start, tokens)
        for (start, _, tokens), (_, _, before) in zip(fed, [(0, 0, 0), *fed], strict=False)
        if tokens != before
    )
    assert [start for start, _ in whole] == [0, *(end for _, end in whole[:-1])]
    assert whole[-1][1] == longest
    for start, end in whole:
        bucket = next(size for size in sizes if end - start <= size)
        assert chunk_ms(bucket, start) * HEADROOM <= bound * (1 + 1e-9), (start, end)
    # Each prompt, and what is left of one, ends its chunks where the longest does.
    ends = [end for _, end in whole]
    for start in range(0, longest, 7):
        for prompt_len in range(start + 1, longest + 1, 13):
            found = [end for _, end in chunks(cut, prompt_len, start)]
            assert found == [end for end in ends if start < end < prompt_len] + [prompt_len]


@given(sizes=SIZES, longest=st.integers(1, 300), data=st.data())
@settings(deadline=None)
def test_times_that_fall_where_they_cannot_do_no_harm(
    sizes: list[int], longest: int, data: st.DataObject
) -> None:
    """A bucket counts as slow as any smaller one, and as after any fewer tokens."""
    times = {
        tokens: tuple(
            (start, data.draw(st.floats(0.1, 10))) for start in chunk_starts(tokens, longest)
        )
        for tokens in sizes
    }
    bound = 10 * HEADROOM if data.draw(st.booleans()) else data.draw(st.floats(0.1, 10))
    try:
        cut = cut_within(times, longest=longest, bound=bound)
    except ValueError as error:
        assert max(took for _, took in times[sizes[0]]) * HEADROOM > bound
        assert f"a chunk of {sizes[0]} tokens" in str(error)
        return
    used = [tokens for _, tokens in cut.steps]
    assert used == sorted(used, reverse=True), "chunks become smaller, never larger"
    for start, end in chunks(cut, longest):
        for tokens in [size for size in sizes if size <= end - start]:
            early = [took for at, took in times[tokens] if at <= start]
            assert max(early) * HEADROOM <= bound, (start, end, tokens)


def test_a_bucket_is_not_taken_again_after_it_was_too_slow() -> None:
    times = {
        8: ((0, 1.0), (50, 1.0), (100, 1.0)),
        16: ((0, 3.0), (50, 11.0), (100, 1.0)),
        32: ((0, 1.0), (50, 12.0), (100, 12.0)),
    }
    cut = cut_within(times, longest=120, bound=5 * HEADROOM)
    # 5 ms are where 50 * 2 / 8 = 12.5 tokens stand before 16; and 32 cannot be faster there.
    assert cut.steps == ((0, 32), (32, 8))
    del times[32]
    assert cut_within(times, longest=120, bound=5 * HEADROOM).steps == ((0, 16), (16, 8))


def test_a_cut_by_hand() -> None:
    """Times of an 8B model, more or less: 10 ms for 512 tokens, as much again after 16,384."""
    chunk_ms = model(2.0, 0.016, 1e-6)
    cut = measured(chunk_ms, [16, 64, 256, 512, 1024], 32_767, bound=22.0)
    assert cut.steps == ((0, 1024), (2048, 512), (20992, 256))
    assert str(cut) == "1024 from 0 on, 512 from 2048 on, 256 from 20992 on"
    assert chunks(cut, 2600) == [(0, 1024), (1024, 2048), (2048, 2560), (2560, 2600)]
    # After blocks that were found: to the next boundary, then like the whole prompt.
    assert chunks(cut, 2600, 1040) == [(1040, 2048), (2048, 2560), (2560, 2600)]
    assert measured(chunk_ms, [16, 64], 32_767, bound=20.0).steps == ((0, 64),)


def test_what_exceeds_the_bound_is_measured_once() -> None:
    asked: list[tuple[int, int]] = []

    def chunk_ms(tokens: int, start: int) -> float:
        asked.append((tokens, start))
        return model(1.0, 0.01, 1e-5)(tokens, start)

    times = measure_chunks(chunk_ms, [16, 128, 1024, 4096], longest=8191, bound=8.0)
    # 1,024 tokens are too slow at once, so nothing is asked of 4,096.
    assert asked == [
        *((16, start) for start in (0, 4087, 8175)),
        *((128, start) for start in (0, 4031, 8063)),
        (1024, 0),
    ]
    assert list(times) == [16, 128, 1024]
    assert cut_within(times, longest=8191, bound=8.0).steps[0] == (0, 128)


@pytest.mark.parametrize(("tokens", "longest", "starts"), [
    (16, 64, [0, 24, 48]), (16, 15, [0]), (16, 16, [0]), (16, 17, [0, 1]), (1, 1, [0]),
    (1024, 32_767, [0, 15_871, 31_743]),
])  # fmt: skip
def test_chunks_are_timed_where_they_can_begin(
    tokens: int, longest: int, starts: list[int]
) -> None:
    assert chunk_starts(tokens, longest) == starts


def test_a_bound_that_nothing_keeps_is_an_error_with_the_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"max_prefill_ms_per_step=2 is too short: a chunk of 16 tokens, the smallest of "
        r"prefill_buckets, takes 3 ms after a context of 0 tokens, and 1.05 times that must fit; "
        r"prompts may have 100 tokens",
    ):
        measured(lambda tokens, start: 3.0, [16, 64], 100, bound=2.0)
    with pytest.raises(ValueError, match=r"of 16 tokens, .* takes 6\.5 ms after a context of 64 t"):
        measured(lambda tokens, start: 0.1 * (1 + start), [16, 64], 100, bound=5.0)


def test_steps_that_change_nothing_are_left_out() -> None:
    cut = PrefillCut(((0, 16), (32, 16), (64, 8), (72, 8), (80, 16), (96, 32)))
    assert cut.within(1000).steps == ((0, 16), (64, 8), (80, 16), (96, 32))
    # The last chunk of 100 tokens begins at 96, and ends before a multiple of 16.
    assert cut.within(100).steps == ((0, 16), (64, 8), (80, 16))
    assert cut.within(113).steps == ((0, 16), (64, 8), (80, 16), (96, 32))
    assert cut.within(81).steps == cut.within(80).steps == ((0, 16), (64, 8))
    # Every chunk of 8 tokens from 8 on, and of 16 from there, ends where the other one would.
    assert PrefillCut(((0, 8), (8, 16), (16, 4))).within(99).steps == ((0, 8), (16, 4))
    assert PrefillCut(((0, 8), (8, 24), (24, 4))).within(99).steps == ((0, 8), (8, 24), (24, 4))
    assert PrefillCut(((0, 1), (1, 2))).within(3).steps == ((0, 1),)
    assert PrefillCut(((0, 1), (1, 2))).within(4).steps == ((0, 1), (1, 2))
    # Whose largest bucket holds every prompt.
    assert PrefillCut(((0, 32), (64, 16))).within(23, 24).steps == ((0, 24),)
    assert PrefillCut(((0, 8), (8, 32))).within(23, 24).steps == ((0, 8), (8, 24))
    assert cut.within(72).steps == cut.within(64).steps == cut.within(1).steps == ((0, 16),)


# A cut that the caller gives.


def test_a_cut_is_read_from_pairs() -> None:
    assert PrefillCut.read([[0, 64], (128, 16)]).steps == ((0, 64), (128, 16))
    cut = PrefillCut.read(((0, 24), (48, 100), (300, 8)))
    assert chunks(cut, 310) == [(0, 24), (24, 48), (48, 100), (100, 200), (200, 300), (300, 304),
                                (304, 310)]  # fmt: skip
    cut.check_sizes((8, 24, 100))
    with pytest.raises(ValueError, match=r"chunks of 24 tokens from position 0 on, but the prefill "
                                         r"buckets are 8, 100"):  # fmt: skip
        cut.check_sizes((8, 100))
    cut.check_sizes((8, 24, 40), beyond=(100,))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "0:16",
            r"prefill_cut='0:16' must be pairs \(position, tokens\) of integers, such as \(\(",
        ),
        (((0, 16), 5), r"must be pairs .*: 5 is none"),
        (((0, 16.0),), r"must be pairs .*: \(0, 16\.0\) is none"),
        (((0, True),), r"must be pairs .*: \(0, True\) is none"),
        (((0, 16, 1),), r"must be pairs .*: \(0, 16, 1\) is none"),
        ((), r"prefill_cut=\(\) must begin with a pair \(0, tokens\)"),
        (((16, 16),), r"must begin with a pair \(0, tokens\)"),
        (((0, 0),), r"must have tokens from 1 to 2147483647 .*, not the pair \(0, 0\)"),
        (((0, 2**31),), r"tokens from 1 to 2147483647 .*, not the pair \(0, 2147483648\)"),
        (((0, 16), (2**31, 16)), r"positions up to that, not the pair \(2147483648, 16\)"),
        (
            ((0, 16), (24, 8)),
            "must change where a chunk ends: position 24 is no multiple of the 16 tokens of",
        ),
        (((0, 16), (0, 8)), "must have ascending positions, not 0 after 0"),
        (((0, 16), (32, 8), (16, 8)), "must have ascending positions, not 16 after 32"),
        (
            (*((8 * at, 8) for at in range(10**5)), (8, 8)),
            r"prefill_cut=\(\(0, 8\), .*\.\.\. must have ascending positions, not 8 after 799992",
        ),
        (
            [(0, 8)] * 10**5 + ["x" * 10**6],
            r"prefill_cut=\[.*\.\.\. must be pairs .*\.\.\. is none",
        ),
    ],
)
def test_a_wrong_cut_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        PrefillCut.read(value)
    assert len(str(caught.value)) < 400


# The scheduler cuts so, whatever runs.


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    steps = [(0, draw(st.integers(1, 9)))]
    for _ in range(draw(st.integers(0, 3))):
        position, tokens = steps[-1]
        position += tokens * draw(st.integers(1, 3))
        # Positions are multiples of the tokens before them.
        steps.append((position // tokens * tokens, draw(st.integers(1, 9))))
    return tuple(steps)


@given(steps=cuts(), longest=st.integers(1, 60))
@settings(deadline=None)
def test_a_cut_has_no_step_that_changes_nothing(
    steps: tuple[tuple[int, int], ...], longest: int
) -> None:
    """One step less cuts some prompt elsewhere, or is no cut."""
    cut = PrefillCut(steps)
    short = cut.within(longest)

    def ends(cut: PrefillCut) -> list[int]:
        return [cut.end(start, longest) for start in range(longest)]

    assert ends(short) == ends(cut) and set(short.steps) <= set(steps)
    assert short.within(longest) == short
    for at in range(1, len(short.steps)):
        try:
            other = PrefillCut(short.steps[:at] + short.steps[at + 1 :])
        except ValueError:
            continue
        assert ends(other) != ends(short), short.steps[at]


@given(
    steps=cuts(),
    lookahead=st.integers(0, 1),
    prefix_caching=st.booleans(),
    kv_blocks=st.integers(8, 16),
    seed=st.integers(0, 99),
)
@settings(max_examples=extent(25, 100), deadline=None)
def test_a_prompt_is_cut_alike_whatever_runs(
    steps: tuple[tuple[int, int], ...],
    lookahead: int,
    prefix_caching: bool,
    kv_blocks: int,
    seed: int,
) -> None:
    """With neighbours, sessions, found prefixes and pauses; and every token is right."""
    cut, dice = PrefillCut(steps), random.Random(seed)
    world = Sharing(
        cut=cut,
        max_chunk=max(tokens for _, tokens in steps),
        lookahead=lookahead,
        prefix_caching=prefix_caching,
        kv_blocks=kv_blocks,
        swap_blocks=30,
    )
    head = [dice.randrange(1, ALPHABET) for _ in range(12)]
    session = world.session(head[:5])
    for _ in range(12):
        tail = [dice.randrange(1, ALPHABET) for _ in range(dice.randrange(1, 9))]
        world.submit(head[: dice.randrange(13)] + tail, dice.randrange(1, 9))
        if session.turn is None and len(session) < 25:
            session.append(tail[:3])
            session.submit(SamplingParams(max_tokens=3))
        if dice.random() < 0.2:
            dice.choice(world.requests).cancel()
        for _ in range(dice.randrange(6)):
            world.step()
    world.run()
    fed = [chunk for chunk in world.chunks if not chunk.noted]
    for request in world.requests:
        mine = [
            (chunk.start, chunk.start + chunk.count) for chunk in fed if chunk.request is request
        ]
        expected = chunks(cut, request.job.prompt_len, request.cached_tokens)
        assert mine == expected[: len(mine)]
        assert len(mine) == len(expected) or request.finish_reason == "cancelled"
