"""Tables of options: each field of a frozen dataclass is a row with everything about the option.

A row has a name, a type, a default, bounds and one text; `option` adds to a field what a dataclass
has no place for. These are all made from the rows: the checks (`check_options`), the class's
documentation (`documented`), the flags of a command line (`option_flags.py`), the keyword arguments
of `Engine.from_pretrained` and the tables of docs/options.md (`option_files.py`), and a request
option's field on the device. The class itself checks options against one another.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from graphengine.options.checks import is_int, is_number, shown

if TYPE_CHECKING:
    # The command line reads flags without torch, which takes seconds.
    import torch

T = TypeVar("T")

_KEY = "option"
# Widths of a class's documentation, in columns: the names, and the whole line.
_NAMES, _LINE = 24, 100


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A condition on a value besides its type; None is not checked.

    must   what follows "must" in the error: "be at least 1"
    holds  whether it does
    whole  `must` names the type as well, and is also the error for a value of another type
    """

    must: str
    holds: Callable[[Any], bool]
    whole: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An option's flag on a command line. The row gives its name, type, choices and help.

    name      another name for it, without the dashes
    default   the command's default where it differs; None: the option's own default
    metavar   name of the value in `--help`
    parse     reads a value from text, where the type does not say how; ValueError for a wrong text
    many      the flag may be repeated; `collect` makes the option from the list of values
    inverse   giving it sets a flag to False
    help      in place of the row's text
    common    `--help` lists it; the others are listed by `--help-all`
    """

    name: str | None = None
    default: Any = None
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    many: bool = False
    collect: Callable[[list[Any]], Any] = list
    inverse: bool = False
    help: str | None = None
    common: bool = False


def read_integers(text: str) -> tuple[int, ...]:
    """Read a flag's integers from 0 up, such as "16,64". ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    # isdecimal alone would accept the digits of all scripts.
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} must be integers with commas between them")
    return tuple(map(int, parts))


