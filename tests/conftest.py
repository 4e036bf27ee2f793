"""Shared by every test: what is tested is the installed package, on any machine.

Where a GPU is missing, tests that need one are skipped with the reason.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# The option --workers.
pytest_plugins = ["workers"]

ROOT = Path(__file__).resolve().parent.parent


def leave_the_checkout() -> None:
    """`python -m pytest` puts the folder it runs in on the path: from the checkout's root, folders
    there would stand in for installed packages. Its `graphengine` is not the one that is tested,
    and its `kernels` is not Hugging Face's.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    # Of processes that tests start.
    os.environ["PYTHONSAFEPATH"] = "1"
    plugin = sys.modules.get("graphengine")
    if plugin is not None and Path(str(plugin.__file__)).parent == ROOT / "graphengine":
        # Pytest has loaded the plugin from there, which imports the rest when a fixture is used.
        for name in [name for name in sys.modules if name.partition(".")[0] == "graphengine"]:
            del sys.modules[name]


leave_the_checkout()

# Matrices are tiny here: a second thread only waits at barriers, for long on a busy machine.
torch.set_num_threads(1)
# torch makes its pool of threads anew when a forked process first asks for it, and two threads that
# ask at the same time may find none ("Invalid thread pool!").
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

# A graph of an earlier test that Python's collector freed during a capture would make that fail.
torch.compiler.config.force_cudagraph_gc = True

# A shell lets what it runs in the background ignore Ctrl-C, which some tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about the machine, not about what is tested. On a GPU an
# example that fails is told as it is: each smaller one would be compiled for, during minutes.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate] if torch.cuda.is_available() else [*Phase],
)
settings.load_profile("any machine")


@pytest.fixture(scope="module", autouse=True)
def old_objects_frozen() -> None:
    """Imported modules and tests stay until the end: no collection of garbage looks at them.

    A test may have let them go again. Counting what is frozen would take as long as a small test.
    """
    if len(gc.get_objects(generation=2)) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_user_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own plans for the decode kernels are part of the numerics: no test sees them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path_factory.mktemp("no-tables")))
        yield


@pytest.fixture(scope="session", autouse=True)
def usual_cpu_defaults() -> Iterator[Any]:
    """Engines of this process have a GPU's defaults on a CPU, too: their tests are about the driver
    that launches ahead, and about the row family that follows from sizes. `cpu_defaults` undoes it.
    """
    from graphengine.options.devices import DEVICE_DEFAULTS

    usual = DEVICE_DEFAULTS["cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICE_DEFAULTS, "cpu", DEVICE_DEFAULTS["cuda"])
        yield usual


@pytest.fixture
def cpu_defaults(usual_cpu_defaults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a CPU have the defaults that users meet."""
    from graphengine.options.devices import DEVICE_DEFAULTS

    monkeypatch.setitem(DEVICE_DEFAULTS, "cpu", usual_cpu_defaults)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
