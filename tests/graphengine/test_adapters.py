"""Adapters of an open engine: names, slots, loads, sessions, prefixes and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.adapters import ATTENTION, write_adapter
from checkpoints.few_layers import few_layers
from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, run
from extent import examples
from graphengine.cli.main import main
from graphengine.config import EngineConfig
from graphengine.speculative import MTP

NAMES = ("one", "two", "three")
PROMPTS = (PROMPT, OTHER, LONG)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, Path(few_layers()), rank=4, seed=seed)
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str, str | None], tuple[int, ...]]:
    """The greedy tokens of a prompt with an adapter, alone in an engine of plain decoding."""
    found: dict[tuple[str, str | None], tuple[int, ...]] = {}
    with open_engine(adapters=folders) as engine:
        for prompt in PROMPTS:
            for name in (None, *NAMES):
                result = engine.generate(prompt, greedy(), adapter=name)
                found[prompt, name] = result.token_ids
    with open_engine() as engine:
        for prompt in PROMPTS:
            assert engine.generate(prompt, greedy()).token_ids == found[prompt, None]
    return lambda prompt, name: found[prompt, name]


def test_adapters_change_tokens(expected: Callable[..., Any]) -> None:
    for prompt in PROMPTS:
        assert len({expected(prompt, name) for name in (None, *NAMES)}) == 4


def test_load_and_unload_between_requests(
    folders: dict[str, Path], expected: Callable[..., Any]
) -> None:
    """Nothing is captured again, and a slot serves what was loaded last."""
    with open_engine(adapters={"one": folders["one"]}, max_adapters=2) as engine:
        captures, table = engine.report().captures, engine.runtime.adapters
        assert table is not None and table.nbytes == next(
            line.bytes for line in engine.memory.budget.lines if "adapters" in line.name
        )
        assert engine.load_adapter("two", folders["two"]).rank == 4
        assert [*engine.adapters] == ["one", "two"]
        for name in ("one", "two", None):
            assert engine.generate(PROMPT, greedy(), adapter=name).token_ids == expected(
                PROMPT, name
            )
        with pytest.raises(ValueError, match="'three' has no slot: max_adapters=2, and 'one'"):
            engine.load_adapter("three", folders["three"])
        with pytest.raises(ValueError, match=r"'two' is loaded already, from .*two"):
            engine.load_adapter("two", folders["three"])
        engine.unload_adapter("one")
        engine.load_adapter("three", folders["three"])
        assert engine.generate(PROMPT, greedy(), adapter="three").token_ids == expected(
            PROMPT, "three"
        )
        for name in ("one", "", 3):
            with pytest.raises(ValueError, match=r"adapter ('one'|''|3) (is not loaded|must be)"):
                engine.submit(PROMPT, greedy(), adapter=name)  # type: ignore[arg-type]
        assert engine.report().captures == captures
        assert engine.counters["adapters/loads"] == 3


def test_an_adapter_in_use_stays(folders: dict[str, Path], expected: Callable[..., Any]) -> None:
    with open_engine(adapters={"one": folders["one"]}, max_batch=1) as engine:
        requests = [engine.submit(PROMPT, greedy(), adapter="one") for _ in range(2)]
        engine.step()
        ids = ", ".join(str(request.id) for request in requests)
        with pytest.raises(ValueError, match=f"adapter 'one' is in use by 2 requests: {ids}"):
            engine.unload_adapter("one")
        cancelled = engine.submit(PROMPT, greedy(), adapter="one")
        cancelled.cancel()
        with pytest.raises(ValueError, match=r"by 3 requests: .*; 1 of them were cancelled, and"):
            engine.unload_adapter("one")
        # Another one may be loaded meanwhile.
        engine.load_adapter("two", folders["two"])
        run(engine)
        for request in requests:
            assert request.result().token_ids == expected(PROMPT, "one")
        engine.unload_adapter("one")
        with pytest.raises(ValueError, match="adapter 'one' is not loaded: there are 'two'"):
            engine.unload_adapter("one")


def test_a_session_belongs_to_its_adapter(
    folders: dict[str, Path], expected: Callable[..., Any], tmp_path: Path
) -> None:
    with open_engine(adapters={"one": folders["one"]}, max_adapters=2) as engine:
        with pytest.raises(ValueError, match="adapter 'two' is not loaded: there are 'one'"):
            engine.session(adapter="two")
        with engine.session(adapter="one") as session:
            session.append(LONG)
            assert session.generate(greedy()).token_ids == expected(LONG, "one")
            assert session.adapter == "one" and session.cached_tokens > 0
            session.rewind(12)
            again = session.generate(greedy())
            assert again.token_ids == expected(LONG, "one") and again.cached_tokens > 0
            session.rewind(12)
            with pytest.raises(ValueError, match=r"='two', but .* adapter 'one': open a"):
                session.generate(greedy(), adapter="two")
            kept = session.snapshot()
            assert kept.adapter is not None and kept.adapter[0] == "one"
            with engine.restore_session(kept) as copy:
                found = copy.generate(greedy())
                assert found.token_ids == expected(LONG, "one") and found.cached_tokens > 0
            session.snapshot(tmp_path / "one.safetensors")
            assert session.fork().generate(greedy()).cached_tokens > 0
            # Another load of the name: its KV is not that of the first.
            engine.unload_adapter("one")
            for call in (lambda: session.generate(greedy()), session.snapshot):
                with pytest.raises(ValueError, match="adapter 'one' is not loaded: there are none"):
                    call()
            fork = session.fork()
            engine.load_adapter("one", folders["two"])
            message = "belongs to an adapter 'one' with fingerprint [0-9a-f]{16}, the engine's has"
            with pytest.raises(ValueError, match=message):
                engine.restore_session(tmp_path / "one.safetensors")
            # KV of the other matrices is not kept.
            assert session.snapshot().blocks == 0
            for each in (session, fork):
                changed = each.generate(greedy())
                assert changed.cached_tokens == 0 and changed.token_ids == expected(LONG, "two")


def test_prefixes_are_found_by_the_same_load_only(
    folders: dict[str, Path], expected: Callable[..., Any]
) -> None:
    with open_engine(adapters={"one": folders["one"]}, prefix_caching=True) as engine:
        for name, cached in ((None, False), ("one", False), ("one", True), (None, True)):
            result = engine.generate(LONG, greedy(), adapter=name)
            assert result.token_ids == expected(LONG, name)
            assert (result.cached_tokens > 0) == cached
        engine.unload_adapter("one")
        engine.load_adapter("one", folders["two"])
        result = engine.generate(LONG, greedy(), adapter="one")
        assert result.cached_tokens == 0 and result.token_ids == expected(LONG, "two")


def test_samples_share_a_prompt_and_its_adapter(folders: dict[str, Path]) -> None:
    with open_engine(adapters={"one": folders["one"]}) as engine:
        results = engine.generate_many(LONG, greedy(), n=3, adapter="one")
        assert {result.adapter for result in results} == {"one"}
        assert len({result.token_ids for result in results}) == 1
        assert engine.counters["samples/shared_tokens"] > 0


def test_draft_modules_draft_without_it_and_the_model_verifies_with_it(
    folders: dict[str, Path], expected: Callable[..., Any]
) -> None:
    with open_engine(adapters=folders, speculative=MTP(k=2)) as engine:
        requests = [
            engine.submit(prompt, greedy(), adapter=name)
            for prompt, name in zip(PROMPTS, ("one", None, "three"), strict=True)
        ]
        run(engine)
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert request.result().token_ids == expected(prompt, request.adapter)
        assert engine.acceptance.proposed > 0


@settings(
    deadline=None,
    max_examples=examples(6, 40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["submit", "load", "unload", "step", "cancel"]),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        max_size=24,
    )
)
def test_churn(folders: dict[str, Path], expected: Callable[..., Any], moves: Any) -> None:
    """Requests, loads and unloads in any order: each request has its own adapter's tokens."""
    with open_engine(max_adapters=2, prefix_caching=True) as engine:
        requests: list[tuple[str, Any]] = []
        for move, name, prompt in moves:
            asked = None if name == 3 else NAMES[name]
            if move == "step":
                engine.step()
            elif move == "cancel" and requests:
                requests.pop(prompt % len(requests))[1].cancel()
            elif move == "submit" and (asked is None or asked in engine.adapters):
                request = engine.submit(PROMPTS[prompt], greedy(), adapter=asked)
                requests.append((PROMPTS[prompt], request))
            elif move == "load" and asked and len(engine.adapters) < 2:
                if asked not in engine.adapters:
                    engine.load_adapter(asked, folders[asked])
            elif move == "unload" and asked in engine.adapters:
                used = any(each.adapter == asked for each in engine.requests.values())
                if not used:
                    engine.unload_adapter(asked)
        run(engine)
        for text, request in requests:
            assert request.result().token_ids == expected(text, request.adapter)


