"""Prefills that feed several prompts, some with embeddings: no bit depends on which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.family_models import FamilyModel
from checkpoints.tower_models import GRIDS, SEEN
from engines.packed_replies import (
    assert_alike,
    chunks_of,
    params_of,
    prompt_of,
    replies,
    same,
    without_embeds,
)
from engines.small_engine import open_engine
from extent import extent
from graphengine import MTP, Engine, GridEmbeds, ImageEmbeds, NGram, PromptParts

OPTIONS = {"device": "cpu", "dtype": "float32", "prompts_per_prefill": 4, "max_batch": 6}
VOCABULARY = 250


def packing(path: Path | None = None, **options: Any) -> Engine:
    return without_embeds(open_engine(path, **OPTIONS | {"prompt_embeds": True} | options))


def ids(length: int, seed: int = 0) -> list[int]:
    return prompt_of(length, seed, vocabulary=VOCABULARY)


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * count + seed)
    return torch.randn(count, width, generator=drawn) * 0.3


def seeds(prompts: list[Any]) -> list[dict[str, Any]]:
    return [{"seed": index} for index in range(len(prompts))]


def mixed(width: int) -> list[Any]:
    """Embeddings alone, first, last, between tokens, over the end of a chunk, in several runs; and
    tokens alone.
    """
    return [
        PromptParts(ids(2), rows(3, width), ids(1)),
        ids(9),
        rows(5, width),
        PromptParts(ids(1), rows(1, width), ids(3), rows(2, width)),
        PromptParts(ids(30), rows(7, width), ids(4)),
        PromptParts(rows(5, width), ids(5)),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": True},
        {"lookahead": 0, "speculative": NGram(k=3)},
        # The module reads the embedding after each chunk's last position, too.
        {"speculative": MTP(k=3)},
    ],
    ids=str,
)
def test_no_bit_depends_on_what_embeddings_are_packed_with(options: dict[str, Any]) -> None:
    with packing() as engine:
        prompts = mixed(engine.model.config.hidden_size)
    assert_alike(lambda: packing(**options), prompts, options=seeds(prompts), packed=3)


def test_prompts_with_embeddings_pause() -> None:
    with packing() as engine:
        prompts = mixed(engine.model.config.hidden_size)
    options = [each | {"tokens": 24} for each in seeds(prompts)]
    pool = {"lookahead": 2, "kv_blocks": 14, "swap_blocks": 40}
    assert_alike(lambda: packing(**pool), prompts, options=options, packed=3, pauses=2)


def test_embeddings_of_tokens_say_what_the_tokens_do() -> None:
    """Also in the last row of a prompt that ends where the next prompt's embeddings begin."""
    prompts = [ids(length) for length in (6, 10, 7, 40)]
    spans = ((3, 6), (0, 10), (2, 5), (29, 36))
    with packing() as engine:
        table = engine.runtime.model.weights.embedding
        given = [
            PromptParts(prompt[:first], table[torch.tensor(prompt[first:stop])], prompt[stop:])
            for prompt, (first, stop) in zip(prompts, spans, strict=True)
        ]
        expected = replies(engine, prompts, seeds(prompts))
        packed = engine.counters["packed_chunks"]
        found = replies(engine, given, seeds(prompts))
        assert engine.counters["packed_chunks"] == 2 * packed >= 4
    assert all(map(same, expected, found))


def test_prompts_of_one_replay_share_embeddings() -> None:
    with packing() as engine:
        width = engine.model.config.hidden_size
        shared = rows(16, width)
        prompts = [PromptParts(shared, ids(3)), PromptParts(shared, rows(5, width))]
        expected = [engine.generate(each, params_of(each, seed=3)).token_ids for each in prompts]
    with packing(prefix_caching=True) as engine:
        requests = [engine.submit(each, params_of(each, seed=3)) for each in prompts]
        assert chunks_of(engine) == [[(0, 0, 19), (1, 16, 5)]]
        results = [request.result() for request in requests]
    assert [result.cached_tokens for result in results] == [0, 16]
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize("name", extent(["gemma3"], [*SEEN]))
def test_images_that_see_each_other(name: str, tmp_path: Path) -> None:
    """A chunk ends before an image that it cannot hold, whatever else the replay feeds."""
    FamilyModel(SEEN[name]).write(tmp_path, 0)
    with packing(tmp_path) as engine:
        width = engine.model.config.hidden_size
    prompts = [
        PromptParts(ids(4), ImageEmbeds(rows(9, width)), ids(3)),
        ids(5),
        PromptParts(ids(20), ImageEmbeds(rows(25, width)), ids(2)),
        PromptParts(ids(2), ImageEmbeds(rows(6, width)), rows(2, width)),
        PromptParts(ImageEmbeds(rows(7, width, 1)), ids(1)),
    ]
    assert_alike(lambda: packing(tmp_path), prompts, options=seeds(prompts), packed=3)
    causal = [PromptParts(ids(4), rows(9, width), ids(3)), ids(5)]
    with packing(tmp_path) as engine:
        seen, plain = (replies(engine, each[:2], seeds(each[:2])) for each in (prompts, causal))
        assert not same(seen[0], plain[0]) and same(seen[1], plain[1])
        for prompt in prompts[2:4]:
            engine.submit(prompt, params_of(prompt, seed=0))
        assert chunks_of(engine) == [[(0, 0, 20), (1, 0, 10)], [(0, 20, 25)], [(0, 45, 2)]]


@pytest.mark.parametrize("name", extent(["qwen3_vl"], [*GRIDS]))
def test_grids(name: str, tmp_path: Path) -> None:
    """Tokens and grids have rows of RoPE's tables of their own, and features of several levels."""
    FamilyModel(GRIDS[name]).write(tmp_path, 0)

    with packing(tmp_path) as engine:
        width, levels = engine.model.config.hidden_size, engine.model.config.deepstack

    def grid(*shape: int) -> GridEmbeds:
        count = shape[0] * shape[1] * shape[2]
        deepstack = None
        if levels:
            deepstack = torch.stack([rows(count, width, 1 + level) for level in range(levels)])
        return GridEmbeds(rows(count, width), shape, deepstack=deepstack)

    prompts = [
        PromptParts(ids(4), grid(1, 2, 3), ids(3)),
        ids(5),
        PromptParts(ids(20), grid(2, 3, 4), ids(2)),
        PromptParts(grid(1, 3, 2), rows(2, width)),
        PromptParts(ids(1), rows(2, width), grid(1, 1, 4), ids(1)),
    ]
    assert_alike(lambda: packing(tmp_path), prompts, options=seeds(prompts), packed=3)
