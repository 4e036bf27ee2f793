"""What follows from the facts of a machine, for machines that are not here."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from graphengine.kernels.attention.gluon import decode_gluon, prefill_gluon
from graphengine.kernels.core.devices import Device, assumed
from graphengine.kernels.core.triton_versions import NEWEST
from graphengine.observe import doctor
from graphengine.observe.doctor import PACKAGES, examine, problems, verdict
from graphengine.observe.doctor_gpus import has_code, kernel_findings, peer_findings
from graphengine.observe.findings import (
    Driver,
    Finding,
    Folder,
    Gpu,
    Machine,
    Plans,
    Software,
    version_numbers,
)

ROOT = Path(__file__).resolve().parents[3]
KIB, GIB = 1024, 2**30
HOPPER = Device((9, 0), 132, 227 * KIB)
ADA = Device((8, 9), 128, 99 * KIB)
AMPERE = Device((8, 6), 84, 99 * KIB)
TURING = Device((7, 5), 68, 64 * KIB)
BLACKWELL = Device((12, 0), 170, 99 * KIB)
VERSIONS = {
    "torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.4.1", "safetensors": "0.5",
    "tokenizers": "0.22.1", "jinja2": "3.1.6", "nvtx": "0.2.13", "cuda-bindings": "13.0.1",
    "llguidance": "1.8.0", "huggingface_hub": "1.3", "gguf": "0.19.0", "prompt_toolkit": "3.0.50",
    "transformers": "5.1.0",
}  # fmt: skip
SOFTWARE = Software(
    engine="0.1.0",
    python="3.11.9",
    system="Linux",
    versions=VERSIONS,
    torch_cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    triton_of_torch="3.6.0",
)
DRIVER = Driver(version="580.65", cuda=(13, 0), gpus=("NVIDIA H200",), has_device=True)
GPU = Gpu(
    name="NVIDIA H200",
    capability=(9, 0),
    memory_bytes=141 * GIB,
    device=HOPPER,
    plans=Plans(shipped=127, path=Path("/cache/tuned-nvidia-h200.json")),
)
WHOLE = Machine(
    software=SOFTWARE,
    driver=DRIVER,
    gpus=(GPU,),
    compiler="/usr/bin/gcc",
    python_header="/include/Python.h",
    threads=8,
    triton_cache=Folder(Path("/home/me/.triton/cache"), writable=True),
    tables=Folder(Path("/cache"), writable=True),
)
CPU_SOFTWARE = replace(
    SOFTWARE,
    versions={name: text for name, text in VERSIONS.items() if name != "cuda-bindings"}
    | {"torch": "2.11.0+cpu"},
    torch_cuda=None,
    architectures=(),
    triton_of_torch=None,
)
CPU_ONLY = replace(WHOLE, software=CPU_SOFTWARE, driver=Driver(), gpus=())


def machine(base: Machine = WHOLE, **software: Any) -> Machine:
    """A machine with other software; `versions` are put over those of `base`, None removes one."""
    versions = {**base.software.versions, **software.pop("versions", {})}
    versions = {name: version for name, version in versions.items() if version is not None}
    return replace(base, software=replace(base.software, versions=versions, **software))


def found(at: Machine, name: str, group: str | None = None) -> Finding:
    """The one finding of this name."""
    (finding,) = (each for each in examine(at) if each.name == name and group in (None, each.group))
    return finding


def broken(at: Machine) -> list[str]:
    return [finding.name for finding in problems(examine(at))]


def test_a_whole_machine_has_no_problem_and_nothing_to_mend() -> None:
    findings = examine(WHOLE)
    assert problems(findings) == []
    assert verdict(findings, WHOLE) == "everything is there: engines run on NVIDIA H200"
    remedies = [finding.name for finding in findings if finding.remedy is not None]
    assert remedies == ["tuned plans"], "other models can be tuned"
    groups = [finding.group for finding in findings]
    assert [*dict.fromkeys(groups)] == ["software", "driver", "cuda:0", "CPU", "tools", "folders"]


def test_a_machine_without_a_gpu_is_whole() -> None:
    findings = examine(CPU_ONLY)
    assert problems(findings) == []
    assert verdict(findings, CPU_ONLY) == "everything is there: engines run on the CPU"
    assert found(CPU_ONLY, "NVIDIA driver").value == "none"
    assert found(CPU_ONLY, "GPU").value == "none: an engine runs on the CPU"
    engine = "runs, with plain PyTorch references, 8 threads"
    assert found(CPU_ONLY, "engine").value == engine
    assert found(CPU_ONLY, "torch").value == "2.11.0+cpu, built for CPUs"
    assert found(CPU_ONLY, "cuda-bindings").remedy is None


# Software.


def test_the_versions_are_those_of_the_package_and_of_the_kernels() -> None:
    assert doctor.TRITON[1] == NEWEST
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.PYTHON))
    least = {each.name: str(each.specifier) for each in map(Requirement, project["dependencies"])}
    assert least.pop("torch") == f">={doctor.TORCH}"
    assert least.pop("triton") == f">={doctor.TRITON[0]}"
    of_engine = [each for each in PACKAGES if each.extra is None and each.least]
    assert least == {each.name: f">={each.least}" for each in of_engine}
    extras = project["optional-dependencies"]
    for package in PACKAGES:
        if package.extra is not None:
            assert f"{package.name}>={package.least}" in extras[package.extra]
            assert not package.needed
    of_extras = {each.extra for each in PACKAGES} - {None}
    assert of_extras == extras.keys()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("3.6", (3, 6)), ("2.12.0a0", (2, 12, 0)), ("unknown", ())],
)
def test_numbers_of_versions(version: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(version) == numbers


def test_without_triton_the_gpu_is_lost_and_the_cpu_is_not() -> None:
    without = machine(versions={"triton": None})
    triton = found(without, "triton")
    assert triton.value == "missing: an engine runs on a CPU only"
    assert triton.problem == "without triton nothing runs on the GPU"
    assert triton.remedy == "pip install 'triton==3.6.0'"
    assert broken(without) == ["triton"]
    assert found(without, "kernels").value == "none before the problems above are mended"
    assert found(without, "engine").value.startswith("runs")
    on_cpu = machine(CPU_ONLY, versions={"triton": None})
    assert broken(on_cpu) == []
    assert found(on_cpu, "triton").remedy == "pip install 'triton>=3.6,<3.10'"
    elsewhere = found(machine(CPU_ONLY, versions={"triton": None}, system="Darwin"), "triton")
    assert elsewhere.value.endswith("it has wheels for Linux alone") and elsewhere.remedy is None


def test_a_triton_that_is_too_old_is_broken() -> None:
    old = found(machine(versions={"triton": "3.5.1"}), "triton")
    assert old.problem == "triton 3.5.1 is older than 3.6"
    assert old.remedy == "pip install 'triton==3.6.0'"


def test_an_untried_triton_is_told_and_no_problem() -> None:
    new = machine(versions={"triton": "3.10.1"})
    triton = found(new, "triton")
    assert triton.value == "3.10.1, untried: the kernels were tried with 3.6 to 3.9"
    assert triton.remedy == "pip install 'triton==3.6.0'" and broken(new) == []
    # Another one would not fit this torch.
    pair = machine(versions={"triton": "3.10.1", "torch": "2.16.0"}, triton_of_torch="3.10.1")
    assert found(pair, "triton").remedy is None


def test_another_triton_than_torch_asks_for_is_told() -> None:
    other = machine(versions={"triton": "3.9.0"})
    triton = found(other, "triton")
    assert triton.value == "3.9.0; torch 2.11.0+cu130 asks for 3.6.0"
    assert triton.remedy == "pip install 'triton==3.6.0'" and broken(other) == []
    unknown = found(machine(versions={"triton": "unknown"}), "triton")
    assert unknown.problem is None


@pytest.mark.parametrize(
    ("versions", "wanted", "remedy"),
    [
        ({"triton": "3.9.0"}, "3.6.0", "pip install 'triton==3.6.0'"),
        ({"triton": "3.6.0"}, "3.6.0", "pip install 'torch==2.11.*' triton --force-reinstall"),
        ({"triton": "3.7.1", "torch": "2.13.0"}, "3.7.1", "pip install 'torch==2.11.*'"),
        ({"triton": "3.7.1"}, None, "pip install 'triton>=3.6,<3.10' --force-reinstall"),
        ({"triton": "3.11.0"}, None, "pip install 'triton>=3.6,<3.10'"),
    ],
)
def test_a_pair_that_cannot_be_imported_is_broken(
    versions: dict[str, str], wanted: str | None, remedy: str
) -> None:
    error = "AttributeError: module 'gl' has no attribute 'thread_barrier'"
    pair = machine(versions=versions, triton_of_torch=wanted, kernels_error=error)
    pair = replace(pair, gpus=(replace(GPU, device=None, plans=None),))
    kernels = found(pair, "kernels", "software")
    told = (
        f"torch {versions.get('torch', VERSIONS['torch'])} and triton {versions['triton']}: {error}"
    )
    assert kernels.problem == f"graphengine.kernels cannot be imported with {told}"
    assert kernels.remedy == remedy and broken(pair) == ["kernels"]
    assert found(pair, "kernels", "cuda:0").value == "none before the problems above are mended"
    assert found(pair, "engine").value == "none before the problems above are mended"
    assert verdict(examine(pair), pair) == "1 problem"


def test_torch_that_is_missing_too_old_or_does_not_load_is_broken() -> None:
    missing = replace(machine(versions={"torch": None}, torch_cuda=None), gpus=())
    assert found(missing, "torch").problem == "without torch there is no engine"
    assert found(missing, "torch").remedy == "pip install 'torch==2.11.*'"
    assert broken(missing) == ["torch"], "told once"
    loads = machine(CPU_ONLY, torch_error="OSError: libcudart.so.13: cannot open shared object")
    assert found(loads, "torch").problem == (
        "torch cannot be imported: OSError: libcudart.so.13: cannot open shared object"
    )
    assert found(loads, "torch").remedy == "pip install --force-reinstall 'torch==2.11.*'"
    old = found(machine(versions={"torch": "2.9.1"}), "torch")
    assert old.problem == "torch 2.9.1 is older than 2.11" and old.value.startswith("2.9.1, built")
    assert broken(machine(python="3.10.2")) == ["python"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_only_what_is_needed_is_a_problem(package: doctor.Package) -> None:
    missing = machine(versions={package.name: None})
    assert broken(missing) == ([package.name] if package.needed else [])
    finding = found(missing, package.name)
    assert package.purpose in f"{finding.value} {finding.problem}"
    assert finding.remedy == package.install and package.name in package.install
    if package.extra:
        assert f"extra `{package.extra}`" in finding.value
    if package.needed:
        assert found(missing, "engine").value.startswith("none before")
    if package.least:
        old = machine(versions={package.name: "0.0.1"})
        assert broken(old) == ([package.name] if package.needed else [])
        finding = found(old, package.name)
        assert f"0.0.1{'' if package.needed else ','}" in finding.value
        assert f"older than {package.least}" in f"{finding.value} {finding.problem}"


# The driver.


def test_torch_for_a_newer_cuda_than_the_drivers_is_broken_with_numbers() -> None:
    driver = replace(DRIVER, version="550.54", cuda=(12, 4))
    old = replace(WHOLE, driver=driver, gpus=(), cuda_error="the driver is too old")
    cuda = found(old, "CUDA")
    assert cuda.value == "12.4 at most, and torch is built for 13.0"
    assert cuda.problem == (
        "torch is built for CUDA 13.0, and the driver 550.54 supports 12.4 at most"
    )
    assert cuda.remedy is not None and "a torch for CUDA 12" in cuda.remedy
    assert broken(old) == ["CUDA"], "that torch finds no GPU follows, and is no second problem"


def test_a_minor_version_of_cuda_is_no_problem() -> None:
    minor = machine(torch_cuda="12.8")
    minor = replace(minor, driver=replace(DRIVER, cuda=(12, 4)))
    assert found(minor, "CUDA").value.endswith("; a driver of CUDA 12 runs that, too")
    assert broken(minor) == []
    assert found(WHOLE, "CUDA").value == "13.0 at most, and torch is built for 13.0"


def test_a_torch_for_cpus_beside_a_gpu_is_broken() -> None:
    plain = replace(machine(torch_cuda=None, versions={"torch": "2.11.0+cpu"}), gpus=())
    gpu = found(plain, "GPU")
    assert gpu.value == "torch finds none; the driver has NVIDIA H200"
    assert gpu.problem == "torch 2.11.0+cpu is built without CUDA"
    assert gpu.remedy == "pip install --force-reinstall 'torch==2.11.*'"
    assert broken(plain) == ["GPU"]


def test_hidden_gpus_are_no_problem() -> None:
    hidden = replace(WHOLE, gpus=(), visible_devices="")
    gpu = found(hidden, "GPU")
    assert gpu.value == "hidden by CUDA_VISIBLE_DEVICES='': NVIDIA H200"
    assert gpu.remedy == "unset CUDA_VISIBLE_DEVICES" and broken(hidden) == []
    wrong = replace(WHOLE, gpus=(), visible_devices="7", cuda_error="no device")
    problem = "torch finds no GPU: no device (CUDA_VISIBLE_DEVICES='7')"
    assert found(wrong, "GPU").problem == problem


def test_a_driver_that_fails_is_broken_where_there_is_a_gpu() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    mismatch = replace(WHOLE, gpus=(), driver=Driver(error=said, has_device=True))
    assert found(mismatch, "NVIDIA driver").problem == f"nvidia-smi fails: {said}"
    assert broken(mismatch) == ["NVIDIA driver", "GPU"]
    nothing = replace(CPU_ONLY, driver=Driver(error="No devices were found"))
    assert found(nothing, "NVIDIA driver").value.endswith("No devices were found")
    assert broken(nothing) == []
    without_smi = replace(WHOLE, driver=Driver(cuda=(13, 0), has_device=True))
    assert found(without_smi, "NVIDIA driver").value == "unknown: there is no nvidia-smi"


# GPUs.

KERNELS = {
    HOPPER: ("Gluon", "Gluon with wgmma", "Gluon with wgmma", "yes", "yes"),
    ADA: ("Gluon", "Triton", "Gluon, the kernel of decode", "no: it needs 9.0", "yes"),
    AMPERE: (
        "Gluon",
        "Triton",
        "Gluon, the kernel of decode",
        "no: it needs 9.0",
        "no: it needs 8.9",
    ),
    TURING: ("Triton", "Triton", "plain PyTorch", "no: it needs 9.0", "no: it needs 8.9"),
    BLACKWELL: ("Gluon", "Triton", "Gluon, the kernel of decode", "yes", "yes"),
}


@pytest.mark.parametrize("device", KERNELS, ids=lambda device: str(device.capability))
def test_which_kernels_serve_a_gpu(device: Device) -> None:
    told = {each.name: each.value for each in kernel_findings("cuda:0", device)}
    decode, prefill, packed, pdl, fp8 = KERNELS[device]
    attention = decode if device.holds_attention_ring else "Triton"
    expected = {"decode linears": decode, "decode attention": attention}
    expected |= {"prefill attention": prefill, "prefill of 8 and 4 bits": packed}
    expected |= {"dependent launch (PDL)": pdl, "fp8 KV cache": fp8}
    assert told.keys() == expected.keys()
    for name, value in expected.items():
        assert told[name].startswith(value), name


@pytest.mark.parametrize("device", KERNELS, ids=lambda device: str(device.capability))
def test_the_report_agrees_with_the_kernels(device: Device) -> None:
    told = {each.name: each.value for each in kernel_findings("cuda:0", device)}
    queries = torch.empty(4096, 32, 128, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(64, 2, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    with assumed(device):
        wgmma = prefill_gluon.takes_wgmma(queries, kv, 1)
        gluon = decode_gluon.takes(queries.flatten(1), kv, 256)
    assert told["prefill attention"].startswith("Gluon") == wgmma
    assert told["decode attention"].startswith("Gluon") == gluon


def test_dependent_launch_needs_a_driver() -> None:
    old = replace(machine(torch_cuda="12.6"), driver=replace(DRIVER, cuda=(12, 2)))
    pdl = found(old, "dependent launch (PDL)")
    assert pdl.value == "no: the driver is for CUDA 12.2, it needs 12.3"
    assert pdl.remedy is not None and "--no-pdl" in pdl.remedy and broken(old) == []


def test_a_gpu_is_described() -> None:
    assert found(WHOLE, "GPU").value == "NVIDIA H200, compute capability 9.0"
    assert found(WHOLE, "memory").value == "141.0 GiB"
    told = found(WHOLE, "multiprocessors").value
    assert told == "132, 227 KiB of shared memory a program"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ("sm_80", "sm_90"), True),
        ((8, 6), ("sm_80", "sm_90"), True),
        ((7, 5), ("sm_80", "sm_90"), False),
        ((12, 0), ("sm_90", "sm_90a"), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((12, 1), ("sm_120a",), False),
        ((12, 0), ("sm_120a",), True),
        ((10, 3), ("sm_100", "strange"), True),
        ((10, 3), ("sm_100f",), True),
        ((10, 3), ("compute_100f",), True),
        ((12, 0), ("compute_100f",), False),
    ],
)
def test_whether_torch_has_code(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert has_code(capability, architectures) == runs


def test_a_gpu_that_torch_has_no_code_for_is_broken() -> None:
    volta = replace(GPU, name="Tesla V100", capability=(7, 0), device=replace(TURING))
    old = replace(WHOLE, gpus=(volta,))
    assert broken(old) == ["GPU"]
    problem = found(old, "GPU").problem
    assert problem is not None and problem.startswith("torch has code for sm_75, sm_80")


@pytest.mark.parametrize(
    ("plans", "index", "value", "remedy"),
    [
        (Plans(), 0, "none: heuristics", "graphengine tune --checkpoint PATH"),
        (Plans(), 1, "none: heuristics", "graphengine tune --checkpoint PATH --device cuda:1"),
        (
            Plans(shipped=20),
            0,
            "20 shipped; heuristics for other weights",
            "graphengine tune --checkpoint PATH",
        ),
        (
            Plans(own=5, shipped=20, path=Path("/cache/t.json")),
            0,
            "5 of your own in /cache/t.json, 20 shipped; heuristics for other weights",
            None,
        ),
    ],
)
def test_where_plans_come_from(plans: Plans, index: int, value: str, remedy: str | None) -> None:
    gpus = (GPU,) * index + (replace(GPU, plans=plans),)
    at = replace(WHOLE, gpus=gpus)
    finding = found(at, "tuned plans", f"cuda:{index}")
    assert (finding.value, finding.remedy, finding.problem) == (value, remedy, None)


def test_a_damaged_table_is_broken_as_no_engine_opens() -> None:
    damaged = Plans(error="/cache/t.json is not JSON: line 1", path=Path("/cache/t.json"))
    at = replace(WHOLE, gpus=(replace(GPU, plans=damaged),))
    finding = found(at, "tuned plans", "cuda:0")
    assert finding.problem == damaged.error
    assert finding.remedy == "move that file away, then graphengine tune --checkpoint PATH"


def test_which_pairs_have_peer_access() -> None:
    assert peer_findings(1, ()) == []
    both = {(0, 1), (1, 0)}
    (whole,) = peer_findings(2, both)
    assert whole.value == "all 2 GPUs, each to each other one" and whole.problem is None
    (part,) = peer_findings(3, both | {(0, 2)})
    assert part.value == (
        "between 0 and 1; not between 0 and 2, 1 and 2: there NCCL carries what ranks exchange, "
        "slower"
    )
    (none,) = peer_findings(2, ())
    assert none.value.startswith("between no GPUs: there NCCL") and none.problem is None
    several = replace(WHOLE, gpus=(GPU, GPU), peers=frozenset(both))
    assert found(several, "peer access").group == "several GPUs"


def test_an_interpreted_process_is_told() -> None:
    assert broken(CPU_ONLY) == []
    assert broken(replace(CPU_ONLY, interpreted=True)) == ["TRITON_INTERPRET"]


# Tools and folders.


def test_what_triton_builds_with_is_needed_on_a_gpu_alone() -> None:
    bare = replace(WHOLE, compiler=None, python_header=None)
    assert broken(bare) == ["C compiler", "Python.h"]
    assert verdict(examine(bare), bare) == "2 problems"
    compiler, header = found(bare, "C compiler"), found(bare, "Python.h")
    assert compiler.remedy is not None and "apt install gcc" in compiler.remedy
    assert header.remedy is not None and "apt install python3.11-dev" in header.remedy
    assert compiler.problem is not None and compiler.problem.endswith("and finds none")
    named = found(replace(bare, cc="/nope"), "C compiler")
    assert named.problem is not None and named.problem.endswith("finds none: CC=/nope")
    on_cpu = replace(CPU_ONLY, compiler=None, python_header=None)
    assert broken(on_cpu) == []
    assert found(on_cpu, "C compiler").value == "missing; only Triton on a GPU needs it"


def test_folders_that_cannot_be_written_name_their_variable() -> None:
    cache = Folder(Path("/caches/triton"), writable=False)
    tables = Folder(None, writable=False)
    at = replace(WHOLE, triton_cache=cache, tables=tables)
    kept = found(at, "Triton's cache")
    assert kept.value == "/caches/triton, not writable"
    assert kept.problem == "Triton cannot keep compiled kernels"
    assert kept.remedy == "export TRITON_CACHE_DIR=/a/writable/folder"
    plans = found(at, "tuned plans", "folders")
    assert plans.value == "none: this user has no home directory" and plans.problem is None
    assert plans.remedy == "export GRAPHENGINE_CACHE_DIR=/a/writable/folder"
    assert broken(replace(CPU_ONLY, triton_cache=cache, tables=None)) == []
