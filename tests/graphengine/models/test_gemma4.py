"""Gemma 4 against transformers: heads that differ between layers, layers that reuse others' keys,
inputs of layers, and images.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from checkpoints.small_decoders import composed
from engines.family_checks import (
    assert_half_precision_replays,
    assert_replies,
    assert_rewinds,
    assert_same_in_any_company,
)
from graphengine import Engine, ImageEmbeds, PromptParts, SamplingParams
from graphengine.config import RoundedKind
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.models.blocks.per_layer.layer_inputs import LayerInput
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.launches import Share
from graphengine.models.plans.chains import chain_linear, new_chain
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.splitting.rank_sizes import split_layers
from graphengine.models.states import cache_shape
from graphengine.models.sublayers import Sublayer
from graphengine.speculative import DraftModel
from launches.compilation import graph_kernels

pytest.importorskip("transformers.models.gemma4", reason="transformers has no Gemma 4")

SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "intermediate_size": 76, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 40,
    "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": [1, 106],
    "pad_token_id": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 263,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
EQUAL: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# Blocks have 8 tokens. Windows: in a block, over blocks' edges.
CONFIGS: dict[str, dict[str, Any]] = {
    "equal": {"layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "sliding_window": 5, **EQUAL},
    "plain": {
        "layer_types": [FULL, SLIDING, FULL], "sliding_window": 19, "hidden_size": 57,
        "tie_word_embeddings": False, "final_logit_softcapping": None, "num_attention_heads": 3,
        "num_key_value_heads": 3, "global_head_dim": 12, "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e3},
            SLIDING: {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    # As E2B and E4B: the last layers reuse the keys and values of those before.
    "inputs": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL], "sliding_window": 5,
        "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 12, "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 271,
    },
}  # fmt: skip


def new_model(**options: Any) -> PreTrainedModel:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = SIZES | options
    sizes["num_hidden_layers"] = len(sizes["layer_types"])
    model: PreTrainedModel = Gemma4ForCausalLM(Gemma4TextConfig(**sizes))
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * (index % 4))
    return model


@pytest.fixture(scope="module")
def gemmas(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gemma4")
    return {
        name: write_model(partial(new_model, **options), folder / name, seed)
        for seed, (name, options) in enumerate(CONFIGS.items())
    }


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens(
    gemmas: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    options = {"prefill_buckets": (16, 64), "lookahead": 0}
    with open_engine(gemmas[name].path, device=device, **options) as engine:
        assert engine.eos_ids == (1, 106)
        assert_replies(engine, gemmas[name], eager, (1, 17, 90))


@pytest.mark.parametrize(("name", "rings"), [("equal", False), ("inputs", True)])
def test_a_long_prompt_and_64_tokens(
    gemmas: dict[str, Any], device: str, name: str, rings: bool
) -> None:
    options = {"max_seq_len": 384, "prefill_buckets": (64,), "window_rings": rings}
    oracle = gemmas[name]
    with open_engine(oracle.path, device=device, **options) as engine:
        for prompt in oracle.prompts((300, 17)):
            oracle.assert_greedy(engine.generate(prompt, greedy(64)))


@pytest.mark.parametrize("name", ["equal", "inputs"])
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    gemmas: dict[str, Any], device: str, name: str
) -> None:
    path = gemmas[name].path
    assert_same_in_any_company(partial(open_engine, path, device=device), gemmas[name])


@pytest.mark.parametrize("name", ["equal", "inputs"])
def test_sessions_rewind_and_are_restored(
    gemmas: dict[str, Any], device: str, tmp_path: Path, name: str
) -> None:
    """Layers whose blocks differ in shape lie side by side in a snapshot."""
    file, path = tmp_path / "session.safetensors", gemmas[name].path
    options = {"device": device, "prefill_buckets": (16, 64), "window_rings": False}
    with open_engine(path, **options) as engine:
        said = assert_rewinds(engine, gemmas[name], file)
    with open_engine(path, **options) as engine, engine.restore_session(file) as session:
        assert session.generate(greedy(30)).token_ids == said


@pytest.mark.parametrize("name", ["equal", "inputs"])
def test_a_model_drafts_for_itself(gemmas: dict[str, Any], device: str, name: str) -> None:
    """All drafts are right, so that the draft model computes what the target does."""
    path = gemmas[name].path
    options = {"device": device, "row_family": "dot", "speculative": DraftModel(path, k=3)}
    with open_engine(path, **options) as engine:
        engine.generate(gemmas[name].prompts((21,)), greedy(24))
        assert engine.acceptance.accepted == engine.acceptance.proposed > 10


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_rounded_weights(
    tmp_path: Path,
    write_model: Callable[..., Any],
    eager: Callable[[Engine], Any],
    kind: RoundedKind,
) -> None:
    """Against transformers with what the codes mean; lm_head is the embedding, and stays."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "global_head_dim": 64}
    sizes |= {"hidden_size_per_layer_input": 32}
    oracle = write_model(partial(new_model, **CONFIGS["inputs"] | sizes), tmp_path / "gemma", 3)
    linears = ("_proj.weight", "_input_gate.weight", "_projection.weight")
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if name.endswith(linears):
                weight.copy_(dequantise(quantise(weight, KIND_FORMATS[kind])))
    with open_engine(oracle.path, device="cpu", quantize=kind, lookahead=0) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(12))
            oracle.assert_logits(result, seen)


