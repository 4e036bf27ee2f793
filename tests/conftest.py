"""Shared by every test: where a GPU is missing, tests that need one are skipped with the reason."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Matrices are tiny here: a second thread only waits at barriers, for long on a busy machine.
torch.set_num_threads(1)

# How long an example takes says something about the machine, not about what is tested.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
