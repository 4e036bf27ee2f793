"""Which layers have a window: as transformers reads it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graphengine.kernels.norm_rope.rope_config import rope_frequencies
from graphengine.models.composition import attention_of, blocks_of, has_local_tables, windows_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families import beside_towers, qwen3_omni
from graphengine.models.families.registry import FAMILIES, read_model_config
from graphengine.models.hf.config_schema import unknown_keys

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
    "max_position_embeddings": 8192,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, SLIDING, FULL]
USED = {"use_sliding_window": True}
UNUSED = {"use_sliding_window": False, "sliding_window": 100}


def read(family: str, **changes: Any) -> DecoderConfig:
    config = read_model_config(SMALL | {"architectures": [f"{family}ForCausalLM"]} | changes)
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 100},
        {"sliding_window": 100, "use_sliding_window": False},
        USED,
        USED | {"sliding_window": None},
        USED | {"sliding_window": 100, "max_window_layers": 1},
        USED | {"sliding_window": 100, "max_window_layers": 0},
        USED | {"sliding_window": 100, "max_window_layers": 9},
        USED | {"sliding_window": 100, "layer_types": MIXED, "max_window_layers": 0},
        USED | {"max_window_layers": 2},
    ],
)
@pytest.mark.parametrize(("family", "theirs"), [("Qwen2", Qwen2Config), ("Qwen3", Qwen3Config)])
def test_windows_of_some_layers_are_transformers(
    family: str, theirs: Any, changes: dict[str, Any]
) -> None:
    oracle = theirs(**SMALL | changes)
    windows = tuple(oracle.sliding_window if kind == SLIDING else 0 for kind in oracle.layer_types)
    config = read(family, **changes)
    assert windows_of(config) == windows
    assert unknown_keys(SMALL | changes) == []


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"sliding_window": 7}])
def test_a_window_of_mistral_is_that_of_all_layers(changes: dict[str, Any]) -> None:
    oracle = MistralConfig(**SMALL | changes)
    window = oracle.sliding_window
    config = read("Mistral", **changes)
    assert windows_of(config) == (window or 0,) * 4
    attention, mlp = blocks_of(config)[:2]
    assert not (attention.qkv_bias or attention.output_bias or attention.qk_norm or mlp.bias)


def test_what_is_missing_in_mistral_is_transformers_default() -> None:
    config = {key: value for key, value in SMALL.items() if key not in ("head_dim",)}
    del config["max_position_embeddings"]
    ours = read_model_config(config | {"model_type": "mistral"})
    oracle = MistralConfig(**config)
    assert isinstance(ours, DecoderConfig) and ours.architecture == "MistralForCausalLM"
    assert ours.max_positions == oracle.max_position_embeddings
    assert attention_of(ours).head_dim == oracle.head_dim and ours.norm_eps == oracle.rms_norm_eps
    assert windows_of(ours) == (oracle.sliding_window,) * 4
    assert unknown_keys(oracle.to_dict()) == []


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {}),
        ("Qwen3", USED | {"max_window_layers": 0}),
        ("Qwen2", USED | {"layer_types": MIXED}),
    ],
)
def test_a_window_as_long_as_any_text_is_none(family: str, changes: dict[str, Any]) -> None:
    longest = SMALL["max_position_embeddings"]
    assert read(family, **changes, sliding_window=longest) == read(family, sliding_window=None)
    assert any(windows_of(read(family, **changes, sliding_window=longest - 1)))


@pytest.mark.parametrize("changes", [{"sliding_window": -1}, {"sliding_window": 0}, UNUSED])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "Glm4Moe"])
def test_a_family_without_windows_has_none(family: str, changes: dict[str, Any]) -> None:
    """Where the config says that a window is not used, and where it says so by a number."""
    assert read(family, **changes) == read(family)
    assert not any(windows_of(read(family, **changes)))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {"sliding_window": 32}, "sliding_window=32: supported: null, or use_sliding"),
        ("Llama", USED | {"sliding_window": 32}, "use_sliding_window=True: supported: False"),
        ("Llama", {"layer_types": MIXED}, "layer_types=.*: supported: 'full_attention' in every"),
        ("Qwen2", {"layer_types": MIXED}, "layer_types=.*'full_attention', or use_sliding_window"),
        ("Qwen3", USED | {"sliding_window": None, "layer_types": MIXED}, "layer_types=.*, or use_"),
        ("Qwen2", USED | {"sliding_window": 0}, "sliding_window=0: supported: null, or 1 or more"),
        ("Qwen2", USED | {"sliding_window": -1}, "sliding_window=-1: supported: null, or 1"),
        ("Qwen3", USED | {"layer_types": MIXED[:3]}, "layer_types=.*: supported: 4 times 'full_"),
        ("Qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types=.*4 times 'full_atten"),
        ("Qwen2", {"max_window_layers": -1}, r"max_window_layers=-1: must be an integer in \[0"),
        ("Mistral", {"sliding_window": 0}, "sliding_window=0: supported: null, or 1 or more"),
        ("Mistral", {"layer_types": MIXED}, "layer_types=.*: 'sliding_attention' in every layer"),
        (
            "Mistral", {"sliding_window": None, "layer_types": MIXED},
            "layer_types=.*: 'full_attention', or a sliding_window",
        ),
        ("Mistral", {"use_sliding_window": False}, "use_sliding_window=False: supported: null be"),
        ("Mistral", {"attention_bias": True}, "attention_bias=True: supported: null or False"),
        ("Mistral", {"mlp_bias": True}, "mlp_bias=True: supported: null or False"),
        ("Mistral", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: supported"),
        ("Mistral", {"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000.0: supported: null"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"config.json has {message}"):
        read(family, **changes)


LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}
LOCAL = {"rope_type": "default", "rope_theta": 77.0}


def frequencies(parameters: dict[str, Any]) -> torch.Tensor:
    return LlamaRotaryEmbedding(LlamaConfig(**SMALL, rope_parameters=dict(parameters))).inv_freq


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_is_told_apart_by_layer_type(key: str) -> None:
    mixed = USED | {"layer_types": MIXED, "sliding_window": 9}
    both = {FULL: LINEAR, SLIDING: LOCAL}
    config = read("Qwen3", **mixed, **{key: both})
    assert config.local_rope is not None and has_local_tables(config)
    assert torch.equal(rope_frequencies(config.rope, head_dim=64)[0], frequencies(LINEAR))
    assert torch.equal(rope_frequencies(config.local_rope, head_dim=64)[0], frequencies(LOCAL))
    assert config.table_bytes(100) == 2 * read("Qwen3").table_bytes(100)
    # Where all are alike there is one, and so where no layer has a window.
    assert read("Qwen3", **mixed, **{key: LINEAR}).local_rope is None
    assert read("Qwen3", **mixed, **{key: {FULL: LINEAR, SLIDING: LINEAR}}).local_rope is None
    assert read("Qwen3", **{key: both}) == read("Qwen3", **{key: LINEAR})
    # A window that hides nothing says which layers have the other RoPE all the same.
    assert has_local_tables(read("Qwen3", **mixed | {"sliding_window": 8192}, **{key: both}))
    # Of a model whose layers all have one, no other is there.
    everywhere = read("Mistral", sliding_window=9, **{key: {SLIDING: LOCAL}})
    assert everywhere.rope.theta == 77.0 and everywhere.local_rope is None
    message = rf"{key}=.*: supported: RoPE of all layers, or under 'full_attention' and 'sliding_a"
    with pytest.raises(ValueError, match=message):
        read("Qwen3", **mixed, **{key: {FULL: LINEAR}})


def test_every_family_says_which_windows_it_has() -> None:
    """A new family decides it, rather than to have none by oversight.

    A language model beside a tower is of a family that is listed itself, and a talker has the keys
    of its decoder in a part of its config.
    """
    for architecture, read in FAMILIES.items():
        if read in (beside_towers.read_config, qwen3_omni.read_config, qwen3_omni.read_tts):
            continue
        changes = USED | {
            "sliding_window": 9,
            "layer_types": MIXED,
            "architectures": [architecture],
        }
        try:
            config = read_model_config(SMALL | changes)
        except ValueError as error:
            assert "sliding" in str(error)
        else:
            assert windows_of(config) == (9, 0, 9, 0)


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeTalkerForConditionalGeneration"],
)
def test_a_talker_has_no_windows(architecture: str) -> None:
    own = {"sliding_window": 9, "use_sliding_window": True, "shared_expert_intermediate_size": 16}
    talker = {"codec_eos_token_id": 1, "text_config": own, "architectures": [architecture]}
    whole = architecture.endswith("MoeForConditionalGeneration")
    config = {"talker_config": talker, "architectures": [architecture]} if whole else talker
    with pytest.raises(ValueError, match="use_sliding_window=True: supported: False"):
        read_model_config(config)
    own["use_sliding_window"] = False
    assert not any(windows_of(read_model_config(config)))
