"""Prefills that feed chunks of several prompts: what is packed, and that it changes no bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.packed_replies import chunks_of, prompt_of, replies, same
from engines.small_engine import greedy, open_engine, run, sampled, step_until
from extent import examples
from graphengine import Engine
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject

PACKED = {"device": "cpu", "prompts_per_prefill": 3, "max_batch": 4}


@pytest.fixture(scope="module")
def packed_chunks() -> Iterator[list[int]]:
    """Chunks that were packed, of each example; not all of them have prompts that fit together."""
    found: list[int] = []
    yield found
    assert sum(map(bool, found)) >= 2, found


@settings(max_examples=examples(5, 60), deadline=None, derandomize=True)
@given(data=st.data())
def test_no_bit_depends_on_what_a_prompt_is_packed_with(
    packed_chunks: list[int], data: st.DataObject
) -> None:
    """Alone, or with others of any lengths in any order; in pools that pause; shared prefixes."""
    length = st.sampled_from([1, 3, 8, 20, 31, 33, 70])
    lengths = data.draw(st.lists(length, min_size=2, max_size=6))
    prompts = [prompt_of(length, index) for index, length in enumerate(lengths)]
    prompts[-1] = prompts[0] + prompts[-1]
    options = PACKED | {
        "prefix_caching": data.draw(st.booleans()),
        "lookahead": data.draw(st.integers(0, 2)),
    }
    with open_engine(**options) as engine:
        alone = [replies(engine, [prompt])[0] for prompt in prompts]
        assert not engine.counters["packed_chunks"]
    if data.draw(st.booleans()):
        options["kv_blocks"] = 16
    with open_engine(**options) as engine:
        together = replies(engine, prompts)
        packed_chunks.append(engine.counters["packed_chunks"])
    for one, other in zip(alone, together, strict=True):
        assert same(one, other), lengths


def test_a_replay_takes_the_oldest_prompts_that_fit_it() -> None:
    with open_engine(**PACKED) as engine:
        for length in (10, 12, 11, 3):
            engine.submit(prompt_of(length), greedy(2))
        # 33 tokens exceed the bucket of 32; no prompt overtakes another.
        assert chunks_of(engine) == [[(0, 0, 10), (1, 0, 12)], [(2, 0, 11), (3, 0, 3)]]
        assert engine.counters["packed_chunks"] == 2
        assert engine.counters["replays/prefill/32"] == 2
    with open_engine(**PACKED) as engine:
        for length in (2, 2, 2, 2):
            engine.submit(prompt_of(length), greedy(2))
        assert [len(chunks) for chunks in chunks_of(engine)] == [3, 1]
        assert engine.counters["replays/prefill/8"] == 2
    with open_engine(**PACKED) as engine:
        for length in (40, 24, 5):
            engine.submit(prompt_of(length), greedy(2))
        # Where a prompt is cut does not depend on the others.
        assert chunks_of(engine) == [[(0, 0, 32)], [(0, 32, 8), (1, 0, 24)], [(2, 0, 5)]]


def test_the_cut_bounds_all_tokens_of_a_replay() -> None:
    """As far into a prompt as its chunks are short, others add no more to them."""
    cut = {"prefill_cut": ((0, 32), (64, 8)), "max_batch": 4}
    with open_engine(**PACKED | cut) as engine:
        for length in (70, 5, 20):
            engine.submit(prompt_of(length), greedy(2))
        assert chunks_of(engine) == [
            [(0, 0, 32)],
            [(0, 32, 32)],
            [(0, 64, 6)],
            [(1, 0, 5), (2, 0, 20)],
        ]


def test_requests_with_options_on_their_logits_have_replays_of_their_own() -> None:
    with open_engine(**PACKED, max_logprobs=2) as engine:
        params = [greedy(3), greedy(3, presence_penalty=0.5), greedy(3), greedy(3, logprobs=1)]
        requests = [engine.submit(prompt_of(5, i), each) for i, each in enumerate(params)]
        found = chunks_of(engine)
        assert found == [[(0, 0, 5)], [(1, 0, 5)], [(2, 0, 5)], [(3, 0, 5)]]
        assert [len(request.result().token_ids) for request in requests] == [3, 3, 3, 3]


def test_prompts_of_one_replay_share_their_beginning() -> None:
    """The second one's blocks are those that the first one fills in the same replay."""
    beginning = prompt_of(16)
    prompts = [beginning + prompt_of(length) for length in (3, 5)]
    with open_engine(**PACKED) as engine:
        expected = [replies(engine, [prompt])[0] for prompt in prompts]
    with open_engine(**PACKED, prefix_caching=True) as engine:
        requests = [engine.submit(prompt, sampled(6, seed=len(prompt))) for prompt in prompts]
        assert chunks_of(engine) == [[(0, 0, 19), (1, 16, 5)]]
        results = [request.result() for request in requests]
    assert [result.cached_tokens for result in results] == [0, 16]
    assert [result.token_ids for result in results] == [tokens for tokens, _ in expected]


