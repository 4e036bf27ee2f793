"""Writes docs/api.md: every public name with its signature and what it is for, from the docstrings.

    python docs/api_page.py            # in a checkout: writes the page
    python docs/api_page.py --check    # writes nothing; status 1 if it differs

The site of `make docs` has whole docstrings; this page can be read without building anything.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from graphengine.config import EngineConfig
from graphengine.sampling_params import SamplingParams

PAGE = Path(__file__).resolve().parent / "api.md"
MODULES = {
    "graphengine": "The engine: what programs import.",
    "graphengine.testing": "Checks for CUDA graphs; each function is a pytest fixture, too.",
    "graphengine.buckets": "Static buffers, capture and replay, for step programs of your own.",
}
"""The packages whose `__all__` is public, and what each is."""

TABLES: dict[type, str] = {
    SamplingParams: "[Options of a request](options.md#options-of-a-request)",
    EngineConfig: "[Options of an engine](options.md#options-of-an-engine)",
}
"""Classes whose fields have a page of their own."""

_HEAD = """# API

<!-- made by `python docs/api_page.py` from the docstrings: change those -->

Every public name, with its signature and the beginning of its docstring. `help(name)` has the rest;
the [site](testing.md#this-project) that `make docs` builds shows it all.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, meaning in MODULES.items():
        module = import_module(name)
        parts.append(f"## `{name}`\n\n{meaning}\n")
        parts += [entry for public in sorted(module.__all__) for entry in _entries(module, public)]
    return "\n".join(parts)


def _entries(module: ModuleType, name: str) -> Iterator[str]:
    value = getattr(module, name)
    if inspect.isclass(value):
        yield f"### `{name}`\n"
        shown = "" if value in TABLES else _signature(value)
        if shown:
            yield _code(f"{name}{shown}")
        yield _words(inspect.getdoc(value) if value.__doc__ else "")
        if value in TABLES:
            yield f"Its fields: {TABLES[value]}.\n"
        yield from _methods(value)
    elif inspect.isroutine(value):
        yield f"### `{name}`\n"
        yield _code(f"{name}{_signature(value)}")
        yield _words(inspect.getdoc(value))
    else:
        yield f"### `{name}`\n"
        yield _words(_comment_of(module, name))


def _methods(owner: type) -> Iterator[str]:
    """A line for each public method and property that the class defines, or a base that shares the
    core's part of it.
    """
    lines = []
    bases = [base for base in owner.__mro__[1:] if base.__module__.startswith("graphengine.core.")]
    members = {name: member for each in (*bases, owner) for name, member in vars(each).items()}
    for name, member in members.items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(member, property):
            lines.append(f"- `.{name}`: {_sentence(member.__doc__)}")
        elif inspect.isfunction(function):
            lines.append(f"- `.{name}{_signature(function)}`: {_sentence(function.__doc__)}")
    if lines:
        yield "\n".join(line.removesuffix(": ") for line in lines) + "\n"


def _signature(value: Any) -> str:
    """As in the source, without `self`; empty where there is none."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    # The field that only marks where keywords begin has no meaning of its own.
    kept = [
        each.replace(default=_default(each.default), annotation=_annotation(each.annotation))
        for each in found.parameters.values()
        if each.name not in ("self", "cls", "_")
    ]
    returned = _annotation(found.return_annotation)
    return str(found.replace(parameters=kept, return_annotation=returned))


class _Shown:
    """What a signature shows as this text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _annotation(given: Any) -> Any:
    return _Shown(given) if isinstance(given, str) else given


def _default(given: Any) -> Any:
    """A default that looks the same in every process; "..." where it is made anew for each call."""
    is_plain = given is inspect.Parameter.empty or given is None
    return given if is_plain or isinstance(given, int | float | str | tuple) else _Shown("...")


def _comment_of(module: ModuleType, name: str) -> str:
    """The string after the assignment of a constant, in the module that has it."""
    for candidate in {module.__name__, *_homes(module)}:
        source = Path(inspect.getfile(import_module(candidate))).read_text(encoding="utf-8")
        body = ast.parse(source).body
        for node, after in pairwise(body):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            is_it = any(isinstance(each, ast.Name) and each.id == name for each in targets)
            if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return str(after.value.value)
    return ""


def _homes(module: ModuleType) -> list[str]:
    """The modules that `module` imports its names from."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))
    return [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.startswith("graphengine")
    ]


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _words(text: str | None) -> str:
    return f"{_paragraph(text)}\n"


def _sentence(text: str | None) -> str:
    """The first paragraph of a method's docstring."""
    return _paragraph(inspect.cleandoc(text or ""))


def main(arguments: Sequence[str]) -> int:
    wanted = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    if "--check" in arguments:
        print(f"{PAGE} is not what the docstrings say: python docs/api_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
