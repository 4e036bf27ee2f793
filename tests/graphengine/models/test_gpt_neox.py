"""GPT-NeoX: fused queries, keys and values of each head, blocks side by side, its config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.small_decoders import block_in, composed
from engines.family_checks import assert_rewinds
from graphengine import Engine, SamplingParams
from graphengine.config import RoundedKind
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_model
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.launches import Share
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.splitting.rank_cuts import cut_to
from graphengine.models.splitting.rank_sizes import of_rank


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


def test_sessions_rewind(dense_checkpoints: dict[str, Any], device: str) -> None:
    with open_engine(dense_checkpoints["gpt-neox"].path, device=device) as engine:
        assert_rewinds(engine, dense_checkpoints["gpt-neox"])


def test_new_weights(dense_checkpoints: dict[str, Any], device: str) -> None:
    """By the names that transformers gives them."""
    path = dense_checkpoints["gpt-neox"].path
    prompts = dense_checkpoints["gpt-neox"].prompts((9, 40))
    stored = stored_tensors(path)
    fused = "gpt_neox.layers.1.attention.query_key_value.weight"
    with open_engine(path, device=device) as engine:
        before = [each.token_ids for each in engine.generate(prompts, greedy())]
        engine.update_weights({fused: stored[fused].flip(0)})
        between = [each.token_ids for each in engine.generate(prompts, greedy())]
        engine.update_weights(stored)
        after = [each.token_ids for each in engine.generate(prompts, greedy())]
        with pytest.raises(
            ValueError, match=r"q_proj\.weight has shape \[3, 96\], not \[288, 96\]"
        ):
            engine.update_weights({fused: stored[fused][:3]})
    assert after == before != between


@pytest.mark.parametrize("kind", ["int8"])
def test_rounded_weights(
    tmp_path: Path,
    write_model: Callable[..., Any],
    eager: Callable[[Engine], Any],
    kind: RoundedKind,
) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.GPTNeoXConfig(vocab_size=263, num_attention_heads=2, **sizes)
    oracle = write_model(lambda: transformers.GPTNeoXForCausalLM(config), tmp_path / "neox", 3)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if ("dense" in name or "query_key_value" in name) and weight.ndim == 2:
                weight.copy_(dequantise(quantise(weight, KIND_FORMATS[kind])))
    with open_engine(oracle.path, device="cpu", quantize=kind, lookahead=0) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            oracle.assert_logits(engine.generate(prompt, greedy(12)), seen)


def test_ranks_cut_heads_of_fused_linears(dense_checkpoints: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(dense_checkpoints["gpt-neox"].path)
    model = composed(read_model(checkpoint))
    whole = model.allocate(device="cpu", dtype=torch.float32)
    checkpoint.load(destinations(checkpoint, whole))
    meta = model.allocate(device="meta", dtype=torch.float32)
    attention = whole.layers[2].sublayers[0].block
    assert isinstance(attention, AttentionWeights) and attention.qkv_bias is not None
    assert isinstance(attention.qkv, torch.Tensor)
    for rank in range(3):
        part = composed(of_rank(model, Share(rank, 3))).allocate(device="cpu", dtype=torch.float32)
        cut = cut_to(checkpoint, meta, part, Share(rank, 3))
        cut.load(destinations(cut, part))
        own = part.layers[2].sublayers[0].block
        assert isinstance(own, AttentionWeights) and own.qkv_bias is not None
        assert isinstance(own.qkv, torch.Tensor)
        for held, of_all in ((own.qkv, attention.qkv), (own.qkv_bias, attention.qkv_bias)):
            assert torch.equal(held, torch.cat([each.chunk(3)[rank] for each in of_all.chunk(3)]))


def test_rows_that_are_not_those_of_the_heads(
    dense_checkpoints: dict[str, Any], edited: Callable[..., Path]
) -> None:
    path = edited(dense_checkpoints["gpt-neox"].path, config={"num_attention_heads": 5})
    with pytest.raises(ValueError, match=r"shape \[288(, 96)?\]: 5 key heads have 57 rows each"):
        Checkpoint.open(path)


PYTHIA: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 16,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True,
    "vocab_size": 50304,
}  # fmt: skip
"""The keys of Pythia 1B."""


def test_a_config_as_it_is_published() -> None:
    assert unknown_keys(PYTHIA) == []
    model = composed(read_model_config(PYTHIA))
    attention = block_in(model, GroupedQueryAttention)
    assert (attention.head_dim, attention.rotated, attention.num_kv_heads) == (256, 0.25, 8)
    assert attention.qkv_bias and attention.output_bias and not model.tie_embeddings
    assert model.rope and (model.rope.theta, model.rope.rotated) == (1e4, 0.25)
    assert [each.parallel for each in model.layers[0]] == [False, True]
    # As transformers writes it since version 5.
    written = {name: value for name, value in PYTHIA.items() if not name.startswith("rotary")}
    written["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25
    }  # fmt: skip
    assert read_model_config(written) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu': supported: 'gelu', 'gelu_new'"),
        ({"rotary_pct": 0.3}, "partial_rotary_factor=0.3: supported"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(PYTHIA | changes)
