"""Gemma 2's soft caps: log-probabilities, sampled tokens and drafts; and its config.

Without the cap of logits greedy tokens would be the same, so that they show nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from checkpoints.small_decoders import block_in, composed
from engines.family_checks import assert_rewinds
from engines.logit_options import assert_logprobs, drawn_by, each_option, expect
from graphengine import Engine, SamplingParams
from graphengine.kernels.core.devices import H200, assumed
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.composition import windows_of
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.opening.allocation import graph_steps
from graphengine.program.launch_lists import record_schedule
from graphengine.speculative import DraftModel
from launches.compilation import compile_kernel

TOKENS = 20


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **({"prefill_buckets": (16, 64)} | options))


def drawing(**options: Any) -> SamplingParams:
    given = {"temperature": 0.3, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}
    return SamplingParams(**{**given, **options})


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_those_of_capped_logits(
    dense_checkpoints: dict[str, Any], device: str, mode: str
) -> None:
    """Biases and penalties come after the cap."""
    oracle = dense_checkpoints["gemma2"]
    (prompt,) = oracle.prompts((33,))
    options = {"logprobs_mode": mode, "prompt_logprobs": True}
    with open_engine(oracle.path, device=device, **options) as engine:
        plain = engine.generate(prompt, drawing(temperature=0.0))
        wanted = each_option(plain, engine.model.config.vocab_size)["all of it"]
        params = drawing(temperature=0.0, logprobs=4, prompt_logprobs=2, **wanted)
        result = engine.generate(prompt, params)
    expected = expect(oracle.model, prompt, result.token_ids, params)
    assert_logprobs(result, expected.raw if mode == "raw_logprobs" else expected.processed, 4)
    rows = oracle.logits(prompt).log_softmax(-1)
    assert result.prompt_logprobs is not None
    for row, token, found in zip(rows, prompt[1:], result.prompt_logprobs[1:], strict=False):
        assert found is not None
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.8, "min_p": 0.02},
    "sigma": {"top_n_sigma": 1.2},
}


@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_are_drawn_from_capped_logits(
    dense_checkpoints: dict[str, Any],
    edited: Callable[..., Path],
    device: str,
    filters: str,
) -> None:
    """In every lane; an engine without the cap draws others."""
    oracle = dense_checkpoints["gemma2"]
    prompts = oracle.prompts((3, 40))
    params = [drawing(**FILTERS[filters], seed=seed) for seed in range(2)]
    found = {}
    uncapped = edited(oracle.path, config={"final_logit_softcapping": None})
    for path in (oracle.path, uncapped):
        with open_engine(path, device=device) as engine:
            found[path] = engine.generate(prompts, params)
    tokens = {path: [each.token_ids for each in results] for path, results in found.items()}
    assert tokens[oracle.path] != tokens[uncapped]
    for asked, result in zip(params, found[oracle.path], strict=True):
        exact = expect(oracle.model, result.prompt_token_ids, result.token_ids).raw.exact
        first = len(result.prompt_token_ids) - 1
        drawn = [drawn_by(row.float(), asked, first + at) for at, row in enumerate(exact)]
        assert list(result.token_ids) == drawn


def test_a_model_drafts_for_itself(dense_checkpoints: dict[str, Any], device: str) -> None:
    """A draft comes from capped logits, too: all of them are right at any temperature."""
    oracle = dense_checkpoints["gemma2"]
    options = {"device": device, "row_family": "dot"}
    for filters in ({}, {"top_k": 20}):
        params = drawing(temperature=0.6, max_tokens=32, **filters)
        with open_engine(oracle.path, **options) as engine:
            expected = engine.generate(oracle.prompts((21,)), params)
        with open_engine(oracle.path, **options, speculative=DraftModel(oracle.path, k=3)) as both:
            (result,) = both.generate(oracle.prompts((21,)), params)
            assert result.token_ids == expected[0].token_ids
            assert both.acceptance.accepted == both.acceptance.proposed > 20


def test_sessions_rewind(dense_checkpoints: dict[str, Any], device: str) -> None:
    with open_engine(dense_checkpoints["gemma2"].path, device=device) as engine:
        assert_rewinds(engine, dense_checkpoints["gemma2"])


@pytest.mark.parametrize("head", [False, True])
def test_kernels_with_caps_compile(
    tmp_path: Path, write_model: Callable[..., Any], head: bool
) -> None:
    """For sm_90: lm_head's, with and without the sampler, from plain and from packed weights."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Gemma2Config(**sizes, **heads, final_logit_softcapping=2.5)
    oracle = write_model(lambda: transformers.Gemma2ForCausalLM(config), tmp_path / "gemma", 1)
    options = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot", "buckets": (2,)}
    options |= {"max_batch": 2, "quantize": "int8" if head else None, "quantize_lm_head": head}
    with open_engine(oracle.path, **options) as engine:
        with assumed(H200):
            schedule = record_schedule(graph_steps(engine.runtime.program, engine.memory))
        engine.runtime.buffers.reset()
    named = {key.name: ops for key, ops in schedule.items()}
    for name in ("decode/2/fast", "decode/2/full"):
        (launch,) = [op for op in named[name] if hasattr(op.arguments.get("sampler"), "cap")]
        assert launch.arguments["sampler"].cap == 2.5
        assert "ex2.approx" in compile_kernel(launch)[0].asm["ptx"]


PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608, "initializer_range": 0.02, "intermediate_size": 36864,
    "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
    "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0,
    "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "torch_dtype": "float32", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
"""The keys of Gemma 2 27B."""


def test_gemma_2_as_it_is_published() -> None:
    assert unknown_keys(PUBLISHED) == []
    model = composed(read_model_config(PUBLISHED))
    attention = block_in(model, GroupedQueryAttention)
    assert windows_of(model) == (4096, 0) * 23
    assert (attention.softcap, model.logits_cap, attention.scale) == (50.0, 30.0, 144**-0.5)
    assert model.tie_embeddings and model.norms_plus_one and not attention.qk_norm
    # Caps are on where nothing is said of them, and null turns them off.
    few = {"architectures": ["Gemma2ForCausalLM"], "hidden_size": 256}
    short = composed(read_model_config(few))
    assert (block_in(short, GroupedQueryAttention).softcap, short.logits_cap) == (50.0, 30.0)
    off = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    short = composed(read_model_config(few | off))
    assert (block_in(short, GroupedQueryAttention).softcap, short.logits_cap) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu': supported: 'gelu_pytorch_tanh'"),
        ({"use_sliding_window": False}, "use_sliding_window=False: supported: null or True"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1: must be a finite number in"),
        ({"final_logit_softcapping": 1e7}, "final_logit_softcapping=10000000.0: must be a finite"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True: supported"),
        ({"router_logit_softcapping": 3.0}, "router_logit_softcapping=3.0: supported"),
    ],
)
def test_what_gemma_2_does_not_compute_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(PUBLISHED | changes)
