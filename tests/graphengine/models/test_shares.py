"""What one rank of several reads of a checkpoint, and models that no ranks can split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.small_decoders import small_decoder
from checkpoints.toy_family import CONFIG as TOY
from checkpoints.toy_family import read_config
from graphengine.kernels.experts.router import Router
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.contract import ModelConfig, ModelWeights
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.gpt_oss import NAMES
from graphengine.models.launches import Share
from graphengine.models.splitting.rank_cuts import cut_to
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.sublayers import FeedForward

EXPERTS = Experts(hidden_size=6, ffn_size=4, experts=3, router=Router(top_k=2), norm_eps=1e-5)
ATTENTION = GroupedQueryAttention(
    hidden_size=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    qkv_bias=True,
    output_bias=True,
    qk_norm=True,
)
MLP = Swiglu(hidden_size=6, ffn_size=8, norm_eps=1e-5, bias=True)


def decoder(
    *feed_forwards: FeedForward, attention: GroupedQueryAttention = ATTENTION
) -> DecoderConfig:
    return small_decoder(attention, feed_forwards, vocab_size=10, max_positions=32)


CONFIG = decoder(MLP, MLP)


def meta(config: ModelConfig) -> ModelWeights:
    return config.allocate(device="meta", dtype=torch.float32)


def rows_of(config: ModelConfig) -> dict[str, Tensor]:
    """Random tensors for a checkpoint of this model."""
    generator = torch.Generator().manual_seed(1)
    named = meta(config).named()
    return {name: torch.randn(each.shape, generator=generator) for name, each in named.items()}


def opened(path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return Checkpoint.open(path)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_have_the_parts_of_a_whole(tmp_path: Path, ranks: int) -> None:
    """Each its own rows of queries, gates and ups and columns after them, and KV heads together."""
    tensors = rows_of(CONFIG)
    checkpoint = opened(tmp_path, tensors)
    config, stored = of_rank(CONFIG, Share(0, ranks)), meta(CONFIG).stored()
    parts: list[dict[str, Tensor]] = []
    for rank in range(ranks):
        weights = config.allocate(device="cpu", dtype=torch.float32)
        part = cut_to(checkpoint, meta(CONFIG), weights, Share(rank, ranks))
        assert not part.load(weights.named())
        parts.append(weights.named())
        assert ranks == 1 or weights.nbytes < meta(CONFIG).nbytes
    for name, whole in tensors.items():
        found = [part[name] for part in parts]
        axis = stored[name].axis
        if axis is None:
            assert all(torch.equal(each, whole) for each in found), name
            continue
        if ".k_proj" in name or ".v_proj" in name:
            # Each head is on as many ranks as share it.
            found = found[:: max(1, ranks // ATTENTION.num_kv_heads)]
            for rank, part in enumerate(parts):
                head = rank * ATTENTION.num_kv_heads // ranks
                rows = whole[head * ATTENTION.head_dim :][: ATTENTION.head_dim]
                assert torch.equal(part[name][: ATTENTION.head_dim], rows)
        assert torch.equal(torch.cat(found, axis), whole), name


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (CONFIG, 3, "tensor_parallel=3 does not divide the 8 attention heads"),
        (
            decoder(replace(MLP, ffn_size=6)),
            4,
            "tensor_parallel=4 does not divide the 6 ffn columns",
        ),
        (
            decoder(MLP, attention=replace(ATTENTION, num_heads=12, num_kv_heads=6)),
            4,
            "tensor_parallel=4 neither divides the 6 KV heads nor is a multiple of them",
        ),
        (
            read_config(TOY, "Toy"),
            2,
            "tensor_parallel=2 is for models whose layers have attention, recurrent heads or "
            "channels, and feed-forwards, which this Toy has not",
        ),
        (
            decoder(MLP, replace(EXPERTS, ffn_size=10)),
            4,
            "tensor_parallel=4 does not divide the 10 ffn columns of an expert",
        ),
        (
            decoder(
                MLP,
                replace(EXPERTS, shared=Swiglu(hidden_size=6, ffn_size=6, norm_eps=1e-5, role="s")),
            ),
            4,
            "tensor_parallel=4 does not divide the 6 ffn columns of the shared experts",
        ),
    ],
    ids=["heads", "ffn", "kv heads", "family", "experts", "shared experts"],
)
def test_models_that_ranks_cannot_split(config: ModelConfig, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_rank(config, Share(0, ranks))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG, "expert_parallel=True, but no layer of this LlamaForCausalLM has experts"),
        (
            decoder(MLP, EXPERTS),
            "tensor_parallel=2 does not divide the 3 experts of a layer",
        ),
    ],
)
def test_experts_that_ranks_cannot_share(config: DecoderConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_rank(config, Share(0, 2), expert_parallel=True)


@pytest.mark.parametrize("stacked", [False, True])
def test_ranks_have_whole_experts(tmp_path: Path, stacked: bool) -> None:
    experts = replace(EXPERTS, experts=4, bias=stacked)
    experts = replace(experts, names=NAMES if stacked else experts.names)
    config = decoder(experts, experts)
    tensors = rows_of(config)
    checkpoint = opened(tmp_path, tensors)
    whole = config.allocate(device="cpu", dtype=torch.float32)
    assert not checkpoint.load(whole.named())
    for rank in range(2):
        share = Share(rank, 2)
        weights = of_rank(config, share, expert_parallel=True).allocate(
            device="cpu", dtype=torch.float32
        )
        cut = cut_to(checkpoint, meta(config), weights, share)
        others = cut.load(weights.named())
        assert len(others) == (0 if stacked else 2 * 2 * 3)
        for layer, of_all in zip(weights.layers, whole.layers, strict=True):
            for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
                part, every = getattr(layer.mlp, name), getattr(of_all.mlp, name)
                assert (part is None) == (every is None)
                assert part is None or torch.equal(part, every[2 * rank :][:2]), name
