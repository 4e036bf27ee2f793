"""Gemma 3 against transformers: norms on both sides, GeGLU, local and global layers, text alone."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
)

from checkpoints.small_decoders import composed
from engines.family_checks import (
    assert_half_precision_replays,
    assert_replies,
    assert_rewinds,
)
from graphengine import Engine, SamplingParams
from graphengine.config import RoundedKind
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.composition import windows_of
from graphengine.models.families.registry import read_model_config
from graphengine.models.plans.chains import chain_linear, new_chain
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.speculative import DraftModel, NGram
from launches.compilation import graph_kernels

TOKENS = 24
SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "intermediate_size": 76, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 2,
    "eos_token_id": [1, 106], "pad_token_id": 0,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
SCALED = {
    FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    SLIDING: {"rope_type": "default", "rope_theta": 300.0},
}


def _text(layers: int, window: int, **options: Any) -> Gemma3TextConfig:
    sizes = {"num_hidden_layers": layers, "sliding_window": window}
    return Gemma3TextConfig(**SIZES | sizes | options)


# Blocks have 8 tokens. Windows: in a block, over blocks' edges, longer than the prompts.
CONFIGS: dict[str, Callable[[], Gemma3TextConfig]] = {
    "pattern-6": lambda: _text(7, 5),
    "pattern-2": lambda: _text(
        3, 19, sliding_window_pattern=2, rope_parameters=SCALED, query_pre_attn_scalar=37
    ),
    "types": lambda: _text(
        3, 100, layer_types=[FULL, SLIDING, FULL], num_attention_heads=3, num_key_value_heads=3,
        hidden_size=57, intermediate_size=33, tie_word_embeddings=False,
    ),
    "biases": lambda: _text(
        2, 8, sliding_window_pattern=1, attention_bias=True, head_dim=96, rms_norm_eps=1e-3
    ),
}  # fmt: skip
WINDOWS = {
    "pattern-6": (5,) * 5 + (0, 5), "pattern-2": (19, 0, 19), "types": (0, 100, 0),
    "biases": (0, 0),
}  # fmt: skip


def _with_vision(layers: int, window: int, **options: Any) -> PreTrainedModel:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = _text(layers, window, **options).to_dict()
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    return Gemma3ForConditionalGeneration(config)


@pytest.fixture(scope="session")
def gemmas(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gemma3")
    return {
        name: write_model(lambda make=make: Gemma3ForCausalLM(make()), folder / name, seed)
        for seed, (name, make) in enumerate(CONFIGS.items())
    }


@pytest.fixture(scope="session")
def with_vision(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]) -> Any:
    path = tmp_path_factory.mktemp("gemma3") / "vision"
    return write_model(lambda: _with_vision(3, 5, sliding_window_pattern=2), path, 7)


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def config_of(oracle: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((oracle.path / "config.json").read_text())
    return config


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 176, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **({"prefill_buckets": (16, 64)} | options))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens(
    gemmas: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    oracle = gemmas[name]
    assert windows_of(composed(read_model_config(config_of(oracle)))) == WINDOWS[name]
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        assert engine.eos_ids == (1, 106)
        # Past the longest window's edge in decode.
        assert_replies(engine, oracle, eager, (3, 90), TOKENS)


def test_chunks_and_batches(gemmas: dict[str, Any], device: str) -> None:
    """Chunks shorter and longer than the window; in a batch a request says what it says alone."""
    oracle = gemmas["pattern-2"]
    prompts = oracle.prompts((1, 20, 70))
    results = []
    for buckets in ((8,), (16, 128)):
        with open_engine(oracle.path, device=device, prefill_buckets=buckets) as engine:
            together = engine.generate(prompts, greedy(8))
            alone = [engine.generate(prompt, greedy(8)) for prompt in prompts]
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        results += together
    for result in results:
        oracle.assert_greedy(result)


def test_paused_requests_resume_with_the_same_tokens(gemmas: dict[str, Any], device: str) -> None:
    oracle = gemmas["pattern-2"]
    prompts = oracle.prompts((9, 30, 41))
    with open_engine(oracle.path, device=device) as engine:
        expected = [engine.generate(prompt, greedy()).token_ids for prompt in prompts]
    options = {"max_seq_len": 96, "kv_blocks": 14, "swap_blocks": 60}
    with open_engine(oracle.path, device=device, **options) as engine:
        results = engine.generate(prompts, greedy())
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(("name", "drafter"), [("pattern-6", "another"), ("pattern-2", "ngram")])
def test_drafts_change_no_token(
    gemmas: dict[str, Any], device: str, name: str, drafter: str
) -> None:
    """The other model is a Gemma, too: what its last prompt tokens were is embedded again."""
    oracle = gemmas[name]
    mode = NGram(k=4) if drafter == "ngram" else DraftModel(gemmas["pattern-2"].path, k=3)
    tokens = TOKENS if drafter == "ngram" else 20
    prompts = [prompt * 3 for prompt in oracle.prompts((5, 11, 14))]
    plain = {"device": device, "row_family": "dot"}
    with open_engine(oracle.path, **plain) as engine:
        expected = engine.generate(prompts, greedy(tokens))
    with open_engine(oracle.path, **plain, speculative=mode) as engine:
        results = engine.generate(prompts, greedy(tokens))
        assert engine.acceptance.proposed > 0
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
    for result in results:
        oracle.assert_greedy(result)


def test_a_model_drafts_for_itself(gemmas: dict[str, Any], device: str) -> None:
    """All drafts are right, so that the draft model computes what the target does."""
    path = gemmas["types"].path
    options = {"device": device, "row_family": "dot", "speculative": DraftModel(path, k=3)}
    with open_engine(path, **options) as engine:
        engine.generate(gemmas["types"].prompts((21,)), greedy(32))
        assert engine.acceptance.accepted == engine.acceptance.proposed > 20


def test_sessions_rewind(gemmas: dict[str, Any], device: str) -> None:
    oracle = gemmas["pattern-2"]
    with open_engine(oracle.path, device=device) as engine:
        assert_rewinds(engine, oracle)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_rounded_weights(
    tmp_path: Path,
    write_model: Callable[..., Any],
    eager: Callable[[Engine], Any],
    kind: RoundedKind,
) -> None:
    """Against transformers with what the codes mean; lm_head is the embedding, and stays."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    config = _text(3, 9, sliding_window_pattern=2, **sizes)
    oracle = write_model(lambda: Gemma3ForCausalLM(config), tmp_path / "gemma", 3)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(dequantise(quantise(weight, KIND_FORMATS[kind])))
    with open_engine(oracle.path, device="cpu", quantize=kind, lookahead=0) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(12))
            oracle.assert_logits(result, seen)


