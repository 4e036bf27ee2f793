"""The effect of rounded weights or an fp8 KV cache on a model's predictions, compared with float32.

    python -m graphengine.profiles.accuracy --of weights --context 256 --out weights.json
    python -m graphengine.profiles.accuracy --of kv --shape demo --out kv.json

Windows of the demo's held-out text, or random tokens for a shape with random weights, are prefilled
and continued greedily. The first window is only for calibration. `dtype` is the engine's own, for
weights and KV; of KV there is fp8 with the checkpoint's scales (1 where it has none) and with
calibrated ones, of weights each kind of `quantize`, without and with lm_head:

    nll        nats a token of the windows
    bits       a byte of their text
    rms, most  differences of these tokens' log-probabilities from float32's
    best       share of positions where the most probable token is float32's
    tokens     share of the greedy continuations that comes before the first other token
    per step   tokens that a step gives with three drafts of the checkpoint's own module (MTP)
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphengine import EngineConfig, Result, SamplingParams
from graphengine.cli.option_flags import add_flags
from graphengine.demo import heldout_text
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.quantised.rounding import ROUNDED_KINDS
from graphengine.observe.environment import environment
from graphengine.profiles.arguments import check_out, write_out
from graphengine.profiles.benchmark.engines import build_engine, engine_options, freed
from graphengine.profiles.benchmark.measure import random_prompt
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.shape_configs import NAMES
from graphengine.profiles.tables.text import Column, number, text_table
from graphengine.speculative import MTP
from graphengine.text.tokenizer import Tokenizer

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """The module's figures for one kind; None: there is no text, or no draft module."""

    kind: str
    nll: float
    bits: float | None
    rms: float
    most: float
    best: float
    tokens: float
    per_step: float | None


def windows(
    subject: Subject, tokenizer: Tokenizer | None, context: int, count: int
) -> list[tuple[int, ...]]:
    """`count` prompts of `context` tokens: of the held-out text where there is a tokenizer.

    ValueError where the text has fewer.
    """
    if tokenizer is None:
        vocab = subject.model.vocab_size
        return [tuple(random_prompt(vocab, context, seed=seed)) for seed in range(count)]
    ids = tokenizer.encode(heldout_text())
    if len(ids) < count * context:
        raise ValueError(
            f"{count} windows of {context} tokens are more than the {len(ids)} of the text"
        )
    return [tuple(ids[start : start + context]) for start in range(0, count * context, context)]


def _tokenizer(subject: Subject) -> Tokenizer | None:
    path = subject.checkpoint
    if path is None or not (path / "tokenizer.json").is_file():
        return None
    return Tokenizer.from_directory(path)


def kinds_of_kv(calibration: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Options of the engines whose KV is compared, except the exact one."""
    fp8: dict[str, Any] = {"kv_dtype": "fp8"}
    return {"dtype": {}, "fp8": fp8, "fp8 calibrated": fp8 | {"kv_calibration": calibration}}


def kinds_of_weights(calibration: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Options of the engines whose weights are compared, except the exact one; no calibration."""
    kinds: dict[str, dict[str, Any]] = {"dtype": {}}
    for kind in ROUNDED_KINDS:
        kinds[kind] = {"quantize": kind}
        kinds[f"{kind}, lm_head"] = {"quantize": kind, "quantize_lm_head": True}
    return kinds


COMPARED: Mapping[str, Callable[[Sequence[int]], dict[str, dict[str, Any]]]] = {
    "kv": kinds_of_kv,
    "weights": kinds_of_weights,
}
"""The kinds to compare; the functions take the calibration's tokens."""


def measure(
    subject: Subject,
    of: str,
    context: int,
    options: Mapping[str, Any],
    *,
    prompts: int = 4,
    new_tokens: int = 32,
) -> list[Accuracy]:
    """The figures of each kind. ValueError for a number that leaves nothing to measure.

    of       one of `COMPARED`
    context  tokens of a window, from 2 up: a window's first token has no log-probability
    options  options of the engines, without those that are compared
    """
    sizes = (("context", context, 2), ("prompts", prompts, 1), ("new_tokens", new_tokens, 1))
    for name, value, least in sizes:
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    tokenizer = _tokenizer(subject)
    calibration, *texts = windows(subject, tokenizer, context, 1 + prompts)
    shared = dict(options) | {"max_seq_len": context + new_tokens, "prompt_logprobs": True}
    kinds = {"float32": {"dtype": "float32"}, **COMPARED[of](calibration)}
    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, prompt_logprobs=1
    )
    found: dict[str, list[Result]] = {}
    per_step: dict[str, float | None] = {}
    asked = [list(text) for text in texts]
    for kind, own in kinds.items():
        engine, _ = build_engine(subject, shared | own)
        with freed(engine):
            found[kind] = engine.generate(asked, params)
        per_step[kind] = _per_step(subject, shared | own, asked, new_tokens)
    # The first token of a window is not predicted.
    size = None
    if tokenizer is not None:
        size = sum(len(tokenizer.decode(text[1:]).encode()) for text in texts)
    return [
        _compared(kind, found[kind], found["float32"], size, per_step[kind])
        for kind in kinds
        if kind != "float32"
    ]


