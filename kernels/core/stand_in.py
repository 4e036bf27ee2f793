"""What stands in for Triton while kernels are imported where it is not installed.

Triton has wheels for Linux alone. A kernel is a decorated function that only a GPU or Triton's
interpreter runs, but decorators, `tl.constexpr` and a few sizes are evaluated when its module is
imported. So `graphengine.kernels` imports its modules with this in Triton's place. It is gone when
that import ends: to other packages Triton is as absent as it was.
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
"""What the kernels import of Triton."""


def put_in_place() -> list[str]:
    """Let `import triton` find stand-ins where it would find nothing; the names for `remove`."""
    if importlib.util.find_spec("triton") is not None:
        return []
    for name in MODULES:
        sys.modules[name] = module(name)
    for name in MODULES[1:]:
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, sys.modules[name])
    return [*MODULES]


def remove(names: list[str]) -> None:
    """Take back what `put_in_place` put there."""
    for name in names:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    """What stands in for Triton's module of this name."""
    return _Module(name)


class _Constant:
    """`tl.constexpr`: a value."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, _Constant) else value


class _Kernel:
    """A decorated function. RuntimeError where it would be launched."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__ = function, function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(
            f"{self.__name__} is a Triton kernel, and triton is not installed: without it an "
            'engine runs on device="cpu"'
        )

    __call__ = __getitem__


class _Name:
    """Anything else of Triton's, which only a kernel's body, an annotation or a GPU uses."""

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

    # A package, whose modules are here already.
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
