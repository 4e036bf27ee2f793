"""A stand-in for libcuda, called through ctypes as the library is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from graphengine.buckets.driver import _ERRORS, _PROTOTYPES


def driver_library(
    prototypes: Mapping[str, tuple[Any, ...]] = _PROTOTYPES, /, **functions: Callable[..., int]
) -> Any:
    """A library with these functions; all others of the prototypes fail with CUresult 999."""

    def fails(*arguments: object) -> int:
        return 999

    return SimpleNamespace(
        **{
            name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(functions.get(name, fails))
            for name, arguments in (_ERRORS | prototypes).items()
        }
    )
