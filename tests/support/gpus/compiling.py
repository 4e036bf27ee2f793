"""What an engine would launch on a GPU that is not there, compiled by Triton for it.

An engine on the CPU gives the list of its steps' launches; each goes through Triton's own binder,
with a driver that stands in for the GPU's, to its compiler and its ptxas.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphengine import Engine
from graphengine.kernels.core.devices import SHARED_BYTES, Device, assumed
from graphengine.kernels.core.op import Op
from graphengine.opening.allocation import graph_steps
from graphengine.program.launch_lists import describe_launches

# Multiprocessors of a well-known GPU of each compute capability.
PROCESSORS = {
    (8, 0): 108,  # A100
    (8, 6): 82,  # RTX 3090
    (8, 7): 16,  # Jetson Orin
    (8, 9): 128,  # RTX 4090
    (9, 0): 132,  # H100, H200
    (10, 0): 148,  # B200
    (10, 3): 160,  # B300
    (11, 0): 20,  # Jetson Thor
    (12, 0): 170,  # RTX 5090
    (12, 1): 48,  # GB10
}


def device_of_capability(capability: tuple[int, int]) -> Device:
    return Device(capability, PROCESSORS[capability], SHARED_BYTES[capability])


DEVICES = {
    f"sm_{major}{minor}": device_of_capability((major, minor)) for major, minor in PROCESSORS
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as it was compiled for a GPU.

    shared  bytes of shared memory of a program
    stack   bytes of a thread's registers that are spilled
    error   what the compiler says, in a line; "" where it succeeded
    """

    kernel: str
    shared: int = 0
    stack: int = 0
    error: str = ""


class _Driver:
    """A driver of Triton's that launches nothing: all that it is asked is the target."""

    def __init__(self, device: Device) -> None:
        major, minor = device.capability
        self._arch = 10 * major + minor

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Triton keeps a kernel for each of these: every GPU has another one."""
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_for(device: Device, engine: Engine) -> list[Compiled]:
    """All that the graphs of an engine on the CPU would launch on this GPU, each kernel once."""
    asked: dict[Any, str] = {}
    failed: dict[str, Compiled] = {}

    def ask(op: Op) -> None:
        arguments, options = {**op.arguments}, {**op.options}
        if "PDL" in arguments:
            # The engine's device, a CPU, has none.
            arguments["PDL"] = options["launch_pdl"] = device.overlaps_launches
        try:
            asked[op.kernel.warmup(grid=op.grid, **arguments, **options)] = op.name
        except Exception as error:
            failed[f"{op.name} {_reason(error)}"] = Compiled(op.name, error=_reason(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _Driver(device))
        _describe_graphs(device, engine, ask)
    compiled = (
        Compiled(name, kernel.metadata.shared, stack_of(kernel.asm["cubin"]))
        for kernel, name in asked.items()
    )
    return [*compiled, *failed.values()]


def launched_on(device: Device, engine: Engine) -> set[str]:
    """The names of the kernels that `compiled_for` compiles."""
    names = set[str]()
    _describe_graphs(device, engine, lambda op: names.add(op.name))
    return names


def _describe_graphs(device: Device, engine: Engine, take: Callable[[Op], None]) -> None:
    """Hand over each launch of the graphs that an engine on the CPU would have on this GPU."""
    engine.runtime.buffers.reset()
    with assumed(device):
        for step in graph_steps(engine.runtime.program, engine.memory).values():
            describe_launches(step, take)


def _reason(error: BaseException) -> str:
    """The innermost cause in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.search("error|requires|not supported|fatal", line, re.I)]
    return f"{type(error).__name__}: {(told or lines or [''])[0]}"[:200]


def stack_of(cubin: bytes) -> int:
    """Bytes of a thread's stack, by Triton's cuobjdump: what does not fit its registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", told))


def without_cache() -> None:
    """Compile all anew: what another test left on disk may have been compiled otherwise."""
    knobs.compilation.always_compile = True
