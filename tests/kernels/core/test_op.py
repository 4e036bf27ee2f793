"""Launches as data: what an `Op` has of a launch, and that none is launched while recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.core.triton_versions import OPTIONS


@contextmanager
def recorded_ops() -> Iterator[list[Op]]:
    """A list that gets the launches inside, in their order, instead of their being launched."""
    ops: list[Op] = []
    with ops_handed_to(ops.append):
        yield ops


class Pair(NamedTuple):
    first: Any
    second: Any


@triton.jit
def _add_kernel(x_ptr, pair, out_ptr, scale, N: tl.constexpr, PDL: tl.constexpr):
    index = tl.arange(0, N)
    y = tl.load(x_ptr + index) + tl.load(pair.first + index)
    tl.store(out_ptr + index, y * scale)


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    launcher(_add_kernel, (1, 2))(
        x, Pair(y, None), out, 2.0, N=16, num_warps=2, **launch_options(pdl)
    )


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(16), torch.ones(16), torch.zeros(16)


def test_an_op_has_what_the_launch_was_asked_for() -> None:
    x, y, out = tensors()
    with recorded_ops() as ops:
        add(x, y, out, pdl=True)
        add(y, x, out)
    assert not out.any(), "it was launched"
    first, second = ops
    assert first.name == "_add_kernel" and first.kernel is _add_kernel
    assert repr(first) == "<Op _add_kernel, grid (1, 2)>"
    assert first.grid == (1, 2) and first.programs == (1, 2, 1) and first.threads == 64
    assert first.arguments["x_ptr"] is x and first.arguments["scale"] == 2.0
    assert first.arguments["N"] == 16 and second.arguments["pair"].first is x
    assert [(name, id(tensor)) for name, tensor in first.tensors()] == [
        ("x_ptr", id(x)), ("pair.first", id(y)), ("out_ptr", id(out)),
    ]  # fmt: skip
    assert first.options == {"num_warps": 2, **OPTIONS}
    # In an interpreted process nothing overlaps.
    assert first.pdl == (not INTERPRETED) and not second.pdl


def test_an_op_can_be_launched_later() -> None:
    launched: list[dict[str, Any]] = []

    class Kernel:
        __name__, arg_names = "kernel", ["x", "PDL"]

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **named: launched.append({"grid": grid, **named})

    with recorded_ops() as ops:
        launcher(Kernel(), (3,))("a", num_warps=8, **launch_options(True))
        launcher(Kernel(), (3,))("b", PDL=False)
    assert not launched
    for op in ops:
        op.launch()
    pdl = {"PDL": not INTERPRETED, "launch_pdl": not INTERPRETED}
    assert launched == [
        {"grid": (3,), "x": "a", "num_warps": 8, **pdl, **OPTIONS},
        {"grid": (3,), "x": "b", "PDL": False, "launch_pdl": False, **OPTIONS},
    ]


def test_inner_records_keep_theirs_and_other_threads_launch() -> None:
    outer: list[Op] = []
    x, y, out = tensors()
    seen: list[bool] = []

    def other() -> None:
        with recorded_ops() as own:
            add(x, y, out)
        seen.append(len(own) == 1)

    with ops_handed_to(outer.append):
        add(x, y, out)
        with recorded_ops() as inner:
            add(x, y, out)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        add(x, y, out)
    assert (len(outer), len(inner), seen) == (2, 1, [True])
