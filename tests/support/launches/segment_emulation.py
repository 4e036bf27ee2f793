"""A segment that was compiled for sm_90, run without a GPU: its programs run in turn, a slice of
each at a time, as they wait for each other's words.

The instructions are `emulation.py`'s, and those of the segment's own text: registers and labels
that it names, barriers with a number in a register, warps that arrive without waiting, and copies
of rows, which complete in an arbitrary order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from launches import emulation
from launches.compilation import Op, compile_launch
from launches.hopper_emulation import _Block
from launches.ptx_text import Array, names_in, parse

_SLICE = 200
_KINDS = {"pred": "%p", "b32": "%r", "f32": "%r", "b64": "%rd"}


def run_launch(launch: Op, *, seed: int = 0, most: int = 1_000_000) -> None:
    """Run a launch whose tensors are on the CPU; it writes them.

    most  slices until it counts as a deadlock
    """
    ptx, names = compile_launch(launch)
    constants = [each.name for each in launch.kernel.params if each.is_constexpr]
    launch = replace(launch, arguments={**launch.arguments, **dict.fromkeys(constants)})
    memory = emulation._Memory(launch)
    program = parse(_plain(ptx))
    values = [memory.parameter(launch, name) for name in emulation._parameters(launch, names)]
    threads = 32 * launch.options["num_warps"]
    random = np.random.default_rng(seed)
    grid = (*launch.grid, 1, 1)[:3]
    blocks = []
    for x in range(grid[0]):
        special = {"ctaid": (x, 0, 0), "nctaid": grid}
        blocks.append(_Program(program, {}, values, special, threads, memory, True))
    with np.errstate(all="ignore"):
        for _ in range(most):
            left = [block for block in blocks if not block.ended]
            if not left:
                break
            left[random.integers(len(left))].run_slice(random)
        else:
            raise AssertionError(f"deadlock: {[set(each.blocked.values()) for each in blocks]}")
    memory.write_back()


def _plain(ptx: str) -> str:
    """PTX whose inline assembly has registers and labels as the compiler's own."""
    number = 100_000

    def renamed(match: re.Match[str]) -> str:
        nonlocal number
        text = re.sub(
            r"(?<=\s)(\w+)<(\d+)>",
            lambda found: ", ".join(f"{found[1]}{i}" for i in range(int(found[2]))),
            match[1],
        )
        names = dict.fromkeys(re.findall(r"^\s*(\w+):", text, re.MULTILINE), "$L")
        for kind, found in re.findall(r"\.reg \.(\w+)\s+([^;]*);", text):
            names |= {name.strip(): _KINDS[kind] for name in found.split(",")}
        text = re.sub(r"\.reg [^;]*;|^\s*[{}]\s*$", "", text, flags=re.MULTILINE)
        for name, prefix in names.items():
            number += 1
            text = re.sub(rf"(?<![.%$\w]){name}(?![\w.])", f"{prefix}{number}", text)
        return text

    ptx = re.sub(r"// begin inline asm(.*?)// end inline asm", renamed, ptx, flags=re.DOTALL)
    return re.sub(r"\b(ld|st|atom)\.relaxed\.gpu\.global", r"\1.global", ptx)


