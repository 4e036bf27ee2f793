"""The first token of a second turn, with the KV of the first and without.

    python -m graphengine.profiles.turns --shape llama-1b --context 512,2048 --out turns.json

For each length of context a session has a first turn of this many tokens, prompt and reply. Then,
`runs` times, a fork of it is given a question, and the time to its first token is taken. The same
time is taken of a request whose prompt is the same conversation, which prefills all of it. Each
runs alone in the engine, and their tokens must be the same, unless `--skip-check`: the KV of a
reply comes from the decode kernels, and if random weights make two tokens nearly equally probable
its last bits may decide.

    cached_tokens   tokens of the second turn's prompt whose KV existed already
    turn_ms         submission to first token: median, least and greatest of the runs
    prefill_ms      the same without the session
    ratio           of the medians: how many times as long the prefill takes
    snapshot_ms, restore_ms, snapshot_mib
                    copying the session to host memory, and back into the engine
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from graphengine import Engine, EngineConfig, Result, SamplingParams
from graphengine.cli.option_flags import add_flags
from graphengine.observe.environment import environment
from graphengine.profiles.arguments import check_out, integers, write_out
from graphengine.profiles.benchmark.eager import require_equal
from graphengine.profiles.benchmark.engines import build_engine, engine_options, freed
from graphengine.profiles.benchmark.measure import random_prompt
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.shape_configs import NAMES

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Milliseconds of several runs."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The module's figures for one length of context."""

    context: int
    prompt: int
    cached_tokens: int
    turn_ms: Spread
    prefill_ms: Spread
    ratio: float
    snapshot_ms: float
    restore_ms: float
    snapshot_mib: float


def measure(
    engine: Engine, context: int, *, reply: int, question: int, runs: int, check: bool = True
) -> Turn:
    """Measure one length of context: prompt and reply have this many tokens, then the question.

    ValueError for a number below 1, and if the engine's `max_seq_len` is too short; RuntimeError if
    the tokens differ and `check` is set.
    """
    sizes = {"context": context, "reply": reply, "question": question, "runs": runs}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if reply >= context:
        raise ValueError(f"reply={reply} tokens are no part of context={context}")
    vocab_size = engine.model.config.vocab_size
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    turns: list[Result] = []
    prefills: list[Result] = []
    with engine.session() as session:
        session.append(random_prompt(vocab_size, context - reply, 0))
        session.generate(SamplingParams(temperature=0.0, max_tokens=reply, ignore_eos=True))
        for run in range(runs + 1):
            with session.fork() as fork:
                fork.append(random_prompt(vocab_size, question, 1 + run))
                prompt = fork.token_ids
                turns.append(fork.generate(greedy))
            prefills.append(engine.generate(list(prompt), greedy))
            if check:
                require_equal((prefills[-1], turns[-1]), "a prefill and a second turn:")
        started = time.perf_counter()
        kept = session.snapshot()
        copied = time.perf_counter()
        engine.restore_session(kept).close()
        restored = time.perf_counter()
    # The first run of each warms up.
    turn, prefill = _spread(turns[1:]), _spread(prefills[1:])
    return Turn(
        context=context,
        prompt=len(prompt),
        cached_tokens=turns[-1].cached_tokens,
        turn_ms=turn,
        prefill_ms=prefill,
        ratio=round(prefill.median / turn.median, 3),
        snapshot_ms=round(1e3 * (copied - started), 3),
        restore_ms=round(1e3 * (restored - copied), 3),
        snapshot_mib=round(kept.nbytes / 2**20, 3),
    )


def _spread(results: Sequence[Result]) -> Spread:
    times = [1e3 * (result.timings.time_to_first_token or 0.0) for result in results]
    return Spread(
        median=round(median(times), 4), least=round(min(times), 4), most=round(max(times), 4)
    )


def document(
    subject: Subject, contexts: Sequence[int], options: dict[str, Any], **sizes: Any
) -> dict[str, Any]:
    """The document, in JSON types: all lengths, measured in one engine."""
    longest = max(contexts) + sizes["question"] + 8
    # Room for a fork, the request it is compared with, and the session being restored.
    block_size = options.get("block_size") or 16
    options = {"max_seq_len": longest, "kv_blocks": 4 * (longest // block_size + 2)} | options
    engine, _ = build_engine(subject, options)
    with freed(engine):
        turns = [measure(engine, context, **sizes) for context in contexts]
        return {
            "schema": SCHEMA,
            "subject": subject.name,
            "environment": environment(str(engine.memory.device)),
            "engine": engine.core.description,
            **sizes,
            "turns": [asdict(turn) for turn in turns],
        }


def table(turns: Sequence[dict[str, Any]]) -> str:
    """The lengths as aligned text, one line each."""
    lines = [f"{'context':>8}{'cached':>8}{'turn ms':>10}{'prefill ms':>12}{'ratio':>8}"]
    lines += [
        f"{turn['context']:>8}{turn['cached_tokens']:>8}{turn['turn_ms']['median']:>10.2f}"
        f"{turn['prefill_ms']['median']:>12.2f}{turn['ratio']:>8.2f}"
        for turn in turns
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m graphengine.profiles.turns")
    add = parser.add_argument
    add("--shape", choices=NAMES, default="demo", help="a shape with random weights, or the demo")
    add("--checkpoint", help="directory or hub id, instead of a shape")
    add_flags(parser, EngineConfig, only=("device",))
    add("--dtype", help="bfloat16, float16 or float32")
    add("--max-batch", type=int, default=1, help="slots of the engine")
    add(
        "--context",
        default="128,512",
        help="lengths of prompt plus reply in tokens, comma-separated",
    )
    add("--reply", type=int, default=32, help="tokens of the reply, part of --context")
    add("--question", type=int, default=16, help="tokens that the second turn adds")
    add("--runs", type=int, default=5, help="second turns to measure at each length")
    add("--skip-check", action="store_true", help="do not compare tokens")
    add("--out", type=Path, help="JSON file to write the figures to")
    given = parser.parse_args(arguments)
    try:
        contexts = integers(given.context, "--context")
        if given.out is not None:
            check_out(given.out)
        subject = (
            Subject.of_shape(given.shape)
            if given.checkpoint is None
            else Subject.of_checkpoint(given.checkpoint)
        )
        options = engine_options(
            {"device": given.device, "dtype": given.dtype, "max_batch": given.max_batch}
        )
        made = document(
            subject,
            contexts,
            options,
            reply=given.reply,
            question=given.question,
            runs=given.runs,
            check=not given.skip_check,
        )
    except ValueError as error:
        parser.error(str(error))
    print(table(made["turns"]))
    if given.out is not None:
        write_out(given.out, json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
