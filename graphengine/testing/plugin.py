"""The pytest plugin: every check of `graphengine.testing` as a fixture of the same name.

pytest loads this at every start if graphengine is installed, so nothing here imports torch until a
fixture is used. A fixture that needs a GPU skips its test without one, and `needs_gpu` does so for
a test that captures a graph by itself. All others also work on CPU tensors, or on the structure of
a graph that was read elsewhere.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from typing import Any

import pytest

from graphengine.testing.snapshots.golden import FOLDER, GoldenFiles

_GOLDEN = pytest.StashKey[GoldenFiles]()
# The key under which a worker of pytest-xdist sends its findings to the reporting process.
_OF_WORKER = "graphengine_golden_files"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("graphengine", "tests of CUDA graphs").addoption(
        "--graph-snapshot-update",
        action="store_true",
        help="write the golden files of graph_snapshot instead of comparing against them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_GOLDEN] = golden = GoldenFiles()
    golden.partial = any("::" in argument for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests, before some are deselected."""
    config.stash[_GOLDEN].tests.update({item.nodeid: str(item.path) for item in items})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_GOLDEN].passed.add(item.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_OF_WORKER] = session.config.stash[_GOLDEN].to_dict()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended."""
    if (found := getattr(node, "workeroutput", {}).get(_OF_WORKER)) is not None:
        node.config.stash[_GOLDEN].merge(found)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    orphans = config.stash[_GOLDEN].orphans()
    if not orphans:
        return
    terminalreporter.section("orphaned golden files")
    for path in orphans:
        terminalreporter.write_line(str(path))
    terminalreporter.write_line(
        f"golden files that no test asks for: {len(orphans)}. Delete them, or find the test that "
        "was renamed"
    )


def _check(name: str) -> Any:
    return getattr(import_module("graphengine.testing"), name)


@pytest.fixture(scope="session")
def needs_gpu() -> None:
    """Skips the test without a GPU; for tests that capture a graph by themselves."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture
def graph_snapshot(request: pytest.FixtureRequest) -> Any:
    """Compares graphs with golden files in `__snapshots__/<module>/` beside the test."""
    folder = request.path.parent / FOLDER / request.path.stem
    owner = request.node.nodeid
    return _check("graph_snapshot")(
        folder,
        owner.partition("::")[2],  # with the class
        update=bool(request.config.getoption("--graph-snapshot-update")),
        owner=owner,
        owners=request.config.stash[_GOLDEN].owners,
    )


@pytest.fixture(scope="session")
def no_sync(needs_gpu: None) -> Any:
    """A block that raises where it waits for the device; skips without a GPU."""
    return _check("no_sync")


@pytest.fixture(scope="session")
def no_alloc(needs_gpu: None) -> Any:
    """A block that raises if torch's allocator gives out memory; skips without a GPU."""
    return _check("no_alloc")


@pytest.fixture(scope="session")
def check_no_alloc(needs_gpu: None) -> Any:
    """Raises if replays take memory, by counters that only grow; skips without a GPU."""
    return _check("check_no_alloc")


@pytest.fixture(scope="session")
def no_leaked_pool(needs_gpu: None) -> Any:
    """A block that raises if a capture leaves its pool behind; skips without a GPU."""
    return _check("no_leaked_pool")


@pytest.fixture(scope="session")
def keep_graphs(needs_gpu: None) -> Any:
    """A block that collects the graphs others capture in it; skips without a GPU."""
    return _check("keep_graphs")


@pytest.fixture(scope="session")
def assert_replay_matches_eager() -> Any:
    """Raises if a replay leaves other bits than the step that was captured."""
    return _check("assert_replay_matches_eager")


@pytest.fixture(scope="session")
def poison_padding() -> Any:
    """Raises if NaN or huge integers in padded lanes change a live result."""
    return _check("poison_padding")


@pytest.fixture(scope="session")
def assert_pointers_stable() -> Any:
    """Raises if a tensor has another address, shape or type than at the capture."""
    return _check("assert_pointers_stable")


@pytest.fixture(scope="session")
def assert_rng_advances() -> Any:
    """Raises if two replays draw the same numbers, or a generator stands still."""
    return _check("assert_rng_advances")


@pytest.fixture(scope="session")
def assert_no_host_nodes() -> Any:
    """Raises if a graph calls a function on the host."""
    return _check("assert_no_host_nodes")


@pytest.fixture(scope="session")
def assert_pdl_edges() -> Any:
    """Raises if too few edges are programmatic dependent launches."""
    return _check("assert_pdl_edges")


@pytest.fixture(scope="session")
def latency_budget() -> Any:
    """Raises if a replay's median or p99 is over its ratio to a reference."""
    return _check("latency_budget")


@pytest.fixture(scope="session")
def run_isolated() -> Any:
    """Runs a function or source in a fresh process; raises if it ends as not expected."""
    return _check("run_isolated")


@pytest.fixture(scope="session")
def assert_no_dangling_pointers() -> Any:
    """Raises if memory that a graph's kernels were given is freed or moved."""
    return _check("assert_no_dangling_pointers")


@pytest.fixture(scope="session")
def assert_no_host_scalars() -> Any:
    """Raises if a kernel of a graph holds a number of the host that changes."""
    return _check("assert_no_host_scalars")


@pytest.fixture(scope="session")
def assert_outputs_written() -> Any:
    """Raises if a replay leaves an element of its outputs unwritten."""
    return _check("assert_outputs_written")


@pytest.fixture(scope="session")
def assert_pdl_waits() -> Any:
    """Raises if a kernel that may start early (PDL) does not wait, by PTX or cubin."""
    return _check("assert_pdl_waits")


@pytest.fixture(scope="session")
def assert_replayed() -> Any:
    """A block that raises unless each bucket's graph is replayed as often as expected."""
    return _check("assert_replayed")