class _Program(_Block):
    """One program of a segment."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrived: dict[int, int] = {}
        self.ended = False

    def run_slice(self, random: np.random.Generator) -> None:
        end = len(self.program)
        self._unblock()
        ready = ((self.pc < end) & ~self.waiting).reshape(-1, 32).any(axis=1)
        if ready.any():
            chosen = 32 * int(random.choice(np.flatnonzero(ready)))
            own = np.zeros(self.threads, np.bool_)
            own[chosen : chosen + 32] = True
            for _ in range(_SLICE):
                if not self._run_next(own, slice(chosen, chosen + 32), end):
                    break
        if self.copies:
            self.copies.pop(random.integers(len(self.copies)))()
        self.ended = bool((self.pc >= end).all())

    def _run_next(self, own: Array, warp: slice, end: int) -> bool:
        """Run one instruction of a warp, whose slowest threads come first; False: none can run."""
        places = np.where(self.waiting[warp], end, self.pc[warp])
        pc = int(places.min())
        if pc >= end:
            return False
        active = own.copy()
        active[warp] = places == pc
        self.pc[active] = pc + 1
        instruction = self.program[pc]
        if instruction.guard:
            taken = self.registers[instruction.guard.lstrip("!")]
            active = active & (~taken if instruction.guard[0] == "!" else taken)
        if active.any():
            self.step(instruction, active)
            if "warp" in instruction.opcode:
                self._unblock()
        return True

    def _unblock(self) -> None:
        at: dict[tuple[str, int, int], list[int]] = {}
        for thread, reason in self.blocked.items():
            at.setdefault(reason, []).append(thread)
        for (what, number, wanted), threads in at.items():
            if what == "mbarrier":
                free = self.barriers[number].phase != wanted
            elif what == "warp":
                own = self.pc[32 * number : 32 * number + 32]
                free = len(threads) == int((own < len(self.program)).sum())
            else:
                free = len(threads) + self.arrived.get(number, 0) == wanted
                if free:
                    self.arrived[number] = 0
            if free:
                self.waiting[threads] = False
                for thread in threads:
                    del self.blocked[thread]

    def step(self, instruction: Any, active: Array) -> None:
        opcode, ops = instruction.opcode, instruction.operands
        if opcode.startswith("bar.warp"):
            self._block(active, ("warp", int(np.flatnonzero(active)[0]) // 32, 0))
        elif opcode.startswith(("bar.", "barrier.")):
            number = int(self.read(ops[0])[active][0])
            wanted = int(self.read(ops[1])[active][0]) if len(ops) > 1 else self.threads
            if "arrive" in opcode:
                self.arrived[number] = self.arrived.get(number, 0) + int(active.sum())
                assert self.arrived[number] < wanted, f"barrier {number}: all arrive, none waits"
            else:
                self._block(active, ("bar", number, wanted))
        else:
            super().step(instruction, active)

    def read(self, text: str) -> Array:
        if text not in self.registers and re.fullmatch(r"%(p|rs|r|rd)\d+", text):
            # What a register holds that nobody has written.
            kind = self.type_of(text)
            return np.full(self.threads, kind(True) if kind is np.bool_ else np.iinfo(kind).max)
        return super().read(text)

    def do_mbarrier(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[0] == "try_wait":
            self.write(ops[0], np.ones(self.threads, np.bool_), active)
        for thread in np.flatnonzero(active):
            super().do_mbarrier(rest, ops, np.arange(self.threads) == thread)

    def do_setp(self, rest: list[str], ops: list[str], active: Array) -> None:
        super().do_setp([rest[0], rest[-1]], ops[:3], active)
        if len(rest) == 3:
            join = {"and": np.logical_and, "or": np.logical_or}[rest[1]]
            found = join(self.registers[ops[0]], self.registers[ops[3]])
            self.write(ops[0], found, active)

    def do_mma(self, rest: list[str], ops: list[str], active: Array) -> None:
        targets = names_in(ops[0])
        before = {name: self.registers.get(name) for name in targets}
        super().do_mma(rest, ops, np.ones_like(active))
        for name, old in before.items():
            if old is not None:
                self.registers[name] = np.where(active, self.registers[name], old)

    def do_cp(self, rest: list[str], ops: list[str], active: Array) -> None:
        to, source, at = (self._address(ops[index]) for index in (0, 1, 3))
        size = self.read(ops[2])
        for thread in np.flatnonzero(active):
            copy = self._copy(
                int(to[thread]), int(source[thread]), int(size[thread]), int(at[thread])
            )
            self.copies.append(copy)

    def _copy(self, to: int, source: int, size: int, at: int) -> Callable[[], None]:
        assert to % 16 == 0 and source % 16 == 0 and size % 16 == 0, f"{to=}, {source=}, {size=}"
        assert self.memory.inside[source : source + size].all(), f"{source=}, {size=}"

        def copy() -> None:
            self.shared[to : to + size] = self.memory.bytes[source : source + size]
            self.barriers[at].change(0, -size)

        return copy
