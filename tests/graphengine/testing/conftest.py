"""Reports the planted faults that were caught, after the tests; see `planted/table.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from planted import table as planted_table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found: dict[str, Any] = {}
    for status in ("passed", "failed"):
        for report in terminalreporter.stats.get(status, ()):
            of_case = dict(getattr(report, "user_properties", ()))
            if "fault" in of_case:
                device = of_case["device"]
                made = found.setdefault(device, {"environment": environment(device), "rows": []})
                made["rows"].append([of_case["check"], of_case["fault"], of_case["result"]])
    if found:
        terminalreporter.section("planted faults")
        for device, made in found.items():
            terminalreporter.write_line(f"{device}: {planted_table.count(made['rows'])}")
        if path := os.environ.get(planted_table.VARIABLE):
            planted_table.write_results(Path(path), found)


def environment(device: str) -> str:
    if device == "CPU":
        return f"torch {torch.__version__}"
    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