def test_what_engines_of_it_do_not_do_is_named(gemmas: dict[str, Any]) -> None:
    equal, inputs = gemmas["equal"].path, gemmas["inputs"].path
    chained: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    shapes = "whose keys and values have one shape: .* 1 heads of 40 and 2 heads of 16"
    with pytest.raises(ValueError, match=shapes):
        open_engine(equal, device="cpu", kv_dtype="fp8")
    held = "cuts no Gemma4ForCausalLM, whose 7 layers have inputs .*, layers that reuse .* shapes"
    with pytest.raises(ValueError, match=held):
        open_engine(inputs, device="cpu", pipeline_parallel=2)
    with pytest.raises(ValueError, match="tensor_parallel=8 does not divide the 4 attention heads"):
        open_engine(inputs, device="cpu", tensor_parallel=8)
    inputs_of_rank = {"size": 12, "hidden_size": 8, "norm_eps": 1e-6}
    layer = ((Sublayer("", "", LayerInput(**inputs_of_rank)),),)
    config = replace(composed(read_model(Checkpoint.open(inputs))), layers=layer)
    with pytest.raises(ValueError, match="=5 does not divide the 12 values of a layer's input"):
        split_layers(config, Share(0, 5))
    with pytest.raises(ValueError, match=r"inputs of layers, .* there is no chain of them"):
        new_chain(read_model(Checkpoint.open(inputs)), layers=2, **chained)
    # The other's linears can be tuned.
    chain = new_chain(read_model(Checkpoint.open(equal)), layers=2, **chained)
    assert chain_linear(chain, 1, "full_qkv")[0].shape == (5 * 40, 54)


# Towers.

HEAD, TAIL = [5, 17, 8, 31], [9, 77, 5, 17, 8, 31]
IMAGE, PLACES = 250, 11


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]) -> Any:
    """transformers' model beside towers, all of whose features are on, and its folder."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

    sizes = SIZES | CONFIGS["inputs"] | {"num_hidden_layers": 7}
    text = Gemma4TextConfig(**sizes, use_bidirectional_attention="vision").to_dict()
    vision = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16,
    }  # fmt: skip
    tokens = {"image_token_id": IMAGE, "video_token_id": 251, "audio_token_id": 252}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **tokens)
    path = tmp_path_factory.mktemp("gemma4") / "tower"
    oracle = write_model(lambda: Gemma4ForConditionalGeneration(config), path, 5)
    model = Gemma4ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    return model, oracle.path


def test_images_see_each_other_in_layers_with_a_window(
    tower: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The towers' tensors are named in the log; an image's places have the input of the padding."""
    model, path = tower
    if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
        pytest.skip("transformers takes no embeddings of images in place of pixels")
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    rows = torch.randn(2 * PLACES, 54, generator=torch.Generator().manual_seed(2))
    options = {"prompt_embeds": True, "prefill_buckets": [16, 32], "dtype": "float32"}
    with caplog.at_level(logging.INFO, logger="graphengine"):
        engine = open_engine(path, device=device, **options)
    assert "the model does not use: " in caplog.text and "vision_tower." in caplog.text
    assert "unknown keys" not in caplog.text and "language_model" not in caplog.text
    one, other = (ImageEmbeds(each) for each in rows.split(PLACES))
    with engine:
        prompt = PromptParts(HEAD, one, TAIL, other, TAIL)
        said = list(engine.generate(prompt, greedy(16)).token_ids)
        causal = PromptParts(HEAD, one.rows, TAIL, other.rows, TAIL)
        assert list(engine.generate(causal, greedy(16)).token_ids) != said
    ids = torch.tensor([[*HEAD, *[IMAGE] * PLACES, *TAIL, *[IMAGE] * PLACES, *TAIL, *said]])
    features = BaseModelOutputWithPooling(pooler_output=list(rows.split(PLACES)))
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == IMAGE).long(),
            mm_encoder_outputs={"image": features},
        ).logits[0, -17:-1]
    assert said == logits.argmax(-1).tolist() and len(set(said)) > 3


