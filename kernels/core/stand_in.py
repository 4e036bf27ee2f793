"""A stand-in for Triton that lets kernel modules be imported where Triton is not installed.

Triton has wheels for Linux only. A kernel is a decorated function that only a GPU or Triton's
interpreter runs, but decorators, `tl.constexpr` and a few sizes are evaluated when its module is
imported. So `graphengine.kernels` imports its modules with the stand-in in Triton's place, and
removes it when that import ends: other packages still find Triton absent.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

MODULES = (
    "triton",
    "triton.language",
    "triton.language.extra",
    "triton.language.extra.cuda",
    "triton.runtime",
    "triton.experimental",
    "triton.experimental.gluon",
    "triton.experimental.gluon.language",
    "triton.experimental.gluon.language._core",
    "triton.experimental.gluon.language.nvidia",
    "triton.experimental.gluon.language.nvidia.ampere",
    "triton.experimental.gluon.language.nvidia.hopper",
    "triton.experimental.gluon.nvidia",
    "triton.experimental.gluon.nvidia.hopper",
)
"""Triton modules that the kernels import."""


def put_in_place() -> list[str]:
    """Make `import triton` find stand-ins if Triton is missing; return the names for `remove`."""
    if importlib.util.find_spec("triton") is not None:
        return []
    for name in MODULES:
        sys.modules[name] = module(name)
    for name in MODULES[1:]:
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, sys.modules[name])
    return [*MODULES]


def remove(names: list[str]) -> None:
    """Remove the stand-ins that `put_in_place` installed."""
    for name in names:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    """The stand-in for Triton's module of this name."""
    return _Module(name)


class _Constant:
    """Stand-in for `tl.constexpr`: holds a value."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, _Constant) else value


class _Kernel:
    """A decorated function. RuntimeError if it is launched."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__ = function, function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(
            f"{self.__name__} is a Triton kernel, and triton is not installed: without it an "
            'engine runs on device="cpu"'
        )

    __call__ = __getitem__


class _Name:
    """Any other name of Triton's, used only by a kernel's body, an annotation or a GPU."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(f"{self._name}.{name}")
        return _Name(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> _Name:
        return _Name(f"{self._name}()")

    # `triton.knobs.runtime.interpret` is not set.
    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> _Name:
        return self

    __ror__ = __or__


class _Module(ModuleType):
    constexpr = _Constant

    # Marks a package; its submodules are in `sys.modules` already.
    __path__: list[str] = []  # noqa: RUF012

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return _Kernel if function is None else _Kernel(function)

    @staticmethod
    def constexpr_function(function: Any) -> Any:
        return function

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        return -(-dividend // divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        return _Name(f"{self.__name__}.{name}")
