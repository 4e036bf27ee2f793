"""Engines over checkpoints whose experts are in 8 and 4 bits, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from checkpoints.quantised_models import KINDS, Tensors, Written, write_model
from graphengine import Engine, SamplingParams
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.blocks.experts import ExpertsWeights
from graphengine.models.blocks.mla import LatentAttentionWeights
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, load_weights, read_model
from graphengine.models.decoder import DecoderWeights
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.quantised.writer import write_quantised
from graphengine.speculative import MTP, NGram

TOLERANCE = 1e-4
PROMPTS = ([5, 3, 80], [*range(1, 72, 3)], [7, 9, 7, 9, 7, 9])
SIZES: dict[str, Any] = {
    "family": "qwen3-moe",
    "moe_intermediate_size": 128,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 4, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16)}
    return Engine.from_pretrained(path, **(sizes | {"device": "cpu", "dtype": "float32"} | options))


def experts_of(engine: Engine) -> ExpertsWeights:
    weights = engine.model.weights
    assert isinstance(weights, DecoderWeights)
    experts = weights.layers[0].mlp
    assert isinstance(experts, ExpertsWeights)
    return experts


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], tokens: list[int]) -> None:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    lost = (logits.amax(1) - chosen) / logits.abs().amax(1)
    assert lost.max() <= 2 * TOLERANCE, f"{lost=}"


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 blocks", "float-quantized channel", "int-quantized channel"),
        *("packed int4 of 128", "mxfp4-pack-quantized", "awq of 32", "gptq"),
    ],
)
def test_experts_mean_what_the_checkpoint_says(tmp_path: Path, name: str) -> None:
    """Alone, in a batch and with drafts: the tokens that transformers knows to be the best."""
    written = write_model(tmp_path / "model", KINDS[name], plain=("lm_head",), **SIZES)
    with open_engine(written.path) as engine:
        experts = experts_of(engine)
        assert isinstance(experts.gate_up, PackedExperts) and isinstance(
            experts.down, PackedExperts
        )
        assert isinstance(experts.gate, Tensor)
        alone = [engine.generate(prompt, greedy()) for prompt in PROMPTS]
        together = engine.generate(list(PROMPTS), greedy())
        assert engine.memory.budget.table().count("weights in") > 1
    for prompt, result in zip(PROMPTS, alone, strict=True):
        assert_greedy(written.model, prompt, result.token_ids)
    expected = [result.token_ids for result in alone]
    assert len({token for ids in expected for token in ids}) > 3, "logits do not spread"
    assert [result.token_ids for result in together] == expected
    if name == "fp8 blocks":
        with open_engine(written.path, speculative=NGram(k=3)) as engine:
            drafted = engine.generate(list(PROMPTS), greedy())
            assert engine.acceptance.accepted > 0
        assert [result.token_ids for result in drafted] == expected


LATENT: dict[str, Any] = {
    "family": "deepseek-v3",
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 96,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 56,
}


# Sizes that groups of 32 and 128 columns are parts of.
EVEN = {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 64}


@pytest.mark.parametrize(
    ("name", "files"), [("fp8 blocks", 3), ("fp8 tensor", 1), ("packed int4 of 32", 1), ("gptq", 1)]
)
def test_latent_attention_as_deepseek_stores_it(tmp_path: Path, name: str, files: int) -> None:
    """What heads have to themselves is dequantised, exactly in float32; the rest stays packed."""
    sizes = LATENT if name.startswith("fp8") else LATENT | EVEN
    written = write_model(tmp_path / "model", KINDS[name], files=files, **sizes)
    told: list[tuple[int, int]] = []
    with open_engine(written.path, progress=lambda *sizes: told.append(sizes)) as engine:
        weights = engine.model.weights
        assert isinstance(weights, DecoderWeights)
        for index, layer in enumerate(weights.layers):
            assert isinstance(layer.attention, LatentAttentionWeights)
            meant = written.model.get_parameter(f"model.layers.{index}.self_attn.kv_b_proj.weight")
            assert torch.equal(layer.attention.kv_b, meant)
            assert isinstance(layer.attention.q_kv_a, PackedWeight)
            assert isinstance(layer.attention.output, PackedWeight)
        alone = [engine.generate(prompt, greedy()) for prompt in PROMPTS]
        together = engine.generate(list(PROMPTS), greedy())
    stored = sum(info.nbytes for info in Checkpoint.open(written.path).tensors.values())
    assert told[0] == (0, stored) and told[-1] == (stored, stored)
    for prompt, result in zip(PROMPTS, alone, strict=True):
        assert_greedy(written.model, prompt, result.token_ids)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_dequantised_weights_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    written = write_model(tmp_path / "model", KINDS["fp8 blocks"], **LATENT)
    checkpoint = Checkpoint.open(written.path)
    weights = read_model(checkpoint).allocate(device="cpu", dtype=torch.bfloat16)
    found = destinations(checkpoint, weights)
    name = weights.config.embedding_name
    assert load_weights(checkpoint, found, weights.linears(), name) == []
    assert isinstance(weights, DecoderWeights)
    attention = weights.layers[1].attention
    assert isinstance(attention, LatentAttentionWeights)
    meant = written.model.get_parameter("model.layers.1.self_attn.kv_b_proj.weight")
    assert torch.equal(attention.kv_b, meant.bfloat16())
    assert not torch.equal(attention.kv_b.float(), meant)


def test_draft_modules_with_a_packed_kv_b(tmp_path: Path) -> None:
    """Modules like DeepSeek-V3's: a layer in fp8 past the others, its projection in bfloat16."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config["num_nextn_predict_layers"] = 1
        last, module = "model.layers.1.", "model.layers.2."
        for name in [name for name in tensors if name.startswith(last)]:
            tensors[module + name.removeprefix(last)] = tensors[name].clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{module}{name}.weight"] = torch.ones(128, dtype=torch.bfloat16)
        tensors[f"{module}eh_proj.weight"] = torch.eye(128, 256, dtype=torch.bfloat16)

    written = write_model(tmp_path / "model", KINDS["fp8 blocks"], edit=edit, **LATENT)
    with open_engine(written.path) as engine:
        expected = [each.token_ids for each in engine.generate(list(PROMPTS), greedy())]
    with open_engine(written.path, speculative=MTP(k=1)) as engine:
        weights = engine.runtime.program.drafter.weights
        assert weights is not None
        (attention,) = (module.layer.attention for module in weights.modules)
        assert isinstance(attention, LatentAttentionWeights)
        meant = written.model.get_parameter("model.layers.1.self_attn.kv_b_proj.weight")
        assert torch.equal(attention.kv_b, meant) and isinstance(attention.q_kv_a, PackedWeight)
        drafted = engine.generate(list(PROMPTS), greedy())
        assert engine.acceptance.proposed > 0
    assert [each.token_ids for each in drafted] == expected


