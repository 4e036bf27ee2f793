"""Families of dense decoders with a switch of their own, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from checkpoints.small_decoders import composed
from engines.family_checks import assert_replies, assert_same_in_any_company
from extent import extent
from graphengine import Engine
from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_model
from graphengine.models.composition import windows_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.launches import Share
from graphengine.models.splitting.rank_cuts import cut_to
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.splitting.stages import of_stage

NAMES = (
    *("gemma2", "gemma2-types", "olmo2", "olmo3", "phi3", "phi3-96", "smollm3", "smollm3-marked"),
    *(
        "cohere2",
        "cohere2-types",
        "gpt2",
        "gpt2-plain",
        "gpt-neox",
        "gpt-neox-serial",
        "starcoder2",
        "starcoder2-plain",
        "phi",
        "phi-tied",
        "gpt-bigcode",
        "gptj",
    ),
)
PROMPT_LENGTHS = (1, 75)
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 5,
}


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(
    dense_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = dense_checkpoints[name]
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        assert_replies(engine, oracle, eager, PROMPT_LENGTHS)


# In a short run those whose blocks another one has, too, come only one by one: phi3's windows are
# gemma2's, phi's parallel sublayers gpt-neox's, and gpt-bigcode's positions gpt2's.
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "olmo3", "smollm3-marked", "starcoder2", "gpt2", "gpt-neox"),
        *("cohere2-types", "gptj", *extent((), ("phi3", "phi", "gpt-bigcode"))),
    ],
)
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    dense_checkpoints: dict[str, Any], device: str, name: str
) -> None:
    oracle = dense_checkpoints[name]
    assert_same_in_any_company(partial(open_engine, oracle, device=device), oracle)


def nope_layers(config: Any) -> list[int]:
    layers = composed(config).layers
    return [index for index, (first, _) in enumerate(layers) if first.block.nope]


def test_layers_without_rope(dense_checkpoints: dict[str, Any], edited: Callable[..., Any]) -> None:
    path = dense_checkpoints["smollm3"].path
    model = read_model(Checkpoint.open(path))
    assert nope_layers(model) == [3]
    stage = of_stage(model, Share(1, 2))
    assert nope_layers(stage) == [3 - (5 - stage.num_layers)]
    for marks, interval, expected in (
        (None, 2, [1, 3]),
        ([1, 0, 1, 1, 0, 0], 4, [1, 4]),
        ([1] * 5, 4, []),
    ):
        config = {"no_rope_layers": marks, "no_rope_layer_interval": interval}
        found = read_model(Checkpoint.open(edited(path, config=config)))
        assert nope_layers(found) == expected
    # Their tables are another pair.
    assert model.table_bytes(64) == 2 * read_model(
        Checkpoint.open(edited(path, config={"no_rope_layers": [1] * 5}))
    ).table_bytes(64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\].*a value for each of 5 layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        ({"no_rope_layers": [1, 2, 1, 1, 1]}, "no_rope_layers"),
        (WINDOWS, "use_sliding_window=True"),
    ],
)
def test_refused_configs_of_smollm3(
    dense_checkpoints: dict[str, Any], edited: Callable[..., Any], config: Any, message: str
) -> None:
    path = edited(dense_checkpoints["smollm3"].path, config=config)
    with pytest.raises(ValueError, match=message):
        read_model(Checkpoint.open(path))


OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100278,
}  # fmt: skip
"""The keys of Olmo-3-7B-Instruct."""


def test_olmo_3_as_it_is_published() -> None:
    """Layers with a window do not scale RoPE."""
    assert unknown_keys(OLMO3) == []
    model = composed(read_model_config(OLMO3))
    assert windows_of(model) == (4096, 4096, 4096, 0) * 8
    assert model.rope and model.rope.kind == "yarn" and model.rope.theta == 5e5
    assert model.local_rope == RopeConfig(theta=5e5)
    every = composed(read_model_config(OLMO3 | {"layer_types": ["full_attention"] * 32}))
    assert not any(windows_of(every)) and every.local_rope is None
    types = ["full_attention", *["sliding_attention"] * 31]
    told = composed(read_model_config(OLMO3 | {"layer_types": types}))
    assert windows_of(told) == (0, *[4096] * 31)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": False}, "use_sliding_window=False: supported: null or True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters=.*: RoPE under 'full_atten"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ],
)
def test_what_olmo_3_does_not_compute_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(OLMO3 | changes)


def test_norms_of_whole_rows_are_on_one_rank(dense_checkpoints: dict[str, Any]) -> None:
    model = read_model(Checkpoint.open(dense_checkpoints["olmo2"].path))
    with pytest.raises(ValueError, match="tensor_parallel=3 does not split the norms of all 3 he"):
        of_rank(model, Share(0, 3))
    # A stage that is not the last ends without a norm.
    assert composed(of_stage(model, Share(0, 2))).final_norm_name == ""


def test_ranks_cut_fused_linears_piece_by_piece(dense_checkpoints: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(dense_checkpoints["phi3"].path)
    model = read_model(checkpoint)
    assert isinstance(model, DecoderConfig)
    whole = model.allocate(device="cpu", dtype=torch.float32)
    checkpoint.load(destinations(checkpoint, whole))
    attention, mlp = whole.layers[0].attention, whole.layers[0].mlp
    assert isinstance(attention, AttentionWeights) and isinstance(mlp, SwigluWeights)
    sizes = [attention.block.q_size, attention.block.kv_size, attention.block.kv_size]
    meta = model.allocate(device="meta", dtype=torch.float32)
    for rank in range(2):
        config = of_rank(model, Share(rank, 2))
        assert isinstance(config, DecoderConfig)
        part = config.allocate(device="cpu", dtype=torch.float32)
        cut = cut_to(checkpoint, meta, part, Share(rank, 2))
        cut.load(destinations(cut, part))
        layer = part.layers[0]
        rows = [each.chunk(2)[rank] for each in attention.qkv.split(sizes)]
        assert torch.equal(layer.attention.qkv, torch.cat(rows))
        rows = [each.chunk(2)[rank] for each in mlp.gate_up.chunk(2)]
        assert torch.equal(layer.mlp.gate_up, torch.cat(rows))
