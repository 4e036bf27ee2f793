"""How tests of ranks start their processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.forked_ranks import ranks_are_forked, ranks_are_spawned


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks on a CPU are forked. The programs of `test_rank_failures.py` and `test_torchrun.py`
    start them as users do, and so do tests with `spawned_ranks`.
    """
    with ranks_are_forked():
        yield


@pytest.fixture
def spawned_ranks() -> Iterator[None]:
    with ranks_are_spawned():
        yield
