"""A conversation whose tokens are the same in any engine, as a whole or in parts."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from engines.small_engine import open_engine
from extent import extent
from graphengine import Engine, Result, SamplingParams, Session

TURNS = extent(12, 20)
SIZES: dict[str, Any] = {"device": "cpu", "max_seq_len": 160}


def params_of(index: int) -> SamplingParams:
    """Parameters of turn `index`: greedy or sampled, every fifth with penalties on its prompt."""
    dice = random.Random(f"params {index}")
    options: dict[str, Any] = {"max_tokens": dice.randrange(2, 12), "ignore_eos": True}
    if index % 3 == 0:
        options["temperature"] = 0.0
    else:
        options["seed"] = index
    if index % 5 == 1:
        options |= {"repetition_penalty": 1.4, "presence_penalty": 0.3, "logprobs": 2}
    return SamplingParams(**options)


def converse(
    session: Session, first: int, last: int, *, vocab_size: int, alone: Engine | None = None
) -> list[list[int]]:
    """Run turns `first .. last - 1`, with rewinds and forks in between; returns their tokens.

    alone  an engine in which a request with the whole conversation as prompt has the same tokens
    """
    said = []
    turns: list[tuple[int, list[int], SamplingParams, Result]] = []

    def turn(branch: Session, index: int, params: SamplingParams) -> None:
        dice = random.Random(f"turn {index}")
        branch.append([dice.randrange(vocab_size) for _ in range(dice.randrange(1, 12))])
        context, cached = branch.token_ids, branch.cached_tokens
        result = branch.generate(params)
        assert result.cached_tokens == cached and result.prompt_token_ids == context
        assert branch.token_ids == (*context, *result.token_ids)
        turns.append((index, list(context), params, result))
        said.append(list(result.token_ids))

    for index in range(first, last):
        dice = random.Random(f"branch {index}")
        if index % 4 == 3 or len(session) > 130:
            session.rewind(dice.randrange(1, len(session)))
        if index % 6 == 5:
            with session.fork() as branch:
                turn(branch, index + 100, params_of(index + 100))
                turn(branch, index + 200, params_of(index + 200))
        turn(session, index, params_of(index))
    if alone is not None:
        whole = alone.generate([turn[1] for turn in turns], [turn[2] for turn in turns])
        for (index, _, _, result), expected in zip(turns, whole, strict=True):
            assert result.token_ids == expected.token_ids, f"turn {index}"
    return said


if __name__ == "__main__":
    path, file, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open_engine(path, **SIZES) as engine, engine.restore_session(file) as restored:
        vocab = engine.model.config.vocab_size
        print(json.dumps(converse(restored, first, TURNS, vocab_size=vocab)))
