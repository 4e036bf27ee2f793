"""Requests of a model whose steps emit frames come, pause and end at random: each has the frames
that it has alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from checkpoints.csm_models import write_csm
from engines.churn import Owners
from engines.small_engine import open_engine
from extent import extent
from graphengine import CodeSampling, Engine, SamplingParams


class Size(NamedTuple):
    frames: int
    occurrences: int
    max_batch: int
    kv_blocks: int


SIZE = (
    extent(Size(1_500, 8, 12, 26), Size(10_000, 50, 12, 26))
    if torch.cuda.is_available()
    else extent(Size(80, 2, 3, 10), Size(2_000, 20, 5, 20))
)
COUNTED = ("pauses", "resumes", "finished/cancelled", "slot_reuses")
TEXT_IDS = 300


def params(dice: random.Random) -> SamplingParams:
    codes = CodeSampling(temperature=dice.choice([0.5, 1.0]), top_k=dice.choice([3, 1024]))
    return SamplingParams(
        temperature=dice.choice([0.0, 0.9]),
        seed=dice.randrange(1 << 30),
        max_tokens=dice.randrange(1, 30),
        ignore_eos=dice.random() < 0.7,
        codes=codes if dice.random() < 0.5 else None,
        logprobs=0 if dice.random() < 0.2 else None,
    )


def churn(engine: Engine, dice: random.Random) -> Owners:
    owners, counters = Owners(engine, dice), engine.counters

    def enough() -> bool:
        often = all(counters[name] >= SIZE.occurrences for name in COUNTED)
        return often and counters["tokens"] >= SIZE.frames

    while not enough() and counters["tokens"] < 20 * SIZE.frames:
        for _ in range(dice.randrange(2 * SIZE.max_batch)):
            owners.submit(
                [dice.randrange(TEXT_IDS) for _ in range(dice.randrange(1, 40))], params(dice)
            )
        for _ in range(dice.randrange(40)):
            engine.step(timeout=dice.choice([None, None, 0, 0.001]))
            owners.disturb()
    owners.leave()
    engine.drain()
    return owners


@pytest.mark.parametrize("steps", extent((2,), (1, 2, 7)))
def test_each_request_has_the_frames_it_has_alone(tmp_path: Path, device: str, steps: int) -> None:
    write_csm(tmp_path, codebooks=3)
    options: dict[str, Any] = {
        "device": device,
        "dtype": "float32",
        "max_batch": SIZE.max_batch,
        "max_seq_len": 96,
        "prefill_buckets": (8, 32),
    }
    pool = {"kv_blocks": SIZE.kv_blocks, "swap_blocks": 400, "steps_per_launch": steps}
    with open_engine(tmp_path, **options | pool) as engine:
        owners = churn(engine, random.Random(11))
        assert engine.counters["tokens"] >= SIZE.frames
        for name in COUNTED:
            assert engine.counters[name] >= SIZE.occurrences, name
        assert engine.scheduler.pool.free == engine.scheduler.pool.count
    with open_engine(tmp_path, **options) as alone:
        owners.check(alone)
