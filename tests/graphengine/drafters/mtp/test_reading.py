"""Draft modules of checkpoints: what is read of them, where weights go, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.mtp_chains import HAS_CHAINS, Chains
from checkpoints.mtp_modules import (
    FFN,
    HIDDEN,
    LAYOUTS,
    SIZES,
    VOCAB,
    Tensors,
    random_tensors,
    write_checkpoint,
    write_random,
)
from checkpoints.small_decoders import block_in, expert_layers
from graphengine.demo import checkpoint_path
from graphengine.drafters.mtp import layer
from graphengine.drafters.mtp.layer import MtpConfig, allocate_mtp_weights
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.composition import windows_of
from graphengine.models.families.registry import read_model_config
from graphengine.models.linears import Linear, heuristic_plans
from graphengine.models.plans import choosing as tuning
from graphengine.models.plans import tuning_tables
from graphengine.models.states import Paged

Edit = Callable[[dict[str, Any], Tensors], object]


def edited(folder: Path, name: str, edit: Edit) -> Checkpoint:
    """A checkpoint of `LAYOUTS[name]` whose config and tensors `edit` has changed."""
    config, tensors = SIZES | LAYOUTS[name].config, random_tensors(LAYOUTS[name])
    edit(config, tensors)
    return Checkpoint.open(write_checkpoint(folder, config, tensors))


def random_config(folder: Path, name: str) -> tuple[Checkpoint, MtpConfig]:
    checkpoint = Checkpoint.open(write_random(folder, name))
    return checkpoint, read_mtp_config(checkpoint)


# Reading.


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_recognised(tmp_path: Path, name: str) -> None:
    checkpoint, config = random_config(tmp_path, name)
    layout, decoder = LAYOUTS[name], config.decoder
    assert config.layout.name == name
    assert config.prefixes == layout.prefixes and config.modules == len(layout.prefixes)
    assert config.hidden_first is layout.hidden_first
    assert config.norm_eps == decoder.norm_eps == SIZES["rms_norm_eps"]
    # The module's layer is one of the target's.
    target = read_model_config(checkpoint.config)
    assert decoder.num_layers == config.modules and target.num_layers == SIZES["num_hidden_layers"]
    attention = block_in(decoder, GroupedQueryAttention)
    assert attention.qk_norm is layout.qk_norm
    assert attention.qkv_bias is layout.qkv_bias
    assert attention.output_bias is layout.output_bias


def test_the_demo_checkpoint_has_one_module() -> None:
    checkpoint = Checkpoint.open(checkpoint_path())
    config = read_mtp_config(checkpoint)
    assert config.layout.name == "qwen3" and config.modules == 1 and not config.hidden_first
    weights = allocate_mtp_weights(config, device="meta", dtype=torch.bfloat16)
    stored = {name: tensor for name, tensor in checkpoint.tensors.items() if "mtp." in name}
    assert stored.keys() == weights.named().keys()
    assert weights.nbytes == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("modules", [1, 3])
def test_as_many_modules_as_there_are(tmp_path: Path, modules: int) -> None:
    """The config need not say how many."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del config["num_nextn_predict_layers"]
        second = LAYOUTS["deepseek"].prefixes[1]
        for name in [name for name in tensors if name.startswith(second)]:
            tensors[name.replace(second, "model.layers.4.")] = tensors[name].clone()
            if modules == 1:
                del tensors[name]

    config = read_mtp_config(edited(tmp_path, "deepseek", change))
    assert config.modules == modules


