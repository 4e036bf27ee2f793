"""Patterns of the JSON that a schema describes, as far as they are finite, as llguidance has it.

Between the parts of arrays and objects there may be whitespace, where the options allow it. Named
properties come in the schema's order. A character of a string is written as itself or as one of
its escapes; a string's length counts characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graphengine.automata.number_patterns import Bounds, any_number, whole_number
from graphengine.automata.patterns import (
    EMPTY,
    Chars,
    Concat,
    Either,
    Pattern,
    Ranges,
    Repeat,
    Unsupported,
    common,
    inverted,
    literal,
    optional,
    without,
)
from graphengine.automata.regex_syntax import NamedClass, parse_search

_ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"}
    | {"description", "examples", "readOnly", "title", "writeOnly"}
)
_KEYWORDS = {
    "null": frozenset[str](),
    "boolean": frozenset[str](),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_OPTIONS = frozenset({"json_allowed_escapes", "whitespace_flexible"})
_ALL_ESCAPES = 'nrbtf\\"u'
_SHORT = {"n": 10, "r": 13, "b": 8, "t": 9, "f": 12, "\\": 92, '"': 34}
# Characters that a string does not hold as they are.
_ESCAPED: Ranges = ((0, 31), (34, 34), (92, 92), (127, 127))
# Characters that are written as \u00XX.
_NUMERIC: Ranges = ((0, 31), (127, 127))
_WHITESPACE = Repeat(Chars(((9, 10), (13, 13), (32, 32))), 0, None)
_ASCII_CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_MOST_LENGTH = 5000
_MOST_NESTED = 60
# The number of reference paths to the same schema may grow exponentially.
_MOST_SCHEMAS = 4096


def json_pattern(schema: Any, options: Mapping[str, Any], named: NamedClass) -> Pattern:
    """The pattern of a schema in llguidance's form, with the options of its grammar.

    Unsupported for schemas that describe values of unbounded depth, and for keywords without a
    pattern here.
    """
    for name, value in options.items():
        if name not in _OPTIONS:
            raise Unsupported(f"it has the option {name}={value!r}")
    escapes = options.get("json_allowed_escapes") or _ALL_ESCAPES
    flexible = options.get("whitespace_flexible", True)
    return _Schemas(schema, escapes, bool(flexible), named).value(schema)


class _Schemas:
    """Makes patterns of the schemas inside one.

    root      the schema that references lead into
    flexible  whether there may be whitespace
    """

    def __init__(self, root: Any, escapes: str, flexible: bool, named: NamedClass) -> None:
        self._root, self._escapes, self._named = root, escapes, named
        self._space = _WHITESPACE if flexible else EMPTY
        self._references: list[str] = []
        self._depth = self._made = 0

    def value(self, schema: Any) -> Pattern:
        """The pattern of a schema's values."""
        if not isinstance(schema, dict):
            raise Unsupported(f"a schema {schema!r} allows values of any depth, or none")
        self._depth += 1
        self._made += 1
        if self._made > _MOST_SCHEMAS:
            raise Unsupported(
                f"it has more than {_MOST_SCHEMAS} schemas, counted wherever one is referred to"
            )
        if self._depth > _MOST_NESTED:
            raise Unsupported(f"its schemas are nested deeper than {_MOST_NESTED}")
        asked = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        found = self._asked(asked)
        self._depth -= 1
        return found

    def _asked(self, asked: dict[str, Any]) -> Pattern:
        for key in ("$ref", "anyOf", "oneOf", "allOf"):
            if key in asked:
                if len(asked) > 1:
                    raise Unsupported(f"a schema has {', '.join(asked)} together")
                return self._combined(key, asked[key])
        types = asked.pop("type", None)
        types = [types] if isinstance(types, str) else types
        if types is not None and not (isinstance(types, list) and {*types} <= _KEYWORDS.keys()):
            raise Unsupported(f"a schema has the type {types!r}")
        if "enum" in asked or "const" in asked:
            if len(asked) > 1:
                raise Unsupported(f"a schema has {', '.join(asked)} together")
            ((key, given),) = asked.items()
            values = given if key == "enum" else [given]
            return _either([self.constant(value) for value in values if _is_of(value, types)])
        if types is None:
            raise Unsupported(f"a schema of {', '.join(asked) or 'nothing'} has no type")
        allowed = frozenset().union(*(_KEYWORDS[name] for name in types))
        if unknown := asked.keys() - allowed:
            raise Unsupported(f"a schema of {types} has {', '.join(sorted(unknown))}")
        return _either([self._of_type(name, asked) for name in types])

    def _combined(self, key: str, given: Any) -> Pattern:
        if key != "$ref":
            if key == "allOf" and len(given) > 1:
                raise Unsupported("a schema has allOf of several")
            return _either([self.value(option) for option in given])
        if given in self._references:
            raise Unsupported(f"{given} describes values of any depth")
        self._references.append(given)
        found = self.value(self._referred(given))
        self._references.pop()
        return found

    def _referred(self, reference: Any) -> Any:
        """The schema that a reference leads to."""
        here = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise Unsupported(f"$ref {reference!r} leads out of the schema")
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if "%" in part or not isinstance(here, dict) or name not in here:
                raise Unsupported(f"$ref {reference!r} leads nowhere")
            here = here[name]
        if "#/" in reference or reference == "#":
            return here
        raise Unsupported(f"$ref {reference!r} is no path")

    def _of_type(self, name: str, asked: Mapping[str, Any]) -> Pattern:
        match name:
            case "null":
                return literal("null")
            case "boolean":
                return Either((literal("true"), literal("false")))
            case "integer":
                return whole_number(_bounds(asked))
            case "number":
                return any_number(_bounds(asked))
            case "string":
                return self._string(asked)
            case "array":
                return self._array(asked)
        return self._object(asked)

    def constant(self, value: Any) -> Pattern:
        """The pattern of one JSON value."""
        match value:
            case None | True | False:
                return literal(json.dumps(value))
            case int() | float():
                bounds = Bounds(value, value)
                return whole_number(bounds) if isinstance(value, int) else any_number(bounds)
            case str():
                return self._quoted(literal(value))
            case list():
                items = [self.constant(item) for item in value]
                return self._enclosed("[", "]", self._separated(items))
        members = [self._member(name, self.constant(item)) for name, item in value.items()]
        return self._enclosed("{", "}", self._separated(members))

    # Strings.

    def _string(self, asked: Mapping[str, Any]) -> Pattern:
        least, most = asked.get("minLength", 0), asked.get("maxLength")
        if max(least, most or 0) > _MOST_LENGTH:
            raise Unsupported(f"a string's length is bounded by more than {_MOST_LENGTH}")
        if most is not None and most < least:
            raise Unsupported(f"no string has from {least} to {most} characters")
        if "pattern" in asked:
            if least or most is not None:
                raise Unsupported("a string has a pattern and a bounded length")
            return self._quoted(parse_search(asked["pattern"], self._pattern_class))
        return self._quoted(Repeat(Chars(inverted(())), least, most))

    def _pattern_class(self, name: str) -> Ranges:
        return _ASCII_CLASSES[name] if name in _ASCII_CLASSES else self._named(name)

    def _quoted(self, content: Pattern) -> Pattern:
        return Concat((literal('"'), self._escaped(content), literal('"')))

    def _escaped(self, content: Pattern) -> Pattern:
        """The pattern of strings whose content, once read, matches."""
        match content:
            case Chars(ranges):
                return self._character(ranges)
            case Concat(parts):
                return Concat(tuple(self._escaped(part) for part in parts))
            case Either(options):
                return Either(tuple(self._escaped(option) for option in options))
            case Repeat(part, least, most):
                return Repeat(self._escaped(part), least, most)

    def _character(self, ranges: Ranges) -> Pattern:
        """One character out of a set, as itself or as an escape."""
        options: list[Pattern] = []
        if plain := without(ranges, _ESCAPED):
            options.append(Chars(plain))
        letters = "".join(
            letter
            for letter, point in _SHORT.items()
            if letter in self._escapes and common(ranges, ((point, point),))
        )
        if letters:
            short = Chars(tuple(sorted((ord(letter), ord(letter)) for letter in letters)))
            options.append(Concat((literal("\\"), short)))
        if "u" in self._escapes and (numeric := common(ranges, _NUMERIC)):
            points = [point for first, last in numeric for point in range(first, last + 1)]
            codes = Either(tuple(_hex_digits(point) for point in points))
            options.append(Concat((literal("\\u00"), codes)))
        if not options:
            raise Unsupported("a string has a character that has no escape here")
        return options[0] if len(options) == 1 else Either(tuple(options))

    # Arrays and objects.

    def _enclosed(self, opening: str, closing: str, inner: Pattern) -> Pattern:
        """A pattern in brackets; `inner` begins with its own space unless it is empty."""
        return Concat((literal(opening), inner, self._space, literal(closing)))

    def _separated(self, items: Sequence[Pattern]) -> Pattern:
        """All items, with commas between them."""
        parts: list[Pattern] = []
        for item in items:
            parts += [*self._comma(bool(parts)), self._space, item]
        return Concat(tuple(parts))

    def _comma(self, wanted: bool) -> list[Pattern]:
        return [self._space, literal(",")] if wanted else []

    def _after_comma(self, item: Pattern) -> Pattern:
        return Concat((*self._comma(True), self._space, item))

    def _array(self, asked: Mapping[str, Any]) -> Pattern:
        least, most = asked.get("minItems", 0), asked.get("maxItems")
        given = asked.get("prefixItems", [])
        if "items" not in asked and (most is None or most > len(given)):
            raise Unsupported("an array's items are open: they may have any depth")
        if isinstance(asked.get("items"), list):
            raise Unsupported("an array's items are a list")
        if max(least, most or 0) > _MOST_LENGTH or (most is not None and most < least):
            raise Unsupported(f"an array has from {least} to {most} items")
        closed = asked.get("items") is False
        item = None if closed or "items" not in asked else self.value(asked["items"])
        first = [self.value(schema) for schema in given]
        count = max(len(first), least) if most is None else most
        if item is None:
            count = min(count, len(first))
            if least > count:
                raise Unsupported(f"an array wants {least} items of {count}")
        items = [first[at] if at < len(first) else item for at in range(count)]
        tail: Pattern = EMPTY
        if most is None and item is not None:
            tail = Repeat(self._after_comma(item), 0, None)
            if not count:
                return self._enclosed("[", "]", optional(Concat((self._space, item, tail))))
        return self._enclosed("[", "]", self._items(items, least, tail))

    def _items(self, items: Sequence[Pattern | None], least: int, tail: Pattern) -> Pattern:
        """The items, of which the first `least` are required, then `tail` after the last."""
        after = tail
        for at in reversed(range(len(items))):
            item = items[at]
            assert item is not None, f"{at=} of {len(items)}"
            one = self._after_comma(item) if at else Concat((self._space, item))
            after = Concat((one, after))
            if at >= least:
                after = optional(after)
        return after

    def _object(self, asked: Mapping[str, Any]) -> Pattern:
        named: Mapping[str, Any] = asked.get("properties", {})
        required = asked.get("required", [])
        if missing := [name for name in required if name not in named]:
            raise Unsupported(f"an object requires {missing[0]!r}, whose values are open")
        more = asked.get("additionalProperties", True)
        if more is not False and (named or more is True):
            raise Unsupported("an object's other properties are open")
        if more is not False:
            return self._open_object(more)
        members = [
            (self._member(name, self.value(schema)), name in required)
            for name, schema in named.items()
        ]
        return self._enclosed("{", "}", self._members(members))

    def _open_object(self, schema: Any) -> Pattern:
        """An object of any names, whose values a schema describes."""
        name = self._quoted(Repeat(Chars(inverted(())), 0, None))
        colon = Concat((self._space, literal(":"), self._space))
        member = Concat((name, colon, self.value(schema)))
        more = Repeat(self._after_comma(member), 0, None)
        return self._enclosed("{", "}", optional(Concat((self._space, member, more))))

    def _member(self, name: str, value: Pattern) -> Pattern:
        # A name has one spelling, unlike other strings.
        key = literal(json.dumps(name, ensure_ascii=False))
        return Concat((key, self._space, literal(":"), self._space, value))

    def _members(self, members: Sequence[tuple[Pattern, bool]]) -> Pattern:
        """The members in their order; those not required may be left out."""
        # The pattern after a member, and the pattern where there was no member yet.
        after: Pattern = EMPTY
        begins: Pattern | None = EMPTY
        for member, required in reversed(members):
            one = Concat((self._after_comma(member), after))
            first = Concat((self._space, member, after))
            after, before = (
                (one, first)
                if required
                else (Concat((optional(self._after_comma(member)), after)), first)
            )
            if required:
                begins = before
            else:
                assert begins is not None
                begins = Either((before, begins))
        assert begins is not None
        return begins


