"""Rules for what torch's functions return, against what torch returns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphengine.opening.budget.torch_results import known_result


def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Compared(TorchFunctionMode):
    """Whether there was a rule for the last call, whose result must be torch's."""

    known = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, result = known_result(func, args, kwargs or {}), func(*args, **(kwargs or {}))
        self.known = rule is not None
        if rule is not None:
            told = [(each.shape, each.stride(), each.dtype, each.device) for each in (rule, result)]
            assert told[0] == told[1], func
        return result


SUPPORT = Path(__file__).parents[2] / "support"
BF16, FLAG = torch.bfloat16, torch.bool
CALLS: dict[str, Callable[[], Tensor]] = {
    "empty_like": lambda: torch.empty_like(new(3, 4)),
    "empty_like in another dtype": lambda: torch.empty_like(new(3, 4), dtype=BF16),
    "zeros_like": lambda: torch.zeros_like(new(3, 4)),
    "roll": lambda: new(5).roll(-1),
    "roll rows": lambda: new(5, 3).roll(1, dims=0),
    "equal": lambda: new(5) == new(1),
    "at least": lambda: new(2, 5) >= 0,
    "bits": lambda: new(5) & 1,
    "both": lambda: new(5, dtype=FLAG) & new(5, dtype=FLAG),
    "not": lambda: ~new(5, dtype=FLAG),
    "sum": lambda: new(3, 4, dtype=BF16) + new(1, 4, dtype=torch.float32),
    "where": lambda: torch.where(new(4, dtype=FLAG), new(4), -1),
    "arange": lambda: torch.arange(5, dtype=torch.int32, device="meta"),
    "mm": lambda: torch.mm(new(3, 4, dtype=BF16), new(4, 5, dtype=BF16)),
    "mm into": lambda: torch.mm(
        new(3, 4, dtype=BF16), new(5, 4, dtype=BF16).t(), out=new(3, 5, dtype=BF16)
    ),
    "bmm": lambda: torch.bmm(new(2, 3, 4, dtype=BF16), new(2, 4, 5, dtype=BF16)),
    "cat": lambda: torch.cat([new(3, 4), new(1, 4)]),
    "add_": lambda: new(3, dtype=BF16).add_(new(3, dtype=BF16)),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "not dense": lambda: torch.empty_like(new(3, 4).t()),
    "as many axes": lambda: new(3, 4) == new(4),
    "on a CPU": lambda: torch.arange(5),
    "of a CPU": lambda: torch.ones(3) + 1,
    "side by side": lambda: torch.cat([new(3, 4), new(3, 1)], dim=1),
    "another function": lambda: new(3).sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_rules_say_what_torch_returns(name: str) -> None:
    with Compared() as compared:
        CALLS[name]()
    assert compared.known


@pytest.mark.parametrize("name", OTHERS)
def test_torch_is_asked_where_there_is_no_rule(name: str) -> None:
    with Compared() as compared:
        OTHERS[name]()
    assert not compared.known


TRACE = """
import sys
sys.path.append(sys.argv[1])
from graphengine.kernels.core.devices import H200, assumed
from graphengine.opening.budget.footprint import trace_footprint
from graphengine.profiles.benchmark.shapes import Subject
from launches.step_rules import steps_of
options = {"device": "cpu", "dtype": "bfloat16", "max_batch": 2, "max_seq_len": 256}
with assumed(H200):
    for shape in ("tiny", "tiny-moe"):
        trace_footprint(steps_of(Subject.of_shape(shape), options))
assert not {"sympy", "torch._dynamo"} & sys.modules.keys()
"""


def test_a_trace_does_not_import_torchs_compiler() -> None:
    subprocess.run([sys.executable, "-P", "-c", TRACE, str(SUPPORT)], check=True)
