"""PTX as `emulation.py` reads it: instructions, and what their operands mean."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
TYPES = {"%p": np.bool_, "%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32}
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Instruction(NamedTuple):
    guard: str
    opcode: str
    operands: list[str]
    name: str
    """The opcode up to its first dot."""
    rest: list[str]
    """The parts after it."""


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :].split("\t.section")[0]
    for line in body.splitlines():
        line = re.sub(r"//.*", "", line).strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
            continue
        match = re.match(r"(?:\{\s*)?(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);\s*\}?$", line)
        if match:
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,|]+", match[3])
            name, *rest = match[2].split(".")
            program.append(Instruction(match[1] or "", match[2], operands, name, rest))
    return program, labels


def declared_registers(ptx: str) -> dict[str, Any]:
    """Types of the registers that inline assembly names."""
    found = {}
    for bits, names in re.findall(r"\.reg \.b(\d+)\s+((?:\w+)(?:\s*,\s*\w+)*);", ptx):
        found |= {name.strip(): BITS[int(bits)] for name in names.split(",")}
    return found


# Programs run each instruction often: what its text means is found once.


@cache
def literal(text: str, threads: int) -> Array:
    """A number for each thread; nobody may write to it."""
    if text.startswith("0f"):
        value = np.full(threads, int(text[2:], 16), np.uint32)
    else:
        number = int(text.removesuffix("U"), 0) & 0xFFFFFFFFFFFFFFFF
        value = np.full(threads, number, np.uint64)
    value.flags.writeable = False
    return value


@cache
def integer_types(kind: str) -> tuple[Any, str | None]:
    """The unsigned dtype of a type such as s32, and the signed one it is viewed as."""
    bits = int(re.search(r"\d+", kind)[0])  # type: ignore[index]
    return BITS[bits], f"i{bits // 8}" if kind[0] == "s" else None


@cache
def register_type(name: str) -> Any:
    return TYPES[re.match(r"%[a-z]+", name)[0]]  # type: ignore[index]


@cache
def names_in(text: str) -> tuple[str, ...]:
    """Of a list such as {%r1, %r2}."""
    return tuple(re.findall(r"[%\w]+", text))


@cache
def place_of(text: str) -> tuple[str, int]:
    """The register and the offset of an address such as [%rd1+16]."""
    match = re.match(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
    assert match, text
    return match[1], int(match[2] or 0)
