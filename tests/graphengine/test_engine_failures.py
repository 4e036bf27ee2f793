"""Devices that are slow or fail, waits that are interrupted, and closing."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from checkpoints.few_layers import few_layers
from engines.named_graphs import graph_of, replace_graph
from engines.small_engine import (
    LONG,
    OTHER,
    PROMPT,
    assert_idle,
    events_of,
    greedy,
    open_engine,
    run,
    sampled,
    step_until,
    tokens_of,
)
from graphengine import Engine, Event
from graphengine.core import waits
from graphengine.demo import checkpoint_path
from graphengine.drafters import NoDrafter
from graphengine.program.graph_key import decode_key, prefill_key
from graphengine.speculative import NGram
from graphengine.text import decoders
from timelines.fake_clock import Clock


def first_new(tokens: tuple[int, ...], start: int) -> int:
    """The first index from `start` on whose token did not come before."""
    return next(index for index in range(start, len(tokens)) if tokens[index] not in tokens[:index])


# Steps that do not wait.


class Late:
    """Stands in for a captured graph whose device is slow: it runs when it is told to."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.close, self.report = graph.close, graph.report
        self.pending = 0

    def replay(self) -> None:
        self.pending += 1

    def finish(self) -> None:
        for _ in range(self.pending):
            self.graph.replay()
        self.pending = 0


def test_the_waits_of_a_step_share_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(seconds) / 1000)
    monkeypatch.setattr(waits, "time", clock)
    left: list[float] = []

    def noted(name: str) -> None:
        own = getattr(waits.Waits, name)

        def wait(self: Any, *arguments: Any) -> Any:
            left.append(arguments[-1])
            return own(self, *arguments[:-1], None)

        monkeypatch.setattr(waits.Waits, name, wait)

    for name in ("wait_tokens", "wait_logprobs", "wait_routes"):
        noted(name)
    with open_engine(device="cpu", max_logprobs=1) as engine:
        engine.submit(PROMPT, greedy(2, logprobs=1))
        engine.step(timeout=100)
    # Each wait of the prompt's chunk and of the token after it has what the ones before left.
    assert len(left) >= 3 and all(after < before for before, after in pairwise(left))
    assert 90 < left[-1] < left[0] < 100


def test_steps_with_a_timeout_bring_the_same_tokens(engine: Engine) -> None:
    expected = engine.generate([PROMPT, LONG], greedy(10))
    requests = [engine.submit(prompt, greedy(10)) for prompt in (PROMPT, LONG)]
    events: list[Event] = []
    # A device may answer only after many of them.
    while engine.busy:
        events += engine.step(timeout=0)
        events += engine.step(timeout=0.001)
    for request, result in zip(requests, expected, strict=True):
        assert tokens_of(events_of(request, events)) == result.token_ids
    assert_idle(engine)


def test_a_step_does_not_wait_beyond_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(per_call=1e-3)
    monkeypatch.setattr("graphengine.core.engine_core.time", clock.module)
    monkeypatch.setattr("graphengine.buckets.mailbox.time", clock.module)
    with open_engine(device="cpu", lookahead=0) as engine:
        late = {key: Late(graph) for key, graph in engine.runtime.graphs.items()}
        engine.runtime.graphs.update(late)
        request = engine.submit(PROMPT, greedy(2))
        prefill = late[prefill_key(8)]
        for timeout in (0, 0, 0.05, -1):
            started = clock.now
            assert engine.step(timeout=timeout) == []
            # Two looks at the clock decide how long to wait, and one begins the wait.
            assert max(timeout, 0) <= clock.now - started < max(timeout, 0) + 10e-3
            assert prefill.pending == 1, "one replay is in flight, and no other is launched"
        assert engine.busy
        # A request that is cancelled meanwhile need not wait for its replay.
        request.cancel()
        (event,) = engine.step(timeout=0)
        assert event.finish_reason == "cancelled"
        assert engine.busy, "the replay is still in flight"
        prefill.finish()
        assert engine.step(timeout=0) == []
        assert_idle(engine)

        request = engine.submit(PROMPT, greedy(2))
        assert engine.step(timeout=0) == []
        prefill.finish()
        (event,) = engine.step(timeout=0)
        assert len(event.token_ids) == 1
        assert engine.step(timeout=0) == []
        late[decode_key(1)].finish()
        (event,) = engine.step(timeout=0)
        assert event.finish_reason == "length"


