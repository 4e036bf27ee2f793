"""Requests come and go at random; each must get the tokens it gets when it runs alone.

The pool is too small for all of them, so that they pause and resume; a part is cancelled, late or
stopped; half sample at temperature 1, and some draw from all the options there are. The counters
show that all of that happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines.churn import Owners, write_tokenizer
from engines.logit_options import HAS_GRAMMARS, consistent, random_options
from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.speculative import NGram


@dataclass(frozen=True, kw_only=True)
class Size:
    tokens: int
    occurrences: int
    max_batch: int
    kv_blocks: int


SIZES = {
    "cpu": Size(tokens=800, occurrences=5, max_batch=5, kv_blocks=20),
    "cuda": Size(tokens=10_000, occurrences=50, max_batch=12, kv_blocks=72),
}
COUNTED = ("pauses", "resumes", "finished/cancelled", "slot_reuses")
MAX_SEQ_LEN = 128
BLOCK_SIZE = 8


def random_params(dice: random.Random, vocab_size: int) -> SamplingParams:
    max_tokens = dice.randrange(1, 60)
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if dice.random() < 0.25:
        options |= random_options(dice, vocab_size, grammars=HAS_GRAMMARS)
    if dice.random() < 0.5:
        options["temperature"] = 0.0
        options["ignore_eos"] = dice.random() < 0.5
        options["min_tokens"] = dice.choice([0, 0, max_tokens // 2])
    else:
        options["top_k"] = dice.choice([0, 0, 1, 20])
        options["top_p"] = dice.choice([1.0, 1.0, 0.8])
        options["min_p"] = dice.choice([0.0, 0.0, 0.05])
        options["top_n_sigma"] = dice.choice([0.0, 0.0, 1.5])
        options["min_tokens"] = dice.randrange(max_tokens + 1)
    return SamplingParams(**consistent(options))


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


def used(engine: Engine, rows: int) -> bool:
    return any(engine.counters[f"replays/decode/{rows}/{sampler}"] for sampler in ("fast", "full"))


def churn(
    engine: Engine,
    size: Size,
    dice: random.Random,
    *,
    all_options: bool = True,
    samples: bool = False,
) -> Owners:
    """Drive `engine` until it has done `size`; every request is finished.

    all_options  also until every option was asked for, and every bucket used
    samples      whether some prompts have several samples
    """
    vocab = engine.model.config.vocab_size
    owners = Owners(engine, dice, samples=samples)
    quiet = 0

    def enough() -> bool:
        counters = engine.counters
        return (
            counters["tokens"] >= size.tokens
            and all(counters[name] >= size.occurrences for name in COUNTED)
            and not (all_options and owners.unasked())
            and all(used(engine, rows) for rows in engine.memory.ladder.sizes if all_options)
        )

    while not enough() and engine.counters["tokens"] < 20 * size.tokens:
        # Tides: from an idle engine to a crowded one, so that every bucket is used.
        crowd = dice.randrange(2 * size.max_batch)
        for _ in range(crowd):
            prompt = [dice.randrange(vocab) for _ in range(dice.randrange(1, 60))]
            owners.submit(prompt, random_params(dice, vocab))
        for _ in range(dice.randrange(40)):
            engine.step(timeout=dice.choice([None, None, 0, 0.001]))
            owners.disturb()
        if dice.random() < 0.3:
            while engine.busy:
                engine.step()
                quiet += 1
    owners.leave()
    while engine.busy:
        engine.step()
    assert quiet > 0
    return owners


@pytest.mark.parametrize("lookahead", extent((1,), (0, 1)))
def test_each_request_gets_the_tokens_it_gets_alone(
    checkpoints: dict[str, Any], edited: Callable[..., Path], device: str, lookahead: int
) -> None:
    size, path = SIZES[device], checkpoint_path()
    if device == "cpu":
        path = edited(checkpoints["qwen3-biases"].path)
        write_tokenizer(path, 307, eos=11)
    pool = {"kv_blocks": size.kv_blocks, "swap_blocks": 400}
    with open_engine(path, device, size, lookahead=lookahead, **pool) as engine:
        # A seed by which every option is asked for early.
        owners = churn(engine, size, random.Random(7), samples=True)
        counters = engine.counters
        assert counters["samples/shared_tokens"] > 0
        assert counters["tokens"] >= size.tokens
        for name in COUNTED:
            assert counters[name] >= size.occurrences, f"{name}: {counters[name]}"
        for rows in engine.memory.ladder.sizes:
            assert used(engine, rows), f"bucket {rows} was never used"
        for sampler in ("fast", "full"):
            replays = sum(n for name, n in counters.items() if name.endswith(sampler))
            assert replays >= size.occurrences, f"{replays} replays with the {sampler} sampler"
        assert (counters["discarded_tokens"] > 0) or lookahead == 0
        assert engine.scheduler.pool.free == engine.scheduler.pool.count
        assert engine.scheduler.swap.free == engine.scheduler.swap.count
        assert not any(engine.scheduler.slots)

    assert not owners.unasked()
    with open_engine(path, device, size, lookahead=lookahead) as alone:
        owners.check(alone)


HYBRID_SIZES = {
    "cpu": Size(tokens=150, occurrences=2, max_batch=5, kv_blocks=20),
    "cuda": extent(
        Size(tokens=1_500, occurrences=10, max_batch=12, kv_blocks=72),
        Size(tokens=10_000, occurrences=50, max_batch=12, kv_blocks=72),
    ),
}


@pytest.mark.parametrize("name", ["qwen", "nemotron"])
def test_states_are_those_of_the_requests_alone(
    hybrids: dict[str, Any], edited: Callable[..., Path], device: str, name: str
) -> None:
    """States of recurrent layers, under drafts, pauses, cancels and slots that are used again."""
    size = HYBRID_SIZES[device]
    path = edited(hybrids[name].path)
    write_tokenizer(path, 263, eos=1)
    options = {"row_family": "dot"}
    pool = {"kv_blocks": size.kv_blocks, "swap_blocks": 400}
    with open_engine(path, device, size, speculative=NGram(k=2), **options, **pool) as engine:
        owners = churn(engine, size, random.Random(5), all_options=device == "cuda")
        for counted in COUNTED:
            assert engine.counters[counted] >= size.occurrences, counted
        assert engine.acceptance.accepted > 0
    with open_engine(path, device, size, **options) as alone:
        owners.check(alone)


LONG = 16_384
LONG_ENGINE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_batch": 6,
    "max_seq_len": LONG,
    "prefill_buckets": (64, 1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_contexts_of_all_lengths_get_the_tokens_they_get_alone(
    checkpoints: dict[str, Any], edited: Callable[..., Path], kv_dtype: str
) -> None:
    """Up to 16,384 tokens, beside requests of a few, in a pool of little more than one of the
    longest; then six at once that nearly fill it with their prompts, so that some must pause.
    """
    path = edited(checkpoints["qwen3-biases"].path, config={"max_position_embeddings": LONG})
    options = LONG_ENGINE | {"kv_dtype": kv_dtype}
    blocks = LONG // 16 + 60
    dice = random.Random(7)
    # Even on a scale of logarithms.
    mixed = [LONG - 40, *(int(2 ** dice.uniform(0, 13.9)) for _ in range(33))]
    requests = []
    with Engine.from_pretrained(path, kv_blocks=blocks, swap_blocks=4096, **options) as engine:
        assert engine.row_family == "dot"
        vocab = engine.model.config.vocab_size
        for lengths in (mixed, 6 * [16 * (blocks // 6 - 4)]):
            for length in lengths:
                prompt = [dice.randrange(vocab) for _ in range(length)]
                params = SamplingParams(
                    temperature=dice.choice([0.0, 1.0]),
                    max_tokens=min(100, LONG - length),
                    seed=len(requests),
                    ignore_eos=True,
                )
                requests.append(engine.submit(prompt, params))
            while engine.busy:
                engine.step()
                if dice.random() < 0.02:
                    dice.choice(requests[1:34]).cancel()
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0
        assert engine.counters["finished/cancelled"] > 0
        assert engine.scheduler.pool.free == engine.scheduler.pool.count
    longest = 0
    with Engine.from_pretrained(path, **options) as alone:
        for request in requests:
            if request.token_ids:
                longest = max(longest, len(request.prompt_token_ids) + len(request.token_ids))
                expected = alone.generate(list(request.prompt_token_ids), request.params)
                assert tuple(request.token_ids) == expected.token_ids[: len(request.token_ids)]
    assert longest == LONG
