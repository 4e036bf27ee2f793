"""GPT-2 and StarCoder 2: published names and configs, ranks, stages, rounded and new weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.published import PUBLISHED
from checkpoints.small_decoders import block_in, composed
from engines.family_checks import assert_rewinds
from graphengine import Engine, SamplingParams
from graphengine.config import RoundedKind
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.mlp import Mlp, MlpWeights
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_model
from graphengine.models.composition import windows_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.launches import Share
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.splitting.rank_cuts import cut_to
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.splitting.stages import of_stage
from launches.compilation import graph_kernels


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 2, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **({"prefill_buckets": (16, 64)} | options))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_gpt_2_with_the_names_that_it_is_published_with(
    dense_checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    """Tensors have a base model's names, with masks beside them."""
    source = dense_checkpoints["gpt2"].path
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in stored_tensors(source).items()
        if name != "lm_head.weight"
    }
    assert {"wte.weight", "h.0.attn.c_attn.weight", "ln_f.bias"} < tensors.keys()
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 170, 170).tril()
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = dense_checkpoints["gpt2"].prompts((9, 40))
    with open_engine(source) as engine:
        expected = [each.token_ids for each in engine.generate(prompts, greedy())]
    with open_engine(tmp_path) as engine:
        assert [each.token_ids for each in engine.generate(prompts, greedy())] == expected


def test_a_layer_is_eight_kernels(dense_checkpoints: dict[str, Any]) -> None:
    """In decode; before the first one positions are added, and the stream is normed."""
    sizes = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot"}
    with open_engine(dense_checkpoints["gpt2"].path, **sizes) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name.lstrip("_") for kernel in graphs["decode/2/fast"]]
    layer = [
        *("dot_kernel", "decode_attention_kernel", "dot_kernel", "layer_norm_residual_kernel"),
        *("dot_kernel", "gelu_kernel", "dot_kernel", "layer_norm_residual_kernel"),
    ]
    assert names[1:3] == ["add_positions_kernel", "layer_norm_residual_kernel"]
    assert names[3:27] == layer * 3


def test_positions_end(dense_checkpoints: dict[str, Any], device: str) -> None:
    """A text may take all of the learned positions, and no more."""
    oracle = dense_checkpoints["gpt2"]
    (prompt,) = oracle.prompts((150,))
    with open_engine(oracle.path, device=device, max_seq_len=170) as engine:
        result = engine.generate(prompt, greedy(20))
        assert len(result.token_ids) == 20
        oracle.assert_greedy(result)
    with pytest.raises(ValueError, match="max_seq_len=171 exceeds the model's 170 positions"):
        open_engine(oracle.path, max_seq_len=171)


@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_sessions_rewind(dense_checkpoints: dict[str, Any], device: str, name: str) -> None:
    with open_engine(dense_checkpoints[name].path, device=device) as engine:
        assert_rewinds(engine, dense_checkpoints[name])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_weights_of_gpt_2(
    tmp_path: Path,
    write_model: Callable[..., Any],
    eager: Callable[[Engine], Any],
    kind: RoundedKind,
) -> None:
    """Rows of the weights have scales, although a checkpoint has them as columns."""
    import transformers

    config = transformers.GPT2Config(vocab_size=263, n_embd=64, n_layer=2, n_head=2)
    oracle = write_model(lambda: transformers.GPT2LMHeadModel(config), tmp_path / "gpt2", 3)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if "c_" in name and name.endswith(".weight"):
                weight.copy_(dequantise(quantise(weight.t(), KIND_FORMATS[kind])).t())
    with open_engine(oracle.path, device="cpu", quantize=kind, lookahead=0) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            oracle.assert_logits(engine.generate(prompt, greedy(12)), seen)


def test_new_weights_of_gpt_2(dense_checkpoints: dict[str, Any], device: str) -> None:
    """By the names that transformers gives them."""
    source = dense_checkpoints["gpt2"]
    linear = "transformer.h.0.mlp.c_fc.weight"
    prompts = source.prompts((9, 40))
    changed = {name: 0.5 * each for name, each in stored_tensors(source.path).items()}
    with open_engine(source.path, device=device) as engine:
        before = [each.token_ids for each in engine.generate(prompts, greedy())]
        engine.update_weights(changed)
        between = [each.token_ids for each in engine.generate(prompts, greedy())]
        engine.update_weights(stored_tensors(source.path))
        after = [each.token_ids for each in engine.generate(prompts, greedy())]
        with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.c_fc\.weight has shape"):
            engine.update_weights({linear: changed[linear].t().contiguous()})
    assert after == before != between


