"""Models with latent attention against transformers: DeepSeek-V2 and V3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from checkpoints.small_decoders import block_in, expert_layers
from engines.family_checks import assert_replies, assert_same_in_any_company
from graphengine import Engine, SamplingParams
from graphengine.models.blocks.experts import Experts
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.decoder import DecoderConfig
from graphengine.models.linears import heuristic_plans, stream_groups
from graphengine.models.plans.chains import new_chain
from graphengine.models.states import Paged, cache_shape, kv_scale_bytes
from graphengine.speculative import DraftModel, NGram

NAMES = ("latent-lite", "latent-groups", "latent-corrected", "latent-five-experts")
PROMPT_LENGTHS = (1, 75)
TOKENS = 64


def greedy(max_tokens: int = TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


def read_config(oracle: Any) -> DecoderConfig:
    model = read_model(Checkpoint.open(oracle.path))
    assert isinstance(model, DecoderConfig)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(
    latent_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = latent_checkpoints[name]
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        assert_replies(engine, oracle, eager, PROMPT_LENGTHS)


@pytest.mark.parametrize("name", NAMES[2:3])
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    latent_checkpoints: dict[str, Any], device: str, name: str
) -> None:
    oracle = latent_checkpoints[name]
    assert_same_in_any_company(partial(open_engine, oracle, device=device), oracle)


def test_sessions_snapshots_and_shared_prefixes(
    latent_checkpoints: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """Each reply is the best that transformers knows of what the session then says."""
    oracle = latent_checkpoints["latent-corrected"]
    head, tail = oracle.prompts((45, 6))
    options = {"device": device, "prefill_buckets": (16, 64), "prefix_caching": True}
    file = tmp_path / "session.safetensors"
    with open_engine(oracle, **options) as engine, engine.session() as session:
        session.append(head)
        first = session.generate(greedy(12))
        session.rewind(7)
        session.append(tail)
        kept = session.snapshot(file)
        assert kept.blocks > 5
        second = session.generate(greedy(12))
        assert second.cached_tokens >= 40
        with engine.restore_session(kept) as copy:
            again = copy.generate(greedy(12))
        shared = engine.generate([*head, *tail], greedy(12))
        assert shared.cached_tokens == 40
        for result in (first, second, shared):
            oracle.assert_greedy(result)
    assert again.token_ids == second.token_ids
    with open_engine(oracle, **options) as other, other.restore_session(file) as restored:
        assert restored.cached_tokens >= 40
        assert restored.generate(greedy(12)).token_ids == second.token_ids


@contextmanager
def routers(model: Any, given: torch.Tensor | None = None) -> Iterator[list[torch.Tensor]]:
    """What transformers' routers choose meanwhile, [tokens, k] of each layer.

    given  [tokens, layers, k]: what they are to choose in its place; their weights follow from
           their own scores of it, by DeepSeek's formulae
    """
    seen: list[torch.Tensor] = []
    gates = [each for each in model.modules() if type(each).__name__.endswith("TopkRouter")]

    def hook(gate: Any, _: Any, output: Any) -> Any:
        logits, weights, chosen = output
        if given is not None:
            chosen = given[:, len(seen)]
            corrected = hasattr(gate, "e_score_correction_bias")
            scores = logits.sigmoid() if corrected else logits.softmax(dim=-1)
            weights = scores.gather(1, chosen)
            if corrected and gate.norm_topk_prob:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            weights = weights * gate.routed_scaling_factor
        seen.append(chosen)
        return logits, weights, chosen

    handles = [gate.register_forward_hook(hook) for gate in gates]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", NAMES[:3])
def test_records_are_transformers_own_routes_and_are_replayed(
    latent_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    """Alone, in a batch and with drafts; and with a record of other experts the logits are those
    of transformers with these experts. The prompt has two chunks.
    """
    oracle = latent_checkpoints[name]
    prompts = oracle.prompts((9, 21))
    # What n-grams find again.
    prompts[0] *= 4
    options = {"device": device, "prefill_buckets": (16,), "record_routing": True}
    with open_engine(oracle, **options, lookahead=0) as engine:
        alone = [engine.generate(prompt, greedy(24)) for prompt in prompts]
        together = engine.generate(prompts, greedy(24))
        config = engine.model.config
        layers, experts = len(expert_layers(config)), block_in(config, Experts)
        seen = eager(engine)
        tokens = range(21 + 15)
        shifted = [
            [
                [(3 * token + layer + i) % experts.experts for i in range(3)]
                for layer in range(layers)
            ]
            for token in tokens
        ]
        other = engine.generate(prompts[1], greedy(16, routing=shifted))
    with open_engine(oracle, **options, speculative=NGram(k=3)) as engine:
        drafted = engine.generate(prompts, greedy(24))
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
    for result, *others in zip(alone, together, drafted, strict=True):
        assert result.routing is not None
        assert result.routing.shape == (len(result.prompt_token_ids) + 23, layers, 3)
        for each in others:
            assert each.token_ids == result.token_ids
            assert each.routing.tolist() == result.routing.tolist()
        with routers(oracle.model) as chosen:
            oracle.logits([*result.prompt_token_ids, *result.token_ids][:-1])
        theirs = torch.stack(chosen, dim=1).sort(dim=-1).values
        found = torch.from_numpy(result.routing.copy()).long().sort(dim=-1).values
        # Nearly equal scores may be in another order.
        assert (found == theirs).all(dim=-1).float().mean() > 0.97
    assert other.routing.tolist() == shifted and other.token_ids != alone[1].token_ids[:16]
    # The last token is never fed.
    given = torch.tensor([*shifted, shifted[0]])
    with routers(oracle.model, given):
        oracle.assert_logits(other, seen)


def test_a_latent_model_drafts_for_itself(latent_checkpoints: dict[str, Any], device: str) -> None:
    oracle = latent_checkpoints["latent-five-experts"]
    prompts = oracle.prompts((9, 30))
    options = {"device": device, "prefill_buckets": (64,)}
    with open_engine(oracle, **options) as engine:
        expected = [result.token_ids for result in engine.generate(prompts, greedy(24))]
    with open_engine(oracle, **options, speculative=DraftModel(oracle.path, k=2)) as engine:
        drafted = engine.generate(prompts, greedy(24))
    assert [result.token_ids for result in drafted] == expected
    assert all(result.acceptance.accepted for result in drafted)


def test_entries_are_a_latent_and_a_rotated_key(latent_checkpoints: dict[str, Any]) -> None:
    oracle = latent_checkpoints["latent-lite"]
    model = read_config(oracle)
    assert model.states == ((Paged(1, (64,)),),) * 3
    assert kv_scale_bytes(model.states) == 0 and cache_shape(model.states, 8) == (3, 1, 8, 64)
    weights = model.allocate(device="meta", dtype=torch.bfloat16)
    assert weights.kv_scales() == {}
    with open_engine(oracle, device="cpu", kv_blocks=20) as engine:
        assert engine.cache.shape == (3, 21, 1, 8, 64)
        assert engine.memory.block_bytes == 3 * 8 * 64 * 4


def test_linears_are_in_the_order_of_a_step(latent_checkpoints: dict[str, Any]) -> None:
    experts = ["shared_gate_up", "expert_gate_up", "expert_down", "shared_down"]
    lite, groups, corrected, _ = (read_config(latent_checkpoints[name]) for name in NAMES)
    dense = ["gate_up", "down"]
    assert list(lite.linears) == ["q_kv_a", "output", *dense, *experts, "lm_head"]
    assert list(groups.linears) == ["q_kv_a", "q_b", "output", *experts, "lm_head"]
    assert list(corrected.linears) == ["q_kv_a", "q_b", "output", *dense, *experts, "lm_head"]
    plans = heuristic_plans(lite.linears, torch.bfloat16, "dot")
    # What the last layer's last product leaves is what the final norm reads.
    assert stream_groups(lite.linears, plans) == -(
        -lite.hidden_size // plans["shared_down"].block_m
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_read_once(latent_checkpoints: dict[str, Any], name: str) -> None:
    oracle = latent_checkpoints[name]
    weights = read_config(oracle).allocate(device="meta", dtype=torch.float32)
    theirs = sum(parameter.numel() for parameter in oracle.model.parameters())
    corrections = [b.numel() for n, b in oracle.model.named_buffers() if "correction" in n]
    assert weights.parameters == theirs + sum(corrections)
    half = read_config(oracle).allocate(device="meta", dtype=torch.bfloat16)
    of_choice = [t for n, t in half.named().items() if n.endswith("e_score_correction_bias")]
    assert len(of_choice) == len(corrections)
    assert all(tensor.dtype == torch.float32 for tensor in of_choice)


def test_what_latents_cannot_do_is_refused(latent_checkpoints: dict[str, Any]) -> None:
    oracle = latent_checkpoints["latent-corrected"]
    model = read_config(oracle)
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM keep latents of 64 values"):
        open_engine(oracle, device="cpu", kv_dtype="fp8")
    first, *others = model.layers[0]
    long = first._replace(block=replace(first.block, value_dim=512))
    dense = replace(model, layers=((long, *others),))
    with pytest.raises(ValueError, match=r"values are longer than their keys, .* is no chain"):
        new_chain(dense, layers=2, dtype=torch.float32, device=torch.device("cpu"))


def test_packed_weights_around_latents(
    latent_checkpoints: dict[str, Any],
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    tmp_path: Path,
    device: str,
) -> None:
    """Without experts, which are not rounded. What each head has to itself stays as it is."""
    torch.manual_seed(3)
    source = latent_checkpoints["latent-corrected"].model.config.to_dict()
    sizes = {"n_routed_experts": 5, "first_k_dense_replace": 9, "hidden_size": 128}
    sizes |= {"q_lora_rank": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"v_head_dim": 32, "initializer_range": 0.1}
    DeepseekV3ForCausalLM(DeepseekV3Config.from_dict(source | sizes)).save_pretrained(tmp_path)
    options: dict[str, Any] = {"device": device, "max_seq_len": 64, "lookahead": 0}
    # Packed weights are not for float32 on a GPU.
    dtype = "float32" if device == "cpu" else "float16"
    rows = []
    for quantize in (None, "int8"):
        with Engine.from_pretrained(
            tmp_path, dtype=dtype, max_batch=2, quantize=quantize, **options
        ) as engine:
            seen = eager(engine)
            engine.generate([5, 9, 77, 3, 150], greedy(2))
            rows.append(torch.stack([*seen.values()][:1]))
            names = {name.partition(".")[2] for name in engine.model.config.linears}
            assert (names == {""}) == (quantize is None)
    error = (rows[1] - rows[0]).abs().max() / rows[0].abs().max()
    assert 0 < error < 0.1
