"""Models whose layers have windows, against transformers; whatever an engine does with their KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpoints.small_decoders import composed
from engines.family_checks import (
    assert_half_precision_replays,
    assert_replies,
    assert_rewinds,
)
from graphengine import Engine, SamplingParams
from graphengine.models.composition import has_local_tables, windows_of
from graphengine.models.families.registry import read_model_config
from graphengine.speculative import DraftModel, NGram

TOKENS = 24
SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
}  # fmt: skip
HALF = ["full_attention", "sliding_attention"]


def _mistral(**options: Any) -> MistralForCausalLM:
    options = {"num_hidden_layers": 2, "head_dim": 64} | options
    return MistralForCausalLM(MistralConfig(**SIZES | options))


def _qwen(kind: str, layers: int, **options: Any) -> PreTrainedModel:
    options = {"num_hidden_layers": layers, "use_sliding_window": True} | options
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES | {"hidden_size": 256} | options))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 64} | options))


# Blocks have 8 tokens. Windows: in a block, over blocks' edges, longer than most prompts.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral-5": lambda: _mistral(sliding_window=5),
    "mistral-50": lambda: _mistral(sliding_window=50),
    "mistral-none": lambda: _mistral(sliding_window=None),
    "qwen2-1": lambda: _qwen("qwen2", 2, sliding_window=1, max_window_layers=1),
    "qwen2-19": lambda: _qwen("qwen2", 4, sliding_window=19, layer_types=HALF * 2),
    "qwen3-8": lambda: _qwen("qwen3", 3, sliding_window=8, max_window_layers=1),
}
WINDOWS = {
    "mistral-5": (5, 5), "mistral-50": (50, 50), "mistral-none": (0, 0), "qwen2-1": (0, 1),
    "qwen2-19": (0, 19, 0, 19), "qwen3-8": (0, 8, 8),
}  # fmt: skip


@pytest.fixture(scope="session")
def windowed(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("windows")
    return {
        name: write_model(make, folder / name, seed)
        for seed, (name, make) in enumerate(MODELS.items())
    }


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def config_of(oracle: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((oracle.path / "config.json").read_text())
    return config


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 176, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **({"prefill_buckets": (16, 64)} | options))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(
    windowed: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    oracle = windowed[name]
    assert windows_of(composed(read_model_config(config_of(oracle)))) == WINDOWS[name]
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        # Past the longest window's edge in decode, and in prefill.
        assert_replies(engine, oracle, eager, (3, 40, 70), TOKENS)


ALTERNATING = "qwen2-19"


def test_chunks_and_batches(windowed: dict[str, Any], device: str) -> None:
    """Chunks shorter and longer than the window, whose edge is in some chunk's middle."""
    oracle = windowed[ALTERNATING]
    prompts = oracle.prompts((1, 19, 20, 100))
    results = []
    for buckets in ((8,), (16, 128)):
        with open_engine(oracle.path, device=device, prefill_buckets=buckets) as engine:
            results += engine.generate(prompts, greedy(10))
    for result in results:
        oracle.assert_greedy(result)


@pytest.mark.parametrize("name", ["mistral-5"])
def test_paused_requests_resume_with_the_same_tokens(
    windowed: dict[str, Any], device: str, name: str
) -> None:
    oracle = windowed[name]
    prompts = oracle.prompts((9, 30, 41, 17))
    with open_engine(oracle.path, device=device) as engine:
        expected = [engine.generate(prompt, greedy(30)).token_ids for prompt in prompts]
    options = {"max_seq_len": 80, "kv_blocks": 14, "swap_blocks": 60}
    with open_engine(oracle.path, device=device, **options) as engine:
        results = engine.generate(prompts, greedy(30))
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(("name", "drafter"), [("mistral-5", "another"), (ALTERNATING, "ngram")])
def test_drafts_change_no_token(
    windowed: dict[str, Any], device: str, name: str, drafter: str
) -> None:
    """Rejected drafts are rewound at each place of a window; another model has another window."""
    oracle = windowed[name]
    mode = NGram(k=4) if drafter == "ngram" else DraftModel(windowed["mistral-50"].path, k=3)
    # Repetitions, for drafts to be found in.
    prompts = [prompt * 3 for prompt in oracle.prompts((5, 11, 14))]
    plain = {"device": device, "row_family": "dot"}
    with open_engine(oracle.path, **plain) as engine:
        expected = engine.generate(prompts, greedy())
    with open_engine(oracle.path, **plain, speculative=mode) as engine:
        results = engine.generate(prompts, greedy())
        assert engine.acceptance.proposed > 0
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
    for result in results:
        oracle.assert_greedy(result)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_half_precision_replays_what_it_computes_eagerly(
    windowed: dict[str, Any], eager: Callable[[Engine], Any], name: str, kv_dtype: str
) -> None:
    """There attention is Gluon's."""
    opened = partial(open_engine, windowed[name].path)
    assert_half_precision_replays(opened, windowed[name], eager, kv_dtype)


def test_sessions_rewind_and_snapshots(
    windowed: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """With all of the layers' KV; `test_window_rings.py` has rings."""
    options = {"device": device, "window_rings": False}
    oracle = windowed[ALTERNATING]
    file = tmp_path / "session.safetensors"
    with open_engine(oracle.path, **options) as engine:
        again = assert_rewinds(engine, oracle, file)
    with open_engine(oracle.path, **options) as engine, engine.restore_session(file) as session:
        assert session.cached_tokens > 0
        assert session.generate(greedy(30)).token_ids == again


def test_layers_with_windows_have_their_own_rope(
    windowed: dict[str, Any],
    device: str,
    eager: Callable[[Engine], Any],
    edited: Callable[..., Path],
) -> None:
    """Against transformers' Qwen2, whose windowed layers are handed other cosines and sines."""
    oracle = windowed[ALTERNATING]
    local, full = ({"rope_type": "default", "rope_theta": theta} for theta in (100.0, 10_000.0))
    nested = {"full_attention": full, "sliding_attention": local}
    path = edited(oracle.path, config={"rope_parameters": nested})
    model = type(oracle)(oracle.path).model
    config = Qwen2Config(**model.config.to_dict() | {"rope_parameters": local})
    rotary = type(model.model.rotary_emb)(config)

    def with_local_tables(_: Any, inputs: Any, options: dict[str, Any]) -> Any:
        positions = options["position_ids"]
        return inputs, options | {"position_embeddings": rotary(inputs[0], positions)}

    for kind, layer in zip(HALF * 2, model.model.layers, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(with_local_tables, with_kwargs=True)
    prompt = oracle.prompts((40,))[0]
    with open_engine(path, device=device, lookahead=0) as engine:
        assert has_local_tables(engine.model.config)
        seen = eager(engine)
        result = engine.generate(prompt, greedy(20))
    with torch.no_grad():
        expected = model(torch.tensor([[*prompt, *result.token_ids]])).logits[0].float()
    for (_, position), logits in seen.items():
        error = (logits - expected[position]).abs().max() / expected[position].abs().max()
        assert error <= 1e-4, f"{position=}: {error=}"
    assert list(result.token_ids) == expected[len(prompt) - 1 : -1].argmax(dim=1).tolist()
