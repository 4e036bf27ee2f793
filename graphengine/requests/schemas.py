"""Prepares JSON schemas for llguidance: refuses or rewrites those that it would silently break.

llguidance refuses keywords that it does not know. It does not enforce some of the keywords that it
knows in every case, and outputs are then complete JSON that the schema forbids:

- It reads numbers as doubles, and not always as the nearest one.
- A bound that excludes a whole number allows it if the other bound is less than 1 away.
- It multiplies several multiples in 32 bits, and may take hours to compile a large one.
- It does not compare keys that a schema leaves open, so a key may come twice, and count twice.
- `additionalItems` makes it ignore `prefixItems`.

Schemas with these problems are refused. In two other cases an equivalent schema or option is used:

- A key that a schema leaves open may be written with numeric escapes of characters. A named
  property could then come again, with any value: numeric escapes are not allowed in that case.
- A pattern's class with every control character allows every escape, also of a quote or a
  backslash that the class excludes. U+0000 is taken out of classes.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Context, Decimal, InvalidOperation
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Node = dict[str, Any]


class Bound(NamedTuple):
    value: Decimal
    keyword: str
    excluded: bool

    @property
    def is_whole(self) -> bool:
        return self.value == self.value.to_integral_value()


# Keywords whose values map names to schemas, and those whose values hold no schemas.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")

_MOST_DIGITS = 2**53
"""The digits of a number, read as an integer, are exactly one double up to this one."""
_MOST_EXPONENT = 22
"""Powers of ten with exponents up to this one are exactly doubles."""
_EXPONENTS = 308
"""Doubles have full precision from ten to the power of minus this to ten to the power of this."""
_MOST_MULTIPLE = (2**32 - 10) // 10
"""Largest product of multiples: llguidance computes ten times a remainder, plus a digit, in 32
bits."""
_MOST_REMAINDERS = 100_000
"""Most remainders that digits may leave: compiling takes 30 us for each."""

# Every escape of JSON except the numeric one.
_SHORT_ESCAPES = 'nrbtf\\"'
# Precise enough for sums of numbers with all digits that a double may have around its point.
_EXACT = Context(prec=2000)


def for_llguidance(schema: Node) -> tuple[str, dict[str, Any]]:
    """The schema's text for llguidance, and options of its grammar.

    schema  with numbers as `int` and `Decimal`; it is changed in place

    ValueError, with the place and the numbers, for a schema that llguidance would not enforce.
    """
    _check_exponents(schema)
    nodes = list(_nodes(schema))
    for place, node in nodes:
        _check_reference(place, node, schema)
        _check_numbers(place, node)
        _check_keys(place, node)
    for place, node in nodes:
        _check_together(place, _together(node, schema))
    for _, node in nodes:
        _rewrite_patterns(node)
    several = any(_named_and_open(node) for _, node in nodes)
    options = {"json_allowed_escapes": _SHORT_ESCAPES} if several else {}
    return json.dumps(schema, default=float), options


def read_number(text: str) -> Decimal:
    """A schema's number with a point or an exponent; ValueError if it is beyond Decimal."""
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise _beyond(text) from error


def _nodes(schema: Node) -> Iterator[tuple[str, Node]]:
    """Each schema inside the schema, the schema itself included, and its place: a JSON pointer.

    Values of unknown keywords count as schemas, since a `$ref` may lead there.
    """
    held: list[tuple[str, Node]] = [("", schema)]
    while held:
        place, node = held.pop()
        yield place, node
        for key, value in node.items():
            if key in _VALUES:
                continue
            here = f"{place}/{key}"
            if key in _MAPS and isinstance(value, dict):
                inner = [(f"{here}/{name}", each) for name, each in value.items()]
            else:
                several = enumerate(value) if isinstance(value, list) else ()
                inner = [(here, value), *((f"{here}/{index}", each) for index, each in several)]
            held += [(at, each) for at, each in inner if isinstance(each, dict)]


def _at(place: str) -> str:
    return f"at {place}: " if place else ""


# Numbers.


def _check_exponents(schema: Node) -> None:
    """ValueError for numbers beyond doubles, which may also have too many digits to write out."""
    for number in _numbers(schema):
        if abs(number.adjusted()) >= _EXPONENTS:
            raise _beyond(number)


