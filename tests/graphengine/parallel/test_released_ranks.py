"""All ranks release the memory of weights and KV cache, and have it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from events import GENEROUS_S

from graphengine import Engine, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.opening.releasable import ReleasableMemory

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PLACES: dict[str, tuple[str, dict[str, int]]] = {
    "parts": ("qwen3-biases", {"tensor_parallel": 2}),
    "stages": ("qwen3-biases", {"pipeline_parallel": 2}),
    "ranks with requests": ("moe-even", {"data_parallel": 2}),
}


def open_engine(base: Any, **options: Any) -> Engine:
    sizes = {"max_batch": 2, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (8, 32)}
    given = {"wait_limit_s": GENEROUS_S, "device": "cpu", "dtype": "float32", "releasable": True}
    return Engine.from_pretrained(base.path, **sizes | given | options)


def said(engine: Engine, base: Any) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(base.prompts((5, 40, 17)), GREEDY)]


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_go_on(
    checkpoints: dict[str, Any], expert_checkpoints: dict[str, Any], place: str
) -> None:
    """Twice with a copy of the weights, then with those that an update brings."""
    name, ranks = PLACES[place]
    base = (checkpoints | expert_checkpoints)[name]
    with open_engine(base, **ranks) as engine:
        expected = said(engine, base)
        for result in engine.generate(base.prompts((30,)), GREEDY):
            base.assert_greedy(result)
        with engine.session() as session:
            session.append(base.prompts((20,))[0])
            session.generate(GREEDY)
            weights, cache = engine.model.weights.nbytes, engine.cache.nbytes
            for _ in range(2):
                # Ranks of a pipeline need not have as many bytes each.
                assert engine.release_memory() > (weights + cache) * 5 // 4
                with pytest.raises(ValueError, match="KV cache of the engine are released"):
                    engine.submit([1])
                engine.restore_memory()
                assert said(engine, base) == expected
            assert session.evicted and session.generate(GREEDY).cached_tokens == 0
        engine.release_memory(weights="drop")
        engine.restore_memory(kv_cache=False)
        engine.update_weights(dict(Checkpoint.open(base.path).mapped()))
        engine.restore_memory()
        assert said(engine, base) == expected


@pytest.mark.parametrize("short", [0, 1])
def test_one_rank_with_too_little_memory(
    checkpoints: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """On its host no rank releases anything; on its device the call can be repeated."""
    base, driver, flag = checkpoints["qwen3-biases"], os.getpid(), tmp_path / "short"

    def fail_if_short(*_: object) -> None:
        if flag.exists() and (os.getpid() != driver) == bool(short):
            raise torch.OutOfMemoryError(f"out of {flag.read_text()}")

    for name in ("_new_pieces", "restore"):
        usual = getattr(ReleasableMemory, name)

        def checked(self: Any, *given: Any, usual: Any = usual) -> Any:
            fail_if_short()
            return usual(self, *given)

        monkeypatch.setattr(ReleasableMemory, name, checked)
    with open_engine(base, tensor_parallel=2) as engine:
        expected = said(engine, base)
        flag.write_text("host memory")
        message = f"memory of 1 of 2 ranks is as it was: rank {short}: out of host memory"
        with engine.session() as session:
            session.append(base.prompts((20,))[0])
            session.generate(GREEDY)
            with pytest.raises(RuntimeError, match=message):
                engine.release_memory()
            assert not session.evicted
            assert said(engine, base) == expected
        flag.unlink()
        engine.release_memory()
        flag.write_text("device memory")
        for kv_cache in (False, True):
            with pytest.raises(RuntimeError, match=f"rank {short}: out of device memory"):
                engine.restore_memory(kv_cache=kv_cache)
        with pytest.raises(ValueError, match="weights and KV cache of the engine are released"):
            engine.step()
        flag.unlink()
        engine.restore_memory()
        assert said(engine, base) == expected
