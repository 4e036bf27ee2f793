"""The pytest plugin: every check of `graphengine.testing` as a fixture of the same name.

pytest loads this at every start if graphengine is installed, so nothing here imports torch until a
fixture is used. A fixture that needs a GPU skips its test without one, and `needs_gpu` does so for
a test that captures a graph by itself. All others also work on CPU tensors, or on the structure of
a graph that was read elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# The owner of each golden file: the id of the test that asked for it.
_SNAPSHOTS = pytest.StashKey[dict[Path, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("graphengine", "tests of CUDA graphs").addoption(
        "--graph-snapshot-update",
        action="store_true",
        help="write the golden files of graph_snapshot instead of comparing with them",
    )


def _check(name: str) -> Any:
    return getattr(import_module("graphengine.testing"), name)


@pytest.fixture(scope="session")
def needs_gpu() -> None:
    """Skips the test without a GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture
def graph_snapshot(request: pytest.FixtureRequest) -> Any:
    """A `GraphSnapshot` whose golden files are in `__snapshots__/<module>/` next to the test."""
    folder = request.path.parent / "__snapshots__" / request.path.stem
    owner = request.node.nodeid
    return _check("graph_snapshot")(
        folder,
        owner.partition("::")[2],  # with the class
        update=bool(request.config.getoption("--graph-snapshot-update")),
        owner=owner,
        owners=request.config.stash.setdefault(_SNAPSHOTS, {}),
    )


@pytest.fixture(scope="session")
def no_sync(needs_gpu: None) -> Any:
    """`graphengine.testing.no_sync`; skips without a GPU."""
    return _check("no_sync")


@pytest.fixture(scope="session")
def no_alloc(needs_gpu: None) -> Any:
    """`graphengine.testing.no_alloc`; skips without a GPU."""
    return _check("no_alloc")


@pytest.fixture(scope="session")
def check_no_alloc(needs_gpu: None) -> Any:
    """`graphengine.testing.check_no_alloc`; skips without a GPU."""
    return _check("check_no_alloc")


@pytest.fixture(scope="session")
def keep_graphs(needs_gpu: None) -> Any:
    """`graphengine.testing.keep_graphs`; skips without a GPU."""
    return _check("keep_graphs")


@pytest.fixture(scope="session")
def assert_replay_matches_eager() -> Any:
    """`graphengine.testing.assert_replay_matches_eager`."""
    return _check("assert_replay_matches_eager")


@pytest.fixture(scope="session")
def poison_padding() -> Any:
    """`graphengine.testing.poison_padding`."""
    return _check("poison_padding")


@pytest.fixture(scope="session")
def assert_pointers_stable() -> Any:
    """`graphengine.testing.assert_pointers_stable`."""
    return _check("assert_pointers_stable")


@pytest.fixture(scope="session")
def assert_rng_advances() -> Any:
    """`graphengine.testing.assert_rng_advances`."""
    return _check("assert_rng_advances")


@pytest.fixture(scope="session")
def assert_no_host_nodes() -> Any:
    """`graphengine.testing.assert_no_host_nodes`."""
    return _check("assert_no_host_nodes")


@pytest.fixture(scope="session")
def assert_pdl_edges() -> Any:
    """`graphengine.testing.assert_pdl_edges`."""
    return _check("assert_pdl_edges")


@pytest.fixture(scope="session")
def latency_budget() -> Any:
    """`graphengine.testing.latency_budget`."""
    return _check("latency_budget")


@pytest.fixture(scope="session")
def run_isolated() -> Any:
    """`graphengine.testing.run_isolated`."""
    return _check("run_isolated")