def test_a_language_model_beside_a_vision_tower(
    with_vision: Any, device: str, eager: Callable[[Engine], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Text alone: the tower's tensors are named in the log, and no key is unknown."""
    oracle = with_vision
    stored = Checkpoint.open(oracle.path)
    assert set(stored.stored_names.values()) >= {"language_model.model.embed_tokens.weight"}
    with caplog.at_level(logging.INFO, logger="graphengine"):
        engine = open_engine(oracle.path, device=device, lookahead=0)
    with engine:
        assert "unknown keys" not in caplog.text
        for name in ("vision_tower.embeddings.patch_embedding.weight", "multi_modal_projector."):
            assert re.search(f"the model does not use: .*{re.escape(name)}", caplog.text)
        assert "language_model" not in caplog.text
        assert engine.eos_ids == (1, 106)
        seen = eager(engine)
        prompt = [(7 * index) % 263 for index in range(40)]
        result = engine.generate(prompt, greedy())
        oracle.assert_logits(result, seen)
        logits = oracle.logits([*prompt, *result.token_ids])[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(TOKENS), list(result.token_ids)]
        assert bool((logits.amax(1) - chosen <= 1e-4 * logits.abs().amax(1)).all())


def rename(source: Path, target: Path, names: Callable[[str], str], **config: Any) -> Path:
    """A checkpoint in one file whose tensors have other names, and perhaps another config."""
    shutil.copytree(source, target)
    tensors: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(
        {names(name): tensor for name, tensor in tensors.items()}, target / "model.safetensors"
    )
    if config:
        (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_names_of_a_language_model(
    gemmas: dict[str, Any], tmp_path: Path, prefix: str
) -> None:
    """What is stored beside a vision tower is what is stored without one."""
    source = gemmas["types"].path
    text = config_of(gemmas["types"])
    head = "language_model." if prefix.startswith("language_model.") else ""

    def renamed(name: str) -> str:
        return f"{head}{name}" if name.startswith("lm_head.") else prefix + name[len("model.") :]

    path = rename(
        source, tmp_path / "renamed", renamed, text_config=text, model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"], tie_word_embeddings=False,
    )  # fmt: skip
    prompts = gemmas["types"].prompts((9,))
    with open_engine(source) as engine:
        expected = engine.generate(prompts, greedy(8))
    with open_engine(path) as engine:
        assert [each.token_ids for each in engine.generate(prompts, greedy(8))] == [
            each.token_ids for each in expected
        ]


def test_a_tensor_of_the_language_model_that_nobody_reads_is_an_error(
    gemmas: dict[str, Any], tmp_path: Path
) -> None:
    strange = "model.layers.0.self_attn.sinks"

    def renamed(name: str) -> str:
        return strange if name == "model.layers.1.mlp.up_proj.weight" else name

    path = rename(gemmas["pattern-2"].path, tmp_path / "strange", renamed)
    with pytest.raises(ValueError, match=r"lacks 1 of .*model\.layers\.1\.mlp\.up_proj"):
        read_model(Checkpoint.open(path))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors[strange].clone()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"1 tensors that a Gemma3ForCausalLM .*: {strange}"):
        read_model(Checkpoint.open(path))


def test_norms_are_one_plus_weight_in_float32(gemmas: dict[str, Any]) -> None:
    """In bfloat16 the sum would lose bits that transformers keeps; the stored weights stay."""
    config = read_model_config(config_of(gemmas["pattern-2"]))
    weights = config.allocate(device="cpu", dtype=torch.bfloat16)
    for name, tensor in weights.named().items():
        tensor.fill_(0.001 if "norm" in name else 0.0)
    model = weights.open(max_seq_len=16)
    wanted = 1.0 + torch.tensor(0.001, dtype=torch.bfloat16).float()
    assert model.first_norm.dtype == torch.float32 and bool((model.first_norm == wanted).all())
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.tensors())
    norms = [tensor for name, tensor in weights.named().items() if "norm" in name]
    held = sum(4 * tensor.numel() for tensor in norms)
    plain = replace(config, norms_plus_one=False)  # type: ignore[type-var]
    assert config.table_bytes(16) - plain.table_bytes(16) == held
    assert weights.embedding_scale == torch.tensor(54**0.5, dtype=torch.bfloat16).item()


def test_a_layer_is_seven_kernels(gemmas: dict[str, Any]) -> None:
    """In decode; in prefill one takes norm, sum and norm, and the embedding's norm is its own."""
    sizes = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot"}
    with open_engine(gemmas["pattern-2"].path, **sizes) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name for kernel in graphs["decode/2/fast"]]
    layer = [
        "dot_kernel", "decode_attention_kernel", "dot_kernel", "_add_normed_kernel", "dot_kernel",
        "dot_kernel", "_add_normed_kernel",
    ]  # fmt: skip
    assert [name.lstrip("_") for name in names[1:22]] == [name.lstrip("_") for name in layer * 3]
    chunk = [kernel.name for kernel in graphs["prefill/16"]]
    # One kernel after each of two blocks of three layers; the last one's are of the last lane.
    assert chunk.count("_add_normed_rms_norm_kernel") == 6
    assert chunk.count("_rms_norm_kernel") == 1 and "_add_rms_norm_kernel" not in chunk


