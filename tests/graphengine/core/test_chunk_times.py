"""Prompts within a bound of milliseconds: what is measured at opening, and what follows from it.

No test depends on how long anything takes: times are made up where they decide.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from engines.small_engine import LONG, PROMPT, greedy, open_engine, run, sampled
from graphengine import Engine
from graphengine.buckets import CapturedGraph
from graphengine.core import runtime
from graphengine.core.chunk_times import ChunkTimer
from graphengine.options.prefill_cut import HEADROOM
from graphengine.speculative import MTP, NGram

FOREVER = 1e9
BUCKETS = {"prefill_buckets": (8, 16, 32)}
BOUNDED = {**BUCKETS, "max_prefill_ms_per_step": 5 * HEADROOM}
# By the times below.
CUT = ((0, 32), (64, 16), (112, 8))
BASE = {8: 1.0, 16: 1.0, 20: 2.5, 32: 3.0}
PER_TOKEN_BEFORE = {8: 0.001, 16: 0.041, 20: 0.078, 32: 0.05}


class MadeUp:
    """In place of a `ChunkTimer`: 5 ms are exceeded from position 100 on by 16 tokens, from 33 on
    by 20, and from 41 on by 32.
    """

    def __init__(self, *arguments: Any) -> None:
        pass

    def __call__(self, tokens: int, start: int) -> float:
        return BASE[tokens] + PER_TOKEN_BEFORE[tokens] * start

    def clear(self) -> None:
        pass


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ChunkTimer", MadeUp)


def prefills(engine: Engine) -> dict[str, int]:
    """Replays of prefill graphs by bucket."""
    return {
        name.removeprefix("replays/prefill/"): count
        for name, count in engine.counters.items()
        if name.startswith("replays/prefill/")
    }


# The measurement.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative": MTP(k=2), "prompt_logprobs": True},
        {"speculative": NGram(k=3), "max_logprobs": 0, "lookahead": 0},
        {"kv_blocks": 5, "swap_blocks": 20},
        {"block_size": 64, "max_seq_len": 100, "prefill_buckets": (8, 100)},
    ],
    ids=str,
)
def test_a_measurement_leaves_nothing_behind(
    options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it feeds real chunks: each block of the longest request has KV until it is cleared."""
    seen: list[bool] = []
    clear = ChunkTimer.clear

    def watched(timer: ChunkTimer) -> None:
        for cache, _ in timer._caches:
            used = cache[:, 1:].ne(0).flatten(2).any(2)
            seen.append(bool(used[:, : timer._blocks].all()))
        clear(timer)

    monkeypatch.setattr(ChunkTimer, "clear", watched)
    # Few steps read the dummy block, and only padded lanes write to it.
    with open_engine(device=device, **options) as plain:
        expected = [plain.generate(text, greedy(6)).token_ids for text in (PROMPT, LONG[:30])]
        identity, cut = plain.numerics_id, plain.prefill_cut
        assert plain.runtime.chunk_times is None and not seen
    with open_engine(device=device, max_prefill_ms_per_step=FOREVER, **options) as engine:
        caches = len(engine.runtime.caches)
        assert seen == [True] * caches
        sizes = engine.memory.prefill_ladder.sizes
        times = engine.runtime.chunk_times
        assert times is not None and tuple(times) == sizes
        assert all(took > 0 for points in times.values() for _, took in points)
        # All buckets are within the bound, so the largest cuts, as without one.
        assert engine.prefill_cut == cut == ((0, sizes[-1]),)
        assert engine.numerics_id == identity
        held = engine.runtime
        for cache, _ in held.caches:
            assert not cache[:, 1:].any()
        for field in held.buffers.fields:
            assert held.buffers[field.name].eq(field.pad).all(), field.name
        assert held.launched == 0 and not held.mailbox.tensor.any()
        assert not held.logprobs.tokens.tensor.any()
        found = [engine.generate(text, greedy(6)).token_ids for text in (PROMPT, LONG[:30])]
        assert found == expected