# Loading.


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_the_modules_is_loaded(tmp_path: Path, name: str) -> None:
    checkpoint, config = random_config(tmp_path, name)
    weights = allocate_mtp_weights(config, device="cpu", dtype=torch.float32)
    for tensor in weights.tensors():
        tensor.fill_(torch.nan)
    target = read_model_config(checkpoint.config)
    model = target.allocate(device="cpu", dtype=torch.float32)
    unused = checkpoint.load(model.named() | weights.named())
    copies = [f"{prefix}{copy}.weight" for prefix in config.prefixes
              for copy in LAYOUTS[name].copies]  # fmt: skip
    assert unused == sorted(copies)
    assert not any(tensor.isnan().any() for tensor in weights.tensors())
    expected = random_tensors(LAYOUTS[name])
    for tensor_name, view in weights.named().items():
        assert torch.equal(view, expected[tensor_name]), tensor_name
    module, prefix = weights.modules[-1], config.prefixes[-1]
    layer = prefix + LAYOUTS[name].layer
    assert torch.equal(module.projection, expected[f"{prefix}{LAYOUTS[name].projection}.weight"])
    qkv = torch.cat([expected[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(module.layer.attention.qkv, qkv)
    assert weights.nbytes == sum(tensor.nbytes for tensor in weights.tensors())
    assert weights.nbytes == sum(4 * view.numel() for view in weights.named().values())


def test_a_wrong_shape_is_an_error_of_the_loader(tmp_path: Path) -> None:
    """A gate beside the queries would give this shape."""

    def widen(config: dict[str, Any], tensors: Tensors) -> None:
        name = "mtp.layers.0.self_attn.q_proj.weight"
        tensors[name] = torch.cat([tensors[name]] * 2)

    checkpoint = edited(tmp_path, "qwen3", widen)
    config = read_mtp_config(checkpoint)
    weights = allocate_mtp_weights(config, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \[512, 72\], not \[256, 72\]"):
        checkpoint.load(weights.named())


# Refusals.


def remove_modules(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if "mtp" in name]:
        del tensors[name]


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


REFUSED: dict[str, tuple[str, Edit, str]] = {
    "none": (
        "qwen3",
        remove_modules,
        "has no draft module (MTP): neither mtp.fc.weight (qwen3) or "
        "model.mtp_layers.0.input_proj.weight (mimo) or model.layers.2.eh_proj.weight (deepseek); "
        "it is a Qwen3ForCausalLM of 2 layers, and beside its own weights it has nothing",
    ),
    "of another kind": (
        "qwen3",
        lambda config, tensors: rename(tensors, "mtp.", "medusa."),
        "beside its own weights it has medusa.fc.weight, medusa.layers.0.input_layernorm.weight, "
        "medusa.layers.0.mlp.down_proj.weight and 12 more",
    ),
    "fewer than told": (
        "mimo",
        lambda config, tensors: config.update(num_nextn_predict_layers=3),
        "has 2 draft modules of the layout mimo, but num_nextn_predict_layers=3",
    ),
    "latent attention": (
        "deepseek",
        lambda config, tensors: rename(tensors, "3.self_attn.k_proj", "3.self_attn.kv_b_proj"),
        "has a draft module with latent attention (MLA), and its target, a LlamaForCausalLM, has "
        "no layer with them: model.layers.3.self_attn.kv_b_proj.bias, "
        "model.layers.3.self_attn.kv_b_proj.weight",
    ),
    "experts": (
        "deepseek",
        lambda config, tensors: rename(tensors, "2.mlp.gate_proj", "2.mlp.experts.0.gate_proj"),
        "has a draft module with experts (MoE), and its target, a LlamaForCausalLM, has no layer "
        "with them: model.layers.2.mlp.experts.0.gate_proj.weight",
    ),
    "a router": (
        "qwen3",
        lambda config, tensors: tensors.update({"mtp.layers.0.mlp.gate.weight": torch.ones(4)}),
        "experts (MoE), and its target, a Qwen3ForCausalLM, has no layer with them: "
        "mtp.layers.0.mlp.gate.weight",
    ),
    "incomplete": (
        "mimo",
        lambda config, tensors: tensors.pop("model.mtp_layers.1.self_attn.k_proj.bias"),
        "has an incomplete draft module of the layout mimo: it lacks "
        "model.mtp_layers.1.self_attn.k_proj.bias",
    ),
    "no final norm": (
        "deepseek",
        lambda config, tensors: tensors.pop("model.layers.2.shared_head.norm.weight"),
        "it lacks model.layers.2.shared_head.norm.weight",
    ),
    "a second layer": (
        "qwen3",
        lambda config, tensors: tensors.update({"mtp.layers.1.mlp.up_proj.weight": torch.ones(4)}),
        "has a draft module of the layout qwen3 with tensors that a Qwen3ForCausalLM layer does "
        "not have: mtp.layers.1.mlp.up_proj.weight",
    ),
    "a bias of its own": (
        "qwen3",
        lambda config, tensors: tensors.update({"mtp.fc.bias": torch.ones(HIDDEN)}),
        "does not have: mtp.fc.bias",
    ),
    "no layers": (
        "qwen3",
        lambda config, tensors: config.pop("num_hidden_layers"),
        "config.json lacks 'num_hidden_layers'",
    ),
    "an unknown family": (
        "qwen3",
        lambda config, tensors: config.update(architectures=["BertForMaskedLM"]),
        "unknown architecture 'BertForMaskedLM'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_says_why(tmp_path: Path, case: str) -> None:
    name, edit, message = REFUSED[case]
    checkpoint = edited(tmp_path, name, edit)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_mtp_config(checkpoint)


def write_deepseek(folder: Path, edit: Edit) -> tuple[Checkpoint, Chains]:
    """DeepSeek-V3 with two modules, changed by `edit`."""
    chains = Chains(folder / "whole", "deepseek-v3", 2)
    config = json.loads((chains.path / "config.json").read_text())
    tensors = load_file(chains.path / "model.safetensors")
    edit(config, tensors)
    return Checkpoint.open(write_checkpoint(folder / "edited", config, tensors)), chains


@pytest.mark.skipif(not HAS_CHAINS, reason="this version of transformers cannot run one module")
def test_modules_with_experts_and_latents_have_the_targets_sizes(tmp_path: Path) -> None:
    """Published ones also have copies of the embedding and of lm_head, which nobody reads."""

    def copies(config: dict[str, Any], tensors: Tensors) -> None:
        for index in (2, 3):
            for name in ("embed_tokens", "shared_head.head"):
                tensors[f"model.layers.{index}.{name}.weight"] = torch.ones(2, 2)

    checkpoint, chains = write_deepseek(tmp_path, copies)
    config = read_mtp_config(checkpoint)
    assert config.modules == 2 and expert_layers(config.decoder) == (0, 1)
    assert config.states == ((Paged(1, (64,)),),) * 2
    own = [*chains.mtp.layers.parameters()]
    own += [each for name, each in chains.mtp.layers.named_buffers() if "correction" in name]
    weights = allocate_mtp_weights(config, device="meta", dtype=torch.float32)
    assert weights.parameters == sum(each.numel() for each in own)
    named = list(config.linears())
    assert named[0] == "projection" and named[-1] == "lm_head"
    assert {"q_kv_a", "q_b", "expert_gate_up", "shared_down"} <= {*named}


@pytest.mark.skipif(not HAS_CHAINS, reason="this version of transformers cannot run one module")
def test_a_module_may_be_dense_beside_one_with_experts(tmp_path: Path) -> None:
    def dense(config: dict[str, Any], tensors: Tensors) -> None:
        experts = [name for name in tensors if name.startswith("model.layers.3.mlp.")]
        for name in experts:
            del tensors[name]
        for part in ("gate", "up", "down"):
            name = f"mlp.{part}_proj.weight"
            tensors[f"model.layers.3.{name}"] = tensors[f"model.layers.0.{name}"].clone()

    config = read_mtp_config(write_deepseek(tmp_path, dense)[0])
    assert expert_layers(config.decoder) == (0,)
    assert {"gate_up", "expert_gate_up"} <= config.linears().keys()
    assert expert_layers(config.first(1).decoder) == (0,)


@pytest.mark.skipif(not HAS_CHAINS, reason="this version of transformers cannot run one module")
def test_an_expert_that_is_missing_or_one_too_many_is_named(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.9.up_proj.weight"

    def fewer(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    def more(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name.replace(".9.", ".10.")] = tensors[name].clone()

    with pytest.raises(ValueError, match=f"incomplete .* deepseek: it lacks {re.escape(name)}"):
        read_mtp_config(write_deepseek(tmp_path / "fewer", fewer)[0])
    with pytest.raises(ValueError, match=r"does not have: model\.layers\.2\.mlp\.experts\.10\.up"):
        read_mtp_config(write_deepseek(tmp_path / "more", more)[0])


# Qwen2, which MiMo is built from.


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MiMoForCausalLM"])
def test_qwen2_has_biases_on_queries_keys_and_values(architecture: str) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    sizes |= {"architectures": [architecture], "hidden_size": 256}
    config = read_model_config(sizes)
    block = block_in(config, GroupedQueryAttention)
    assert config.architecture == architecture and block.head_dim == 256 // 4
    assert block.qkv_bias and not (block.output_bias or block.qk_norm)
    (layer, _) = config.allocate(device="meta", dtype=torch.float32).layers
    attention = layer.attention
    assert attention.qkv_bias is not None and attention.qkv_bias.shape == (256 + 2 * 128,)
    assert attention.output_bias is layer.mlp.gate_up_bias is attention.q_norm is None
    assert read_model_config(sizes | {"attention_bias": True}) == config


def test_modules_of_a_target_with_windows_are_refused() -> None:
    config = SIZES | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    target = read_model_config(config | {"sliding_window": 9, "max_window_layers": 1})
    message = "MTP.* of a Qwen2ForCausalLM with windows of 9 tokens are not supported"
    with pytest.raises(ValueError, match=message):
        MtpConfig.of_target(target, layer.LAYOUTS[0], ("mtp.",))
    target = read_model_config(config | {"sliding_window": None})
    assert MtpConfig.of_target(target, layer.LAYOUTS[0], ("mtp.",)).decoder.num_layers == 1


def test_modules_with_full_attention_may_have_a_target_with_windows(tmp_path: Path) -> None:
    """They have none, though every layer of the target has one."""

    def windows(config: dict[str, Any], tensors: Tensors) -> None:
        config |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
        config |= {"mtp_layer_types": ["full_attention"]}

    config = read_mtp_config(edited(tmp_path, "qwen3", windows))
    assert not any(windows_of(config.decoder))
    weights = allocate_mtp_weights(config, device="meta", dtype=torch.float32)
    assert weights.modules[0].layer.attention.block.window == 0


# Plans.


def test_shapes_are_the_targets_and_the_projection(tmp_path: Path) -> None:
    _, config = random_config(tmp_path, "mimo")
    shapes = dict(config.linears())
    assert shapes.pop("projection") == Linear("residual", HIDDEN, 2 * HIDDEN)
    assert shapes == config.decoder.linears
    assert shapes["lm_head"] == Linear("sample", VOCAB, HIDDEN)
    trimmed = config.linears(draft_vocab_size=32)
    assert trimmed["lm_head"] == Linear("sample", 32, HIDDEN)
    gate_up = Linear("swiglu", 2 * FFN, HIDDEN, shard="rows")
    assert trimmed["gate_up"] == shapes["gate_up"] == gate_up


def test_plans_of_a_module_are_found_as_the_targets_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    _, config = random_config(tmp_path, "mimo")
    dtype, family = torch.bfloat16, "dot"
    plans, sources = tuning.choose_plans(config.linears(), dtype, family, "cpu")
    assert plans == heuristic_plans(config.linears(), dtype, family)
    assert set(sources.values()) == {"heuristic"}

    own = LinearPlan("dot", block_m=16, block_k=16)
    tuned = tuning_tables.TunedPlan(own, us=1.0, torch="2", triton="3", date="2026-01-01")
    shapes = config.linears(draft_vocab_size=32)
    keys = [
        tuning_tables.TuningKey.of(shapes[name], family, dtype)
        for name in ("projection", "lm_head")
    ]
    tuning_tables.write_table(
        tuning_tables.user_table_path("cpu"), "cpu", dict.fromkeys(keys, tuned)
    )
    trimmed, sources = tuning.choose_plans(shapes, dtype, family, "cpu")
    assert trimmed == plans.replace({"projection": own, "lm_head": own})
    assert {name for name, source in sources.items() if source == "user"} == {
        "projection",
        "lm_head",
    }
    # They are part of the numerics, by the rows that a sum of squares covers too.
    ids = {
        tuning.numerics_id(shapes, plans.replace({"projection": projection}), dtype=dtype, extra={})
        for projection in (own, own._replace(block_m=32), own._replace(stages=2))
    }
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("mimo", {"mtp_hidden_states_first": False}, "supported: True in the layout mimo"),
        ("qwen3", {"mtp_hidden_states_first": True}, "supported: False in the layout qwen3"),
        ("deepseek", {"chain_hidden_post_norm": False}, "the layout deepseek hands on"),
    ],
)  # fmt: skip
def test_a_config_of_another_formula_is_refused(
    tmp_path: Path, name: str, said: dict[str, bool], message: str
) -> None:
    """Such modules may have the same tensors."""
    layout = LAYOUTS[name]
    path = write_checkpoint(tmp_path, SIZES | layout.config | said, random_tensors(layout))
    ((key, value),) = said.items()
    with pytest.raises(ValueError, match=f"{key}={value}: .*{message}"):
        read_mtp_config(Checkpoint.open(path))
    agreeing = SIZES | layout.config | {"mtp_hidden_states_first": layout.hidden_first}
    write_checkpoint(tmp_path, agreeing, random_tensors(layout))
    assert read_mtp_config(Checkpoint.open(path)).layout.name == name
