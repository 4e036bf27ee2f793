"""Requests come and go at random; each must get the tokens it gets when it runs alone.

The pool is too small for all of them, so that they pause and resume; a part is cancelled; half
sample at temperature 1, and some ask something of their logits. The counters show that all of that
happened.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
from asking import random_options

from graphengine import Engine, Request, SamplingParams
from graphengine.demo import checkpoint_path


@dataclass(frozen=True, kw_only=True)
class Size:
    tokens: int
    occurrences: int
    max_batch: int
    kv_blocks: int


SIZES = {
    "cpu": Size(tokens=1500, occurrences=8, max_batch=5, kv_blocks=32),
    "cuda": Size(tokens=10_000, occurrences=50, max_batch=12, kv_blocks=72),
}
COUNTED = ("pauses", "resumes", "finished/cancelled", "slot_reuses")
MAX_SEQ_LEN = 128
BLOCK_SIZE = 8


def random_params(dice: random.Random, vocab_size: int) -> SamplingParams:
    max_tokens = dice.randrange(1, 60)
    options = random_options(dice, vocab_size) if dice.random() < 0.2 else {}
    if dice.random() < 0.5:
        ignore_eos = dice.random() < 0.5
        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, **options
        )
    return SamplingParams(
        temperature=1.0,
        top_k=dice.choice([0, 0, 1, 20]),
        top_p=dice.choice([1.0, 1.0, 0.8]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        min_tokens=dice.randrange(max_tokens + 1),
        max_tokens=max_tokens,
        **options,
    )


def open_engine(path: Any, device: str, size: Size, **options: Any) -> Engine:
    # A prefill bucket of 8 and one of 32, so that prompts are cut, and padded.
    return Engine.from_pretrained(
        path,
        device=device,
        max_batch=size.max_batch,
        max_seq_len=MAX_SEQ_LEN,
        block_size=BLOCK_SIZE,
        prefill_buckets=(8, 32),
        prompt_logprobs=True,
        **options,
    )


def churn(engine: Engine, size: Size, dice: random.Random) -> list[Request]:
    """Drive `engine` until it has done `size`; returns every request, finished."""
    vocab = engine.model.config.vocab_size
    requests: list[Request] = []
    quiet = 0

    def enough() -> bool:
        counters = engine.counters
        return counters["tokens"] >= size.tokens and all(
            counters[name] >= size.occurrences for name in COUNTED
        )

    while not enough() and engine.counters["tokens"] < 20 * size.tokens:
        # Tides: from an idle engine to a crowded one, so that every bucket is used.
        crowd = dice.randrange(2 * size.max_batch)
        for _ in range(crowd):
            prompt = [dice.randrange(vocab) for _ in range(dice.randrange(1, 60))]
            requests.append(engine.submit(prompt, random_params(dice, vocab)))
        for _ in range(dice.randrange(40)):
            engine.step(timeout=dice.choice([None, None, 0, 0.001]))
            open_requests = [request for request in requests if not request.finished]
            if open_requests and dice.random() < 0.1:
                dice.choice(open_requests).cancel()
        if dice.random() < 0.3:
            while engine.busy:
                engine.step()
                quiet += 1
    while engine.busy:
        engine.step()
    assert quiet > 0
    return requests


@pytest.mark.parametrize("lookahead", [0, 1])
def test_each_request_gets_the_tokens_it_gets_alone(
    checkpoints: dict[str, Any], device: str, lookahead: int
) -> None:
    size = SIZES[device]
    path = checkpoints["qwen3-biases"].path if device == "cpu" else checkpoint_path()
    pool = {"kv_blocks": size.kv_blocks, "swap_blocks": 400}
    with open_engine(path, device, size, lookahead=lookahead, **pool) as engine:
        requests = churn(engine, size, random.Random(lookahead))
        counters = engine.counters
        assert counters["tokens"] >= size.tokens
        for name in COUNTED:
            assert counters[name] >= size.occurrences, f"{name}: {counters[name]}"
        for rows in engine.memory.ladder.sizes:
            names = [f"replays/decode/{rows}/{sampler}" for sampler in ("fast", "full")]
            assert any(counters[name] for name in names), f"bucket {rows} was never used"
        for sampler in ("fast", "full"):
            replays = sum(n for name, n in counters.items() if name.endswith(sampler))
            assert replays >= size.occurrences, f"{replays} replays with the {sampler} sampler"
        assert (counters["discarded_tokens"] > 0) or lookahead == 0
        assert engine.scheduler.pool.free == engine.scheduler.pool.count
        assert engine.scheduler.swap.free == engine.scheduler.swap.count
        assert not any(engine.scheduler.slots)

    assert all(request.finished for request in requests)
    started = [request for request in requests if request.token_ids]
    with open_engine(path, device, size, lookahead=lookahead) as alone:
        for request in started:
            params = dataclasses.replace(request.params, seed=request.seed)
            expected = alone.generate(list(request.prompt_token_ids), params)
            if request.finish_reason == "cancelled":
                got = len(request.token_ids)
                assert tuple(request.token_ids) == expected.token_ids[:got], f"{request}"
            else:
                assert tuple(request.token_ids) == expected.token_ids, f"{request}"
                assert request.finish_reason == expected.finish_reason
            if expected.logprobs is not None:
                assert request.logprobs == list(expected.logprobs[: len(request.token_ids)])
            if expected.prompt_logprobs is not None:
                assert request.prompt_logprobs == list(expected.prompt_logprobs)
    asked = [request for request in started if request.processing is not None]
    assert sum(request.logprobs is not None for request in asked) > 5
    assert sum(request.prompt_logprobs is not None for request in asked) > 5
