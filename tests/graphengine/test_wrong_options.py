"""Every option of a request with every kind of value that it cannot have.

Each is a ValueError that names the option and the value; where there is a limit, the limit too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from graphengine import Engine, SamplingParams, StructuredOutputsParams
from stepping import assert_idle

NAN, INF = math.nan, math.inf
NO_NUMBERS: list[Any] = ["1", "", b"1", None, True, [1], (), {}, {1}, 1j, object(), NAN]
NO_INTEGERS: list[Any] = [*NO_NUMBERS, 1.0, 1.5, INF]
NO_FLAGS: list[Any] = [None, 0, 1, 1.0, "True", "", [], [True]]
NO_IDS: list[Any] = [5, 1.5, "5", b"5", True, {5}, {5: 1}, object(), ["5"], [1.0], [True], [None]]
NO_WORDS: list[Any] = [5, "word", b"word", {"word"}, [5], [None], [""], [[]], [[1.0]], [b"w"]]


def but(values: list[Any], *allowed: Any) -> list[Any]:
    """Those that are none of `allowed`, by identity."""
    return [value for value in values if not any(value is each for each in allowed)]


WRONG: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBERS, -0.1, 1e-7, INF, -INF, 1e39],
    "top_k": [*NO_INTEGERS, -2, 2**31],
    "top_p": [*NO_NUMBERS, 0, -0.1, 1.01, INF],
    "min_p": [*NO_NUMBERS, -0.1, 1.01, INF],
    "seed": [*but(NO_INTEGERS, None), -1, 2**63],
    "max_tokens": [*but(NO_INTEGERS, None), 0, -1],
    "min_tokens": [*NO_INTEGERS, -1, 17, 2**31],
    "stop": [5, 1.5, b"x", True, {"x"}, {"x": 1}, object(), "", [""], ["x", 5], [None], [b"x"]],
    "stop_token_ids": NO_IDS,
    "ignore_eos": NO_FLAGS,
    "include_stop_str_in_output": NO_FLAGS,
    "skip_special_tokens": NO_FLAGS,
    "remove_eos": NO_FLAGS,
    "add_bos": but(NO_FLAGS, None),
    "allowed_token_ids": [*NO_IDS, [], [-1]],
    "bad_words": [*NO_WORDS, [[-1]]],
    "logit_bias": [
        5, "5", [5], [(5, 1.0)], {"5": 1.0}, {1.0: 1.0}, {True: 1.0}, {-1: 1.0}, {5: "1"},
        {5: None}, {5: True}, {5: NAN}, {5: INF}, {5: 1e39},
    ],
    "repetition_penalty": [*NO_NUMBERS, 0, -1.5, INF, 1e39, 1e-50, 10**400],
    "frequency_penalty": [*NO_NUMBERS, -2.01, 2.01, INF],
    "presence_penalty": [*NO_NUMBERS, -2.01, 2.01, -INF],
    "logprobs": [*but(NO_INTEGERS, None), -1, 21],
    "prompt_logprobs": [*but(NO_INTEGERS, None), -1, 21],
    "stop_token_sequences": [*NO_WORDS, None, ["word"], [[-1]], [[1, "2"]]],
    "structured_outputs": [
        5, "[a-z]+", b"a", True, [], ["yes", "no"], {}, {"regex": "a"}, {"type": "object"},
        object(), StructuredOutputsParams, [StructuredOutputsParams(regex="a")],
    ],
}  # fmt: skip
"""By option: values that `SamplingParams` refuses."""

LIMITS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": 1e-7}, ("1e-06",)),
    ({"top_k": -2}, ("-1",)),
    ({"top_p": 1.01}, ("(0, 1]",)),
    ({"min_p": 1.01}, ("[0, 1]",)),
    ({"seed": -1}, ("[0, 2**63)",)),
    ({"max_tokens": 0}, ("at least 1",)),
    ({"min_tokens": 2**31}, ("[0, 1073741823]",)),
    ({"min_tokens": 17}, ("max_tokens=16",)),
    ({"repetition_penalty": 0}, ("1e-06", "1e+06")),
    ({"frequency_penalty": 2.01}, ("[-2, 2]",)),
    ({"presence_penalty": -2.01}, ("[-2, 2]",)),
    ({"logprobs": 21}, ("[0, 20]",)),
    ({"prompt_logprobs": 21}, ("[0, 20]",)),
]

QUEUE: dict[str, list[Any]] = {
    "priority": [*NO_INTEGERS],
    "deadline_s": [*but(NO_NUMBERS, None), 0, -1, INF, 10**400],
    "on_event": [5, "x", [], True],
}
"""By option of `Engine.submit`."""


def test_the_table_has_every_option() -> None:
    assert WRONG.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", WRONG)
def test_params_name_the_option_and_the_value(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
            SamplingParams(**{name: value})
        parts = [value]
        if isinstance(value, dict):
            parts = [value, *value, *value.values()]
        elif isinstance(value, list | tuple):
            parts = [value, *value, *(part for each in value if isinstance(each, list | tuple)
                                      for part in each)]  # fmt: skip
        said = str(caught.value)
        assert any(repr(part) in said or str(part) in said for part in parts), (value, said)


@pytest.mark.parametrize(("options", "limits"), LIMITS, ids=str)
def test_limits_are_said(options: dict[str, Any], limits: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    for limit in limits:
        assert limit in str(caught.value)


@pytest.mark.parametrize("name", QUEUE)
def test_a_queue_refuses_the_wrong_kind(engine: Engine, name: str) -> None:
    for value in QUEUE[name]:
        with pytest.raises(ValueError, match=name):
            engine.submit("x", **{name: value})
    assert_idle(engine)


@pytest.mark.parametrize("params", [5, "x", {}, {"top_k": 3}, [SamplingParams()], SamplingParams])
def test_params_are_sampling_params(engine: Engine, params: Any) -> None:
    with pytest.raises(ValueError, match="SamplingParams"):
        engine.submit("x", params)
    assert_idle(engine)
