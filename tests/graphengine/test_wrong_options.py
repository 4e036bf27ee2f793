"""Options of requests, and numbers of engines, with every kind of value that they cannot have.

Each is a ValueError that names the option and the value; where there is a limit, the limit too.
"""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from engines.small_engine import assert_idle
from graphengine import (
    CodeSampling,
    Engine,
    EngineConfig,
    Feed,
    SamplingParams,
    StructuredOutputsParams,
)
from graphengine.kernels.step.record import MAX_DRAFTS
from graphengine.speculative import GateOptions, NGram, RelaxedAcceptance

NAN, INF = math.nan, math.inf
NO_NUMBERS: list[Any] = [
    "1", "", b"1", None, True, [1], (), {}, {1}, 1j, object(), NAN, Decimal(1), np.True_,
]  # fmt: skip
NO_INTEGERS: list[Any] = [*NO_NUMBERS, 1.0, 1.5, INF]
NO_FLAGS: list[Any] = [None, 0, 1, 1.0, "True", "", [], [True]]
NO_IDS: list[Any] = [5, 1.5, "5", b"5", True, {5}, {5: 1}, object(), ["5"], [1.0], [True], [None]]
NO_WORDS: list[Any] = [5, "word", b"word", {"word"}, [5], [None], [""], [[]], [[1.0]], [b"w"]]


def but(values: list[Any], *allowed: Any) -> list[Any]:
    """The values that are none of `allowed`, by identity."""
    return [value for value in values if not any(value is each for each in allowed)]


WRONG: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBERS, -0.1, 1e-7, INF, -INF, 1e39, 10**400],
    "top_k": [*NO_INTEGERS, -2, 2**31],
    "top_p": [*NO_NUMBERS, -0.1, 1.01, INF],
    "min_p": [*NO_NUMBERS, -0.1, 1.01, INF],
    "top_n_sigma": [*NO_NUMBERS, -0.1, INF, -INF, 1e39, 10**400],
    "seed": [*but(NO_INTEGERS, None), -1, 2**63],
    "max_tokens": [*but(NO_INTEGERS, None), 0, -1],
    "min_tokens": [*NO_INTEGERS, -1, 257, 2**31],
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
        {5: None}, {5: True}, {5: NAN}, {5: INF}, {5: 1e39}, {5: 10**400}, {5: Fraction(10**400)},
    ],
    "repetition_penalty": [*NO_NUMBERS, 0, -1.5, INF, 1e39, 1e-50, 10**400],
    "frequency_penalty": [*NO_NUMBERS, -2.01, 2.01, INF],
    "presence_penalty": [*NO_NUMBERS, -2.01, 2.01, -INF],
    "logprobs": [*but(NO_INTEGERS, None), -1, 21],
    "prompt_logprobs": [*but(NO_INTEGERS, None), -1, 21],
    "stop_token_sequences": [*NO_WORDS, None, ["word"], [[-1]], [[1, "2"]]],
    "logprobs_mode": [5, True, "", "raw", "processed", b"raw_logprobs", ["raw_logprobs"]],
    "forced_tokens": NO_FLAGS,
    "structured_outputs": [
        5, "[a-z]+", b"a", True, [], ["yes", "no"], {}, {"regex": "a"}, {"type": "object"},
        object(), StructuredOutputsParams, [StructuredOutputsParams(regex="a")],
    ],
    "routing": [
        5, 1.5, "5", b"5", True, {5}, {5: 1}, object(), [], [5], [[1, 2]], [[["5"]]], [[[1.0]]],
        [[[True]]], [[[None]]], [[[-2]]], [[[2**15]]], [[[10**20]]], [[[1, 2], [3]]],
    ],
    "forced_codes": [
        5, "x", {}, [], [5], True, object(), [[]], [["5"]], [[1.0]], [[True]], [[None]], [[-2]],
        [[2**15]], [[10**20]], [[1, 2], [3]], [[[1]]],
    ],
    "codes": [5, "x", {}, [], True, object(), CodeSampling, [CodeSampling()]],
    "feed": [5, "x", {}, [], True, object(), Feed, torch.zeros(2, 4)],
}  # fmt: skip
"""By option: values that `SamplingParams` refuses."""

