"""What ends a request, what it says of it, and what is left of its text.

Where a test says vLLM it means its v1 engine: `check_stop_strings` and `update` of the detokenizer,
`check_stop` of the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.few_layers import few_layers
from engines.small_engine import (
    LONG,
    OTHER,
    PROMPT,
    assert_idle,
    events_of,
    greedy,
    open_engine,
    run,
    step_until,
)
from graphengine import Engine, EngineConfig, Event, Request, Result
from graphengine.cli.main import main
from graphengine.opening.loading import read_checkpoint
from graphengine.requests.request import Phase
from graphengine.speculative import MTP


def plain(engine: Engine, tokens: int = 40) -> Result:
    """What the demo model says when nothing stops it."""
    return engine.generate(PROMPT, greedy(tokens, ignore_eos=True))


def token_inside(result: Result, start: int = 5) -> int:
    """A token with text that comes for the first time at `start` or later."""
    for index in range(start, len(result.token_ids)):
        token = result.token_ids[index]
        if result.segments[index].text and token not in result.token_ids[:index]:
            return index
    raise AssertionError("every token repeats an earlier one")


# Stop strings.


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(engine: Engine, include: bool) -> None:
    whole = plain(engine)
    stop = whole.text[20:25]
    at = whole.text.index(stop)
    result = engine.generate(
        PROMPT, greedy(40, stop=["\N{SNOWMAN}", stop], include_stop_str_in_output=include)
    )
    assert result.text == whole.text[: at + len(stop) * include]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    count = len(result.token_ids)
    assert result.token_ids == whole.token_ids[:count]
    decode = engine.tokenizer.decode
    assert stop in decode(result.token_ids) and stop not in decode(result.token_ids[:-1])
    run(engine)
    assert_idle(engine)


def test_an_included_stop_string_holds_nothing_back(engine: Engine) -> None:
    whole = plain(engine)
    stop = whole.text[20:40]
    for include in (True, False):
        params = greedy(40, stop=stop, include_stop_str_in_output=include)
        texts = [event.text for event in engine.stream(PROMPT, params)]
        assert "".join(texts) == whole.text[: 40 if include else 20]
        assert (sum(map(len, texts[:-1])) > 20) == include, "tokens of it came before its last one"


def test_stop_strings_wait_for_min_tokens(engine: Engine) -> None:
    """The rule is vLLM's: one that is complete with token `min_tokens` does not count, one later
    does.
    """
    whole = plain(engine)
    stop = whole.segments[4].text
    complete = next(
        i for i in range(len(whole.token_ids)) if stop in whole.text[: whole.text_ends[i]]
    )
    early = engine.generate(PROMPT, greedy(40, stop=stop, min_tokens=complete, ignore_eos=True))
    assert len(early.token_ids) == complete + 1 and early.stop_reason == stop
    late = engine.generate(PROMPT, greedy(40, stop=stop, min_tokens=complete + 1, ignore_eos=True))
    assert len(late.token_ids) > complete + 1
    assert late.text.startswith(whole.text[: whole.text_ends[complete]])


# Stop tokens.


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_a_token_but_no_text(engine: Engine, include: bool) -> None:
    """The rule is vLLM's, where its text comes with `include_stop_str_in_output` alone."""
    whole = plain(engine)
    index = token_inside(whole)
    stop = whole.token_ids[index]
    params = greedy(40, stop_token_ids=[stop], include_stop_str_in_output=include)
    result = engine.generate(PROMPT, params)
    assert result.token_ids == whole.token_ids[: index + 1]
    assert result.text == engine.tokenizer.decode(whole.token_ids[: index + include])
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert "".join(segment.text for segment in result.segments) == result.text
    assert len(result.segments) == index + 1 and (result.segments[-1].text != "") == include


def test_a_stop_token_releases_what_was_held_back(engine: Engine) -> None:
    whole = plain(engine)
    index = token_inside(whole)
    before = whole.text[: whole.text_ends[index - 1]]
    params = greedy(40, stop_token_ids=[whole.token_ids[index]], stop=before[-3:] + "\N{SNOWMAN}")
    assert engine.generate(PROMPT, params).text == before