def test_slots_are_next_to_what_adapters_change(tmp_path: Path, folders: dict[str, Path]) -> None:
    """With adapters of attention alone, feed-forwards run as without any."""
    attention = write_adapter(tmp_path / "a", Path(few_layers()), ATTENTION, rank=2)
    with open_engine(adapters={"a": attention}, max_adapters=2) as engine:
        table = engine.runtime.adapters
        assert table is not None
        held = [table.of(each.weight) is not None for each in engine.model.weights.adaptable()]
        assert held == [True, True, False, False] * (len(held) // 4)
        with pytest.raises(ValueError, match=r"changes \d+ of \d+ linears without slots"):
            engine.load_adapter("b", folders["one"])
        assert [*engine.adapters] == ["a"]


def test_an_engine_without_slots(folders: dict[str, Path]) -> None:
    with open_engine() as engine:
        assert engine.runtime.adapters is None and not engine.adapters
        names = {field.name for field in engine.runtime.buffers.fields}
        assert not names & {"adapter", "prefill_adapter"}
        with pytest.raises(ValueError, match=r"opened without adapters: max_adapters=0"):
            engine.load_adapter("one", folders["one"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapters": {"a": "x", "b": "y"}, "max_adapters": 1}, "adapters has 2 .* max_adapters=1"),
        ({"adapters": ["x"]}, r"adapters=\['x'\] must map names to the folders"),
        ({"adapters": {"": "x"}}, "adapter '' must be a name"),
        ({"adapters": {"a": 3}}, r"adapters\['a'\]=3 must be a path"),
        ({"merge_adapter": ""}, "merge_adapter='' must be a path"),
        ({"max_adapters": 65}, "max_adapters=65 must be at most 64"),
        ({"max_adapter_rank": 0}, r"max_adapter_rank=0 must be in \[1, 512\]"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_an_engine_has_slots_for_four_or_all_it_is_given() -> None:
    assert EngineConfig().adapter_slots == 0
    assert EngineConfig(adapters={"a": "x"}).adapter_slots == 4
    assert EngineConfig(adapters={str(each): "x" for each in range(6)}).adapter_slots == 6
    assert EngineConfig(adapters={"a": "x"}, max_adapters=1).adapter_slots == 1


def test_steps_do_not_allocate_for_adapters_that_are_loaded(folders: dict[str, Path]) -> None:
    """A slot's tensors keep their addresses."""
    with open_engine(adapters={"one": folders["one"]}) as engine:
        table = engine.runtime.adapters
        assert table is not None
        slots = [table.of(each.weight) for each in engine.model.weights.adaptable()]
        before = [each.data_ptr() for held in slots if held for each in held]
        engine.load_adapter("two", folders["two"])
        engine.unload_adapter("one")
        engine.load_adapter("three", folders["three"])
        assert before == [each.data_ptr() for held in slots if held for each in held]
        assert all(bool(torch.isfinite(each).all()) for held in slots if held for each in held)


def test_a_command_uses_the_first_adapter_and_info_counts_the_slots(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ["--checkpoint", str(few_layers()), "--device", "cpu", "--max-seq-len", "128"]
    engine += ["--adapter", f"two={folders['two']}", "--adapter", f"one={folders['one']}"]
    request = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", "12", "--json"]
    assert main(["generate", *engine, *request]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["adapter"] == "two"
    assert main(["info", *engine, "--max-adapters", "3", "--max-adapter-rank", "4"]) == 0
    assert "adapters (3 of rank 4 or less)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["info", *engine, "--adapter", "three"])
    assert "'three' must be NAME=PATH" in capsys.readouterr().err
