"""MTP against transformers' `MtpModel`, which chains its modules: drafts and caches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.mtp_chains import DELTA_KINDS, HAS_CHAINS, LAYERS, TOLERANCE, VOCAB, Chains
from engines.small_engine import greedy
from engines.speculation import ENDLESS, open_speculating
from extent import extent
from graphengine import Engine, Request
from graphengine.drafters.mtp.layer import MtpWeights
from graphengine.models.blocks.mla import LatentAttentionWeights
from graphengine.speculative import MTP

pytestmark = pytest.mark.skipif(
    not HAS_CHAINS, reason="this version of transformers cannot run one module by itself"
)

BLOCK = 8


def values_of(engine: Engine, request: Request, module: int, length: int) -> torch.Tensor:
    """[G, T, D] of a module's cache, or latents [1, T, R]. Keys are not compared: transformers
    turns those of module m by m positions more, its queries too.
    """
    kv, table = (
        engine.runtime.caches[1][0][module],
        engine.runtime.buffers["block_table"][request.job.placed.slot],
    )
    position = torch.arange(length)
    entries = kv[table[position // BLOCK].long(), -1, position % BLOCK]
    weights = engine.runtime.program.drafter.weights
    assert isinstance(weights, MtpWeights)
    attention = weights.modules[module].layer.attention
    if isinstance(attention, LatentAttentionWeights):
        return entries[None, :, : attention.block.kv_rank]
    return entries.transpose(0, 1)


def follow(engine: Engine, chains: Chains, request: Request, *, eagle: bool) -> set[int]:
    """Step to the request's end; after each step its drafts and caches are transformers'.

    Returns how many tokens steps had.
    """
    counts = set()
    while not request.finished:
        before = len(request.token_ids)
        engine.step()
        count = len(request.token_ids) - before
        if request.finished or not count:
            continue
        sequence = [*request.prompt_token_ids, *request.token_ids]
        drafts = engine.runtime.buffers["draft_tokens"][request.job.placed.slot].tolist()
        for module, expected in enumerate(chains.check(sequence, drafts, eagle=eagle)):
            known = len(sequence) - 1
            found, expected = values_of(engine, request, module, known), expected[:, :known]
            error = (found - expected).abs().amax(dim=(0, 2)) / expected.abs().max()
            assert error.max() <= TOLERANCE, f"{module=} {len(sequence)=} {error=}"
        counts.add(count)
    return counts


@pytest.mark.parametrize(
    ("kind", "style", "k"),
    extent(
        # Each kind of layer, and both styles of those that have states.
        [
            ("llama", "vanilla", 1),
            ("llama", "vanilla", 3),
            ("qwen3", "eagle", 3),
            ("qwen3-windows", "vanilla", 2),
            ("qwen3.5", "vanilla", 2),
            ("qwen3.5", "eagle", 3),
            ("qwen3-moe", "vanilla", 2),
            ("deepseek-v3", "eagle", 3),
            ("glm4-moe", "vanilla", 1),
            ("glm4-moe-lite", "eagle", 3),
            ("qwen3-next", "eagle", 2),
        ],
        [
            ("llama", "vanilla", 1),
            ("llama", "vanilla", 2),
            ("llama", "vanilla", 3),
            ("qwen3", "vanilla", 2),
            ("qwen3", "vanilla", 3),
            ("qwen3", "eagle", 3),
            ("qwen3-windows", "vanilla", 2),
            ("qwen3-windows", "eagle", 3),
            ("qwen3.5", "vanilla", 2),
            ("qwen3.5", "eagle", 3),
            ("qwen3-moe", "vanilla", 2),
            ("qwen3-moe", "eagle", 3),
            ("deepseek-v3", "vanilla", 3),
            ("deepseek-v3", "eagle", 3),
            ("glm4-moe", "vanilla", 1),
            ("glm4-moe", "eagle", 3),
            ("glm4-moe-lite", "vanilla", 1),
            ("glm4-moe-lite", "eagle", 3),
            ("qwen3-next", "vanilla", 2),
            ("qwen3-next", "eagle", 3),
            ("qwen3.5-moe", "eagle", 3),
        ],
    ),
)
def test_drafts_and_caches_are_those_of_transformers(
    tmp_path: Path, kind: str, style: Any, k: int
) -> None:
    """Prompts of one token, of several chunks, and with a prefix that is there already; steps that
    accept nothing, and steps that accept several drafts, or the one.
    """
    eagle = style == "eagle"
    # What lies before every window need not be kept for others; states are, where a chunk ends.
    shares = kind != "qwen3-windows"
    cached = 16 if kind in DELTA_KINDS else 3 * BLOCK
    chains = Chains(tmp_path, kind, 1 if eagle else k)
    prompt = torch.randint(VOCAB, (4 * BLOCK,), generator=torch.Generator().manual_seed(k))
    tokens: list[int] = prompt.tolist()
    options: dict[str, Any] = {"max_batch": 2, "max_seq_len": 96, "block_size": BLOCK,
                               "prefill_buckets": (4, 16), "lookahead": 0, "device": "cpu",
                               "dtype": "float32", "prefix_caching": shares}  # fmt: skip
    counts = set()
    with open_speculating(MTP(k, style=style), chains.path, **options) as engine:
        for asked in (tokens[:1], tokens[:29], [*tokens[:27], 3, 4]):
            request = engine.submit(asked, greedy(16, **ENDLESS))
            counts |= follow(engine, chains, request, eagle=eagle)
        assert request.cached_tokens == (cached if shares else 0)
    assert 1 in counts and max(counts) > min(k, 2), f"{counts}"


NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Of DeepSeek-V3's layout, and of Qwen3-Next's; all else belongs to its layer."""


