"""What a report says of a GPU that lacks what the fastest kernels need."""

from __future__ import annotations

import pytest

from engines.small_engine import open_engine
from graphengine.kernels.core.devices import H200, SHARED_BYTES, Device, assumed

PREFILL = "prefill attention in Triton, prefill of packed weights by the kernel of decode"


@pytest.mark.parametrize(
    ("device", "pdl", "line"),
    [
        (H200, "on", None),
        (
            Device((12, 0), 170, SHARED_BYTES[12, 0]),
            "on",
            f"12.0: {PREFILL}, decode attention in Triton",
        ),
        (
            Device((8, 6), 82, SHARED_BYTES[8, 6]),
            "off",
            f"8.6: {PREFILL}, decode attention in Triton",
        ),
        (
            Device((7, 5), 40, 64 * 1024),
            "off",
            "7.5: attention and linears in Triton, prefill of packed weights in PyTorch",
        ),
    ],
)
def test_portable_kernels_are_named(device: Device, pdl: str, line: str | None) -> None:
    with open_engine(device="cpu", max_batch=1) as engine, assumed(device):
        text = str(engine.report())
    assert f"PDL {pdl}, " in text
    expected = [] if line is None else [f"for compute capability {line}"]
    assert [each for each in text.splitlines() if each.startswith("for compute")] == expected
