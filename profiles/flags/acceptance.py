"""The flags of `graphengine acceptance`."""

from __future__ import annotations

from pathlib import Path

from graphengine.cli.option_flags import add_flags, kept_facts
from graphengine.cli.parser import CommandParser
from graphengine.options.option_syntax import GRAMMAR
from graphengine.profiles.flags import DTYPE_NAMES

MODES = ("mtp:3", "mtp:1:vanilla", "ngram:3", "ngram:5:3")
TEMPERATURES = "0,1"
COMMON = (
    *("--checkpoint", "--text", "--speculative", "--temperature", "--prompts", "--new-tokens"),
    *("--max-batch", "--device", "--dtype", "--out", "--json", "--verbose"),
)
"""Options that `--help` lists."""
CPU_PROMPTS = 4
"""Default number of prompts on a CPU; a GPU takes the whole text."""


def add_arguments(parser: CommandParser) -> None:
    """The options of `graphengine acceptance`."""
    parser.usage = "graphengine acceptance ... (see --help)"
    add = parser.add_argument
    add("--checkpoint", default="demo", help="directory or hub id; 'demo' is the packaged model")
    add(
        "--text",
        type=Path,
        help="UTF-8 file (default: text that the demo model was not trained on)",
    )
    add("--speculative", action="append", metavar="MODE",
        help=f"may be repeated (default: {', '.join(MODES)}); eagle3:demo and dflash:demo are the "
        f"packaged drafters of the demo model: {GRAMMAR}")  # fmt: skip
    add(
        "--temperature",
        default=TEMPERATURES,
        help=f"one or several, comma-separated (default: {TEMPERATURES})",
    )
    add("--stride", type=int, default=512, help="tokens between the beginnings of two prompts")
    add("--prompt-tokens", type=int, default=128)
    add("--new-tokens", type=int, default=128, help="most new tokens of each continuation")
    add(
        "--prompts",
        type=int,
        help=f"number, spread over the text (default: all; {CPU_PROMPTS} on a CPU)",
    )
    add("--top-k", type=int, default=0, help="top_k of every request; 0: no limit")
    add("--top-p", type=float, default=1.0, help="top_p of every request; 1: no limit")
    add("--min-p", type=float, default=0.0, help="min_p of every request; 0: no limit")
    add(
        "--max-batch",
        default="1",
        help="continuations at a time: one number or several, such as 1,8",
    )
    add_flags(parser, kept_facts("EngineConfig"), only=("device", "row_family"))
    add("--dtype", choices=DTYPE_NAMES, help="default: the checkpoint's, float32 on a CPU")
    add("--out", type=Path, help="JSON file to write")
    add("--json", action="store_true", help="print the JSON instead of tables")
    add("--verbose", action="store_true", help="log the memory budget and captures")
    parser.show_first(COMMON)
