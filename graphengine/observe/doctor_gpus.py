"""The findings of `graphengine doctor` about the driver and GPUs: see `doctor.py`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from typing import TYPE_CHECKING

from graphengine.observe.findings import Driver, Finding, Gpu, Machine, Plans, version_numbers

if TYPE_CHECKING:
    from graphengine.kernels.core.devices import Device

PDL_CUDA = (12, 3)
"""The oldest CUDA of a driver for programmatic dependent launch in a captured graph."""
_LOOK_AT_DRIVER = "run nvidia-smi; in a container, give it the GPU (--gpus all)"


def driver_findings(machine: Machine) -> list[Finding]:
    """The driver, the CUDA of both sides, and whether torch finds the GPUs."""
    driver = machine.driver
    found = [_version_finding(driver)]
    cuda = _cuda_finding(machine)
    if cuda is not None:
        found.append(cuda)
    if not machine.gpus:
        problem = None if cuda is None else cuda.problem
        found.append(_no_gpu_finding(machine, told_before=problem is not None))
    return found


def _version_finding(driver: Driver) -> Finding:
    if driver.error is not None:
        value = f"nvidia-smi fails: {driver.error}"
        if driver.has_device:
            remedy = "restart the machine, or install the driver again"
            return Finding("driver", "NVIDIA driver", value, value, remedy)
        return Finding("driver", "NVIDIA driver", value)
    if driver.version is None:
        unknown = "unknown: there is no nvidia-smi"
        return Finding("driver", "NVIDIA driver", unknown if driver.cuda else "none")
    return Finding("driver", "NVIDIA driver", driver.version)


def _cuda_finding(machine: Machine) -> Finding | None:
    """The driver's newest CUDA compared with torch's; None where either is unknown."""
    driver, built = machine.driver, machine.software.torch_cuda
    if driver.cuda is None or built is None:
        return None
    supported = _dotted(driver.cuda)
    value = f"{supported} at most, and torch is built for {built}"
    numbers = version_numbers(built)[:2]
    if numbers[0] > driver.cuda[0]:
        version = "" if driver.version is None else f" {driver.version}"
        problem = (
            f"torch is built for CUDA {built}, and the driver{version} supports {supported} at most"
        )
        remedy = (
            f"a driver for CUDA {built} or newer, or a torch for CUDA {driver.cuda[0]} "
            f"(https://pytorch.org/get-started)"
        )
        return Finding("driver", "CUDA", value, problem if machine.has_gpu else None, remedy)
    if numbers > driver.cuda:
        value += f"; a driver of CUDA {driver.cuda[0]} runs that, too"
    return Finding("driver", "CUDA", value)


def _no_gpu_finding(machine: Machine, *, told_before: bool) -> Finding:
    """Why torch finds no GPU; a driver that is too old was reported before."""
    software, present = machine.software, machine.driver.gpus
    names = ", ".join(present) if present else "a device file of a GPU"
    if machine.hides_gpus and (present or machine.driver.has_device):
        value = f"hidden by CUDA_VISIBLE_DEVICES={machine.visible_devices!r}: {names}"
        return Finding("driver", "GPU", value, remedy="unset CUDA_VISIBLE_DEVICES")
    if not machine.has_gpu:
        return Finding("driver", "GPU", "none: an engine runs on the CPU")
    value = f"torch finds none; the driver has {names}"
    if "torch" not in software.versions or software.torch_error or told_before:
        return Finding("driver", "GPU", value)
    if software.torch_cuda is None:
        problem = f"torch {software.versions['torch']} is built without CUDA"
        remedy = "pip install --force-reinstall 'torch==2.11.*'"
        return Finding("driver", "GPU", value, problem, remedy)
    why = f": {machine.cuda_error}" if machine.cuda_error else ""
    if machine.visible_devices is not None:
        why += f" (CUDA_VISIBLE_DEVICES={machine.visible_devices!r})"
    return Finding("driver", "GPU", value, f"torch finds no GPU{why}", _LOOK_AT_DRIVER)


def gpu_findings(machine: Machine) -> list[Finding]:
    """Each GPU's name and size, and which kernels serve it."""
    launches = "triton" in machine.software.versions
    found = []
    for index, gpu in enumerate(machine.gpus):
        group = f"cuda:{index}"
        found.append(_name_finding(group, gpu, machine.software.architectures))
        found += _size_findings(group, gpu)
        if gpu.device is not None and launches:
            found += kernel_findings(group, gpu.device, machine.driver.cuda)
        else:
            found.append(Finding(group, "kernels", "none before the problems above are mended"))
        if gpu.plans is not None:
            found.append(plans_finding(group, gpu.plans, index))
    return found


def _name_finding(group: str, gpu: Gpu, architectures: Collection[str]) -> Finding:
    capability = _dotted(gpu.capability)
    value = f"{gpu.name}, compute capability {capability}"
    if not architectures or has_code(gpu.capability, architectures):
        return Finding(group, "GPU", value)
    problem = f"torch has code for {', '.join(architectures)}, and none for this GPU"
    remedy = f"a torch for compute capability {capability} (https://pytorch.org/get-started)"
    return Finding(group, "GPU", value, problem, remedy)


