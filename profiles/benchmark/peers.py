"""Time another library on the same work: how long its user would wait.

    python -m graphengine.profiles.benchmark.peers transformers --shape llama-1b --batch 1,8

Prints one JSON object. `graphengine bench --peer` runs this in a process of its own, so that the
peer has the device to itself and leaves nothing in this process. The peers are not dependencies of
this package. Only `main` imports one, and passes the module to its function.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from graphengine.options.devices import DTYPES
from graphengine.profiles.arguments import integers
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.shapes import Subject, fill_random

ANSWER = '{"peer": '
"""Prefix of the line with the figures."""


class PeerRun(NamedTuple):
    """Seconds from the submission of all prompts.

    first  the first token of any of them
    steps  the ends of the steps that gave every row a token: from the first of these on, steps only
           decode
    """

    first: float
    steps: list[float]


def require_peer(name: str) -> None:
    """ValueError unless the peer is known and can be imported in this environment."""
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"peer {name!r} cannot be imported here: install it beside graphengine")


def run_peer(
    name: str,
    subject: Subject,
    *,
    device: str,
    dtype: str,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    runs: int,
) -> dict[str, Any]:
    """Run this module in a process of its own and return what it prints.

    RuntimeError, with its last output, if it fails.

    Nothing of this process should hold device memory that the peer needs.
    """
    require_peer(name)
    source = (
        ["--shape", subject.name]
        if subject.checkpoint is None or subject.drawn
        else ["--checkpoint", str(subject.checkpoint)]
    )
    sizes = {"prompt-tokens": prompt_tokens, "new-tokens": new_tokens, "runs": runs}
    options = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
    batch = ["--batch", ",".join(map(str, batches))]
    module = "graphengine.profiles.benchmark.peers"
    command = [sys.executable, "-P", "-m", module, name, *source, *batch]
    done = subprocess.run(
        [*command, *options, "--device", device, "--dtype", dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"peer {name} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return _answer(name, done.stdout)


def _answer(name: str, printed: str) -> dict[str, Any]:
    """The object in the output: the peers print, too, even when their process ends."""
    for line in reversed(printed.splitlines()):
        if line.startswith(ANSWER):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError(f"peer {name} gave no answer: {printed.strip()[-2000:]}")


def transformers(library: Any, subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy `generate` with a static cache, which transformers compiles on a GPU."""
    if subject.checkpoint is None:
        config = library.AutoConfig.for_model(**subject.hf_config)
        with torch.device(options.device):
            model = library.AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype])
        fill_random({name: parameter.data for name, parameter in model.named_parameters()})
    else:
        model = library.AutoModelForCausalLM.from_pretrained(
            subject.checkpoint, dtype=DTYPES[options.dtype]
        ).to(options.device)
    model.eval()
    rows = []
    for work in _works(options):
        prompts = torch.tensor(work.prompts(subject.model.vocab_size), device=options.device)
        runs = [_generate(library, model, prompts, work) for _ in range(1 + work.runs)][1:]
        rows.append(_row(work, runs))
    return {"version": library.__version__, "rows": rows}


def _generate(library: Any, model: Any, prompts: torch.Tensor, work: Work) -> PeerRun:
    """Generate all rows step by step; `generate` waits for the device at every step."""
    moments: list[float] = []

    def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        # Read back, as a caller that uses the tokens does.
        ids[:, -1].tolist()
        moments.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    started = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=work.new_tokens,
        min_new_tokens=work.new_tokens,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        stopping_criteria=library.StoppingCriteriaList([note]),
    )
    steps = [moment - started for moment in moments]
    return PeerRun(first=steps[0], steps=steps)


def vllm(library: Any, subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """`LLMEngine.step` in this process, as vLLM configures itself, with its own random weights.

    Prefix caching is off, as every run would find the prompt of the last one.
    """
    works = _works(options)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**subject.hf_config, "dtype": options.dtype}))
        model = library.LLM(
            model=folder if subject.checkpoint is None else str(subject.checkpoint),
            load_format="auto" if subject.checkpoint else "dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=max(work.prompt_tokens + work.new_tokens for work in works),
            max_num_seqs=max(work.live for work in works),
            enable_prefix_caching=False,
        )
    rows = []
    for work in works:
        prompts = work.prompts(subject.model.vocab_size)
        runs = [_step_vllm(library, model, prompts, work) for _ in range(1 + work.runs)][1:]
        rows.append(_row(work, runs))
    return {"version": library.__version__, "rows": rows}


def _step_vllm(library: Any, model: Any, prompts: list[list[int]], work: Work) -> PeerRun:
    """Run all prompts at once. RuntimeError unless each gets as many tokens as were asked for."""
    params = library.SamplingParams(
        temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False
    )
    engine = model.llm_engine
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{started}-{index}", {"prompt_token_ids": prompt}, params)
    moments, steps = [], []
    tokens: dict[str, int] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs:
            moments.append(time.perf_counter() - started)
        if len(outputs) == len(prompts):
            steps.append(moments[-1])
        tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
    if list(tokens.values()) != [work.new_tokens] * len(prompts):
        raise RuntimeError(f"{work.new_tokens} tokens were asked for, {tokens} came")
    return PeerRun(first=moments[0], steps=steps)


def _row(work: Work, runs: Sequence[PeerRun]) -> dict[str, Any]:
    """Decoding alone, as in our own rows: the time between steps of every row."""
    for run in runs:
        if len(run.steps) < 2:
            raise RuntimeError(f"{len(run.steps)} steps of all {work.live} rows: nothing to time")
    steps = [(run.steps[-1] - run.steps[0]) / (len(run.steps) - 1) for run in runs]
    return {
        "live": work.live,
        "ms_per_step": round(1e3 * median(steps), 4),
        "ttft_ms": round(1e3 * median(run.first for run in runs), 4),
        "steps": len(runs[0].steps) - 1,
        "runs": len(runs),
    }


def _works(options: argparse.Namespace) -> list[Work]:
    return [
        Work(
            live=live,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            runs=options.runs,
        )
        for live in integers(options.batch, "batch")
    ]


PEERS = {"transformers": transformers, "vllm": vllm}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m graphengine.profiles.benchmark.peers")
    parser.add_argument("peer", choices=tuple(PEERS))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape")
    source.add_argument("--checkpoint")
    parser.add_argument("--batch", default="1")
    for name, default in (("prompt-tokens", 128), ("new-tokens", 256), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    options = parser.parse_args(arguments)
    subject = (
        Subject.of_shape(options.shape)
        if options.checkpoint is None
        else Subject.of_checkpoint(options.checkpoint)
    )
    require_peer(options.peer)
    # vLLM decides at its import whether its engine gets a process of its own.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    library = import_module(options.peer)
    with torch.inference_mode():
        answer = PEERS[options.peer](library, subject, options)
    weights = "dummy" if options.peer == "vllm" and subject.checkpoint is None else "the same"
    print(json.dumps({"peer": options.peer, "weights": weights, **answer}))


if __name__ == "__main__":
    main()
