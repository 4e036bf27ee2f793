"""The text of requests, token by token, against transformers' tokenizers; and results as JSON."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from statistics import median
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engines.small_engine import OTHER, PROMPT, greedy, run, sampled
from graphengine import Engine, Result
from graphengine.demo import checkpoint_path
from graphengine.requests.job import Job
from graphengine.requests.request import Request
from graphengine.requests.result import Segment, Timings
from graphengine.sampling_params import SamplingParams
from graphengine.text.tokenizer import TextStream, Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WORDS = ["▁the", "▁quick", "▁", "fox", "ing", "é", "日", "😀", "▁a", "b", "c", "."]
SPECIAL = ["<s>", "</s>"]


@cache
def both(kind: str) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """Our tokenizer and transformers', of the demo (byte level) or of one with byte fallback."""
    if kind == "byte level":
        theirs = AutoTokenizer.from_pretrained(checkpoint_path())
        return Tokenizer.from_directory(checkpoint_path()), theirs
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: index for index, name in enumerate(names)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    library.add_special_tokens(SPECIAL)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(library.to_str()),
        clean_up_tokenization_spaces=False,
        bos_token="<s>",
        eos_token="</s>",
    )
    return Tokenizer(library), theirs


def decode(theirs: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool) -> str:
    text = theirs.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def finished(
    tokenizer: Tokenizer, ids: Sequence[int], *, stop: Sequence[str] = (), **options: Any
) -> Result:
    """The result of a request that said `ids`, read in steps of one to three tokens."""
    stream = TextStream(tokenizer, stop, **options)
    dice, given, pieces = random.Random(len(ids)), list[int](), list[str]()
    matched = None
    while len(given) < len(ids) and matched is None:
        step = ids[len(given) : len(given) + dice.randrange(1, 4)]
        text, taken, matched = stream.take(step)
        given += step[:taken]
        pieces.append(text)
    text = "".join(pieces) + stream.flush()
    return Result(
        request_id=1,
        prompt_token_ids=(),
        token_ids=tuple(given),
        text=text,
        text_ends=tuple(min(end, len(text)) for end in accumulate(map(len, stream.made))),
        finish_reason="stop" if matched else "length",
        stop_reason=matched,
        seed=0,
        timings=Timings(submitted=0.0),
    )


def assert_segments(result: Result) -> None:
    """They are the tokens' in order, and together the text exactly."""
    segments = result.segments
    assert [segment.token_id for segment in segments] == list(result.token_ids)
    assert "".join(segment.text for segment in segments) == result.text
    end = 0
    for segment in segments:
        assert (segment.start, result.text[segment.start : segment.end]) == (end, segment.text)
        end = segment.end
    assert end == (len(result.text) if segments else 0)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_text_and_segments_are_transformers(data: st.DataObject, skip: bool) -> None:
    tokenizer, theirs = both("byte level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    result = finished(tokenizer, ids, skip_special_tokens=skip)
    assert result.text == decode(theirs, ids, skip)
    assert_segments(result)
    for count, segment in enumerate(result.segments[:-1], start=1):
        so_far, certain = decode(theirs, ids[:count], skip), result.text[: segment.end]
        # A character takes up to four tokens; of bytes that begin none, each is a character.
        held_back = so_far.removeprefix(certain)
        assert so_far.startswith(certain) and held_back == REPLACEMENT * len(held_back)
        assert len(held_back) <= 3


# A word, a special token, or a character in bytes.
UNITS = st.one_of(
    st.sampled_from([[word] for word in [*WORDS, *SPECIAL]]),
    st.sampled_from("aé日😀\n").map(lambda text: [f"<0x{byte:02X}>" for byte in text.encode()]),
)


@settings(max_examples=150, deadline=None)
@given(units=st.lists(UNITS, max_size=15), skip=st.booleans())
def test_byte_fallback_text_and_segments_are_transformers(
    units: list[list[str]], skip: bool
) -> None:
    tokenizer, theirs = both("byte fallback")
    ids = [tokenizer.token_to_id(name) or 0 for unit in units for name in unit]
    result = finished(tokenizer, ids, skip_special_tokens=skip)
    assert result.text == decode(theirs, ids, skip)
    assert_segments(result)
    count = 0
    for unit in units:
        inside = result.segments[count : count + len(unit) - 1]
        assert all(segment.text == "" for segment in inside), "a part of a character is no text"
        count += len(unit)
        whole = decode(theirs, ids[:count], skip)
        assert result.text[: result.segments[count - 1].end] == whole


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer, _ = both("byte level")
    data = "é😀".encode()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in data + data[:1]]
    texts = [segment.text for segment in finished(tokenizer, ids).segments]
    assert texts == ["", "é", "", "", "", "😀", REPLACEMENT]

    # What is left of a character is that of the last token with text, not of the stop token.
    stream = TextStream(tokenizer)
    stream.take(ids[-2:])
    stream.take(ids[:1], silent=True)
    assert (stream.flush(), [len(made) for made in stream.made]) == (REPLACEMENT, [1, 1, 0])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), include=st.booleans())