def test_a_chain_of_its_linears_can_be_tuned(gemmas: dict[str, Any]) -> None:
    """Norms of a chain are in the dtype of its weights: it adds products to the stream at once."""
    config = read_model_config(config_of(gemmas["pattern-2"]))
    chain = new_chain(config, layers=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    for name in config.linears:
        if name != "lm_head":
            _, _, norm = chain_linear(chain, 0, name)
            assert norm is None or norm.dtype == torch.bfloat16
            assert (norm is None) == (name in ("qkv", "gate_up"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_half_precision_replays_what_it_computes_eagerly(
    gemmas: dict[str, Any], eager: Callable[[Engine], Any], name: str, kv_dtype: str
) -> None:
    """There attention is Gluon's."""
    opened = partial(open_engine, gemmas[name].path)
    assert_half_precision_replays(opened, gemmas[name], eager, kv_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["fma", "dot"])
@pytest.mark.parametrize("kind", [None, "fp8", "int4"])
def test_a_gpu_in_half_precision_is_near_float32(
    tmp_path: Path,
    write_model: Callable[..., Any],
    eager: Callable[[Engine], Any],
    kind: RoundedKind | None,
    family: str,
) -> None:
    """Sizes that tiles divide, whose kernels are Gluon's: prefill's and decode's logits."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 256}
    config = _text(3, 9, sliding_window_pattern=2, **sizes)
    oracle = write_model(lambda: Gemma3ForCausalLM(config), tmp_path / "gemma", 3)
    if kind is not None:
        with torch.no_grad():
            for name, weight in oracle.model.named_parameters():
                if name.endswith("_proj.weight"):
                    weight.copy_(dequantise(quantise(weight, KIND_FORMATS[kind])))
    options: dict[str, Any] = {"dtype": "bfloat16", "quantize": kind, "row_family": family}
    options |= {"device": "cuda", "lookahead": 0, "max_batch": 1}
    with open_engine(oracle.path, **options) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(16))
            oracle.assert_logits(result, seen, tolerance=0.06)
