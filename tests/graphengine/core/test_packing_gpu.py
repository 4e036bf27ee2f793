"""Prefills that feed several prompts on a Hopper GPU: no bit depends on which.

Chunks have from 1 to 256 tokens, for which kernels have tiles of all sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from checkpoints.adapters import write_adapter
from checkpoints.family_models import FamilyModel
from checkpoints.few_layers import HEAD_LAYERS, block_drafter, eagle3_head, few_layers
from checkpoints.hybrids import A, C, F, M, granite, lfm2, nemotron, qwen
from checkpoints.random_models import make
from checkpoints.tower_models import GRIDS, SEEN
from checkpoints.vanilla_modules import write_agreeing
from engines.packed_replies import assert_alike, prompt_of, replies, same
from engines.small_engine import open_engine
from graphengine import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    Engine,
    GridEmbeds,
    ImageEmbeds,
    NGram,
    PromptParts,
    RelaxedAcceptance,
)
from graphengine.demo import checkpoint_path
from graphengine.speculative import Feed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

DEVICE = "cuda"
LENGTHS = (5, 100, 1, 40, 9, 64, 30)
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
}
EXPERTS = {
    "Qwen3Moe": SIZES | {"moe_intermediate_size": 384, "num_experts": 8},
    "GptOss": SIZES | {"num_local_experts": 8, "sliding_window": 19},
}
LATENTS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 384,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 384}
RECURRENT: dict[str, Callable[[], PreTrainedModel]] = {
    "delta rule": lambda: qwen(
        [M, A, M], **WIDE, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
    ),
    "Mamba2": lambda: granite(
        [M, A, M], hidden_size=512, shared_intermediate_size=384, mamba_n_heads=16,
        mamba_d_head=32, mamba_d_state=64, mamba_expand=1, mamba_n_groups=1,
    ),
    "Mamba2 in groups": lambda: nemotron(
        [M, F, A, M], **WIDE, mamba_num_heads=16, mamba_head_dim=32, n_groups=2, ssm_state_size=64,
    ),
    "short convolutions": lambda: lfm2([C, A, C], **WIDE),
}  # fmt: skip


def packing(path: Path | None = None, **options: Any) -> Engine:
    usual = {"device": DEVICE, "dtype": "bfloat16", "prompts_per_prefill": 4, "max_batch": 7}
    sizes = {"max_seq_len": 256, "prefill_buckets": (16, 64, 256)}
    return open_engine(path, **usual | sizes | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantize": "int4"},
        {"quantize": "int8", "quantize_lm_head": True},
        {"quantize": "fp8", "activations": "fp8"},
        {"speculative": NGram(k=3), "prefix_caching": True},
        {"speculative": MTP(k=3), "prefix_caching": True},
        {"speculative": MTP(tree=[[0], [1], [0, 0]])},
        {"speculative": MTP(k=3, min_confidence=0.2), "quantize": "int4"},
        {"speculative": Eagle3(eagle3_head(), k=3, layers=HEAD_LAYERS)},
        {"speculative": DFlash(block_drafter(), k=7)},
        {"speculative": DraftModel(checkpoint_path(), k=2)},
        {
            "speculative": MTP(k=2),
            "relaxed_acceptance": RelaxedAcceptance(begin_token_ids=[5], end_token_ids=[6]),
        },
    ],
    ids=str,
)
def test_the_demo_model(options: dict[str, Any]) -> None:
    assert_alike(lambda: packing(**options), [prompt_of(length) for length in LENGTHS], packed=3)


@pytest.mark.parametrize("feed", ["chained", "target"])
def test_several_draft_modules(feed: Feed, tmp_path: Path) -> None:
    mode = MTP(k=3, style="vanilla", feed=feed)
    prompts = [prompt_of(length, vocabulary=97) for length in LENGTHS]
    path = write_agreeing(tmp_path)
    assert_alike(lambda: packing(path, speculative=mode), prompts, packed=3)


@pytest.mark.parametrize("quantize", [None, "int4", "fp8"])
@pytest.mark.parametrize("family", EXPERTS)
def test_models_with_experts(family: str, quantize: str | None, tmp_path: Path) -> None:
    FamilyModel(lambda: make(family, **EXPERTS[family])).write(tmp_path, 0)
    prompts = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    assert_alike(lambda: packing(tmp_path, quantize=quantize), prompts, packed=3)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_records_of_experts(quantize: str | None, tmp_path: Path) -> None:
    """Each prompt's record is the same; a request that replays its record gives the same."""
    FamilyModel(lambda: make("Qwen3Moe", **EXPERTS["Qwen3Moe"])).write(tmp_path, 0)
    prompts = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    options = {"record_routing": True, "quantize": quantize}
    with packing(tmp_path, **options) as engine:
        free = replies(engine, prompts)
        own = [{"routing": bits[-1].numpy()} for _, bits in free]
        replayed = replies(engine, prompts, own)
    assert all(map(same, free, replayed))
    own[1] = {}
    assert_alike(lambda: packing(tmp_path, **options), prompts, options=own, packed=3)


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)) * 0.3


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_vl"])
def test_prompts_with_embeddings(family: str, quantize: str | None, tmp_path: Path) -> None:
    """Beside tokens; images that see each other; grids with features of several levels."""

    def whole(count: int) -> Any:
        if family == "gemma3":
            return ImageEmbeds(rows(count, width))
        if family == "llama":
            return rows(count, width)
        features = torch.stack([rows(count + 1 + level, width)[1 + level :] for level in range(2)])
        return GridEmbeds(rows(count, width), (1, 2, count // 2), deepstack=features)

    path, prompts = None, [prompt_of(length, vocabulary=250) for length in LENGTHS]
    if family != "llama":
        path = tmp_path
        FamilyModel(lambda: (SEEN | GRIDS)[family](intermediate_size=384)).write(path, 0)
    options = {"prompt_embeds": True, "quantize": quantize}
    with packing(path, **options) as engine:
        width = engine.model.config.hidden_size
    given: list[Any] = [*prompts]
    for index, count in ((0, 8), (1, 40), (3, 24), (4, 6), (6, 12)):
        given[index] = PromptParts(prompts[index], whole(count), prompts[0])
    seeds = [{"seed": index} for index in range(len(given))]
    assert_alike(lambda: packing(path, **options), given, options=seeds, packed=3)


@pytest.mark.parametrize(
    "options", [{}, {"prefix_caching": True}, {"quantize": "int4"}, {"quantize": "fp8"}], ids=str
)
def test_prompts_with_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    """Each prompt has its own, or none; prompts begin alike."""
    folders = {
        name: write_adapter(tmp_path / name, Path(few_layers()), rank=rank, seed=rank)
        for name, rank in (("one", 8), ("two", 5))
    }
    prompts = [prompt_of(length) for length in LENGTHS]
    prompts = [*prompts[:3], *(prompts[1][:32] + prompt for prompt in prompts[3:])]
    names = ("one", None, "two", "one", "two", "one", None)
    own = [{"adapter": name} for name in names]
    assert_alike(lambda: packing(adapters=folders, **options), prompts, options=own, packed=3)


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize(("family", "q_rank"), [("DeepseekV2", None), ("Glm4MoeLite", 256)])
def test_models_with_latents(
    family: str, q_rank: int | None, quantize: str | None, tmp_path: Path
) -> None:
    FamilyModel(lambda: make(family, **LATENTS, q_lora_rank=q_rank)).write(tmp_path, 0)
    prompts = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    assert_alike(lambda: packing(tmp_path, quantize=quantize), prompts, packed=3)


@pytest.mark.parametrize("options", [{"lookahead": 0}, {"quantize": "int4"}], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_models_with_recurrent_layers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    FamilyModel(RECURRENT[name]).write(tmp_path, 0)
    prompts = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    assert_alike(lambda: packing(tmp_path, **options), prompts, packed=3)
