"""GGUF files against transformers: its own reading of them, and of the same values in float32."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.checkpoints.gguf.families import FAMILIES, LAYER, MODULES
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.readers import read_weight
from graphengine.models.quantised.writer import write_quantised
from graphengine.models.weights import StoredLinear

gguf = pytest.importorskip("gguf")

from checkpoints.gguf_conversion import name_in_file  # noqa: E402
from checkpoints.gguf_files import QUANTISED, vocabulary, written  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Formats with blocks of 256 take rows of a multiple of that.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
# Keys that GPT-2 does not have.
_OF_GPT = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
)
_OF_GPT |= dict.fromkeys(("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"))
_GRANITE_HYBRID = {
    **{"hidden_size": 192, "head_dim": None, "num_hidden_layers": 3},
    "layer_types": ["mamba", "attention", "mamba"],
    **{"intermediate_size": 32, "shared_intermediate_size": 64, "position_embedding_type": "nope"},
    **{"mamba_n_heads": 6, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16},
    **{"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.3},
    "logits_scaling": 2.0,
}
_LATENT = {
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    **{"q_lora_rank": 64, "num_key_value_heads": 3, "head_dim": None, "n_routed_experts": 6},
    **{"num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
_NEMOTRON = {
    **{"hidden_size": 192, "num_hidden_layers": None, "mamba_num_heads": 6, "mamba_head_dim": 32},
    **{"n_groups": 2, "ssm_state_size": 16},
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama-biases": {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 2},
    "Llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}},
    "Llama-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "Llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 3},
    "Mistral": {"sliding_window": None},
    "Ministral3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0},
            **{"beta_slow": 2.0, "original_max_position_embeddings": 128},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        }
    },
    "Qwen2": {"num_key_value_heads": 3, "hidden_size": 192, "head_dim": None},
    "Qwen3": {"head_dim": 128},
    "Qwen3Moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "Phi3": {"hidden_size": 192, "head_dim": None},
    "Phi3-long": {
        "hidden_size": 192,
        "head_dim": None,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + pair / 64 for pair in range(32)],
            "long_factor": [2.0 + pair for pair in range(32)],
        },
        "original_max_position_embeddings": 128,
    },
    "Granite": {
        "hidden_size": 192,
        "head_dim": None,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "SmolLM3": {"hidden_size": 192, "head_dim": None, "num_hidden_layers": 4},
    "Lfm2": {
        "hidden_size": 192,
        "head_dim": None,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "Gemma2": {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 2.5,
    },
    "Gemma3": {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 8,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
    },
    "SeedOss": {"attention_bias": True, "attention_out_bias": True},
    "Olmo2": {"num_key_value_heads": 3, "hidden_size": 192, "head_dim": None},
    "Exaone4": {"sliding_window": None},
    "Exaone4-windows": {"sliding_window": 8, "num_hidden_layers": 4},
    "Ernie4_5": {"use_bias": True},
    "HunYuanDenseV1": {"attention_bias": True},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2Moe": {
        "hidden_size": 192,
        "num_key_value_heads": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "Phi": {"hidden_size": 192, "partial_rotary_factor": 0.5},
    "Phi-whole": {"hidden_size": 192, "partial_rotary_factor": 1.0},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "Lfm2Moe": {
        "hidden_size": 192,
        "head_dim": None,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    },
    "Olmo": {"hidden_size": 192, "head_dim": None},
    "GPT2": {"n_embd": 192, "n_layer": 2, "n_head": 3, "n_positions": 512, **_OF_GPT},
    "GPTBigCode": {"n_embd": 192, "n_layer": 2, "n_head": 3, "n_positions": 512, **_OF_GPT},
    "GPTNeoX": {"hidden_size": 192, "rotary_pct": 0.25, "intermediate_size": 320},
    "GPTNeoX-one-by-one": {"hidden_size": 192, "rotary_pct": 1.0, "use_parallel_residual": False},
    "Starcoder2": {"hidden_size": 192, "sliding_window": None, "tie_word_embeddings": True},
    "StableLm": {"hidden_size": 192, "partial_rotary_factor": 0.25},
    "StableLm-parallel": {
        "hidden_size": 192,
        "partial_rotary_factor": 1.0,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
    },
    "Cohere": {"hidden_size": 192, "tie_word_embeddings": True, "logit_scale": 0.5},
    "Cohere2": {
        "hidden_size": 192,
        "head_dim": None,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "num_hidden_layers": 5,
    },
    "MiniMaxM2": {
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "Glm4Moe": {
        "num_hidden_layers": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "GraniteMoeHybrid": {**_GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2},
    "GraniteMoeHybrid-dense": {**_GRANITE_HYBRID, "num_local_experts": 0},
    "DeepseekV2": {**_LATENT, "topk_method": "greedy", "q_lora_rank": None, "n_group": 1},
    "DeepseekV3": {
        **_LATENT,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "Glm4MoeLite": {**_LATENT, "mlp_layer_types": ["dense", "sparse"], "norm_topk_prob": True},
    "GptOss": {
        "intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "Qwen3Next": {
        "num_hidden_layers": 4,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "partial_rotary_factor": 0.25,
    },
    "NemotronH": {**_NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "NemotronH-experts": {
        **_NEMOTRON,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 64,
        "n_shared_experts": 1,
    },
}
# Transformers reads neither the size of experts nor the scale of attention, and takes its defaults.
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("Llama", "Llama-tied", "Qwen2", "Qwen3")},
    "Qwen3Moe": {"moe_intermediate_size": 768, "num_hidden_layers": 1},
    "Gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "Lfm2": {},
    "Qwen2Moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "GPT2": {"n_positions": 1024},
    "Starcoder2": {},
    "StableLm": {"num_hidden_layers": 1},
    "MiniMaxM2": {},
}


# Architectures of which the converter splits or renames tensors before it looks up their names:
# `test_families` writes files of them with the package's names.
_RENAMED = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "deepseek2")
# Names that the package has and no converter writes.
_NOT_IN_FILES = {("phi3", f"blk.0.attn_{letter}") for letter in "qk"}
_PREFIXES = {"gpt2": "transformer.", "starcoder": "transformer.", "gptneox": "gpt_neox."}


class Case(NamedTuple):
    """A GGUF file, and transformers' reading of a checkpoint with its values."""

    file: Path
    oracle: Any


