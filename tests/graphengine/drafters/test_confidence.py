"""Chains that end where they are not sure: the drafts of whole chains, cut, and the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.small_engine import OTHER, PROMPT, greedy, run, sampled
from engines.speculation import (
    DRAFTING,
    ENDLESS,
    Job,
    dtype_of,
    open_plain,
    open_speculating,
    outcomes,
)
from graphengine import Engine
from graphengine.kernels.draft import confidence
from graphengine.options.drafts.mode import Mode
from graphengine.speculative import MTP, GateOptions

LEAST = 0.4
MODES: dict[str, Mode] = {
    "mtp": MTP(k=3, min_confidence=LEAST),
    "eagle3": replace(DRAFTING["eagle3"], min_confidence=LEAST),
    "model": replace(DRAFTING["model"], min_confidence=LEAST),
}
JOBS = [
    Job(PROMPT, greedy(20, **ENDLESS)),
    Job(OTHER * 2, sampled(20, seed=1)),
    Job(PROMPT * 3, sampled(20, seed=2, temperature=2.0)),
]
Drafts = dict[tuple[int, int], list[int]]


def drafts_of(engine: Engine) -> Drafts:
    """The drafts of each request after so many of its tokens."""
    requests = [engine.submit(*job) for job in JOBS]
    found: Drafts = {}
    while engine.busy:
        engine.step()
        table = engine.runtime.buffers["draft_tokens"].tolist()
        for number, request in enumerate(requests):
            if request.token_ids and request.finish_reason is None:
                drafts = table[request.job.placed.slot]
                found[number, len(request.token_ids)] = drafts
    return found


def check_cut(found: Drafts, whole: Drafts) -> set[int]:
    """The drafts are those of whole chains, cut; how long they are."""
    common = found.keys() & whole.keys()
    assert len(common) > 10
    lengths = set()
    for key in common:
        length = sum(draft >= 0 for draft in found[key])
        cut = whole[key][:length] + [-1] * (len(whole[key]) - length)
        assert found[key] == cut, f"of {whole[key]}"
        lengths.add(length)
    return lengths


@pytest.fixture(scope="module")
def whole() -> dict[str, Drafts]:
    """The drafts of the same modes when all are verified."""
    found = {}
    for name, mode in MODES.items():
        with open_speculating(replace(mode, min_confidence=None), lookahead=0) as engine:
            found[name] = drafts_of(engine)
    return found


@pytest.mark.parametrize("name", MODES)
def test_the_drafts_are_those_of_a_whole_chain_cut(whole: dict[str, Drafts], name: str) -> None:
    with open_speculating(MODES[name], lookahead=0) as engine:
        lengths = check_cut(drafts_of(engine), whole[name])
        assert len(lengths) >= 2, f"{lengths=}"
        counts = engine.acceptance
        assert 0 < counts.proposed < 3 * counts.steps
        recent = engine.runtime.buffers["recent_acceptance"]
        assert ((recent >= 0) & (recent <= 1)).all()
        # A model that drafts for itself is always right.
        assert bool((recent == 1).all()) == (name == "model")


def test_another_cut_is_seen(whole: dict[str, Drafts], monkeypatch: pytest.MonkeyPatch) -> None:
    tile = confidence.tile_of_token_reference
    monkeypatch.setattr(
        confidence,
        "tile_of_token_reference",
        lambda token, valid: tile(token ^ 1, valid),
    )
    with open_speculating(MODES["mtp"], lookahead=0) as engine:
        found = drafts_of(engine)
        with pytest.raises(AssertionError, match="of "):
            check_cut(found, whole["mtp"])


@pytest.mark.parametrize(("name", "lookahead"), [(name, i % 2) for i, name in enumerate(MODES)])
def test_tokens_are_those_of_plain_decoding(device: str, name: str, lookahead: int) -> None:
    """With stops inside drafts, and pauses."""
    stopped = Job(PROMPT, greedy(24, stop_token_ids=[40, 300, 301, 13]))
    long = (greedy(24, **ENDLESS), sampled(24, seed=1), sampled(24, seed=2, temperature=0.7))
    jobs = [*(Job(PROMPT, params) for params in long), stopped, Job("x", greedy(1))]
    options: dict[str, Any] = {"device": device, "max_seq_len": 64, **dtype_of(name)}
    with open_plain(**options) as plain:
        expected = outcomes(plain, jobs)
    options |= {"lookahead": lookahead, "kv_blocks": 9, "swap_blocks": 40}
    with open_speculating(MODES[name], **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.acceptance.accepted > 0 < engine.counters["pauses"]


def test_a_threshold_that_all_pass_withholds_nothing(device: str) -> None:
    """Through filters too."""
    jobs = [*JOBS, Job(PROMPT, sampled(20, seed=4, temperature=3.0, top_k=3))]
    counts = []
    for least in (None, 1e-30):
        with open_speculating(MTP(k=3, min_confidence=least), device=device) as engine:
            outcomes(engine, jobs)
            counts.append(engine.acceptance.as_dict())
    assert counts[0] == counts[1]


def test_a_request_begins_afresh(device: str) -> None:
    """Its slot's share is 1 again, whatever the request before accepted."""
    mode = MTP(k=3, min_confidence=0.01)
    with open_speculating(mode, device=device, max_batch=1, lookahead=0) as engine:
        engine.generate(PROMPT, sampled(20, seed=1, temperature=2.0))
        recent = engine.runtime.buffers["recent_acceptance"]
        left = float(recent[0])
        engine.submit(OTHER, greedy(4))
        while not engine.scheduler.active or not engine.scheduler.active[0].token_ids:
            engine.step()
        assert left < 0.9 and float(recent[0]) >= 15 / 16
        run(engine)


def test_a_session_s_turns_are_those_of_plain_decoding(device: str) -> None:
    said = []
    for mode in (None, MODES["mtp"]):
        options: dict[str, Any] = {"device": device, "row_family": "dot", "speculative": mode}
        with open_plain(**options) as engine, engine.session() as session:
            for text in (PROMPT, OTHER):
                session.append(text)
                session.generate(greedy(10, **ENDLESS))
            said.append(list(session.token_ids))
    assert said[0] == said[1]


def test_a_gate_learns_that_nothing_is_worth_verifying(device: str) -> None:
    """No draft is quite sure. Without the gate steps would go on to have lanes for drafts."""
    mode = MTP(k=3, min_confidence=1.0)
    gate = GateOptions(window=4, off_below=0.3, on_above=0.5, probe_every=1000)
    with open_plain(device=device) as plain:
        expected = outcomes(plain, JOBS)
    with open_speculating(mode, device=device, gate=gate) as engine:
        assert outcomes(engine, JOBS) == expected
        assert engine.acceptance.proposed == 0
        assert engine.counters["gate/off"] == 1
        assert engine.counters["gate/steps/0"] > engine.counters["gate/steps/3"] > 0