def test_every_graph_that_may_feed_a_chunk_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest chunk of a bucket counts. The graph that only notes tokens feeds none."""
    ran: dict[str, set[tuple[int, int]]] = {}

    def took(timer: ChunkTimer, graph: Any, start: int, count: int) -> float:
        ran.setdefault(graph.name, set()).add((start, count))
        return {"prefill/8": 1.0, "prefill/8/full": 2.0, "prefill/8/prompt": 3.0}.get(
            graph.name, 7.0
        )

    monkeypatch.setattr(ChunkTimer, "_run", took)
    options = {"prompt_logprobs": True, "max_seq_len": 64, "prefill_buckets": (8, 64)}
    with open_engine(max_prefill_ms_per_step=5.0, **options) as engine:
        assert engine.runtime.chunk_times == {
            8: ((0, 3.0), (27, 3.0), (55, 3.0)), 64: ((0, 7.0),),
        }  # fmt: skip
        assert engine.prefill_cut == ((0, 8),)
        assert ran.keys() == {
            f"prefill/{size}{kind}" for size in (8, 64) for kind in ("", "/full", "/prompt")
        }
        assert ran["prefill/8"] == {(0, 8), (27, 8), (55, 8)}
        # A prompt of 64 tokens would leave no room for a new one.
        assert ran["prefill/64"] == {(0, 63)}


def test_a_bound_that_no_bucket_keeps_frees_what_was_captured() -> None:
    """Also while the error, whose traceback refers to all of it, is still handled."""

    def open_graphs() -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is CapturedGraph]
        return sum(graph._step is not None for graph in found)

    before = open_graphs()
    message = r"max_prefill_ms_per_step=1e-09 is too short: a chunk of 8 tokens, the smallest of "
    with pytest.raises(ValueError, match=message) as caught:
        open_engine(max_prefill_ms_per_step=1e-9)
    assert open_graphs() == before and caught.tb is not None


# What follows from it.


@pytest.mark.usefixtures("made_up")
def test_prompts_are_cut_by_what_was_measured() -> None:
    with open_engine(**BOUNDED) as engine:
        assert engine.prefill_cut == CUT
        prompt = list(range(100, 223))
        engine.generate(prompt, greedy(1))
        # 0 to 32, 64, 80, 96, 112, 120 and 123.
        assert prefills(engine) == {"32": 2, "16": 3, "8": 2}
        engine.generate(prompt[:70], greedy(1))
        assert prefills(engine) == {"32": 4, "16": 3, "8": 3}
        # The reasons are told.
        text = str(engine.report())
        assert "prefill cut     32 from 0 on, 16 from 64 on, 8 from 112 on" in text
        assert "  8 tokens took 1.000 ms after 0, " in text
        described = engine.core.description
        assert described["prefill_cut"] == [[0, 32], [64, 16], [112, 8]]
        assert described["max_prefill_ms_per_step"] == 5 * HEADROOM


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(("limit", "cut"), [(16, ((0, 16), (112, 8))), (20, None), (8, ((0, 8),))])
def test_both_bounds_hold(limit: int, cut: tuple[tuple[int, int], ...] | None) -> None:
    with open_engine(**BOUNDED, max_prefill_tokens_per_step=limit) as engine:
        assert max(size for _, size in engine.prefill_cut) <= limit
        # The largest bucket is then one of 20.
        assert engine.prefill_cut == (cut or ((0, 20), (40, 16), (112, 8)))


@pytest.mark.usefixtures("made_up")
def test_the_bits_of_a_prompt_depend_neither_on_load_nor_on_who_measured() -> None:
    """KV included, in an engine that was given the cut: it is a part of `numerics_id`."""
    prompt = [7 * at % 500 + 10 for at in range(118)]
    with open_engine(**BOUNDED) as engine, engine.session() as session:
        session.append(prompt)
        tokens = session.generate(greedy(4)).token_ids
        alone = session.snapshot()
        identity, cut = engine.numerics_id, engine.prefill_cut
    with open_engine(**BUCKETS, prefill_cut=cut) as engine, engine.session() as session:
        assert engine.numerics_id == identity and engine.runtime.chunk_times is None
        others = [engine.submit(text, sampled(40)) for text in (PROMPT, LONG[:25])]
        while not all(other.token_ids for other in others):
            engine.step()
        session.append(prompt)
        assert session.generate(greedy(4)).token_ids == tokens
        assert not any(other.finished for other in others), "they ran beside it"
        crowded = session.snapshot()
        assert all(map(torch.equal, alone.caches, crowded.caches))
        engine.restore_session(alone).close()
        run(engine)
    for options in (BUCKETS, BUCKETS | {"prefill_cut": ((0, 32), (96, 8))}):
        with open_engine(**options) as engine:
            assert engine.numerics_id != identity
            with pytest.raises(ValueError, match=f"numerics_id='{identity}', the engine of"):
                engine.restore_session(alone)


@pytest.mark.usefixtures("made_up")
def test_what_is_left_of_a_prompt_is_cut_at_the_same_places() -> None:
    """After blocks that another prompt left, and after those of a session."""
    prompt = list(range(200, 323))
    with open_engine(**BOUNDED, prefix_caching=True) as engine:
        engine.generate([*prompt[:43], 5], greedy(1))
        assert prefills(engine) == {"32": 1, "16": 1}
        result = engine.generate(prompt, greedy(1))
        assert result.cached_tokens == 40
        # 40 to 64, 80, 96, 112, 120 and 123.
        assert prefills(engine) == {"32": 2, "16": 4, "8": 2}
        with engine.session() as session:
            session.append(prompt[:90])
            assert session.generate(greedy(3)).cached_tokens == 88
            session.append(prompt[90:110])
            before = prefills(engine)
            # 88 to 96 and 112, and the token after that.
            assert session.generate(greedy(1)).cached_tokens == 88
            assert {size: count - before[size] for size, count in prefills(engine).items()} == {
                "32": 0, "16": 1, "8": 2,
            }  # fmt: skip


def test_a_cut_of_other_buckets_is_refused_before_weights_are_loaded() -> None:
    with pytest.raises(
        ValueError,
        match=r"prefill_cut=\(\(0, 32\), \(64, 24\)\) has chunks of 24 tokens from position 64 on, "
        r"but the prefill buckets are 8, 16, 32",
    ):
        open_engine(**BUCKETS, prefill_cut=((0, 32), (64, 24)), progress=pytest.fail)
    with pytest.raises(
        ValueError,
        match=r"chunks of 32 tokens from position 0 on, but the prefill buckets are 8, 16, which "
        r"max_prefill_tokens_per_step=16 limits$",
    ):
        open_engine(**BUCKETS, prefill_cut=((0, 32),), max_prefill_tokens_per_step=16)


def test_a_cut_holds_in_an_engine_for_shorter_prompts() -> None:
    """Whose largest bucket is smaller: no chunk was to have more tokens."""
    shorter = BUCKETS | {"max_seq_len": 24}
    with open_engine(**shorter) as engine:
        usual, prompt = engine.numerics_id, list(range(200, 222))
        expected = engine.generate(prompt, greedy(1)).token_ids
    with open_engine(**shorter, prefill_cut=((0, 32), (64, 16))) as engine:
        assert (engine.prefill_cut, engine.numerics_id) == (((0, 24),), usual)
        assert engine.generate(prompt, greedy(1)).token_ids == expected
    with pytest.raises(
        ValueError, match=r"chunks of 20 .* buckets are 8, 16, 24, which max_seq_len=24 limits$"
    ):
        open_engine(**shorter, prefill_cut=((0, 20),))


def test_cuts_that_cut_alike_have_one_numerics_id() -> None:
    """In an engine of 128 tokens, whose longest prompt has 127."""

    def identity(cut: tuple[tuple[int, int], ...] | None) -> str:
        with open_engine(**BUCKETS, prefill_cut=cut) as engine:
            assert cut is None or engine.prefill_cut == cut or len(engine.prefill_cut) < len(cut)
            return engine.numerics_id

    usual, changed = identity(None), identity(((0, 32), (64, 16)))
    assert usual != changed
    for cut in (((0, 32),), ((0, 32), (32, 32)), ((0, 32), (128, 8)), ((0, 32), (96, 32))):
        assert identity(cut) == usual, cut
    for cut in (((0, 32), (64, 16), (96, 16)), ((0, 32), (32, 32), (64, 16), (10**6, 8))):
        assert identity(cut) == changed, cut


# Larger token buckets.


def test_a_bucket_of_2048_tokens_feeds_a_prompt_at_once(device: str) -> None:
    """And under a bound it serves what it may: 1,024 tokens at first, then 256 at a time."""
    sizes = {"max_seq_len": 2048, "max_batch": 1}
    usual = (16, 256, 1024)
    with open_engine(device=device, prefill_buckets=usual, **sizes) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        prompt = (tokenizer.encode(LONG * 60, add_special_tokens=False) * 9)[:1900]
        expected = engine.generate(prompt, greedy(3)).token_ids
        assert prefills(engine) == {"1024": 2}
    with open_engine(device=device, prefill_buckets=(*usual, 2048), **sizes) as engine:
        assert engine.prefill_cut == ((0, 2048),)
        found = engine.generate(prompt, greedy(3)).token_ids
        # On a GPU chunks of other lengths are other products, which round in other places.
        assert len(found) == 3 and (found == expected or device == "cuda")
        assert prefills(engine) == {"2048": 1}
        assert engine.report().captures[0].name == "prefill/2048/full"
    cut = ((0, 1024), (1024, 256))
    with open_engine(
        device=device, prefill_buckets=(*usual, 2048), prefill_cut=cut, **sizes
    ) as engine:
        found = engine.generate(prompt, greedy(3)).token_ids
        assert len(found) == 3 and (found == expected or device == "cuda")
        assert prefills(engine) == {"1024": 1, "256": 4}
