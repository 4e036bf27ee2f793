"""Ranks that torchrun starts: the program's rank 0 drives, and the others end with its engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.few_layers import few_layers
from engines.small_engine import PROMPT, greedy, open_engine
from graphengine import EngineConfig
from graphengine.models.contract import Share
from graphengine.parallel.torchrun import launched_share

PROGRAM = """
import os
import sys
from graphengine import Engine, SamplingParams

print("begins", os.environ["RANK"])
with Engine.from_pretrained(sys.argv[1], device="cpu", tensor_parallel=2, max_seq_len=128,
                            max_batch={batch}, block_size=8, prefill_buckets=(8, 32)) as engine:
    result = engine.generate("def fib(n):", SamplingParams(temperature=0.0, max_tokens=12))
    equal = len(set(engine.runtime.digests())) == 1
print("tokens", *result.token_ids, equal)
"""


def torchrun(tmp_path: Path, batch: str = "3") -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(batch=batch))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*run, str(program), str(few_layers())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_first_drives_the_others(tmp_path: Path) -> None:
    with open_engine(device="cpu") as alone:
        expected = alone.generate(PROMPT, greedy()).token_ids
    done = torchrun(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines) == ["begins 0", "begins 1", f"tokens {' '.join(map(str, expected))} True"]


def test_a_rank_with_other_options_ends_all(tmp_path: Path) -> None:
    done = torchrun(tmp_path, batch="2 + int(os.environ['RANK'])")
    assert done.returncode != 0
    message = "ValueError: rank 1 of 2 has other options or another checkpoint than the driver: "
    assert message in done.stderr and "ladder=BucketLadder(max_batch=3, " in done.stderr


def test_other_ranks_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", tensor_parallel=2)
    assert launched_share(config) is None
    started = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert launched_share(config) == Share(1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="takes ranks of one host: torchrun has started 1 here"):
        launched_share(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = "tensor_parallel=2, but torchrun has started 4 processes"
    with pytest.raises(ValueError, match=message):
        launched_share(config)
