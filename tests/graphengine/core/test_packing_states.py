"""Prefills that feed several prompts of models with latents and recurrent layers: no bit depends on
which, neither of the KV nor of the recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from checkpoints.family_models import FamilyModel
from checkpoints.hybrids import A, C, E, M, granite, lfm2, nemotron, qwen, qwen_next
from checkpoints.random_models import make
from engines.packed_replies import assert_alike, chunks_of, prompt_of, replies, same
from engines.small_engine import open_engine, sampled
from extent import examples, extent
from graphengine import Engine

LENGTHS = (5, 20, 1, 40, 9)
OPTIONS = {"device": "cpu", "dtype": "float32", "prompts_per_prefill": 4, "max_batch": 5}
# A BLAS gives products of so many columns other bits at other numbers of lanes.
LATENTS: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 384,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 384,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
WIDE: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 384}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "queries without a latent": lambda: make("DeepseekV2", **LATENTS, q_lora_rank=None),
    "queries with a latent": lambda: make("Glm4MoeLite", **LATENTS, q_lora_rank=256),
    "delta rule": lambda: qwen([M, A], **WIDE, **DELTA),
    "delta rule and experts": lambda: qwen_next(
        [M, A], **WIDE, **DELTA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=256
    ),
    # The last layer that keeps anything is a recurrent one.
    "Mamba2": lambda: granite(
        [A, M], hidden_size=384, shared_intermediate_size=384, mamba_n_heads=12, mamba_d_head=32,
        mamba_expand=1, mamba_n_groups=1,
    ),
    "Mamba2 in groups": lambda: nemotron(
        [M, E, A], hidden_size=384, mamba_num_heads=12, mamba_head_dim=32, n_groups=2, **EXPERTS,
        n_routed_experts=4, moe_shared_expert_intermediate_size=256,
    ),
    "short convolutions": lambda: lfm2([C, A], **WIDE),
}  # fmt: skip
RECURRENT = ("delta rule", "Mamba2", "short convolutions")


def packing(path: Path, **options: Any) -> Engine:
    return open_engine(path, **OPTIONS | options)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    FamilyModel(MODELS[request.param]).write(tmp_path, 0)
    return tmp_path


def prompts_of(*lengths: int) -> list[list[int]]:
    return [prompt_of(length, vocabulary=250) for length in lengths]


@pytest.mark.parametrize("model", extent(["queries with a latent"], [*MODELS]), indirect=True)
def test_prompts_that_share_blocks(model: Path) -> None:
    prompts = prompts_of(*LENGTHS)
    prompts[-1] = prompts[1] + prompts[-1]
    assert_alike(lambda: packing(model, prefix_caching=True), prompts, packed=2)


@pytest.mark.parametrize("model", RECURRENT, indirect=True)
def test_recurrent_states(model: Path) -> None:
    """Where nothing runs ahead, also the bits of the states that a prompt leaves."""
    prompts = prompts_of(*LENGTHS)
    assert_alike(lambda: packing(model, lookahead=0), prompts, packed=2)


@pytest.mark.parametrize("model", ["Mamba2"], indirect=True)
def test_a_prompt_waits_for_the_states_that_it_begins_with(model: Path) -> None:
    """The replay that computes them cannot also go on from them; what comes later waits, too."""
    beginning, *ends, other = prompts_of(16, 3, 5, 7)
    prompts = [beginning, *(beginning + end for end in ends), other]
    with packing(model) as engine:
        expected = [replies(engine, [prompt])[0][0] for prompt in prompts]
    with packing(model, prefix_caching=True) as engine:
        requests = [engine.submit(prompt, sampled(6, seed=len(prompt))) for prompt in prompts]
        assert chunks_of(engine) == [[(0, 0, 16)], [(1, 16, 3), (2, 16, 5), (3, 0, 7)]]
        assert [request.result().token_ids for request in requests] == expected
        assert [request.result().cached_tokens for request in requests] == [0, 16, 16, 0]


@pytest.mark.parametrize("model", ["Mamba2"], indirect=True)
def test_samples_of_a_prompt_wait_for_its_states(model: Path) -> None:
    """The first one feeds the blocks that all share; then they are fed together."""
    (prompt,) = prompts_of(20)
    with packing(model) as engine:
        params = [sampled(4, seed=seed) for seed in (3, 4, 5)]
        expected = [engine.generate(prompt, each).token_ids for each in params]
    with packing(model) as engine:
        requests = engine.submit_many(prompt, sampled(4, seed=3), n=3)
        assert chunks_of(engine) == [[(0, 0, 16)], [(0, 16, 4), (1, 16, 4), (2, 16, 4)]]
        assert [request.result().token_ids for request in requests] == expected


@pytest.fixture(scope="module")
def of_convolutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    FamilyModel(MODELS["short convolutions"]).write(path, 0)
    return path


@pytest.fixture(scope="module")
def packed_chunks() -> Iterator[list[int]]:
    """Chunks that were packed, of each example."""
    found: list[int] = []
    yield found
    assert sum(found), found


@settings(max_examples=examples(3, 40), deadline=None, derandomize=True)
@given(data=st.data())
def test_prefixes_give_what_whole_prompts_give(
    of_convolutions: Path, packed_chunks: list[int], data: st.DataObject
) -> None:
    """With few places for states, some of which are taken over, and some lost."""
    stems = prompts_of(16, 33)
    drawn = st.tuples(st.sampled_from(stems), st.sampled_from([1, 7, 16, 20]))
    prompts = [
        stem + prompt_of(length, index, vocabulary=250)
        for index, (stem, length) in enumerate(data.draw(st.lists(drawn, min_size=3, max_size=7)))
    ]
    places = data.draw(st.sampled_from([1, 2, 4]))
    with packing(of_convolutions) as engine:
        expected = [replies(engine, [prompt])[0] for prompt in prompts]
    with packing(of_convolutions, prefix_caching=True, session_states=places) as engine:
        for turn in range(2):
            for one, other in zip(expected, replies(engine, prompts), strict=True):
                assert same(one, other), f"{turn=}"
        packed_chunks.append(engine.counters["packed_chunks"])
