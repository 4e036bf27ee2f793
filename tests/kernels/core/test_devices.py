"""`Device`: what follows from a GPU that is only assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphengine.kernels.attention import prefill
from graphengine.kernels.attention.decode import longest_split
from graphengine.kernels.attention.gluon import decode_gluon
from graphengine.kernels.core.devices import (
    H200,
    SHARED_BYTES,
    Device,
    assumed,
    device_of,
    overlaps_launches,
    processors_of,
    stages_that_fit,
)
from graphengine.kernels.core.dispatch import INTERPRETED, use_gluon, use_triton, use_wgmma
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.packed_cut import PackedArgs, new_cut
from graphengine.kernels.linear.plans import LinearPlan, heuristic_plan
from launches.quantised import random_quantised

BF16 = torch.bfloat16
CPU = torch.device("cpu")
A100 = Device((8, 0), processors=108, shared_bytes=SHARED_BYTES[8, 0])
RTX_3090 = Device((8, 6), processors=82, shared_bytes=SHARED_BYTES[8, 6])
B200 = Device((10, 0), processors=148, shared_bytes=SHARED_BYTES[10, 0])
T4 = Device((7, 5), processors=40, shared_bytes=64 * 1024)

compiled = pytest.mark.skipif(INTERPRETED, reason="an interpreted process has no Gluon kernel")


def test_a_cpu_is_no_device_unless_one_is_assumed() -> None:
    tensor = torch.zeros(2)
    assert device_of(tensor) is None and device_of(CPU) is None
    assert use_triton(tensor) == INTERPRETED
    with assumed(A100):
        assert device_of(tensor) is A100 and use_triton(tensor)
        with assumed(B200):
            assert processors_of(tensor) == 148
        assert processors_of(tensor) == 108
    assert device_of(tensor) is None
    with pytest.raises(ValueError, match="a tensor is on cpu, which is no GPU"):
        processors_of(tensor)


@pytest.mark.parametrize(
    ("device", "copies", "fp8", "overlaps", "wgmma"),
    [
        (T4, False, False, False, False),
        (A100, True, False, False, False),
        (Device((8, 9), 128, SHARED_BYTES[8, 9]), True, True, False, False),
        (H200, True, True, True, True),
        (B200, True, True, True, False),
    ],
)
def test_what_a_capability_has(
    device: Device, copies: bool, fp8: bool, overlaps: bool, wgmma: bool
) -> None:
    has = (device.copies_async, device.converts_fp8, device.overlaps_launches, device.has_wgmma)
    assert has == (copies, fp8, overlaps, wgmma)
    assert not overlaps_launches(CPU)
    with assumed(device):
        assert overlaps_launches(CPU) == overlaps


def test_stages_are_as_many_as_fit() -> None:
    x = torch.zeros(2)
    assert stages_that_fit(9, 32 * 1024, 0, x, "a plan") == 9, "no GPU, no limit"
    with assumed(RTX_3090):
        assert stages_that_fit(9, 32 * 1024, 3 * 1024, x, "a plan") == 3
        assert stages_that_fit(2, 32 * 1024, 0, x, "a plan") == 2
        assert stages_that_fit(1, 90 * 1024, 0, x, "a plan") == 1
        words = "a plan: 2 stages of 51200 bytes and 9 beside them do not fit 101376 bytes"
        with pytest.raises(ValueError, match=words):
            stages_that_fit(5, 50 * 1024, 9, x, "a plan")


def test_rings_of_linears_fit() -> None:
    """Fewer stages change no bit; the plan remains the one that `numerics_id` names."""
    plan = heuristic_plan("swiglu", 28672, 4096, BF16, "dot")
    x = torch.zeros(1, 4096, dtype=BF16)
    found = {}
    for device in (H200, A100, RTX_3090):
        with assumed(device):
            found[device.capability] = linear_gluon.fitting_stages(plan, 1, 4096, 32, x)
    assert plan.block_m == 128 and found == {(9, 0): 5, (8, 0): 4, (8, 6): 2}


@compiled
def test_rings_of_packed_linears_fit() -> None:
    weight = pack(random_quantised("int4", 128, 4096))
    given = PackedArgs(weight.codes, weight.scales, weight.zeros, weight.row_scales)
    plan = LinearPlan("dot", block_m=128, block_k=256, stages=5)
    options = {"M": 128, "K": 4096, "swiglu": 0, "L": 32, "alone": False}
    found = {}
    for device in (H200, A100, RTX_3090):
        with assumed(device):
            cut = new_cut(given, weight.format, plan, **options)
        found[device.capability] = cut.stages.value
    assert found == {(9, 0): 5, (8, 0): 4, (8, 6): 2}


@compiled
def test_kernels_of_hopper_leave_other_gpus_alone() -> None:
    x = torch.zeros(64, 128, dtype=BF16)
    for device, taken in ((H200, True), (A100, False), (B200, False)):
        with assumed(device):
            assert use_wgmma(x) == taken, device
    for device, linears, attention in (
        (T4, False, False),
        (RTX_3090, True, False),
        (A100, True, True),
        (B200, True, True),
    ):
        with assumed(device):
            assert use_gluon(x) == linears, device
            assert decode_gluon._runs_on(x) == attention, device


def test_prefill_has_smaller_tiles_where_memory_is_short() -> None:
    for head_dim in (64, 128, 256):
        q = torch.zeros(1, 8, head_dim, dtype=BF16)
        with assumed(H200):
            large, *_ = prefill._pick_tiles(q, 8, 1)
        with assumed(RTX_3090):
            small, *_ = prefill._pick_tiles(q, 8, 1)
        assert large == prefill.TILES_16_BIT[head_dim]
        assert small == prefill.SMALL_TILES_16_BIT[head_dim]
        assert small.keys * small.stages < large.keys * large.stages


def test_splits_of_decode_attention_fit() -> None:
    """One tile each: a head of 256 leaves room for shorter ones only, where memory is short."""
    found = {}
    for name, device in {"H200": H200, "A100": A100, "RTX 3090": RTX_3090}.items():
        with assumed(device):
            found[name] = [
                longest_split(torch.zeros(1, dtype=BF16), head_dim) for head_dim in (128, 136, 256)
            ]
    assert found == {"H200": [128] * 3, "A100": [128] * 3, "RTX 3090": [128, 64, 64]}
    float32 = torch.zeros(1)
    assert [longest_split(float32, head_dim) for head_dim in (128, 256)] == [128, 64]
    with (
        assumed(RTX_3090),
        pytest.raises(ValueError, match=r"64 keys of 256 .* 147456 bytes .* has 101376"),
    ):
        longest_split(float32, 256)


def test_heuristics_count_multiprocessors() -> None:
    """64 programs of whole rows fill a GPU of 82; for one of 132 each is split."""
    gpus = {count: replace(H200, processors=count) for count in (16, 82, 132)}
    splits = {
        count: heuristic_plan("store", 4096, 4096, BF16, "dot", gpu).splits
        for count, gpu in gpus.items()
    }
    assert splits == {16: 1, 82: 1, 132: 2}
    assert heuristic_plan("store", 4096, 4096, BF16, "dot") == heuristic_plan(
        "store", 4096, 4096, BF16, "dot", gpus[132]
    )
