"""The device and software of a measurement."""

from __future__ import annotations

import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def environment(device: str) -> dict[str, Any]:
    """Device, versions, commit and date; None for what is unknown."""
    on_gpu = torch.device(device).type == "cuda"
    git = ("git", "-C", str(Path(__file__).resolve().parent))
    changes = _output(*git, "status", "--porcelain")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "driver": driver.splitlines()[0] if on_gpu and driver else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "commit": _output(*git, "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def triton_version() -> str | None:
    """The version of Triton; None where it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
