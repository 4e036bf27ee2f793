"""What a type checker knows of the calls that people write. `make types` checks it; nobody runs it.

`assert_type` holds the exact type of a call. In strict mode mypy reports an `ignore` that nothing
needs, so that each call of `refused` stays an error of the kind it names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import assert_type

from graphengine import Chat, Engine, Event, Request, Result, SamplingParams
from graphengine.prompts import Prompt

params = SamplingParams(max_tokens=1)
ids: list[int] = [1, 2]
pair: tuple[int, int] = (1, 2)
messages: list[dict[str, str]] = [{"role": "user", "content": "x"}]
conversation = Chat(messages=messages)


def one_prompt(engine: Engine, prompt: Prompt) -> None:
    """In each of its forms."""
    assert_type(engine.generate("x"), Result)
    assert_type(engine.generate([1, 2]), Result)
    assert_type(engine.generate(ids), Result)
    assert_type(engine.generate(pair), Result)
    assert_type(engine.generate(range(3)), Result)
    assert_type(engine.generate(messages), Result)
    assert_type(engine.generate([{"role": "user", "content": "x"}]), Result)
    assert_type(engine.generate(conversation), Result)
    assert_type(engine.generate(prompt, params, priority=1), Result)


def batches(engine: Engine, batch: Sequence[Prompt]) -> None:
    assert_type(engine.generate(["x", "y"]), list[Result])
    assert_type(engine.generate(("x", "y"), [params, params]), list[Result])
    assert_type(engine.generate([[1, 2], [3]]), list[Result])
    assert_type(engine.generate([ids, pair]), list[Result])
    assert_type(engine.generate([messages]), list[Result])
    assert_type(engine.generate([conversation, messages]), list[Result])
    assert_type(engine.generate(["x", [1, 2], conversation]), list[Result])
    assert_type(engine.generate(batch), list[Result])


def what_may_be_both(engine: Engine, both: Prompt | list[str]) -> None:
    assert_type(engine.generate(both), Result | list[Result])


def other_calls(engine: Engine) -> None:
    assert_type(engine.stream("x"), Iterator[Event])
    assert_type(engine.astream("x", params), AsyncIterator[Event])
    assert_type(engine.submit("x"), Request)
    assert_type(Engine.from_pretrained("path", max_batch=2, wait="block"), Engine)


def refused(engine: Engine) -> None:
    engine.generate(5)  # type: ignore[call-overload]
    engine.generate([1.5])  # type: ignore[arg-type]
    engine.generate([5, ids])  # type: ignore[arg-type]
    engine.generate("x", priority="high")  # type: ignore[call-overload]
    Engine.from_pretrained("path", max_batches=2)  # type: ignore[call-arg]
    Engine.from_pretrained("path", max_batch="2")  # type: ignore[arg-type]
    Engine.from_pretrained("path", wait="sleep")  # type: ignore[arg-type]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    SamplingParams(top_q=0.5)  # type: ignore[call-arg]