def as_published(folder: Path, tensors: dict[str, torch.Tensor], *, stacked: bool) -> None:
    """Rename the module to what Qwen3-Next's checkpoints call it, and maybe stack its experts."""
    prefix = f"model.layers.{LAYERS}."
    below = {
        name.removeprefix(prefix).removesuffix(".weight"): tensors.pop(name)
        for name in [*tensors]
        if name.startswith(prefix)
    }
    if stacked:
        parts = {part: [below.pop(f"mlp.experts.{index}.{part}_proj") for index in range(5)]
                 for part in ("gate", "up", "down")}  # fmt: skip
        pairs = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.stack(pairs)
        tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack(parts["down"])
    for name, tensor in below.items():
        own = NAMES.get(name, f"layers.0.{name}")
        tensors[f"mtp.{own}.weight"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_modules_of_qwen3_next_as_they_are_published(tmp_path: Path) -> None:
    """In their own layout, with experts in one tensor each or all in two."""
    chains = Chains(tmp_path, "qwen3-next", 1)
    prompts = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(3)).tolist()

    def drafted() -> tuple[Any, ...]:
        sizes = {"max_batch": 2, "max_seq_len": 96, "device": "cpu", "dtype": "float32"}
        with open_speculating(MTP(2), tmp_path, **sizes) as engine:
            said = [each.token_ids for each in engine.generate(prompts, greedy(24, **ENDLESS))]
            return said, engine.acceptance.proposed, engine.acceptance.accepted

    expected = drafted()
    assert expected[2] > 0.2 * expected[1]
    tensors = load_file(chains.path / "model.safetensors")
    for stacked in (False, True):
        as_published(tmp_path, dict(tensors), stacked=stacked)
        assert drafted() == expected


@pytest.mark.parametrize(("style", "k", "kept"), [("eagle", 3, 34), ("vanilla", 2, 16)])
def test_a_session_of_a_hybrid_has_the_entries_of_modules(
    tmp_path: Path, style: Any, k: int, kept: int
) -> None:
    """They are copied with the block where a turn ended. A module that sees two tokens more has no
    entry there yet: its next turn begins where a chunk ended.
    """
    eagle = style == "eagle"
    chains = Chains(tmp_path, "qwen3.5", 1 if eagle else k)
    generator = torch.Generator().manual_seed(k)
    first, second = (torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (19, 5))
    options: dict[str, Any] = {"max_batch": 2, "max_seq_len": 96, "block_size": BLOCK,
                               "prefill_buckets": (4, 16), "lookahead": 0, "device": "cpu",
                               "dtype": "float32"}  # fmt: skip
    with (
        open_speculating(MTP(k, style=style), chains.path, **options) as engine,
        engine.session() as session,
    ):
        for appended, cached in ((first, 0), (second, kept)):
            session.append(appended)
            request = session.submit(greedy(16, **ENDLESS))
            follow(engine, chains, request, eagle=eagle)
            assert request.cached_tokens == cached


def write_beside_a_tower(chains: Chains, folder: Path) -> None:
    """The checkpoint as Qwen3.5 is published: `text_config`, other prefixes, the layout qwen3."""
    text = json.loads((chains.path / "config.json").read_text())
    del text["num_nextn_predict_layers"]
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text | {"mtp_num_hidden_layers": 1},
        "tie_word_embeddings": False,
    }
    of_module = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    tensors = {"model.visual.patch_embed.proj.weight": torch.zeros(3, 4)}
    for name, tensor in load_file(chains.path / "model.safetensors").items():
        _, found, rest = name.partition(f"model.layers.{LAYERS}.")
        if found:
            stem = rest.removesuffix(".weight")
            name = f"mtp.{of_module.get(stem, f'layers.0.{stem}')}.weight"
        tensors[re.sub(r"^model\.(?!visual)", "model.language_model.", name)] = tensor
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_module_of_a_language_model_beside_a_vision_tower(tmp_path: Path) -> None:
    chains = Chains(tmp_path / "text", "qwen3.5", 1)
    write_beside_a_tower(chains, tmp_path / "published")
    options: dict[str, Any] = {"max_batch": 1, "max_seq_len": 96, "block_size": BLOCK,
                               "prefill_buckets": (16,), "lookahead": 0, "device": "cpu",
                               "dtype": "float32"}  # fmt: skip
    with open_speculating(MTP(3), tmp_path / "published", **options) as engine:
        request = engine.submit([5, 3, 8], greedy(16, **ENDLESS))
        assert max(follow(engine, chains, request, eagle=True)) > 1
