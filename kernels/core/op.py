"""Kernel launches as data: an `Op` describes one launch, before it is launched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine.kernels.core.accesses import Accesses, accesses_of
from graphengine.kernels.core.launching import launched_by


@dataclass(frozen=True, slots=True, repr=False)
class Op:
    """One launch of a Triton or Gluon kernel.

    kernel     the compiled function
    grid       programs, by axis: one to three of them
    arguments  the kernel's arguments by name: tensors, tuples of tensors, numbers, None
    options    the compiler's: `num_warps`, `maxnreg`, `enable_fp_fusion`
    pdl        whether the launch may overlap the one before (programmatic dependent launch)

    It keeps its tensors alive, and reads none of them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    pdl: bool = False

    def __repr__(self) -> str:
        # Without its tensors: a GPU's would be waited for and copied.
        return f"<Op {self.name}, grid {self.grid}>"

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        name: str = self.kernel.__name__
        return name

    @property
    def programs(self) -> tuple[int, int, int]:
        """The grid with all three axes."""
        x, y, z = (*self.grid, 1, 1)[:3]
        return x, y, z

    @property
    def threads(self) -> int:
        """Threads that a program is launched with; a warp-specialised kernel starts more."""
        warps: int = self.options.get("num_warps", 4)
        return 32 * warps

    @property
    def counters(self) -> int:
        """How many arrival counters the launch uses."""
        arrivals = self.arguments.get("arrivals_ptr")
        return 0 if arrivals is None else int(arrivals.numel())

    @property
    def accesses(self) -> Accesses:
        """Which arguments the launch may read and write, by the names of `tensors`."""
        return accesses_of(self.kernel, self.arguments)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor with its parameter's name, or "parameter.field" of one in a tuple."""
        for name, value in self.arguments.items():
            yield from _tensors_of(name, value)

    def launch(self) -> None:
        """Launch it, with the memory that its tensors have now."""
        options = dict(self.options)
        if "PDL" in self.arguments:
            options["launch_pdl"] = self.pdl
        self.kernel[self.grid](**self.arguments, **options)


@contextmanager
def ops_handed_to(take: Callable[[Op], object]) -> Iterator[None]:
    """Inside, launches of this context are handed to `take` instead: none reaches a device.

    Torch's own operations between them do run. Memory that kernels would have written keeps its old
    contents.
    """
    with launched_by(partial(_hand_over, take)):
        yield


def own_kernels() -> set[str]:
    """Names of this package's Triton and Gluon functions, of all modules that are imported.

    Empty in Triton's interpreter.
    """
    modules = [each for name, each in sys.modules.items() if name.startswith("graphengine.kernels")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.__name__ for value in values if isinstance(value, triton.JITFunction)}


def _hand_over(
    take: Callable[[Op], object], kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any
) -> None:
    names = kernel.arg_names
    arguments = dict(zip(names, args, strict=False)) | named
    options = {name: arguments.pop(name) for name in named if name not in names}
    pdl = bool(options.pop("launch_pdl", False))
    assert arguments.keys() == set(names), f"{kernel.__name__}: {arguments.keys() ^ set(names)}"
    take(Op(kernel, grid, arguments, options, pdl))


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, TensorDescriptor):
        yield name, value.base
    elif isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        for field, each in zip(fields, value, strict=True):
            yield from _tensors_of(f"{name}.{field}", each)
