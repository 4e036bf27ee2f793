"""`config.json` of Gemma 3: what transformers makes of the same file, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from checkpoints.small_decoders import block_in
from graphengine.drafters.mtp.layer import LAYOUTS, MtpConfig
from graphengine.kernels.norm_rope.rope_config import rope_frequencies
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.composition import windows_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import GEMMA_KEYS, KEYS, unknown_keys
from graphengine.models.hf.neutral_keys import NEUTRAL

FULL, SLIDING = "full_attention", "sliding_attention"
TEXT = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
WHOLE = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
LINEAR = {"rope_type": "linear", "factor": 8.0}
# As it is published for 4B, where the rest is transformers' default.
PUBLISHED = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
    "num_hidden_layers": 34, "rope_scaling": LINEAR, "sliding_window": 1024,
}  # fmt: skip


def read(**changes: Any) -> DecoderConfig:
    config = read_model_config(TEXT | changes)
    assert isinstance(config, DecoderConfig)
    return config


def assert_same(ours: DecoderConfig, theirs: Gemma3TextConfig) -> None:
    for mine, name in (
        ("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"),
        ("num_layers", "num_hidden_layers"), ("norm_eps", "rms_norm_eps"),
        ("max_positions", "max_position_embeddings"), ("tie_embeddings", "tie_word_embeddings"),
    ):  # fmt: skip
        assert getattr(ours, mine) == getattr(theirs, name), name
    attention, mlp = block_in(ours, GroupedQueryAttention), block_in(ours, Swiglu)
    for mine, name in (
        ("num_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"), ("qkv_bias", "attention_bias"),
        ("output_bias", "attention_bias"), ("scale_of", "query_pre_attn_scalar"),
    ):  # fmt: skip
        assert getattr(attention, mine) == getattr(theirs, name), name
    windows = [theirs.sliding_window if kind == SLIDING else 0 for kind in theirs.layer_types]
    assert [*windows_of(ours)] == windows
    assert attention.scale == theirs.query_pre_attn_scalar**-0.5
    assert ours.embedding_scale == theirs.hidden_size**0.5
    assert attention.qk_norm and ours.norms_plus_one
    assert all(each.post_norm for layer in ours.layers for each in layer)
    assert mlp.activation == "gelu_tanh" and mlp.ffn_size == theirs.intermediate_size
    rotary = Gemma3RotaryEmbedding(theirs)
    local = ours.rope if ours.local_rope is None else ours.local_rope
    for kind, rope in ((FULL, ours.rope), (SLIDING, local)):
        if kind not in theirs.layer_types:
            continue
        frequencies, factor = rope_frequencies(rope, head_dim=attention.head_dim)
        torch.testing.assert_close(frequencies, getattr(rotary, f"{kind}_inv_freq"))
        assert factor == getattr(rotary, f"{kind}_attention_scaling")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PUBLISHED,
        {"sliding_window_pattern": 1},
        {"sliding_window_pattern": 3, "sliding_window": 7, "num_hidden_layers": 8},
        {"layer_types": [SLIDING, FULL, FULL], "num_hidden_layers": 3},
        {"layer_types": [SLIDING] * 2, "num_hidden_layers": 2},
        # The types are what counts.
        {"layer_types": [FULL] * 2, "num_hidden_layers": 2, "sliding_window_pattern": 2},
        {"rope_theta": 3e5, "rope_local_base_freq": 77.0, "rope_scaling": LINEAR},
        {"rope_theta": 3e5, "rope_local_base_freq": 77.0, "rope_scaling": None},
        {"rope_parameters": {FULL: LINEAR | {"rope_theta": 50.0}}, "rope_theta": 3e5},
        {"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 50.0}}},
        {"rope_parameters": {FULL: {"rope_type": "default"}}, "rope_scaling": LINEAR},
        {"attention_bias": True, "head_dim": 128, "query_pre_attn_scalar": 168},
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-3, "vocab_size": 99},
    ],
)
def test_a_config_is_what_transformers_reads(changes: dict[str, Any]) -> None:
    theirs = Gemma3TextConfig(**changes)
    assert_same(read(**changes), theirs)
    assert unknown_keys(TEXT | changes) == []
    # As transformers writes it, too.
    written = theirs.to_dict()
    assert_same(read(**written), theirs)
    assert unknown_keys(written) == []


def test_a_config_beside_that_of_images() -> None:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32}
    theirs = Gemma3Config(text_config=dict(PUBLISHED), vision_config=vision)
    short = WHOLE | {"text_config": PUBLISHED, "vision_config": vision, "mm_tokens_per_image": 256}
    for config in (short, theirs.to_dict(), short | {"architectures": None}):
        ours = read_model_config(config | {"boi_token_index": 5, "eos_token_id": [1, 106]})
        assert isinstance(ours, DecoderConfig)
        assert_same(ours, theirs.text_config)
        assert unknown_keys(config) == []
    assert unknown_keys(short | {"text_config": {"odd": 1}, "even": 2}) == [
        "even", "text_config.odd"
    ]  # fmt: skip
    # Of a language model alone they are nobody's.
    assert unknown_keys(TEXT | {"mm_tokens_per_image": 256}) == ["mm_tokens_per_image"]


@pytest.mark.parametrize(
    "named",
    [
        {"model_type": "gemma3_text"},
        {"architectures": ["Gemma3TextModel"]},
        {"architectures": ["Gemma3ForCausalLM"]},
    ],
)
def test_names_of_the_language_model(named: dict[str, Any]) -> None:
    assert read_model_config(named | PUBLISHED) == read(**PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu': supported: 'gelu_pytorch_tanh'"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu': supported: 'gelu_pytorch"),
        ({"hidden_act": "silu"}, "hidden_act='silu': supported: null or 'gelu_pytorch_tanh'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: supported: null or 0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: supported: null or 0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True: supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: must be a finite number in"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar=None: must be a finite number"),
        ({"sliding_window_pattern": 0}, r"sliding_window_pattern=0: must be an integer in \[1"),
        ({"sliding_window": 0}, "sliding_window=0: supported: null, or 1 or more"),
        ({"sliding_window": None}, "layer_types=.*: supported: 'full_attention', or use_sliding"),
        ({"layer_types": ["odd"]}, "layer_types=.*: supported: 26 times 'full_attention' or"),
        ({"use_sliding_window": False}, "use_sliding_window=False: supported: null or True"),
        ({"mlp_bias": True}, "mlp_bias=True: supported: null or False"),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq=0: must be a finite number"),
        ({"rope_parameters": LINEAR}, "rope_parameters=.*: supported: RoPE under 'full_attention'"),
        ({"rope_parameters": {"odd": {}}}, "rope_parameters=.*: supported: RoPE under 'full_atten"),
        ({"rope_scaling": {"type": "linear", "factor": 8}}, "rope_scaling=.* with a rope_type"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type='ntk': supported: RoPE of"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "RoPE of type 'dynamic' needs factor"),
        ({"head_dim": 73}, "gives head_dim=73: supported: even "),
        ({"num_experts": 8}, "num_experts=8: supported"),
        ({"text_config": 5}, "text_config=5: supported: a JSON object"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)
    if "text_config" in changes:
        return
    with pytest.raises(ValueError, match=message):
        read_model_config(WHOLE | {"text_config": changes})


def test_what_contradicts_the_text_is_refused() -> None:
    text = {"text_config": {"tie_word_embeddings": False}}
    with pytest.raises(ValueError, match=r"text_config.tie_word_embeddings=False: supported: True"):
        read_model_config(WHOLE | text)
    with pytest.raises(ValueError, match="is_causal=False: supported"):
        read_model_config(WHOLE | {"text_config": {}, "is_causal": False})


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 64, 2**31, 10**400, 0.5, -0.5, 1e308, float("nan"), "", "1",
    [], [1], [None], {}, {"x": 1}, {FULL: None}, {FULL: {}}, {SLIDING: LINEAR}, {FULL: {"x": {}}},
]  # fmt: skip


def test_every_key_with_every_odd_value() -> None:
    """Refused with a ValueError, or whatever is made of it is sound."""
    names = {key.name for key in (*KEYS, *GEMMA_KEYS)} | NEUTRAL.keys() | {"text_config"}
    for name, value in itertools.product(sorted(names), ODD):
        for config in (TEXT | {name: value}, WHOLE | {"text_config": {name: value}}):
            try:
                model = read_model_config(config)
            except ValueError as error:
                assert str(error)
                continue
            assert isinstance(model, DecoderConfig)
            attention = block_in(model, GroupedQueryAttention)
            assert model.num_layers <= 1024 and attention.scale > 0
            for rope in (model.rope, model.local_rope or model.rope):
                assert rope_frequencies(rope, head_dim=attention.head_dim)[0].isfinite().all()
            unknown_keys(config)


def test_no_draft_module_has_norms_after_blocks() -> None:
    config = read(**PUBLISHED | {"sliding_window_pattern": 1})
    with pytest.raises(ValueError, match=r"\(MTP\) of a Gemma3ForCausalLM .*: norms follow its bl"):
        MtpConfig.of_target(config, LAYOUTS[0], ("mtp.layers.0.",))
