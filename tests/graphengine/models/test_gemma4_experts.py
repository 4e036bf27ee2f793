"""Gemma 4 with experts beside each feed-forward, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from checkpoints.small_decoders import composed
from engines.family_checks import (
    assert_half_precision_replays,
    assert_replies,
    assert_rewinds,
    assert_same_in_any_company,
)
from graphengine import Engine, SamplingParams
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.blocks.experts import Experts
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.composition import experts_of
from graphengine.models.families.registry import read_model_config
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.speculative import DraftModel
from launches.compilation import graph_kernels

pytest.importorskip("transformers.models.gemma4", reason="transformers has no Gemma 4")

SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "intermediate_size": 38, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 40, "sliding_window": 5,
    "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": [1, 106],
    "pad_token_id": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 263,
    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 22,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    # As 26B-A4B.
    "equal": {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0,
    },
    "inputs": {
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 12, "use_double_wide_mlp": True, "hidden_size": 57,
        "num_attention_heads": 3, "num_key_value_heads": 3, "num_experts": 9, "top_k_experts": 3,
        "moe_intermediate_size": 17, "tie_word_embeddings": False,
    },
}  # fmt: skip


def new_model(**options: Any) -> PreTrainedModel:
    """Scales that transformers makes ones are random, those of the router large."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = SIZES | options
    sizes["num_hidden_layers"] = len(sizes["layer_types"])
    config = Gemma4TextConfig(**sizes)
    model: PreTrainedModel = Gemma4ForCausalLM._from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.5 + 0.25 * (index % 4))
            layer.router.scale.copy_(torch.randn(sizes["hidden_size"]) * 9)
            layer.router.per_expert_scale.copy_(torch.rand(sizes["num_experts"]) + 0.5)
            for norm in (
                layer.pre_feedforward_layernorm_2,
                layer.post_feedforward_layernorm_1,
                layer.post_feedforward_layernorm_2,
            ):
                norm.weight.copy_(torch.rand(sizes["hidden_size"]) + 0.5)
    return model


@pytest.fixture(scope="module")
def gemmas(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gemma4-experts")
    return {
        name: write_model(partial(new_model, **options), folder / name, seed)
        for seed, (name, options) in enumerate(CONFIGS.items())
    }


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **options)


def tensors_at(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens(
    gemmas: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    options = {"prefill_buckets": (16, 64), "lookahead": 0}
    with open_engine(gemmas[name].path, device=device, **options) as engine:
        assert_replies(engine, gemmas[name], eager, (1, 17, 90))


def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    gemmas: dict[str, Any], device: str
) -> None:
    path = gemmas["equal"].path
    assert_same_in_any_company(partial(open_engine, path, device=device), gemmas["equal"])


def test_sessions_rewind_and_are_restored(
    gemmas: dict[str, Any], device: str, tmp_path: Path
) -> None:
    file, path = tmp_path / "session.safetensors", gemmas["equal"].path
    options = {"device": device, "prefill_buckets": (16, 64), "window_rings": False}
    with open_engine(path, **options) as engine:
        said = assert_rewinds(engine, gemmas["equal"], file)
    with open_engine(path, **options) as engine, engine.restore_session(file) as session:
        assert session.generate(greedy(30)).token_ids == said


def test_a_model_drafts_for_itself(gemmas: dict[str, Any], device: str) -> None:
    """All drafts are right, so that the draft model computes what the target does."""
    path = gemmas["inputs"].path
    options = {"device": device, "row_family": "dot", "speculative": DraftModel(path, k=3)}
    with open_engine(path, **options) as engine:
        engine.generate(gemmas["inputs"].prompts((21,)), greedy(24))
        assert engine.acceptance.accepted == engine.acceptance.proposed > 10


def test_updates_reach_the_norm_that_is_computed(
    gemmas: dict[str, Any], device: str, tmp_path: Path, write_model: Callable[..., Any]
) -> None:
    """What the router reads the stream by is a copy, which an update makes anew."""
    other = write_model(partial(new_model, **CONFIGS["equal"]), tmp_path / "other", 8)
    with open_engine(gemmas["equal"].path, device=device) as engine:
        engine.update_weights(tensors_at(other.path))
        for result in engine.generate(other.prompts((3, 40)), greedy(16)):
            other.assert_greedy(result)


def test_a_tensor_for_each_linear_of_an_expert(
    gemmas: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """As quantised checkpoints have them."""
    oracle = gemmas["equal"]
    tensors = tensors_at(oracle.path)
    for name in [name for name in tensors if ".experts." in name]:
        stem, _, kind = name.rpartition(".")
        for index, each in enumerate(tensors.pop(name)):
            parts = {"down_proj": each}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), each.chunk(2), strict=True))
            for part, weight in parts.items():
                tensors[f"{stem}.{index}.{part}.weight"] = weight.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((oracle.path / "config.json").read_bytes())
    with open_engine(tmp_path, device=device) as engine:
        oracle.assert_greedy(engine.generate(oracle.prompts((33,))[0], greedy(16)))