def test_the_unified_form(tmp_path: Path, device: str) -> None:
    """It is read as the other one is; keys that are missing mean other values."""
    pytest.importorskip(
        "transformers.models.gemma4_unified", reason="transformers has no unified Gemma 4"
    )
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    left_out = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    sizes = {name: value for name, value in SIZES.items() if name not in left_out}
    sizes |= CONFIGS["equal"] | {"num_hidden_layers": 5}
    torch.manual_seed(3)
    model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    prompt = [(7 * index) % 263 for index in range(40)]
    with open_engine(tmp_path, device=device) as engine:
        said = engine.generate(prompt, greedy(24)).token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *said]])).logits[0, 39:-1]
    assert said == tuple(logits.argmax(-1).tolist())


# Configs.

E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "tie_word_embeddings": True, "audio_config": None, "vision_config": None,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False,
        "bos_token_id": 2, "enable_moe_block": False, "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
        "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7, "max_position_embeddings": 131072,
        "model_type": "gemma4_text", "num_attention_heads": 8,
        "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512, "tie_word_embeddings": True, "use_double_wide_mlp": True,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip
"""The language model of Gemma 4 E2B."""


def read(**changes: Any) -> DecoderConfig:
    return composed(read_model_config(E2B | {"text_config": E2B["text_config"] | changes}))


def test_the_sizes_of_e2b() -> None:
    assert unknown_keys(E2B) == []
    model = read()
    attention = [layer[0].block for layer in model.layers]
    own = [index for index, layer in enumerate(model.states) if layer]
    assert own == list(range(15))
    assert [index for index in own if attention[index].lends] == [13, 14]
    assert all(each.reuses for each in attention[15:])
    assert {(each.window, each.head_dim, each.num_kv_heads) for each in attention} == {
        (512, 256, 1), (0, 512, 1),
    }  # fmt: skip
    assert [layer[1].block.ffn_size for layer in model.layers] == [6144] * 15 + [12288] * 20
    rope = RopeConfig(kind="proportional", theta=1e6, rotated=0.25)
    assert model.rope == replace(rope, original_max_position_embeddings=131072)
    assert model.local_rope == RopeConfig() and model.logits_cap == 30
    assert model.layer_inputs is not None and model.layer_inputs.rows == 262144
    assert {name: (each.rows, each.columns) for name, each in model.linears.items()} == {
        "layer_inputs": (35 * 256, 1536), "qkv": (2560, 1536), "output": (1536, 2048),
        "full_qkv": (5120, 1536), "full_output": (1536, 4096), "reusing_qkv": (2048, 1536),
        "reusing_output": (1536, 2048), "reusing_full_qkv": (4096, 1536),
        "reusing_full_output": (1536, 4096), "gate_up": (12288, 1536), "down": (1536, 6144),
        "wide_gate_up": (24576, 1536), "wide_down": (1536, 12288), "input_gate": (256, 1536),
        "input_down": (1536, 256), "lm_head": (262144, 1536),
    }  # fmt: skip
    # One layer of each kind lies in a block of 16 tokens beside the others.
    assert cache_shape(model.states, 16) == (1, 2 * 16 * (12 * 256 + 3 * 512))


