"""How much the tests try: a little of every kind, or everything.

`make test` does the former, and `make test-long` sets GRAPHENGINE_LONG=1 for the latter. A higher
number is the number of seeds, for tests that draw from one. With a GPU everything is always tried:
there a kernel takes microseconds, while in Triton's interpreter one program of it takes
milliseconds.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch

Kind = TypeVar("Kind")

SEEDS = int(os.environ.get("GRAPHENGINE_LONG", "0"))
LONG = SEEDS > 0 or torch.cuda.is_available()


def extent(little: Kind, all: Kind) -> Kind:
    """What this run tries."""
    return all if LONG else little
