"""Commands as they travel between processes: the number of the kind, numbers, and bytes.

The type of a field decides its encoding. Only the types in the table below are sent. Received data
becomes a number, bytes, a path or block numbers; none of it is executed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from graphengine.core.commands import COMMANDS, Command, Data
from graphengine.program.graph_key import GraphKey

# For each type: how a field is encoded to a command's data, and decoded again.
_DATA: dict[Any, tuple[Callable[[Any], Data], Callable[[bytes], Any]]] = {
    Data: (lambda data: data, lambda data: data),
    str: (os.fsencode, os.fsdecode),
    tuple[int, ...]: (
        lambda numbers: np.asarray(numbers, dtype=np.int32).tobytes(),
        lambda data: tuple(np.frombuffer(data, dtype=np.int32).tolist()),
    ),
}
_NUMBERS = {int, bool, GraphKey}


def _travelling(kind: type[Command]) -> tuple[Any, ...]:
    """The types of a command's fields that are sent: fields without a default."""
    hints = get_type_hints(kind)
    types = tuple(hints[name] for name in kind._fields if name not in kind._field_defaults)
    assert {*types} <= _NUMBERS | {*_DATA}, f"{kind.__name__}: {types}"
    return types


_TYPES = tuple(map(_travelling, COMMANDS))
_KIND_OF = {kind: number for number, kind in enumerate(COMMANDS)}


class Encoded(NamedTuple):
    """A command as it travels."""

    kind: int
    numbers: Sequence[int]
    data: Data


class CommandCodec:
    """Encodes commands, and decodes them; `graphs` are the keys of the plan, equal on all ranks."""

    def __init__(self, graphs: Sequence[GraphKey]) -> None:
        self._graphs = tuple(graphs)
        self._number_of = {key: number for number, key in enumerate(self._graphs)}

    def encode(self, command: Command) -> Encoded:
        """A command's kind, numbers and data. KeyError for a graph that is not in the plan."""
        kind, values = _KIND_OF[type(command)], tuple[Any, ...](command)
        numbers: list[int] = []
        data: Data = b""
        for type_, value in zip(_TYPES[kind], values, strict=False):
            if type_ in _DATA:
                data = _DATA[type_][0](value)
            else:
                numbers.append(self._number_of[value] if type_ is GraphKey else value)
        return Encoded(kind, numbers, data)

    def decode(self, encoded: Encoded) -> Command:
        """The command. IndexError for an unknown kind or graph."""
        kind, numbers, data = encoded
        left = iter(numbers)
        values: list[Any] = []
        for type_ in _TYPES[kind]:
            if type_ in _DATA:
                values.append(_DATA[type_][1](bytes(data)))
            elif type_ is GraphKey:
                values.append(self._graphs[next(left)])
            else:
                values.append(type_(next(left)))
        return COMMANDS[kind](*values)
