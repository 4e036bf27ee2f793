"""The file of an nsys export: whether it is complete, and its tables and columns."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDED = {
    "StringIds": ("id", "value"),
    "NVTX_EVENTS": ("start", "end", "eventType"),
    "TARGET_INFO_GPU": (),
}
"""Columns that a table must have; tables not listed here must have `start` and `end`."""
TEXTS = ("text", "value", "name")
MAGIC = b"SQLite format 3\x00"


class Tables:
    """The tables of an open export."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')}
            for (name,) in rows
        }

    def __contains__(self, table: str) -> bool:
        return table in self.columns

    def rows(self, table: str, *columns: str, where: str = "1") -> Iterator[tuple[Any, ...]]:
        """Rows of `table`, with None for columns that it lacks; no rows if there is no such table.

        ValueError if it lacks one of `NEEDED`, and for a value that is neither integer nor null in
        a column other than `TEXTS`.
        """
        if table not in self:
            return
        there = self.columns[table]
        for column in NEEDED.get(table, ("start", "end")):
            if column not in there:
                raise ValueError(f"table {table} has no column {column}")
        wanted = ", ".join(f'"{name}"' if name in there else "NULL" for name in columns)
        for name in [name for name in columns if name in there and name not in TEXTS]:
            other = f"typeof(\"{name}\") NOT IN ('integer', 'null')"
            wrong = f'SELECT "{name}" FROM "{table}" WHERE ({where}) AND {other} LIMIT 1'
            for (value,) in self.database.execute(wrong):
                raise ValueError(f"table {table}: {name}={value!r} is no integer")
        yield from self.database.execute(f'SELECT {wanted} FROM "{table}" WHERE {where}')

    def has(self, table: str, column: str) -> bool:
        return column in self.columns.get(table, ())


def check_file(path: Path) -> None:
    """ValueError unless it is a whole database."""
    with path.open("rb") as file:
        head = file.read(100)
    if not head.startswith(MAGIC):
        raise ValueError(f"{path} is not an SQLite database")
    page = int.from_bytes(head[16:18], "big")
    expected = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
    size = path.stat().st_size
    if len(head) < 100 or size < expected:
        raise ValueError(f"{path} is cut off: {size} of {expected} bytes are there")