def make(family: str, **options: Any) -> Callable[[], Any]:
    """A small model of a family, as `write_model` takes it."""
    name = family.partition("-")[0]
    of = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    model = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    sizes = {**SIZES, **FAMILY_SIZES[family], **options}
    sizes = {key: value for key, value in sizes.items() if value is not None}

    def build() -> Any:
        config = getattr(transformers, of)(**sizes)
        return getattr(transformers, model)(config)

    return build


def engine_of(path: Path, device: str, **options: Any) -> Engine:
    sizes = {"max_batch": 1, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (8, 32)}
    return Engine.from_pretrained(path, device=device, **{"dtype": "float32", **sizes, **options})


@pytest.fixture(scope="session")
def write(write_model: Callable[..., Any], tmp_path_factory: Any) -> Callable[..., Case]:
    """`write("Llama", "Q8_0")`: a GGUF file of random weights; each is written once."""
    # The kinds stay, for a function's text has its address.
    folder, made, given = tmp_path_factory.mktemp("gguf"), {}, []

    def get(family: str, kind: Any, sizes: dict[str, Any] | None = None, **options: Any) -> Case:
        key = f"{family}-{kind}-{sizes or {}}-{sorted(options)}"
        given.append(kind)
        if key not in made:
            place = folder / str(len(made))
            oracle = write_model(make(family, **(sizes or {})), place / "source", len(made))
            files = written(place / "source", place, kind, **options)
            made[key] = Case(files.file, replace(oracle, path=files.plain))
        return made[key]

    return get


