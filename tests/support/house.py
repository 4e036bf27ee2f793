"""What the house counts about itself, read from sources alone: `python tests/support/house.py`.

Circles are those of all imports, also of the ones inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

PACKAGES = {
    "kernels": "graphengine.kernels",
    "buckets": "graphengine.buckets",
    "graphengine": "graphengine",
    "profiles": "graphengine.profiles",
}
"""The package that each folder is."""

ROOMS = (
    "paths", "options", "routing_record", "speculative", "speculative_text",
    "structured_outputs", "sampling_params", "engine_sizes", "rank_options", "config",
    "engine_options", "demo", "testing", "models", "text", "automata", "prompt_embeds",
    "prompts", "requests", "host",
    "drafters", "program", "observe", "opening", "core", "parallel", "sessions", "policies",
    "engine", "", "cli", "__main__",
)  # fmt: skip
"""The rooms and the flat modules of `graphengine/`, from the ground up; "" is the package itself.

Imports point down this list.
"""

FAMILIES = re.compile(r"[Ll]lama(?!3)|[Qq]wen|[Mm]i[Mm]o|^dense_|Dense")
"""What a name has that names a family of models; `llama3` is also a kind of RoPE."""
_FAMILY_WORD = re.compile(FAMILIES.pattern.replace("^", r"\b"))
MAY_NAME_FAMILIES = ("graphengine/models/", "profiles/shape_configs.py")
MAY_NAME_KINDS = (
    "kernels/linear/kinds.py",
    "kernels/linear/gluon/packed_gluon_codes.py",
    "kernels/linear/gluon/packed_chunk_codes.py",
    "kernels/experts/packed/packed_triton.py",
    "graphengine/models/quantised/compressed_config.py",
    "graphengine/models/quantised/config.py",
    "graphengine/models/quantised/gptq_config.py",
    "graphengine/models/quantised/torchao_config.py",
)
"""The table of kinds of weights, its decoders and the readers of configs."""
# What else may be in fp8.
_OTHERS_IN_FP8 = ("kv_dtype", "activations")
# Methods of named tuples, which have an underscore for another reason; and what Python has so.
_PUBLIC = {"_fields", "_field_defaults", "_replace", "_asdict", "_make", "_getframe"}
_LIBRARIES = {"torch", "os", "sys"}


def package_files() -> list[Path]:
    """Every Python file of the packages."""
    return [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    """The import name of a file of the repository; `__init__` is kept as the last part."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES.get(folder, folder), *rest])


@cache
def imports(source: str, module: str) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything that `source`, the file of `module`, imports.

    `from a import b` gives `a.b`, which is below `a` whether b is a module or not. Relative imports
    are resolved; `import_module` and `__import__` count where their argument is a literal.
    """
    return tuple(_imports(source, module))


def _imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = module.split(".")[: -node.level] + base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function, name = node.func, node.args[0]
            called = function.attr if isinstance(function, ast.Attribute) else None
            called = function.id if isinstance(function, ast.Name) else called
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """From each module to those that it imports; `sources` by module name, as `module_name`."""
    by_name = {name.removesuffix(".__init__"): name for name in sources}
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = set()
        for _, name in imports(source, module):
            while name and name not in by_name:
                name = name.rpartition(".")[0]
            if name:
                found.add(by_name[name])
        graph[module] = found - {module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The modules of each circle of imports: strongly connected parts of more than one (Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            place = stack.index(module)
            part, stack[place:] = stack[place:], []
            if len(part) > 1:
                found.append(sorted(part))

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return found


def private_accesses(source: str) -> list[str]:
    """`line: text` of each use of a name with an underscore on an object that is not one's own.

    A module's own classes and functions may know each other's.
    """
    nodes = list(ast.walk(ast.parse(source)))
    own = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }
    own |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    found = []
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr):
            continue
        owner = _owner(node)
        if owner.partition(".")[0] in _LIBRARIES or owner in ("self", "cls", "super()"):
            continue
        if node.attr in _PUBLIC | own:
            continue
        found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _owner(node: ast.Attribute) -> str:
    return ast.unparse(node.value)


def family_names(path: str, source: str) -> list[str]:
    """`line: name` where the code of `source`, the file at `path`, has a family's name."""
    # Most files have no such word anywhere.
    if path.startswith(MAY_NAME_FAMILIES) or not _FAMILY_WORD.search(source):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.ImportFrom):
            name = " ".join([node.module or "", *(alias.name for alias in node.names)])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        if any(FAMILIES.search(word) for word in re.split(r"[ .]", name)):
            found.append(f"{node.lineno}: {name.strip()}")  # type: ignore[attr-defined]
    return found


