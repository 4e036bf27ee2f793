"""Turns the arguments of a command line into options of an engine and of its requests."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import cast

from graphengine.cli.arguments import SAMPLING
from graphengine.cli.option_flags import given_options
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.engine_options import EngineOptions
from graphengine.sampling_params import SamplingParams
from graphengine.speculative import GateOptions
from graphengine.speculative_text import (
    parse_draft_vocabulary,
    parse_speculative,
    with_draft_vocabulary,
)
from graphengine.structured_outputs import StructuredOutputsParams


def open_engine(options: argparse.Namespace) -> Engine:
    """Open the engine that was asked for; a terminal shows how far it is loaded."""
    progress = None if options.json or not sys.stderr.isatty() else _progress_bar
    return Engine.from_pretrained(
        options.checkpoint, progress=progress, **read_engine_options(options)
    )


def read_engine_options(options: argparse.Namespace) -> EngineOptions:
    """The engine options that were given; the others keep `EngineConfig`'s defaults."""
    given = given_options(options, EngineConfig)
    if "speculative" in given:
        given["speculative"] = parse_speculative(given["speculative"])
    if options.draft_vocab is not None:
        vocabulary = parse_draft_vocabulary(options.draft_vocab)
        given["speculative"] = with_draft_vocabulary(given.get("speculative"), vocabulary)
    if getattr(options, f"{SAMPLING}prompt_logprobs", None) is not None:
        given["prompt_logprobs"] = True
    if options.max_live is not None:
        given["gate"] = GateOptions(max_live=options.max_live)
    return cast(EngineOptions, given)


def first_adapter(engine: Engine) -> str | None:
    """The adapter of a command's requests; None: none was given."""
    return next(iter(engine.adapters), None)


def read_sampling(
    options: argparse.Namespace, defaults: SamplingParams | None = None
) -> SamplingParams:
    """The request options that were given; the others are `defaults`, or `SamplingParams`'s own."""
    given = given_options(options, SamplingParams, prefix=SAMPLING)
    given["structured_outputs"] = _structured_outputs(options)
    return replace(SamplingParams() if defaults is None else defaults, **given)


def _structured_outputs(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """The output's constraint, from the one option of that group that was given."""
    if options.json_schema is not None:
        try:
            schema = options.json_schema.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--json-schema {options.json_schema}: {error}") from error
        return StructuredOutputsParams(json=schema, disable_any_whitespace=options.no_whitespace)
    if options.no_whitespace:
        raise ValueError("--no-whitespace is for --json-schema")
    if options.regex is not None:
        return StructuredOutputsParams(regex=options.regex)
    if options.choice is not None:
        return StructuredOutputsParams(choice=options.choice.split(","))
    if options.grammar is not None:
        return StructuredOutputsParams(grammar=options.grammar.read_text(encoding="utf-8"))
    return None


def _progress_bar(done: int, total: int) -> None:
    width = 30
    filled = width * done // max(total, 1)
    end = "\r\x1b[K" if done >= total else ""
    print(
        f"\rloading [{'#' * filled}{' ' * (width - filled)}] {done / 2**20:,.0f} of "
        f"{total / 2**20:,.0f} MiB{end}",
        end="",
        file=sys.stderr,
        flush=True,
    )
