"""Chooses the reader of a run's file by the file's contents, not its name."""

from __future__ import annotations

from pathlib import Path

from graphengine.profiles.nsys.nsys_export import read_export
from graphengine.profiles.nsys.nsys_tables import MAGIC
from graphengine.profiles.nsys.torch_trace import GZIP, is_trace, read_trace
from graphengine.profiles.runs.run_file import Run, read_recording

HEAD = 65536


def read_run(path: str | Path) -> Run:
    """The run of a recording, an nsys export or a Chrome trace. ValueError for anything else."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not head.strip():
        raise ValueError(f"{path} is empty")
    if head.startswith(MAGIC):
        return read_export(path)
    if path.suffix in (".sqlite", ".db", ".sqlite3"):
        raise ValueError(f"{path} is not an SQLite database")
    if path.suffix == ".nsys-rep":
        raise ValueError(
            f"{path} is a report of nsys: make a database of it with "
            f"`nsys export --type sqlite --output {path.with_suffix('.sqlite').name} {path.name}`"
        )
    if head.startswith(GZIP) or is_trace(head):
        return read_trace(path)
    return read_recording(path)