def test_ranks_and_stages_of_gpt_2(dense_checkpoints: dict[str, Any]) -> None:
    """Ranks cut transposed linears, and their three parts one by one; positions are where
    embeddings are, and the final norm's bias is where logits are.
    """
    checkpoint = Checkpoint.open(dense_checkpoints["gpt2"].path)
    model = composed(read_model(checkpoint))
    whole = model.allocate(device="cpu", dtype=torch.float32)
    checkpoint.load(destinations(checkpoint, whole))
    attention, mlp = (each.block for each in whole.layers[1].sublayers)
    assert isinstance(attention, AttentionWeights) and isinstance(mlp, MlpWeights)
    assert attention.qkv_bias is not None and mlp.up_bias is not None
    meta = model.allocate(device="meta", dtype=torch.float32)
    for rank in range(3):
        config = of_rank(model, Share(rank, 3))
        assert isinstance(config, DecoderConfig)
        part = config.allocate(device="cpu", dtype=torch.float32)
        cut = cut_to(checkpoint, meta, part, Share(rank, 3))
        cut.load(destinations(cut, part))
        own, own_mlp = (each.block for each in part.layers[1].sublayers)
        assert isinstance(own, AttentionWeights) and isinstance(own_mlp, MlpWeights)
        for held, of_all in ((own.qkv, attention.qkv), (own.qkv_bias, attention.qkv_bias)):
            rows = [each.chunk(3)[rank] for each in of_all.chunk(3)]
            assert torch.equal(held, torch.cat(rows))
        assert torch.equal(own.output, attention.output.chunk(3, dim=1)[rank])
        assert torch.equal(own_mlp.up, mlp.up.chunk(3)[rank])
        assert torch.equal(own_mlp.up_bias, mlp.up_bias.chunk(3)[rank])
        assert torch.equal(part.positions, whole.positions)
    stages = [of_stage(model, Share(rank, 2)) for rank in range(2)]
    weights = [composed(each).allocate(device="meta", dtype=torch.float32) for each in stages]
    assert [each.positions is not None for each in weights] == [True, False]
    assert [each.final_bias is not None for each in weights] == [False, True]


GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600,
    "n_head": 25, "n_layer": 48, "n_positions": 1024, "output_past": True, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
"""The keys of GPT-2 XL."""

STARCODER2: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 0,
    "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288,
    "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
    "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813, "sliding_window": 4096, "torch_dtype": "bfloat16",
    "use_bias": True, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
"""The keys of StarCoder 2 3B."""


def test_configs_as_they_are_published() -> None:
    for config in (GPT2, STARCODER2):
        assert unknown_keys(config) == []
    model = composed(read_model_config(GPT2))
    attention, mlp = block_in(model, GroupedQueryAttention), block_in(model, Mlp)
    assert (model.num_layers, model.max_positions, model.vocab_size) == (48, 1024, 50257)
    assert (attention.num_heads, attention.head_dim, attention.num_kv_heads) == (25, 64, 25)
    assert (mlp.ffn_size, mlp.activation) == (6400, "gelu_tanh") and model.tie_embeddings
    assert model.rope is None and model.norms == "layer_biased"
    # Without an architecture, by the type; and by the usual names of its keys.
    usual = {"model_type": "gpt2", "hidden_size": 1600, "num_attention_heads": 25}
    assert read_model_config(usual | {"num_hidden_layers": 48}) == model
    model = composed(read_model_config(STARCODER2))
    attention, mlp = block_in(model, GroupedQueryAttention), block_in(model, Mlp)
    assert windows_of(model) == (4096,) * 30 and model.norm_eps == mlp.norm_eps == 1e-5
    assert attention.qkv_bias and attention.output_bias and mlp.bias and model.tie_embeddings


def test_gpt_bigcode_has_one_head_of_keys() -> None:
    """SantaCoder: 1.1 billion parameters."""
    model = composed(read_model_config(PUBLISHED["bigcode/gpt_bigcode-santacoder"].config))
    attention, mlp = block_in(model, GroupedQueryAttention), block_in(model, Mlp)
    assert (attention.num_heads, attention.head_dim, attention.num_kv_heads) == (16, 128, 1)
    assert not attention.transposed and not mlp.transposed and mlp.activation == "gelu_tanh"
    weights = model.allocate(device="meta", dtype=torch.bfloat16)
    assert weights.parameters == pytest.approx(1.1248e9, rel=1e-3)


GPTJ = PUBLISHED["EleutherAI/gpt-j-6b"].config


def test_gpt_j_as_it_is_published() -> None:
    model = composed(read_model_config(GPTJ))
    attention = block_in(model, GroupedQueryAttention)
    assert (attention.head_dim, attention.interleaved, attention.qkv_bias) == (256, True, False)
    assert model.rope is not None and model.rope.rotated == 0.25 and model.head_bias
    weights = model.allocate(device="meta", dtype=torch.bfloat16)
    assert weights.parameters == pytest.approx(6.0509e9, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2 | {"activation_function": "relu"}, "activation_function='relu': supported: 'gelu'"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True"),
        (GPT2 | {"n_embd": 1602}, "n_embd=1602 is not a multiple of n_head=25"),
        (
            GPT2 | {"architectures": ["GPTBigCodeForCausalLM"], "multi_query": False},
            "multi_query=False: supported: True",
        ),
        (
            GPTJ | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling={'rope_type': 'linear', 'factor': 2.0}: supported: null or {.*gptj",
        ),
        (GPTJ | {"rotary_dim": 258}, "partial_rotary_factor=1.00"),
        (GPTJ | {"n_embd": 4098}, "n_embd=4098 is not a multiple of n_head=16"),
        (STARCODER2 | {"hidden_act": "silu"}, "hidden_act='silu': supported: 'gelu', 'gelu_new'"),
        (STARCODER2 | {"mlp_type": "gated"}, "mlp_type='gated': supported"),
        (STARCODER2 | {"norm_type": "rms_norm"}, "norm_type='rms_norm': supported"),
    ],
)
def test_what_they_do_not_compute_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config)
