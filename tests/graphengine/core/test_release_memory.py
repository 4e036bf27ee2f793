"""Weights and KV cache leave the device and come back under the same addresses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from checkpoints.few_layers import few_layers
from engines.small_engine import PROMPT, assert_idle, greedy, open_engine, run, sampled
from graphengine import Engine
from graphengine.buckets.pages import DevicePages
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.quantised.writer import write_quantised
from graphengine.opening import releasable as module
from graphengine.speculative import MTP, DraftModel, NGram
from launches.paged_memory import UNIT, PagedMemory

ASKED = sampled(16, seed=3, logprobs=2)


def open_releasable(path: Path | str | None = None, **options: Any) -> Engine:
    return open_engine(path, **{"device": "cpu", "releasable": True} | options)


def said(engine: Engine) -> Any:
    result = engine.generate(PROMPT, ASKED)
    return result.token_ids, result.logprobs


def addresses(engine: Engine) -> list[int]:
    tensors = [*engine.model.weights.tensors(), *(cache for cache, _ in engine.runtime.caches)]
    return [tensor.data_ptr() for tensor in tensors]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(Checkpoint.open(path).mapped())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative": NGram(k=3)},
        {"speculative": MTP(k=2), "quantize": "int8"},
        {"lookahead": 1, "prefix_caching": True, "dtype": "float32"},
    ],
    ids=["plain", "ngram", "mtp of int8", "prefixes"],
)
def test_the_same_graphs_go_on(device: str, options: dict[str, Any]) -> None:
    with open_releasable(device=device, **options) as engine:
        expected, before, graphs = said(engine), addresses(engine), dict(engine.runtime.graphs)
        weights = engine.model.weights.nbytes
        for _ in range(2):
            released = engine.release_memory()
            assert released >= weights + engine.cache.nbytes
            engine.restore_memory()
            assert addresses(engine) == before and engine.runtime.graphs == graphs
            assert said(engine) == expected
        assert engine.counters["memory/releases"] == 2
        run(engine)
        assert_idle(engine)


def _windowed() -> MistralForCausalLM:
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(vocab_size=263, **sizes, **heads, sliding_window=8))


@pytest.mark.parametrize("kind", ["rings", "recurrent"])
def test_rings_and_recurrent_layers(
    hybrids: dict[str, Any], write_model: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    oracle = next(iter(hybrids.values()))
    if kind == "rings":
        oracle = write_model(_windowed, tmp_path, 3)
    (prompt,) = oracle.prompts((40,))
    with open_releasable(oracle.path) as engine:
        assert bool(engine.memory.rings) == (kind == "rings")
        expected = engine.generate(prompt, greedy(9)).token_ids
        released = engine.release_memory()
        assert released >= engine.model.weights.nbytes + engine.memory.ring_bytes
        engine.restore_memory()
        assert engine.generate(prompt, greedy(9)).token_ids == expected


def test_through_the_calls_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's memory is a stand-in; what is unmapped is overwritten."""
    memories: list[PagedMemory] = []

    def new_pages(device: torch.device) -> DevicePages:
        memories.append(PagedMemory(2**27))
        return memories[-1].pages(monkeypatch, 2**27)

    monkeypatch.setattr(module, "new_pages", new_pages)
    with open_releasable(kv_blocks=20) as engine:
        expected, before = said(engine), addresses(engine)
        held = sum(sum(memory.handles.values()) for memory in memories)
        weights = engine.model.weights.nbytes
        assert weights + engine.cache.nbytes <= held < weights + engine.cache.nbytes + 3 * UNIT
        assert engine.release_memory() == held
        assert not any(memory.handles for memory in memories)
        assert engine.model.weights.embedding.view(torch.uint8).eq(255).all()
        engine.restore_memory()
        assert addresses(engine) == before and said(engine) == expected
    del engine
    gc.collect()
    assert len(memories) == 2 and not any(memory.reserved for memory in memories)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_gpu_gets_the_bytes() -> None:
    """In the second round, as the first one pins the host's copy."""
    with open_releasable(device="cuda", kv_blocks=20_000) as engine:
        expected, graphs = said(engine), dict(engine.runtime.graphs)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info()[0]
            released = engine.release_memory()
            grown = torch.cuda.mem_get_info()[0] - before
            engine.restore_memory()
            assert said(engine) == expected and engine.runtime.graphs == graphs
        assert released >= engine.cache.nbytes > 2**26 and grown == released


def test_weights_are_zero_while_they_are_released() -> None:
    """On a CPU, whose pages anybody may touch."""
    with open_releasable() as engine:
        expected = said(engine)
        tensors = [*engine.model.weights.tensors(), engine.cache]
        assert all(tensor.any() for tensor in tensors[:1])
        engine.release_memory()
        assert not any(tensor.any() for tensor in tensors)
        engine.restore_memory()
        assert said(engine) == expected


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-128"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_dropped_weights_come_with_an_update(
    checkpoints: dict[str, Any], name: str, quantize: str | None
) -> None:
    """In two pieces; between them no request is taken, and other weights give other tokens."""
    path = checkpoints[name].path
    tensors = tensors_of(path)
    with open_releasable(path, quantize=quantize) as engine:
        prompt = [5, 6, 7]
        expected = engine.generate(prompt, greedy(9, logprobs=0))
        engine.release_memory(weights="drop")
        with pytest.raises(ValueError, match="weights and KV cache of the engine are released: re"):
            engine.update_weights(tensors)
        engine.restore_memory(kv_cache=False)
        halves: list[dict[str, torch.Tensor]] = [{}, {}]
        for key, value in tensors.items():
            halves["layers.1" in key][key] = value
        engine.update_weights(halves[0], version=1)
        with pytest.raises(ValueError, match="KV cache of the engine are released: restore_memory"):
            engine.submit(prompt)
        engine.restore_memory()
        count = len(halves[1])
        message = f"the weights were dropped, and {count} tensors have not come with update_weights"
        for call in (engine.step, lambda: engine.submit(prompt), engine.session):
            with pytest.raises(ValueError, match=message):
                call()
        engine.update_weights(halves[1], version=1)
        found = engine.generate(prompt, greedy(9, logprobs=0))
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


