"""Packed prompts under everything at once: shared prefixes, embeddings, drafts, pauses, cancels."""

from __future__ import annotations

import random
from typing import Any

import torch

from engines.packed_replies import params_of, prompt_of, without_embeds
from engines.small_engine import open_engine
from extent import extent
from graphengine import MTP, Engine, PromptParts

REQUESTS = extent(14, 60)


def packing(**options: Any) -> Engine:
    sizes = {"max_batch": 5, "max_seq_len": 96, "prompts_per_prefill": 4}
    engine = open_engine(
        device="cpu", prompt_embeds=True, prefix_caching=True, speculative=MTP(k=3),
        **sizes | options,
    )  # fmt: skip
    return without_embeds(engine)


def drawn(dice: random.Random, width: int) -> list[tuple[Any, Any]]:
    """Prompts that begin with shared tokens, with shared embeddings, or with neither, and how each
    is sampled.
    """
    draw = torch.Generator().manual_seed(1)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, width, generator=draw) * 0.3

    tokens, embeds = prompt_of(16), rows(16)
    jobs = []
    for index in range(REQUESTS):
        own = rows(dice.randrange(1, 9))
        prompt = [
            tokens + prompt_of(dice.randrange(1, 20), index),
            PromptParts(embeds, prompt_of(dice.randrange(1, 9), index)),
            PromptParts(prompt_of(dice.randrange(1, 30), index), own, prompt_of(2, index)),
            PromptParts(tokens, own),
        ][dice.randrange(4)]
        jobs.append((prompt, params_of(prompt, seed=index, tokens=dice.randrange(2, 24))))
    return jobs


def test_each_prompt_says_what_it_says_alone() -> None:
    dice = random.Random(3)
    with packing() as calm:
        jobs = drawn(dice, calm.model.config.hidden_size)
        alone = [tuple(calm.generate(*job).token_ids) for job in jobs]
    with packing(kv_blocks=14, lookahead=2) as engine:
        requests, waiting = [], [*jobs]
        while waiting or engine.busy:
            if waiting and dice.random() < 0.5:
                requests.append(engine.submit(*waiting.pop(0)))
            engine.step()
            unfinished = [request for request in requests if not request.finished]
            if unfinished and dice.random() < 0.08:
                dice.choice(unfinished).cancel()
        for counted in ("packed_chunks", "pauses", "finished/cancelled"):
            assert engine.counters[counted] > 0, counted
        assert engine.acceptance.accepted > 0
        assert engine.scheduler.pool.free == engine.scheduler.pool.count
    for request, expected in zip(requests, alone, strict=True):
        found = tuple(request.token_ids)
        whole = len(expected) if request.finish_reason != "cancelled" else len(found)
        assert found == expected[:whole], f"{request}"