@pytest.mark.parametrize("timeout", [float("nan"), "x"])
def test_a_timeout_that_is_no_time_is_refused(engine: Engine, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout="):
        engine.step(timeout)


def test_a_cancellation_outlives_an_interrupted_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, other = engine.submit(PROMPT, greedy()), engine.submit(OTHER, greedy())
    engine.step()
    request.cancel()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.runtime.mailbox, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert [event.finish_reason for event in events_of(request, run(engine))] == ["cancelled"]
    assert other.finished


# Failures.


class Failing:
    """Stands in for a captured graph; its replay number `at` raises `error`."""

    def __init__(self, graph: Any, error: BaseException, *, at: int = 1) -> None:
        self.graph, self.error, self.left = graph, error, at
        self.close, self.report = graph.close, graph.report

    def replay(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        self.graph.replay()


def assert_broken(engine: Engine, cause: str) -> None:
    calls: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.submit(PROMPT),
        lambda: engine.generate(PROMPT),
        lambda: engine.stream(PROMPT),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"broken.*{cause}"):
            call()


def test_a_failing_replay_breaks_the_engine(device: str) -> None:
    engine = open_engine(device=device)
    error = RuntimeError("the graph is gone")
    failing = Failing(graph_of(engine, "decode/2/fast"), error, at=3)
    replace_graph(engine, "decode/2/fast", failing)
    request = engine.submit(PROMPT, greedy())
    stream = engine.stream(PROMPT, greedy())
    waiting = [engine.submit(LONG, greedy()) for _ in range(engine.config.max_batch)]
    waiting[0].cancel()
    with pytest.raises(RuntimeError, match="the graph is gone"):
        run(engine)
    assert_broken(engine, "the graph is gone")
    with pytest.raises(RuntimeError, match="broken"):
        list(stream)
    had = list(request.token_ids)
    engine.close()
    engine.close()
    assert request.result().finish_reason == "cancelled"
    assert list(request.token_ids) == had
    assert all(other.finished for other in waiting)
    with pytest.raises(ValueError, match="closed"):
        engine.step()


def test_generate_passes_a_failure_on() -> None:
    with open_engine(device="cpu") as engine:
        graph = graph_of(engine, "prefill/8")
        replace_graph(engine, "prefill/8", Failing(graph, RuntimeError("no such kernel")))
        with pytest.raises(RuntimeError, match="no such kernel"):
            engine.generate([PROMPT, OTHER], greedy())
        assert_broken(engine, "no such kernel")


def test_a_replay_that_publishes_nothing_breaks_the_engine() -> None:
    with open_engine(device="cpu", wait_limit_s=0.05) as engine:
        late = Late(graph_of(engine, "decode/1/fast"))
        replace_graph(engine, "decode/1/fast", late)
        engine.submit(PROMPT, greedy())
        with pytest.raises((RuntimeError, TimeoutError), match="replay 2"):
            run(engine)
        assert_broken(engine, "replay 2")


def test_an_interrupted_replay_does_not_leave_the_engine_spinning() -> None:
    """Ctrl-C in a launch: afterwards all goes on, or the engine says that it is broken."""
    with open_engine(device="cpu") as engine:
        expected = engine.generate(PROMPT, greedy()).token_ids
        failing = Failing(graph_of(engine, "decode/1/fast"), KeyboardInterrupt(), at=4)
        replace_graph(engine, "decode/1/fast", failing)
        request = engine.submit(PROMPT, greedy())
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        try:
            run(engine)
        except RuntimeError as error:
            assert "broken" in str(error)
        else:
            assert request.result().token_ids == expected


class Interrupted:
    """Stands in for a captured graph; Ctrl-C comes `times` in its replay number `at`."""

    def __init__(self, graph: Any, *, at: int, times: int = 1) -> None:
        self.graph, self.left, self.times = graph, at, times
        self.close, self.report = graph.close, graph.report

    def replay(self) -> None:
        self.left -= 1
        for _ in range(self.times if self.left == 0 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        self.graph.replay()


def interrupt_next(engine: Engine, *, at: int = 3, times: int = 1) -> None:
    """Let Ctrl-C come in the middle of a launch."""
    graph = graph_of(engine, "decode/1/fast")
    if isinstance(graph, Interrupted):
        graph = graph.graph
    replace_graph(engine, "decode/1/fast", Interrupted(graph, at=at, times=times))


def test_ctrl_c_in_a_launch_ends_the_call_and_not_the_engine(device: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with open_engine(device=device) as engine, engine.session() as session:
        expected = engine.generate(PROMPT, greedy()).token_ids
        session.append(PROMPT)
        calls: list[Callable[[], object]] = [
            lambda: engine.generate(PROMPT, greedy()),
            lambda: list(engine.stream(PROMPT, greedy())),
            lambda: session.generate(greedy()),
            lambda: list(session.stream(greedy())),
        ]
        for call in calls:
            interrupt_next(engine)
            with pytest.raises(KeyboardInterrupt):
                call()
            assert signal.getsignal(signal.SIGINT) is handler
            # What it held is free before anybody steps again.
            assert not engine.requests and not engine.busy
            assert engine.generate(PROMPT, greedy()).token_ids == expected
        assert session.generate(greedy()).token_ids == expected
        assert engine.counters["finished/cancelled"] == len(calls)


def test_ctrl_c_in_a_step_loses_no_event_of_others(device: str) -> None:
    with open_engine(device=device) as engine:
        expected = engine.generate(PROMPT, greedy()).token_ids
        heard: list[Event] = []
        interrupt_next(engine)
        request = engine.submit(PROMPT, greedy(), on_event=heard.append)
        events: list[Event] = []
        interrupts = 0
        while engine.busy:
            try:
                events += engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
        assert tokens_of(events) == tokens_of(heard) == expected == request.result().token_ids
        # While a call of one's own is interrupted, too: others go on.
        interrupt_next(engine, at=1)
        other = engine.submit(PROMPT, greedy())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(OTHER, greedy(1))
        events = run(engine)
        assert tokens_of(events_of(other, events)) == other.result().token_ids == expected
        assert_idle(engine)


def test_a_second_ctrl_c_does_not_wait() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with open_engine(device="cpu") as engine:
        interrupt_next(engine, times=2)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPT, greedy())
        assert_broken(engine, "KeyboardInterrupt")
        assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_of_the_program_is_called_after_the_step() -> None:
    """The handler is asyncio's, or one that only takes a note; one that is not Python's stays as it
    is.
    """
    noted: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    with open_engine(device="cpu") as engine:
        expected = engine.generate(PROMPT, greedy()).token_ids
        try:
            signal.signal(signal.SIGINT, lambda *_: noted.append(engine.core.broken is None))
            interrupt_next(engine)
            assert engine.generate(PROMPT, greedy()).token_ids == expected and noted == [True]
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            interrupt_next(engine)
            assert engine.generate(PROMPT, greedy()).token_ids == expected
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)


def test_not_a_number_ends_only_the_request_that_meets_it(
    checkpoints: dict[str, Any], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned = 300
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], list(range(20, 60))]
    with open_engine(checkpoints["qwen3-biases"].path, device=device) as engine:
        params = greedy(30, ignore_eos=True)
        whole = engine.generate([1, 2, 300, 4], params)
        expected = engine.generate(prompts, params)
        others = {token for result in expected for token in result.token_ids}
        met = first_new(whole.token_ids, 3)
        weight = engine.model.weights.embedding
        assert weight.data_ptr() != engine.model.weights.lm_head.data_ptr()

        # In the prompt of one request, then among what one request generates.
        for row, prompt, tokens in (
            (poisoned, [1, 2, poisoned, 4], ()),
            (whole.token_ids[met], [1, 2, 300, 4], whole.token_ids[: met + 1]),
        ):
            assert row not in others and not any(row in other for other in prompts)
            kept = weight[row].clone()
            weight[row] = float("nan")
            if device == "cuda":
                torch.cuda.synchronize()
            failed = engine.counters["finished/error"]
            request = engine.submit(prompt, params)
            requests = [engine.submit(other, params) for other in prompts]
            events = run(engine)
            result = request.result()
            assert result.finish_reason == "error" and result.token_ids == tokens
            assert events_of(request, events)[-1].finish_reason == "error"
            assert tokens_of(events_of(request, events)) == tokens
            assert engine.counters["finished/error"] == failed + 1
            for other, undisturbed in zip(requests, expected, strict=True):
                assert other.result().token_ids == undisturbed.token_ids
            weight[row] = kept
            if device == "cuda":
                torch.cuda.synchronize()
            # The next owner of its blocks, NaN in their tails, sees nothing of it.
            again = engine.generate(prompts, params)
            assert [r.token_ids for r in again] == [r.token_ids for r in expected]
        assert_idle(engine)
    assert "the logits hold a NaN, or no finite value" in caplog.text


