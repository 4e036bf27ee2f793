"""A table of options as flags of a command line, and the options that were given there.

`FlagFacts` hold the facts about a row that a command line needs. The facts of the tables of engines
and requests are in `flags.json`, too, which `option_files.py` writes: a table imports torch, and
neither `--help` nor a typing error should take seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from graphengine.options.table import Flag, Row, rows

FILE = Path(__file__).with_name("flags.json")
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}
# Stands for None where the user gave it, as a plain None means that the flag was not given.
_NONE = object()


class TakesFlags(Protocol):
    """A parser, or one of its groups."""

    def add_argument(self, *names: str, **options: Any) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagFacts:
    """Facts about an option that has a flag.

    name      of the option
    flag      its name on a command line, without the dashes
    help      its text in `--help`
    kind      "int", "float", "str" or "bool"
    choices   of its values; empty: not limited
    negated   it has a `--no-` form, too
    value     the value that a flag without a value stands for
    parse     reads a value from text: a function, or `module:function`; None: the kind says how
    default   the command's default where the flag is not given
    many      it may be repeated
    nullable  a number that may be None though it is not by default: it is given as "none"
    common    whether `--help` lists it
    """

    name: str
    flag: str
    help: str
    kind: str = "str"
    choices: Sequence[str] = ()
    negated: bool = False
    value: bool = True
    metavar: str = ""
    parse: Callable[[str], Any] | str | None = None
    default: Any = None
    many: bool = False
    nullable: bool = False
    common: bool = False


def flag_facts(table: type) -> tuple[FlagFacts, ...]:
    """The flags of a table of options, in its order."""
    return tuple(_facts(row, row.flag) for row in rows(table) if row.flag is not None)


def to_json(tables: Iterable[type]) -> str:
    """The text of `FILE`: the flags of each table by its name, a line each."""
    parts = []
    for table in tables:
        lines = ",\n".join(json.dumps(_changed(facts)) for facts in flag_facts(table))
        parts.append(f"{json.dumps(table.__name__)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@cache
def kept_facts(table: str) -> tuple[FlagFacts, ...]:
    """The flags of a table, by its name, from `FILE`: the table itself is not imported."""
    found = json.loads(FILE.read_text(encoding="utf-8"))[table]
    return tuple(FlagFacts(**facts) for facts in found)


def add_flags(
    parser: TakesFlags,
    table: type | Sequence[FlagFacts],
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
    prefix: str = "",
) -> None:
    """Add the flags of a table's options to `parser`; `given_options` reads them.

    only    names of options, each of which has a flag; None: all that have one
    but     names of options that get no flag in this command
    prefix  put before the options' names in the parsed result, as two tables may share a name
    """
    known = {facts.name: facts for facts in _facts_of(table)}
    assert only is None or known.keys() >= {*only}, f"{only=} has options without a flag"
    for name, facts in known.items():
        if (only is None or name in only) and name not in but:
            _add(parser, facts, prefix + name)


def common_flags(table: type | Sequence[FlagFacts]) -> list[str]:
    """The flags that `--help` lists, as they are typed."""
    return [f"--{facts.flag}" for facts in _facts_of(table) if facts.common]


def given_options(parsed: argparse.Namespace, table: type, *, prefix: str = "") -> dict[str, Any]:
    """The options that were given, and those with a default of the command's own."""
    given = {}
    for row in rows(table):
        value = getattr(parsed, prefix + row.name, None)
        if row.flag is not None and value is not None:
            value = row.flag.collect(value) if row.flag.many else value
            given[row.name] = None if value is _NONE else value
    return given


def _facts_of(table: type | Sequence[FlagFacts]) -> Sequence[FlagFacts]:
    return flag_facts(table) if isinstance(table, type) else table


def _facts(row: Row, flag: Flag) -> FlagFacts:
    choices = row.kind if isinstance(row.kind, tuple) else ()
    kind = row.kind.__name__ if row.kind in (int, float, bool) else "str"
    default = row.default if flag.default is None else flag.default
    nullable = kind in ("int", "float") and row.optional and not flag.parse and default is not None
    # Other options cannot be given None.
    text = flag.help or row.doc.replace("None: ", "none: " if nullable else "left out: ")
    if kind != "bool":
        text += "; may be repeated" if flag.many else ""
        if default not in (None, (), dataclasses.MISSING):
            text += f" (default: {_shown(default)})"
    return FlagFacts(
        name=row.name,
        flag=row.flag_name,
        help=text,
        kind=kind,
        choices=choices,
        negated=kind == "bool" and row.optional,
        value=not flag.inverse,
        metavar=flag.metavar or row.flag_name.upper().replace("-", "_"),
        parse=flag.parse,
        default=flag.default,
        many=flag.many,
        nullable=nullable,
        common=flag.common,
    )


def _changed(facts: FlagFacts) -> dict[str, Any]:
    """The fields that differ from their defaults, in JSON types."""
    changed = {}
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        if callable(value):
            value = f"{value.__module__}:{value.__name__}"
        if value != field.default:
            changed[field.name] = value
    return changed


def _add(parser: TakesFlags, facts: FlagFacts, dest: str) -> None:
    shown: dict[str, Any] = {"dest": dest, "default": facts.default}
    if facts.negated:
        shown["action"] = argparse.BooleanOptionalAction
    elif facts.kind == "bool":
        shown |= {"action": "store_const", "const": facts.value}
    else:
        if facts.many:
            shown["action"] = "append"
        if facts.choices and facts.parse is None:
            shown["choices"] = tuple(facts.choices)
        else:
            shown["metavar"] = facts.metavar
            kind = _TYPES[facts.kind]
            if facts.nullable:
                shown["type"] = _or_none(kind)
            else:
                shown["type"] = _parser(facts.parse) if facts.parse else kind
    parser.add_argument(f"--{facts.flag}", help=facts.help.replace("%", "%%"), **shown)


def _shown(default: Any) -> str:
    """A default as it is given on a command line."""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _parser(parse: Callable[[str], Any] | str) -> Callable[[str], Any]:
    """`parse`, with its ValueError shown by argparse unchanged."""
    function = partial(_call, parse) if isinstance(parse, str) else parse

    def parsed(text: str) -> Any:
        try:
            return function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _or_none(kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        return _NONE if text == "none" else kind(text)

    # argparse names a wrong value's type by it.
    number.__name__ = kind.__name__
    return number


def _call(name: str, text: str) -> Any:
    """Import `module:function` and call it."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)(text)