def test_configs_that_list_the_layers_that_differ() -> None:
    """As newer versions of transformers write them."""
    full = {str(index): {"head_dim": 384, "num_key_value_heads": 2} for index in range(4, 35, 5)}
    listed = {"per_layer_config": full, "global_head_dim": 512}
    blocks = [layer[0].block for layer in read(**listed).layers]
    assert {(each.head_dim, each.num_kv_heads) for each in blocks} == {(256, 1), (384, 2)}
    missing = {"global_head_dim": 512, "per_layer_config": {}}
    assert {layer[0].block.head_dim for layer in read(**missing).layers} == {256}
    types = {"layer_types": None, "num_kv_shared_layers": 0}
    windows = [layer[0].block.window for layer in read(**types).layers]
    assert windows == ([512] * 5 + [0]) * 5 + [512] * 4 + [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation='silu': supported: 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": "all"}, "bidirectional_attention='all': .* 'vision'"),
        ({"attention_bias": True}, "attention_bias=True: supported: null or False"),
        ({"global_head_dim": 514}, r"head_dim=514: supported: even numbers in \[2, 512\]"),
        ({"num_kv_shared_layers": 34}, "num_kv_shared_layers=34: supported: fewer of 35 layers"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers=35"),
        ({"vocab_size_per_layer_input": 8}, "per_layer_input=8: supported: vocab_size=262144 or"),
        ({"per_layer_config": {"4": {"head_dim": 64}}}, "the same in all of the 7 'full_attention"),
        ({"per_layer_config": {str(i): {"x": 4} for i in range(4, 35, 5)}}, "head_dim and num_key"),
        ({"rope_parameters": {"x": {}}}, "rope_parameters=.*'full_attention' and 'sliding_attenti"),
        (
            {"rope_parameters": {
                FULL: {"rope_type": "default", "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default"},
            }},
            "parts of heads as 'proportional'",
        ),
        ({"tie_word_embeddings": False}, "text_config.tie_word_embeddings=False: supported: True"),
    ],
)  # fmt: skip
def test_what_gemma_4_does_not_compute_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


# What is launched.


def large_model(**options: Any) -> PreTrainedModel:
    """Heads as long as published ones."""
    heads = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 2}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "hidden_size_per_layer_input": 64}
    return new_model(**CONFIGS["inputs"] | heads | sizes | {"num_key_value_heads": 1} | options)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_heads_of_512_compile_for_hopper(tmp_path: Path, write_model: Callable[..., Any]) -> None:
    oracle = write_model(large_model, tmp_path / "gemma", 3)
    sizes = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot", "prefill_buckets": (64,)}
    with open_engine(oracle.path, **sizes) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name.lstrip("_") for kernel in graphs["decode/2/fast"]]
    assert names.count("decode_attention_kernel") == 7 and "layer_inputs_kernel" in names
    # Layers that reuse values do not norm them.
    assert names.count("norm_values_kernel") == 4 and names.count("add_normed_kernel") == 21


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_replays_what_it_computes_eagerly(
    gemmas: dict[str, Any], eager: Callable[[Engine], Any], name: str
) -> None:
    opened = partial(open_engine, gemmas[name].path)
    assert_half_precision_replays(opened, gemmas[name], eager, "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["fma", "dot"])
def test_a_gpu_in_half_precision_is_near_float32(
    tmp_path: Path, write_model: Callable[..., Any], eager: Callable[[Engine], Any], family: str
) -> None:
    """Heads of 512 are Triton's, those of 256 Gluon's. A CPU in float16 is 0.07 off: with more
    layers random weights make noise of any rounding.
    """
    few = {"layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1}
    oracle = write_model(partial(large_model, **few), tmp_path / "gemma", 3)
    options: dict[str, Any] = {"dtype": "float16", "row_family": family, "max_batch": 1}
    with open_engine(oracle.path, **options, device="cuda", lookahead=0) as engine:
        for prompt in oracle.prompts((3, 90)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(16))
            oracle.assert_logits(result, seen, tolerance=0.15)
