"""GPU features that kernels depend on, and a way to compile for a GPU that is not present.

A `Device` decides which kernel serves a GPU: where the GPU lacks a feature that the fastest kernel
needs, another kernel takes its place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass

import torch

KIB = 1024
SHARED_BYTES = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
"""Most shared memory of one program, by compute capability. Source: CUDA C++ Programming Guide,
"Compute Capabilities"."""


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU that kernels depend on.

    capability    its compute capability, major and minor
    processors    its multiprocessors
    shared_bytes  shared memory of one program, at most
    name          CUDA's name of it, which names tables of plans; "" if unknown
    """

    capability: tuple[int, int]
    processors: int
    shared_bytes: int
    name: str = ""

    @property
    def copies_async(self) -> bool:
        """Whether the GPU has `cp.async`, and `mma.sync` of bfloat16."""
        return self.capability >= (8, 0)

    @property
    def holds_attention_ring(self) -> bool:
        """Whether a program can hold the tiles and sums of Gluon decode attention, 100 KB."""
        return self.copies_async and self.shared_bytes >= 104 * KIB

    @property
    def converts_fp8(self) -> bool:
        """Whether the GPU converts from and to e4m3."""
        return self.capability >= (8, 9)

    @property
    def overlaps_launches(self) -> bool:
        """Whether the GPU has programmatic dependent launch."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether the GPU has `wgmma`, which later GPUs dropped, and also the TMA."""
        return self.capability == (9, 0)


H200 = Device((9, 0), processors=132, shared_bytes=SHARED_BYTES[9, 0], name="NVIDIA H200")
"""The GPU on which heuristics were tuned; an H100 has the same values."""


def device_of(of: torch.Tensor | torch.device) -> Device | None:
    """The GPU of a tensor or torch device, or the `assumed` GPU if there is one; None for a CPU."""
    device = of.device if isinstance(of, torch.Tensor) else of
    if is_assumed() or device.type != "cuda":
        return _assumed.get()
    return _read(torch.cuda.current_device() if device.index is None else device.index)


def overlaps_launches(device: torch.device) -> bool:
    """Whether the device is a GPU with programmatic dependent launch."""
    gpu = device_of(device)
    return gpu is not None and gpu.overlaps_launches


def stages_that_fit(
    wanted: int, stage_bytes: int, other_bytes: int, of: torch.Tensor, what: object
) -> int:
    """Limit `wanted` pipeline stages to the number that fits in the shared memory of the tensor's
    GPU.

    `other_bytes` of that memory are taken. Returns `wanted` for a tensor that is on no GPU.

    ValueError if not even min(2, wanted) stages fit; it names `what`, which needs the stages.
    """
    device = device_of(of)
    if device is None:
        return wanted
    fitting = (device.shared_bytes - other_bytes) // stage_bytes
    least = min(2, wanted)
    if fitting < least:
        raise ValueError(
            f"{what}: {least} stages of {stage_bytes} bytes and {other_bytes} beside them do not "
            f"fit {device.shared_bytes} bytes of shared memory"
        )
    return min(wanted, fitting)


def processors_of(tensor: torch.Tensor) -> int:
    """Multiprocessors of a tensor's GPU. ValueError if the tensor is on no GPU."""
    device = device_of(tensor)
    if device is None:
        raise ValueError(f"a tensor is on {tensor.device}, which is no GPU")
    return device.processors


@contextmanager
def assumed(device: Device) -> Iterator[None]:
    """Select this GPU's kernels for tensors of any device inside the context.

    Nothing may be launched inside: launches are compiled or recorded.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def new_context() -> Context:
    """A new context that holds only the GPU that is assumed here."""
    context = Context()
    context.run(_assumed.set, _assumed.get())
    return context


def is_assumed() -> bool:
    return _assumed.get() is not None


_assumed: ContextVar[Device | None] = ContextVar("assumed", default=None)


@functools.cache
def _read(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    capability = (found.major, found.minor)
    # Not every version of torch reports it; an unknown GPU gets the smallest value in the table.
    least = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    shared = getattr(found, "shared_memory_per_block_optin", least)
    return Device(capability, found.multi_processor_count, shared, found.name)
