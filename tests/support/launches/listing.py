"""The launches of a step as rows that can be compared, also of blocks that a trace repeats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.models.repeats import Moved, memory_of, repeats_told, start_of


class At(NamedTuple):
    """A tensor of a launch: a view of its allocation, from a byte on."""

    memory: object
    start: int
    view: tuple[Any, ...]


class Row(NamedTuple):
    """A launch, with an `At` in place of each tensor."""

    kernel: str
    grid: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    pdl: bool
    arguments: tuple[tuple[str, Any], ...]


class _Lister(TorchFunctionMode):
    """Keeps the tensors of all launches, so that no two have the same identity."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.repeated = 0
        self._kept: list[object] = []
        # Of each current call: where its rows begin, and the allocations that it has made.
        self._begun: list[tuple[int, set[object]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
            if memory_of(result) not in map(memory_of, given):
                self._kept.append(result)
                for _, made in self._begun:
                    made.add(memory_of(result))
        return result

    def launched(self, op: Op) -> None:
        self._kept.append(op)
        arguments = tuple((name, _placed(value)) for name, value in op.arguments.items())
        options = tuple(sorted(op.options.items()))
        self.rows.append(Row(op.name, op.grid, options, op.pdl, arguments))

    def begin(self) -> None:
        self._begun.append((len(self.rows), set()))

    def end(self) -> tuple[list[Row], set[object]]:
        first, made = self._begun.pop()
        return self.rows[first:], made

    def repeat(self, done: tuple[list[Row], set[object]], moved: Callable[[], Moved]) -> None:
        self.repeated += 1
        (rows, made), places = done, moved()
        self._kept.append(places)
        for row in rows:
            arguments = self._moved(row.arguments, places, made)
            self.rows.append(row._replace(arguments=arguments))

    def _moved(self, value: Any, moved: Moved, made: set[object]) -> Any:
        if isinstance(value, At):
            if value.memory not in moved:
                if value.memory not in made:
                    return value
                own = value._replace(memory=(self.repeated, value.memory))
                for _, others in self._begun:
                    others.add(own.memory)
                return own
            start, now = moved[value.memory]  # type: ignore[index]
            return At(memory_of(now), value.start - start + start_of(now), value.view)
        if isinstance(value, tuple):
            return tuple(self._moved(each, moved, made) for each in value)
        return value


def list_launches(
    steps: Sequence[Callable[[], object]], *, held: Collection[int] = (), repeats: bool = True
) -> tuple[list[Row], int]:
    """The rows of all steps' launches, and how many calls were not run but repeated.

    held     allocations that exist besides the steps; all others are numbered as they occur
    repeats  whether calls that are alike run only once
    """
    lister = _Lister()
    told = repeats_told(lister) if repeats else nullcontext()
    with ops_handed_to(lister.launched), lister, told:
        for step in steps:
            step()
    numbers: dict[object, str] = {}

    def numbered(value: Any) -> Any:
        if isinstance(value, At):
            memory = value.memory
            if memory not in held:
                memory = numbers.setdefault(memory, f"intermediate {len(numbers)}")
            return value._replace(memory=memory)
        if isinstance(value, tuple):
            return tuple(map(numbered, value))
        return value

    return [row._replace(arguments=numbered(row.arguments)) for row in lister.rows], lister.repeated


def _placed(value: Any) -> Any:
    if isinstance(value, Tensor):
        view = (value.dtype, tuple(value.shape), value.stride())
        return At(memory_of(value), start_of(value), view)
    if hasattr(value, "base"):
        return type(value).__name__, _placed(value.base), tuple(value.block_shape)
    if isinstance(value, tuple):
        return (type(value).__name__, *map(_placed, value))
    return value