def _per_step(
    subject: Subject, options: Mapping[str, Any], prompts: Sequence[Sequence[int]], tokens: int
) -> float | None:
    """Tokens a step, greedily; None where there is no draft module."""
    if subject.checkpoint is None:
        return None
    try:
        read_mtp_config(Checkpoint.open(subject.checkpoint))
    except ValueError:
        return None
    engine, _ = build_engine(subject, {**options, "prompt_logprobs": False, "speculative": MTP(3)})
    with freed(engine):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.generate([list(prompt) for prompt in prompts], params)
        return engine.acceptance.mean_length


def _compared(
    kind: str,
    results: Sequence[Result],
    exact: Sequence[Result],
    size: int | None,
    per_step: float | None,
) -> Accuracy:
    """The figures of one kind; `size` is the bytes of the text whose tokens are predicted."""
    pairs = list(zip(results, exact, strict=True))
    ours, theirs = ([value for each in side for value in _said(each)] for side in (results, exact))
    errors = [a - b for (a, _), (b, _) in zip(ours, theirs, strict=True)]
    same = sum(a == b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    leading = sum(_leading(a.token_ids, b.token_ids) for a, b in pairs)
    nats = -sum(logprob for logprob, _ in ours)
    return Accuracy(
        kind=kind,
        nll=nats / len(ours),
        bits=None if size is None else nats / math.log(2) / size,
        rms=math.sqrt(sum(error * error for error in errors) / len(errors)),
        most=max(map(abs, errors)),
        best=same / len(ours),
        tokens=leading / sum(len(result.token_ids) for result in exact),
        per_step=per_step,
    )


def _said(result: Result) -> list[tuple[float, int]]:
    """The log-probability of each prompt token but the first, with the best token's id there."""
    assert result.prompt_logprobs is not None, "they were asked for"
    said = []
    for token, entry in zip(result.prompt_token_ids, result.prompt_logprobs, strict=True):
        if entry is not None:
            # Equal tokens share a rank; greedy takes the lowest id.
            best = min(entry, key=lambda token_id: (entry[token_id].rank, token_id))
            said.append((entry[token].logprob, best))
    return said


def _leading(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    differing = (index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differing, len(one))


def table(figures: Sequence[Accuracy]) -> str:
    """The figures as text."""
    columns = (
        Column("kind" + " " * 10, lambda row: str(row["kind"])),
        Column("nll", lambda row: number(row["nll"], 4)),
        Column("bits", lambda row: number(row["bits"], 4)),
        Column("rms", lambda row: number(row["rms"], 4)),
        Column("most", lambda row: number(row["most"], 3)),
        Column("best", lambda row: f"{100 * row['best']:.1f}%"),
        Column("tokens", lambda row: f"{100 * row['tokens']:.0f}%"),
        Column("per step", lambda row: number(row["per_step"], 2)),
    )
    return text_table(columns, [asdict(each) for each in figures])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m graphengine.profiles.accuracy")
    add = parser.add_argument
    add("--of", choices=tuple(COMPARED), required=True, help="what is compared")
    add("--shape", choices=NAMES, default="demo", help="a shape with random weights, or the demo")
    add("--checkpoint", help="directory or hub id, instead of a shape")
    add_flags(parser, EngineConfig, only=("device",))
    add("--dtype", help="bfloat16, float16 or float32, for all engines but the exact one")
    add("--context", type=int, default=256, help="tokens per window, at least 2")
    add("--prompts", type=int, default=4, help="number of windows to measure")
    add("--new-tokens", type=int, default=32, help="tokens per continuation")
    add("--out", type=Path, help="JSON file to write the figures to")
    given = parser.parse_args(arguments)
    try:
        if given.out is not None:
            check_out(given.out)
        subject = (
            Subject.of_shape(given.shape)
            if given.checkpoint is None
            else Subject.of_checkpoint(given.checkpoint)
        )
        options = engine_options({"device": given.device, "dtype": given.dtype, "max_batch": 4})
        sizes = {"prompts": given.prompts, "new_tokens": given.new_tokens}
        figures = measure(subject, given.of, given.context, options, **sizes)
    except ValueError as error:
        parser.error(str(error))
    print(table(figures))
    if given.out is not None:
        device = EngineConfig(**engine_options({"device": given.device})).device
        document = {
            "schema": SCHEMA,
            "subject": subject.name,
            "of": given.of,
            "context": given.context,
            **sizes,
            "dtype": given.dtype,
            "figures": [asdict(each) for each in figures],
            "environment": environment(device),
        }
        write_out(given.out, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