def test_a_scale_that_kv_b_lacks_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    written = write_model(tmp_path / "model", KINDS["fp8 blocks"], edit=edit, **LATENT)
    with pytest.raises(ValueError, match=f"one of {name}, .* is needed"):
        read_model(Checkpoint.open(written.path))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A model in bfloat16 whose experts are tensors of their own."""
    folder = tmp_path_factory.mktemp("plain")
    written = write_model(
        folder / "quantised", KINDS["int-quantized channel"], plain=("",), **SIZES
    )
    model = written.model
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    return Written(folder / "model", model.float())


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_rounding_while_loading_is_rounding_before(
    tmp_path: Path, plain: Written, kind: Any
) -> None:
    """And both are what transformers makes of the rounded numbers; routers stay as they are."""
    write_quantised(Checkpoint.open(plain.path), tmp_path / "written", kind)
    with open_engine(plain.path, quantize=kind) as engine:
        experts = experts_of(engine)
        assert isinstance(experts.gate_up, PackedExperts)
        assert experts.gate_up.format == KIND_FORMATS[kind]
        rounded = engine.generate(list(PROMPTS), greedy())
    with open_engine(tmp_path / "written") as engine:
        stored = engine.generate(list(PROMPTS), greedy())
    assert [each.token_ids for each in stored] == [each.token_ids for each in rounded]
    tensors = load_file(plain.path / "model.safetensors")
    for name, tensor in tensors.items():
        linear = ".experts." in name or "_proj" in name
        if linear and tensor.ndim == 2:
            tensors[name] = dequantise(quantise(tensor.float(), KIND_FORMATS[kind]))
    meant = tmp_path / "meant"
    meant.mkdir()
    (meant / "config.json").write_text((plain.path / "config.json").read_text())
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})
    model = Qwen3MoeForCausalLM.from_pretrained(meant, dtype=torch.float32).eval()
    for prompt, result in zip(PROMPTS, rounded, strict=True):
        assert_greedy(model, prompt, result.token_ids)


def test_experts_of_a_layer_in_two_ways_are_refused(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.3.down_proj"

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$", expert]
        for name in [name for name in tensors if name.startswith(expert)]:
            del tensors[name]
        tensors[f"{expert}.weight"] = torch.zeros(128, 128, dtype=torch.bfloat16)

    written = write_model(
        tmp_path / "model",
        KINDS["int-quantized channel"],
        plain=("lm_head",),
        edit=edit,
        **SIZES,
    )
    message = r"experts\.0\.down_proj as int8-1x0, .*experts\.3\.down_proj as the model's dtype"
    with pytest.raises(ValueError, match=message):
        open_engine(written.path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8 blocks", "packed int4 of 128", "mxfp4-pack-quantized"])
def test_packed_experts_on_a_gpu(tmp_path: Path, name: str) -> None:
    """The logits are a CPU's in float32 but for rounding; tokens are the same in any company."""
    written = write_model(tmp_path / "model", KINDS[name], plain=("lm_head",), **SIZES)
    for slots in (1, 4):
        options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_batch": slots}
        with open_engine(written.path, **options) as engine:
            alone = [engine.generate(prompt, greedy()).token_ids for prompt in PROMPTS]
            together = [each.token_ids for each in engine.generate(list(PROMPTS), greedy())]
        assert together == alone
        prompt, tokens = PROMPTS[1], alone[1]
        with torch.no_grad():
            logits = written.model(torch.tensor([[*prompt, *tokens]])).logits[
                0, len(prompt) - 1 : -1
            ]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() < 0.06
    assert json.loads((written.path / "config.json").read_text())["num_experts"] == 5
