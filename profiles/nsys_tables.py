"""The file of an nsys export: whether it is whole, and which tables and columns it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC = b"SQLite format 3\x00"


class Tables:
    """What an open export holds."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.database = database
        self.path = path
        rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')}
            for (name,) in rows
        }

    def __contains__(self, table: str) -> bool:
        return table in self.columns

    def rows(self, table: str, *columns: str, where: str = "1") -> Iterator[tuple[Any, ...]]:
        """Rows of `table`; None for columns that this export does not have. None without it.

        ValueError if it lacks `start` or `end`.
        """
        if table not in self:
            return
        there = self.columns[table]
        for column in ("start", "end"):
            if column in columns and column not in there:
                raise ValueError(f"{self.path}: table {table} has no column {column}")
        wanted = ", ".join(f'"{name}"' if name in there else "NULL" for name in columns)
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