def assert_as_plain(case: Case, device: str, eager: Any, **options: Any) -> None:
    """Logits and greedy tokens are those of transformers for the values in the file.

    On a GPU, which computes with packed weights in half precision alone, logits are near those.
    """
    oracle, exact = case.oracle, device == "cpu"
    dtype = "float32" if exact else "bfloat16"
    with engine_of(case.file, device, lookahead=0, dtype=dtype, **options) as engine:
        for prompt in oracle.prompts((1, 41)):
            seen = eager(engine)
            greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            result = engine.generate(prompt, greedy)
            if exact:
                oracle.assert_greedy(result)
                # Squares in feed-forwards enlarge what rounding makes different.
                squared = "NemotronH" in type(oracle.model).__name__
                oracle.assert_logits(result, seen, **({"tolerance": 0.02} if squared else {}))
            else:
                # Recurrent states keep what another expert added.
                kept = "Qwen3Next" in type(oracle.model).__name__
                oracle.assert_logits(result, seen, tolerance=0.15, flips=0.5 if kept else 0.25)


# Families whose names, keys or rows another one shows, too.
_LIKE_OTHERS = {
    *(
        "Llama-tied",
        "Mistral",
        "Ministral3",
        "SmolLM3",
        "Ernie4_5",
        "HunYuanDenseV1",
        "Phi",
        "Gemma",
        "Olmo",
    ),
    *("GPTBigCode", "GPTNeoX-one-by-one", "StableLm", "Cohere", "MiniMaxM2", "Lfm2"),
    *("GraniteMoeHybrid-dense", "Glm4MoeLite", "DeepseekV2", "NemotronH"),
}


@pytest.mark.parametrize(
    "family", extent([each for each in FAMILY_SIZES if each not in _LIKE_OTHERS], [*FAMILY_SIZES])
)
@pytest.mark.parametrize("kind", extent(["Q8_0"], ["F32", "Q8_0"]))
def test_families(
    write: Callable[..., Case], device: str, eager: Any, family: str, kind: str
) -> None:
    assert_as_plain(write(family, kind), device, eager)


def test_a_window_of_0_is_none(write: Callable[..., Case], device: str, eager: Any) -> None:
    """Files of Phi-4, which has no window, say so."""
    none = {"metadata": {"attention.sliding_window": 0}}
    case = write("Phi3", "Q8_0", {"sliding_window": None}, **none)
    assert Checkpoint.open(case.file).config["sliding_window"] is None
    assert_as_plain(case, device, eager)


def test_a_file_with_an_unknown_tokenizer_takes_token_ids(
    write: Callable[..., Case], caplog: pytest.LogCaptureFixture
) -> None:
    library = tokenizers.Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    rows = library.get_vocab_size()
    tokens = vocabulary(library, pre="viking", rows=rows)
    case = write("Llama", "Q8_0", {"vocab_size": rows}, tokenizer=tokens)
    with engine_of(case.file, "cpu") as engine:
        assert "has tokenizer.ggml.pre='viking', which is not known" in caplog.text
        assert len(engine.generate([5, 3], SamplingParams(max_tokens=3)).token_ids) == 3
        with pytest.raises(ValueError, match="give token ids"):
            engine.generate("def f(")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("Q4_K", r"its weights are in 8 or 4 bits already, so open it as it is"),
        ("BF16", r"quantize='int8' rounds it while loading$"),
    ],
)
def test_files_are_not_written_as_rounded_checkpoints(
    write: Callable[..., Case], tmp_path: Path, kind: str, advice: str
) -> None:
    case = write("Llama", kind, WIDE)
    with pytest.raises(ValueError, match=rf"is a GGUF file, which has no folder .*: {advice}"):
        write_quantised(Checkpoint.open(case.file), tmp_path / "out", "int8")


@pytest.mark.parametrize(
    "kind", extent(["BF16", "Q4_0", "Q4_1", "Q6_K", "IQ4_XS"], ["F16", "BF16", *QUANTISED])
)
def test_formats(write: Callable[..., Case], device: str, eager: Any, kind: str) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert_as_plain(write("Llama", kind, WIDE if block > 32 else None), device, eager)


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_values(
    write: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tokens = [str(index) for index in range(SIZES["vocab_size"])]
    case = write(
        family,
        "Q8_0",
        READ_BY_TRANSFORMERS[family],
        tokenizer=lambda writer: writer.add_token_list(tokens),
    )
    # It asks for accelerate, and uses nothing of it on a CPU.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        case.file.parent, gguf_file=case.file.name, dtype=torch.float32
    )
    ours = case.oracle.model.state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(ours[name], tensor, atol=1e-6), name
    for prompt in case.oracle.prompts((41,)):
        with torch.no_grad():
            logits = theirs.eval()(torch.tensor([prompt])).logits[0]
        assert torch.allclose(logits, case.oracle.logits(prompt), rtol=1e-4, atol=1e-4)


