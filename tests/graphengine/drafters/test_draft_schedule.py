"""Draft lengths by live requests: which graphs are captured and replayed, and the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import toy_family
from engines.small_engine import PROMPT, greedy, open_engine, sampled, step_until
from engines.speculation import (
    DEMO,
    DRAFTING,
    ENDLESS,
    TREE,
    Job,
    open_plain,
    open_speculating,
    outcomes,
)
from graphengine import Engine, EngineConfig, StructuredOutputsParams
from graphengine.drafters.modules.chain import EagleDrafter
from graphengine.host.gate import Gate
from graphengine.models.families import registry
from graphengine.options.drafts.draft_schedule import DraftSchedule
from graphengine.speculative import (
    MTP,
    DraftModel,
    Eagle3,
    GateOptions,
    NGram,
    Speculative,
    Suffix,
    UserProvided,
)

SCHEDULE = {1: 4, 2: 2}
SIZES: dict[str, Any] = {"max_batch": 4, "draft_len_schedule": SCHEDULE}
MODES: dict[str, Callable[[], Speculative]] = {
    "mtp": lambda: MTP(k=4),
    "model": lambda: DraftModel(DEMO, k=4),
    "eagle3": lambda: replace(DRAFTING["eagle3"], k=4),
    "ngram": lambda: NGram(k=4),
    "suffix": lambda: Suffix(k=4),
}


def test_it_says_how_many_drafts_for_up_to_so_many_requests() -> None:
    schedule = DraftSchedule.read({8: 0, 1: 5, 4: 3})
    assert [schedule.drafts(live) for live in range(1, 11)] == [5, 3, 3, 3, *[0] * 6]
    assert schedule.lengths == (0, 3, 5)
    assert DraftSchedule.read(schedule.steps) == schedule
    assert DraftSchedule.read({3: 2}).drafts(4) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"draft_len_schedule=\{\} must have at least one pair"),
        (3, r"draft_len_schedule=3 must map live requests to drafts, .* 3 is no pair of integers"),
        ({1: 2.5}, r"\(1, 2\.5\) is no pair of integers"),
        ({0: 3}, r"must have live requests from 1 .* not 3 drafts for up to 0"),
        ({1: -1}, r"not -1 drafts for up to 1"),
        ({1: 3, 2: 3}, r"must have fewer drafts for more requests, not 3 after 3"),
        (((2, 3), (2, 1)), r"must have ascending live requests, not 2 after 2"),
        ({1: 2, 4: 0}, r"must begin with the drafter's k=3 drafts"),
    ],
)
def test_a_schedule_that_cannot_be_is_told(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(device="cpu", speculative=NGram(3), draft_len_schedule=given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "draft_len_schedule is for an engine with drafts, not speculative=None"),
        (
            {"speculative": MTP(tree=TREE), "draft_len_schedule": {1: 9, 4: 3}},
            "has 3 drafts, but trees and vanilla modules draft all of k=9 or none",
        ),
        (
            {"speculative": Eagle3("a-head", tree=TREE), "draft_len_schedule": {1: 9, 4: 3}},
            "has 3 drafts, but trees and vanilla modules draft all of k=9 or none",
        ),
        (
            {"speculative": MTP(k=2, style="vanilla"), "draft_len_schedule": {1: 2, 4: 1}},
            "has 1 drafts, but trees and vanilla modules draft all of k=2 or none",
        ),
        (
            {"speculative": NGram(3), "max_batch": 64, "draft_len_schedule": {8: 3, 33: 1}},
            "40 rows with k=1 drafts feed 80 tokens a step",
        ),
    ],
)
def test_a_schedule_that_does_not_go_with_the_rest(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**{"device": "cpu", "draft_len_schedule": {1: 3}} | options)


def test_a_bucket_has_as_many_drafts_as_the_fewest_requests_it_serves() -> None:
    config = EngineConfig(
        device="cpu",
        speculative=NGram(5),
        max_batch=64,
        buckets=(1, 4, 16, 64),
        draft_len_schedule={2: 5, 8: 3},
    )
    assert [config.drafts_of(rows) for rows in (1, 4, 16, 64)] == [5, 5, 3, 0]
    assert (config.draft_rows, config.widest_rows, config.lanes) == (16, 16, 64)


def replayed(engine: Engine) -> set[tuple[int, int]]:
    """Rows and drafts of the decode graphs that were replayed."""
    return {
        (key.size, key.drafts)
        for key in engine.runtime.graphs
        if key.kind == "decode" and engine.counters[key.counter]
    }


@pytest.mark.parametrize(
    ("name", "lookahead"), [(name, index % 2) for index, name in enumerate(MODES)]
)
def test_tokens_are_those_of_plain_decoding(device: str, name: str, lookahead: int) -> None:
    """Requests end one after the other, so that each number of them is live for a while."""
    jobs = [
        Job(PROMPT * n, greedy(tokens, **ENDLESS) if n % 2 else sampled(tokens, seed=n))
        for n, tokens in enumerate((4, 9, 16, 34), 1)
    ]
    with open_plain(device=device, max_batch=4) as plain:
        expected = outcomes(plain, jobs)
    with open_speculating(MODES[name](), device=device, **SIZES, lookahead=lookahead) as engine:
        assert engine.memory.draft_lengths == (0, 2, 4)
        shapes = {(key.size, key.drafts) for key in engine.runtime.graphs if key.kind == "decode"}
        # A step of fewer rows than are live has as many drafts as for all of them.
        assert shapes == {(1, 4), (1, 2), (1, 0), (2, 2), (2, 0), (4, 0)}
        assert outcomes(engine, jobs) == expected
        assert {(1, 4), (2, 2), (4, 0)} <= replayed(engine)
        assert engine.acceptance.proposed > 0


@pytest.mark.parametrize("name", ["mtp", "model", "eagle3"])
def test_a_chain_is_as_long_as_the_step_s_drafts(device: str, name: str) -> None:
    with open_speculating(MODES[name](), device=device, **SIZES, lookahead=0) as engine:
        check_lengths(engine)


def check_lengths(engine: Engine) -> None:
    """Two requests have 2 drafts each after a step; the one that is left has 4."""
    first = engine.submit(PROMPT, greedy(40, **ENDLESS))
    second = engine.submit(PROMPT * 2, greedy(30, **ENDLESS))
    step_until(engine, lambda: bool(second.token_ids))
    engine.step()
    engine.step()
    table = engine.runtime.buffers["draft_tokens"]
    assert (table[:2, :2] >= 0).all() and (table[:2, 2:] == -1).all(), f"{table}"
    second.cancel()
    step_until(engine, lambda: engine.counters["replays/decode/1/k4/fast"] > 1)
    if engine.runtime.stream is not None:
        # The last step was launched, and may still run.
        engine.runtime.stream.synchronize()
    slot = first.job.placed.slot
    assert (table[slot] >= 0).all(), f"{table}"


def test_a_chain_of_any_other_length_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = EagleDrafter._chain

    def longest(self: EagleDrafter, *args: Any, length: int, **options: Any) -> None:
        chain(self, *args, length=self.length, **options)

    monkeypatch.setattr(EagleDrafter, "_chain", longest)
    with (
        open_speculating(MTP(k=4), **SIZES, lookahead=0) as engine,
        pytest.raises(AssertionError, match="tensor"),
    ):
        check_lengths(engine)


def test_a_gate_goes_with_it() -> None:
    """A step has the smaller number; where the schedule has none, the gate stands still."""
    schedule = DraftSchedule.read({1: 4, 3: 2})
    gate = Gate(
        lengths=(0, 2, 4),
        window=2,
        off_below=0.5,
        on_above=1.0,
        probe_every=2,
        schedule=schedule.drafts,
    )
    assert [gate.next_drafts(live) for live in (1, 2, 3, 4)] == [4, 2, 2, 0]
    for _ in range(2):
        gate.record(0, 1)
    assert [gate.next_drafts(live) for live in (1, 2, 3, 4)] == [2, 2, 2, 0]
    for _ in range(5):
        gate.launched(4)
    assert gate.counters["gate/overloaded"] == 5 and gate.counters["gate/probes"] == 0
    assert gate.counters["gate/steps/0"] == 5


def test_an_engine_has_both(device: str) -> None:
    jobs = [Job(PROMPT * n, greedy(9 * n, **ENDLESS)) for n in range(1, 5)]
    gate = GateOptions(window=4, off_below=3.9, on_above=3.95, probe_every=8)
    with open_plain(device=device, max_batch=4) as plain:
        expected = outcomes(plain, jobs)
    with open_speculating(MTP(k=4), device=device, **SIZES, gate=gate) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.counters["gate/off"] > 0
        assert {(1, 0), (4, 0)} <= replayed(engine)


def test_a_caller_s_drafts_past_the_step_s_are_lost(device: str) -> None:
    """Two of four drafts are verified for each of two requests."""
    params = greedy(12, **ENDLESS)
    with open_plain(device=device, max_batch=4) as plain:
        said = [list(result.token_ids) for result in plain.generate([PROMPT, PROMPT], params)]
    with open_speculating(UserProvided(4), device=device, **SIZES) as engine:
        requests = [engine.submit(PROMPT, params) for _ in range(2)]
        step_until(engine, lambda: all(request.token_ids for request in requests))
        before = [len(request.token_ids) for request in requests]
        for request, tokens, at in zip(requests, said, before, strict=True):
            engine.draft(request, tokens[at : at + 4])
        engine.step()
        assert [len(request.token_ids) for request in requests] == [at + 3 for at in before]
        assert engine.counters["drafts/stale"] == 4
        step_until(engine, lambda: not engine.busy)
        assert [request.token_ids for request in requests] == said


def test_masks_of_a_grammar_follow_the_step_s_drafts(device: str) -> None:
    pytest.importorskip("llguidance")
    asked = {"structured_outputs": StructuredOutputsParams(regex="[a-f]{4,30}")}
    jobs = [Job(PROMPT, greedy(4 + 8 * n, **asked)) for n in range(1, 4)]
    with open_engine(device=device, row_family="dot", max_batch=4) as plain:
        expected = outcomes(plain, jobs)
    with open_speculating(MTP(k=4), device=device, **SIZES) as engine:
        assert outcomes(engine, jobs) == expected
        assert {(1, 4), (2, 2)} & replayed(engine)


def test_recurrent_states_of_fewer_drafts(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state after as many tokens as were accepted is selected, whatever the step's width."""
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)
    path = tmp_path / "toy"
    toy_family.write_checkpoint(path)
    jobs = [Job((5, 6, 7, 5, 6, 7, 5), greedy(8 + 8 * n, **ENDLESS)) for n in range(3)]
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    with open_plain(path, **options, max_batch=4) as plain:
        expected = outcomes(plain, jobs)
    with open_speculating(NGram(k=4), path, **options, **SIZES) as engine:
        assert outcomes(engine, jobs) == expected
        assert {(1, 4), (2, 2)} <= replayed(engine)
