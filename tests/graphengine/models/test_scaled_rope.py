"""RoPE whose frequencies depend on the sequence's length, against transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engines.family_checks import assert_replies
from graphengine import Engine, SamplingParams
from graphengine.models.composition import Composition
from graphengine.speculative import NGram

TRAINED = 64
"""Tokens up to which the models here have their usual frequencies."""
FACTOR = 2.5
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + index / 16 for index in range(pairs)],
        "long_factor": [2.0 + index for index in range(pairs)],
    }


def phi3(pairs: int, **options: Any) -> transformers.PreTrainedModel:
    rope = longrope(pairs) | options
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": TRAINED}
    config = transformers.Phi3Config(**SIZES | lengths, rope_parameters=rope)
    return transformers.Phi3ForCausalLM(config)


def llama() -> transformers.PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}
    config = transformers.LlamaConfig(
        **SIZES, max_position_embeddings=TRAINED, rope_parameters=rope, head_dim=20
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "phi3": lambda: phi3(12),
    # As Phi-4-mini: three quarters of each head turn.
    "phi4-mini": lambda: phi3(9, partial_rotary_factor=0.75),
    "llama-dynamic": llama,
}


@pytest.fixture(scope="module")
def oracles(
    write_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ropes")
    return {name: write_model(make, folder / name, 3) for name, make in MODELS.items()}


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def model_of(engine: Engine) -> Composition:
    assert isinstance(engine.model.config, Composition)
    return engine.model.config


@pytest.mark.parametrize("name", ["phi3", "phi4-mini"])
@pytest.mark.parametrize(
    ("max_seq_len", "lengths"), [(TRAINED, (1, 17, 40)), (160, (TRAINED + 1, 90))]
)
def test_longrope_on_either_side_of_its_border(
    oracles: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    caplog: pytest.LogCaptureFixture,
    name: str,
    max_seq_len: int,
    lengths: tuple[int, ...],
) -> None:
    options = {"prefill_buckets": (16, 64), "lookahead": 0, "max_seq_len": max_seq_len}
    with (
        caplog.at_level(logging.INFO, logger="graphengine"),
        open_engine(oracles[name], device=device, **options) as engine,
    ):
        assert_replies(engine, oracles[name], eager, lengths)
    assert ("max_seq_len=160 exceeds its original_max" in caplog.text) == (max_seq_len == 160)


def test_the_side_of_the_border_is_part_of_the_numerics(oracles: dict[str, Any]) -> None:
    """A session's KV of one side must not be restored on the other."""
    ids = []
    for length in (TRAINED, TRAINED + 1, 160):
        options = {"max_seq_len": length, "prefill_buckets": (16,)}
        with open_engine(oracles["phi3"], device="cpu", **options) as engine:
            ids.append(engine.numerics_id)
    assert ids[0] != ids[1] == ids[2]


def test_the_first_long_versions_call_it_su(
    oracles: dict[str, Any], edited: Callable[..., Path]
) -> None:
    named = {key: value for key, value in longrope(12).items() if key != "rope_type"}
    path = edited(
        oracles["phi3"].path, config={"rope_scaling": named | {"type": "su"}, "rope_parameters": {}}
    )
    with (
        open_engine(oracles["phi3"], device="cpu") as engine,
        Engine.from_pretrained(path, device="cpu", dtype="float32", max_seq_len=160) as older,
    ):
        assert model_of(older).rope == model_of(engine).rope


def test_replies_go_past_the_border_of_dynamic_rope_as_with_a_cache(
    oracles: dict[str, Any], device: str
) -> None:
    oracle = oracles["llama-dynamic"]
    # The longest first: transformers keeps an earlier call's frequencies unless one is shorter.
    prompts = oracle.prompts((TRAINED, 50, 1))
    prompts[1] = prompts[1][:10] * 5
    expected = []
    for prompt in prompts:
        row = oracle.model.generate(torch.tensor([prompt]), max_new_tokens=70, do_sample=False)
        expected.append(tuple(row[0, len(prompt) :].tolist()))
    for options in (
        {},
        {"speculative": NGram(k=3)},
        {"prefill_buckets": (8,), "row_family": "dot"},
    ):
        with open_engine(oracle, device=device, **options) as engine:
            found = [
                result.token_ids[: len(wanted)]
                for result, wanted in zip(
                    engine.generate(prompts, greedy(70)), expected, strict=True
                )
            ]
            assert found == expected


def test_no_prompt_goes_past_the_border_of_dynamic_rope(oracles: dict[str, Any]) -> None:
    oracle = oracles["llama-dynamic"]
    (prompt,) = oracle.prompts((TRAINED + 1,))
    with open_engine(oracle, device="cpu", max_seq_len=None) as engine:
        assert engine.memory.max_seq_len == model_of(engine).max_positions == 160
        message = f"prompt of {TRAINED + 1} tokens exceeds max_position_embeddings={TRAINED}"
        with pytest.raises(ValueError, match=message):
            engine.generate(prompt)
        with engine.session() as session:
            session.append(prompt)
            with pytest.raises(ValueError, match=message):
                session.generate(greedy(1))
    with pytest.raises(ValueError, match="max_seq_len=161 exceeds the model's 160 positions"):
        open_engine(oracle, device="cpu", max_seq_len=161)