def test_names_are_those_of_the_package() -> None:
    for name, family in FAMILIES.items():
        arch = {told: key for key, told in gguf.MODEL_ARCH_NAMES.items()}[name]
        names = gguf.get_tensor_name_map(arch, 1)
        here = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
        if name in _RENAMED:
            continue
        layer = {
            key: told
            for key, told in {**LAYER, **family.layer}.items()
            if isinstance(told, str) and key != "attn_qkv"
        }
        ours = {f"blk.0.{key}": f"model.layers.0.{told}" for key, told in layer.items()}
        for stored, told in (ours | {**MODULES, **family.modules}).items():
            if stored.replace(".0.", ".{bid}.") not in here:
                continue
            if (name, stored) in _NOT_IN_FILES:
                continue
            # Names in a checkpoint's files, where the engine's are others.
            named = told.replace("model.", _PREFIXES.get(name, "model."))
            named = named.replace("transformer.layers.", "transformer.h.").replace(".{}", "")
            found = name_in_file(names, named)
            ends = {f"{stored}{end}" for end in ("", ".weight", ".bias")}
            assert found in ends, (name, named)


def linears_of(file: Path) -> dict[str, StoredLinear]:
    """The model's linears on the device "meta", by the name of their first part."""
    config = read_model(Checkpoint.open(file))
    linears = config.allocate(device="meta", dtype=torch.bfloat16).linears()
    return {linear.parts[0][0]: linear for linear in linears}


@pytest.mark.parametrize(
    ("kind", "label", "scales"),
    [
        ("Q8_0", "int8-1x32", torch.float16),
        ("Q4_0", "int4-1x32", torch.float16),
        ("Q5_0", "int8-1x32", torch.float16),
        ("IQ4_NL", "int8-1x32", torch.float16),
        ("IQ4_XS", "int8-1x32", torch.float32),
        ("Q3_K", "int4-1x16", torch.float32),
        ("Q4_1", "uint4-1x32-minimums", torch.float16),
        ("Q5_1", "int8-1x32-minimums", torch.float16),
        ("Q2_K", "uint4-1x16-minimums-of256", torch.int8),
        ("Q4_K", "uint4-1x32-minimums-of256", torch.int8),
        ("Q5_K", "int8-1x32-minimums-of256", torch.int8),
        ("Q6_K", "int8-1x16-of256", torch.int8),
        ("MXFP4", "e2m1-1x32", torch.uint8),
    ],
)
def test_codes_are_kept_exactly(
    write: Callable[..., Case], kind: str, label: str, scales: torch.dtype
) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    wide = WIDE if block > 32 else None
    case = write("Llama", kind, wide, zeroed=kind in ("Q8_0", "Q4_0"))
    found = linears_of(case.file)
    assert len(found) == 4 * (1 if wide else 2) + 1
    for linear in found.values():
        assert isinstance(linear.weight, PackedWeight)
        assert linear.weight.format.label == label
        assert linear.weight.scales is not None and linear.weight.scales.dtype == scales
    checkpoint = Checkpoint.open(case.file)
    quantisation = quantisation_of(checkpoint)
    assert quantisation is not None
    plain, tensors = Checkpoint.open(case.oracle.path).mapped(), checkpoint.mapped()
    signs = set()
    for linear in found.values():
        for name, rows in linear.parts:
            scheme = quantisation.scheme(name)
            assert scheme is not None
            weight = read_weight(scheme, tensors, name, (rows, linear.shape[1])).weight
            assert torch.equal(dequantise(weight), plain[f"{name}.weight"]), name
            signs |= {*weight.scales.float().sign().unique().tolist()}
    assert signs >= {"Q8_0": {0.0, 1.0}, "Q4_0": {-1.0, 0.0, 1.0}}.get(kind, {1.0})


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        # Q4_K_M: the most common mixture.
        (("Q4_K", "Q6_K", "Q4_K"), ("int8-1x16-minimums-of256", "uint4-1x32-minimums-of256")),
        (("Q3_K", "Q5_K", "Q4_K"), ("int8-1x16-minimums", "int8-1x16-minimums")),
        (("Q4_0", "Q4_1", "Q5_0"), ("int8-1x32-minimums", "int8-1x32")),
        (("Q5_0", "Q8_0", "IQ4_NL"), ("int8-1x32", "int8-1x32")),
        (("IQ4_XS", "Q5_1", "Q6_K"), ("int8-1x32-minimums", "int8-1x16")),
        (("Q8_0", "Q6_K", "F16"), ("int8-1x16", None)),
    ],
)
def test_linears_computed_as_one_are_kept_in_one_form(
    write: Callable[..., Case], kinds: Sequence[str], labels: Sequence[str | None]
) -> None:
    """q and k have the first kind, as gate does; v has the second, and up the third."""
    first, of_v, of_up = kinds

    def kind(stored: str) -> str:
        module = stored.removesuffix(".weight").rpartition(".")[2]
        return {"attn_v": of_v, "ffn_up": of_up}.get(module, first)

    case = write("Llama", kind, WIDE)
    found, checkpoint = linears_of(case.file), Checkpoint.open(case.file)
    quantisation = quantisation_of(checkpoint)
    assert quantisation is not None
    plain, tensors = Checkpoint.open(case.oracle.path).mapped(), checkpoint.mapped()
    for last, label in zip(("self_attn.q_proj", "mlp.gate_proj"), labels, strict=True):
        linear = found[f"model.layers.0.{last}"]
        stored = linear.weight.format.label if isinstance(linear.weight, PackedWeight) else None
        assert stored == label
        for name, rows in linear.parts:
            scheme = quantisation.scheme(name)
            assert (scheme is None) == (label is None)
            if scheme is not None:
                weight = read_weight(scheme, tensors, name, (rows, linear.shape[1])).weight
                assert torch.equal(dequantise(weight), plain[f"{name}.weight"]), name