MAY_CHOOSE_DRAFTERS = ("graphengine/drafters/", "profiles/benchmark/engines.py")
"""Who makes drafters, and so asks which one it is to make."""
_DRAFTER_BASES = {"Mode", "Drafter", "DraftModules"}


def drafter_classes(sources: Iterable[str]) -> set[str]:
    """Names of the classes that derive from a mode, a drafter or its modules, which may be asked
    what they can do but not which they are.
    """
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    while more := {name for name, of in bases.items() if of & (_DRAFTER_BASES | found)} - found:
        found |= more
    return found - _DRAFTER_BASES


def class_tests(path: str, source: str, classes: set[str]) -> list[str]:
    """`line: text` where `source`, the file at `path`, asks whether something is of `classes`."""
    # Most files have no such word.
    if path.startswith(MAY_CHOOSE_DRAFTERS) or not any(name in source for name in classes):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = list(node.args[1:])
        elif isinstance(node, ast.Compare):
            if any("type(" in ast.unparse(side) for side in (node.left, *node.comparators)):
                asked = [node]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        names = {
            getattr(each, "id", getattr(each, "attr", None))
            for top in asked
            for each in ast.walk(top)
        }
        if names & classes:
            found.append(f"{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


_FRAGMENT = re.compile(r"(Of|That|Those|As|The same)\b")


def fragments(source: str) -> list[tuple[int, str]]:
    """Line and first line of docstrings that are no sentence, as their first words show."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        (statement.lineno, statement.value.value.strip())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]
    return [(line, text.partition("\n")[0]) for line, text in texts if _FRAGMENT.match(text)]


def kind_comparisons(file: str, source: str, names: Collection[str]) -> list[str]:
    """`line: name` where a kind of weights is compared with, or looked up, by its name."""
    found = []
    for node in ast.walk(ast.parse(source)) if file not in MAY_NAME_KINDS else ():
        operands: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.Compare):
            operands = (node.left, *node.comparators)
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if getattr(key, "value", None) != "fp8"]
        elif isinstance(node, ast.MatchValue):
            operands = (node.value,)
        parts = [part for operand in operands if operand for part in ast.walk(operand)]
        if not any(getattr(part, "attr", None) in _OTHERS_IN_FP8 for part in parts):
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            found += [f"{node.lineno}: {value}" for value in values if value in names]
    return found


def room_of(module: str) -> str | None:
    """The entry of `ROOMS` that a module of `graphengine/` is in; None for modules of other
    packages.
    """
    package, *rest = module.removesuffix(".__init__").split(".")
    if package != "graphengine" or (rest and f"graphengine.{rest[0]}" in PACKAGES.values()):
        return None
    return rest[0] if rest else ""


def upward_imports(graph: Mapping[str, set[str]]) -> list[str]:
    """`module -> module` of each import that does not point down the list of rooms."""
    found = []
    for module, others in sorted(graph.items()):
        room = room_of(module)
        for other in sorted(others):
            below = room_of(other)
            if room is None or below is None or room == below:
                continue
            if ROOMS.index(below) > ROOMS.index(room):
                found.append(f"{module} -> {other}")
    return found


def package_graph() -> dict[str, set[str]]:
    """`import_graph` of all packages."""
    return import_graph({module_name(path): path.read_text("utf-8") for path in package_files()})


def report() -> list[str]:
    """The counts as lines."""
    files = {path: path.read_text(encoding="utf-8") for path in package_files()}
    found = circles(package_graph())
    lines = [f"import circles {len(found)}"]
    lines += [f"  {' '.join(part)}" for part in found]
    named = {path: family_names(_shown(path), source) for path, source in files.items()}
    named = {path: where for path, where in named.items() if where}
    lines.append(f"files outside models/ that name a family {len(named)}")
    lines += [f"  {_shown(path)}:{line}" for path, where in named.items() for line in where]
    private = [
        f"  {_shown(path)}:{use}"
        for path, source in files.items()
        for use in private_accesses(source)
    ]
    lines += [f"private accesses across modules {len(private)}", *private]
    folders = Counter(path.parent for path in files)
    folders.update(path.parent for path in (ROOT / "tests").rglob("*.py"))
    lines += [f"{count:4} files in {_shown(path)}" for path, count in folders.most_common(8)]
    engine = len(files[ROOT / "graphengine" / "engine.py"].splitlines())
    return [*lines, f"engine.py {engine} lines"]


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")
