"""What the filters, tests, methods and operators of jinja2 cost, charged before they run.

A step is about the time of one turn of a loop. Each function here is called with a meter, and the
value and the arguments of an operation. It charges the meter in proportion to the operation's work,
refuses what would be too large, and returns the value to pass to the operation: an iterator becomes
one that counts, or a list where all of it is read anyway.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from string import Formatter
from typing import Any, Protocol

from jinja2.exceptions import SecurityError

MAX_DIGITS = 1024
"""Decimal places, of either sign, that `round` may be asked for."""

# Characters that one step pays for: to copy them, to scan them in C, to do more work for each. And
# the items of a list that one step pays to copy.
COPY, SCAN, WORK = 4096, 512, 64
ITEMS = 64
# Encodings whose codecs take linear time. Punycode's, for example, is quadratic.
_LINEAR = frozenset({"ascii", "iso8859-1", "utf-8", "utf-16", "utf-32"})


class Meter(Protocol):
    """Counts steps and measures values. All methods raise SecurityError beyond a limit."""

    def charge(self, steps: int) -> None:
        """Count this many steps."""

    def measure(self, value: Any) -> tuple[int, int, int]:
        """(characters and items in all that `value` holds, values in it, how deep they nest).

        A value that it holds twice counts twice, as in a traversal.
        """

    def weigh(self, value: Any) -> int:
        """The first of the three numbers of `measure`."""

    def check_size(self, size: float) -> None:
        """Refuse a text or list of this many characters or items if they are too many."""

    def counted(self, items: Iterable[Any], each: int = 1, weighed: bool = False) -> Iterator[Any]:
        """Yield the items, and charge for each as it is taken."""


Prepare = Callable[..., Any]


def cheap(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
    """Cost of an operation that takes the same time for any value."""
    return value


def by_weight(per_step: int) -> Prepare:
    """Cost of an operation that traverses everything in the value once."""

    def prepare(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
        meter.charge(meter.weigh(value) // per_step)
        return value

    return prepare


def by_length(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
    """Cost of an operation that copies a text or a list."""
    if isinstance(value, (str, bytes)):
        meter.charge(len(value) // COPY)
    elif isinstance(value, (list, tuple)):
        meter.charge(len(value) // ITEMS)
    return value


def iterated(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
    """Cost of an operation that iterates over the items, but does not look inside them."""
    if hasattr(value, "__len__"):
        meter.charge(len(value) // 16)
        return value
    return meter.counted(value)


def lazily(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Cost of an operation that iterates lazily over the items, and does something for each."""
    return meter.counted(value, 1 + _named(args, kwargs) // 4) if value else value


def _unique(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    return meter.counted(value, 1 + _named(args, kwargs) // 4, weighed=True)


def _named(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int:
    """Characters of all text arguments, which include paths of attributes."""
    return sum(len(value) for value in (*args, *kwargs.values()) if isinstance(value, str))


def listed(meter: Meter, value: Any) -> Any:
    """`value`, or a list of its items where their number is unknown."""
    return value if hasattr(value, "__len__") else list(meter.counted(value))


def ordered(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Cost of an operation that compares the items with each other about as often as sorting."""
    items = listed(meter, value)
    count = len(items)
    rounds = max(1, count.bit_length())
    meter.charge(count * (1 + _named(args, kwargs) // 4) + meter.weigh(items) * rounds // 256)
    return items


def _batch(meter: Meter, value: Any, linecount: Any, fill_with: Any = None) -> Any:
    if isinstance(linecount, int) and fill_with is not None:
        meter.check_size(linecount)
        meter.charge(max(0, linecount) // ITEMS)
    return meter.counted(value)


def _slice(meter: Meter, value: Any, slices: Any, fill_with: Any = None) -> Any:
    if isinstance(slices, int):
        meter.charge(max(0, slices))
    return iterated(meter, value)


def _round(meter: Meter, value: Any, precision: Any = 0, method: Any = "common") -> Any:
    if isinstance(precision, int) and abs(precision) > MAX_DIGITS:
        raise SecurityError(
            f"a rounding to {precision} decimal places exceeds the limit of {MAX_DIGITS}"
        )
    if hasattr(value, "__len__") and method in ("ceil", "floor"):
        # A text times ten to the power of the precision is a text.
        raise TypeError(f"must be real number, not {type(value).__name__}")
    return value


def _center(meter: Meter, value: Any, width: Any = 80) -> Any:
    if isinstance(width, int):
        meter.check_size(width)
        meter.charge(max(0, width) // COPY)
    return by_weight(SCAN)(meter, value)


def _indent(meter: Meter, value: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    if isinstance(value, str):
        meter.charge(len(value) // WORK)
        lines = 1 + len(value.splitlines())
        margin = len(width) if isinstance(width, str) else width
        if isinstance(margin, int):
            size = len(value) + lines * max(0, margin)
            meter.check_size(max(size, margin))
            meter.charge(lines + size // COPY)
    return value


def _wordwrap(
    meter: Meter,
    value: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    if isinstance(value, str):
        meter.charge(len(value) // 8)
        longest = max(map(len, value.splitlines()), default=0)
        # The rest of a long word is copied for each of its lines.
        step = max(1, width) if isinstance(width, int) else 1
        meter.charge(longest * longest // step // COPY)
        if isinstance(wrapstring, str):
            meter.check_size(len(value) * max(1, len(wrapstring)))
    return value


def _striptags(meter: Meter, value: Any) -> Any:
    weight = meter.weigh(value)
    # Removing a tag copies the text.
    tags = value.count("<") if isinstance(value, str) else weight
    meter.charge(weight // 16 + tags * weight // COPY)
    return value


def _urlize(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    weight = meter.weigh(value)
    meter.charge(weight // 8)
    words = value.split() if isinstance(value, str) else [" " * weight]
    # The patterns that find the end of a link try every position in a word.
    longest = max(map(len, words), default=0)
    meter.charge(len(words) + longest * longest // 16)
    written = sum(meter.weigh(argument) for argument in (*args, *kwargs.values()))
    meter.check_size(len(words) * written)
    meter.charge(len(words) * written // WORK)
    return value


def _trim(meter: Meter, value: Any, chars: Any = None) -> Any:
    tried = len(chars) if isinstance(chars, (str, bytes)) else 0
    meter.charge(meter.weigh(value) * (1 + tried // 4) // SCAN)
    return value


def _replace(meter: Meter, value: Any, old: Any, new: Any, count: Any = None) -> Any:
    meter.charge(meter.weigh(value) // SCAN)
    meter.check_size(meter.weigh(value))
    text, old, new = (
        part if isinstance(part, (str, bytes)) else str(part) for part in (value, old, new)
    )
    found = text.count(old) if isinstance(old, type(text)) or isinstance(text, str) else 0
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    size = len(text) + found * (len(new) - len(old))
    meter.check_size(size)
    meter.charge(found // 16 + max(0, size) // SCAN)
    return value


def _join(meter: Meter, value: Any, d: Any = "", *args: Any, **kwargs: Any) -> Any:
    items = listed(meter, value)
    size = meter.weigh(items) + len(items) * meter.weigh(d)
    meter.check_size(size)
    meter.charge(len(items) * (1 + _named(args, kwargs)) // 8 + size // SCAN)
    return items


def _json(
    meter: Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> Any:
    weight, values, depth = meter.measure(value)
    margin = len(indent) if isinstance(indent, str) else indent
    margin = max(0, margin) if isinstance(margin, int) else 0
    size = weight + values * (depth * margin + meter.weigh(separators))
    meter.check_size(max(size, margin))
    meter.charge(values // 4 + size // WORK)
    return value


def _pprint(meter: Meter, value: Any) -> Any:
    weight, values, depth = meter.measure(value)
    # The contents are formatted again at each level, to see whether they fit on a line.
    meter.charge((values + weight // 16) * (1 + depth))
    return value


def _urlencode(meter: Meter, value: Any) -> Any:
    value = list(meter.counted(value)) if isinstance(value, Iterator) else value
    meter.charge(meter.weigh(value) // 16)
    return value


def percent(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """`value % args`, as in the filter `format`."""
    given = kwargs or args
    if not isinstance(value, (str, bytes)):
        # The filter converts it to text.
        meter.charge(meter.weigh(value) // SCAN)
        value = str(value)
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    meter.charge(len(text) // WORK)
    fields = _PERCENT.findall(text)
    widths = sum(_number(part) for field in fields for part in field if part != "*")
    if any("*" in field for field in fields):
        numbers = [abs(item) for item in args if isinstance(item, int)]
        widths += sum(field.count("*") for field in fields) * max(numbers, default=0)
    uses = len(fields) if isinstance(given, Mapping) or _is_mapping(args) else 1
    size = len(text) + widths + uses * meter.weigh(given)
    meter.check_size(size)
    meter.charge(len(fields) // 4 + int(size) // SCAN)
    return value


_PERCENT = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+)?)?")


def _is_mapping(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and isinstance(args[0], Mapping)


def _number(digits: str) -> float:
    return 0 if not digits else int(digits) if len(digits) < 12 else inf


def _format(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    meter.charge(len(value) // WORK)
    fields = [field for field in Formatter().parse(value) if field[1] is not None]
    widths = 0.0
    for _, _, spec, _ in fields:
        if "{" in (spec or ""):
            raise SecurityError(f"a format whose width is a field: {spec!r}")
        widths += sum(map(_number, re.findall(r"\d+", spec or "")))
    size = len(value) + widths + len(fields) * (meter.weigh(args) + meter.weigh(kwargs))
    meter.check_size(size)
    meter.charge(len(fields) + int(size) // SCAN)
    return value


def _split(meter: Meter, value: Any, sep: Any = None, *_: Any, **__: Any) -> Any:
    parts = len(value) // 2
    if isinstance(sep, type(value)) and sep:
        meter.charge(len(value) // SCAN)
        parts = value.count(sep)
    meter.charge(parts // 8)
    return value


def _find(meter: Meter, value: Any, part: Any = "", *_: Any, **__: Any) -> Any:
    """A search from the front is linear, except in short texts, where it may try every position."""
    tried = min(len(part), 128) if isinstance(part, (str, bytes)) else 1
    meter.charge(len(value) * (1 + tried // 16) // SCAN)
    return value


def _rfind(meter: Meter, value: Any, part: Any = "", *args: Any, **kwargs: Any) -> Any:
    """A search from the end may try every position in any text."""
    tried = len(part) if isinstance(part, (str, bytes)) else 1
    meter.charge(len(value) * (1 + tried // 16) // SCAN)
    return value


def _rsplit(meter: Meter, value: Any, sep: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _rfind(meter, _split(meter, value, sep), sep)


def _encode(meter: Meter, value: Any, encoding: Any = "utf-8", *_: Any, **__: Any) -> Any:
    name = ""
    with suppress(LookupError, TypeError, ValueError):
        name = codecs.lookup(encoding).name
    meter.charge(len(value) // WORK if name in _LINEAR else len(value) ** 2 // WORK)
    return value


def _translate(meter: Meter, value: Any, table: Any = (), *_: Any, **__: Any) -> Any:
    values = table.values() if isinstance(table, Mapping) else table
    longest = 1
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        longest = max((len(item) for item in values if isinstance(item, str)), default=1)
    meter.check_size(len(value) * longest)
    meter.charge(len(value) * longest // WORK)
    return value


text = by_weight(WORK)
shown = by_weight(SCAN)
walked = by_weight(8)

FILTERS: dict[str, Prepare] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "last", "length"), cheap),
    **dict.fromkeys(("items", "random"), cheap),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), lazily),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), ordered),
    **dict.fromkeys(("capitalize", "filesizeformat", "float", "int", "lower", "upper"), text),
    **dict.fromkeys(("e", "escape", "forceescape", "safe", "string", "truncate"), shown),
    **dict.fromkeys(("wordcount", "xmlattr"), walked),
    "batch": _batch,
    "center": _center,
    "format": percent,
    "indent": _indent,
    "join": _join,
    "list": iterated,
    "pprint": _pprint,
    "replace": _replace,
    "reverse": by_length,
    "round": _round,
    "slice": _slice,
    "striptags": _striptags,
    "sum": lazily,
    "title": by_weight(4),
    "tojson": _json,
    "trim": _trim,
    "unique": _unique,
    "urlencode": _urlencode,
    "urlize": _urlize,
    "wordwrap": _wordwrap,
}

_COMPARING = "== eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le in"
_ASKING = "boolean callable defined divisibleby escaped even false filter float integer iterable"
_ASKING += " mapping none number odd sameas sequence string test true undefined"
TESTS: dict[str, Prepare] = {
    **dict.fromkeys(_COMPARING.split(), shown),
    **dict.fromkeys(_ASKING.split(), cheap),
    **dict.fromkeys(("lower", "upper"), text),
}

_SEARCHING = "count endswith find index partition removeprefix removesuffix startswith"
_TEXT_METHODS: dict[str, Prepare] = {
    **dict.fromkeys(_SEARCHING.split(), _find),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _rfind),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _trim),
    **dict.fromkeys(("format", "format_map"), _format),
    **dict.fromkeys(("encode", "decode"), _encode),
    "join": cheap,
    "replace": _replace,
    "rsplit": _rsplit,
    "split": _split,
    "striptags": _striptags,
    "translate": _translate,
}
_DICT_METHODS = dict.fromkeys(("get", "items", "keys", "values"), cheap)


def method_cost(owner: Any, name: str) -> Prepare:
    """What the method `name` of this value costs."""
    if isinstance(owner, (str, bytes)):
        return _TEXT_METHODS.get(name, text)
    return _DICT_METHODS.get(name, walked) if isinstance(owner, dict) else walked


def joined(meter: Meter, separator: Any, items: Any) -> list[Any]:
    """The items that `separator.join` is to be given."""
    found = list(_join(meter, items, separator))
    return found