def test_experts_of_a_mixture_are_kept_exactly(
    write: Callable[..., Case], device: str, eager: Any
) -> None:
    """As in a Q4_K_M file, in which down of some layers is in Q6_K."""

    def kind(stored: str) -> str:
        return "Q6_K" if "attn_v" in stored or "blk.1.ffn_down" in stored else "Q4_K"

    sizes = {**WIDE, "num_hidden_layers": 2, "moe_intermediate_size": 256}
    case = write("Qwen3Moe", kind, sizes)
    model = read_model(Checkpoint.open(case.file)).allocate(device="meta", dtype=torch.bfloat16)
    labels = [each.format.label for each in model.packed() if isinstance(each, PackedExperts)]
    q4_k, q6_k = "uint4-1x32-minimums-of256", "int8-1x16-of256"
    assert labels == [q4_k, q4_k, q4_k, q6_k]
    checkpoint = Checkpoint.open(case.file)
    quantisation, tensors = quantisation_of(checkpoint), checkpoint.mapped()
    assert quantisation is not None
    plain = Checkpoint.open(case.oracle.path).mapped()
    for layer, last in itertools.product((0, 1), ("gate_proj", "down_proj")):
        name = f"model.layers.{layer}.mlp.experts.3.{last}"
        scheme = quantisation.scheme(name)
        assert scheme is not None
        weight = read_weight(scheme, tensors, name, (256, 256)).weight
        assert torch.equal(dequantise(weight), plain[f"{name}.weight"]), name
    assert_as_plain(case, device, eager)


