"""How much is tried: a little of every kind, or all of it.

`make test` does the former, and `make test-long` sets GRAPHENGINE_LONG=1 for the latter. A higher
number is one of seeds, of tests that draw from one. With a GPU all is tried always: there a kernel
takes microseconds, and in Triton's interpreter one program of it takes milliseconds.
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
