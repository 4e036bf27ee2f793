"""What an engine does with any family of models, checked against requests of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.small_engine import run
from graphengine import Engine, SamplingParams
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
