"""Prefills that feed several prompts, each with its own adapter: no bit depends on which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.adapters import ATTENTION, write_adapter
from checkpoints.family_models import FamilyModel
from checkpoints.few_layers import few_layers
from checkpoints.random_models import make
from engines.packed_replies import assert_alike, chunks_of, params_of, prompt_of, replies, same
from engines.small_engine import greedy, open_engine, run
from extent import extent
from graphengine import Engine, NGram, PromptParts

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "prompts_per_prefill": 4,
    "max_batch": 6,
    "prefill_buckets": (8, 64),
}
LENGTHS = (5, 20, 1, 70, 9, 7)
NAMED: list[dict[str, Any]] = [
    {"adapter": name} for name in ("one", None, "two", "one", "two", "one")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, Path(few_layers()), rank=rank, seed=rank)
        for name, rank in (("one", 4), ("two", 3))
    }


def packing(folders: dict[str, Path] | None, **options: Any) -> Engine:
    return open_engine(**OPTIONS | options, **({} if folders is None else {"adapters": folders}))


def prompts() -> list[list[int]]:
    made = [prompt_of(length) for length in LENGTHS]
    # With the same adapter as another that begins alike, and with another adapter.
    made[4], made[5] = made[3][:16] + made[4], made[3][:16] + made[5]
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": True},
        {"lookahead": 0, "speculative": NGram(k=3), "quantize": "int4"},
        *extent([], [{"quantize": "fp8", "lookahead": 2}, {"quantize": "int8"}, {}]),
    ],
    ids=str,
)
def test_no_bit_depends_on_the_adapters_of_others(
    folders: dict[str, Path], options: dict[str, Any]
) -> None:
    assert_alike(lambda: packing(folders, **options), prompts(), options=NAMED, packed=3)


def test_packed_prompts_say_what_they_do_without_packing(folders: dict[str, Path]) -> None:
    params = greedy(6, ignore_eos=True)
    found = []
    for packed in (4, 1):
        with packing(folders, prompts_per_prefill=packed) as engine:
            requests = [
                engine.submit(prompt, params, adapter=own["adapter"])
                for prompt, own in zip(prompts(), NAMED, strict=True)
            ]
            run(engine)
            found.append([request.result().token_ids for request in requests])
            assert (engine.counters["packed_chunks"] >= 3) == (packed > 1)
    assert found[0] == found[1] and len(set(found[0])) >= 3


def test_a_prompt_without_an_adapter_has_the_bits_of_an_engine_without_any(
    folders: dict[str, Path],
) -> None:
    with packing(None) as engine:
        expected = replies(engine, prompts())
    with packing(folders) as engine:
        found = replies(engine, prompts(), NAMED)
        assert engine.counters["packed_chunks"] >= 3
    alike = [same(*each) for each in zip(expected, found, strict=True)]
    assert alike == [own["adapter"] is None for own in NAMED]


def test_prompts_share_blocks_with_those_of_their_adapter(folders: dict[str, Path]) -> None:
    beginning = prompt_of(16)
    made = [beginning + prompt_of(length) for length in (3, 5, 4)]
    named = [{"adapter": name} for name in ("one", "two", "one")]
    with packing(folders, prefix_caching=True) as engine:
        requests = [
            engine.submit(each, params_of(each), **own)
            for each, own in zip(made, named, strict=True)
        ]
        assert chunks_of(engine) == [[(0, 0, 19), (1, 0, 21), (2, 16, 4)]]
        found = [request.result() for request in requests]
    assert [result.cached_tokens for result in found] == [0, 0, 16]
    with packing(folders) as engine:
        pairs = zip(made, named, strict=True)
        expected = [replies(engine, [each], [own])[0][0] for each, own in pairs]
    assert [result.token_ids for result in found] == expected


def test_an_adapter_that_is_loaded_later_is_packed(folders: dict[str, Path]) -> None:
    """In slots for all linears that adapters can change; a slot serves what was loaded last."""
    with packing(folders, max_adapter_rank=4) as engine:
        expected = replies(engine, prompts(), NAMED)
    with packing(None, max_adapters=2, max_adapter_rank=4) as engine:
        engine.load_adapter("two", folders["one"])
        engine.unload_adapter("two")
        for name in ("two", "one"):
            engine.load_adapter(name, folders[name])
        found = replies(engine, prompts(), NAMED)
        assert engine.counters["packed_chunks"] >= 3
    assert all(map(same, expected, found))


def test_adapters_beside_embeddings_and_recorded_experts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    FamilyModel(
        lambda: make("Qwen3Moe", **sizes, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2)
    ).write(tmp_path / "model", 0)
    path = tmp_path / "model"
    named = {
        name: write_adapter(tmp_path / name, path, ATTENTION, rank=4, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    given = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    mixed: list[Any] = [*given[:3], PromptParts(given[0], rows), PromptParts(rows, given[4]), rows]
    own = [each | {"seed": index} for index, each in enumerate(NAMED)]
    options = {"record_routing": True, "prompt_embeds": True, "path": path}
    assert_alike(lambda: packing(named, **options), mixed, options=own, packed=4)
