"""RoPE on a part of each head that is not one over a whole number, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engines.family_checks import assert_replies, assert_same_in_any_company
from graphengine import Engine, SamplingParams
from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_model
from graphengine.models.launches import Share
from graphengine.models.splitting.rank_cuts import cut_to
from graphengine.models.splitting.rank_sizes import of_rank

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def phi(part: float) -> transformers.PreTrainedModel:
    """A model like Phi-4-mini, with RoPE on three quarters, and one linear for queries, keys and
    values.
    """
    config = transformers.Phi3Config(**SIZES, bos_token_id=1, partial_rotary_factor=part)
    return transformers.Phi3ForCausalLM(config)


def glm(part: float) -> transformers.PreTrainedModel:
    """With biases, and norms of queries and keys."""
    sizes = {"moe_intermediate_size": 40, "n_routed_experts": 4, "num_experts_per_tok": 2}
    switches = {"attention_bias": True, "use_qk_norm": True, "head_dim": 40}
    config = transformers.Glm4MoeConfig(**SIZES, **sizes, **switches, partial_rotary_factor=part)
    return transformers.Glm4MoeForCausalLM._from_config(config, experts_implementation="eager")


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "phi, 18 of 24": partial(phi, 0.75),
    "phi, 2 of 24": partial(phi, 0.1),
    "glm, 12 of 40": partial(glm, 0.3),
    "glm, 38 of 40": partial(glm, 0.95),
}


@pytest.fixture(scope="module")
def oracles(
    write_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    return {name: write_model(make, folder / name, 3) for name, make in MODELS.items()}


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(
    oracles: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    path = oracles[name].path
    with open_engine(path, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        assert_replies(engine, oracles[name], eager, (1, 17, 90))


def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    oracles: dict[str, Any], device: str
) -> None:
    oracle = oracles["phi, 18 of 24"]
    assert_same_in_any_company(partial(open_engine, oracle.path, device=device), oracle)


@pytest.mark.parametrize("name", ["phi, 18 of 24", "glm, 12 of 40"])
def test_packed_rows_are_ordered_as_plain_ones(
    oracles: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    """Codes of 8 bits are so close that rows in another order would show."""
    dtype = "float32" if device == "cpu" else "float16"
    rows = []
    for quantize in (None, "int8"):
        options = {"device": device, "dtype": dtype, "lookahead": 0, "quantize": quantize}
        with open_engine(oracles[name].path, **options) as engine:
            seen = eager(engine)
            engine.generate([7, 8, 9, 10], SamplingParams(temperature=0.0, max_tokens=1))
            rows.append(torch.stack(list(seen.values())).float())
    plain, packed = rows
    assert (plain - packed).abs().max() < 0.1 * plain.abs().max()


@pytest.mark.parametrize("name", ["phi, 18 of 24", "glm, 12 of 40"])
def test_new_weights_are_ordered_as_loaded_ones(
    oracles: dict[str, Any], device: str, tmp_path: Path, name: str
) -> None:
    oracle = oracles[name]
    prompt = oracle.prompts((9,))[0]
    torch.manual_seed(4)
    other = type(oracle.model)(oracle.model.config)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    other.save_pretrained(tmp_path)
    with open_engine(tmp_path, device=device) as fresh:
        expected = fresh.generate(prompt, GREEDY).token_ids
    with open_engine(oracle.path, device=device) as engine:
        assert engine.generate(prompt, GREEDY).token_ids != expected
        engine.update_weights(Checkpoint.open(tmp_path).mapped())
        assert engine.generate(prompt, GREEDY).token_ids == expected


@pytest.mark.parametrize("name", ["phi, 18 of 24", "glm, 12 of 40"])
def test_ranks_order_their_own_rows(oracles: dict[str, Any], name: str) -> None:
    checkpoint = Checkpoint.open(oracles[name].path)
    config = read_model(checkpoint)
    whole = config.allocate(device="cpu", dtype=torch.float32)
    checkpoint.load(destinations(checkpoint, whole))
    for rank in range(2):
        share = Share(rank, 2)
        part = of_rank(config, share).allocate(device="cpu", dtype=torch.float32)
        cut = cut_to(checkpoint, whole, part, share)
        cut.load(destinations(cut, part))
        ours, theirs = part.blocks()[0], whole.blocks()[0]
        assert isinstance(ours, AttentionWeights) and isinstance(theirs, AttentionWeights)
        assert isinstance(ours.qkv, torch.Tensor) and isinstance(theirs.qkv, torch.Tensor)
        block = theirs.block
        parts = theirs.qkv.split([block.q_size, block.kv_size, block.kv_size])
        assert torch.equal(ours.qkv, torch.cat([each.chunk(2)[rank] for each in parts]))
