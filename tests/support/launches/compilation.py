"""Launches of wrappers and steps, compiled for sm_90 without a GPU; the loads in their PTX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine import Engine
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.kernels.core.triton_versions import OPTIONS
from graphengine.opening.allocation import graph_steps
from graphengine.program.launch_lists import record_schedule

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Load(NamedTuple):
    """A load from global memory, also one into shared memory."""

    argument: str
    """The kernel's pointer that the address comes from; "" where it came through shared memory."""
    after_wait: bool
    past_l1: bool
    size: int
    """Bytes for each thread."""


class GraphKernel(NamedTuple):
    """A kernel node of a captured graph."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    """Threads of a block."""


def graph_kernels(engine: Engine) -> dict[str, list[GraphKernel]]:
    """This project's kernels in each graph that an engine would capture on a GPU; runs on a CPU."""
    steps = graph_steps(engine.runtime.program, engine.memory)
    with assumed(H200):
        schedule = record_schedule(steps)
    engine.runtime.buffers.reset()
    return {
        key.name: [GraphKernel(op.name, op.programs, op.threads) for op in ops]
        for key, ops in schedule.items()
    }


@contextmanager
def launches_handed_to(
    take: Callable[[Op], object], module: ModuleType, *more: ModuleType
) -> Iterator[None]:
    """Hand the launches of kernels in `module`, and in `more`, to `take` in place of a GPU."""
    own = {id(value) for each in (module, *more) for value in vars(each).values()}

    def hand(op: Op) -> None:
        take(op) if id(op.kernel) in own else op.launch()

    with pytest.MonkeyPatch.context() as patch, ops_handed_to(hand):
        # A kernel without a plain twin for the CPU does not ask.
        for name in ("use_triton", "use_wgmma"):
            patch.setattr(module, name, lambda x: True, raising=False)
        yield


def record_launch(module: ModuleType, call: Callable[[], Any], *more: ModuleType) -> Op:
    """The only launch that `call` makes of a kernel in `module`, or in `more`, which launch for it.

    Its tensors may be on `meta`.
    """
    launches: list[Op] = []
    with launches_handed_to(launches.append, module, *more):
        call()
    (launch,) = launches
    return launch


def _is_constant(value: Any) -> bool:
    """Whether Triton compiles the value in: None and 1, but neither 1.0 nor a tensor."""
    if isinstance(value, triton.language.constexpr):
        return True
    return value is None or (type(value) is int and value == 1)


def _signature(value: Any) -> Any:
    """Triton's word for the type of an argument; tuples keep their fields' names."""
    if _is_constant(value):
        return "constexpr"
    if isinstance(value, tuple):
        return value._make(map(_signature, value))
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        element = _POINTERS[value.base.dtype].removeprefix("*")
        return f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(launch: Op) -> tuple[str, list[str]]:
    """The PTX for sm_90 of a launch, and its arguments' names as in `compile_kernel`."""
    compiled, names = compile_kernel(launch)
    return compiled.asm["ptx"], names


def compile_kernel(launch: Op) -> tuple[Any, list[str]]:
    """What Triton or Gluon compiles for sm_90, and the arguments' names in order, "" for a number.

    Names of what a tuple holds are "tuple.field".
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, arguments = launch.kernel, launch.arguments
    options = {**OPTIONS, **launch.options}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names: list[str] = []

    def add(path: tuple[int, ...], name: str, value: Any) -> None:
        if _is_constant(value):
            constants[path] = getattr(value, "value", value)
        elif isinstance(value, tuple):
            for index, field in enumerate(value._fields):
                add((*path, index), f"{name}.{field}", value[index])
        elif isinstance(value, TensorDescriptor):
            # The map, then shape and strides.
            names.extend([name] + [""] * (2 * len(value.shape)))
        elif isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            names.append(name)
        else:
            if name.endswith("stride"):
                attributes[path] = [["tt.divisibility", 16]]
            names.append("")

    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if kernel.params[index].is_constexpr:
            signature[name] = "constexpr"
            constants[index,] = value
        elif kernel.params[index].do_not_specialize and isinstance(value, int):
            signature[name] = "i32"
            names.append("")
        else:
            signature[name] = _signature(value)
            add((index,), name, value)
    new_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = new_source(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), names


def global_loads(ptx: str, names: list[str]) -> Iterator[Load]:
    """Every load from global memory, in the order of the text."""
    waits = ptx.index("griddepcontrol.wait")
    for start, opcode, text, argument in _accesses(ptx, names, ("ld.global", "cp.async.c")):
        if opcode.startswith("ld"):
            vector, bits = re.search(r"(?:\.v(\d))?\.[bfsu](\d+)$", opcode).groups()
            size = int(vector or 1) * int(bits) // 8
        else:
            size = int(re.search(r"\], (0x[0-9a-f]+|\d+)", text)[1], 0)
        yield Load(argument, start > waits, ".cg" in opcode, size)


def global_accesses(ptx: str, names: list[str]) -> tuple[set[str], set[str]]:
    """Arguments that are read, and those that are written: an atomic operation does both."""
    loads, stores = ("ld.global", "cp.async.c", "atom"), ("st.global", "atom", "red.")
    reads, writes = (
        {argument for *_, argument in _accesses(ptx, names, opcodes)} for opcodes in (loads, stores)
    )
    return reads, writes


def _accesses(
    ptx: str, names: list[str], opcodes: tuple[str, ...]
) -> Iterator[tuple[int, str, str, str]]:
    """The instructions that begin with these opcodes: where, opcode, operands, and argument.

    A register stems from the pointers of all values it is computed from, up to a load.
    """
    stems: dict[str, set[str]] = {}
    found = re.finditer(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*?);", ptx, re.MULTILINE)
    instructions = [(match.start(), *match.groups()) for match in found]
    # Until nothing is new: what is computed ahead of a block may stand after it.
    known = -1
    while known != (known := sum(map(len, stems.values()))):
        for _, opcode, text in instructions:
            if opcode.startswith("ld.param"):
                register, parameter = re.match(r"(%\w+), \[\w+_param_(\d+)", text).groups()
                name = names[int(parameter)] if int(parameter) < len(names) else ""
                stems[register] = {name} - {""}
            elif not opcode.startswith(("st.", "bra", "bar", "ld.", "cp.async.c", "atom", "red.")):
                target, *sources = re.findall(r"%\w+", text) or [""]
                for source in sources:
                    stems.setdefault(target, set()).update(stems.get(source, ()))
    for start, opcode, text in instructions:
        if opcode.startswith(opcodes):
            # A copy's first address is in shared memory.
            addresses = re.findall(r"\[ ?(%\w+)", text)
            (argument,) = stems.get(addresses[-1 if "cp." in opcode else 0]) or ("",)
            yield start, opcode, text, argument


def assert_waits_before_it_shows(ptx: str, *, starts_early: bool = False) -> None:
    """One wait, then one trigger, then all stores; and no exit before the wait.

    With `starts_early` the trigger is before the wait.
    """
    assert ptx.count("griddepcontrol.wait") == 1
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in (before if starts_early else after)
    for word in ("st.global", "atom.", "red.global", "ret;"):
        # Whole words: a copy goes to "shared.global".
        found = re.search(rf"\b{re.escape(word)}", before)
        assert not found, f"{word} before the wait"