def test_quantised_weights_are_copied_and_not_dropped(
    checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    write_quantised(Checkpoint.open(checkpoints["llama-biases"].path), tmp_path / "packed", "int8")
    prompt = [5, 6, 7]
    with open_releasable(tmp_path / "packed") as engine:
        expected = engine.generate(prompt, greedy(9)).token_ids
        message = (
            r"release_memory\(weights='drop'\) keeps no weights, and update_weights could not "
            r"bring them back: .*packed are quantised \(compressed-tensors\): .* weights='host'"
        )
        with pytest.raises(ValueError, match=message):
            engine.release_memory(weights="drop")
        assert engine.generate(prompt, greedy(9)).token_ids == expected
        engine.release_memory()
        engine.restore_memory()
        assert engine.generate(prompt, greedy(9)).token_ids == expected


def test_a_drafter_of_its_own_checkpoint_is_not_dropped() -> None:
    with open_releasable(speculative=DraftModel(few_layers(), k=2)) as engine:
        expected = said(engine)
        engine.release_memory(weights="drop")
        engine.restore_memory()
        engine.update_weights(tensors_of(Path(engine._loaded.checkpoint.path)))
        assert said(engine) == expected


def test_sessions_and_prefixes_are_dropped() -> None:
    with open_releasable(prefix_caching=True) as engine, engine.session() as session:
        session.append(PROMPT)
        session.generate(greedy(4))
        engine.generate(PROMPT * 4, greedy(1))
        tokens = session.token_ids
        engine.release_memory()
        assert session.evicted and session.token_ids == tokens
        with pytest.raises(ValueError, match="are released: restore_memory"):
            session.generate(greedy(4))
        engine.restore_memory()
        result = session.generate(greedy(4))
        assert result.cached_tokens == 0
        assert engine.generate(PROMPT * 4, greedy(1)).cached_tokens == 0
        assert result.token_ids == engine.generate(tokens, greedy(4)).token_ids


def test_calls_in_the_wrong_order_are_refused() -> None:
    with open_releasable() as engine:
        request = engine.submit(PROMPT, greedy(4))
        with pytest.raises(ValueError, match=r"release_memory\(\) with unfinished requests \(1\)"):
            engine.release_memory()
        run(engine)
        assert request.finished
        with pytest.raises(ValueError, match=r"restore_memory\(\): nothing is released"):
            engine.restore_memory()
        with pytest.raises(ValueError, match="weights='disk' must be 'host' or 'drop'"):
            engine.release_memory(weights="disk")  # type: ignore[arg-type]
        engine.release_memory()
        with pytest.raises(ValueError, match="weights and KV cache are released already"):
            engine.release_memory()
        with pytest.raises(ValueError, match="kv_cache=1 must be True or False"):
            engine.restore_memory(kv_cache=1)  # type: ignore[arg-type]
        calls: list[Callable[[], object]] = [
            engine.step, engine.drain, engine.session, lambda: engine.submit(PROMPT),
            lambda: engine.generate(PROMPT), lambda: engine.restore_session("nowhere"),
            lambda: engine.unload_adapter("none"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ValueError, match="weights and KV cache of the engine are released"):
                call()
        engine.restore_memory(kv_cache=False)
        with pytest.raises(ValueError, match=r"restore_memory\(\): nothing is released"):
            engine.restore_memory(kv_cache=False)
        # What is there is released again.
        assert engine.release_memory() >= engine.model.weights.nbytes
        engine.restore_memory()
        assert "memory/releases" in engine.stats()["counters"]
    with open_releasable() as engine:
        engine.release_memory()  # It closes all the same.


def test_an_engine_is_opened_for_it() -> None:
    with open_engine(device="cpu") as engine:
        for call in (engine.release_memory, engine.restore_memory):
            with pytest.raises(ValueError, match="for an engine that from_pretrained has"):
                call()


def test_too_little_memory_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host nothing is released; on the device the call can be repeated."""
    with open_releasable() as engine:
        expected = said(engine)

        def short(*args: object) -> Any:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(module.ReleasableMemory, "_new_pieces", short)
            with engine.session() as session:
                session.append(PROMPT * 4)
                session.generate(greedy(2))
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.release_memory()
                assert not session.evicted
        assert said(engine) == expected
        engine.release_memory()
        cache = engine.runtime.cache_memory
        with monkeypatch.context() as patch:
            patch.setattr(cache._pages, "have_again", short)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.restore_memory()
        with pytest.raises(ValueError, match="KV cache of the engine are released"):
            engine.step()
        engine.restore_memory()
        assert said(engine) == expected
