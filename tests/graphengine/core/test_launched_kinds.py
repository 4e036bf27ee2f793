"""Launches of several steps in engines of every kind: each gives what launches of one step give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.adapters import write_adapter
from checkpoints.few_layers import few_layers
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, open_engine, run, sampled
from extent import some_of
from graphengine import Engine, SamplingParams
from graphengine.speculative import MTP, GateOptions, NGram, Suffix

PROMPTS = (PROMPT, OTHER, LONG, PROMPT)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "chain": {"speculative": MTP(k=2)},
    "tree": {"speculative": MTP(tree=[[0], [1], [0, 0]])},
    "n-grams": {"speculative": NGram(k=3)},
    "suffixes": {"speculative": Suffix(k=3)},
    "gate": {
        "speculative": MTP(k=2),
        "gate": GateOptions(window=4, off_below=1.9, on_above=1.95, probe_every=6),
    },
    "schedule": {"speculative": MTP(k=2), "draft_len_schedule": {1: 2, 2: 1}},
    "prefixes": {"prefix_caching": True},
}


def results(engine: Engine, **options: Any) -> list[tuple[Any, ...]]:
    """What four requests get, of which three run at a time."""
    params = [
        SamplingParams(max_tokens=9 + 12 * at, temperature=at % 2, seed=at, logprobs=1, **options)
        for at in range(len(PROMPTS))
    ]
    found = engine.generate(list(PROMPTS), params)
    run(engine)
    assert_idle(engine)
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in found]


def launched(engine: Engine) -> int:
    """Launches of several steps."""
    return sum(count for name, count in engine.counters.items() if "/x5/" in name)


@pytest.mark.parametrize("name", some_of([*OPTIONS], 1, 4))
def test_drafts_and_options_do_not_depend_on_the_steps_of_a_launch(name: str) -> None:
    options = {"device": "cpu", **OPTIONS[name]}
    with open_engine(**options) as engine:
        expected = results(engine)
    with open_engine(**options, steps_per_launch=5) as engine:
        assert results(engine) == expected
        assert launched(engine) > 3
        if name == "gate":
            steps = sum(n for at, n in engine.counters.items() if at.startswith("gate/steps/"))
            replays = {key: engine.counters[key.counter] for key in engine.runtime.graphs}
            decoded = {key: n * key.steps for key, n in replays.items() if key.kind == "decode"}
            assert steps == sum(decoded.values())
            assert engine.counters["gate/probes"] and engine.counters["gate/off"]


def test_a_graph_of_several_steps_is_a_chain_of_one_steps_kernels(device: str) -> None:
    found = []
    for steps in (1, 5):
        with open_engine(device=device, steps_per_launch=steps) as engine:
            found.append(results(engine))
            assert (launched(engine) > 0) == (steps > 1)
            captures = dict(zip(engine.runtime.graphs, engine.runtime.captures, strict=True))
    assert found[0] == found[1]
    several = {key: capture for key, capture in captures.items() if key.steps > 1}
    assert {key.size for key in several} == {1, 2, 3}
    for key, capture in several.items():
        one = captures[key._replace(steps=1)]
        if device == "cpu":
            assert capture.nodes is None and one.nodes is None
        else:
            kernels = one.node_kinds
            assert kernels is not None
            assert capture.node_kinds == {kind: 5 * count for kind, count in kernels.items()}


def test_adapters_run_in_launches_of_several_steps(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", few_layers())
    options: dict[str, Any] = {"device": "cpu", "adapters": {"one": adapter}}
    found = []
    for steps in (1, 5):
        with open_engine(**options, steps_per_launch=steps) as engine:
            names = ["one", None, "one"]
            requests = [
                engine.submit(prompt, sampled(20, seed=at), adapter=adapter)
                for at, (prompt, adapter) in enumerate(zip(PROMPTS, names, strict=False))
            ]
            run(engine)
            found.append([request.token_ids for request in requests])
            assert (launched(engine) > 0) == (steps > 1)
    assert found[0] == found[1]


def converse(engine: Engine, stop: str | None) -> list[tuple[Any, ...]]:
    """Three turns of a session, whose first may end at a stop string."""
    said = []
    with engine.session() as session:
        for at, prompt in enumerate((PROMPT, OTHER, PROMPT)):
            session.append(prompt)
            params = sampled(14, seed=at, stop=None if at or stop is None else [stop])
            result = session.generate(params)
            said.append((result.token_ids, result.text, result.finish_reason))
            if at == 1:
                session.rewind(3)
    run(engine)
    return said


@pytest.mark.parametrize(("lookahead", "stops"), [(0, True), (1, False)])
def test_sessions_go_on_after_launches_of_several_steps(lookahead: int, stops: bool) -> None:
    options: dict[str, Any] = {"device": "cpu", "lookahead": lookahead}
    with open_engine(**options) as engine:
        text = engine.generate(PROMPT, sampled(14, seed=0)).text
        stop = text[5:8] if stops else None
        expected = converse(engine, stop)
        assert expected[0][2] == ("stop" if stops else "length")
    with open_engine(**options, steps_per_launch=5) as engine:
        assert converse(engine, stop) == expected
        assert engine.counters["sessions/reused_tokens"] and launched(engine)


def test_records_of_experts_are_those_of_launches_of_one_step(
    expert_checkpoints: dict[str, Any],
) -> None:
    oracle, found = expert_checkpoints["moe-every-layer"], []
    for steps in (1, 5):
        with open_engine(
            oracle.path, device="cpu", record_routing=True, steps_per_launch=steps
        ) as engine:
            params = [sampled(18, seed=seed) for seed in range(2)]
            found.append(engine.generate(oracle.prompts((3, 40)), params))
            assert (launched(engine) > 0) == (steps > 1)
    for one, several in zip(*found, strict=True):
        assert one.token_ids == several.token_ids
        assert one.routing is not None and np.array_equal(one.routing, several.routing)
