"""Many voices at a time: whether each has a frame of sound whenever its player needs one.

    python tests/support/gpus/frame_streams.py --out streams.jsonl
    python tests/support/gpus/frame_streams.py --shape tiny-csm --streams 3 --frames 20 --device cpu

All streams speak without a pause: each asks for a reply of as many frames after a prompt of 200
positions, and for the next one when it has ended. Replies begin one after the other, so that
prompts come while others speak. A line of JSON has the share of frames that their players had in
time, the least time that was left, and percentiles of the time between a stream's frames and to a
first frame.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphengine import Engine, SamplingParams
from graphengine.observe.environment import environment
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject

FRAME_MS = 80
PROMPT = 200
REPLIES = 3
"""For each stream, on average."""
TEXT_IDS = 250


def percentiles(values: Any) -> dict[str, float]:
    names = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
    return {name: round(float(np.percentile(values, rank)), 3) for name, rank in names.items()}


def speak(engine: Engine, streams: int, frames: int, prompt: int) -> dict[str, list[float]]:
    """Milliseconds to the first frame of each reply, and between the frames of one, of this many
    streams that speak together.
    """
    left = streams * REPLIES
    last: dict[int, float] = {}
    found: dict[str, list[float]] = {"first": [], "gap": []}

    def ask() -> None:
        nonlocal left
        left -= 1
        ids = [(7 * left + place) % TEXT_IDS for place in range(prompt)]
        params = SamplingParams(temperature=0.9, seed=left, max_tokens=frames, ignore_eos=True)
        request = engine.submit(ids, params)
        last[request.id] = time.perf_counter()

    begun = 0
    while engine.busy or begun < streams:
        # The streams begin within the time of one reply.
        if begun < streams and len(found["gap"]) >= begun * frames // streams:
            begun += 1
            ask()
        for event in engine.step():
            if event.codes is None:
                continue
            request, now = event.request, time.perf_counter()
            kind = "first" if len(request.token_ids) == 1 else "gap"
            found[kind].append(1e3 * (now - last[request.id]))
            last[request.id] = now
            if event.finish_reason and left > streams - begun:
                ask()
    return found


def measure(shape: str, streams: int, frames: int, device: str) -> dict[str, Any]:
    model = Subject.of_shape(shape).model
    prompt = min(PROMPT, model.max_positions // 2)
    options = {
        "device": device,
        "dtype": "bfloat16",
        "max_batch": streams,
        "max_seq_len": prompt + frames + 8,
        "prefill_buckets": (64, 256),
    }
    engine, start = build_engine(Subject.of_shape(shape), options)
    with engine:
        speak(engine, streams, min(frames, 8), prompt)
        gc.collect()
        gc.freeze()
        engine.recorder.start(capacity=2 * REPLIES * streams * frames)
        begun = time.perf_counter()
        found = speak(engine, streams, frames, prompt)
        seconds = time.perf_counter() - begun
        engine.recorder.stop()
        slack = engine.recorder.frame_slack_ms(FRAME_MS)
    gc.unfreeze()
    return {
        "shape": shape,
        "streams": streams,
        "frames": len(found["gap"]) + len(found["first"]),
        "frames_per_s": round((len(found["gap"]) + len(found["first"])) / seconds, 1),
        "met": round(float((slack >= 0).mean()), 6),
        "frames_with_deadline": len(slack),
        "least_slack_ms": round(float(slack.min()), 3),
        "gap_ms": percentiles(found["gap"]),
        "first_ms": percentiles(found["first"]),
        "opened_s": round(start.total_s, 1),
        "environment": environment(device),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", default="csm-1b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--frames", type=int, default=125, help="of a reply; 125 are 10 s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each")
    options = parser.parse_args(arguments)
    if options.frames < 2:
        parser.error(f"--frames {options.frames} must be 2 or more: gaps are between frames")
    for streams in options.streams:
        line = json.dumps(measure(options.shape, streams, options.frames, options.device))
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
