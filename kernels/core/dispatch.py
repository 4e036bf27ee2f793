"""Which implementation of an op runs: the Triton kernels, or their plain PyTorch reference."""

from __future__ import annotations

import torch
import triton

from graphengine.kernels.core.devices import device_of, is_assumed

# Triton reads TRITON_INTERPRET when `@triton.jit` decorates a kernel, so the choice is frozen here
# as well: changing the variable later in the process does not change the kernels.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels serve `tensor`: on CUDA, on the CPU in Triton's interpreter, or where
    they are only compiled for an assumed GPU.

    Everywhere else an op runs its `*_reference` twin, which obeys the same contract.
    """
    return tensor.is_cuda or is_assumed() or (INTERPRETED and tensor.device.type == "cpu")


def use_gluon(tensor: torch.Tensor) -> bool:
    """True where Gluon kernels with `cp.async` and `mma.sync` run; Gluon has no interpreter."""
    device = device_of(tensor)
    return not INTERPRETED and device is not None and device.copies_async


def use_wgmma(tensor: torch.Tensor) -> bool:
    """Whether Gluon kernels for Hopper serve `tensor`: on a Hopper GPU, or where one is assumed.

    Gluon has no interpreter.
    """
    device = device_of(tensor)
    return not INTERPRETED and device is not None and device.has_wgmma