def test_samples_of_a_prompt_compute_it_once() -> None:
    with open_engine(**PACKED) as engine:
        params = sampled(4, seed=3)
        expected = [result.token_ids for result in engine.generate_many(prompt_of(20), params, n=3)]
        assert engine.counters["packed_chunks"] == 2
        fed = engine.recorder
        fed.start(capacity=64)
        engine.generate_many(prompt_of(20, 1), params, n=3)
        assert sum(fed.replays()["prompt_tokens"].tolist()) == 20 + 2 * 4
    with open_engine(device="cpu", max_batch=4) as engine:
        found = engine.generate_many(prompt_of(20), params, n=3)
    assert [result.token_ids for result in found] == expected


def test_one_of_several_may_be_cancelled_while_its_prompt_is_fed() -> None:
    with open_engine(**PACKED, lookahead=2) as engine:
        expected = [replies(engine, [prompt_of(length)])[0][0] for length in (40, 5)]
        kept = engine.submit(prompt_of(40), sampled(6, seed=40))
        lost = engine.submit(prompt_of(41), sampled(6, seed=1))
        short = engine.submit(prompt_of(5), sampled(6, seed=5))
        step_until(engine, lambda: engine.counters["packed_chunks"] > 0)
        lost.cancel()
        run(engine)
        assert [kept.result().token_ids, short.result().token_ids] == expected
        assert lost.finish_reason == "cancelled"


def test_a_record_has_all_requests_of_a_replay() -> None:
    with open_engine(**PACKED) as engine:
        engine.recorder.start(capacity=64)
        requests = [engine.submit(prompt_of(length), greedy(3)) for length in (7, 6)]
        run(engine)
        first, ids = engine.recorder.replays()[0], engine.recorder.lanes()[0][0]
        assert first["prompt_tokens"] == first["live"] == 13 and first["rows"] == 32
        assert first["lanes"] == 2 and first["emitted"] == 2
        assert ids[:2].tolist() == [request.id for request in requests]


def test_sessions_are_packed_with_others() -> None:
    def turns(engine: Engine, others: Sequence[int]) -> tuple[list[Any], int]:
        with engine.session() as session:
            found = []
            for length in (9, 12):
                session.append(prompt_of(length))
                for other in others:
                    engine.submit(prompt_of(other), greedy(2))
                found.append(session.generate(sampled(5, seed=length)).token_ids)
            run(engine)
        return found, engine.counters["packed_chunks"]

    with open_engine(**PACKED) as engine:
        alone, packed = turns(engine, ())
        assert packed == 0
        together, packed = turns(engine, (4, 6))
        assert packed >= 2 and together == alone


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pipeline_parallel": 2}, "=3 is for engines without pipeline_parallel=2"),
        ({"prompts_per_prefill": 0}, r"prompts_per_prefill=0 must be in \[1, 64\]"),
    ],
)
def test_engines_that_feed_one_prompt_say_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(**PACKED | options)


def test_models_that_feed_one_prompt_say_so() -> None:
    with pytest.raises(ValueError, match=r"prompts_per_prefill=2: a .* has frames of codes, and"):
        build_engine(Subject.of_shape("tiny-csm"), {"device": "cpu", "prompts_per_prefill": 2})


def test_engines_that_pack_have_numerics_of_their_own() -> None:
    with open_engine(**PACKED) as engine, open_engine(device="cpu", max_batch=4) as plain:
        assert engine.numerics_id != plain.numerics_id
