"""Reads the syntax of Rust's `regex` crate, as far as automata can express it.

Classes by name, as `\\w`, are those of llguidance's own tables: the caller gives them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from graphengine.automata.patterns import (
    EMPTY,
    Chars,
    Concat,
    Either,
    Pattern,
    Ranges,
    Repeat,
    Unsupported,
    chars,
    inverted,
    literal,
    without,
)

NamedClass = Callable[[str], Ranges]
"""The characters of one of the classes `d`, `s` and `w`."""

_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/\"'=!,:;%@_` ")
_NEWLINE = ((10, 10),)
_NOT_NULL = r"&&[^\x00]]"
_COUNTS = re.compile("[0-9]+(,[0-9]*)?")
_MOST_REPEATS = 5000
_MOST_NESTED = 100


def parse_regex(text: str, named: NamedClass) -> Pattern:
    """The pattern of a regular expression that has to match a whole text.

    Unsupported for syntax that only llguidance knows: anchors, flags, lazy quantifiers, classes by
    their Unicode names, operators inside classes.
    """
    reader = _Reader(text, named)
    found = reader.alternatives()
    if reader.left:
        raise Unsupported(f"its regular expression has {reader.left[0]!r} at {reader.at}")
    return found


def parse_search(text: str, named: NamedClass) -> Pattern:
    """The pattern of all texts in which a regular expression is found, as JSON schemas use it.

    Unsupported as in `parse_regex`, but it may begin with `^` and end with `$`.
    """
    begins = text.startswith("^")
    inner = text[begins:]
    ends = inner.endswith("$") and not _is_escaped(inner)
    inner = inner[: len(inner) - ends]
    found = parse_regex(inner, named)
    if (begins or ends) and _has_branches(inner, named):
        raise Unsupported("its regular expression anchors one of several alternatives")
    anything = Repeat(Chars(inverted(())), 0, None)
    return Concat((*(() if begins else (anything,)), found, *(() if ends else (anything,))))


def _is_escaped(text: str) -> bool:
    """Whether a backslash takes the meaning from the last character."""
    before = text[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _has_branches(text: str, named: NamedClass) -> bool:
    """Whether the expression as a whole is a choice."""
    reader = _Reader(text, named)
    reader.sequence()
    return reader.left != ""


class _Reader:
    def __init__(self, text: str, named: NamedClass) -> None:
        self.text, self.at, self._named, self._depth = text, 0, named, 0

    @property
    def left(self) -> str:
        return self.text[self.at :]

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise Unsupported("its regular expression ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _skip(self, text: str) -> bool:
        """Whether `text` comes next; if so, it is read."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def alternatives(self) -> Pattern:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise Unsupported(f"its regular expression is nested deeper than {_MOST_NESTED}")
        options = [self.sequence()]
        while self._skip("|"):
            options.append(self.sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Either(tuple(options))

    def sequence(self) -> Pattern:
        parts: list[Pattern] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._quantified(self._atom()))
        if not parts:
            return EMPTY
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _atom(self) -> Pattern:
        char = self._next()
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._bracket())
            case ".":
                return Chars(inverted(_NEWLINE))
            case "\\":
                return Chars(self._escape())
            case "^" | "$" | "*" | "+" | "?" | "{":
                raise Unsupported(f"its regular expression has {char!r} at {self.at - 1}")
        return literal(char)

    def _group(self) -> Pattern:
        if self._skip("?"):
            if self._skip("P<") or self._skip("<"):
                if self.left[:1] in ("=", "!"):
                    raise Unsupported("its regular expression looks around")
                while self._next() != ">":
                    pass
            elif not self._skip(":"):
                raise Unsupported(f"its regular expression has (?{self.left[:1]} at {self.at}")
        inner = self.alternatives()
        if not self._skip(")"):
            raise Unsupported("its regular expression has a group without an end")
        return inner

    def _quantified(self, part: Pattern) -> Pattern:
        while self.left[:1] in ("*", "+", "?", "{"):
            match self._next():
                case "*":
                    least, most = 0, None
                case "+":
                    least, most = 1, None
                case "?":
                    least, most = 0, 1
                case _:
                    least, most = self._counts()
            if self.left[:1] == "?":
                raise Unsupported("its regular expression has a lazy quantifier")
            part = Repeat(part, least, most)
        return part

    def _counts(self) -> tuple[int, int | None]:
        """The text between braces: n, or n and a comma, or n, a comma and m."""
        inside, closed, _ = self.left.partition("}")
        low, comma, high = inside.partition(",")
        plain = (
            low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))
        )
        if not closed or not plain or len(inside) > 12:
            raise Unsupported(f"its regular expression repeats {{{inside[:20]}}}")
        self.at += len(inside) + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if max(least, most or 0) > _MOST_REPEATS:
            raise Unsupported(f"its regular expression repeats more than {_MOST_REPEATS} times")
        if most is not None and most < least:
            raise Unsupported(f"its regular expression repeats {{{inside}}}")
        return least, most

    def _escape(self) -> Ranges:
        """The characters of an escape, once its backslash is read."""
        char = self._next()
        if char in "dswDSW":
            found = self._named(char.lower())
            return found if char.islower() else inverted(found)
        if char in _CONTROLS:
            point = ord(_CONTROLS[char])
        elif char in _HEX_DIGITS:
            point = self._hex(_HEX_DIGITS[char])
        elif char in _PUNCTUATION:
            point = ord(char)
        else:
            raise Unsupported(f"its regular expression has \\{char}")
        return ((point, point),)

    def _hex(self, count: int) -> int:
        if self._skip("{"):
            digits, _, _ = self.left.partition("}")
            self.at += len(digits) + 1
        else:
            digits = self.left[:count]
            self.at += count
        if not digits or not set(digits) <= set("0123456789abcdefABCDEF") or len(digits) > 8:
            raise Unsupported(f"its regular expression has the digits {digits[:12]!r}")
        point = int(digits, 16)
        if not chars([(point, point)]).ranges or point > 0x10FFFF:
            raise Unsupported(f"its regular expression has the character {digits}")
        return point

    def _bracket(self) -> Ranges:
        """The characters of a class, once its `[` is read."""
        if self._skip("["):
            # Classes of JSON schemas have this form in llguidance.
            inner = self._bracket()
            if not self._skip(_NOT_NULL):
                raise Unsupported("its regular expression has a class inside a class")
            return without(inner, ((0, 0),))
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or not self._skip("]"):
            here = self.left[:2]
            if here[:1] in ("[", "]") or here in ("&&", "--", "~~"):
                raise Unsupported(f"its regular expression has {here!r} in a class")
            low = self._class_item()
            first = False
            if self.left[:1] == "-" and self.left[1:2] not in ("]", ""):
                self.at += 1
                if self.left[:1] in ("[", "-"):
                    raise Unsupported(f"its regular expression has {self.left[:1]!r} in a class")
                high = self._class_item()
                if not (_single(low) and _single(high)) or high[0][0] < low[0][0]:
                    raise Unsupported("its regular expression has an invalid range")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        found = chars(ranges).ranges
        return inverted(found) if negated else found

    def _class_item(self) -> Ranges:
        char = self._next()
        return self._escape() if char == "\\" else ((ord(char), ord(char)),)


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
