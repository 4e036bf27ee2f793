"""`emulation.py` with what Hopper has besides: `wgmma`, the TMA, mbarriers, and warps with programs
of their own.

Copies of the TMA and products complete as late as they may (`late`), which shows a missing wait, or
at once, which shows a buffer that is overwritten too early.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from launches import emulation
from launches.compilation import Op, compile_launch
from launches.ptx_text import Array, declared_registers, names_in, parse

# Above all addresses: what a register holds of a parameter that is a descriptor.
_DESCRIPTORS = 0xFF000000
# Of a swizzle's bytes: how many bits of an address are mixed.
_MIXED = {128: 3, 64: 2, 32: 1, 0: 0}
# Bytes of a swizzle, by the bits of a `wgmma` descriptor.
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
# Bytes of an element of `wgmma`'s operands.
_SIZES = {"f16": 2, "bf16": 2, "e4m3": 1}


def run_launch(launch: Op, *, late: bool = True) -> None:
    """Run a launch whose tensors are on the CPU; it writes them."""
    ptx, names = compile_launch(launch)
    plain = {
        name: value.base if isinstance(value, TensorDescriptor) else value
        for name, value in launch.arguments.items()
    }
    memory = emulation._Memory(replace(launch, arguments=plain))
    ptx, tables = _prepared(ptx)
    program = parse(ptx)
    registers = declared_registers(ptx)
    values, descriptors = _parameters(launch, names, memory)
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
    grid = (*launch.grid, 1, 1)[:3]
    stored: list[_Stored] = []
    with np.errstate(all="ignore"):
        for x in range(grid[0]):
            special = {"ctaid": (x, 0, 0), "nctaid": grid}
            block = _Block(program, registers, values, special, threads, memory, late)
            block.descriptors, block.tables = descriptors, tables
            block.run()
            stored += block.stored
    memory.write_back()
    for descriptor, start, box in stored:
        _write_box(descriptor, start, box)


def _prepared(ptx: str) -> tuple[str, dict[str, list[str]]]:
    """PTX whose waits are one instruction each, and the labels of each table of branches."""
    tables = {}
    for name, labels in re.findall(r"(\$L_brx_\d+|JTI\d+_\d+):\s*\.branchtargets([^;]*);", ptx):
        tables[name] = re.findall(r"[$\w]+", labels)
    ptx = re.sub(r"(?:\$L_brx_\d+|JTI\d+_\d+):\s*\.branchtargets[^;]*;", "", ptx)
    ptx = re.sub(r"\s*waitLoop:|\s*@!complete bra\.uni waitLoop;", "", ptx)
    # `.reg .b32 l<3>` of inline assembly.
    ptx = re.sub(
        r"(?<=\s)(\w+)<(\d+)>;",
        lambda match: ", ".join(f"{match[1]}{i}" for i in range(int(match[2]))) + ";",
        ptx,
    )
    skips = 0

    def renamed(match: re.Match[str]) -> str:
        nonlocal skips
        skips += match[0].endswith(":")
        return match[0].replace("skipWait", f"skip_{skips - match[0].endswith(':')}")

    return re.sub(r"skipWait:?", renamed, ptx), tables


def _parameters(
    launch: Op, names: list[str], memory: Any
) -> tuple[list[Array], dict[int, TensorDescriptor]]:
    """The kernel's parameters, and descriptors by what stands for them."""
    values: list[Array] = []
    descriptors: dict[int, TensorDescriptor] = {}
    inside = 0
    scalars = [
        name
        for index, name in enumerate(launch.kernel.arg_names)
        if isinstance(launch.arguments[name], int)
        and not launch.kernel.params[index].is_constexpr
        and (launch.kernel.params[index].do_not_specialize or launch.arguments[name] != 1)
    ]
    for name in names:
        if inside:
            inside -= 1
            values.append(np.uint64(0))
        elif isinstance(found := launch.arguments.get(name), TensorDescriptor):
            descriptors[_DESCRIPTORS + len(values)] = found
            values.append(np.uint64(_DESCRIPTORS + len(values)))
            inside = 2 * len(found.shape)
        else:
            values.append(memory.parameter(launch, name or scalars.pop(0)))
    return values, descriptors


