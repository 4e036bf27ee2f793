"""Writes the option tables out: `engine_options.py`, `flags.json`, the tables of docs/options.md.

    python -m graphengine.cli.option_files            # in a checkout: writes all
    python -m graphengine.cli.option_files --check    # writes nothing; status 1 if one differs

A type checker reads source alone, so the keyword arguments of `Engine.from_pretrained` have to be
in a file; a test holds it, the flags and the page against the tables.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphengine.cli.option_flags import FILE as FLAGS
from graphengine.cli.option_flags import to_json
from graphengine.cli.option_groups import GROUPS, Groups, grouped
from graphengine.config import EngineConfig
from graphengine.options.table import Row, rows
from graphengine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m graphengine.cli.option_files"
PAGE_TABLES = {"request options": SamplingParams, "engine options": EngineConfig}
"""The tables, by the name in their markers."""

_LINE = 100


def keyword_arguments(table: type, name: str, meaning: str) -> str:
    """A module whose TypedDict `name` has a table's options as keys, none of them required."""
    module = inspect.getmodule(table)
    assert module is not None, f"{table=}"
    used = {
        node.id
        for row in rows(table)
        for node in ast.walk(ast.parse(row.annotation))
        if isinstance(node, ast.Name)
    }
    imports = sorted({*_imports(ast.parse(inspect.getsource(module)), module.__name__, used)})
    standard = [line for line in imports if _is_standard(line)]
    imports = [line for line in imports if line not in standard]
    lines = [
        f'"""{meaning}',
        "",
        f"Made by `{COMMAND}`: change the table there, not this file.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *sorted([*standard, "from typing import TypedDict"]),
        "",
        *[line for line in imports if line.startswith("import ")],
        "",
        *[line for line in imports if line.startswith("from ")],
        "",
        "",
        f"class {name}(TypedDict, total=False):",
        f'    """The fields of `{table.__name__}`."""',
    ]
    for row in rows(table):
        lines += ["", f"    {row.name}: {row.annotation}", *_docstring(row.doc)]
    return "\n".join(lines) + "\n"


def markdown(table: type, groups: Groups | None = None) -> str:
    """A table's options in Markdown, with a heading for each group if there are any."""
    if groups is None:
        return _markdown_rows(rows(table))
    return "\n\n".join(
        f"### {group}\n\n{_markdown_rows(options)}"
        for group, options in grouped(table, groups).items()
    )


def _markdown_rows(options: Sequence[Row]) -> str:
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for row in options:
        flag = "" if row.flag is None else f"<br>`--{row.flag_name}`"
        doc = row.doc.replace("|", "\\|")
        lines.append(f"| `{row.name}`{flag} | {_default(row)} | {doc} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """`page` with each table between its markers. ValueError unless each marker is there once."""
    for name, table in PAGE_TABLES.items():
        begin, end = f"<!-- {name}: made by `{COMMAND}` -->", f"<!-- end of {name} -->"
        for marker in (begin, end):
            if page.count(marker) != 1:
                raise ValueError(f"the page has {page.count(marker)} times the marker {marker}")
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n\n{markdown(table, GROUPS[table])}\n\n{end}{after}"
    return page


def files(root: Path = ROOT) -> dict[Path, str]:
    """The contents that each written file must have, in the checkout at `root`."""
    meaning = "Keyword arguments of `Engine.from_pretrained`, for type checkers and editors."
    page = root / "docs" / "options.md"
    return {
        root / "graphengine" / "engine_options.py": keyword_arguments(
            EngineConfig, "EngineOptions", meaning
        ),
        root / "graphengine" / "cli" / FLAGS.name: to_json(PAGE_TABLES.values()),
        page: with_tables(page.read_text(encoding="utf-8")),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if a file differs"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the checkout")
    options = parser.parse_args(arguments)
    differs = 0
    for path, wanted in files(options.root).items():
        if path.is_file() and path.read_text(encoding="utf-8") == wanted:
            continue
        if options.check:
            print(f"{path} is not what the tables say: {COMMAND} writes it", file=sys.stderr)
            differs = 1
        else:
            path.write_text(wanted, encoding="utf-8")
    return differs


def _imports(source: ast.Module, module: str, names: set[str]) -> Iterator[str]:
    """The lines that import all `names` but builtins, as the module itself does."""
    for node in source.body:
        if isinstance(node, ast.Import):
            yield from (f"import {each.name}" for each in node.names if each.name in names)
        elif isinstance(node, ast.ImportFrom):
            found = sorted(each.name for each in node.names if each.name in names)
            if found:
                yield _import_line(str(node.module), found)
    own = sorted(
        target.id
        for node in source.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in names
    )
    if own:
        yield _import_line(module, own)


def _is_standard(line: str) -> bool:
    """Whether a line imports from Python's own library."""
    return line.split()[1].partition(".")[0] in sys.stdlib_module_names


def _import_line(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _docstring(text: str) -> list[str]:
    lines = textwrap.wrap(text, _LINE - 8, break_long_words=False)
    if len(lines) == 1:
        return [f'    """{lines[0]}"""']
    return [f'    """{lines[0]}', *(f"    {line}" for line in lines[1:]), '    """']


def _default(row: Row) -> str:
    return "" if row.default is dataclasses.MISSING else f"`{row.default!r}`"


if __name__ == "__main__":
    sys.exit(main())