@pytest.fixture
def eos_checkpoint(engine: Engine, edited: Callable[..., Path]) -> tuple[Path, int]:
    """The demo model, for which a token that it says is the end of the sequence, and special."""

    whole = plain(engine)
    eos = whole.token_ids[token_inside(whole)]
    path = edited(
        few_layers(),
        config={"eos_token_id": eos},
        generation_config={"eos_token_id": eos},
        tokenizer_config={"eos_token": engine.tokenizer.id_to_token(eos)},
    )
    return path, eos


def test_an_end_of_sequence_may_be_named_by_any_file(
    eos_checkpoint: tuple[Path, int], edited: Callable[..., Path]
) -> None:
    path, eos = eos_checkpoint
    other = edited(path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [5]})
    assert read_checkpoint(other, EngineConfig(device="cpu")).eos_ids == (5, 7, eos)
    # The tokenizer alone.
    nowhere = {"eos_token_id": None}
    with open_engine(edited(path, config=nowhere, generation_config=nowhere)) as engine:
        assert engine.eos_ids == (eos,)
        result = engine.generate(PROMPT, greedy(40))
        assert result.finish_reason == "stop" and result.token_ids[-1] == eos


def test_an_end_of_sequence_is_no_stop_reason(
    eos_checkpoint: tuple[Path, int], device: str
) -> None:
    path, eos = eos_checkpoint
    with open_engine(path, device=device) as engine:
        assert engine.eos_ids == (eos,) and eos in engine.tokenizer.special_ids
        name = engine.tokenizer.id_to_token(eos)
        text = engine.tokenizer.decode([eos], skip_special_tokens=False)
        assert name and text

        def generate(**options: Any) -> Result:
            return engine.generate(PROMPT, greedy(40, **options))

        bare = generate()
        assert (bare.finish_reason, bare.stop_reason) == ("stop", None)
        assert bare.token_ids[-1] == eos
        kept = {"skip_special_tokens": False, "include_stop_str_in_output": True}
        for options, tail in (
            ({"skip_special_tokens": False}, ""),
            ({"include_stop_str_in_output": True}, ""),
            (kept, text),
            (kept | {"remove_eos": True}, ""),
            (kept | {"stop_token_ids": [eos]}, text),
        ):
            result = generate(**options)
            assert result.text == bare.text + tail, options
            assert result.token_ids == bare.token_ids and result.stop_reason is None
        # Not the end of the sequence any more, but what the caller asked for.
        asked = generate(ignore_eos=True, stop_token_ids=[eos], **kept)
        assert asked.stop_reason == eos and asked.text == bare.text + text
        removed = generate(ignore_eos=True, stop_token_ids=[eos], remove_eos=True, **kept)
        assert removed.stop_reason == eos and removed.text == bare.text


