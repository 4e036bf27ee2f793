"""Whether and how an engine runs on a machine, and remedies for missing parts.

Findings follow from the facts of a `Machine` alone: see `machine.py` for where these come from.
"""

from __future__ import annotations

from typing import NamedTuple

from graphengine.observe.doctor_gpus import driver_findings, gpu_findings, peer_findings
from graphengine.observe.findings import Finding, Folder, Machine, Software, version_numbers

TRITON = ("3.6", "3.9")
"""The oldest and the newest version of Triton that the kernels were tried with."""
TORCH = "2.11"
"""The oldest torch, and the one that was run on GPUs."""
INSTALL_TORCH = f"pip install 'torch=={TORCH}.*'"
PYTHON = (3, 11)


class Package(NamedTuple):
    """A distribution that an engine uses, or an extra that brings one.

    least    the oldest version; "": any
    purpose  its purpose
    extra    that brings it; None: it comes with the engine
    needed   whether no engine opens without it
    """

    name: str
    least: str
    purpose: str
    extra: str | None = None
    needed: bool = False

    @property
    def install(self) -> str:
        return (
            f"pip install '{self.name}>={self.least}'" if self.least else f"pip install {self.name}"
        )


PACKAGES = (
    Package("numpy", "2", "records and fields of a step", needed=True),
    Package("safetensors", "0.4.3", "reading checkpoints", needed=True),
    Package("tokenizers", "0.22.1", "text", needed=True),
    Package("jinja2", "3.1.6", "chat templates", needed=True),
    Package("nvtx", "0.2.13", "ranges in Nsight Systems"),
    Package("cuda-bindings", "", "looking inside captured graphs; torch for CUDA brings it"),
    Package("llguidance", "1.8", "grammars and JSON schemas", "guided"),
    Package("huggingface_hub", "1.3", "opening a checkpoint by its hub id", "hub"),
    Package("gguf", "0.18", "opening GGUF files", "gguf"),
    Package("prompt_toolkit", "3.0.36", "editing lines in `graphengine chat`", "chat"),
    Package("transformers", "5", "this project's own tests", "test"),
)
READ_VERSIONS = ("torch", "triton", *(package.name for package in PACKAGES))
"""Distributions whose versions the facts must have."""


def examine(machine: Machine) -> list[Finding]:
    """All findings, group by group."""
    software, has_gpu = machine.software, machine.has_gpu
    base = [*_base_findings(software), *kernels_findings(software)]
    packages = [package_finding(each, software, has_gpu=has_gpu) for each in PACKAGES]
    runs = not problems([*base, *packages])
    return [
        *base,
        triton_finding(software, has_gpu=has_gpu),
        *packages,
        *driver_findings(machine),
        *gpu_findings(machine),
        *peer_findings(len(machine.gpus), machine.peers),
        _cpu_finding(machine.threads, runs=runs),
        *_interpreter_findings(machine),
        *_tool_findings(machine),
        *_folder_findings(machine),
    ]


def problems(findings: list[Finding]) -> list[Finding]:
    """Findings that keep an engine from the best device."""
    return [finding for finding in findings if finding.problem is not None]


def verdict(findings: list[Finding], machine: Machine) -> str:
    """The last line of the report."""
    count = len(problems(findings))
    if count:
        return f"{count} problem{'s' if count > 1 else ''}"
    where = machine.gpus[0].name if machine.gpus else "the CPU"
    return f"everything is there: engines run on {where}"


def _base_findings(software: Software) -> list[Finding]:
    python = Finding("software", "python", software.python)
    if version_numbers(software.python) < PYTHON:
        problem = f"Python {software.python} is older than 3.11"
        python = Finding("software", "python", software.python, problem, "install Python 3.11")
    return [Finding("software", "graphengine", software.engine), python, torch_finding(software)]


def torch_finding(software: Software) -> Finding:
    version = software.versions.get("torch")
    if version is None:
        return Finding(
            "software", "torch", "missing", "without torch there is no engine", INSTALL_TORCH
        )
    if software.torch_error is not None:
        problem = f"torch cannot be imported: {software.torch_error}"
        remedy = INSTALL_TORCH.replace("install", "install --force-reinstall")
        return Finding("software", "torch", version, problem, remedy)
    built = f"for CUDA {software.torch_cuda}" if software.torch_cuda else "for CPUs"
    value = f"{version}, built {built}"
    if _is_older(version, TORCH):
        problem = f"torch {version} is older than {TORCH}"
        return Finding("software", "torch", value, problem, INSTALL_TORCH)
    return Finding("software", "torch", value)


def triton_finding(software: Software, *, has_gpu: bool) -> Finding:
    """A finding about Triton: missing, too old, untried, another version than torch asks for, or
    right.
    """
    oldest, newest = TRITON
    version, wanted = software.versions.get("triton"), software.triton_of_torch
    remedy = install_triton(software)
    if version is None:
        problem = "without triton nothing runs on the GPU" if has_gpu else None
        value = "missing: an engine runs on a CPU only"
        if software.system != "Linux":
            return Finding("software", "triton", f"{value}; it has wheels for Linux alone", problem)
        return Finding("software", "triton", value, problem, remedy)
    if _is_older(version, oldest):
        problem = f"triton {version} is older than {oldest}"
        return Finding("software", "triton", version, problem, remedy)
    asked = f"torch {software.versions.get('torch')} asks for {wanted}"
    if version_numbers(version)[:2] > version_numbers(newest):
        value = f"{version}, untried: the kernels were tried with {oldest} to {newest}"
        fits = wanted is not None and version_numbers(wanted)[:2] <= version_numbers(newest)
        return Finding("software", "triton", value, remedy=remedy if fits else None)
    if wanted is not None and version_numbers(version) != version_numbers(wanted):
        return Finding("software", "triton", f"{version}; {asked}", remedy=remedy)
    return Finding("software", "triton", version)


