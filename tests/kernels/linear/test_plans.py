"""Plans: what the heuristic gives fits a GPU, whatever the weight's shape."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.kernels.linear.plans import (
    LinearKind,
    LinearPlan,
    RowFamily,
    attention_split,
    check_kind,
    heuristic_plan,
    row_family,
)

KINDS = get_args(LinearKind)
FAMILIES = get_args(RowFamily)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# qkv, attention output, gate-up, down and lm_head of Llama 3.2 1B and Llama 3.1 8B.
LLAMA_WEIGHTS = [
    ("store", 3072, 2048),
    ("residual", 2048, 2048),
    ("swiglu", 16384, 2048),
    ("residual", 2048, 8192),
    ("sample", 128256, 2048),
    ("store", 6144, 4096),
    ("residual", 4096, 4096),
    ("swiglu", 28672, 4096),
    ("residual", 4096, 14336),
    ("sample", 128256, 4096),
]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def assert_fits_a_gpu(plan: LinearPlan, kind: LinearKind, K: int, dtype: torch.dtype) -> None:
    assert is_power_of_two(plan.block_k) and is_power_of_two(plan.block_m)
    assert plan.block_k < 2 * max(K, 16)
    assert plan.block_m >= (2 if kind == "swiglu" else 1), "a SwiGLU wants pairs of rows"
    assert plan.warps in (1, 2, 4, 8, 16)
    if plan.family == "fma":
        assert plan.splits == 1 and plan.stages == 1
        columns = -(-K // plan.block_k) * plan.block_k
        registers = plan.block_m * columns * dtype.itemsize / (32 * plan.warps) / 4
        assert registers <= 128, f"{registers} registers of weights a thread: they would spill"
        return
    assert plan.splits in ((1,) if kind == "sample" else (1, 2, 4))
    staged = plan.stages * plan.block_k * dtype.itemsize * (plan.block_m + 32)
    assert staged <= 200 * 1024, f"{staged} bytes of shared memory leave no room for results"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind, M, K", LLAMA_WEIGHTS)
def test_llama_shapes(kind, M, K, family):
    for dtype in (torch.float16, torch.bfloat16):
        plan = heuristic_plan(kind, M, K, dtype, family)
        assert plan.family == family
        assert_fits_a_gpu(plan, kind, K, dtype)
        assert K % (plan.block_k * plan.splits) == 0, "off the path without masks"
        programs = -(-M // plan.block_m) * plan.splits
        assert programs >= (132 if family == "fma" else 90), "an H200 has 132 SMs"


def test_large_weights_are_not_split():
    for kind, M, K in [("swiglu", 28672, 4096), ("sample", 128256, 2048)]:
        assert heuristic_plan(kind, M, K, torch.bfloat16, "dot").splits == 1


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    family=st.sampled_from(FAMILIES),
    M=st.integers(1, 300_000),
    K=st.integers(1, 16384) | st.sampled_from([1, 16, 17, 63, 64, 100, 192, 896, 1000, 8193]),
    dtype=st.sampled_from(DTYPES),
)
def test_odd_shapes(kind, family, M, K, dtype):
    assert_fits_a_gpu(heuristic_plan(kind, M, K, dtype, family), kind, K, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_fit_registers(kind: LinearKind, dtype: torch.dtype) -> None:
    """Up to the K that 16 warps can hold: fewer rows a program and more warps make room."""
    longest = 65536 * 4 // dtype.itemsize // (2 if kind == "swiglu" else 1)
    for K in [*range(12_000, longest, 3_001), longest - 1, longest]:
        for M in (2, 64, 4096, 28_672, 300_000):
            assert_fits_a_gpu(heuristic_plan(kind, M, K, dtype, "fma"), kind, K, dtype)


def test_one_row_is_the_least_of_a_program_but_two_in_a_swiglu():
    plans = {kind: heuristic_plan(kind, 4096, 28_672, torch.float32, "fma") for kind in KINDS}
    assert {kind: plan.block_m for kind, plan in plans.items()} == {
        "store": 1,
        "swiglu": 2,
        "residual": 1,
        "sample": 1,
    }
    assert {plan.warps for plan in plans.values()} == {16}


def test_a_small_vocabulary_is_not_split():
    assert heuristic_plan("store", 800, 4096, torch.bfloat16, "dot").splits == 4
    assert heuristic_plan("sample", 800, 4096, torch.bfloat16, "dot").splits == 1


def test_three_times_64_columns_need_no_masks():
    assert heuristic_plan("store", 32, 192, torch.bfloat16, "dot").block_k == 64


def test_family_follows_the_largest_launch():
    assert [row_family(lanes) for lanes in (1, 2, 3, 64)] == ["fma", "dot", "dot", "dot"]


@pytest.mark.parametrize(
    "kind, family, message",
    [
        ("plain", "dot", "kind='plain' is none of store, swiglu, residual, sample"),
        ("", "fma", "kind='' is none of"),
        ("store", "mma", "row family 'mma' is none of fma, dot"),
    ],
)
def test_names_are_checked(kind, family, message):
    with pytest.raises(ValueError, match=message):
        check_kind(kind, family)
    with pytest.raises(ValueError, match=message):
        heuristic_plan(kind, 64, 64, torch.float32, family)


def test_every_name_passes():
    for kind in KINDS:
        for family in FAMILIES:
            check_kind(kind, family)


def test_a_long_split_of_attention_must_fit_an_sm():
    for head_dim, dtype, dot in (
        (64, torch.float32, 128),
        (128, torch.float32, 128),
        (128, torch.float16, 256),
        (256, torch.bfloat16, 256),
        (256, torch.float32, 64),
    ):
        for tokens in (1, 4096, 4097):
            assert attention_split("dot", head_dim, dtype, tokens) == dot
        assert attention_split("fma", head_dim, dtype, 4096) == 64
        assert attention_split("fma", head_dim, dtype, 4097) == dot
