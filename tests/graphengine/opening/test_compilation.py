"""Compilation when an engine opens: all kernels at once, from steps that launch none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from checkpoints.vanilla_modules import write_agreeing
from engines.small_engine import open_engine
from graphengine.demo import checkpoint_path
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.launching import KernelCompilation
from graphengine.opening.allocation import compile_steps, graph_steps
from graphengine.program.graph_key import decode_key, note_key, prefill_key
from graphengine.speculative import (
    MTP,
    DraftModel,
    NGram,
    RelaxedAcceptance,
    SaveHiddenStates,
    UserProvided,
)

# Steps whose kernels have written nothing.

RELAXED = RelaxedAcceptance(begin_token_ids=[5], end_token_ids=[6])
ENGINES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda folder: {},
    "one row": lambda folder: {"max_batch": 1, "row_family": "fma", "swap_blocks": 0},
    "prompts": lambda folder: {"prompt_logprobs": True, "logprobs_mode": "raw_logprobs"},
    "draws": lambda folder: {"logprobs_mode": "sampled_logprobs", "speculative": NGram(3)},
    "eagle": lambda folder: {"speculative": MTP(3)},
    "embeddings": lambda folder: {"speculative": MTP(3), "prompt_embeds": True},
    "relaxed": lambda folder: {"speculative": MTP(3), "relaxed_acceptance": RELAXED},
    "vanilla": lambda folder: {
        "path": write_agreeing(folder), "speculative": MTP(2, style="vanilla"),
    },
    "n-grams": lambda folder: {"speculative": NGram(3)},
    "draft model": lambda folder: {"speculative": DraftModel(checkpoint_path(), 3)},
    "user": lambda folder: {"speculative": UserProvided(3)},
    "hidden states": lambda folder: {"speculative": SaveHiddenStates(folder, layers=[0, 1])},
}  # fmt: skip


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are asked for; Triton finds all of them in memory."""
    names: list[str] = []

    def warmup(kernel: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> str:
        assert all(isinstance(size, int) for size in grid), f"{grid=}"
        names.append(kernel.__name__)
        return "kernel"

    monkeypatch.setattr(triton.JITFunction, "warmup", warmup)
    return names


@pytest.mark.parametrize("kind", ENGINES)
def test_no_step_needs_what_its_kernels_write(
    kind: str, tmp_path: Path, looked_up: list[str]
) -> None:
    """An index that torch finds out of its range would stop a GPU for good."""
    with open_engine(device="cpu", **ENGINES[kind](tmp_path)) as engine:
        steps = graph_steps(engine.runtime.program, engine.memory)
        engine.runtime.buffers.reset()
        drawn = torch.random.get_rng_state()
        with assumed(H200):
            compilation = compile_steps(steps, torch.device("cuda"))
        assert torch.equal(torch.random.get_rng_state(), drawn)
    assert compilation is not None
    assert (compilation.compiled, compilation.loaded) == (0, 0)
    decode = [key for key in steps if key.kind == "decode"]
    prefill = [key for key in steps if key.kind == "prefill"]
    assert looked_up.count("_finish_decode_kernel") == len(decode)
    assert looked_up.count("_gather_prefill_kernel") == len(prefill)


def test_decode_steps_are_compiled_first(looked_up: list[str]) -> None:
    ran: list[str] = []
    keys = [prefill_key(32), note_key(8), decode_key(2, sampler="full"), decode_key(2, 3)]
    steps = {key: (lambda key=key: ran.append(key.name)) for key in keys}
    assert compile_steps(steps, torch.device("cuda"), {"swap": lambda: ran.append("swap")})
    assert ran == ["swap", "decode/2/full", "decode/2/k3/fast", "prefill/32", "prefill/8/note"]


def test_a_cpu_has_nothing_to_compile() -> None:
    def step() -> None:
        raise AssertionError("it runs")

    assert compile_steps({decode_key(1): step}, torch.device("cpu")) is None
    with open_engine(device="cpu", max_batch=1) as engine:
        report = engine.report()
        assert report.compilation is None and "compiled" not in str(report)
        engine.runtime.compilation = KernelCompilation(compiled=41, loaded=2, seconds=3.456)
        text = str(engine.report())
    assert "kernels 41 compiled, 2 read from disk, in 3.46 s" in text.splitlines()


# On a GPU, each time in a process of its own: kernels in memory count nowhere.

OPENED = """
import importlib, json, sys, threading
from collections import Counter
import triton
from graphengine.speculative import MTP, NGram
from engines.small_engine import LONG, PROMPT, greedy, open_engine, sampled

phase, found, programs = "before", Counter(), Counter()

def listener(*, cache_hit, **_):
    found[f"{phase} {'loaded' if cache_hit else 'compiled'}"] += 1

def build(name, *args, **options):
    if name == "__triton_launcher":
        programs[phase] += 1
    return build_program(name, *args, **options)

triton.knobs.compilation.listener = listener
building = importlib.import_module("triton.runtime.build")
build_program, building._build = building._build, build

opening = importlib.import_module("graphengine.core.runtime")
compile_steps = opening.compile_steps

def phased(*args):
    global phase
    phase = "pass"
    try:
        return compile_steps(*args)
    finally:
        phase = "after"

opening.compile_steps = phased
before = threading.enumerate()
options = {
    "plain": {}, "one row": {"max_batch": 1, "row_family": "fma"}, "eagle": {"speculative": MTP(3)},
    "n-grams": {"speculative": NGram(3)},
    "prompts": {"prompt_logprobs": True, "prompt_logprobs_out": True, "max_logprobs": 3},
}[sys.argv[1]]
with open_engine(device="cuda", dtype="bfloat16", **options) as engine:
    threads = [thread.name for thread in threading.enumerate() if thread not in before]
    for params in (greedy(6), sampled(6, seed=1, top_p=0.9)):
        tokens = [result.token_ids for result in engine.generate([PROMPT, LONG], params)]
    compilation = engine.runtime.compilation
    listened = triton.knobs.compilation.listener is listener
print(json.dumps({
    "found": found, "programs": programs, "threads": threads, "listened": listened,
    "compiled": compilation.compiled, "loaded": compilation.loaded, "seconds": compilation.seconds,
    "tokens": tokens,
}))
"""


def open_in_a_process(kind: str, cache: Path) -> dict[str, Any]:
    support = Path(__file__).parents[2] / "support"
    places = {"PYTHONPATH": str(support), "PYTHONSAFEPATH": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", OPENED, kind],
        env=os.environ | places,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "one row", "prompts", "eagle", "n-grams"])
def test_nothing_is_compiled_after_the_pass(kind: str, tmp_path: Path) -> None:
    """Neither kernels nor the programs that launch them; the second time all is on disk."""
    cold, warm = (open_in_a_process(kind, tmp_path) for _ in range(2))
    assert cold["found"] == {"pass compiled": cold["compiled"]}
    assert cold["compiled"] > 20 and cold["loaded"] == 0
    assert cold["programs"].keys() == {"pass"}
    assert warm["found"] == {"pass loaded": warm["loaded"]}
    assert (warm["compiled"], warm["loaded"]) == (0, cold["compiled"]) and not warm["programs"]
    assert warm["tokens"] == cold["tokens"]
    for said in (cold, warm):
        assert said["threads"] == [] and said["listened"]
    print(f"{kind}: {cold['compiled']} kernels, cold {cold['seconds']:.2f} s, "
          f"warm {warm['seconds']:.2f} s")  # fmt: skip