def _beyond(number: object) -> ValueError:
    return ValueError(
        f"{number} is beyond what llguidance reads: 1E-{_EXPONENTS} to 1E+{_EXPONENTS}"
    )


def _check_numbers(place: str, node: Node) -> None:
    """ValueError for a number that llguidance would read as a different one."""
    for value in _numbers([node.get("const"), node.get("enum")]):
        if _is_rounded(value) and not _allows({"const": value}, value):
            raise ValueError(
                f"{_at(place)}llguidance reads numbers as doubles, and would write another one "
                f"than the constant {value}; a string could hold it"
            )
    for keyword in _LOWER + _UPPER:
        bound = _number(node.get(keyword))
        if bound is not None and _is_rounded(bound):
            _check_bound(place, keyword, bound, node)


def _number(value: Any) -> Decimal | None:
    """The value, if it is a number."""
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return Decimal(value) if is_number else None


def _numbers(value: Any) -> Iterator[Decimal]:
    """All numbers in a value."""
    held = [value]
    while held:
        each = held.pop()
        if isinstance(each, dict):
            held += each.values()
        elif isinstance(each, list):
            held += each
        elif (number := _number(each)) is not None:
            yield number


def _is_rounded(number: Decimal) -> bool:
    """Whether llguidance may read it as another number."""
    near = float(number)
    _, digits, exponent = Decimal(repr(near)).as_tuple()
    assert isinstance(exponent, int), f"{number=}"
    short = int("".join(map(str, digits))) <= _MOST_DIGITS and abs(exponent) <= _MOST_EXPONENT
    return not short or Decimal(repr(near)) != number


def _check_bound(place: str, keyword: str, bound: Decimal, node: Node) -> None:
    """ValueError if the bound, as llguidance reads it, allows a number that the bound forbids."""
    types = node.get("type")
    only_integers = types == "integer" or (isinstance(types, list) and "number" not in types)
    inward = 1 if keyword in _LOWER else -1
    excluded = keyword.startswith("exclusive")
    forbidden = {"integer": _integer_outside(bound, inward, excluded)}
    if not only_integers:
        step = _EXACT.scaleb(Decimal(inward), -_decimals(bound) - 20)
        forbidden["number"] = bound if excluded else _EXACT.subtract(bound, step)
    for kind, value in forbidden.items():
        allows = _allows({"type": kind, keyword: bound}, value)
        if allows or (allows is None and (kind == "number" or only_integers)):
            would = f"allow {value:f}" if allows else "not find a range of them"
            raise ValueError(
                f"{_at(place)}llguidance reads numbers as doubles, and integers as those of 64 "
                f"bits: with {keyword} {bound} it would {would}"
            )


def _integer_outside(bound: Decimal, inward: int, excluded: bool) -> Decimal:
    """The integer next to a bound that the bound forbids."""
    nearest = bound.to_integral_value("ROUND_FLOOR" if inward > 0 else "ROUND_CEILING")
    beside = excluded or nearest != bound
    return nearest if beside else _EXACT.subtract(nearest, Decimal(inward))


def _decimals(number: Decimal) -> int:
    """Digits after the point."""
    exponent = _EXACT.normalize(number).as_tuple().exponent
    assert isinstance(exponent, int), f"{number=}"
    return max(-exponent, 0)


