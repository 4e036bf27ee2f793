"""A step as data: what is recorded of it, and what holds for the launches of all models."""

from __future__ import annotations

import torch

from engines.small_engine import greedy, open_engine
from graphengine import Engine
from graphengine.kernels.core.devices import H200, assumed
from graphengine.observe.op_table import row_maker
from graphengine.opening.allocation import graph_steps
from graphengine.program.launch_lists import Schedule, record_schedule


def schedule_of(engine: Engine) -> Schedule:
    steps = graph_steps(engine.runtime.program, engine.memory)
    with assumed(H200):
        return record_schedule(steps)


def test_recording_launches_nothing_and_an_engine_that_is_new_serves_after_it() -> None:
    with open_engine(device="cpu", max_batch=2) as engine:
        expected = engine.generate([5, 6, 7], greedy(6)).token_ids
    with open_engine(device="cpu", max_batch=2) as engine:
        before = engine.cache.clone()
        lengths = {key: len(ops) for key, ops in schedule_of(engine).items()}
        assert torch.equal(engine.cache, before), "a kernel ran"
        engine.runtime.buffers.reset()
        assert engine.generate([5, 6, 7], greedy(6)).token_ids == expected
    assert lengths.keys() == {*engine.memory.graphs} and all(lengths.values())


def test_without_a_gpu_references_run_and_nothing_is_recorded() -> None:
    with open_engine(device="cpu", max_batch=1) as engine:
        schedule = record_schedule(graph_steps(engine.runtime.program, engine.memory))
    assert schedule and not any(schedule.values())


def test_rows_name_what_a_launch_reads() -> None:
    with open_engine(device="cpu", max_batch=1, row_family="dot") as engine:
        layers, named = engine.model.config.num_layers, engine.model.weights.named()
        caches = [cache for cache, _ in engine.runtime.caches]
        found = {key.name: ops for key, ops in schedule_of(engine).items()}
        rows = list(map(row_maker(named, caches), found["decode/1/fast"]))
        total = engine.model.weights.nbytes
    assert len(rows) == 5 * layers + 3
    stages = [row.stage for row in rows]
    assert stages[1] == "layers.0.self_attn.q_proj" and stages[-1] == ""
    assert [stage for stage in stages if stage.endswith("KV 2")] == [
        "layers.2.self_attn.q_norm, layers.2.self_attn.k_norm, KV 2"
    ]
    assert stages[-2] == "embed_tokens", "lm_head is tied to the embedding"
    # Every weight is read once; the embedding by the first launch, too.
    embedding = named["model.embed_tokens.weight"].nbytes
    assert sum(row.weight_bytes for row in rows) == total + embedding