def _either(options: Sequence[Pattern]) -> Pattern:
    return options[0] if len(options) == 1 else Either(tuple(options))


def _hex_digits(point: int) -> Pattern:
    """Two digits, of which letters may be small or capital."""
    both = (sorted({digit.lower(), digit.upper()}) for digit in f"{point:02x}")
    return Concat(tuple(Chars(tuple((ord(c), ord(c)) for c in each)) for each in both))


def _is_of(value: Any, types: Sequence[str] | None) -> bool:
    """Whether a JSON value has one of the types; None: any."""
    if types is None:
        return True
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return "integer" in types or "number" in types
        case float():
            return "number" in types
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types


def _bounds(asked: Mapping[str, Any]) -> Bounds:
    """The tighter one of each pair of bounds."""
    low, high = asked.get("minimum"), asked.get("maximum")
    above, below = asked.get("exclusiveMinimum"), asked.get("exclusiveMaximum")
    if isinstance(above, bool) or isinstance(below, bool):
        raise Unsupported("it excludes bounds by true or false")
    includes_low, includes_high = True, True
    if above is not None and (low is None or above >= low):
        low, includes_low = above, False
    if below is not None and (high is None or below <= high):
        high, includes_high = below, False
    return Bounds(low, high, includes_low, includes_high)
