"""What an engine does with any family of models, checked against requests of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.small_engine import run
from extent import extent
from graphengine import Engine, Result, SamplingParams
from graphengine.speculative import NGram


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def assert_rewinds(engine: Engine, oracle: Any, file: Path | None = None) -> tuple[int, ...]:
    """A turn says what a request of the whole says: after a rewind to before a window, too.

    file  what the session's snapshot is written to before its last turn, of 30 tokens

    Returns the tokens of that turn.
    """
    first, second, third = oracle.prompts((45, 6, 9))
    with engine.session() as session:
        session.append(first)
        reply = session.generate(_greedy(20))
        session.append(second)
        session.generate(_greedy(8))
        session.rewind(len(session) - 30)
        session.append(third)
        if file is not None:
            session.snapshot(file)
        again = session.generate(_greedy(30))
    run(engine)
    assert engine.generate(first, _greedy(20)).token_ids == reply.token_ids
    continued = engine.generate(first[:30] + third, _greedy(30))
    assert again.token_ids == continued.token_ids
    oracle.assert_greedy(continued)
    return again.token_ids


def assert_half_precision_replays(
    open_engine: Callable[..., Engine], oracle: Any, eager: Callable[[Engine], Any], kv_dtype: str
) -> None:
    """On a GPU, the tokens of replays are those of eager steps, and of drafts.

    open_engine  opens an engine of the oracle's checkpoint with the options that it gets
    """
    prompts = [prompt * 3 for prompt in oracle.prompts((5, 11, 40))]
    options = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": kv_dtype, "row_family": "dot"}
    with open_engine(**options, lookahead=0) as engine:
        replayed = [each.token_ids for each in engine.generate(prompts, _greedy(48))]
        eager(engine)
        assert [each.token_ids for each in engine.generate(prompts, _greedy(48))] == replayed
    with open_engine(**options, speculative=NGram(k=4)) as engine:
        drafted = [each.token_ids for each in engine.generate(prompts, _greedy(48))]
        assert drafted == replayed and engine.acceptance.proposed > 0


def assert_replies(
    engine: Engine,
    oracle: Any,
    eager: Callable[[Engine], Any],
    lengths: tuple[int, ...],
    tokens: int = 24,
    adapter: str | None = None,
) -> list[Result]:
    """Logits and greedy tokens after prompts of these lengths are those of transformers.

    As many prompts run at the same time as the engine has slots.

    engine  has lookahead 0, so that nothing runs that no token is asked of
    """
    prompts, slots, results = oracle.prompts(lengths), len(engine.scheduler.slots), list[Result]()
    for first in range(0, len(prompts), slots):
        seen = eager(engine)
        together = engine.generate(prompts[first : first + slots], _greedy(tokens), adapter=adapter)
        for slot, result in enumerate(together):
            assert len(result.token_ids) == tokens and result.adapter == adapter
            oracle.assert_greedy(result)
            oracle.assert_logits(result, {at: row for at, row in seen.items() if at[0] == slot})
        results += together
    return results


def assert_same_in_any_company(open_engine: Callable[..., Engine], oracle: Any) -> None:
    """Neighbours, drafts and pauses change no token; of chunks each choice has its own best ones.

    open_engine  opens an engine of four slots of 160 tokens, with blocks of 8, with the options
                 that it gets
    """
    prompts = oracle.prompts((9, 30, 41, 65))
    # What n-grams find again.
    prompts[1] = prompts[0] * 4
    with open_engine(prefill_buckets=(64,)) as engine:
        together = engine.generate(prompts, _greedy(18))
        # In a short run the shortest one and the longest.
        alone = {at: engine.generate(prompts[at], _greedy(18)) for at in extent((0, 3), range(4))}
    for result in together:
        oracle.assert_greedy(result)
    expected = [result.token_ids for result in together]
    assert all(result.token_ids == expected[at] for at, result in alone.items())
    with open_engine(prefill_buckets=(64,), speculative=NGram(k=3)) as engine:
        drafted = engine.generate(prompts, _greedy(18))
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
    assert [result.token_ids for result in drafted] == expected
    pool = {"max_seq_len": 96, "kv_blocks": 17, "swap_blocks": 60}
    with open_engine(prefill_buckets=(64,), **pool) as engine:
        paused = engine.generate(prompts, _greedy(18))
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
    assert [result.token_ids for result in paused] == expected
    with open_engine(prefill_buckets=(8, 32)) as engine:
        for result in engine.generate(prompts, _greedy(18)):
            oracle.assert_greedy(result)
