"""Time to first token and between tokens, through the public API.

    python -m graphengine.profiles.latency --out latency.json [--checkpoint demo] [--batches 1,8]

For each batch size an engine of that many slots runs as many random prompts at once, greedily and
past end-of-sequence tokens: once to warm up, then RUNS times. All runs must give the same tokens,
and the first prompt alone those that it got in the batch. Python's garbage collector stays on.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import triton

from graphengine import Engine, EngineConfig, Result, SamplingParams
from graphengine.demo import checkpoint_path

RUNS = 5
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Latencies of one batch size: milliseconds of host time, as tokens reached the caller.

    ttft_ms           submission to first token, the median over requests and runs
    ttft_last_ms      the same of each run's last one, which waited for the prompts before it
    itl_ms            gaps between a request's tokens, of all requests and runs, while all decode
    itl_n             how many; a percentile beyond 100 * (1 - 1 / n) is their maximum
    itl_admission_ms  the longest gap among those left out: some prompt was still being prefilled
    step_ms           mean time of a step while all decode, the median over runs
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    runs: int
    ttft_ms: float
    ttft_last_ms: float
    itl_ms: dict[str, float]
    itl_n: int
    itl_admission_ms: float
    step_ms: float
    engine: dict[str, Any]


def measure(
    checkpoint: str | Path,
    *,
    batch: int,
    device: str,
    prompt_tokens: int = 128,
    new_tokens: int = 256,
    runs: int = RUNS,
) -> Row:
    """Run one batch size. RuntimeError if a token differs between runs."""
    if min(batch, prompt_tokens, runs) < 1:
        raise ValueError(f"{batch=}, {prompt_tokens=} and {runs=} must be at least 1")
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    with Engine.from_pretrained(
        checkpoint, device=device, max_batch=batch, max_seq_len=prompt_tokens + new_tokens
    ) as engine:
        # A step prefills one chunk: until the last prompt is in, gaps hold prefills of others.
        admission = batch * -(-prompt_tokens // engine.memory.prefill_ladder.sizes[-1])
        if new_tokens < admission + 2:
            raise ValueError(f"{new_tokens=}: the prompts alone take {admission} steps")
        dice, vocabulary = random.Random(0), engine.model.config.vocab_size
        prompts = [[dice.randrange(vocabulary) for _ in range(prompt_tokens)] for _ in range(batch)]
        warm: list[Result] = engine.generate(prompts, params)
        measured: list[list[Result]] = [engine.generate(prompts, params) for _ in range(runs)]
        alone: Result = engine.generate(prompts[0], params)
        for of_prompt in zip(warm, *measured, strict=True):
            _require_equal(of_prompt)
        _require_equal([warm[0], alone])
        description = _engine(engine)

    first = [[_time_to_first_token(result) for result in results] for results in measured]
    # [run, request, gap]
    gaps = 1e3 * np.array([[result.timings.inter_token for result in run] for run in measured])
    steady = gaps[:, :, admission:]
    return Row(
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        runs=runs,
        ttft_ms=round(median(time for run in first for time in run), 4),
        ttft_last_ms=round(median(max(run) for run in first), 4),
        itl_ms={
            key: round(float(np.percentile(steady, share)), 4) for key, share in PERCENTILES.items()
        },
        itl_n=steady.size,
        itl_admission_ms=round(float(gaps[:, :, :admission].max()), 4),
        step_ms=round(float(np.median(steady.mean(axis=(1, 2)))), 4),
        engine=description,
    )


def _time_to_first_token(result: Result) -> float:
    seconds = result.timings.time_to_first_token
    assert seconds is not None, f"{result=} has no token"
    return seconds * 1e3


def _require_equal(results: Sequence[Result]) -> None:
    """RuntimeError unless these results of one prompt have the same tokens."""
    expected = results[0].token_ids
    for run, result in enumerate(results):
        if result.token_ids != expected:
            pairs = zip(result.token_ids, expected, strict=False)
            same = next((i for i, (got, want) in enumerate(pairs) if got != want), "all")
            raise RuntimeError(f"runs 0 and {run} of a prompt differ after {same} equal tokens")


def _engine(engine: Engine) -> dict[str, Any]:
    """What latency and numerics depend on."""
    memory, config = engine.memory, engine.config
    return {
        "architecture": engine.model.config.architecture,
        "dtype": str(memory.dtype).removeprefix("torch."),
        "max_seq_len": memory.max_seq_len,
        "buckets": memory.ladder.sizes,
        "prefill_buckets": memory.prefill_ladder.sizes,
        "block_size": memory.block_size,
        "kv_blocks": memory.kv_blocks,
        "lookahead": config.lookahead,
        "wait": config.wait,
    }


def environment(device: str) -> dict[str, Any]:
    """What the figures were measured on and with; None for what cannot be told."""
    on_gpu = torch.device(device).type == "cuda"
    git = ("git", "-C", str(Path(__file__).resolve().parent))
    changes = _output(*git, "status", "--porcelain")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "driver": driver.splitlines()[0] if on_gpu and driver else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "commit": _output(*git, "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
    }


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def table(rows: Sequence[Row]) -> str:
    names = ["batch", "TTFT ms", "last", *(f"ITL {name}" for name in PERCENTILES), "n", "ms/step"]
    lines = ["".join(f"{name:>10}" for name in names)]
    for row in rows:
        values = (row.ttft_ms, row.ttft_last_ms, *row.itl_ms.values())
        cells = "".join(f"{value:>10.3f}" for value in values)
        lines.append(f"{row.batch:>10}{cells}{row.itl_n:>10}{row.step_ms:>10.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m graphengine.profiles.latency")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--checkpoint", default="demo", help="directory or hub id; 'demo' is the packaged model")
    add("--device", default=EngineConfig().device, help="cuda or cpu")
    add("--batches", default="1,8", help="batch sizes, comma-separated")
    for name, default in (("prompt_tokens", 128), ("new_tokens", 256), ("runs", RUNS)):
        add(f"--{name.replace('_', '-')}", type=int, default=default)
    options = vars(parser.parse_args(arguments))
    out, name, batches = (options.pop(key) for key in ("out", "checkpoint", "batches"))
    path = checkpoint_path() if name == "demo" else name
    rows = [measure(path, batch=int(batch), **options) for batch in batches.split(",")]
    report = {"model": name, "environment": environment(options["device"])}
    report["rows"] = [asdict(row) for row in rows]
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