def test_rounded_weights(
    tmp_path: Path, write_model: Callable[..., Any], eager: Callable[[Engine], Any]
) -> None:
    """Against transformers with what the codes mean; the router stays."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64}
    sizes |= {"head_dim": 32, "global_head_dim": 64}
    oracle = write_model(partial(new_model, **CONFIGS["equal"] | sizes), tmp_path / "gemma", 3)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if "router" in name or not name.endswith(("_proj", "_proj.weight")):
                continue
            for each in weight if weight.dim() == 3 else [weight]:
                each.copy_(dequantise(quantise(each, KIND_FORMATS["fp8"])))
    with open_engine(oracle.path, device="cpu", quantize="fp8", lookahead=0) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(12))
            oracle.assert_logits(result, seen)


# Configs.

A4B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **SIZES,
    "num_hidden_layers": 5, **CONFIGS["equal"],
}  # fmt: skip


def test_the_config_is_read(gemmas: dict[str, Any]) -> None:
    experts = experts_of(composed(read_model(Checkpoint.open(gemmas["inputs"].path))))
    assert isinstance(experts, Experts) and experts.own_norms
    assert (experts.experts, experts.router.top_k, experts.ffn_size) == (9, 3, 17)
    assert (experts.gating, experts.names.stacked) == ("gelu_tanh", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts=None: supported: an integer, as enable_moe_block"),
        ({"top_k_experts": None}, "top_k_experts=None: supported: an integer"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None: supported: an integer"),
        ({"top_k_experts": 6}, "top_k_experts=6: supported: 1 to num_experts=5"),
        ({"num_experts": 513}, "num_experts=513: supported: at most 512"),
        ({"n_group": 4}, "n_group=4: supported: .*1"),
        (
            {"architectures": ["Gemma4UnifiedForCausalLM"]},
            "enable_moe_block=True: supported: False in a Gemma4UnifiedForCausalLM",
        ),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(A4B | changes)


# What is launched.


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_a_block_is_nine_kernels(gemmas: dict[str, Any]) -> None:
    """Ten where pairs are grouped; a router's input, experts' input and the sum are one each."""
    block = [
        "dot_kernel", "dot_kernel", "rms_norm_kernel", "route_product_kernel", "rms_norm_kernel",
        "product_kernel", "down_kernel", "normed_sum_kernel", "add_normed_kernel",
    ]  # fmt: skip
    options = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot"}
    with open_engine(gemmas["equal"].path, **options) as engine:
        graphs = graph_kernels(engine)
    for graph, wanted in (
        ("decode/1/fast", block),
        ("decode/4/fast", [*block[:5], "group_kernel", *block[5:]]),
    ):
        names = [kernel.name.lstrip("_") for kernel in graphs[graph]]
        # After attention's five.
        assert names[6 : 6 + len(wanted)] == wanted
        assert names.count("normed_sum_kernel") == 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_replays_what_it_computes_eagerly(
    gemmas: dict[str, Any], eager: Callable[[Engine], Any], name: str
) -> None:
    opened = partial(open_engine, gemmas[name].path)
    assert_half_precision_replays(opened, gemmas[name], eager, "auto")
