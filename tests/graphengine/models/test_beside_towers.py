"""Language models of other families beside a vision tower, against transformers with its tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.tower_models import SCALED, TOWERS
from engines.family_configs import config_of
from engines.small_engine import assert_idle, greedy, open_engine, run
from engines.towers import IMAGE, SAID, Tower, new_tower
from graphengine import NGram, PromptParts
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys

SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True}


@pytest.fixture(scope="module", params=TOWERS)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return new_tower(TOWERS[request.param], tmp_path_factory.mktemp(request.param))


def _pixels(tower: Tower) -> dict[str, Tensor]:
    """Random pixels of one image."""
    dice = torch.Generator().manual_seed(3)
    kind = tower.model.config.model_type
    if kind == "lfm2_vl":
        return {
            "pixel_values": torch.randn(1, 16, 3 * 64, generator=dice),
            "spatial_shapes": torch.tensor([[2, 8]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64),
        }
    if kind == "kimi_k25":
        grid = torch.tensor([[1, 4, 6]])
        return {"pixel_values": torch.randn(24, 3, 8, 8, generator=dice), "image_grid_thw": grid}
    pixels = torch.randn(1, 3, 32, 32, generator=dice)
    if kind == "mistral3":
        return {"pixel_values": pixels[:, :, :, :16], "image_sizes": torch.tensor([[32, 16]])}
    return {"pixel_values": pixels[None] if kind in ("smolvlm", "idefics3") else pixels}


def test_tokens_after_images_are_those_of_transformers(tower: Tower, device: str) -> None:
    """Whole and in chunks, drafted by n-grams, and in a session that goes on."""
    pixels = _pixels(tower)
    rows = tower.features(**pixels)
    head, tail = [5, 17, 8], [9, 77, 5, 17, 8, 31, 77, 5, 17, 8]
    wanted = tower.says([*head, *[IMAGE] * len(rows), *tail], **pixels)
    assert len(set(wanted)) > 3
    prompt = PromptParts(head, rows, tail)
    for options in ({}, {"prefill_buckets": [8]}, {"speculative": NGram(k=3)}):
        with open_engine(tower.path, device=device, **SIZES, **options) as engine:
            assert engine.generate(prompt, greedy(SAID)).token_ids == tuple(wanted), options
            run(engine)
            assert_idle(engine)
    with open_engine(tower.path, device=device, **SIZES, session_states=4) as engine:
        session = engine.session()
        session.append(PromptParts(head, rows))
        session.generate(greedy(3))
        session.update(prompt)
        assert session.generate(greedy(SAID)).token_ids == tuple(wanted)
        session.close()


def test_text_alone(tower: Tower, device: str, caplog: Any) -> None:
    with open_engine(tower.path, device=device, dtype="float32") as engine:
        for length in (1, 17, 90):
            draw = torch.Generator().manual_seed(length)
            ids = torch.randint(250, (length,), generator=draw).tolist()
            found = engine.generate(ids, greedy(SAID)).token_ids
            assert found == tuple(tower.says(ids)), f"{length=}"
    assert "unknown keys" not in caplog.text


def test_ministral_3_ends_where_queries_would_be_scaled() -> None:
    config = config_of("Ministral3ForCausalLM") | {"max_position_embeddings": 4096}
    assert read_model_config(config).max_positions == 4096
    scaled = config | {"rope_parameters": SCALED}
    assert read_model_config(scaled).max_positions == 128
    assert read_model_config(config | {"rope_scaling": SCALED}).max_positions == 128
    free = SCALED | {"llama_4_scaling_beta": 0}
    assert read_model_config(config | {"rope_parameters": free}).max_positions == 4096


LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100,
    "image_token_index": 32000, "model_type": "llava", "pad_token_id": 32001,
    "projector_hidden_act": "gelu", "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
        "torch_dtype": "float16", "vocab_size": 32064,
    },
    "tie_word_embeddings": False, "torch_dtype": "float16", "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vision_config": {"hidden_size": 1024},
    "vocab_size": 32064,
}  # fmt: skip
"""The keys of llava-1.5-7b-hf, whose language model has sizes that transformers knows."""


def test_llava_as_it_is_published() -> None:
    assert unknown_keys(LLAVA) == []
    model = read_model_config(LLAVA)
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (32, 4096, 32_064)
    assert not model.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config=None: supported: the language model's config"),
        (
            {"text_config": {"model_type": []}},
            r"model_type=\[\]: supported: 'deepseek_v3'",
        ),
        (
            {"text_config": {"model_type": "opt"}},
            "model_type='opt': supported: .*'lfm2'",
        ),
        ({"text_config": [1]}, r"text_config=\[1\]: supported: a JSON object"),
    ],
)
def test_refused_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(LLAVA | changes)


def test_ties_are_read_beside_the_language_model() -> None:
    tied = {"text_config": {**LLAVA["text_config"], "tie_word_embeddings": True}}  # type: ignore[dict-item]
    assert read_model_config(LLAVA | tied).tie_embeddings
    for architecture, expected in (
        ("Mistral3ForConditionalGeneration", True),
        ("SmolVLMForConditionalGeneration", False),
        ("Lfm2VlForConditionalGeneration", True),
    ):
        config = config_of(architecture)
        assert read_model_config(config).tie_embeddings == expected
        other = config | {"tie_word_embeddings": not expected}
        assert read_model_config(other).tie_embeddings != expected


@pytest.mark.skipif("kimi_k25" not in TOWERS, reason="transformers has no Kimi K2.5")
def test_kimi_k25_with_the_names_that_it_is_published_with(tmp_path: Path) -> None:
    """transformers 5.23 calls the language model's layers blocks where it saves them."""
    tower = new_tower(TOWERS["kimi_k25"], tmp_path / "saved")
    ids = torch.randint(250, (31,), generator=torch.Generator().manual_seed(5)).tolist()
    tensors = load_file(tower.path / "model.safetensors")
    published = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): each
        for name, each in tensors.items()
    }
    assert "language_model.model.layers.1.mlp.gate.weight" in published
    save_file(published, tower.path / "model.safetensors")
    with open_engine(tower.path, device="cpu", dtype="float32") as engine:
        assert engine.generate(ids, greedy(SAID)).token_ids == tuple(tower.says(ids))
