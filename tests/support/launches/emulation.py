"""A launch that was compiled for sm_90, run without a GPU: its PTX, interpreted in numpy.

Gluon has no interpreter. This one knows the instructions that the kernels of quantised weights
compile to; it is for small shapes. Threads of a program run together while they are at the same
instruction, and a barrier waits for all. Memory is checked: an access outside of every tensor is an
error, and shared memory begins as NaN.

Copies to shared memory complete as late as they may (`late`), which shows a missing wait, or at
once, which shows a buffer that is overwritten too early.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from launches.compilation import Op, compile_launch
from launches.ptx_text import (
    BITS,
    Array,
    Instruction,
    declared_registers,
    integer_types,
    literal,
    names_in,
    parse,
    place_of,
    register_type,
)

_SHARED = 1 << 18
_GAP = 256


def run_launch(launch: Op, *, late: bool = True) -> None:
    """Run a launch whose tensors are on the CPU; it writes them."""
    ptx, names = compile_launch(launch)
    memory = _Memory(launch)
    program = parse(ptx)
    registers = declared_registers(ptx)
    values = [memory.parameter(launch, name) for name in _parameters(launch, names)]
    grid = (*launch.grid, 1, 1)[:3]
    threads = 32 * launch.options.get("num_warps", 4)
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    special = {"ctaid": (x, y, z), "nctaid": grid}
                    _Program(program, registers, values, special, threads, memory, late).run()
    memory.write_back()


def _parameters(launch: Op, names: list[str]) -> Iterator[str]:
    """Names of the compiled kernel's parameters; of numbers those that are no constants."""
    numbers: list[str] = []
    for index, name in enumerate(launch.kernel.arg_names):
        value, parameter = launch.arguments[name], launch.kernel.params[index]
        if isinstance(value, tuple):
            fields = zip(value._fields, value, strict=True)
            numbers += [f"{name}.{field}" for field, part in fields if _is_number(part)]
        elif isinstance(value, int | float) and not parameter.is_constexpr:
            numbers += [name] * (parameter.do_not_specialize or _is_number(value))
    for name in names:
        yield name or numbers.pop(0)


def _is_number(value: object) -> bool:
    """Whether it stays one in a kernel that is compiled for it: 1 becomes a constant, not 1.0."""
    return isinstance(value, float) or (isinstance(value, int) and value != 1)


