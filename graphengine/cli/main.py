"""`graphengine`: generate, chat, check a machine, see what an engine would hold, measure, tune.

A command's code is imported when it runs: `--version`, `--help` and errors of arguments do not wait
for torch.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from graphengine import __version__
from graphengine.cli import arguments as options_of
from graphengine.cli.parser import CommandParser


class Command(NamedTuple):
    """A command `x`, which is the function `x` of the module `commands.x`.

    about  its text in `--help`
    add    adds its options to a parser
    usage  the arguments as an error shows them: all options would hide the error
    """

    about: str
    add: Callable[[CommandParser], None]
    usage: str | None = None


COMMANDS = {
    "generate": Command(
        "Complete one prompt. The text goes to standard output, its figures to standard error.",
        options_of.add_generate,
        "--prompt PROMPT ...",
    ),
    "chat": Command(
        "Chat through the checkpoint's chat template; each line of input is one turn. Ctrl-C ends "
        "a reply, /help lists commands. Exit status 2 if a turn could not be served.",
        options_of.add_chat,
        "...",
    ),
    "info": Command(
        "Show what each rank, or one rank of each stage, would allocate and capture; allocate and "
        "capture nothing.",
        options_of.add_info,
        "...",
    ),
    "doctor": Command(
        "Tell whether and how an engine runs on this machine, and how to fix what is missing; "
        "exit status 1 if something is broken.",
        options_of.add_doctor,
    ),
    "graph": Command(
        "Write the captured graphs of an engine to a folder, or compare two folders.",
        options_of.add_graph,
    ),
    "quantize": Command(
        "Write a compressed-tensors checkpoint with weights of 8 or 4 bits, rounded to nearest.",
        options_of.add_quantize,
    ),
}

COMMANDS_ABOVE = {
    "acceptance": "Measure how many tokens per step drafters yield on a text.",
    "bench": "Measure the speed of a shape or a checkpoint.",
    "ops": "Show which kernels an engine's steps launch, one by one, and the weights that each "
    "reads; launch nothing.",
    "profile": "Profile an engine with Nsight Systems or torch's profiler.",
    "report": "Show where the time between tokens goes, from a recording or a trace.",
    "tune": "Find the fastest plans for the decode kernels of a shape or a checkpoint.",
}
"""Commands whose code lies above this folder, and their texts in `--help`.

Command `x` is the function `x(options)` of the module `x` of `FOLDER_ABOVE`; its options are the
`add_arguments(parser)` of the module `flags.x` there. This is the one place here that names
anything above, and only as text: a module is imported when its command is run and at no other time,
so that nothing in this folder depends on it.
"""
FOLDER_ABOVE = "graphengine.profiles"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 after an error the user can mend."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run_command(arguments)
    except ImportError as error:
        if "doctor" in arguments[:1]:
            raise
        print(
            f"graphengine: error: {error}: `graphengine doctor` tells what is missing",
            file=sys.stderr,
        )
        return 2


def _run_command(arguments: Sequence[str]) -> int:
    options = _parser(arguments[0] if arguments else None).parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character shows a replacement; the text continues.
        sys.stdout.reconfigure(errors="replace")
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        command: Callable[[argparse.Namespace], int | None] = options.command
        status = command(options)
        # The reader of the output may be gone, or the disk full; here it can still be reported.
        sys.stdout.flush()
    except BrokenPipeError:
        # `head` closes the pipe early. Then the interpreter must have nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"graphengine: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status or 0


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """All commands; of `COMMANDS_ABOVE` only the one `asked` for gets its options."""
    parser = CommandParser(prog="graphengine", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, command in COMMANDS.items():
        usage = command.usage and f"graphengine {name} {command.usage} (see --help)"
        sub = commands.add_parser(name, help=command.about, description=command.about, usage=usage)
        sub.set_defaults(command=partial(_run, f"{__package__}.commands.{name}", name))
        command.add(sub)
    for name, description in COMMANDS_ABOVE.items():
        sub = commands.add_parser(name, help=description, description=description)
        if name == asked:
            run = partial(_run, f"{FOLDER_ABOVE}.{name}", name)
            sub.set_defaults(command=run, verbose=False)
            flags: Any = import_module(f"{FOLDER_ABOVE}.flags.{name}")
            flags.add_arguments(sub)
    return parser


def _run(module: str, name: str, options: argparse.Namespace) -> int | None:
    """Import a command's module, and run it."""
    status: int | None = getattr(import_module(module), name)(options)
    return status
