"""Read the facts for `graphengine doctor`. That something is missing, or fails, is a fact, too."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterable
from importlib import metadata, util
from itertools import permutations
from pathlib import Path
from typing import Any

from graphengine.observe.findings import Driver, Folder, Gpu, Machine, Plans, Software

_SMI_SECONDS = 30


def read_machine(engine: str, packages: Iterable[str]) -> Machine:
    """The facts of this machine, with the versions of these distributions.

    engine  the version of graphengine
    """
    torch, torch_error = _imported("torch")
    dispatch, tuning_tables, kernels_error = None, None, None
    if torch is not None:
        kernels_error = _kernels_error()
        dispatch, _ = _imported("graphengine.kernels.core.dispatch")
        # It imports the readers of checkpoints, which have requirements of their own.
        tuning_tables, _ = _imported("graphengine.models.plans.tuning_tables")
    gpus, cuda_error = _gpus(torch, tuning_tables, kernels_error is None)
    return Machine(
        software=_software(engine, packages, torch, torch_error, kernels_error),
        driver=read_driver(),
        gpus=gpus,
        cuda_error=cuda_error,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        peers=_peers(torch, len(gpus)),
        compiler=find_compiler(),
        cc=os.environ.get("CC"),
        interpreted=dispatch is not None and dispatch.INTERPRETED,
        python_header=_python_header(),
        threads=None if torch is None else torch.get_num_threads(),
        triton_cache=folder_at(triton_cache_path()),
        tables=None if tuning_tables is None else _tables_folder(tuning_tables),
    )


def _kernels_error() -> str | None:
    """Why the kernels cannot be imported, all of them."""
    kernels, error = _imported("graphengine.kernels")
    try:
        return error if kernels is None else kernels.import_all()
    # Triton of another version raises any error.
    except Exception as incompatible:
        return told(incompatible)


def _imported(name: str) -> tuple[Any, str | None]:
    """A module, or why it cannot be imported."""
    try:
        return importlib.import_module(name), None
    # A library that does not load is an OSError, one of another version any error.
    except Exception as error:
        return None, told(error)


def told(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _software(
    engine: str,
    packages: Iterable[str],
    torch: Any,
    torch_error: str | None,
    kernels_error: str | None,
) -> Software:
    versions = {name: version for name in packages if (version := installed_version(name))}
    if torch is not None:
        versions["torch"] = str(torch.__version__)
    return Software(
        engine=engine,
        python=platform.python_version(),
        system=platform.system(),
        versions=versions,
        torch_error=torch_error if "torch" in versions else None,
        torch_cuda=None if torch is None else torch.version.cuda,
        architectures=() if torch is None else tuple(torch.cuda.get_arch_list()),
        triton_of_torch=triton_of_torch(),
        kernels_error=kernels_error,
    )


def installed_version(package: str) -> str | None:
    """The version of a distribution; None where its module cannot be found."""
    module = package.replace("-", ".") if package.startswith("cuda-") else package
    try:
        if util.find_spec(module) is None:
            return None
    except ImportError:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # Builds of Triton have several names.
        return "unknown"


def triton_of_torch() -> str | None:
    """The version of Triton that the installed torch asks for; builds for CPUs ask for none."""
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    found = (re.match(r"triton\s*==\s*([\w.]+)", each) for each in wanted)
    return next((each[1] for each in found if each), None)


def read_driver() -> Driver:
    """Facts from nvidia-smi and the driver's library."""
    cuda = _cuda_of_driver()
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    if shutil.which("nvidia-smi") is None:
        return Driver(cuda=cuda, has_device=has_device)
    command = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(cuda=cuda, error=told(error), has_device=has_device)
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        error_text = said[0] if said else f"exit status {done.returncode}"
        return Driver(cuda=cuda, error=error_text, has_device=has_device)
    lines = [line.partition(", ") for line in done.stdout.splitlines() if ", " in line]
    return Driver(
        version=lines[0][0] if lines else None,
        cuda=cuda,
        gpus=tuple(name.strip() for _, _, name in lines),
        has_device=has_device,
    )


def _cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports. This does not initialise the driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _gpus(torch: Any, tuning_tables: Any, has_kernels: bool) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that torch finds, or torch's message where it finds none."""
    if torch is None:
        return (), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        said = [str(each.message).splitlines()[0] for each in caught if str(each.message)]
        return (), said[0] if said else None
    try:
        count = torch.cuda.device_count()
        return tuple(_gpu(torch, i, tuning_tables, has_kernels) for i in range(count)), None
    except RuntimeError as error:
        return (), told(error)


def _gpu(torch: Any, index: int, tuning_tables: Any, has_kernels: bool) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    device = None
    if has_kernels:
        from graphengine.kernels.core.devices import device_of

        device = device_of(torch.device("cuda", index))
    return Gpu(
        name=found.name,
        capability=(found.major, found.minor),
        memory_bytes=found.total_memory,
        device=device,
        plans=None if tuning_tables is None else read_plans(tuning_tables, found.name),
    )


def read_plans(tuning_tables: Any, name: str) -> Plans:
    """How many plans there are for a GPU of this name."""
    path, own, shipped, error = None, 0, 0, None
    # Without a home directory the user has no table.
    with contextlib.suppress(ValueError):
        path = tuning_tables.user_table_path(name)
    try:
        shipped = len(tuning_tables.shipped_table(name))
        own = len(tuning_tables.read_user_table(name))
    except ValueError as found:
        error = str(found)
    return Plans(own=own, shipped=shipped, path=path, error=error)


def _peers(torch: Any, count: int) -> frozenset[tuple[int, int]]:
    """Pairs (a, b) of GPUs where a reaches b; pairs for which the driver fails are left out."""

    def reaches(pair: tuple[int, int]) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(torch.cuda.can_device_access_peer(*pair))
        return False

    return frozenset(filter(reaches, permutations(range(count), 2)))


def find_compiler() -> str | None:
    """The C compiler that Triton takes: CC, else gcc, else clang."""
    named = os.environ.get("CC")
    if named is not None:
        return shutil.which(named)
    return shutil.which("gcc") or shutil.which("clang")


def _python_header() -> str | None:
    """Python.h in the folder where Triton lets the compiler look for it."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    return str(header) if header.is_file() else None


def triton_cache_path() -> Path:
    """The folder of Triton's compiled kernels."""
    own = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(own) if own else Path(home) / ".triton" / "cache"


def _tables_folder(tuning_tables: Any) -> Folder:
    try:
        return folder_at(tuning_tables.user_table_path("cpu").parent)
    except ValueError:
        return Folder(None, writable=False)


def folder_at(path: Path) -> Folder:
    """A folder, which may not be there yet. Nothing is written."""
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return Folder(path, writable=place.is_dir() and os.access(place, os.W_OK | os.X_OK))
