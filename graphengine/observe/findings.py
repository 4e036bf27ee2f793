"""The facts that `graphengine doctor` reads from a machine, and its findings, as plain values.

Nothing here imports torch or Triton: both may be missing, or fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphengine.kernels.core.devices import Device


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    problem  why no engine opens on the best device of this machine; None: nothing is broken
    remedy   how to mend the problem, or how to install something optional
    """

    group: str
    name: str
    value: str
    problem: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plans:
    """Measured plans for a GPU of one name.

    own, shipped  weights that the user's table and the packaged one have a plan for
    path          of the user's table; None: the user has no folder for it
    error         why the user's table cannot be read
    """

    own: int = 0
    shipped: int = 0
    path: Path | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that torch finds.

    device  the properties that kernels use; None where kernels cannot be imported
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    device: Device | None = None
    plans: Plans | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Installed versions, and errors of imports.

    engine           the version of graphengine
    versions         by the name of a distribution; "unknown" for one that does not tell
    torch_error      why torch cannot be imported
    torch_cuda       the CUDA that torch was built for; None: it was built without
    architectures    that torch has machine code for, "sm_90", or PTX, "compute_90"
    triton_of_torch  the version of Triton that this torch asks for
    kernels_error    why the kernels cannot be imported
    """

    engine: str
    python: str
    system: str
    versions: Mapping[str, str]
    torch_error: str | None = None
    torch_cuda: str | None = None
    architectures: tuple[str, ...] = ()
    triton_of_torch: str | None = None
    kernels_error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """Facts about the driver, read without torch.

    version     as nvidia-smi has it
    cuda        the newest CUDA it supports
    gpus        names of all GPUs, also of those that are hidden from this process
    error       nvidia-smi's message where it failed
    has_device  whether there is a device file of a GPU
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[str, ...] = ()
    error: str | None = None
    has_device: bool = False


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that files are kept in; its path is None where the user has no place for it."""

    path: Path | None
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """All facts that findings follow from.

    cuda_error       torch's message where it found no GPU
    visible_devices  CUDA_VISIBLE_DEVICES; None where it is not set
    peers            pairs (a, b) of GPUs where a reaches the memory of b
    compiler         the C compiler for Triton; None: there is none
    cc               the variable CC, which names the compiler; None: it is not set
    interpreted      whether TRITON_INTERPRET is set
    python_header    the path of Python.h, for Triton; None: it is not there
    tables           folder of the user's plans; None where the kernels cannot be imported
    """

    software: Software
    driver: Driver
    gpus: tuple[Gpu, ...] = ()
    cuda_error: str | None = None
    visible_devices: str | None = None
    peers: frozenset[tuple[int, int]] = frozenset()
    compiler: str | None = None
    cc: str | None = None
    interpreted: bool = False
    python_header: str | None = None
    threads: int | None = None
    triton_cache: Folder
    tables: Folder | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether the best device is a GPU, though it may not work; not where all are hidden."""
        if self.gpus:
            return True
        present = bool(self.driver.gpus) or self.driver.has_device
        return present and not self.hides_gpus

    @property
    def hides_gpus(self) -> bool:
        return self.visible_devices is not None and self.visible_devices.strip() in ("", "-1")


def version_numbers(version: str) -> tuple[int, ...]:
    """(2, 11, 0) for "2.11.0+cu130"; () for a text without numbers."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
