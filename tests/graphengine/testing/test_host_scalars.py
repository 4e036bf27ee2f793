"""assert_no_host_scalars: over launches made by hand, and natively."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphengine.buckets import KernelLaunch
from graphengine.testing import GraphCheckError, assert_no_host_scalars
from graphengine.testing.launches import Launches


def launch(*parameters: bytes, **others: Any) -> KernelLaunch:
    return KernelLaunch(**{"path": "0", "name": "attend", **others}, parameters=parameters)


def check(*captures: list[KernelLaunch]) -> None:
    """The captures before the change, and the last after it."""
    found = iter(captures)
    made: list[str] = []

    def capture(step: Any) -> Launches:
        made.append("capture")
        return next(found)

    assert_no_host_scalars(lambda: None, lambda: made.append("change"), capture=capture)
    assert made == ["capture"] * 3 + ["change", "capture"]


def check_change(before: KernelLaunch, after: KernelLaunch) -> None:
    check([before], [before], [before], [after])


def test_equal_captures_pass() -> None:
    check_change(launch(b"abcd", bytes(8)), launch(b"abcd", bytes(8)))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (struct.pack("<i", 5), struct.pack("<i", 7), "parameter 0: 5 -> 7"),
        (struct.pack("<q", -1), struct.pack("<q", 2**40), "parameter 0: -1 -> 1099511627776"),
        (
            struct.pack("<f", 0.5),
            struct.pack("<f", 0.75),
            r"1056964608 \(as a float 0.5\) -> 1061158912 \(as a float 0.75\)",
        ),
        (struct.pack("<d", 0.25), bytes(8), r"\(as a float 0.25\) -> 0"),
        (b"\1\0", b"\0\0", "parameter 0: 1 -> 0"),
        (bytes(16) + b"\2" + bytes(3), bytes(16) + b"\3" + bytes(3), "0 at byte 16: 2 -> 3"),
    ],
)
def test_a_number_is_shown_as_it_may_be_meant(old: bytes, new: bytes, told: str) -> None:
    with pytest.raises(
        GraphCheckError, match=rf"1 values of the host .*: node 0 \(attend\).*{told}"
    ):
        check_change(launch(old), launch(new))


def test_what_differs_anyway_is_ignored() -> None:
    """Temporaries of each capture have addresses of their own, and unused bytes are anything."""
    one, two, three, four = (launch(bytes([n]) * 8) for n in range(4))
    check([one], [two], [three], [four])
    check([one], [one], [two], [four])
    # An empty function object of C++, which is passed with the byte that happens to be there.
    check_change(launch(b"\1"), launch(b"\2"))


def test_other_kernels_grids_and_variants_are_told() -> None:
    before = launch(bytes(8), function=1, grid=(4, 1, 1))
    with pytest.raises(GraphCheckError, match=r"node 0 \(attend\) has become node 0 \(prefill\)"):
        check_change(before, launch(bytes(8), name="prefill"))
    with pytest.raises(GraphCheckError, match=r"grid \(4, 1, 1\) -> \(5, 1, 1\)\. Give"):
        check_change(before, launch(bytes(8), function=1, grid=(5, 1, 1)))
    message = r"another compiled variant \(a constexpr or a specialised number\)"
    with pytest.raises(GraphCheckError, match=message):
        check_change(before, launch(function=2, grid=(4, 1, 1)))


def test_a_kernel_that_is_there_only_sometimes_is_told() -> None:
    one, other = launch(b"abcd"), launch(path="1", name="penalise")
    with pytest.raises(GraphCheckError, match=r"node 1 \(penalise\) is in 1 of 4 captures"):
        check([one], [one], [one], [one, other])
    message = "cannot be told: captures differ with nothing changed in between. node 1 "
    with pytest.raises(GraphCheckError, match=message):
        check([one], [one], [one, other], [one])


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="the captured step has no kernel"):
        check([], [], [], [])
    with pytest.raises(ValueError, match="change=7 is not callable"):
        assert_no_host_scalars(lambda: None, 7)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_numbers_of_torchs_operations_are_found_natively() -> None:
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    scale = torch.ones(8, device="cuda")
    factors: Iterator[float] = iter([1.5, 2.5])
    factor = next(factors)

    def change() -> None:
        nonlocal factor
        factor = next(factors)
        scale.fill_(factor)

    with pytest.raises(GraphCheckError, match=r"frozen in the graph: node 0 .* -> "):
        assert_no_host_scalars(lambda: torch.mul(x, factor, out=y), change)
    factors = iter([3.5])
    assert_no_host_scalars(lambda: torch.mul(x, scale, out=y), change)