def test_segments_end_where_a_stop_string_cuts_the_text(data: st.DataObject, include: bool) -> None:
    tokenizer, theirs = both("byte level")
    ids = data.draw(st.lists(st.integers(0, 300), min_size=3, max_size=20))
    whole = decode(theirs, ids, True)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    if not stop or REPLACEMENT in whole:
        return
    result = finished(tokenizer, ids, stop=[stop], include_stop=include)
    assert result.stop_reason == stop
    assert result.text == whole[: whole.index(stop) + len(stop) * include]
    assert_segments(result)
    assert stop in decode(theirs, result.token_ids, True)
    assert stop not in decode(theirs, result.token_ids[:-1], True)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_token_costs_the_same_however_many_came_before(kind: str) -> None:
    """Counted in bytes allocated: a copy of what came before would show."""
    tokenizer, _ = both(kind)
    stream = TextStream(tokenizer, ["\N{SNOWMAN}!"])
    pieces: list[str] = []
    dice = random.Random(0)
    costs: list[int] = []
    tracemalloc.start()
    try:
        for _ in range(6000):
            token = dice.randrange(tokenizer.vocab_size)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            pieces.append(stream.take((token,))[0])
            costs.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert median(costs[-500:]) <= median(costs[500:1000]) + 64
    assert len("".join(pieces)) > 6000


def test_a_step_adds_a_piece_and_copies_nothing(engine: Engine) -> None:
    request = engine.submit(PROMPT, sampled(20))
    texts = [event.text for event in run(engine)]
    stream = request.job.stream
    assert stream is not None and len(stream.made) == len(request.token_ids)
    # The last event has what was still held back, which is that of the last token.
    assert stream.made == texts
    assert request.text == "".join(texts) == request.result().text


# Results.

NAMES = {
    "request_id", "prompt_token_ids", "token_ids", "text", "segments", "finish_reason",
    "stop_reason", "seed", "timings", "cached_tokens", "weight_version", "adapter",
    "acceptance", "logprobs",
    "prompt_logprobs", "routing", "codes", "codes_logprobs",
}  # fmt: skip
ACCEPTANCE = {
    "steps", "tokens", "proposed", "accepted", "mean_length", "rate", "per_position",
    "proposed_per_position", "rates",
}  # fmt: skip


def test_a_result_as_json_has_stable_names(engine: Engine) -> None:
    result = engine.generate(PROMPT, sampled(9, seed=7))
    found = json.loads(json.dumps(result.to_dict()))
    assert set(found) == NAMES
    assert set(found["segments"][0]) == {"token_id", "text", "start", "end"}
    assert set(found["timings"]) == {"time_to_first_token", "tokens", "finished"}
    assert set(found["acceptance"]) == ACCEPTANCE
    assert Result.to_dict.__doc__ and all(f"{name} " in Result.to_dict.__doc__ for name in NAMES)

    assert found["request_id"] == result.request_id and found["seed"] == 7
    assert found["prompt_token_ids"] == engine.tokenizer.encode(PROMPT)
    assert (found["finish_reason"], found["stop_reason"]) == ("length", None)
    assert [part["token_id"] for part in found["segments"]] == found["token_ids"]
    assert "".join(part["text"] for part in found["segments"]) == found["text"] == result.text
    times = found["timings"]
    assert len(times["tokens"]) == 9 and times["tokens"] == sorted(times["tokens"])
    assert 0 < times["time_to_first_token"] == times["tokens"][0] <= times["finished"]


def test_the_seed_of_a_result_gives_its_tokens_again(engine: Engine) -> None:
    drawn = engine.generate(OTHER, sampled(12))
    again = engine.generate(OTHER, sampled(12, seed=drawn.to_dict()["seed"]))
    assert again.token_ids == drawn.token_ids


def test_a_result_without_tokens_is_json_too(engine: Engine) -> None:
    request = engine.submit(PROMPT, greedy(4))
    request.cancel()
    run(engine)
    found = json.loads(json.dumps(request.result().to_dict()))
    assert found["segments"] == [] and found["timings"]["time_to_first_token"] is None
    assert found["finish_reason"] == "cancelled" and found["timings"]["finished"] > 0


def test_a_result_can_be_pickled_and_prints_itself(engine: Engine) -> None:
    result = engine.generate(PROMPT, greedy(4))
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result and copy.segments == result.segments
    assert isinstance(copy.segments[0], Segment) and "finish_reason='length'" in repr(copy)


def test_without_a_tokenizer_there_are_no_segments() -> None:
    request = Request(
        request_id=1,
        prompt_token_ids=[1],
        params=SamplingParams(),
        seed=0,
        submitted=0.0,
        cancelled=[],
        job=Job(prompt_len=1, max_len=3),
    )
    request.job.tokens += [4, 5]
    from graphengine.requests.request import Phase

    request.phase, request.finish_reason = Phase.FINISHED, "length"
    result = request.result()
    assert result.segments == () and result.text == "" and result.to_dict()["segments"] == []
