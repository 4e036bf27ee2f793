"""GLM-4-MoE against transformers: half of a head turns, and experts are routed as DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from engines.family_checks import assert_replies, assert_same_in_any_company
from graphengine import Engine, SamplingParams
from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_model
from graphengine.models.decoder import DecoderConfig
from graphengine.models.quantised.writer import write_quantised

NAMES = ("glm-norms-biases", "glm-plain-yarn")
PROMPT_LENGTHS = (1, 75)
TOKENS = 64


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


def read_config(oracle: Any) -> DecoderConfig:
    model = read_model(Checkpoint.open(oracle.path))
    assert isinstance(model, DecoderConfig)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(
    glm_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = glm_checkpoints[name]
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        assert_replies(engine, oracle, eager, PROMPT_LENGTHS)


def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    glm_checkpoints: dict[str, Any], device: str
) -> None:
    oracle = glm_checkpoints[NAMES[0]]
    assert_same_in_any_company(partial(open_engine, oracle, device=device), oracle)


@pytest.mark.parametrize("name", NAMES)
def test_quarters_of_heads_are_exchanged_for_queries_and_keys_alone(
    glm_checkpoints: dict[str, Any], name: str
) -> None:
    oracle = glm_checkpoints[name]
    checkpoint, model = Checkpoint.open(oracle.path), read_config(oracle)
    weights = model.allocate(device="cpu", dtype=torch.float32)
    checkpoint.load(destinations(checkpoint, weights))
    layer = weights.layers[0]
    attention, theirs = layer.attention, oracle.model.model.layers[0].self_attn
    assert isinstance(attention, AttentionWeights)
    size = attention.block.head_dim
    q = size // 4
    order = [*range(q), *range(2 * q, 3 * q), *range(q, 2 * q), *range(3 * q, size)]
    rows = attention.qkv.split([attention.block.q_size] + [attention.block.kv_size] * 2)
    for found, part in zip(rows, ("q_proj", "k_proj", "v_proj"), strict=True):
        expected = getattr(theirs, part).weight
        if part != "v_proj":
            expected = expected.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        assert torch.equal(found, expected)
    assert (attention.q_norm is not None) == (name == NAMES[0])
    if attention.q_norm is not None:
        assert torch.equal(attention.q_norm, theirs.q_norm.weight[order])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_packed_rows_are_exchanged_as_plain_ones(
    glm_checkpoints: dict[str, Any],
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    tmp_path: Path,
    device: str,
    quantize: str,
) -> None:
    """Without experts, which are not rounded."""
    torch.manual_seed(3)
    sizes = {"first_k_dense_replace": 9, "hidden_size": 128, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "initializer_range": 0.1}
    source = glm_checkpoints[NAMES[0]].model.config.to_dict()
    Glm4MoeForCausalLM(Glm4MoeConfig.from_dict(source | sizes)).save_pretrained(tmp_path)
    # Of packed weights a GPU computes in half precision alone.
    dtype = "float32" if device == "cpu" else "float16"
    written = tmp_path / "quantised"
    write_quantised(Checkpoint.open(tmp_path), written, quantize)
    options: dict[str, Any] = {"device": device, "max_seq_len": 64, "lookahead": 0}
    rows = []
    for path, kind in ((tmp_path, None), (tmp_path, quantize), (written, None)):
        with Engine.from_pretrained(
            path, dtype=dtype, max_batch=2, quantize=kind, **options
        ) as engine:
            seen = eager(engine)
            engine.generate([5, 9, 77, 3, 150, 8, 41, 6], greedy(2))
            rows.append(torch.stack([*seen.values()][:1]))
    plain, rounded, reread = rows
    error = (rounded - plain).abs().max() / plain.abs().max()
    assert 0 < error < (0.1 if quantize == "int8" else 0.5)
    # The file was rounded on the CPU: ties may fall otherwise on a GPU.
    torch.testing.assert_close(rounded, reread, rtol=0, atol=0 if device == "cpu" else 0.01)


def test_an_fp8_cache_holds_exchanged_keys(
    glm_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
) -> None:
    """Its rounding alone is seen, of all that is read from it: prompts have several chunks."""
    oracle = glm_checkpoints[NAMES[0]]
    (prompt,) = oracle.prompts((40,))
    options: dict[str, Any] = {"device": device, "prefill_buckets": (16,), "lookahead": 0}
    with open_engine(oracle, **options, kv_dtype="fp8") as engine:
        seen = eager(engine)
        result = engine.generate(prompt, greedy(8))
    assert len(seen) >= 8
    expected = oracle.logits([*prompt, *result.token_ids])
    errors = [
        (row - expected[place]).abs().max() / expected[place].abs().max()
        for (_, place), row in seen.items()
    ]
    assert 1e-4 < max(errors) < 0.15


def test_records_are_transformers_own_routes(glm_checkpoints: dict[str, Any], device: str) -> None:
    """By corrected scores, in groups."""
    oracle = glm_checkpoints[NAMES[0]]
    (prompt,) = oracle.prompts((33,))
    with open_engine(oracle, device=device, record_routing=True) as engine:
        result = engine.generate(prompt, greedy(16))
    assert result.routing is not None
    fed = [*prompt, *result.token_ids][:-1]
    chosen: list[torch.Tensor] = []
    gates = [each for each in oracle.model.modules() if hasattr(each, "routed_scaling_factor")]
    gates = [each for each in gates if hasattr(each, "e_score_correction_bias")]
    handles = [
        gate.register_forward_hook(lambda *call: chosen.append(call[2][2])) for gate in gates
    ]
    oracle.logits(fed)
    for handle in handles:
        handle.remove()
    assert len(chosen) == result.routing.shape[1] == 2
    theirs = torch.stack(chosen, dim=1).sort(dim=-1).values
    found = torch.from_numpy(result.routing.copy()).long().sort(dim=-1).values
    # Nearly equal scores may be in another order.
    assert (found == theirs).all(dim=-1).float().mean() > 0.97