def _allows(schema: Mapping[str, Any], number: Decimal) -> bool | None:
    """Whether llguidance's grammar of the schema allows the number; None if it makes none."""
    from llguidance import LLMatcher

    text = json.dumps(schema, default=_as_written)
    grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        return None
    written = list(f"{number:f}".encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


def _as_written(number: Decimal) -> int | float:
    """An integer if it has neither a point nor an exponent, as in the schema."""
    return int(number) if number.as_tuple().exponent == 0 else float(number)


@cache
def _bytes_tokenizer() -> LLTokenizer:
    """A tokenizer with one token per byte."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


# Constraints on the same value.


Choices = dict[int, int]
"""The option taken in each `anyOf` or `oneOf` on the way to a schema, by the list's `id`."""


def _check_together(place: str, parts: Sequence[tuple[Node, Choices]]) -> None:
    """ValueError for bounds, or multiples, that llguidance does not enforce together."""
    for (low, one), (high, other) in _near_pairs(
        _bounds(parts, _LOWER, 1), _bounds(parts, _UPPER, -1)
    ):
        agree = all(other.get(each, option) == option for each, option in one.items())
        if agree and (wrong := _allowed_whole(low, high)) is not None:
            raise ValueError(
                f"{_at(place)}with {low.keyword} {low.value} and {high.keyword} {high.value} "
                f"llguidance would allow {wrong}: it excludes no whole number where the other "
                f"bound is less than 1 away; a bound a little inside could be included instead"
            )
    found = (_number(part.get("multipleOf")) for part, _ in parts)
    _check_multiples(place, {abs(multiple) for multiple in found if multiple})


def _bounds(
    parts: Sequence[tuple[Node, Choices]], keywords: tuple[str, str], sign: int
) -> list[tuple[Bound, Choices]]:
    """The bounds on one side."""
    found = ((_bound(part, *keywords, sign), choices) for part, choices in parts)
    return [(bound, choices) for bound, choices in found if bound is not None]


def _near_pairs(
    lows: Sequence[tuple[Bound, Choices]], highs: Sequence[tuple[Bound, Choices]]
) -> Iterator[tuple[tuple[Bound, Choices], tuple[Bound, Choices]]]:
    """The pairs that `_allowed_whole` may find wrong: a union may have thousands of bounds."""
    for found, others, up in ((lows, highs, True), (highs, lows, False)):
        ordered = sorted(others, key=lambda pair: pair[0].value)
        values = [bound.value for bound, _ in ordered]
        for each in found:
            bound = each[0]
            if bound.excluded and bound.is_whole:
                start, end = sorted((bound.value, bound.value + (1 if up else -1)))
                near = ordered[bisect_right(values, start) : bisect_left(values, end)]
                yield from ((each, other) if up else (other, each) for other in near)


def _check_multiples(place: str, multiples: Collection[Decimal]) -> None:
    """ValueError for multiples that hold together for one number, if they are too large."""
    if not multiples:
        return
    names = " and ".join(f"multipleOf {multiple}" for multiple in sorted(multiples))
    scaled = _scaled(multiples)
    if scaled > _MOST_MULTIPLE:
        raise ValueError(
            f"{_at(place)}{names} {'multiply' if len(multiples) > 1 else 'comes'} to more than "
            f"{_MOST_MULTIPLE}, the point left out: llguidance does not count so far"
        )
    remainders = scaled
    for factor in (2, 5):
        while remainders % factor == 0:
            remainders //= factor
    if remainders > _MOST_REMAINDERS:
        raise ValueError(
            f"{_at(place)}{names} would take llguidance too long to compile: without factors of 2 "
            f"and 5, and the point left out, {remainders} is above {_MOST_REMAINDERS}"
        )


def _scaled(numbers: Collection[Decimal]) -> int:
    """The product of the numbers, each as an integer in units of their last decimal place."""
    places = max(map(_decimals, numbers))
    return prod(abs(int(_EXACT.scaleb(number, places))) for number in numbers)


def _together(node: Node, root: Node) -> list[tuple[Node, Choices]]:
    """The schema, and the schemas that its value must meet, too, or may have to.

    Two options of one list are never required of the same value. A schema that is reached in
    several ways is listed once, with the choices that all ways have in common.
    """
    held: list[tuple[Any, Choices]] = [(node, {})]
    found: dict[int, tuple[Node, Choices]] = {}
    while held:
        part, choices = held.pop()
        if not isinstance(part, dict):
            continue
        if id(part) in found:
            _, known = found[id(part)]
            choices = dict(known.items() & choices.items())
            if choices == known:
                continue
        found[id(part)] = (part, choices)
        held.append((_target(part.get("$ref"), root), choices))
        for key in ("allOf", "anyOf", "oneOf"):
            options = part.get(key)
            for index, option in enumerate(options if isinstance(options, list) else ()):
                taken = choices if key == "allOf" else {**choices, id(options): index}
                held.append((option, taken))
    return list(found.values())


def _target(reference: Any, root: Node) -> Any:
    """The value that a reference inside the schema leads to; None for other references."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    found: Any = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = dict(enumerate(found)).get(int(name) if name.isdecimal() else -1)
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _check_reference(place: str, node: Node, root: Node) -> None:
    """ValueError for a schema that is defined only by itself."""
    seen: set[int] = set()
    held: list[Any] = [node]
    while held:
        part = held.pop()
        if not isinstance(part, dict):
            continue
        target = _target(part.get("$ref"), root)
        if target is node:
            raise ValueError(
                f"{_at(place)}$ref {part['$ref']!r} leads back to the schema that it stands in, "
                f"with nothing in between: no value is described"
            )
        if id(part) not in seen:
            seen.add(id(part))
            together = part.get("allOf")
            held += [target, *(together if isinstance(together, list) else ())]


def _bound(part: Node, included: str, excluded: str, sign: int) -> Bound | None:
    """The narrower of two bounds on one side; `sign` is 1 where the larger one is narrower."""
    plain, strict = _number(part.get(included)), _number(part.get(excluded))
    if part.get(excluded) is True:
        # As in the fourth draft of JSON schema.
        strict = plain
    if strict is not None and (plain is None or sign * strict >= sign * plain):
        return Bound(strict, excluded, True)
    return None if plain is None else Bound(plain, included, False)


def _allowed_whole(low: Bound, high: Bound) -> Decimal | None:
    """The value of a bound that llguidance would allow, though the bound excludes it."""
    least, most = low.value, high.value
    if low.excluded and low.is_whole and 0 <= least < most < least + 1:
        return least
    if high.excluded and high.is_whole and most - 1 < least < most <= 0:
        return most
    return None


# Objects and arrays.


def _check_keys(place: str, node: Node) -> None:
    """ValueError for keys or items that llguidance does not distinguish."""
    least, required = _number(node.get("minProperties")), node.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if least is not None and least - named > 1 and _open(node):
        raise ValueError(
            f"{_at(place)}minProperties {least} asks for {least - named} keys besides the {named} "
            f"required ones: llguidance would write one key twice, and count both; it keeps only "
            f"required keys apart"
        )
    prefix = node.get("prefixItems")
    if prefix and isinstance(prefix, list) and "additionalItems" in node:
        raise ValueError(
            f"{_at(place)}llguidance would not keep the {len(prefix)} prefixItems beside "
            f"additionalItems; items says what comes after them"
        )


def _open(node: Node) -> bool:
    """Whether an object may have keys that the schema does not name."""
    return bool(node.get("patternProperties")) or node.get("additionalProperties") is not False


def _named_and_open(node: Node) -> bool:
    """Whether an object has both keys with a meaning and arbitrary keys."""
    return _open(node) and any(
        node.get(key) for key in ("properties", "patternProperties", "required")
    )


# Patterns.

# A scan of a pattern stops at escapes, and where a class begins or ends. A bracket that comes first
# in a class is one of its characters.
_STEPS = re.compile(
    r"(?P<property>\\[pP](?:\{[^}]*\}|\w))|\\.|(?P<opens>\[\^?\]?)|(?P<closes>\])", re.DOTALL
)
_NO_NULL = r"&&[^\x00]]"


def _rewrite_patterns(node: Node) -> None:
    """Take U+0000 out of the classes of the schema's patterns."""
    if isinstance(node.get("pattern"), str):
        node["pattern"] = without_null(node["pattern"])
    if isinstance(keys := node.get("patternProperties"), dict):
        node["patternProperties"] = {without_null(key): value for key, value in keys.items()}


def without_null(pattern: str) -> str:
    """The pattern without U+0000 in its classes, those in brackets and those like `\\p{L}`."""
    depth = 0

    def step(found: re.Match[str]) -> str:
        nonlocal depth
        text = found[0]
        if found["opens"]:
            depth += 1
            return "[" + text if depth == 1 else text
        if found["closes"] and depth:
            depth -= 1
            return text if depth else text + _NO_NULL
        return f"[{text}{_NO_NULL}" if found["property"] and not depth else text

    return _STEPS.sub(step, pattern)
