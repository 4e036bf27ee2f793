"""Layers with windows whose KV is in rings: what no window sees is NaN, and no token changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engines.small_engine import run
from graphengine import Engine, SamplingParams
from graphengine.core.chunk_times import ChunkTimer
from graphengine.kernels.core.lanes import BITS
from graphengine.program.graph_key import GraphKey
from graphengine.speculative import DraftModel, NGram

SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def _mistral(window: int, layers: int = 2) -> MistralForCausalLM:
    sizes = SIZES | {"head_dim": 64, "num_hidden_layers": layers}
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))


def _alternating() -> Qwen2ForCausalLM:
    sizes = SIZES | {"hidden_size": 256, "num_hidden_layers": 3, "use_sliding_window": True}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, sliding_window=11, layer_types=TYPES))


MODELS: dict[str, Callable[[], Any]] = {
    "all-8": lambda: _mistral(8), "all-5": lambda: _mistral(5), "some-11": _alternating,
}  # fmt: skip
LAYERS = {"all-8": (0, 1), "all-5": (0, 1), "some-11": (0, 2)}
SOME = "some-11"


@pytest.fixture(scope="session")
def windowed(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rings")
    return {
        name: write_model(make, folder / name, seed)
        for seed, (name, make) in enumerate(MODELS.items())
    }


def greedy(max_tokens: int = 56) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, *, poisoned: bool = True, **options: Any) -> Engine:
    options = {"max_batch": 2, "max_seq_len": 176, "dtype": "float32", "block_size": 8} | options
    options = {"row_family": "dot", "prefill_buckets": (4, 13)} | options
    engine = Engine.from_pretrained(path, **options)
    if poisoned:
        poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """Before each launch, fill the rings of its slots with NaN but for what its windows see."""
    runtime, memory = engine.runtime, engine.memory
    replay, rings = runtime.replay, runtime.program.states.rings

    def poisoned(key: GraphKey) -> None:
        with runtime.on_stream():
            for slot, start in _places(engine, key):
                for ring, shape in zip(rings, memory.rings, strict=True):
                    size, row = memory.block_size, ring.block_table[slot].long()
                    seen = torch.arange(max(0, start - shape.window + 1), start)
                    seen = seen.to(row.device)
                    # As integers, which can be indexed on every device.
                    nan = torch.tensor([math.nan], device=row.device).to(ring.cache.dtype)
                    bits = BITS[ring.cache.element_size()]
                    cache, blocks = ring.cache.view(bits), row[seen // size]
                    kept = cache[:, blocks, :, seen % size].clone()
                    cache[:, row.unique()] = int(nan.view(bits))
                    cache[:, blocks, :, seen % size] = kept
        replay(key)

    runtime.replay = poisoned  # type: ignore[method-assign]


def _places(engine: Engine, key: GraphKey) -> list[tuple[int, int]]:
    """Slots of a launch, and the first position that each of them writes."""
    buffers = engine.runtime.buffers
    if key.kind == "prefill" and key.variant != "note":
        return [(int(buffers["prefill_slot"]), int(buffers["prefill_start"]))]
    if key.kind != "decode":
        return []
    slots = [slot for slot in buffers["slot_of_row"][: key.size].tolist() if slot >= 0]
    lengths, running = buffers["kv_len"].tolist(), buffers["running"].tolist()
    return [(slot, lengths[slot]) for slot in slots if running[slot]]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_far_beyond_the_ring(
    windowed: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    oracle = windowed[name]
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        (ring,) = engine.memory.rings
        assert ring.layers == LAYERS[name] and ring.blocks <= 4 < engine.memory.table_blocks
        (held,) = engine.runtime.program.states.rings
        assert held.cache.shape[:2] == (2, 1 + 2 * ring.blocks)
        assert engine.core.description["rings"] == [[ring.window, ring.blocks]]
        assert len(engine.cache) == (1 if name == SOME else 0)
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            poison(engine)
            result = engine.generate(prompt, greedy())
            assert len(result.token_ids) == 56
            oracle.assert_greedy(result)
            oracle.assert_logits(result, seen)


@pytest.mark.parametrize(("name", "buckets"), [("all-5", (8,)), (SOME, (16, 64))])
def test_neighbours_and_chunks_change_nothing(
    windowed: dict[str, Any], device: str, name: str, buckets: tuple[int, ...]
) -> None:
    """More requests than slots, so that rings change hands; chunks shorter and longer than both
    windows, and requests alone that have the whole of their KV."""
    oracle = windowed[name]
    prompts = oracle.prompts((1, 19, 50, 100, 7))
    with open_engine(oracle.path, device=device, window_rings=False) as engine:
        assert not engine.memory.rings
        alone = [engine.generate(prompt, greedy(24)).token_ids for prompt in prompts]
    with open_engine(oracle.path, device=device, prefill_buckets=buckets) as engine:
        assert engine.memory.rings
        results = engine.generate(prompts, greedy(24))
        assert not engine.counters["pauses"]
    assert [each.token_ids for each in results] == alone


def test_a_paused_request_keeps_its_rings(windowed: dict[str, Any], device: str) -> None:
    """Only the KV of the other layers leaves the pool."""
    oracle = windowed[SOME]
    prompts = oracle.prompts((9, 30, 41, 17))
    with open_engine(oracle.path, device=device, window_rings=False) as engine:
        expected = [engine.generate(prompt, greedy(36)).token_ids for prompt in prompts]
    options = {"max_batch": 3, "max_seq_len": 88, "kv_blocks": 14, "swap_blocks": 60}
    for steps in (1, 5):
        with open_engine(oracle.path, device=device, **options, steps_per_launch=steps) as engine:
            assert engine.memory.rings
            results = engine.generate(prompts, greedy(36))
            assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
            several = [name for name in engine.counters if f"/x{steps}/" in name]
            assert (len(several) > 0) == (steps > 1)
        assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(("name", "drafter"), [("all-5", "another"), (SOME, "ngram")])
def test_drafts_change_no_token(
    windowed: dict[str, Any], device: str, name: str, drafter: str
) -> None:
    """Rejected drafts are written over what a ring has of other tokens, at all of its places."""
    oracle = windowed[name]
    mode = NGram(k=8) if drafter == "ngram" else DraftModel(windowed[SOME].path, k=3)
    # Repetitions, for drafts to be found in.
    prompts = [prompt * 3 for prompt in oracle.prompts((5, 11, 14))]
    with open_engine(oracle.path, device=device) as engine:
        expected = engine.generate(prompts, greedy(36))
    buckets = {"prefill_buckets": (4,)}
    with open_engine(oracle.path, device=device, speculative=mode, **buckets) as engine:
        assert engine.memory.rings
        # A draft model's own KV is in the pool as a whole.
        assert (engine.memory.block_bytes > 0) == (drafter == "another" or name == SOME)
        results = engine.generate(prompts, greedy(36))
        assert engine.acceptance.proposed > engine.acceptance.accepted
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
    for result in results:
        oracle.assert_greedy(result)


@pytest.mark.parametrize(("name", "mode"), [("all-5", NGram(k=4)), (SOME, None)], ids=str)
def test_turns_go_on_in_their_sessions_ring(
    windowed: dict[str, Any], device: str, name: str, mode: NGram | None
) -> None:
    """After a reply, after rewinds as far as the ring reaches, and after further ones."""
    oracle = windowed[name]
    first, second, third = oracle.prompts((45, 6, 9))
    # A rewind returns to what no window sees at the moment.
    options = {"device": device, "speculative": mode, "max_batch": 1, "poisoned": False}
    with open_engine(oracle.path, **options) as engine:
        asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        session = engine.session()

        def turn(prompt: list[int], cached: int) -> None:
            session.append(prompt)
            whole = session.token_ids
            assert session.cached_tokens == cached
            result = session.generate(greedy(20))
            assert result.cached_tokens == cached
            asked.append((whole, result.token_ids))

        turn(first, 0)
        turn(second, 64)
        # 91 tokens. Whatever was written last, 8 tokens fewer are within reach.
        session.rewind(8)
        turn(third, 80)
        # To before the window.
        session.rewind(len(session) - 30)
        assert session.evicted and session.cached_tokens == 0
        turn(third, 0)
        # A fork and a snapshot take tokens alone.
        fork, kept = session.fork(), session.snapshot()
        assert fork.evicted and kept.blocks == 0
        # Another request takes the only ring.
        other = engine.generate(second, greedy(8))
        assert session.evicted
        turn([5], 0)
        restored = engine.restore_session(kept)
        for each in (fork, restored):
            each.append(second)
            result = each.generate(greedy(20))
            asked.append((each.token_ids[:-20], result.token_ids))
        run(engine)
    with open_engine(oracle.path, device=device, window_rings=False) as engine:
        assert engine.generate(second, greedy(8)).token_ids == other.token_ids
        for prompt, said in asked:
            assert engine.generate(list(prompt), greedy(20)).token_ids == said


def test_scales_from_a_prompt_are_measured_on_all_of_its_kv(
    windowed: dict[str, Any], device: str
) -> None:
    """A prompt longer than the ring calibrates an fp8 cache as it does without rings."""
    oracle = windowed[SOME]
    prompt, other = oracle.prompts((90, 30))
    options = {"device": device, "kv_dtype": "fp8", "kv_calibration": prompt}
    found = []
    for rings in (True, False):
        with open_engine(oracle.path, **options, window_rings=rings, poisoned=False) as engine:
            assert bool(engine.memory.rings) == rings
            scales = [each.tolist() for each in engine.model.weights.kv_scales().values()]
            found.append((scales, engine.generate(other, greedy(24)).token_ids))
    assert found[0] == found[1]


def test_timed_chunks_find_a_ring(
    windowed: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that are timed when the engine opens run in one, not in the dummy block."""
    loaded: list[dict[str, Any]] = []
    load = ChunkTimer._load

    def watched(timer: ChunkTimer, **fields: Any) -> None:
        loaded.append(fields)
        load(timer, **fields)

    monkeypatch.setattr(ChunkTimer, "_load", watched)
    path = windowed[SOME].path
    with open_engine(path, device=device, max_prefill_ms_per_step=1e6) as engine:
        (ring,) = engine.memory.rings
        row = loaded[0][ring.table][0].tolist()
        assert set(row) == set(range(1, 1 + ring.blocks)) and len(row) == 22
        result = engine.generate(windowed[SOME].prompts((30,))[0], greedy(40))
    windowed[SOME].assert_greedy(result)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("mode", [None, NGram(k=4)], ids=str)
def test_half_precision_has_the_bits_of_an_engine_without_rings(
    windowed: dict[str, Any], name: str, kv_dtype: str, mode: NGram | None
) -> None:
    """There attention is Gluon's. Rings change hands, and what no window sees is NaN."""
    prompts = [prompt * 3 for prompt in windowed[name].prompts((5, 11, 40, 23, 2))]
    options = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": kv_dtype, "lookahead": 0}
    options |= {"speculative": mode, "prefill_buckets": (16, 64)}
    found = []
    for rings in (False, True):
        with open_engine(windowed[name].path, **options, window_rings=rings) as engine:
            assert bool(engine.memory.rings) == rings
            params = replace(greedy(48), logprobs=2)
            results = engine.generate(prompts, params)
            found.append([(each.token_ids, each.logprobs) for each in results])
    assert found[0] == found[1]
