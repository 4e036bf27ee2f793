"""A table of options as flags of a command line, and what was given there."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

from graphengine.options import Flag, Row, rows


class TakesFlags(Protocol):
    """A parser, or one of its groups."""

    def add_argument(self, *names: str, **options: Any) -> Any: ...


def add_flags(
    parser: TakesFlags,
    table: type,
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
    prefix: str = "",
) -> None:
    """Add the flags of a table's options to `parser`; `given_options` reads them.

    only    names of options, each of which has a flag; None: all that have one
    but     names of options that get no flag in this command
    prefix  of the options' names in the parsed result, since two tables may share a name
    """
    for row in rows(table):
        wanted = row.flag is not None if only is None else row.name in only
        if wanted and row.name not in but:
            assert row.flag is not None, f"{row.name=} has no flag"
            _add(parser, row, row.flag, prefix + row.name)


def given_options(parsed: argparse.Namespace, table: type, *, prefix: str = "") -> dict[str, Any]:
    """The options that were given, or for which the command has a default of its own."""
    given = {}
    for row in rows(table):
        value = getattr(parsed, prefix + row.name, None)
        if row.flag is not None and value is not None:
            given[row.name] = row.flag.collect(value) if row.flag.many else value
    return given


def _add(parser: TakesFlags, row: Row, flag: Flag, dest: str) -> None:
    shown: dict[str, Any] = {"dest": dest, "default": flag.default}
    # A command line has no way to give None.
    text, name = flag.help or row.doc.replace("None: ", "left out: "), row.flag_name
    if row.kind is bool:
        if row.optional:
            shown["action"] = argparse.BooleanOptionalAction
        else:
            shown |= {"action": "store_const", "const": not flag.inverse}
    else:
        if not isinstance(row.kind, tuple):
            shown["metavar"] = flag.metavar or name.upper().replace("-", "_")
        if flag.parse is not None:
            shown["type"] = _parser(flag.parse)
        elif isinstance(row.kind, tuple):
            shown["choices"] = row.kind
        else:
            shown["type"] = row.kind or str
        if flag.many:
            shown["action"] = "append"
            text += "; may be repeated"
        default = row.default if flag.default is None else flag.default
        if default not in (None, (), dataclasses.MISSING):
            text += f" (default: {_shown(default)})"
    parser.add_argument(f"--{name}", help=text.replace("%", "%%"), **shown)


def _shown(default: Any) -> str:
    """A default as it is given on a command line."""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, with its ValueError shown by argparse unchanged."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
