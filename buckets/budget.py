"""A budget of the memory that the engine will hold, added up before anything is captured."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal, get_args

Where = Literal["device", "pinned", "host"]
"""Where memory is held: on the GPU, in page-locked host memory, or in ordinary host memory."""
# Least width of the column of names.
_LEAST_NAME = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One entry: `bytes` bytes of `name`, in device memory, pinned or ordinary host memory."""

    name: str
    bytes: int
    where: Where


class OutOfBudget(ValueError):
    """More memory is planned than there is; the message holds the whole table."""


class MemoryBudget:
    """An ordered table of allocations by place. It only adds up: it neither allocates nor
    measures.
    """

    def __init__(self) -> None:
        self.lines: list[BudgetLine] = []

    def add(self, name: str, bytes: int, where: Where = "device") -> None:
        """Append a line of `bytes` >= 0 bytes; ValueError for a negative size or unknown place."""
        if where not in get_args(Where):
            raise ValueError(f"{name}: where={where!r} is none of {', '.join(get_args(Where))}")
        if bytes < 0:
            raise ValueError(f"{name}: {bytes} bytes")
        self.lines.append(BudgetLine(name=name, bytes=bytes, where=where))

    def total(self, where: Where = "device") -> int:
        """Bytes of all lines held in `where`."""
        return sum(line.bytes for line in self.lines if line.where == where)

    def check(self, available: int, where: Where = "device") -> None:
        """Raise OutOfBudget if `where` is to hold more than `available` bytes."""
        total = self.total(where)
        if total > available:
            raise OutOfBudget(
                f"{where} memory: {format_bytes(total)} ({total} bytes) planned, "
                f"{format_bytes(available)} ({available} bytes) available, "
                f"{format_bytes(total - available)} short\n{self.table()}"
            )

    def table(self, width: int | None = None) -> str:
        """The lines and a total for each place, as aligned text without a trailing newline.

        width  most columns of a line: longer names continue below; None: any number
        """
        rows = [(line.name, line.where, format_bytes(line.bytes)) for line in self.lines]
        totals = [
            ("total", where, format_bytes(self.total(where)))
            for where in get_args(Where)
            if any(line.where == where for line in self.lines)
        ]
        header = ("memory", "where", "size")
        widths = [max(len(row[i]) for row in (header, *rows, *totals)) for i in range(3)]
        if width is not None:
            room = max(width - sum(widths[1:]) - 4, _LEAST_NAME)
            widths[0] = min(widths[0], room)

        def text(row: tuple[str, str, str]) -> str:
            name, *more = textwrap.wrap(
                row[0], widths[0], subsequent_indent="  ", break_on_hyphens=False
            )
            line = f"{name:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}"
            return "\n".join([line, *more])

        rule = "-" * (sum(widths) + 4)
        return "\n".join([text(header), rule, *map(text, rows), rule, *map(text, totals)])


def format_bytes(count: int) -> str:
    """`count` bytes for a reader: "912 B", "64.0 KiB", "2.30 GiB"."""
    if count < 2**10:
        return f"{count} B"
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    if count < 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.2f} GiB"
