"""Devices and dtypes that an engine may have, and the defaults of options by kind of device."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from graphengine.kernels.linear.plans import RowFamily

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usual_device() -> str:
    """The default device: "cuda" where torch finds a GPU.

    It is asked for each config, never at import: a process that queried the driver may not fork.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: object) -> None:
    """ValueError unless it is the name of a device that torch has."""
    found = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,4}))?", str(device))
    kind, number = found.groups() if found else (None, None)
    if kind is None or (kind == "cpu" and number not in (None, "0")):
        raise ValueError(f"device={device!r}: must be 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch finds no CUDA device")
    if kind == "cuda" and number and int(number) >= (devices := torch.cuda.device_count()):
        raise ValueError(f"device={device!r}, but torch finds {devices} CUDA devices")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceDefaults:
    """Defaults of options that depend on the kind of device.

    row_family  None: the one that fits an engine's lanes
    """

    lookahead: int
    row_family: RowFamily | None


DEVICE_DEFAULTS = {
    "cuda": DeviceDefaults(lookahead=1, row_family=None),
    # On a CPU the call that launches a step computes it, so a step launched ahead delays the tokens
    # of the step before. The reference of `fma` keeps the order of that kernel's sums; that of
    # `dot` is a matrix product, which is faster even for a single row.
    "cpu": DeviceDefaults(lookahead=0, row_family="dot"),
}
"""Defaults by the type of `EngineConfig.device`."""