def has_code(capability: tuple[int, int], architectures: Collection[str]) -> bool:
    """Whether code for one of "sm_86", "sm_90a", "compute_90", ... runs on a GPU.

    Machine code runs on GPUs of the same major and no lower minor number, PTX on all later ones.
    With the letter "a" either runs on its own GPU alone, with "f" on that major number alone.
    """
    for each in architectures:
        kind, _, number = each.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = int(digits[:-1]), int(digits[-1])
        if built == capability:
            return True
        if number.endswith("a") or built > capability:
            continue
        if built[0] == capability[0] or (kind == "compute" and not number.endswith("f")):
            return True
    return False


def _size_findings(group: str, gpu: Gpu) -> list[Finding]:
    memory = Finding(group, "memory", f"{gpu.memory_bytes / 2**30:.1f} GiB")
    if gpu.device is None:
        return [memory]
    shared = f"{gpu.device.shared_bytes // 1024} KiB of shared memory a program"
    value = f"{gpu.device.processors}, {shared}"
    return [memory, Finding(group, "multiprocessors", value)]


def kernel_findings(
    group: str, device: Device, driver_cuda: tuple[int, int] | None = None
) -> list[Finding]:
    """Which kernels serve a GPU, as the kernels themselves decide by a `Device`."""
    attention, linears = "Gluon", "Gluon; Triton in engines of 1 and 2 rows"
    if not device.copies_async:
        attention = linears = "Triton, slower: Gluon needs 8.0"
        linears += ", as do weights of 8 and 4 bits"
    elif not device.holds_attention_ring:
        attention = "Triton, slower: Gluon needs 104 KiB of shared memory"
    prefill = "Gluon with wgmma for heads of 64 and 128, else Triton"
    packed = "Gluon with wgmma"
    if not device.has_wgmma:
        prefill = "Triton: wgmma is of 9.0 alone"
        packed = "Gluon, the kernel of decode: wgmma is of 9.0 alone"
    if not device.copies_async:
        packed = "plain PyTorch, much slower: Gluon needs 8.0"
    fp8 = "yes" if device.converts_fp8 else "no: it needs 8.9"
    return [
        Finding(group, "decode linears", linears),
        Finding(group, "decode attention", attention),
        Finding(group, "prefill attention", prefill),
        Finding(group, "prefill of 8 and 4 bits", packed),
        _pdl_finding(group, device, driver_cuda),
        Finding(group, "fp8 KV cache", fp8),
    ]


def _pdl_finding(group: str, device: Device, driver_cuda: tuple[int, int] | None) -> Finding:
    name = "dependent launch (PDL)"
    if not device.overlaps_launches:
        return Finding(group, name, "no: it needs 9.0")
    if driver_cuda is not None and driver_cuda < PDL_CUDA:
        value = f"no: the driver is for CUDA {_dotted(driver_cuda)}, it needs {_dotted(PDL_CUDA)}"
        remedy = "a newer driver, or engines with pdl=False (--no-pdl)"
        return Finding(group, name, value, remedy=remedy)
    return Finding(group, name, "yes")


def plans_finding(group: str, plans: Plans, index: int) -> Finding:
    """Where the plans of decode's linears come from, and the command that measures them."""
    tune = "graphengine tune --checkpoint PATH" + (f" --device cuda:{index}" if index else "")
    if plans.error is not None:
        remedy = f"move that file away, then {tune}"
        return Finding(group, "tuned plans", "the table is damaged", plans.error, remedy)
    counts = []
    if plans.own:
        counts.append(f"{plans.own} of your own in {plans.path}")
    if plans.shipped:
        counts.append(f"{plans.shipped} shipped")
    if not counts:
        return Finding(group, "tuned plans", "none: heuristics", remedy=tune)
    value = f"{', '.join(counts)}; heuristics for other weights"
    # A user who has tuned knows the command.
    return Finding(group, "tuned plans", value, remedy=None if plans.own else tune)


def peer_findings(gpus: int, peers: Collection[tuple[int, int]]) -> list[Finding]:
    """Which pairs of GPUs reach each other's memory, where there are several."""
    if gpus < 2:
        return []
    pairs = [*combinations(range(gpus), 2)]
    without = [pair for pair in pairs if not {pair, pair[::-1]} <= {*peers}]
    value = f"all {gpus} GPUs, each to each other one"
    if without:
        reach = [pair for pair in pairs if pair not in without]
        nccl = "there NCCL carries what ranks exchange, slower"
        value = f"between no GPUs: {nccl}"
        if reach:
            value = f"between {_told(reach)}; not between {_told(without)}: {nccl}"
    return [Finding("several GPUs", "peer access", value)]


def _told(pairs: Collection[tuple[int, int]]) -> str:
    return ", ".join(f"{a} and {b}" for a, b in pairs)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
