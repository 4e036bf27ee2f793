"""MTP with a graph of its own drafts what MTP inside the step's graph does, step by step."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_modules import LAYOUTS, write_random
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine, run, sampled
from extent import extent
from graphengine import Engine, EngineConfig, Request
from graphengine.demo import checkpoint_path
from graphengine.drafters import make_drafter
from graphengine.drafters.modules.own_graph import OwnGraphEagle
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.opening.memory import plan_memory
from graphengine.options.draft_vocabulary import DraftVocabulary
from graphengine.speculative import MTP, GateOptions

PROMPTS = (PROMPT, LONG, OTHER, "import os\n")


def open_both(
    path: Path | None = None, *, k: int = 3, mtp: dict[str, Any] | None = None, **options: Any
) -> tuple[Engine, Engine]:
    """Drafting inside the step's graph, and after it."""
    inside, apart = (
        open_engine(path, speculative=MTP(k, own_graph=own, **(mtp or {})), **options)
        for own in (False, True)
    )
    return inside, apart


def step_both(engines: tuple[Engine, Engine], prompts: tuple[Any, ...], params: Any) -> None:
    """Submit to both and step them to the end; drafts, tokens and events stay equal throughout."""
    requests: list[list[Request]] = [
        [engine.submit(prompt, params) for prompt in prompts] for engine in engines
    ]
    for _ in range(500):
        if not any(engine.busy for engine in engines):
            break
        events = [engine.step() for engine in engines]
        assert [e.token_ids for e in events[0]] == [e.token_ids for e in events[1]]
        for engine in engines:
            if engine.runtime.stream is not None:
                engine.runtime.stream.synchronize()
        inside, apart = (engine.runtime.buffers["draft_tokens"] for engine in engines)
        assert torch.equal(inside, apart)
    for left, right in zip(*requests, strict=True):
        assert left.token_ids == right.token_ids and left.finish_reason == right.finish_reason
    assert engines[0].acceptance.as_dict() == engines[1].acceptance.as_dict()
    for engine in engines:
        assert_idle(engine)


def count(engine: Engine, prefix: str) -> dict[str, int]:
    """Replays of the graphs of one kind, by the rest of their names."""
    start = f"replays/{prefix}/"
    return {
        name.removeprefix(start): n for name, n in engine.counters.items() if name.startswith(start)
    }


PARAMS = {"greedy": greedy(20), "sampled": sampled(20, seed=5)}


@pytest.mark.parametrize(
    ("name", "lookahead"), extent([("greedy", 0), ("sampled", 1)], [*product(PARAMS, [0, 1])])
)
def test_the_same_drafts(device: str, name: str, lookahead: int) -> None:
    """Requests of several chunks, more of them than slots, that end one after the other."""
    inside, apart = open_both(device=device, lookahead=lookahead)
    with inside, apart:
        step_both((inside, apart), PROMPTS, PARAMS[name])
        assert isinstance(apart.core.drafter, OwnGraphEagle)
        assert apart.acceptance.as_dict()["accepted"] > 0
        launched = count(apart, "draft")
        assert {f"{name}/fast": n for name, n in launched.items()} == count(apart, "decode")
        assert count(apart, "decode") == count(inside, "decode")
        assert set(launched) == {"1/k3", "2/k3", "3/k3"}
        assert not count(inside, "draft")
        # Prompts and steps publish, and nothing else does.
        published = sum(count(apart, "decode").values()) + sum(count(apart, "prefill").values())
        assert int(apart.runtime.buffers["sequence"]) == published


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_other_layouts(tmp_path: Path, layout: str) -> None:
    path = write_random(tmp_path, layout)
    inside, apart = open_both(path, k=2, max_batch=2, block_size=8, lookahead=0)
    with inside, apart:
        step_both((inside, apart), ([1, 2, 3], list(range(40)), [5]), sampled(20, seed=1))


def test_a_trimmed_vocabulary_and_pauses(tmp_path: Path) -> None:
    """A pool that is short: rows pause and come back, with their drafts."""
    text = tmp_path / "text"
    text.write_text(LONG * 5)
    mtp = {"draft_vocab": DraftVocabulary(text=text, size=64)}
    inside, apart = open_both(mtp=mtp, kv_blocks=14, swap_blocks=40, max_seq_len=96)
    with inside, apart:
        step_both((inside, apart), PROMPTS, sampled(32, seed=2))
        assert apart.counters["pauses"] > 0


def test_without_drafts_the_module_keeps_up() -> None:
    """While a gate drafts nothing, `draft/R/k0` takes in what was emitted; later drafts are as if
    it had been so inside.
    """
    gate = GateOptions(window=8, off_below=3.0, on_above=3.0, probe_every=6)
    inside, apart = open_both(gate=gate, lookahead=0)
    with inside, apart:
        step_both((inside, apart), PROMPTS[:3], greedy(40, ignore_eos=True))
        launched = count(apart, "draft")
        assert launched["3/k0"] > 0 and launched["3/k3"] > 0
        assert apart.counters["gate/probes"] > 0
        caches = [engine.runtime.caches[1][0] for engine in (inside, apart)]
        assert torch.equal(*caches)


def test_cancelled_requests_leave_nothing_behind() -> None:
    """A slot that is cancelled with a step in flight, and taken again."""
    inside, apart = open_both(max_batch=1)
    with inside, apart:
        for engine in (inside, apart):
            request = engine.submit(PROMPT, sampled(60, seed=1))
            while len(request.token_ids) < 6:
                engine.step()
            request.cancel()
            engine.step()
        for engine in (inside, apart):
            run(engine)
        step_both((inside, apart), (OTHER,), sampled(30, seed=1))


def test_poison_past_the_live_lanes(device: str) -> None:
    """What earlier, larger steps handed over is not read, nor is what padded lanes hold."""
    inside, apart = open_both(device=device, lookahead=0)
    with inside, apart:
        buffers = apart.runtime.buffers
        for name in ("token", "slot", "position", "target", "emitted"):
            buffers[f"handover_{name}"].fill_(2**31 - 1)
        buffers["handover_hidden"].fill_(torch.nan)
        step_both((inside, apart), PROMPTS[:2], sampled(20, seed=4))


def test_its_graphs_and_fields_are_in_the_budget() -> None:
    checkpoint = Checkpoint.open(checkpoint_path())
    model = read_model_config(checkpoint.config)
    state = []
    for own in (False, True):
        config = EngineConfig(speculative=MTP(3, own_graph=own), device="cpu", max_seq_len=128)
        drafter = make_drafter(config, checkpoint, model)
        plan = plan_memory(model, config, checkpoint_dtype=torch.bfloat16, drafter=drafter)
        state.append({line.name: line.bytes for line in plan.budget.lines}["drafter's state"])
    lanes = 8 * 4
    assert state == [0, lanes * (4 * 4 + 4 * model.hidden_size) + 4 * 8]


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_both_graphs_hold_kernels_alone(pdl: bool) -> None:
    """And drafts in the checkpoint's own dtype are the same bits."""
    inside, apart = open_both(device="cuda", pdl=pdl, dtype="bfloat16")
    with inside, apart:
        step_both((inside, apart), PROMPTS, sampled(40, seed=3))
        for key, graph in apart.runtime.graphs.items():
            if key.kind != "prefill":
                assert graph.report.node_kinds is not None
                assert graph.report.node_kinds["kernel"] == graph.report.nodes, key
