"""Names of golden files, and the files that no test asks for any more.

Nothing here imports torch: the plugin loads it at every start of pytest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "__snapshots__"

# Length of the readable part of a file's name; file systems allow 255 for all of it.
_MOST_BYTES = 160


def file_name(text: str) -> str:
    """`text` as part of a path: runs of other characters than letters, digits, "_.+-" become
    "-"."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "-"


def unique_name(*parts: str) -> str:
    """A `file_name` of the parts that no other parts have.

    It ends with a digest, unless there is one part that is a file name already.
    """
    if wrong := [part for part in parts if not isinstance(part, str)]:
        raise ValueError(f"{wrong[0]!r} is of type {type(wrong[0]).__name__}, and a name is text")
    readable = _readable(" ".join(parts))
    if parts == (readable,):
        return readable
    text = "\0".join(parts).encode(errors="backslashreplace")
    return f"{readable}-{hashlib.sha256(text).hexdigest()[:10]}"


def _readable(text: str) -> str:
    return file_name(text).encode()[:_MOST_BYTES].decode(errors="ignore")


class GoldenFiles:
    """A pytest run's knowledge of golden files; `merge` adds that of an xdist worker.

    owners  the golden files that tests asked for: {path: id of the test}
    tests   the collected tests, deselected ones too: {id: path of the module}
    passed  ids of the tests that passed
    partial whether single tests were asked for, so that others of their modules were not collected
    """

    def __init__(self) -> None:
        self.owners: dict[Path, str] = {}
        self.tests: dict[str, str] = {}
        self.passed: set[str] = set()
        self.partial = False

    def to_dict(self) -> dict[str, Any]:
        """The contents as plain text, for another process."""
        return {
            "owners": {str(path): owner for path, owner in self.owners.items()},
            "tests": self.tests,
            "passed": sorted(self.passed),
            "partial": self.partial,
        }

    def merge(self, found: dict[str, Any]) -> None:
        """Add the `to_dict` of another process."""
        self.owners |= {Path(path): owner for path, owner in found["owners"].items()}
        self.tests |= found["tests"]
        self.passed |= set(found["passed"])
        self.partial |= found["partial"]

    def orphans(self) -> list[Path]:
        """Golden files that no test asks for, sorted; none after a run of single tests.

        A file that may belong to a test that did not pass is no orphan: the test may have ended
        before it asked. Keys do not matter, since files of other devices are asked for elsewhere.
        """
        if self.partial:
            return []
        modules = {Path(path) for path in self.tests.values()}
        found = [file for module in modules for file in self._of(module)]
        for folder in {module.parent / FOLDER for module in modules}:
            found += _of_deleted_modules(folder)
        return sorted(found)

    def _of(self, module: Path) -> Iterator[Path]:
        folder = module.parent / FOLDER / module.stem
        used = {path.name for path in self.owners if folder in path.parents}
        waiting = [
            _readable(test.partition("::")[2])
            for test, path in self.tests.items()
            if Path(path) == module and test not in self.passed
        ]
        for file in _files(folder):
            if file.name not in used and not file.name.startswith(tuple(waiting)):
                yield file


def _of_deleted_modules(folder: Path) -> Iterable[Path]:
    if not folder.is_dir():
        return []
    gone = (each for each in folder.iterdir() if not (folder.parent / f"{each.name}.py").exists())
    return [file for each in gone for file in _files(each)]


def _files(folder: Path) -> Collection[Path]:
    """The golden files of a module, without a key and with one."""
    return [*folder.glob("*.json"), *folder.glob("*/*.json")]
