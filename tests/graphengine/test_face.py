"""What a user meets first: names, paths, options in the wrong place, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import graphengine
from engines.small_engine import PROMPT, greedy, open_engine
from graphengine import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from graphengine.demo import checkpoint_path
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.speculative import MODES, MTP, Auto, NGram

# Opening.


def test_demo_names_the_packaged_model_wherever_a_path_may_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Checkpoint.open("demo").path == checkpoint_path()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("demo").path == checkpoint_path()
    with pytest.raises(FileNotFoundError, match=r"demo has no config\.json"):
        Checkpoint.open("./demo")
    with pytest.raises(FileNotFoundError, match=r"demo has no config\.json"):
        Checkpoint.open(Path("demo"))


def test_all_options_may_come_in_one_object() -> None:
    config = EngineConfig(device="cpu", max_batch=1, max_seq_len=32, prefill_buckets=(8, 32))
    with Engine.from_pretrained("demo", config=config) as engine:
        assert engine.config is config
        assert len(engine.generate(PROMPT, greedy(3)).token_ids) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": EngineConfig(device="cpu"), "max_batch": 2}, "not both: max_batch"),
        ({"config": {"max_batch": 2}}, r"config=\{'max_batch': 2\} must be an EngineConfig"),
    ],
)
def test_options_come_in_one_way(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained("demo", **options)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("mtp:3", MTP(k=3)), ("ngram:2:4", NGram(k=2, max_n=4)), ("auto", Auto()), ("off", None)],
)
def test_a_mode_may_be_text(text: str, mode: object) -> None:
    config = EngineConfig(device="cpu", speculative=text)
    assert config.speculative == mode
    assert config == EngineConfig(device="cpu", speculative=mode)  # type: ignore[arg-type]


def test_text_that_is_no_mode_is_refused_with_the_grammar() -> None:
    with pytest.raises(ValueError, match=r"speculative='mpt:3' must be off, auto, mtp\[:K"):
        EngineConfig(device="cpu", speculative="mpt:3")


def test_every_mode_is_a_name_of_the_package() -> None:
    for mode in (*MODES, Auto):
        assert getattr(graphengine, mode.__name__) is mode
        assert mode.__name__ in graphengine.__all__


# Options in the wrong place.


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("temperature", r"an option of a request, SamplingParams\(temperature=\.\.\.\)"),
        ("max_batch", r"an option of the engine, Engine\.from_pretrained\(\.\.\., max_batch="),
        ("temprature", "'temprature'$"),
    ],
)
def test_a_misplaced_option_says_where_it_belongs(name: str, place: str) -> None:
    with open_engine(device="cpu") as engine, engine.session() as session:
        calls: dict[str, Any] = {
            "submit": engine.submit, "generate": engine.generate, "stream": engine.stream,
            "astream": engine.astream,
        }  # fmt: skip
        for method, call in calls.items():
            with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected .*{place}"):
                call(PROMPT, **{name: 1})
        with pytest.raises(TypeError, match=place):
            session.generate(**{name: 1})  # type: ignore[call-arg]


def test_an_engine_does_not_take_what_is_a_requests() -> None:
    with pytest.raises(TypeError, match=r"from_pretrained\(\) got .*'top_k': it is an option of a"):
        Engine.from_pretrained("demo", top_k=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'priority': it is for submit, generate, stream and astr"):
        Engine.from_pretrained("demo", priority=5)  # type: ignore[call-arg]


# Threads.


def test_a_second_thread_is_refused_while_the_first_one_lives() -> None:
    with open_engine(device="cpu") as engine, ThreadPoolExecutor(1, "loop") as other:
        request, session = engine.submit(PROMPT, greedy(3)), engine.session()
        for call in (
            engine.step,
            lambda: engine.submit(PROMPT),
            lambda: engine.session(),
            lambda: setattr(engine, "stop_callback", None),
            session.close,
            engine.close,
        ):
            with pytest.raises(
                RuntimeError, match=r"called from thread 'loop_0', but thread 'MainThread' uses"
            ):
                other.submit(call).result()
        while engine.busy:
            engine.step()
        assert request.result().token_ids


def test_what_is_read_of_a_request_is_the_callers() -> None:
    with open_engine(device="cpu") as engine:
        session = engine.session()
        session.append(PROMPT)
        request = session.submit(greedy(4))
        while not request.finished:
            request.token_ids.append(99_999)
            engine.step()
        assert len(request.token_ids) == 4
        assert request.token_ids == list(request.result().token_ids)
        assert 99_999 not in session.token_ids


def test_the_thread_that_uses_an_engine_first_owns_it() -> None:
    """Another one may have opened it, and the next one may follow when it has ended."""
    with open_engine(device="cpu") as engine:
        said: list[tuple[int, ...]] = []

        def loop() -> None:
            said.append(engine.generate(PROMPT, greedy(3)).token_ids)

        for _ in range(2):
            thread = threading.Thread(target=loop)
            thread.start()
            thread.join()
        loop()
        assert len(said) == 3 and len({*said}) == 1


# Typed output.


class Model:
    """Like a pydantic model: the class tells its schema."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"type": "integer"}}}


class Adapter:
    """Like a pydantic `TypeAdapter`: the object tells its schema."""

    def json_schema(self) -> dict[str, Any]:
        return {"type": "array"}


def test_a_schema_may_come_from_a_model_or_an_adapter() -> None:
    assert StructuredOutputsParams(json=Model).schema == Model.model_json_schema()
    assert StructuredOutputsParams(json=Adapter()).schema == {"type": "array"}
    made = StructuredOutputsParams(json=Model)
    assert made == StructuredOutputsParams(json=Model.model_json_schema())


def test_what_has_no_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="as a mapping or as text, or a pydantic model or TypeAd"):
        StructuredOutputsParams(json=5)  # type: ignore[arg-type]


# Names.


def test_requests_events_and_results_share_names() -> None:
    with open_engine(device="cpu") as engine:
        events = list(engine.stream(PROMPT, SamplingParams(temperature=0, stop=["e"])))
        last = events[-1]
        request, result = last.request, last.request.result()
        assert {event.request_id for event in events} == {request.request_id} == {request.id}
        assert last.request_id == result.request_id == request.request_id
        assert last.stop_reason == request.stop_reason == result.stop_reason == "e"
        assert {event.stop_reason for event in events[:-1]} <= {None}
        assert last.finish_reason == request.finish_reason == result.finish_reason == "stop"