def read_pairs(text: str) -> tuple[tuple[int, ...], ...]:
    """Read a flag's pairs, such as "0:1024,8192:512". ValueError for anything else."""
    parts = [part.split(":") for part in text.split(",")]
    if not all(len(part) == 2 and all(map(str.isdecimal, part)) for part in parts) or not (
        text.isascii()
    ):
        raise ValueError(f"{shown(text)} must be pairs of integers, a:b, with commas between them")
    return tuple(tuple(map(int, part)) for part in parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotField:
    """The host-owned static field that holds a request option's number for each slot.

    dtype    of the field
    pad      the value of padded slots, which turns the option off
    meaning  of the values, for people
    off      values of the option that are `pad` on the device
    filters  any number but `pad` excludes tokens from sampling, which takes the `full` sampler
    flag     bit of `logits_flags` that any number but `pad` sets: it changes logits; 0: it does not
    """

    dtype: torch.dtype
    pad: int | float
    meaning: str
    off: tuple[int | float | None, ...] = ()
    filters: bool = False
    flag: int = 0

    def number(self, value: Any) -> Any:
        """The number that the device gets for the option's value."""
        return self.pad if value in self.off else value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    doc: str
    bounds: tuple[Bound, ...]
    flag: Flag | None
    slot: SlotField | None


@overload
def option(
    default: T,
    /,
    *bounds: Bound,
    doc: str,
    flag: Flag | None = None,
    slot: SlotField | None = None,
    hashed: bool = True,
) -> T: ...
@overload
def option(*bounds: Bound, factory: Callable[[], T], doc: str, flag: Flag | None = None) -> T: ...
def option(
    *values: Any,
    factory: Callable[[], Any] | None = None,
    doc: str,
    flag: Flag | None = None,
    slot: SlotField | None = None,
    hashed: bool = True,
) -> Any:
    """A row of a table of options.

    default  of the option, or a `factory` that makes it for each new object
    bounds   of its values; the first that does not hold is the error
    doc      what it does, in one text for every place where it is documented
    flag     on a command line; None: it has none
    slot     the static field that it fills; None: none
    hashed   whether it counts for the object's hash
    """
    default: dict[str, Any] = {"default_factory": factory}
    if factory is None:
        default, values = {"default": values[0]}, values[1:]
    row = _Option(doc=" ".join(doc.split()), bounds=values, flag=flag, slot=slot)
    return dataclasses.field(**default, hash=None if hashed else False, metadata={_KEY: row})


def at_least(least: float, *, or_none: bool = False) -> Bound:
    """The value is `least` or more; `or_none` has the error say that it may be left out."""
    text = f"be at least {least}" + (", or None" if or_none else "")
    return Bound(text, lambda value: bool(value >= least))


def at_most(most: float) -> Bound:
    """The value is `most` or less."""
    return Bound(f"be at most {most}", lambda value: bool(value <= most))


def within(least: float, most: float) -> Bound:
    """The value is in [least, most]."""
    ends = (f"{end:g}" if isinstance(end, float) else str(end) for end in (least, most))
    return Bound(f"be in [{', '.join(ends)}]", lambda value: bool(least <= value <= most))


NOT_NEGATIVE = Bound("not be negative", lambda value: bool(value >= 0))
SHARE = Bound("be in (0, 1]", lambda value: bool(0.0 < value <= 1.0))
SEED = Bound("be in [0, 2**63)", lambda value: bool(0 <= value < 2**63))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option of a table.

    annotation  its type, as the source has it
    kind        int, float, bool, a dataclass, or the tuple of its choices; None where the class
                itself checks the type
    optional    whether it may be None
    default     the value, or `dataclasses.MISSING` where a factory makes it
    """

    name: str
    annotation: str
    kind: Any
    optional: bool
    default: Any
    doc: str
    bounds: tuple[Bound, ...]
    flag: Flag | None
    slot: SlotField | None

    @property
    def flag_name(self) -> str:
        """The flag's name on a command line, without the dashes."""
        return (self.flag and self.flag.name) or self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """ValueError, with the name, the value and what it must be, for an invalid value."""
        if value is None and self.optional:
            return
        if not _is_of(value, self.kind):
            whole = next((bound.must for bound in self.bounds if bound.whole), None)
            raise ValueError(f"{self.name}={value!r} must {whole or self._type()}")
        for bound in self.bounds:
            if not bound.holds(value):
                raise ValueError(f"{self.name}={_shown(value)} must {bound.must}")

    def _type(self) -> str:
        if self.kind is int or self.kind is float:
            # The bound's text says whether it may be None.
            return "be an integer" if self.kind is int else "be a number"
        names = [repr(choice) for choice in self.kind] if isinstance(self.kind, tuple) else []
        names = ["True", "False"] if self.kind is bool else names or [self.kind.__name__]
        names += ["None"] * self.optional
        *others, last = names
        return f"be {', '.join(others)} or {last}" if others else f"be {last}"


@cache
def rows(table: type) -> tuple[Row, ...]:
    """The options of a dataclass whose fields are made by `option`, in their order."""
    found = []
    types = get_type_hints(table)
    for field in dataclasses.fields(table):
        said: _Option = field.metadata[_KEY]
        kind, optional = _kind(types[field.name])
        found.append(
            Row(
                name=field.name,
                annotation=str(field.type),
                kind=kind,
                optional=optional,
                default=field.default,
                doc=said.doc,
                bounds=said.bounds,
                flag=said.flag,
                slot=said.slot,
            )
        )
    return tuple(found)


def check_options(options: Any) -> None:
    """ValueError for the first invalid option; numbers are then stored as Python's own types.

    A table's `__post_init__` begins with this: NumPy's numbers would wrap around, and a field
    cannot hold fractions.
    """
    for row in rows(options.__class__):
        value = getattr(options, row.name)
        row.check(value)
        if value is not None and row.kind in (int, float) and type(value) is not row.kind:
            object.__setattr__(options, row.name, row.kind(value))


def documented(table: type[T]) -> type[T]:
    """Class decorator that adds a line for each option to the docstring."""
    lines = [(table.__doc__ or "").rstrip(), ""]
    for field in dataclasses.fields(table):  # type: ignore[arg-type]
        text = field.metadata[_KEY].doc
        wrapped = textwrap.wrap(text, _LINE - 4 - _NAMES, break_long_words=False)
        if len(field.name) + 2 > _NAMES:
            lines.append(f"    {field.name}")
        else:
            lines.append(f"    {field.name:<{_NAMES}}{wrapped.pop(0)}")
        lines += [" " * (4 + _NAMES) + line for line in wrapped]
    table.__doc__ = "\n".join([*lines, "    "])
    return table


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The kind of value that `check` accepts for this annotation, and whether it may be None."""
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    others = [each for each in types if each is not NoneType]
    optional = len(others) < len(types)
    if len(others) > 1:
        return None, optional
    (only,) = others
    if get_origin(only) is Literal:
        return get_args(only), optional
    known = only in (int, float, bool) or dataclasses.is_dataclass(only)
    return only if known else None, optional


def _is_of(value: object, kind: Any) -> bool:
    if kind is None:
        return True
    if kind is int or kind is float:
        return is_int(value) if kind is int else is_number(value)
    if isinstance(kind, tuple):
        return isinstance(value, str) and value in kind
    return isinstance(value, kind)


def _shown(value: object) -> str:
    """A number, NumPy's included, as people write it; the size of an integer too long to print."""
    try:
        return str(value) if is_number(value) else repr(value)
    except ValueError:
        return shown(value)