def test_what_is_widened_or_joined_is_logged(
    write: Callable[..., Case], device: str, eager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"attn_v": "Q5_1", "ffn_up": "MXFP4", "token_embd": "Q8_0", "output": "Q4_1"}

    def kind(stored: str) -> str:
        return mixed.get(stored.removesuffix(".weight").rpartition(".")[2], "Q4_0")

    case = write("Llama", kind)
    packed = {
        name.removeprefix("model.layers.0.")
        for name, linear in linears_of(case.file).items()
        if isinstance(linear.weight, PackedWeight) and "layers.1" not in name
    }
    assert packed == {"self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "lm_head"}
    with caplog.at_level(logging.INFO, "graphengine"):
        assert_as_plain(case, device, eager)
    told = [text for record in caplog.records if "tensors in" in (text := record.getMessage())]
    joined = "are kept in one form with others that are computed with them: 0.0 MiB become"
    widened = "are widened to 16 bits or rounded again: 0.0 MiB become"
    for text, (count, what) in zip(
        told[:4],
        [
            ("2 tensors in MXFP4", widened),
            ("4 tensors in Q4_0", joined),
            ("2 tensors in Q4_0", widened),
            ("1 tensors in Q8_0", widened),
        ],
        strict=True,
    ):
        assert f": {count} {what}" in text


def test_llama3_rope_is_found_from_its_factors(
    write: Callable[..., Case], device: str, eager: Any, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).numpy()
    sizes = {"rope_parameters": LLAMA3}
    case = write("Llama", "Q8_0", sizes, rope_factors=factors)
    assert Checkpoint.open(case.file).config["rope_scaling"] == {
        key: value for key, value in LLAMA3.items() if key != "rope_theta"
    }
    assert_as_plain(case, device, eager)
    none = write("Llama", "Q4_0", rope_factors=[1.0] * 32)
    assert "rope_scaling" not in Checkpoint.open(none.file).config
    wrong = write("Llama", "Q4_1", rope_factors=[1.0] * 31 + [3.0])
    with pytest.raises(ValueError, match=r"32 factors of RoPE in rope_freqs.weight, 1 to 3: they"):
        Checkpoint.open(wrong.file)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_other_formats_may_be_rounded(write: Callable[..., Case], quantize: Any) -> None:
    case, replies = write("Llama", "IQ2_XXS", WIDE), []
    for path in (case.file, case.oracle.path):
        with engine_of(path, "cpu", quantize=quantize) as engine:
            greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            replies.append(engine.generate([5, 6, 7], greedy).token_ids)
    assert replies[0] == replies[1]
    message = r"model.gguf are quantised \(gguf\)"
    with pytest.raises(ValueError, match=message):
        engine_of(write("Llama", "Q8_0").file, "cpu", quantize=quantize)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_1", "bfloat16")],
)
def test_the_dtype_is_that_of_most_weights(
    write: Callable[..., Case], kind: str, dtype: str
) -> None:
    checkpoint = Checkpoint.open(write("Llama", kind).file)
    assert checkpoint.config["dtype"] == dtype
    norm = checkpoint.tensors["model.norm.weight"]
    assert (norm.dtype, norm.shape) == (torch.float32, (96,))


def test_a_split_file(write: Callable[..., Case], device: str, eager: Any, tmp_path: Path) -> None:
    case = write("Llama", "Q8_0", tensors_a_file=5)
    parts = sorted(case.file.parent.glob("model-*-of-*.gguf"))
    assert len(parts) > 4
    assert_as_plain(case, device, eager)
    for part in parts:
        (tmp_path / part.name).symlink_to(part)
    assert Checkpoint.open(tmp_path).path == tmp_path / case.file.name


def test_a_folder_with_one_gguf_file(write: Callable[..., Case], tmp_path: Path) -> None:
    file = write("Llama", "Q8_0").file
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"GGUF")
    (tmp_path / "one.gguf").symlink_to(file)
    assert Checkpoint.open(tmp_path).path == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").symlink_to(file)
    with pytest.raises(ValueError, match=r"has 2 GGUF files: open one of .*one.gguf, .*two.gguf"):
        Checkpoint.open(tmp_path)
    (tmp_path / "two.gguf").rename(tmp_path / "two-00002-of-00003.gguf")
    (tmp_path / "one.gguf").unlink()
    with pytest.raises(ValueError, match=r"two-00002-of-00003.gguf is part 2 of 3 of a split GGUF"):
        Checkpoint.open(tmp_path)


def test_pages_name_the_architectures() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    names = (docs / "weights.md").read_text().partition("\nArchitectures: ")[2].partition(". ")[0]
    assert re.findall("`(.+?)`", names) == list(FAMILIES)
    number = re.search(r"of (\d+) architectures", (docs / "supported.md").read_text())
    assert number and int(number[1]) == len(FAMILIES)