def install_triton(software: Software) -> str:
    """The command for the version that torch asks for, or for one that was tried."""
    if software.triton_of_torch is not None:
        return f"pip install 'triton=={software.triton_of_torch}'"
    oldest, newest = TRITON
    major, minor = version_numbers(newest)
    return f"pip install 'triton>={oldest},<{major}.{minor + 1}'"


def kernels_findings(software: Software) -> list[Finding]:
    """A finding if torch is there and the kernels cannot be imported: nothing works then."""
    error = software.kernels_error
    if error is None:
        return []
    triton = software.versions.get("triton")
    pair = f"torch {software.versions.get('torch')} and triton {triton or 'none'}"
    problem = f"graphengine.kernels cannot be imported with {pair}: {error}"
    wanted = software.triton_of_torch
    remedy = install_triton(software)
    if triton is not None and wanted == triton:
        # The two versions match, and the import still fails.
        remedy = INSTALL_TORCH
        if version_numbers(software.versions.get("torch", ""))[:2] == version_numbers(TORCH):
            remedy += " triton --force-reinstall"
    elif triton is not None and wanted is None and _is_tried(triton):
        # Without this, pip would keep the installed version.
        remedy += " --force-reinstall"
    return [Finding("software", "kernels", "cannot be imported", problem, remedy)]


def _is_tried(triton: str) -> bool:
    """Whether the kernels were tried with this version."""
    oldest, newest = map(version_numbers, TRITON)
    return oldest <= version_numbers(triton)[:2] <= newest


def package_finding(package: Package, software: Software, *, has_gpu: bool) -> Finding:
    """A finding about a package: there, too old or missing. Only a needed package is a problem."""
    version = software.versions.get(package.name)
    extra = f"extra `{package.extra}`, for" if package.extra else "for"
    if version is None:
        value, problem = "missing", None
        if package.needed:
            problem = f"{package.name} is missing: it is for {package.purpose}"
        else:
            value = f"missing: {extra} {package.purpose}"
        wanted = has_gpu or package.name != "cuda-bindings"
        remedy = package.install if wanted else None
        return Finding("software", package.name, value, problem, remedy)
    if _is_older(version, package.least):
        text = f"{package.name} {version} is older than {package.least}"
        if package.needed:
            return Finding("software", package.name, version, text, package.install)
        value = f"{version}, older than {package.least}: {extra} {package.purpose}"
        return Finding("software", package.name, value, remedy=package.install)
    return Finding("software", package.name, version)


def _is_older(version: str, least: str) -> bool:
    numbers = version_numbers(version)
    return bool(numbers) and numbers < version_numbers(least)


def _cpu_finding(threads: int | None, *, runs: bool) -> Finding:
    if not runs:
        return Finding("CPU", "engine", "none before the problems above are mended")
    told = "" if threads is None else f", {threads} threads"
    return Finding("CPU", "engine", f"runs, with plain PyTorch references{told}")


def _interpreter_findings(machine: Machine) -> list[Finding]:
    if not machine.interpreted:
        return []
    problem = "with TRITON_INTERPRET set kernels are interpreted, at some seconds a token"
    return [Finding("CPU", "TRITON_INTERPRET", "set", problem, "unset TRITON_INTERPRET")]


def _tool_findings(machine: Machine) -> list[Finding]:
    """The tools that Triton builds launchers of kernels with. Without a GPU nothing is built."""
    python = ".".join(machine.software.python.split(".")[:2])
    named = "" if machine.cc is None else f": CC={machine.cc}"
    return [
        tool_finding(
            "C compiler",
            machine.compiler,
            f"Triton builds launchers of kernels with a C compiler, and finds none{named}",
            "apt install gcc, dnf install gcc, or CC=/path/of/a/compiler",
            needed=machine.has_gpu,
        ),
        tool_finding(
            "Python.h",
            machine.python_header,
            "Triton builds launchers of kernels with Python.h, which is missing",
            f"apt install python{python}-dev, or dnf install python{python}-devel",
            needed=machine.has_gpu,
        ),
    ]


def tool_finding(name: str, found: str | None, problem: str, remedy: str, needed: bool) -> Finding:
    if found is not None:
        return Finding("tools", name, found)
    if needed:
        return Finding("tools", name, "missing", problem, remedy)
    return Finding("tools", name, "missing; only Triton on a GPU needs it")


def _folder_findings(machine: Machine) -> list[Finding]:
    cache = folder_finding(
        "Triton's cache",
        machine.triton_cache,
        "TRITON_CACHE_DIR",
        problem="Triton cannot keep compiled kernels" if machine.has_gpu else None,
    )
    if machine.tables is None:
        return [cache]
    # Nothing but `graphengine tune` writes there.
    return [cache, folder_finding("tuned plans", machine.tables, "GRAPHENGINE_CACHE_DIR")]


def folder_finding(name: str, folder: Folder, variable: str, problem: str | None = None) -> Finding:
    """A folder, and the variable that names another one where it cannot be written to.

    problem  consequence of an unwritable folder; None: an engine does not need it
    """
    if folder.writable:
        return Finding("folders", name, str(folder.path))
    if folder.path is None:
        value = "none: this user has no home directory"
    else:
        value = f"{folder.path}, not writable"
    return Finding("folders", name, value, problem, f"export {variable}=/a/writable/folder")
