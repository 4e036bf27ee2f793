"""Requests come and go, pause and are cancelled, while drafts are made: each says what it says
alone and without drafts.

The pool is too short for all of them, a block holds 8 tokens, so that steps of several tokens cross
and rewind blocks at every offset. The counters show that all of that happened.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from checkpoints.block_drafters import write_echo
from checkpoints.mtp_modules import VOCAB, write_random
from engines.churn import Owners, write_tokenizer
from engines.device_cases import alternately, pairwise_here
from engines.logit_options import random_options
from engines.small_engine import open_engine
from engines.speculation import BEST, DEMO, TREE, Script, outcome, step_with, write_draft_model
from extent import extent
from graphengine import Engine, Request, SamplingParams
from graphengine.speculative import (
    MTP,
    DFlash,
    DraftModel,
    GateOptions,
    NGram,
    Speculative,
    Suffix,
    UserProvided,
)

MAX_SEQ_LEN = 128
COUNTED = ("pauses", "resumes", "finished/cancelled", "slot_reuses")


class Size(NamedTuple):
    tokens: int
    occurrences: int
    max_batch: int
    kv_blocks: int


SIZES = {"cpu": Size(120, 3, 5, 16), "cuda": Size(3_000, 12, 12, 60)}
# With trees of 10 lanes a row, as a step has at most 64.
HALF = Size(3_000, 12, 6, 30)


class Churn(NamedTuple):
    """What drafts and under what gate. Random modules draft on a CPU, the demo model's on a GPU.

    `lookahead` are those of a CPU: both of each way to draft, and of the gate.
    """

    mode: Callable[[Path], Speculative]
    gate: GateOptions | None = None
    lookahead: tuple[int, ...] = (0, 1)


def qwen3(folder: Path) -> Path:
    path = write_random(folder / "modules", "qwen3")
    write_tokenizer(path, VOCAB)
    return path


def draft(folder: Path) -> Path:
    target = json.loads((folder / "modules" / "config.json").read_text())
    return write_draft_model(folder / "draft", "qwen3", target["vocab_size"], folder / "modules")


def echo(folder: Path) -> Path:
    return write_echo(folder / "block", folder / "modules")


# So short a window that the drafts go off and come back at once.
RESTLESS = GateOptions(window=3, off_below=0.6, on_above=0.6, probe_every=3)
# The same for drafts that are nearly always right.
STRICT = GateOptions(window=3, off_below=2.9, on_above=2.9, probe_every=3)

CHURNS = {
    "mtp": Churn(lambda folder: MTP(k=3)),
    "mtp-tree": Churn(lambda folder: MTP(tree=TREE)),
    "mtp-dynamic": Churn(lambda folder: MTP(tree=BEST)),
    "ngram": Churn(lambda folder: NGram(k=3, max_n=2)),
    "model-itself": Churn(lambda folder: DraftModel(folder / "modules", k=3), None, (1,)),
    "model": Churn(lambda folder: DraftModel(draft(folder), k=2), None, (0,)),
    "dflash": Churn(lambda folder: DFlash(echo(folder), k=3), None, (1,)),
    "user": Churn(lambda folder: UserProvided(3), None, (0,)),
    "mtp-gate": Churn(lambda folder: MTP(k=3), RESTLESS, (1,)),
    "model-gate": Churn(lambda folder: DraftModel(folder / "modules", k=3), STRICT, (0,)),
}
# Those whose drafts or gate come otherwise than another's.
KINDS = extent(("mtp", "mtp-tree", "ngram", "model", "dflash", "user", "model-gate"), tuple(CHURNS))
# Seeds by which all that is counted has happened early.
EARLY = {
    "mtp": "/2", "mtp-tree": "/6", "ngram": "/4", "model": "/2", "dflash": "/5", "user": "/3",
}  # fmt: skip
CASES = [
    case
    for case in pairwise_here(alternately({name: CHURNS[name].lookahead for name in KINDS}), (0, 1))
    # A caller's drafts leave no lookahead.
    if case.values[1:] != ("user", 1)
]


def random_params(dice: random.Random, vocab_size: int) -> SamplingParams:
    max_tokens = dice.randrange(1, 50)
    options = random_options(dice, vocab_size) if dice.random() < 0.3 else {}
    if dice.random() < 0.6:
        ignore_eos = dice.random() < 0.5
        min_tokens = dice.choice([0, 0, max_tokens // 2])
        return SamplingParams(
            temperature=0.0,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            **options,
        )
    return SamplingParams(
        temperature=dice.choice([0.3, 1.0]),
        top_k=dice.choice([0, 0, 1, 20]),
        top_p=dice.choice([1.0, 1.0, 0.8]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        min_tokens=dice.randrange(max_tokens + 1),
        max_tokens=max_tokens,
        **options,
    )


def random_prompt(dice: random.Random, vocab_size: int) -> list[int]:
    """Half of them say a few tokens over and over, which n-grams find."""
    length = dice.randrange(1, 60)
    if dice.random() < 0.5:
        words = [dice.randrange(vocab_size) for _ in range(dice.randrange(1, 6))]
        return [words[index % len(words)] for index in range(length)]
    return [dice.randrange(vocab_size) for _ in range(length)]


def churn(engine: Engine, size: Size, dice: random.Random) -> Owners:
    """Drive `engine` until it has done `size`; every request is finished."""
    vocab_size = engine.model.config.vocab_size
    user = isinstance(engine.config.mode, UserProvided)

    def guess(request: Request) -> list[int]:
        # The caller may say nothing, or anything; one guess in so few tokens is right.
        said = [*request.prompt_token_ids, *request.token_ids]
        return [dice.choice(said) for _ in range(dice.randrange(4))]

    owners = Owners(engine, dice)
    counters = engine.counters

    def enough() -> bool:
        return counters["tokens"] >= size.tokens and all(
            counters[name] >= size.occurrences for name in COUNTED
        )

    while not enough() and counters["tokens"] < 20 * size.tokens:
        for _ in range(dice.randrange(2 * size.max_batch)):
            prompt = random_prompt(dice, vocab_size)
            owners.submit(prompt, random_params(dice, vocab_size))
        for _ in range(dice.randrange(25)):
            step_with(engine, guess if user else None)
            owners.disturb()
        while dice.random() < 0.3 and engine.busy:
            engine.step(timeout=dice.choice([None, 0, 0.001]))
    owners.leave()
    while engine.busy:
        step_with(engine, guess if user else None)
    # In a large batch somebody nearly always needs the full sampler.
    for _ in range(20):
        if speculative_replays(engine, "fast"):
            break
        owners.submit(random_prompt(dice, vocab_size), SamplingParams(temperature=0.0))
        while engine.busy:
            step_with(engine, guess if user else None)
    return owners


def speculative_replays(engine: Engine, sampler: str) -> int:
    ending = f"/k{engine.config.drafts}/{sampler}"
    return sum(count for name, count in engine.counters.items() if name.endswith(ending))


@pytest.mark.parametrize(("device", "name", "lookahead"), CASES)
def test_each_request_says_what_it_says_alone_without_drafts(
    device: str, tmp_path: Path, name: str, lookahead: int
) -> None:
    case, size = CHURNS[name], SIZES[device]
    exact: dict[str, Any] = {}
    if device == "cuda" and name in ("mtp-tree", "mtp-dynamic"):
        # Trees attend in other splits, which half precision shows.
        size, exact = HALF, {"dtype": "float32"}
    path = tmp_path / "modules"
    if device == "cpu":
        qwen3(tmp_path)
    else:
        path.symlink_to(DEMO)
    options: dict[str, Any] = {
        "device": device, "max_batch": size.max_batch, "max_seq_len": MAX_SEQ_LEN,
        "row_family": "dot", "prompt_logprobs": True, **exact,
    }  # fmt: skip
    drafting: dict[str, Any] = {
        "speculative": case.mode(tmp_path), "gate": case.gate, "lookahead": lookahead,
        "kv_blocks": size.kv_blocks, "swap_blocks": 400,
    }  # fmt: skip
    with open_engine(path, **options, **drafting) as engine:
        owners = churn(engine, size, random.Random(f"{name}{lookahead}" + EARLY.get(name, "")))
        counters = engine.counters
        for counted in COUNTED:
            assert counters[counted] >= size.occurrences, f"{counted}: {counters[counted]}"
        for sampler in ("fast", "full"):
            assert speculative_replays(engine, sampler) > 0, sampler
        if case.gate is not None:
            # Each probe brings the drafts back, for a while at least.
            assert counters["gate/off"] >= 1 and counters["gate/probes"] >= 3, dict(counters)
            assert (
                counters["gate/steps/0"] > 10
                and counters[f"gate/steps/{engine.config.drafts}"] > 10
            )
        assert engine.acceptance.accepted > 0
        assert engine.scheduler.pool.free == engine.scheduler.pool.count
        assert engine.scheduler.swap.free == engine.scheduler.swap.count
        assert not any(engine.scheduler.slots)

    with open_engine(path, **options) as alone:
        owners.check(alone)
    assert any(request.job.processing is not None for request in owners.requests)


PAUSED = {"mtp": MTP(k=3), "tree": MTP(tree=TREE), "ngram": NGram(k=3), "suffix": Suffix(k=3)}


@pytest.mark.parametrize(
    ("device", "name", "lookahead"),
    pairwise_here(alternately(dict.fromkeys(PAUSED, (0, 1))), (0, 1)),
)
def test_a_pause_costs_no_accepted_draft(device: str, name: str, lookahead: int) -> None:
    """The drafter's KV and tables come back with the request: its steps are those it has alone."""
    options: dict[str, Any] = {
        "device": device, "row_family": "dot", "speculative": PAUSED[name],
        "lookahead": lookahead,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7] * 4, [9, 8] * 7, [11, 12, 13, 14] * 3]

    def steps_of(engine: Engine, requests: list[Request]) -> list[list[tuple[int, ...]]]:
        events = []
        while engine.busy:
            events += engine.step()
        return [
            [event.token_ids for event in events if event.request is request]
            for request in requests
        ]

    with open_engine(**options) as engine:
        requests = [engine.submit(prompt, params) for prompt in prompts]
        expected = steps_of(engine, requests)
        assert not engine.counters["pauses"]
        assert any(len(tokens) > 1 for steps in expected for tokens in steps)
    with open_engine(**options, kv_blocks=12, swap_blocks=60) as engine:
        requests = [engine.submit(prompt, params) for prompt in prompts]
        got = steps_of(engine, requests)
        assert engine.counters["pauses"] > 0 and any(request.pauses for request in requests)
    assert got == expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_pool_of_the_greatest_need_serves_one_after_the_other(
    device: str, tmp_path: Path, lookahead: int
) -> None:
    """The drafter's positions past the request's end are part of that need; less is refused."""
    path = qwen3(tmp_path)
    options: dict[str, Any] = {
        "device": device, "row_family": "dot", "dtype": "float32", "lookahead": lookahead,
    }  # fmt: skip
    prompt, params = (
        [1, 2, 3, 4, 5],
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    )
    with open_engine(path, **options) as engine:
        expected = engine.generate(prompt, params)
    # 5 + 20 tokens: K and V of 24 of them fill 3 blocks, and the module's own need a fourth.
    with open_engine(path, **options, kv_blocks=3) as engine:
        assert outcome(engine.generate(prompt, params)) == outcome(expected)
    drafting: dict[str, Any] = {**options, "speculative": MTP(k=3)}
    with (
        open_engine(path, **drafting, kv_blocks=3) as engine,
        pytest.raises(ValueError, match=r"25 tokens .*and 2 more of its drafter needs 4 KV blocks"),
    ):
        engine.submit(prompt, params)
    with open_engine(path, **drafting, kv_blocks=4, swap_blocks=8) as engine:
        for result in engine.generate([prompt] * 4, params):
            assert outcome(result) == outcome(expected)


def test_a_caller_who_repeats_the_past_is_right_again(device: str, tmp_path: Path) -> None:
    """Drafts of a script stay right through pauses: nothing of a step is lost or said twice."""
    path = qwen3(tmp_path)
    options: dict[str, Any] = {"device": device, "row_family": "dot", "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[5, 6, 7] * 4, [9, 8] * 7, [11, 12, 13, 14] * 3]
    with open_engine(path, **options) as engine:
        expected = [outcome(result) for result in engine.generate(prompts, params)]
    pool: dict[str, Any] = {"kv_blocks": 16, "swap_blocks": 60}
    with open_engine(path, **options, **pool, speculative=UserProvided(4)) as engine:
        requests = [engine.submit(prompt, params) for prompt in prompts]
        known = [tokens for tokens, *_ in expected]
        drafts = Script(known, 4, VOCAB, right=lambda step: 9).of(requests)
        while engine.busy:
            step_with(engine, drafts)
        assert engine.counters["pauses"] > 0
        assert [outcome(request) for request in requests] == expected
