"""What kernels ask of a GPU, and how to be asked for one that is not there.

Which kernel serves which GPU follows from a `Device`: where one that a GPU lacks something for is
the fastest, another takes its place.
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
"""Shared memory that one program has at most, by compute capability: CUDA C++ Programming Guide,
"Compute Capabilities"."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as kernels see it.

    capability    its compute capability, major and minor
    processors    its multiprocessors
    shared_bytes  shared memory of one program, at most
    """

    capability: tuple[int, int]
    processors: int
    shared_bytes: int

    @property
    def copies_async(self) -> bool:
        """`cp.async`, and `mma.sync` of bfloat16."""
        return self.capability >= (8, 0)

    @property
    def holds_attention_ring(self) -> bool:
        """The tiles of decode attention in Gluon and its sums, of 100 KB in all."""
        return self.copies_async and self.shared_bytes >= 104 * KIB

    @property
    def converts_fp8(self) -> bool:
        """From e4m3 and to it."""
        return self.capability >= (8, 9)

    @property
    def overlaps_launches(self) -> bool:
        """Programmatic dependent launch."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """`wgmma`, which later GPUs have no more, and the TMA beside it."""
        return self.capability == (9, 0)


H200 = Device((9, 0), processors=132, shared_bytes=SHARED_BYTES[9, 0])
"""What heuristics were found on; an H100 is the same in all of this."""


def device_of(of: torch.Tensor | torch.device) -> Device | None:
    """The GPU of a tensor, or this device: the one that is `assumed`, if any; None for a CPU."""
    device = of.device if isinstance(of, torch.Tensor) else of
    if is_assumed() or device.type != "cuda":
        return _assumed.get()
    return _read(torch.cuda.current_device() if device.index is None else device.index)


def overlaps_launches(device: torch.device) -> bool:
    """Whether it is a GPU with programmatic dependent launch."""
    gpu = device_of(device)
    return gpu is not None and gpu.overlaps_launches


def stages_that_fit(
    wanted: int, stage_bytes: int, other_bytes: int, of: torch.Tensor, what: object
) -> int:
    """Of the stages that are wanted as many as the shared memory of a tensor's GPU holds beside
    `other_bytes`, but two at least where two are wanted; all of them where it is on no GPU.

    ValueError, which names `what` has them, where so few do not fit.
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
    """Multiprocessors of a tensor's GPU. ValueError where it is on none."""
    device = device_of(tensor)
    if device is None:
        raise ValueError(f"a tensor is on {tensor.device}, which is no GPU")
    return device.processors


@contextmanager
def assumed(device: Device) -> Iterator[None]:
    """Inside, tensors of any device go to the kernels of this GPU.

    For what only compiles them: nothing is to be launched.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def new_context() -> Context:
    """One that holds nothing but the GPU that is assumed here."""
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
    # Not every version of torch tells it; of an unknown GPU the least that one has is taken.
    least = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    shared = getattr(found, "shared_memory_per_block_optin", least)
    return Device(capability, found.multi_processor_count, shared)
