"""Whether a kernel waits for the launch before it: read from its PTX, or its cubin's SASS.

A kernel that is launched programmatically (PDL) starts while the one before it still runs. It has
to execute `griddepcontrol.wait` (in SASS `ACQBULK`) before it writes anything and before it exits,
in every thread block and on every path.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Literal

from graphengine.buckets.graphs.introspect import demangle

# "trap" ends the process and is no fault.
Kind = Literal["wait", "store", "exit", "trap", "branch", "other"]

# Characters of an instruction in a message.
_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instruction:
    """One instruction. `target` is the label of a branch; `always` says that no predicate guards
    it.
    """

    kind: Kind
    line: int
    text: str
    always: bool = True
    target: str | None = None


@dataclass(slots=True, kw_only=True)
class _Function:
    """The instructions of one kernel, and at which of them each label stands."""

    name: str
    instructions: list[_Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def add(self, kind: Kind, line: int, text: str, predicate: str, target: str | None) -> None:
        self.instructions.append(
            _Instruction(
                kind=kind,
                line=line,
                text=" ".join(text.split())[:_MOST_SHOWN],
                always=not predicate,
                target=target,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCode:
    """A compiled kernel: `fault` says where it writes or ends without having waited, or is None.

    `function` is the driver's handle if it is known, else 0.
    """

    name: str
    fault: str | None
    function: int = 0


def read_code(source: object) -> list[KernelCode]:
    """The kernels in `source`: text of PTX or of `nvdisasm`, a cubin, or Triton's compiled kernel.

    ValueError for anything else and for text without a kernel; RuntimeError for a cubin where
    there is no `nvdisasm`.
    """
    if isinstance(source, bytes):
        return read_code(_disassemble(source))
    if isinstance(source, str):
        functions = list(_of_sass(source) if ".section\t.text." in source else _of_ptx(source))
        if not functions:
            raise ValueError(f"no kernel in {len(source)} characters of PTX or SASS")
        return [KernelCode(name=demangle(each.name), fault=_fault(each)) for each in functions]
    texts = getattr(source, "asm", None)
    if texts is None or "ptx" not in texts:
        raise ValueError(
            f"{source!r} is of type {type(source).__name__}: give PTX, a cubin, or the compiled "
            "kernel that a launch of Triton returns"
        )
    function = int(getattr(source, "function", None) or 0)
    return [
        KernelCode(name=found.name, fault=found.fault, function=function)
        for found in read_code(texts["ptx"])
    ]


def _fault(function: _Function) -> str | None:
    """The first store or exit, in lines, that a path reaches without a wait."""
    pending, seen, faults = [0], set[int](), list[_Instruction]()
    while pending:
        place = pending.pop()
        while place < len(function.instructions) and place not in seen:
            seen.add(place)
            found = function.instructions[place]
            if found.kind in ("store", "exit"):
                faults.append(found)
            if found.kind == "branch" and found.target in function.labels:
                pending.append(function.labels[found.target])
            if found.always and found.kind in ("wait", "exit", "trap", "branch"):
                break
            place += 1
    if not faults:
        return None
    first = min(faults, key=lambda found: found.line)
    waits = sum(found.kind == "wait" for found in function.instructions)
    what = "writes" if first.kind == "store" else "may end"
    return f"{what} at line {first.line} ({first.text}) before it has waited; it has {waits} waits"


_PTX_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$.]+)")
_PTX_LABEL = re.compile(r"^\s*([$\w]+):")
_PTX_BRANCH = re.compile(r"^bra(?:\.uni)?\s+([$\w]+)")
_PTX_STORE = re.compile(
    r"^(?:st|red|atom|multimem\.st|multimem\.red)\.(?!\S*\b(?:shared|local|param)\b)"
    r"|^cp(?:\.reduce)?\.async\.bulk\.\S*global\.shared"
)


def _of_ptx(text: str) -> Iterator[_Function]:
    function, depth = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("//")[0]
        if entry := _PTX_ENTRY.match(line):
            function, depth = _Function(name=entry[1]), 0
        if function is None:
            continue
        if depth:
            _add_ptx(function, number, line)
        depth += line.count("{") - line.count("}")
        if depth == 0 and "}" in line:
            yield function
            function = None


def _add_ptx(function: _Function, number: int, line: str) -> None:
    if label := _PTX_LABEL.match(line):
        function.labels[label[1]] = len(function.instructions)
        line = line[label.end() :]
    for statement in line.split(";")[:-1]:
        text = statement.strip().lstrip("{ \t")
        predicate, text = _split_predicate(text)
        branch = _PTX_BRANCH.match(text)
        kind: Kind = "other"
        if text.startswith("griddepcontrol.wait"):
            kind = "wait"
        elif branch:
            kind = "branch"
        elif text in ("ret", "ret.uni", "exit"):
            kind = "exit"
        elif text == "trap":
            kind = "trap"
        elif _PTX_STORE.match(text):
            kind = "store"
        function.add(kind, number, text, predicate, branch[1] if branch else None)


_SASS_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+)")
_SASS_LABEL = re.compile(r"^(\.L\w+):")
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_SASS_TARGET = re.compile(r"^(?:BRA|BRX|JMP)\S*.*`\((\.L\w+)\)")
_SASS_STORE = re.compile(r"^(?:STG|ST\.|RED|ATOMG|ATOM\.|UTMASTG|UTMAREDG|UBLKCP\.G)")


def _of_sass(text: str) -> Iterator[_Function]:
    function = None
    for number, line in enumerate(text.splitlines(), 1):
        if section := _SASS_SECTION.match(line):
            if function is not None:
                yield function
            function = _Function(name=section[1])
        elif line.lstrip().startswith(".section") and function is not None:
            yield function
            function = None
        elif function is not None:
            _add_sass(function, number, line)
    if function is not None:
        yield function


def _add_sass(function: _Function, number: int, line: str) -> None:
    if label := _SASS_LABEL.match(line):
        function.labels[label[1]] = len(function.instructions)
    if not (found := _SASS_INSTRUCTION.match(line)):
        return
    predicate, text = _split_predicate(found[1])
    target = _SASS_TARGET.match(text)
    kind: Kind = "other"
    if text.startswith("ACQBULK"):
        kind = "wait"
    elif target:
        kind = "branch"
    elif text.startswith("EXIT"):
        kind = "exit"
    elif _SASS_STORE.match(text):
        kind = "store"
    function.add(kind, number, text, predicate, target[1] if target else None)


def _split_predicate(text: str) -> tuple[str, str]:
    """("@%p1", the rest); a predicate that is always true or false counts as none."""
    if not text.startswith("@"):
        return "", text
    predicate, _, rest = text.partition(" ")
    return ("" if predicate in ("@PT", "@UPT") else predicate), rest.strip()


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_nvdisasm(), file.name], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"nvdisasm cannot read {len(cubin)} bytes: {done.stderr.strip()}")
    return done.stdout


def _nvdisasm() -> str:
    """The disassembler of the CUDA toolkit, or the one that comes with triton."""
    if (found := shutil.which("nvdisasm")) is not None:
        return found
    spec = util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "backends", "nvidia", "bin", "nvdisasm")
        if path.exists():
            return str(path)
    raise RuntimeError("reading a cubin needs nvdisasm, of the CUDA toolkit or of triton")


def read_all(sources: Sequence[object]) -> list[KernelCode]:
    """The kernels of all sources."""
    return [code for source in sources for code in read_code(source)]