# Closing.


class Deliberate(Exception):
    """Raised by callers."""


def test_nothing_works_after_close(device: str) -> None:
    engine = open_engine(device=device)
    finished = engine.submit(PROMPT, greedy(2))
    run(engine)
    running = engine.submit(PROMPT, greedy(50))
    step_until(engine, lambda: len(running.token_ids) == 3)
    waiting = engine.submit(OTHER, greedy())
    stream = engine.stream(OTHER, greedy())
    engine.close()
    engine.close()
    assert not engine.busy
    for call in (
        engine.step,
        lambda: engine.submit(PROMPT),
        lambda: engine.generate(PROMPT),
        lambda: engine.generate([PROMPT], [greedy()]),
        lambda: engine.stream(PROMPT),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    # Handles outlive the engine.
    assert finished.result().finish_reason == "length"
    for request in (running, waiting):
        request.cancel()
        assert request.result().finish_reason == "cancelled"
    assert len(running.token_ids) == 3
    stream.close()  # type: ignore[attr-defined]


DESCRIBES = {
    "acceptance", "busy", "config", "core", "counters", "eos_ids", "gate", "last_step", "memory",
    "numerics_id", "prefill_cut", "recorder", "report", "requests", "row_family", "scheduler",
    "stats", "stop_callback", "tokenizer", "default_params", "weight_version", "adapters",
}  # fmt: skip
"""Public names of an engine that still work once it is closed, close() and __exit__ aside."""


def test_what_describes_an_engine_outlives_it(device: str) -> None:
    with open_engine(device=device, speculative=NGram(k=2)) as engine:
        engine.recorder.start()
        engine.generate(PROMPT, greedy(6))
        read = {name: getattr(engine, name) for name in DESCRIBES}
        before = {name: value() if callable(value) else value for name, value in read.items()}
        public = {name for name in dir(engine) if not name.startswith("_")}
    assert isinstance(engine.core.drafter, NoDrafter), "what it held is freed"
    # With what the device counted, read as it closed.
    report, counters = before.pop("report"), before["stats"]["counters"]
    assert counters["ngram/unmatched"] > 0
    assert engine.report() == dataclasses.replace(report, counters=counters)
    assert str(engine.report()).startswith(str(report).partition("counters")[0])
    for name, was in before.items():
        now = getattr(engine, name)
        assert (now() if callable(now) else now) == was, name
    assert len(engine.recorder.replays()) > 0

    calls: dict[str, Callable[[], object]] = {
        "astream": lambda: engine.astream(PROMPT),
        "drain": engine.drain,
        "draft": lambda: engine.draft(None, [1]),  # type: ignore[arg-type]
        "force": lambda: engine.force(None, 1),  # type: ignore[arg-type]
        "embed_frames": lambda: engine.embed_frames([[1]]),
        "delay_frames": lambda: engine.delay_frames([[1]]),
        "undelay_frames": lambda: engine.undelay_frames([[1]]),
        "feed": lambda: engine.feed(None, torch.zeros(1, 4)),  # type: ignore[arg-type]
        "generate": lambda: engine.generate(PROMPT),
        "generate_many": lambda: engine.generate_many(PROMPT, n=2),
        "load_adapter": lambda: engine.load_adapter("a", "nowhere"),
        "unload_adapter": lambda: engine.unload_adapter("a"),
        "release_memory": engine.release_memory,
        "restore_memory": engine.restore_memory,
        "restore_session": lambda: engine.restore_session("nowhere"),
        "session": engine.session,
        "step": engine.step,
        "stream": lambda: engine.stream(PROMPT),
        "submit": lambda: engine.submit(PROMPT),
        "submit_many": lambda: engine.submit_many(PROMPT, n=2),
        "update_weights": lambda: engine.update_weights({}),
        **{name: partial(getattr, engine, name) for name in ("cache", "model", "runtime")},
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(ValueError, match="the engine is closed, and what its runtime held is fre"):
        engine.model  # noqa: B018
    with pytest.raises(ValueError, match="the engine is closed: nothing is left to record"):
        engine.recorder.start()
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'modle'"):
        engine.modle  # type: ignore[attr-defined]  # noqa: B018
    assert public - DESCRIBES == {*calls, "close", "from_pretrained"}


def test_a_with_block_closes(device: str) -> None:
    with open_engine(device=device) as engine:
        engine.generate(PROMPT, greedy(2))
    with pytest.raises(ValueError, match="closed"):
        engine.step()
    with pytest.raises(Deliberate), open_engine(device=device) as engine:
        engine.submit(PROMPT, greedy())
        engine.step()
        raise Deliberate
    with pytest.raises(ValueError, match="closed"):
        engine.step()


def test_close_frees_what_is_large() -> None:
    engine = open_engine(device="cpu")
    engine.generate(PROMPT, greedy(2))
    model = engine.model
    tensors = [*engine.runtime.caches[0], *model.weights.tensors(), engine.runtime.mailbox.tensor]
    tensors += [engine.runtime.buffers["block_table"]]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors, model
    engine.close()
    gc.collect()
    assert not [reference() for reference in alive if reference() is not None]


@pytest.mark.gpu
def test_close_frees_the_devices_memory() -> None:
    def open_and_close() -> int:
        with open_engine(device="cuda") as engine:
            engine.generate([PROMPT, LONG], greedy(4))
            held = torch.cuda.memory_allocated()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() < held
        return torch.cuda.memory_allocated()

    open_and_close()
    assert open_and_close() == open_and_close(), "each engine leaves something behind"


def test_two_engines_in_turns(engine: Engine, checkpoints: dict[str, Any]) -> None:
    device = engine.config.device
    ids = [5, 6, 7]
    with (
        open_engine(checkpoints["llama-biases"].path, device=device, lookahead=0) as other,
        open_engine(device=device, max_batch=2) as twin,
    ):
        engines = [engine, other, twin]
        alone = [each.generate(ids, sampled(20, seed=4)).token_ids for each in engines]
        requests = [each.submit(ids, sampled(20, seed=4)) for each in engines]
        while any(each.busy for each in engines):
            for each in engines:
                each.step()
        assert [request.result().token_ids for request in requests] == alone
        assert alone[0] == alone[2] != alone[1]
        other.close()
        assert engine.generate(ids, sampled(20, seed=4)).token_ids == alone[0]


# Tokens whose text cannot be made.


class Panicking(NamedTuple):
    path: Path
    token: int
    text: str


@pytest.fixture
def panicking(engine: Engine, edited: Callable[..., Path]) -> Panicking:
    """A checkpoint with a decoder of `tokenizers` that panics at a token of a single character.

    The tokens before it, and those of the other request, do not consist of this character.
    """
    assert engine.tokenizer is not None
    said, others = engine.generate([PROMPT, OTHER], [greedy(20), greedy(6)])
    said_texts = [engine.tokenizer.id_to_token(each) or "" for each in said.token_ids]
    other_texts = [engine.tokenizer.id_to_token(each) or "" for each in others.token_ids]
    for index, text in enumerate(said_texts):
        spoilt = [each for each in said_texts[:index] + other_texts if set(each) == {text}]
        if index > 1 and len(text) == 1 and not spoilt:
            decoder = {"type": "Strip", "content": text, "start": 0, "stop": 10**9}
            path = edited(few_layers(), tokenizer={"decoder": decoder})
            return Panicking(path, said.token_ids[index], text)
    raise AssertionError(f"no token of one character: {said_texts}, {other_texts}")


@pytest.mark.parametrize("speculative", [None, NGram(2)], ids=["plain", "ngram"])
def test_a_token_that_cannot_be_decoded_ends_its_request_alone(
    panicking: Panicking, device: str, speculative: Any, engine: Engine, caplog: Any
) -> None:
    path, token, text = panicking
    expected = engine.generate([PROMPT, OTHER], [greedy(20), greedy(6)])
    with open_engine(path, device=device, speculative=speculative) as own:
        requests = [own.submit(PROMPT, greedy(20)), own.submit(OTHER, greedy(6))]
        events = run(own)
        results = [request.result() for request in requests]
        assert [result.finish_reason for result in results] == ["error", "length"]
        before = expected[0].token_ids.index(token)
        assert results[0].token_ids == expected[0].token_ids[:before]
        assert len(results[0].segments) == before and results[0].stop_reason is None
        assert results[1].token_ids == expected[1].token_ids
        for request, result in zip(requests, results, strict=True):
            own_events = events_of(request, events)
            assert "".join(event.text for event in own_events) == result.text
            assert tokens_of(own_events) == result.token_ids
        assert own.counters["finished/error"] == own.counters["finished/length"] == 1
        assert f"request 1: token {token} ({text!r}) cannot be decoded: tokenizers panicked" in (
            caplog.text
        )
        assert_idle(own)
        assert own.generate(OTHER, greedy(6)).token_ids == expected[1].token_ids
        with pytest.raises(ValueError, match="1 tokens cannot be decoded: tokenizers panicked"):
            own.tokenizer.decode([token])


def test_an_end_that_cannot_be_decoded_is_an_error(
    engine: Engine,
    edited: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    caplog: Any,
) -> None:
    """What was held back for the end of the text: there the decoder fails."""
    expected = engine.generate(PROMPT, greedy(3))

    def flush(self: decoders.Pipeline) -> str:
        raise RuntimeError("no end")

    monkeypatch.setattr(decoders.Pipeline, "flush", flush)
    path = edited(few_layers(), tokenizer={"decoder": {"type": "Fuse"}})
    with open_engine(path, device=device) as own:
        result = own.generate(PROMPT, greedy(3))
        assert result.finish_reason == "error"
        assert result.token_ids == expected.token_ids
        assert "the end of the text cannot be decoded: no end" in caplog.text
        stop = expected.token_ids[-1]
        stopped = own.generate(PROMPT, greedy(9, stop_token_ids=[stop]))
        assert (stopped.finish_reason, stopped.stop_reason) == ("error", None)
        request = own.submit(PROMPT, greedy(9))
        step_until(own, lambda: len(request.token_ids) > 0)
        request.cancel()
        run(own)
        assert request.result().finish_reason == "cancelled"
        assert_idle(own)


def test_a_prompt_that_cannot_be_encoded_is_refused(
    edited: Callable[..., Path], device: str
) -> None:
    path = edited(
        checkpoint_path(), tokenizer={"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    )
    with open_engine(path, device=device) as own:
        with pytest.raises(ValueError, match="a text of 11 characters cannot be encoded: tokeniz"):
            own.submit(PROMPT, greedy(3))
        assert len(own.generate([1, 2], greedy(3)).token_ids) == 3


def test_a_post_processor_that_fails_at_any_text_is_refused_at_opening(
    edited: Callable[..., Path],
) -> None:
    unknown = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    unknown["single"] = [{"SpecialToken": {"id": "nope", "type_id": 0}}]
    path = edited(few_layers(), tokenizer={"post_processor": unknown})
    with pytest.raises(ValueError, match=r"tokenizer\.json: its post-processor fails at any text"):
        open_engine(path, device="cpu")