class _Memory:
    """All tensors of a launch in one array, with gaps between them that nothing may touch."""

    def __init__(self, launch: Op) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for name, value in launch.arguments.items():
            if isinstance(value, torch.Tensor):
                self.tensors[name] = value
            elif isinstance(value, tuple):
                for field, part in zip(value._fields, value, strict=True):
                    if isinstance(part, torch.Tensor):
                        self.tensors[f"{name}.{field}"] = part
        self.at: dict[str, int] = {}
        end = _GAP
        for name, tensor in self.tensors.items():
            self.at[name] = end
            end += -(-_storage(tensor).size // _GAP) * _GAP + _GAP
        self.bytes = np.zeros(end, np.uint8)
        self.inside = np.zeros(end, np.bool_)
        for name, tensor in self.tensors.items():
            part = slice(self.at[name], self.at[name] + _storage(tensor).size)
            self.bytes[part], self.inside[part] = _storage(tensor), True

    def parameter(self, launch: Op, name: str) -> Array:
        if name in self.at:
            return np.uint64(self.at[name])
        whole, _, field = name.partition(".")
        value = launch.arguments[whole]
        value = getattr(value, field) if field else value
        if isinstance(value, float):
            return np.float32(value).view(np.uint32)
        return np.uint32(value & 0xFFFFFFFF)

    def check(self, address: Array, size: int, what: str) -> None:
        last = address + np.uint64(size - 1)
        fine = (last < self.bytes.size) & (address % np.uint64(size) == 0)
        fine[fine] = self.inside[address[fine]] & self.inside[last[fine]]
        if not fine.all():
            raise AssertionError(f"{what}: {size} bytes at {address[~fine][0]} of {self.at}")

    def write_back(self) -> None:
        for name, tensor in self.tensors.items():
            stored = _storage(tensor)
            stored[:] = self.bytes[self.at[name] : self.at[name] + stored.size]


def _storage(tensor: torch.Tensor) -> Array:
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = size if tensor.numel() else 0
    flat = torch.as_strided(tensor, (size,), (1,))
    return flat.view(torch.uint8).numpy() if size else np.zeros(0, np.uint8)


def _f32(bits: Array) -> Array:
    return bits.astype(np.uint32, copy=False).view(np.float32)


def _halves(bits: Array, kind: str) -> tuple[Array, Array]:
    """The lower and upper halves of words as float64."""
    bits = bits.astype(np.uint32, copy=False)
    return tuple(  # type: ignore[return-value]
        _half(part.astype(np.uint16), kind) for part in (bits & 0xFFFF, bits >> 16)
    )


def _half(bits: Array, kind: str) -> Array:
    if kind.startswith("bf16"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float16).astype(np.float64)


def _to_half(values: Array, kind: str) -> Array:
    """Bits of values rounded to nearest; values are float32 or exact."""
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float16
    halves = torch.from_numpy(values.astype(np.float32)).to(dtype)
    return halves.view(torch.int16).numpy().view(np.uint16)


def _pair(low: Array, high: Array, kind: str) -> Array:
    return _to_half(low, kind) | _to_half(high, kind).astype(np.uint32) << 16


class _Program:
    """One block of threads. Arrays of registers are replaced, and never written to."""

    def __init__(
        self,
        program: tuple[list[Instruction], dict[str, int]],
        declared: dict[str, Any],
        parameters: list[Array],
        special: dict[str, tuple[int, ...]],
        threads: int,
        memory: _Memory,
        late: bool,
    ) -> None:
        self.program, self.labels = program
        self.declared, self.parameters, self.special = declared, parameters, special
        self.threads, self.memory, self.late = threads, memory, late
        self.registers: dict[str, Array] = {}
        self.shared = np.full(_SHARED, 0xFF, np.uint8)
        self.pc = np.zeros(threads, np.int64)
        self.waiting = np.zeros(threads, np.bool_)
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def run(self) -> None:
        end, everyone = len(self.program), np.ones(self.threads, np.bool_)
        while True:
            pc = int(self.pc[0])
            if pc < end and not self.waiting.any() and (self.pc == pc).all():
                # The usual case; what follows holds for it, too, but takes its time.
                active = everyone
            else:
                alive = self.pc < end
                if not alive.any():
                    return
                ready = alive & ~self.waiting
                if not ready.any():
                    self.waiting[:] = False
                    continue
                pc = int(self.pc[ready].min())
                active = ready & (self.pc == pc)
            self.pc[active] = pc + 1
            instruction = self.program[pc]
            if instruction.guard:
                taken = self.registers[instruction.guard.lstrip("!")]
                active = active & (~taken if instruction.guard[0] == "!" else taken)
            if active.any():
                self.step(instruction, active)

    def step(self, instruction: Instruction, active: Array) -> None:
        name, ops = instruction.name, instruction.operands
        if name == "bra":
            self.pc[active] = self.labels[ops[-1]]
        elif name == "ret":
            self.pc[active] = len(self.program)
        elif name == "bar":
            self.waiting[active] = True
        elif name in ("griddepcontrol", "pragma", "createpolicy"):
            pass
        else:
            getattr(self, f"do_{name}")(instruction.rest, ops, active)

    # Operands.

    def type_of(self, name: str) -> Any:
        return self.declared[name] if name in self.declared else register_type(name)

    def read(self, text: str) -> Array:
        n = self.threads
        if text in self.registers:
            return self.registers[text]
        if text.startswith("%tid"):
            return np.arange(n, dtype=np.uint32)
        if text.startswith(("%ctaid", "%nctaid")):
            place, axis = text[1:].split(".")
            return np.full(n, self.special[place]["xyz".index(axis)], np.uint32)
        if text == "global_smem":
            return np.zeros(n, np.uint32)
        return literal(text, n)

    def write(self, name: str, value: Array, active: Array) -> None:
        if name == "_":
            return
        kind = self.type_of(name)
        value = value.astype(kind, copy=False)
        if not active.all():
            before = self.registers.get(name)
            value = np.where(active, value, np.zeros_like(value) if before is None else before)
        self.registers[name] = value

    def integers(self, kind: str, text: str) -> Array:
        """An operand as an integer of a type such as s32."""
        unsigned, signed = integer_types(kind)
        value = self.read(text).astype(unsigned, copy=False)
        return value if signed is None else value.view(signed)

    # Arithmetic.

    def do_mov(self, rest: list[str], ops: list[str], active: Array) -> None:
        if ops[0].startswith("{"):
            parts, whole = names_in(ops[0]), self.read(ops[1]).astype(np.uint64)
            width = int(rest[0][1:]) // len(parts)
            for index, part in enumerate(parts):
                self.write(part, whole >> np.uint64(width * index), active)
        elif ops[1].startswith("{"):
            parts = names_in(ops[1])
            width = int(rest[0][1:]) // len(parts)
            whole = np.zeros(self.threads, np.uint64)
            for index, part in enumerate(parts):
                bits = self.read(part).astype(np.uint64) & np.uint64((1 << width) - 1)
                whole |= bits << np.uint64(width * index)
            self.write(ops[0], whole, active)
        else:
            self.write(ops[0], self.read(ops[1]), active)

    def _binary(self, rest: list[str], ops: list[str], active: Array, function: Any) -> None:
        kind = rest[-1]
        if kind == "f32":
            result = function(_f32(self.read(ops[1])), _f32(self.read(ops[2]))).view(np.uint32)
        elif kind in ("bf16x2", "f16x2"):
            left, right = _halves(self.read(ops[1]), kind), _halves(self.read(ops[2]), kind)
            result = _pair(function(left[0], right[0]), function(left[1], right[1]), kind)
        elif kind == "pred":
            result = function(self.read(ops[1]), self.read(ops[2]))
        else:
            result = function(self.integers(kind, ops[1]), self.integers(kind, ops[2]))
        self.write(ops[0], result, active)

    def do_add(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.add)

    def do_sub(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.subtract)

    def do_and(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.bitwise_and)

    def do_or(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.bitwise_or)

    def do_xor(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.bitwise_xor)

    def do_min(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.minimum)

    def do_max(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._binary(rest, ops, active, np.maximum)

    def do_div(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[-1][0] not in "su":
            self._binary(rest, ops, active, np.divide)
            return
        one, two = (self.integers(rest[-1], op) for op in ops[1:3])
        self.write(ops[0], one // np.where(two == 0, 1, two), active)

    def do_rem(self, rest: list[str], ops: list[str], active: Array) -> None:
        one, two = (self.integers(rest[-1], op) for op in ops[1:3])
        self.write(ops[0], one % np.where(two == 0, 1, two), active)

    def do_not(self, rest: list[str], ops: list[str], active: Array) -> None:
        self.write(ops[0], ~self.read(ops[1]), active)

    def do_neg(self, rest: list[str], ops: list[str], active: Array) -> None:
        result = -_f32(self.read(ops[1])) if rest[-1] == "f32" else -self.integers(rest[-1], ops[1])
        self.write(ops[0], result.view(np.uint32) if rest[-1] == "f32" else result, active)

    def do_mul(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[0] in ("wide", "hi"):
            product = self._wide(rest[-1], ops[1]) * self._wide(rest[-1], ops[2])
            self.write(ops[0], product >> 32 if rest[0] == "hi" else product, active)
        else:
            self._binary(rest, ops, active, np.multiply)

    def do_mad(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[0] == "wide":
            product = self._wide(rest[-1], ops[1]) * self._wide(rest[-1], ops[2])
            self.write(ops[0], product + self.read(ops[3]).astype(product.dtype), active)
        else:
            one, two, three = (self.integers(rest[-1], op) for op in ops[1:4])
            self.write(ops[0], one * two + three, active)

    def _wide(self, kind: str, text: str) -> Array:
        return self.integers(kind, text).astype(np.int64)

    def do_fma(self, rest: list[str], ops: list[str], active: Array) -> None:
        kind = rest[-1]
        if kind in ("bf16x2", "f16x2"):
            pairs = zip(*(_halves(self.read(op), kind) for op in ops[1:4]), strict=True)
            low, high = (one * two + three for one, two, three in pairs)
            self.write(ops[0], _pair(low, high, kind), active)
            return
        one, two, three = (_f32(self.read(op)).astype(np.float64) for op in ops[1:4])
        self.write(ops[0], (one * two + three).astype(np.float32).view(np.uint32), active)

    def do_shl(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._shift(rest, ops, active, np.left_shift)

    def do_shr(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._shift(rest, ops, active, np.right_shift)

    def _shift(self, rest: list[str], ops: list[str], active: Array, function: Any) -> None:
        value = self.integers(rest[-1], ops[1])
        amount = self.read(ops[2]).astype(value.dtype)
        self.write(ops[0], function(value, amount), active)

    def do_shf(self, rest: list[str], ops: list[str], active: Array) -> None:
        assert rest[1] == "wrap", rest
        low, high, amount = (self.read(op).astype(np.uint64) for op in ops[1:4])
        both = high << np.uint64(32) | low
        by = amount & np.uint64(31)
        up = (both << by) >> np.uint64(32)
        result = both >> by if rest[0] == "r" else up
        self.write(ops[0], result & np.uint64(0xFFFFFFFF), active)

    def do_cvta(self, rest: list[str], ops: list[str], active: Array) -> None:
        self.write(ops[0], self.read(ops[1]), active)

    def do_bfe(self, rest: list[str], ops: list[str], active: Array) -> None:
        value = self.integers(rest[-1], ops[1])
        start, length = (self.read(op).astype(value.dtype) for op in ops[2:4])
        left = (8 * value.itemsize - length).astype(value.dtype)
        self.write(ops[0], (value << (left - start)) >> left, active)

    def do_lop3(self, rest: list[str], ops: list[str], active: Array) -> None:
        a, b, c = (self.read(op).astype(np.uint32) for op in ops[1:4])
        table, result = int(ops[4], 0), np.zeros(self.threads, np.uint32)
        for index in range(8):
            if table >> index & 1:
                terms = (a if index & 4 else ~a), (b if index & 2 else ~b), (c if index & 1 else ~c)
                result |= terms[0] & terms[1] & terms[2]
        self.write(ops[0], result, active)

    def do_prmt(self, rest: list[str], ops: list[str], active: Array) -> None:
        low, high, selector = (self.read(op).astype(np.uint64) for op in ops[1:4])
        both, result = low | high << np.uint64(32), np.zeros(self.threads, np.uint64)
        for index in range(4):
            chosen = (selector >> np.uint64(4 * index)) & np.uint64(15)
            assert (chosen < 8).all()
            byte = (both >> (chosen * np.uint64(8))) & np.uint64(255)
            result |= byte << np.uint64(8 * index)
        self.write(ops[0], result, active)

    def do_setp(self, rest: list[str], ops: list[str], active: Array) -> None:
        compare = {
            "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
            "eq": np.equal, "ne": np.not_equal, "neu": np.not_equal, "nan": lambda a, b: a != a,
            "num": lambda a, b: (a == a) & (b == b),
        }[rest[0]]  # fmt: skip
        if rest[-1] == "f32":
            left, right = _f32(self.read(ops[1])), _f32(self.read(ops[2]))
        else:
            left, right = (self.integers(rest[-1].replace("b", "u"), op) for op in ops[1:3])
        self.write(ops[0], compare(left, right), active)

    def do_selp(self, rest: list[str], ops: list[str], active: Array) -> None:
        one, two = self.read(ops[1]), self.read(ops[2])
        self.write(ops[0], np.where(self.read(ops[3]), one, two), active)

    def _float_of(self, function: Any, ops: list[str], active: Array) -> None:
        result = function(_f32(self.read(ops[1]))).astype(np.float32)
        self.write(ops[0], result.view(np.uint32), active)

    def do_ex2(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._float_of(np.exp2, ops, active)

    def do_lg2(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._float_of(np.log2, ops, active)

    def do_sqrt(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._float_of(np.sqrt, ops, active)

    def do_abs(self, rest: list[str], ops: list[str], active: Array) -> None:
        self._float_of(np.abs, ops, active)

    def do_cvt(self, rest: list[str], ops: list[str], active: Array) -> None:
        rest = [part for part in rest if part not in ("rn", "rzi")]
        to, source = rest
        if source == "e4m3x2":
            bits = self.read(ops[1]).astype(np.uint16)
            parts = torch.from_numpy(np.stack((bits & 255, bits >> 8)).astype(np.uint8))
            low, high = parts.view(torch.float8_e4m3fn).float().numpy()
            result: Array = _pair(low, high, to)
        elif to in ("f16x2", "bf16x2"):
            result = _pair(_f32(self.read(ops[2])), _f32(self.read(ops[1])), to)
        elif to == "f32" and source in ("f16", "bf16"):
            values = _half(self.read(ops[1]).astype(np.uint16), source)
            result = values.astype(np.float32).view(np.uint32)
        elif to == "f32":
            result = self.integers(source, ops[1]).astype(np.float32).view(np.uint32)
        elif to in ("f16", "bf16"):
            values = _f32(self.read(ops[1])) if source == "f32" else self.integers(source, ops[1])
            result = _to_half(values.astype(np.float32), to)
        else:
            result = self.integers(source, ops[1]).astype(BITS[int(to[1:])])
        self.write(ops[0], result, active)

    # Memory.

    def _address(self, text: str) -> Array:
        register, offset = place_of(text)
        base = self.read(register)
        address = base.astype(np.int64) + offset
        if base.dtype == np.uint32:
            # Sums of 32 bits wrap around, as those in registers do.
            address &= 0xFFFFFFFF
        return address.astype(np.uint64)

    @staticmethod
    def _width(rest: list[str]) -> tuple[str, int]:
        return rest[-1], int(rest[-1][1:]) // 8

    def do_ld(self, rest: list[str], ops: list[str], active: Array) -> None:
        kind, size = self._width(rest)
        if rest[0] == "param":
            index = int(re.search(r"param_(\d+)", ops[1])[1])  # type: ignore[index]
            value = self.parameters[index]
            self.write(ops[0], np.full(self.threads, value), active)
            return
        targets = names_in(ops[0])
        where = self._address(ops[1])[active]
        memory = self._memory(rest, where, size * len(targets), "load")
        words, first = memory.view(BITS[8 * size]), where // np.uint64(size)
        for index, target in enumerate(targets):
            found = np.zeros(self.threads, words.dtype)
            found[active] = words[first + np.uint64(index)]
            if kind[0] == "s":
                found = found.view(f"i{size}").astype(np.int64)
            self.write(target, found, active)

    def _memory(self, rest: list[str], where: Array, size: int, what: str) -> Array:
        if rest[0] == "global":
            self.memory.check(where, size, what)
            return self.memory.bytes
        assert (where + np.uint64(size) <= _SHARED).all() and (where % np.uint64(size) == 0).all()
        return self.shared

    def do_st(self, rest: list[str], ops: list[str], active: Array) -> None:
        _, size = self._width(rest)
        sources = names_in(ops[1])
        where = self._address(ops[0])[active]
        memory = self._memory(rest, where, size * len(sources), "store")
        words, first = memory.view(BITS[8 * size]), where // np.uint64(size)
        for index, source in enumerate(sources):
            words[first + np.uint64(index)] = self.read(source).astype(words.dtype)[active]

    def do_cp(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[1] == "commit_group":
            self.groups.append(self.open)
            self.open = []
        elif rest[1] == "wait_group":
            while len(self.groups) > int(ops[0]):
                for copy in self.groups.pop(0):
                    copy()
        else:
            size = int(ops[2], 0)
            to, source = self._address(ops[0])[active], self._address(ops[1])[active]
            asked = np.full(self.threads, size)
            if len(ops) > 3:
                asked = self.read(ops[3]).astype(np.int64)
            whole = asked[active] == size
            assert (whole | (asked[active] == 0)).all()
            self.memory.check(source[whole], size, "copy")
            byte = np.arange(size, dtype=np.uint64)

            def copy() -> None:
                at = np.where(whole, source, np.uint64(0))[:, None] + byte
                self.shared[to[:, None] + byte] = self.memory.bytes[at] * whole[:, None]

            if self.late:
                self.open.append(copy)
            else:
                copy()

    def do_atom(self, rest: list[str], ops: list[str], active: Array) -> None:
        assert rest[-2:] == ["add", "u32"]
        where = self._address(ops[1])
        memory = self.shared if "shared" in rest else self.memory.bytes
        for thread in np.flatnonzero(active):
            at = int(where[thread])
            word = memory[at : at + 4].view(np.uint32)
            old = np.full(self.threads, word[0])
            word[0] += np.uint32(self.read(ops[2])[thread])
            self.write(ops[0], old, np.arange(self.threads) == thread)

    # Warps.

    def do_shfl(self, rest: list[str], ops: list[str], active: Array) -> None:
        thread = np.arange(self.threads)
        other = self.read(ops[2]).astype(np.int64)
        if rest[1] == "up":
            # The first lanes keep their own.
            source = np.where(thread % 32 >= other, thread - other, thread)
        else:
            source = thread ^ other if rest[1] == "bfly" else thread // 32 * 32 + other
        self.write(ops[0], self.read(ops[1])[source], active)

    def do_vote(self, rest: list[str], ops: list[str], active: Array) -> None:
        assert rest[1] == "ballot", rest
        votes = (self.read(ops[1]) & active).reshape(-1, 32).astype(np.uint64)
        ballots = (votes << np.arange(32, dtype=np.uint64)).sum(1)
        self.write(ops[0], np.repeat(ballots, 32), active)

    def do_redux(self, rest: list[str], ops: list[str], active: Array) -> None:
        assert active.all(), rest
        function = {"add": np.add, "min": np.minimum, "max": np.maximum}[rest[1]]
        values = self.integers(rest[-1], ops[1]).reshape(-1, 32)
        reduced = function.reduce(values, axis=1, dtype=values.dtype)
        self.write(ops[0], np.repeat(reduced, 32), active)

    def do_popc(self, rest: list[str], ops: list[str], active: Array) -> None:
        self.write(ops[0], np.bitwise_count(self.read(ops[1]).astype(np.uint32)), active)

    def do_ldmatrix(self, rest: list[str], ops: list[str], active: Array) -> None:
        targets = names_in(ops[0])
        address = self._address(ops[1]).reshape(-1, 32).astype(np.int64)
        lane = np.arange(32)
        for index, target in enumerate(targets):
            rows = address[:, 8 * index : 8 * index + 8]
            tiles = self.shared[rows[:, :, None] + np.arange(16)].view(np.uint16)
            if "trans" in rest:
                tiles = tiles.transpose(0, 2, 1)
            first, second = (
                tiles[:, lane // 4, 2 * (lane % 4) + i].astype(np.uint32) for i in (0, 1)
            )
            self.write(target, (first | second << 16).ravel(), active)

    def do_stmatrix(self, rest: list[str], ops: list[str], active: Array) -> None:
        thread = np.arange(32)
        address = self._address(ops[0]).astype(np.int64)
        for warp in np.unique(np.flatnonzero(active) // 32):
            own = slice(32 * warp, 32 * warp + 32)
            for index, name in enumerate(names_in(ops[1])):
                rows = address[own][8 * index : 8 * index + 8]
                word = self.read(name).astype(np.uint32)[own]
                for half in (0, 1):
                    row, column = thread // 4, 2 * (thread % 4) + half
                    if "trans" in rest:
                        row, column = column, row
                    value = word >> (16 * half) & 0xFFFF
                    at = rows[row] + 2 * column
                    self.shared[at], self.shared[at + 1] = value & 0xFF, value >> 8

    def do_mma(self, rest: list[str], ops: list[str], active: Array) -> None:
        assert active.all() and rest[2] == "m16n8k16", rest
        kind = rest[-2]
        d, a, b, c = (names_in(op) for op in ops)
        warps, lane = self.threads // 32, np.arange(32)
        row, pair = lane // 4, 2 * (lane % 4)
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for index, name in enumerate(a):
            for half, value in enumerate(_halves(self.read(name), kind)):
                left[:, row + 8 * (index % 2), pair + half + 8 * (index // 2)] = value.reshape(
                    -1, 32
                )
        for index, name in enumerate(b):
            for half, value in enumerate(_halves(self.read(name), kind)):
                right[:, pair + half + 8 * index, row] = value.reshape(-1, 32)
        product = left @ right
        for index, (target, name) in enumerate(zip(d, c, strict=True)):
            part = product[:, row + 8 * (index // 2), pair + index % 2].ravel()
            result = (part + _f32(self.read(name))).astype(np.float32)
            self.write(target, result.view(np.uint32), active)