def _swizzled(address: Array, width: int) -> Array:
    """Where the TMA and `wgmma` have what lies at an address without the swizzle."""
    mask = (1 << _MIXED[width]) - 1
    return address ^ ((address >> 7 & mask) << 4)


def _values(words: Array, kind: str) -> tuple[Array, ...]:
    """The numbers in words as float64, those of lower bits first."""
    if _SIZES[kind] == 2:
        return emulation._halves(words, kind)
    bits = torch.from_numpy(np.stack([(words >> 8 * i).astype(np.uint8) for i in range(4)]))
    return tuple(bits.view(torch.float8_e4m3fn).double().numpy())


class _Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def change(self, arrivals: int, more_bytes: int) -> None:
        self.pending -= arrivals
        self.bytes += more_bytes
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class _Product(NamedTuple):
    """A `wgmma` begun by the threads `group`; `left` is a descriptor, or was in registers."""

    group: Array
    sums: tuple[str, ...]
    left: Array | int
    descriptor: int
    kind: str
    add: bool


_Stored = tuple[TensorDescriptor, list[int], torch.Tensor]
"""What the TMA writes to memory, and where."""


class _Block(emulation._Program):
    """One block of threads."""

    descriptors: dict[int, TensorDescriptor]
    tables: dict[str, list[str]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.barriers: dict[int, _Barrier] = {}
        # What threads wait for: a barrier's number and threads, or an mbarrier and a phase.
        self.blocked: dict[int, tuple[str, int, int]] = {}
        self.copies: list[Callable[[], None]] = []
        # Stores that have yet to read shared memory, and what was read.
        self.stores: list[Callable[[], None]] = []
        self.stored: list[_Stored] = []
        # Products of each warp group: groups of them that were committed, the newest last, and
        # those of the next one.
        self.committed: dict[int, list[list[_Product]]] = {}
        self.products: dict[int, list[_Product]] = {}

    def run(self) -> None:
        end = len(self.program)
        while True:
            self._unblock()
            ready = (self.pc < end) & ~self.waiting
            if not ready.any():
                if self.copies:
                    self.copies.pop(0)()
                    continue
                # Warps without a program wait for one at the end.
                assert (self.pc[:128] >= end).all(), f"deadlock: {set(self.blocked.values())}"
                assert not self.stores, "it ends before its stores have read shared memory"
                return
            pc = int(self.pc[ready].min())
            active = ready & (self.pc == pc)
            self.pc[active] = pc + 1
            instruction = self.program[pc]
            if instruction.guard:
                taken = self.registers[instruction.guard.lstrip("!")]
                active = active & (~taken if instruction.guard[0] == "!" else taken)
            if active.any():
                self.step(instruction, active)

    def _unblock(self) -> None:
        """Let threads go on that wait for nothing any more."""
        at_barrier: dict[tuple[str, int, int], list[int]] = {}
        for thread, reason in self.blocked.items():
            at_barrier.setdefault(reason, []).append(thread)
        for reason, threads in at_barrier.items():
            what, number, wanted = reason
            if what == "bar":
                free = len(threads) == wanted
            else:
                free = self.barriers[number].phase != wanted
            if free:
                self.waiting[threads] = False
                for thread in threads:
                    del self.blocked[thread]

    def step(self, instruction: Any, active: Array) -> None:
        name, ops = instruction.name, instruction.operands
        if name in ("bar", "barrier"):
            if ".warp." not in instruction.opcode:
                wanted = int(ops[1]) if len(ops) > 1 else self.threads
                self._block(active, ("bar", int(ops[0]), wanted))
        elif name in ("setmaxnreg", "fence"):
            pass
        elif name == "brx":
            targets = self.tables[ops[1]]
            place = self.read(ops[0])
            for thread in np.flatnonzero(active):
                self.pc[thread] = self.labels[targets[int(place[thread])]]
        else:
            super().step(instruction, active)

    def _block(self, active: Array, reason: tuple[str, int, int]) -> None:
        self.waiting[active] = True
        for thread in np.flatnonzero(active):
            self.blocked[int(thread)] = reason

    def read(self, text: str) -> Array:
        parameter = "_param_" in text and re.search(r"_param_(\d+)$", text)
        if parameter:
            return np.full(self.threads, self.parameters[int(parameter[1])])
        # Some literals say that they are unsigned.
        return super().read(text.removesuffix("U") if text.startswith("0x") else text)

    # Arithmetic.

    # Barriers.

    def do_mbarrier(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[0] == "try_wait":
            address, parity = self._address(ops[1]), self.read(ops[2])
            for thread in np.flatnonzero(active):
                # A phase of this parity is over when the one that runs has the other.
                reason = ("mbarrier", int(address[thread]), int(parity[thread]))
                self._block(np.arange(self.threads) == thread, reason)
            return
        place = 0 if rest[0] == "init" else 1
        (thread,) = np.flatnonzero(active)
        at = int(self._address(ops[place])[thread])
        number = int(self.read(ops[place + 1])[thread]) if len(ops) > place + 1 else 1
        if rest[0] == "init":
            self.barriers[at] = _Barrier(number)
        elif rest[1] == "expect_tx":
            self.barriers[at].change(1, number)
        else:
            self.barriers[at].change(number, 0)

    def do_elect(self, rest: list[str], ops: list[str], active: Array) -> None:
        thread = np.arange(self.threads)
        first = np.zeros(self.threads, np.bool_)
        for warp in np.unique(thread[active] // 32):
            first[thread[active & (thread // 32 == warp)][0]] = True
        self.write(ops[1], first, active)

    # The TMA.

    def do_cp(self, rest: list[str], ops: list[str], active: Array) -> None:
        if rest[1] != "bulk":
            super().do_cp(rest, ops, active)
            return
        if rest[2] in ("commit_group", "wait_group"):
            assert rest[2] == "commit_group" or int(ops[0]) == 0, "waits for some stores"
            while rest[2] == "wait_group" and self.stores:
                self.stores.pop(0)()
            return
        if rest[4] == "global":
            for thread in np.flatnonzero(active):
                self._store(ops, int(thread))
            return
        (thread,) = np.flatnonzero(active)
        pointer, *axes = names_in(ops[1])
        descriptor = self.descriptors[int(self.read(pointer)[thread])]
        start = [int(self.read(axis)[thread].astype(np.int32)) for axis in reversed(axes)]
        to, at = (int(self._address(ops[index])[thread]) for index in (0, 2))

        def copy() -> None:
            box = _box(descriptor, start)
            flat = box.contiguous().view(torch.uint8).numpy().reshape(-1)
            place = _swizzled(to + np.arange(flat.size), descriptor.layout.swizzle_byte_width)
            self.shared[place] = flat
            self.barriers[at].change(0, -flat.size)

        if self.late:
            self.copies.append(copy)
        else:
            copy()

    def _store(self, ops: list[str], thread: int) -> None:
        pointer, *axes = names_in(ops[0])
        descriptor = self.descriptors[int(self.read(pointer)[thread])]
        start = [int(self.read(axis)[thread].astype(np.int32)) for axis in reversed(axes)]
        source = int(self._address(ops[1])[thread])
        # A wider box is copied in parts, by a thread each.
        width = descriptor.layout.swizzle_byte_width
        rows, columns = descriptor.block_shape
        shape = rows, min(columns, width // descriptor.base.itemsize)

        def store() -> None:
            box = torch.empty(shape, dtype=descriptor.base.dtype)
            flat = box.view(torch.uint8).numpy().reshape(-1)
            flat[:] = self.shared[_swizzled(source + np.arange(flat.size), width)]
            self.stored.append((descriptor, start, box))

        if self.late:
            self.stores.append(store)
        else:
            store()

    # Products.

    def do_wgmma(self, rest: list[str], ops: list[str], active: Array) -> None:
        groups = [g for g in range(self.threads // 128) if active[128 * g]]
        for group in groups:
            own = np.zeros(self.threads, np.bool_)
            own[128 * group : 128 * group + 128] = True
            assert active[own].all(), "a warp group that is not together"
            if rest[0] == "mma_async":
                self._begin(rest, ops, group, own)
            elif rest[0] == "commit_group":
                self.committed.setdefault(group, []).append(self.products.pop(group, []))
            elif rest[0] == "wait_group":
                committed = self.committed.setdefault(group, [])
                while len(committed) > int(ops[0]):
                    for product in committed.pop(0):
                        self._multiply(product)

    def _begin(self, rest: list[str], ops: list[str], group: int, own: Array) -> None:
        kind = rest[-1]
        in_memory = not ops[1].startswith("{")
        # No operand is transposed; floats of 8 bits cannot be, nor those in registers.
        transposed = 0 if kind == "e4m3" else 1 + in_memory
        assert [int(op) for op in ops[4:]] == [1, 1, 0, 0][: 2 + transposed], ops
        left: Array | int
        if in_memory:
            left = int(self.read(ops[1])[own][0])
        else:
            left = self._in_registers(names_in(ops[1]), kind, own)
        product = _Product(
            own,
            names_in(ops[0]),
            left,
            int(self.read(ops[2])[own][0]),
            kind,
            bool(self.read(ops[3])[own][0]),
        )
        if self.late:
            self.products.setdefault(group, []).append(product)
        else:
            self._multiply(product)

    def _in_registers(self, names: tuple[str, ...], kind: str, own: Array) -> Array:
        """A left operand of 64 rows that a warp group has in registers."""
        count = 4 // _SIZES[kind]
        left, lane = np.zeros((4, 16, 8 * count)), np.arange(32)
        for index, name in enumerate(names):
            for place, value in enumerate(_values(self.read(name), kind)):
                column = count * (lane % 4) + place + 4 * count * (index // 2)
                left[:, lane // 4 + 8 * (index % 2), column] = value[own].reshape(4, 32)
        return left.reshape(64, -1)

    def _in_shared(self, descriptor: int, rows: int, kind: str) -> Array:
        """An operand of so many rows in shared memory, of which each has 32 bytes."""
        width = _SWIZZLES[descriptor >> 62]
        start, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 32))
        row, word = np.arange(rows)[:, None], np.arange(8)[None, :]
        at = _swizzled(start + row // 8 * stride + row % 8 * width + 4 * word, width)
        words = self.shared[at[:, :, None] + np.arange(4)].view(np.uint32)[:, :, 0]
        return np.stack(_values(words, kind), axis=-1).reshape(rows, -1)

    def _multiply(self, product: _Product) -> None:
        lanes, kind, left = 2 * len(product.sums), product.kind, product.left
        if isinstance(left, int):
            left = self._in_shared(left, 64, kind)
        result = left @ self._in_shared(product.descriptor, lanes, kind).T
        thread = np.arange(32)
        for index, name in enumerate(product.sums):
            row = thread // 4 + 8 * (index // 2 % 2)
            column = 2 * (thread % 4) + index % 2 + 8 * (index // 4)
            part = result.reshape(4, 16, lanes)[:, row, column].ravel()
            whole = np.zeros(self.threads)
            whole[product.group] = part
            if product.add:
                whole = whole + emulation._f32(self.read(name))
            self.write(name, whole.astype(np.float32).view(np.uint32), product.group)


def _box(descriptor: TensorDescriptor, start: list[int]) -> torch.Tensor:
    """What the TMA copies from a place on: zeros past the edges."""
    box = torch.zeros(descriptor.block_shape, dtype=descriptor.base.dtype)
    assert min(start) >= 0
    found = descriptor.base[
        tuple(slice(f, f + n) for f, n in zip(start, descriptor.block_shape, strict=True))
    ]
    box[tuple(slice(0, length) for length in found.shape)] = found
    return box


def _write_box(descriptor: TensorDescriptor, start: list[int], box: torch.Tensor) -> None:
    """Write what the TMA stores; nothing past the edges."""
    place = tuple(slice(f, f + n) for f, n in zip(start, box.shape, strict=True))
    there = descriptor.base[place]
    there.copy_(box[tuple(slice(0, length) for length in there.shape)])
