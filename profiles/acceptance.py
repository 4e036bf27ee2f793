"""`graphengine acceptance`: tokens a step, and the time of one, by different drafters on a text.

Prompts are cut from the text and continued, by each drafter at each temperature and batch size. A
drafter's tokens must be those of plain decoding in its row family before its figures are reported,
except for trees in half precision, which attend in other splits. The figures include the share of
4-grams that a continuation repeats: a model that loops is easy to draft for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

from graphengine import Engine, EngineConfig, Result, SamplingParams
from graphengine.cli.terminal import columns, fit
from graphengine.demo import checkpoint_path, heldout_text
from graphengine.engine_options import EngineOptions
from graphengine.kernels.linear.plans import RowFamily
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.observe.environment import environment
from graphengine.profiles.arguments import check_out, integers, tell_written
from graphengine.profiles.benchmark.eager import comparable, require_equal
from graphengine.profiles.benchmark.engines import engine_options, freed
from graphengine.profiles.flags.acceptance import CPU_PROMPTS, MODES
from graphengine.profiles.progress import Progress, told
from graphengine.profiles.tables.percentiles import rounded
from graphengine.profiles.tables.text import Column, number, text_table
from graphengine.speculative import FORCE_ACCEPTED, Speculative, describe
from graphengine.speculative_text import parse_speculative
from graphengine.text.tokenizer import Tokenizer

SCHEMA = 2
FILTERS = ("top_k", "top_p", "min_p")
GRAM = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One invocation.

    options    options of every engine, without the batch
    batches    continuations at a time, of one engine after the other
    modes      by the text that named them
    filters    sampling options of every request, besides its temperature
    prompts    token ids, one list for each continuation
    following  the tokens that follow each prompt in the text, as many as in a continuation
    """

    name: str
    checkpoint: Path
    text: str
    options: dict[str, Any]
    batches: tuple[int, ...]
    modes: Mapping[str, Speculative]
    temperatures: tuple[float, ...]
    filters: dict[str, Any]
    prompts: list[list[int]]
    following: list[list[int]]
    new_tokens: int

    def params(self, temperature: float) -> list[SamplingParams]:
        """Parameters for each prompt: its own seed, the same for every engine."""
        return [
            SamplingParams(
                temperature=temperature, seed=index, max_tokens=self.new_tokens, **self.filters
            )
            for index in range(len(self.prompts))
        ]


def acceptance(options: argparse.Namespace) -> None:
    """Measure, print, write. ValueError for bad options, before anything is measured."""
    if options.out is not None:
        check_out(options.out)
    study = _read_options(options)
    with told(quiet=options.json) as progress:
        document = measure(study, progress)
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    shown = json.dumps(document, indent=2) if options.json else None
    print(shown or describe_document(document, columns()), flush=True)
    tell_written(options.out)


