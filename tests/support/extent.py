"""How much the tests try: a little of every kind, or everything.

`make test` does the former, and `make test-long` sets GRAPHENGINE_LONG=5 for the latter. A higher
number is the number of seeds, for tests that draw from one. The same holds on a GPU, where each
other size or plan of a kernel is compiled for seconds: `make gpu` tries a little, and
`make gpu NATIVE=--long` everything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch

Kind = TypeVar("Kind")

SEEDS = int(os.environ.get("GRAPHENGINE_LONG", "0"))
LONG = SEEDS > 0


def extent(little: Kind, all: Kind) -> Kind:
    """What this run tries."""
    return all if LONG else little


def examples(little: int, all: int) -> int:
    """How many examples of a kernel whose sizes are compiled for: on a GPU a third of little."""
    return extent((little + 2) // 3 if torch.cuda.is_available() else little, all)


def some_of(all: Sequence[Kind], *places: int) -> list[Kind]:
    """The cases at these places; in a long run all of them."""
    return extent([all[place] for place in places], [*all])
