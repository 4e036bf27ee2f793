"""The options of the commands. Nothing here imports torch, so that help and errors come at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from graphengine.cli.option_flags import add_flags, common_flags, kept_facts
from graphengine.cli.parser import CommandParser

SAMPLING = "sampling_"
"""Prefix of parsed request options: requests and engines both have a `seed`."""
DRAWINGS = ("dot", "svg")
_ENGINE, _REQUEST = "EngineConfig", "SamplingParams"
_COMMON = ("--checkpoint", "--json", "--verbose")


def add_generate(parser: CommandParser) -> None:
    """The options of `generate`."""
    _add_engine_options(parser)
    parser.add_argument("--prompt", required=True, help="the prompt, or - for standard input")
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="texts of the same prompt, with seeds that count up, each in a line of --json; above "
        "1 each text comes once it is complete, after its seed (default: 1)",
    )
    _add_sampling_options(parser)
    parser.show_first((*_COMMON, "--prompt", *_common(_ENGINE, _REQUEST), "--json-schema"))


def add_chat(parser: CommandParser) -> None:
    """The options of `chat`."""
    _add_engine_options(parser)
    parser.add_argument("--system", help="system message")
    parser.add_argument(
        "--template-variable",
        type=template_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the chat template; VALUE is JSON if it parses as such, else text; may be "
        "repeated",
    )
    # The chat template decides how a prompt begins, and a prompt is all turns so far.
    _add_sampling_options(parser, but=("add_bos", "prompt_logprobs"))
    parser.set_defaults(sampling_defaults="checkpoint")
    parser.show_first((*_COMMON, "--system", *_common(_ENGINE, _REQUEST)))


def template_variable(text: str) -> tuple[str, Any]:
    """NAME=VALUE as a name and a value, which is JSON where it can be, else a string."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    if value in ("False", "None", "True"):
        # As text, each is true in a template.
        raise argparse.ArgumentTypeError(
            f"{text!r}: JSON has false, null and true; in quotes, '\"{value}\"', it is text"
        )
    try:
        # NaN and the like are no JSON.
        return name, json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        return name, value


def add_info(parser: CommandParser) -> None:
    """The options of `info`."""
    _add_engine_options(parser)
    parser.show_first((*_COMMON, *_common(_ENGINE)))


def add_doctor(parser: CommandParser) -> None:
    """The options of `doctor`."""
    parser.set_defaults(verbose=False)
    parser.add_argument("--json", action="store_true", help="print JSON only")


def add_graph(parser: CommandParser) -> None:
    """The commands `graph dump` and `graph diff`, which set `kind`."""
    kinds = parser.add_subparsers(required=True, metavar="dump|diff", dest="kind")
    about = "Write every graph that an engine captures to a folder."
    usage = "graphengine graph dump --out FOLDER ... (see --help)"
    dump = kinds.add_parser("dump", help=about, description=about, usage=usage)
    _add_engine_options(dump)
    dump.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    dump.add_argument("--draw", choices=DRAWINGS, help="also draw each graph, in this format")
    dump.show_first((*_COMMON, "--out", "--draw", *_common(_ENGINE)))
    about = "Compare two folders of `graph dump`; exit status 1 where a graph differs."
    diff = kinds.add_parser("diff", help=about, description=about)
    diff.set_defaults(verbose=False)
    diff.add_argument("old", type=Path, help="folder of the first dump")
    diff.add_argument("new", type=Path, help="folder of the second dump")
    diff.add_argument("--json", action="store_true", help="print JSON only")
    diff.add_argument(
        "--limit", type=int, default=20, help="most lines of changes to print for each graph"
    )
    diff.add_argument(
        "--exact-names",
        action="store_true",
        help="also compare the parts of names that vary, such as tile sizes",
    )
    diff.add_argument(
        "--ignore-sizes",
        action="store_true",
        help="do not compare grid, block and shared memory sizes",
    )


def add_ops(parser: CommandParser) -> None:
    """The options of `ops`, but for `--shape`, which must be there."""
    _add_engine_options(parser)
    parser.add_argument(
        "--graph", help="only this graph, such as decode/1/fast (default: all graphs)"
    )
    parser.show_first((*_COMMON, "--shape", "--graph", *_common(_ENGINE)))


def add_quantize(parser: CommandParser) -> None:
    """The options of `quantize`."""
    add = parser.add_argument
    parser.set_defaults(verbose=False)
    (kinds,) = (each.choices for each in kept_facts(_ENGINE) if each.name == "quantize")
    add("checkpoint", metavar="IN", help="directory or hub id of a 16-bit checkpoint")
    add("out", metavar="OUT", type=Path, help="folder to write, which must not exist yet")
    add("--kind", choices=kinds, default="int4", help="format to quantise weights to (%(default)s)")
    add(
        "--group-size",
        type=int,
        default=128,
        metavar="N",
        help="with int4, columns that share a scale: 32, 64 or 128 (%(default)s)",
    )
    add("--lm-head", action="store_true", help="quantise lm_head, too")
    add(
        "--device",
        default="cpu",
        help="device that rounds the weights, one at a time (%(default)s)",
    )


def _common(*tables: str) -> list[str]:
    return [flag for table in tables for flag in common_flags(kept_facts(table))]


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        default="demo",
        help="directory, GGUF file, hub id, or 'demo', the packaged model (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--verbose", action="store_true", help="log the memory budget and captures")
    group = parser.add_argument_group("the engine")
    add_flags(group, kept_facts(_ENGINE))
    group.add_argument(
        "--max-live",
        type=int,
        metavar="N",
        help="draft only for up to N live requests, and only while enough drafts are accepted",
    )
    group.add_argument(
        "--draft-vocab",
        metavar="TEXT:SIZE",
        help="with mtp, draft only the SIZE most frequent tokens of the UTF-8 file TEXT",
    )


def _add_sampling_options(parser: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    group = parser.add_argument_group("each request")
    add_flags(group, kept_facts(_REQUEST), but=but, prefix=SAMPLING)
    add: Any = group.add_argument
    add("--deadline", type=float, metavar="S", help="end the text as it is after S seconds")
    guided = group.add_mutually_exclusive_group()
    guided.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="the text is JSON that matches this schema"
    )
    guided.add_argument("--regex", help="the whole text matches this regular expression")
    guided.add_argument("--choice", metavar="A,B,...", help="the text is one of these strings")
    guided.add_argument(
        "--grammar", type=Path, metavar="FILE", help="the text matches this Lark grammar"
    )
    add(
        "--no-whitespace",
        action="store_true",
        help="with --json-schema, no whitespace between JSON tokens",
    )
