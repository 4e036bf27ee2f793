"""Cases of tests that run on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

from extent import LONG


def pairwise_here(names: Mapping[Any, tuple[Any, ...]], every: Iterable[Any]) -> list[Any]:
    """`(device, name, value)`: each name with its own values on a CPU, with `every` on a GPU.

    On a CPU each name and each value occurs, but not every combination.
    """
    here = [(name, value) for name, values in names.items() for value in values]
    return [
        *(pytest.param("cpu", *case, id=f"cpu-{case[0]}-{case[1]}") for case in here),
        *(
            pytest.param("cuda", *case, id=f"cuda-{case[0]}-{case[1]}", marks=pytest.mark.gpu)
            for case in product(names, every)
        ),
    ]


def alternately(names: Mapping[Any, tuple[Any, ...]]) -> dict[Any, tuple[Any, ...]]:
    """One of the values of each name, alternately; all of them where everything is tried."""
    turns = {name: index for index, name in enumerate(n for n in names if len(names[n]) > 1)}
    return {
        name: values if LONG or name not in turns else (values[turns[name] % len(values)],)
        for name, values in names.items()
    }