def _read_options(options: argparse.Namespace) -> Study:
    """The options, checked as far as possible before anything is built."""
    for name in ("stride", "prompt_tokens", "new_tokens", "prompts"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    names = ("device", "dtype", "row_family")
    engine = engine_options({name: getattr(options, name) for name in names})
    engine["max_seq_len"] = options.prompt_tokens + options.new_tokens
    modes = _modes(options.speculative or MODES)
    batches = tuple(dict.fromkeys(integers(options.max_batch, "max_batch")))
    for batch, mode in product(batches, modes.values()):
        config = EngineConfig(**engine | {"max_batch": batch, "speculative": mode})
        if config.forced_acceptance is not None:
            raise ValueError(f"{FORCE_ACCEPTED} is set, which forces the acceptance")
    temperatures = tuple(dict.fromkeys(_numbers(options.temperature)))
    filters = {name: getattr(options, name) for name in FILTERS}
    for temperature in temperatures:
        SamplingParams(temperature=temperature, **filters)

    demo = options.checkpoint == "demo"
    checkpoint = Checkpoint.open(checkpoint_path() if demo else options.checkpoint)
    if not checkpoint.has_tokenizer:
        raise ValueError(f"{checkpoint.path} has no tokenizer.json to split a text with")
    ids = Tokenizer.from_directory(checkpoint.path).encode(_text(options.text))
    on_gpu = EngineConfig(**engine).device.startswith("cuda")
    most = options.prompts or (None if on_gpu else CPU_PROMPTS)
    starts = prompt_starts(
        len(ids), options.prompt_tokens, options.new_tokens, stride=options.stride, most=most
    )
    ends = [start + options.prompt_tokens for start in starts]
    return Study(
        name="demo" if demo else checkpoint.path.name,
        checkpoint=checkpoint.path,
        text="the demo's held-out text" if options.text is None else options.text.name,
        options=engine,
        batches=batches,
        modes=modes,
        temperatures=temperatures,
        filters=filters,
        prompts=[ids[start:end] for start, end in zip(starts, ends, strict=True)],
        following=[ids[end : end + options.new_tokens] for end in ends],
        new_tokens=options.new_tokens,
    )


def _modes(texts: Sequence[str]) -> dict[str, Speculative]:
    found = {text: parse_speculative(text) for text in dict.fromkeys(texts)}
    modes = {text: mode for text, mode in found.items() if mode is not None}
    if len(modes) < len(found):
        raise ValueError("--speculative off accepts nothing: plain decoding is measured anyway")
    return modes


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--temperature {text!r} must be numbers, comma-separated: 0,1") from None


def _text(path: Path | None) -> str:
    if path is None:
        return heldout_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: {error}") from error


def prompt_starts(
    tokens: int, prompt_tokens: int, new_tokens: int, *, stride: int, most: int | None = None
) -> list[int]:
    """Where prompts begin in a text of `tokens`, each with its continuation inside of it.

    One prompt every `stride` tokens; of more than `most` prompts an evenly spread selection.
    ValueError if the text is too short for one.
    """
    last = tokens - prompt_tokens - new_tokens
    if last < 0:
        raise ValueError(
            f"a text of {tokens} tokens is too short for a prompt of {prompt_tokens} and "
            f"{new_tokens} tokens after it"
        )
    starts = list(range(0, last + 1, stride))
    if most is None or most >= len(starts):
        return starts
    return [starts[index * len(starts) // most] for index in range(most)]


def measure(study: Study, progress: Progress) -> dict[str, Any]:
    """The JSON document; `progress` is told the current measurement, and each drafter's result."""
    config = EngineConfig(**study.options)
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[int, RowFamily], dict[float, _Run]] = {}
    for batch, (name, mode) in product(study.batches, study.modes.items()):
        base = study.options | {"max_batch": batch}
        options = base | {"speculative": mode}
        family = EngineConfig(**options).family
        if (batch, family) not in plain:
            with _open(study, base | {"row_family": family}, progress) as engine:
                runs = {heat: _run(engine, study, heat, progress) for heat in study.temperatures}
            plain[batch, family] = runs
        with _open(study, options, progress) as engine:
            for temperature in study.temperatures:
                row = _row(engine, study, temperature, plain[batch, family][temperature], progress)
                rows.append(rounded({"speculative": name, "max_batch": batch, **row}))
                progress.done(
                    f"{name}, batch {batch}, temperature {temperature:g}: "
                    f"{row['acceptance']['mean_length']:.2f} tokens a step"
                )
    return {
        "schema": SCHEMA,
        "environment": environment(config.device),
        "checkpoint": study.name,
        "text": study.text,
        "prompts": len(study.prompts),
        "prompt_tokens": len(study.prompts[0]),
        "new_tokens": study.new_tokens,
        "filters": study.filters,
        "text_repeated_4grams": rounded(repeated_grams(study.following)),
        "rows": rows,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """All continuations of one engine at one temperature, and the seconds they took together."""

    numerics_id: str
    results: list[Result]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(result.token_ids) for result in self.results) / self.seconds

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds a token of a request, from its first token to its last.

        None where all have one token.
        """
        times = [result.timings.tokens for result in self.results if result.timings.tokens]
        later = sum(len(each) - 1 for each in times)
        took = sum(each[-1] - each[0] for each in times)
        return 1e3 * took / later if later else None


def _run(engine: Engine, study: Study, temperature: float, progress: Progress) -> _Run:
    params, mode = study.params(temperature), describe(engine.config.mode)
    progress.doing(f"{mode}, temperature {temperature:g}: warming up")
    # The first replay has one-time costs, so it is not timed.
    engine.generate(study.prompts[0], params[0])
    engine.acceptance.reset()
    progress.doing(f"{mode}, temperature {temperature:g}: {len(params)} continuations")
    started = time.perf_counter()
    results: list[Result] = engine.generate(study.prompts, params)
    seconds = time.perf_counter() - started
    return _Run(numerics_id=engine.numerics_id, results=results, seconds=seconds)


def _row(
    engine: Engine, study: Study, temperature: float, plain: _Run, progress: Progress
) -> dict[str, Any]:
    """One drafter at one temperature; RuntimeError unless its tokens are those of plain decoding.

    `equal_tokens` is None where an engine with a tree has numerics of its own: its tokens were not
    compared. `tokens_per_s` is of all continuations, their prompts' prefill included;
    `ms_per_token` is of one request, without its prefill.
    """
    run = _run(engine, study, temperature, progress)
    mode = describe(engine.config.mode)
    compared = comparable(engine, plain.numerics_id)
    if compared:
        for index, pair in enumerate(zip(plain.results, run.results, strict=True)):
            require_equal(pair, f"prompt {index} at temperature {temperature}, plain and {mode}:")
    return {
        "mode": mode,
        "temperature": temperature,
        "acceptance": engine.acceptance.as_dict(),
        "repeated_4grams": repeated_grams([result.token_ids for result in run.results]),
        "equal_tokens": sum(len(each.token_ids) for each in run.results) if compared else None,
        "tokens_per_s": run.tokens_per_s,
        "plain_tokens_per_s": plain.tokens_per_s,
        "ms_per_token": run.ms_per_token,
        "plain_ms_per_token": plain.ms_per_token,
        "row_family": engine.row_family,
        "numerics_id": run.numerics_id,
    }


def repeated_grams(texts: Sequence[Sequence[int]], size: int = GRAM) -> float | None:
    """Share of the texts' n-grams that came earlier in the same text; None if all are too short."""
    total = repeated = 0
    for text in texts:
        grams = [tuple(text[start : start + size]) for start in range(len(text) - size + 1)]
        total += len(grams)
        repeated += len(grams) - len({*grams})
    return repeated / total if total else None


def _open(
    study: Study, options: Mapping[str, Any], progress: Progress
) -> AbstractContextManager[Engine]:
    config = EngineConfig(**options)
    name = f"{study.name}, max_batch={config.max_batch}, {describe(config.mode)}"
    progress.doing(f"{name}: opening the engine")
    return freed(Engine.from_pretrained(study.checkpoint, **cast(EngineOptions, options)))


def _shares(rates: Sequence[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates)


COLUMNS = (
    Column("batch", lambda row: str(row["max_batch"])),
    Column("temperature", lambda row: f"{row['temperature']:g}"),
    Column("tok/step", lambda row: number(row["acceptance"]["mean_length"], 2)),
    Column("accepted %", lambda row: number(100 * (row["acceptance"]["rate"] or 0), 1)),
    Column("by position %", lambda row: _shares(row["acceptance"]["rates"])),
    Column("looping %", lambda row: number(100 * (row["repeated_4grams"] or 0), 1)),
    Column("tok/s", lambda row: number(row["tokens_per_s"], 1)),
    Column("plain", lambda row: number(row["plain_tokens_per_s"], 1)),
    Column("ms/tok", lambda row: number(row["ms_per_token"], 4)),
    Column("plain", lambda row: number(row["plain_ms_per_token"], 4)),
    Column("family", lambda row: row["row_family"]),
    Column("tokens", lambda row: "own" if row["equal_tokens"] is None else "checked"),
    Column("speculative mode", lambda row: row["speculative"]),
)


def describe_document(document: Mapping[str, Any], width: int | None = None) -> str:
    """All of a document's figures, for a terminal of this width; None: lines of any length."""
    looping = 100 * (document["text_repeated_4grams"] or 0)
    filters = ", ".join(f"{name} {value:g}" for name, value in document["filters"].items())
    heading = (
        f"{document['checkpoint']} on {document['environment']['device']}: "
        f"{document['prompts']} prompts of {document['prompt_tokens']} tokens from "
        f"{document['text']}, {document['new_tokens']} new tokens each; {filters}. Tokens are "
        "checked against plain decoding of the same row family; a tree in half precision has its "
        "own.\n"
        f"ms/tok: of one request, after its first token. looping: share of repeated {GRAM}-grams, "
        f"in the text itself {looping:.1f} %"
    )
    return f"{fit(heading, width)}\n\n{text_table(COLUMNS, document['rows'], width=width)}"
