"""The Python code of the pages, as modules for a type checker.

    python tests/support/pages.py build/pages     # writes build/pages/docs_sessions.py and others

A page's blocks are one module, as its reader types one after the other, and stand on the page's own
lines: what is wrong in line 76 of docs_requests.py is wrong in line 76 of docs/requests.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "graphengine" / "testing" / "README.md",
    ROOT / "plugin" / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "CONTRIBUTING.md",
)
READER = {
    "engine": "Engine",
    "prompt": "str",
    "params": "SamplingParams",
    "schema": "dict[str, object]",
    "path": "str",
    "serve_for_a_while": "Callable[[Engine], object]",
    "talker_path": "str",
    "talker_prompt": "Tensor",
    "trailing_text": "Tensor",
    "text_pad": "Tensor",
    "moshi_path": "str",
    "nothing": "Tensor",
    "silence": "Tensor",
    "said_now": "Tensor",
    "conversation": "Tensor",
}
"""What the reader of a page has before its first block, and the type of each."""

_IMPORTS = (
    "from collections.abc import Callable",
    "from graphengine import Engine, SamplingParams",
    "from torch import Tensor",
)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    """A page's path from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def code_of(page: str) -> list[str]:
    """The Python blocks of a page with this text."""
    return _BLOCK.findall(page)


def module_of(page: str) -> str:
    """The blocks on their lines, and what the reader has on the first one, which is a heading."""
    found = [(page.count("\n", 0, each.start(1)), each[1]) for each in _BLOCK.finditer(page)]
    lines = ["; ".join([*_IMPORTS, *(f"{name}: {kind}" for name, kind in READER.items())])]
    for line, block in found:
        lines += [""] * (line - len(lines)) + block.splitlines()
    return "\n".join(lines) + "\n"


def write_modules(folder: Path) -> list[Path]:
    """A module in `folder` for each page that has code; other modules there are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    written = []
    for page in PAGES:
        text = page.read_text("utf-8")
        if code_of(text):
            name = name_of(page).removesuffix(".md").replace("/", "_")
            written.append(folder / f"{name}.py")
            written[-1].write_text(module_of(text), "utf-8")
    return written


if __name__ == "__main__":
    write_modules(Path(sys.argv[1]))