LIMITS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": 1e-7}, ("1e-06",)),
    ({"top_k": -2}, ("-1",)),
    ({"top_p": 1.01}, ("[0, 1]",)),
    ({"min_p": 1.01}, ("[0, 1]",)),
    ({"seed": -1}, ("[0, 2**63)",)),
    ({"max_tokens": 0}, ("at least 1",)),
    ({"min_tokens": 2**31}, ("[0, 1073741823]",)),
    ({"min_tokens": 257}, ("max_tokens=256",)),
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


ENGINE: dict[str, list[Any]] = {
    "memory_fraction": [*NO_NUMBERS, 0, 1.01, INF, 10**400, Fraction(10**400)],
    "wait_limit_s": [*NO_NUMBERS, 0, -1, INF, 10**400, Fraction(10**400), np.float32(INF)],
    "max_stop_ids": [*NO_INTEGERS, 0, 1025, 30_000_000, 10**18],
    "max_seq_len": [*but(NO_INTEGERS, None), 1, 2**31, 10**18],
    "max_prefill_tokens_per_step": [*but(NO_INTEGERS, None), 0, 2**31, 10**18],
    "max_prefill_ms_per_step": [*but(NO_NUMBERS, None), 0, -1, INF, 10**400, Fraction(10**400)],
    "prefill_cut": [
        16,
        "0:16",
        (),
        ((0, 16), 8),
        ((0, 1.0),),
        ((0, True),),
        ((8, 16),),
        ((0, 0),),
        ((0, 2**31),),
        ((0, 16), (24, 8)),
        ((0, 16), (10**18, 8)),
    ],
    "kv_blocks": [*but(NO_INTEGERS, None), 0, 2**31, 10**18],
    "swap_blocks": [*but(NO_INTEGERS, None), -1, 2**31, 10**18],
    "session_blocks": [*but(NO_INTEGERS, None), -1, 2**31, 10**18],
    "session_states": [*NO_INTEGERS, -1, 2**31, 10**18],
    "max_waiting": [*but(NO_INTEGERS, None), 0, -1],
    "prefill_buckets": [None, 16, "16", (0,), (16, 1.0), (True,), (2**31,), (16, 10**18)],
}
"""By option of an engine: numbers that `EngineConfig` refuses. test_params.py has the others."""

CALIBRATION: list[tuple[Any, str]] = [
    (b"abc", "kv_calibration=b'abc' must be text or a list of token ids"),
    (bytearray(3), "kv_calibration=bytearray(.*) must be text or a list of token ids"),
    (memoryview(b"abc"), "kv_calibration=<memory .*> must be text or a list of token ids"),
    (5, "kv_calibration=5 must be text or a list of token ids"),
    ({5}, r"kv_calibration=\{5\} must be text or a list of token ids"),
    (iter([5]), "kv_calibration=<list_iterator .*> must be text or a list of token ids"),
    ([], r"kv_calibration=\[\] holds no token"),
    ([7, 1.0], r"kv_calibration=\[7, 1.0\] has 1.0 at index 1: token ids are integers in \[0, 2"),
    ([True], r"kv_calibration=\[True\] has True at index 0: token ids are integers"),
    (["a"], r"kv_calibration=\['a'\] has 'a' at index 0: token ids are integers"),
    ([3, -1], r"kv_calibration=\[3, -1\] has -1 at index 1: token ids are integers in \[0, 2147"),
    ([2**31], "has 2147483648 at index 0: token ids are integers in .0, 2147483647"),
    (range(4096), r"kv_calibration=range\(0, 4096\) has 4096 tokens: max_seq_len=4096 has room for "
                  "4095 and a new one"),
    (range(10**12), "has 1000000000000 tokens: max_seq_len=4096 has room for 4095"),
    (range(10**30), "has 9223372036854775807 tokens: max_seq_len=4096 has room for 4095"),
    (["x"] * 10**6, r"kv_calibration=\['x', 'x', .*\.\.\. has 1000000 tokens: max_seq_len=4096"),
]  # fmt: skip
"""What `EngineConfig` refuses as `kv_calibration`, and what it says of it."""