def test_an_end_of_sequence_is_removed_wherever_it_stands(
    eos_checkpoint: tuple[Path, int], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`remove_EOD` of Megatron, with requests that go on past it."""
    path, eos = eos_checkpoint
    options = {"ignore_eos": True, "skip_special_tokens": False, "logit_bias": {eos: 4.0}}
    # As the command's: another number of rows may have another row family, and other bits.
    with open_engine(path, device=device, max_batch=1) as engine:
        kept = engine.generate(PROMPT, greedy(24, **options))
        assert 2 <= kept.token_ids.count(eos) < 24
        events = list(engine.stream(PROMPT, greedy(24, remove_eos=True, **options)))
        result = events[-1].request.result()
        others = [token for token in kept.token_ids if token != eos]
        assert result.token_ids == kept.token_ids
        assert result.text == engine.tokenizer.decode(others, skip_special_tokens=False)
        assert result.text == "".join(event.text for event in events) != kept.text
        assert all(bool(s.text) != (s.token_id == eos) for s in result.segments)
        decode = engine.tokenizer.decode
        assert decode(kept.token_ids, False, remove_eos=True) == result.text
        assert decode(kept.token_ids, False) == kept.text
        # What one request hides, another one shows.
        assert engine.generate(PROMPT, greedy(24, **options)).text == kept.text
    arguments = ["--prompt", PROMPT, "--checkpoint", str(path), "--device", device, "--json"]
    arguments += ["--max-tokens", "24", "--ignore-eos", "--special-tokens", "--max-batch", "1"]
    arguments += ["--temperature", "0"]
    arguments += ["--logit-bias", f"{eos}=4.0"]
    for more, text in (([], kept.text), (["--remove-eos"], result.text)):
        assert main(["generate", *arguments, *more]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == text


def test_other_reasons_have_no_stop_reason(engine: Engine) -> None:
    assert engine.generate(PROMPT, greedy(3)).stop_reason is None
    request = engine.submit(PROMPT, greedy(30))
    request.cancel()
    run(engine)
    assert request.result().stop_reason is None


def test_speculation_changes_nothing_of_it(device: str) -> None:
    """The cut is inside a step of several tokens: text, segments, reasons are those of one each."""
    with (
        open_engine(device=device) as plain_engine,
        open_engine(device=device, speculative=MTP(k=3)) as engine,
    ):
        whole = plain(plain_engine)
        index = token_inside(whole, 8)
        stop, token = whole.text[18:23], whole.token_ids[index]
        for options in (
            {"stop": [stop, whole.text[30:33]]},
            {"stop": stop, "min_tokens": 12},
            {"stop": whole.text[19:40], "stop_token_ids": [token]},
            {"stop_token_ids": [token], "min_tokens": 3},
        ):
            for include in (False, True):
                params = greedy(40, ignore_eos=True, include_stop_str_in_output=include, **options)
                expected, result = (
                    plain_engine.generate(PROMPT, params),
                    engine.generate(PROMPT, params),
                )
                assert expected.finish_reason == "stop" or "min_tokens" in options
                for name in ("token_ids", "text", "segments", "finish_reason", "stop_reason"):
                    assert getattr(result, name) == getattr(expected, name), (name, options)
        assert engine.acceptance.accepted > 0


# The stop callback.


@pytest.fixture
def stopping(engine: Engine) -> Any:
    """Sets the shared engine's stop callback for one test."""
    yield lambda callback: setattr(engine, "stop_callback", callback)
    engine.stop_callback = None


def test_a_stop_callback_ends_requests(engine: Engine, stopping: Any) -> None:
    expected = {prompt: engine.generate(prompt, greedy(30)) for prompt in (PROMPT, OTHER)}
    requests = {prompt: engine.submit(prompt, greedy(30)) for prompt in (PROMPT, OTHER)}
    heard: list[tuple[int, ...]] = []
    victim = requests[PROMPT]

    def stop(active: tuple[int, ...]) -> set[int]:
        heard.append(active)
        return {victim.id} if len(victim.token_ids) == 5 and victim.id in active else set()

    stopping(stop)
    events = run(engine)
    last = events_of(victim, events)[-1]
    assert last.finish_reason == "stop" and last.token_ids == ()
    result = victim.result()
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert result.token_ids == expected[PROMPT].token_ids[:5]
    assert requests[OTHER].result().token_ids == expected[OTHER].token_ids
    assert heard[0] == (victim.id, requests[OTHER].id) and heard[-1] == (requests[OTHER].id,)
    assert_idle(engine)


def test_a_stop_callback_finds_the_requests_of_others(engine: Engine, stopping: Any) -> None:
    """A `generate` and a session's turn give nobody a handle while they run."""

    def long_enough(active: tuple[int, ...]) -> list[int]:
        handles = [engine.requests[number] for number in active]
        return [request.id for request in handles if len(request.token_ids) >= 3]

    stopping(long_enough)
    waiting = [engine.submit(LONG, greedy(9)) for _ in range(engine.config.max_batch + 1)]
    assert engine.requests == {request.id: request for request in waiting}
    results = engine.generate([PROMPT, OTHER], greedy(30))
    session = engine.session()
    session.append(PROMPT)
    results.append(session.generate(greedy(30)))
    run(engine)
    results += [request.result() for request in waiting]
    assert [len(result.token_ids) for result in results] == [3] * len(results)
    assert engine.requests == {}
    session.close()
    assert_idle(engine)


def test_a_stop_callback_is_asked_once_a_step_of_active_requests(
    engine: Engine, stopping: Any
) -> None:
    calls: list[tuple[int, ...]] = []
    stopping(lambda active: calls.append(active) or ())
    engine.step()
    assert calls == []
    requests = [engine.submit(LONG, greedy(3)) for _ in range(engine.config.max_batch + 1)]
    engine.step()
    assert calls == [tuple(request.id for request in requests[:-1])], "one waits"
    calls.clear()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert len(calls) in (steps, steps - 1), "the last step has nobody left"


@pytest.mark.parametrize("wrong", [None, 7, {0}, [10**6], {"1"}], ids=repr)
def test_a_wrong_answer_of_a_stop_callback_is_named(
    engine: Engine, stopping: Any, wrong: Any
) -> None:
    request = engine.submit(PROMPT, greedy(6))
    answers = iter([wrong])
    stopping(lambda active: next(answers, ()))
    with pytest.raises(ValueError, match=r"stop_callback returned .*ids of \(\d+,\)"):
        engine.step()
    events = run(engine)
    assert sum(len(event.token_ids) for event in events_of(request, events)) == 6
    assert request.result().finish_reason == "length"


def test_what_a_stop_callback_raises_delays_events_but_loses_none(
    engine: Engine, stopping: Any
) -> None:
    heard: list[Event] = []
    request = engine.submit(PROMPT, greedy(6), on_event=heard.append)
    step_until(engine, lambda: len(request.token_ids) == 2)

    def fail(active: tuple[int, ...]) -> set[int]:
        engine.stop_callback = None
        raise KeyError("mine")

    stopping(fail)
    count = len(heard)
    with pytest.raises(KeyError, match="mine"):
        engine.step()
    assert len(heard) == count + 1, "the event's callback ran"
    events = run(engine)
    assert [event.token_ids for event in events] == [(token,) for token in request.token_ids[2:]]


def test_a_stop_callback_may_submit_and_cancel(engine: Engine, stopping: Any) -> None:
    request = engine.submit(PROMPT, greedy(20))
    made: list[Request] = []

    def swap(active: tuple[int, ...]) -> tuple[int, ...]:
        if len(request.token_ids) == 3 and not made:
            made.append(engine.submit(OTHER, greedy(2)))
            request.cancel()
            return (request.id,)
        with pytest.raises(ValueError, match="called from inside"):
            engine.step()
        return ()

    stopping(swap)
    events = events_of(request, run(engine))
    assert [event.finish_reason for event in events if event.finish_reason] == ["cancelled"]
    assert request.finish_reason == "cancelled" and len(request.token_ids) == 3
    assert len(made[0].result().token_ids) == 2


def test_a_stop_callback_sees_prefills_but_nobody_paused(device: str) -> None:
    # Two requests of 96 tokens in a pool of 15 blocks of 8: one of them has to pause.
    with open_engine(device=device, kv_blocks=15, swap_blocks=15) as engine:
        requests = [engine.submit(text, greedy(80, ignore_eos=True)) for text in (PROMPT, OTHER)]
        paused = 0

        def check(active: tuple[int, ...]) -> tuple[int, ...]:
            nonlocal paused
            paused += len([r for r in requests if r.phase is Phase.PAUSED])
            unpaused = [r.id for r in requests if r.phase in (Phase.PREFILL, Phase.DECODE)]
            assert list(active) == unpaused
            return ()

        engine.stop_callback = check
        run(engine)
        assert paused and all(len(request.token_ids) == 80 for request in requests)

        request = engine.submit(LONG, greedy(10))
        engine.stop_callback = lambda active: active
        assert len(request.prompt_token_ids) > 32
        (event,) = engine.step()
        assert (event.finish_reason, request.token_ids) == ("stop", [])
        run(engine)
        assert_idle(engine)


def test_what_cannot_be_called_is_no_stop_callback(engine: Engine) -> None:
    with pytest.raises(ValueError, match="stop_callback=5 cannot be called"):
        engine.stop_callback = 5  # type: ignore[assignment]
    assert engine.stop_callback is None