GATE: list[Any] = [*NO_NUMBERS, -1, INF, 10**400, Fraction(10**400)]


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


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_refuses_the_wrong_number(name: str) -> None:
    for value in ENGINE[name]:
        with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
            EngineConfig(device="cpu", **{name: value})
        said = str(caught.value)
        assert any(text in said for text in (f"{name}={value!r} ", f"{name}={value} ")), said


def test_a_calibration_is_text_or_ids_that_fit() -> None:
    """Ids are not looked at where they are too many: there may be no end to them."""
    for value, message in CALIBRATION:
        with pytest.raises(ValueError, match=message) as caught:
            EngineConfig(device="cpu", kv_dtype="fp8", kv_calibration=value)
        assert len(str(caught.value)) < 300
    kept = EngineConfig(
        device="cpu", kv_dtype="fp8", kv_calibration=range(4096), max_seq_len=np.int16(4097)
    )
    assert kept.kv_calibration == tuple(range(4096))


@pytest.mark.parametrize("name", ["off_below", "on_above"])
def test_a_gate_refuses_the_wrong_number(name: str) -> None:
    for value in GATE:
        with pytest.raises(ValueError, match=name):
            GateOptions(**{name: value})


def test_relaxed_acceptance_refuses_the_wrong_number() -> None:
    for value in [*NO_NUMBERS, -0.1, 1.1, INF, 10**400]:
        with pytest.raises(ValueError, match="delta"):
            RelaxedAcceptance(delta=value, begin_token_ids=[1], end_token_ids=[2])


def test_numbers_of_all_kinds_are_kept_as_pythons_own() -> None:
    """NumPy's wrap around: a step of 64 rows and 15 tokens feeds -64 in eight bits."""
    config = EngineConfig(
        device="cpu",
        max_batch=np.int8(16),
        buckets=[np.int8(16), np.int8(8)],
        kv_blocks=np.int32(2**31 - 1),
        memory_fraction=Fraction(1, 2),
        wait_limit_s=np.float32(2),
        speculative=NGram(k=np.int8(3), max_n=np.int8(4)),
        gate=GateOptions(window=np.int16(8), off_below=np.float32(0.5), on_above=Fraction(1, 2)),
        forced_acceptance=np.int64(10**18),
    )
    kept = [config.max_batch, *config.buckets, config.kv_blocks, config.forced_acceptance]
    kept += [config.speculative.k, config.speculative.max_n, config.gate.window]
    assert kept == [16, 16, 8, 2**31 - 1, MAX_DRAFTS, 3, 4, 8] and {*map(type, kept)} == {int}
    numbers = [config.memory_fraction, config.wait_limit_s]
    numbers += [config.gate.off_below, config.gate.on_above]
    assert numbers == [0.5, 2.0, 0.5, 0.5] and {*map(type, numbers)} == {float}
    assert config.lanes == 64


def test_a_step_waits_for_seconds(engine: Engine) -> None:
    for value in but(NO_NUMBERS, None):
        with pytest.raises(ValueError, match=r"timeout=.* must be seconds, or None"):
            engine.step(timeout=value)
    for forever in (10**400, INF, Fraction(10**400), 1e308):
        assert len(engine.generate("x", SamplingParams(max_tokens=1)).token_ids) == 1
        engine.submit("x", SamplingParams(max_tokens=1))
        while not engine.step(timeout=forever):
            pass
    for never in (-(10**400), -INF, np.float32(0), Fraction(-1, 2)):
        engine.submit("x", SamplingParams(max_tokens=1))
        while not engine.step(timeout=never):
            pass
    assert_idle(engine)


@pytest.mark.parametrize("params", [5, "x", {}, {"top_k": 3}, [SamplingParams()], SamplingParams])
def test_params_are_sampling_params(engine: Engine, params: Any) -> None:
    with pytest.raises(ValueError, match="SamplingParams"):
        engine.submit("x", params)
    assert_idle(engine)
