"""RoPE at rows that are not positions (M-RoPE): bit-equal to plain RoPE with tables made for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.reference import decode_attention_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.norm_rope.rope import RopeRows, rope_append, rope_append_reference
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables

NATIVE = torch.cuda.is_available() and not INTERPRETED
HEADS, KV_HEADS, HEAD_DIM, POSITIONS, BLOCK = 4, 2, 64, 640, 16
PARAMETERS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
# Split length and dtype: in half precision on a GPU long splits have a kernel of their own.
KERNELS = [(64, torch.float32), *([(64, torch.bfloat16), (256, torch.bfloat16)] * NATIVE)]


@pytest.fixture(params=["triton", "reference"])
def kernel(request: pytest.FixtureRequest) -> tuple[bool, str]:
    """Whether the twin runs, and on which device."""
    if request.param == "reference":
        return True, "cpu"
    return False, request.getfixturevalue("device")


def int32(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tables(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(RopeConfig(), head_dim=HEAD_DIM, max_positions=POSITIONS, device=device)


def cache(slots: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    blocks = slots * POSITIONS // BLOCK
    shape = (blocks, 2, BLOCK, KV_HEADS, HEAD_DIM)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def block_table(slots: int, device: str) -> torch.Tensor:
    return int32(torch.arange(slots * POSITIONS // BLOCK).view(slots, -1).tolist(), device)


def products(lanes: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    shape = (lanes, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def test_each_pair_turns_along_its_own_axis(kernel: tuple[bool, str]) -> None:
    twin, device = kernel
    append = rope_append_reference if twin else rope_append
    cos, sin = tables(device)
    of_axis = [[5, 40, 41, 90, 7], [5, 42, 43, 90, 8], [5, 44, 40, 90, 9]]
    axis_of = [pair % 3 for pair in range(HEAD_DIM // 2)]
    slot, position = [0, 0, 0, 0, -1], [5, 40, 41, 42, 0]
    rows = RopeRows(int32(of_axis, device).T.contiguous(), int32(axis_of, device))
    qkv = products(5, device, torch.float32)
    turned_kv, plain_kv = (cache(1, device, torch.float32) for _ in range(2))
    table = block_table(1, device)
    lanes = (table, int32(slot, device), int32(position, device))
    out = torch.full((5, HEADS, HEAD_DIM), -555.0, device=device)
    append(qkv, cos, sin, turned_kv, *lanes, **PARAMETERS, rows=rows, out=out)
    assert (out[4] == -555.0).all(), "a padded lane was written"
    for lane in range(4):
        # Tables in which this lane's position has the angles of its three rows.
        own = [each.clone() for each in (cos, sin)]
        for pair, axis in enumerate(axis_of):
            for mine, whole in zip(own, (cos, sin), strict=True):
                mine[position[lane], pair] = whole[of_axis[axis][lane], pair]
        alone = (int32([slot[lane]], device), int32([position[lane]], device))
        expected = append(qkv[lane : lane + 1], *own, plain_kv, table, *alone, **PARAMETERS)
        assert torch.equal(out[lane], expected[0])
    assert torch.equal(turned_kv, plain_kv)


@pytest.mark.parametrize("row", [-1, POSITIONS, 2**31 - 1])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_row_outside_the_tables_appends_nothing(
    kernel: tuple[bool, str], row: int, axis: int
) -> None:
    twin, device = kernel
    append = rope_append_reference if twin else rope_append
    of_axis = torch.full((2, 3), 3, dtype=torch.int32, device=device)
    of_axis[1, axis] = row
    axis_of = int32([pair % 3 for pair in range(HEAD_DIM // 2)], device)
    kv = cache(1, device, torch.float32)
    before = kv.clone()
    lanes = (block_table(1, device), int32([0, 0], device), int32([3, 4], device))
    qkv = products(2, device, torch.float32)
    rows = RopeRows(of_axis, axis_of)
    q = append(qkv, *tables(device), kv, *lanes, **PARAMETERS, rows=rows)
    assert not q[0].isnan().any() and q[1].isnan().all()
    assert torch.equal(kv[:, :, 4], before[:, :, 4]) and not torch.equal(kv, before)


def attend(
    twin: bool,
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    slot: list[int],
    position: list[int],
    **options: Any,
) -> torch.Tensor:
    """Decode attention of lanes, by the kernel or its twin."""
    device, slots = str(qkv.device), kv.shape[0] * BLOCK // POSITIONS
    lanes = (block_table(slots, device), int32(slot, device), int32(position, device))
    arguments = (qkv, *angles, kv, *lanes)
    options |= PARAMETERS | {"scale": HEAD_DIM**-0.5, "max_seq_len": POSITIONS}
    if twin:
        options.pop("split_tokens")
        options.pop("tokens_per_row", None)
        return decode_attention_reference(*arguments, **options)
    needed = decode_attention_arrivals(len(slot), **PARAMETERS)
    arrivals = torch.zeros(needed, dtype=torch.int32, device=device)
    return decode_attention(*arguments, Launch(arrivals=arrivals), **options)


@pytest.mark.parametrize(("split", "dtype"), KERNELS)
@pytest.mark.parametrize("row_lanes", [1, 3])
def test_a_slots_shift_moves_its_lanes_in_the_tables(
    kernel: tuple[bool, str], split: int, dtype: torch.dtype, row_lanes: int
) -> None:
    twin, device = kernel
    if twin and dtype != torch.float32:
        pytest.skip("the twin has one way of summing")
    starts, shifts = [200, 70, 331], [-150, 0, -331]
    slot, position = [], []
    for row in (0, 1, -1, 2):
        slot += [row] * row_lanes
        position += [starts[row] + j if row >= 0 else 0 for j in range(row_lanes)]
    qkv = products(len(slot), device, dtype)
    options = {"split_tokens": split, "tokens_per_row": row_lanes}
    shift = int32(shifts, device)
    angles = tables(device)
    shifted_kv = cache(3, device, dtype)
    shifted = attend(twin, qkv, angles, shifted_kv, slot, position, rope_shift_S=shift, **options)
    for number, (start, by) in enumerate(zip(starts, shifts, strict=True)):
        # Tables that are moved by the slot's shift, whose lanes alone are live.
        moved = tuple(each.roll(-by, 0) for each in angles)
        alone = [each if each == number else -1 for each in slot]
        kv = cache(3, device, dtype)
        expected = attend(twin, qkv, moved, kv, alone, position, **options)
        mine = torch.tensor(alone) == number
        assert torch.equal(shifted[mine.to(device)], expected[mine.to(device)])
        entries = slice(number * POSITIONS // BLOCK, (number + 1) * POSITIONS // BLOCK)
        assert torch.equal(shifted_kv[entries], kv[entries]), start


def test_the_nodes_of_a_tree_turn_by_depth_and_shift(kernel: tuple[bool, str]) -> None:
    twin, device = kernel
    # Node 1 and 2 are children of node 0, and node 3 is a child of node 2.
    depth, parents = [0, 1, 1, 2], [[], [0], [0], [0, 2]]
    ancestor = [[*each, *[0] * (2 - len(each))] for each in parents]
    tree = TreeLanes(
        depth=int32(depth, device),
        node=int32([0, 1, 2, 3], device),
        ancestor=int32(ancestor, device),
    )
    position = [100 + each for each in depth]
    qkv = products(4, device, torch.float32)
    options = {"split_tokens": 64, "tokens_per_row": 4, "tree": tree}
    one, other = (cache(1, device, torch.float32) for _ in range(2))
    angles = tables(device)
    shift = int32([-60], device)
    shifted = attend(twin, qkv, angles, one, [0] * 4, position, rope_shift_S=shift, **options)
    moved = tuple(each.roll(60, 0) for each in angles)
    assert torch.equal(shifted, attend(twin, qkv, moved, other, [0] * 4, position, **options))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("split", "dtype"), KERNELS)
@pytest.mark.parametrize("shift", [-101, POSITIONS - 100, 2**30])
def test_a_shift_out_of_the_tables_is_nan_and_appends_nothing(
    kernel: tuple[bool, str], split: int, dtype: torch.dtype, shift: int
) -> None:
    twin, device = kernel
    kv = cache(2, device, dtype)
    before = kv.clone()
    out = attend(
        twin,
        products(2, device, dtype),
        tables(device),
        kv,
        [0, 1],
        [100, 100],
        rope_shift_S=int32([shift, 0], device),
        split_tokens=split,
    )
    assert out[0].isnan().all() and not out[1].isnan().any()
    assert torch.equal(kv[: POSITIONS // BLOCK], before[: POSITIONS // BLOCK])


@pytest.mark.parametrize(
    ("rows", "shift", "message"),
    [
        (((3, 3), (32,)), None, r"of_axis must be dense \[2, 3\], not \(3, 3\)"),
        (((2, 3), (64,)), None, r"axis_of must be dense \[32\], not \(64,\)"),
        (None, (2, 2), r"shift_S must be a dense vector, not \(2, 2\)"),
    ],
)
def test_wrong_rows_are_named(
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None,
    shift: tuple[int, ...] | None,
    message: str,
) -> None:
    made = None if rows is None else RopeRows(*(torch.zeros(s, dtype=torch.int32) for s in rows))
    shift_S = None if shift is None else torch.zeros(shift, dtype=torch.int32)
    lanes = (block_table(1, "cpu"), int32([-1, -1], "cpu"), int32([0, 0], "cpu"))
    qkv, kv = products(2, "cpu", torch.float32), cache(1, "cpu", torch.float32)
    with pytest.raises(ValueError, match=message):
        rope_append(qkv, *tables("cpu"), kv, *lanes, **PARAMETERS, rows=made, shift_S=shift_S)


def test_rows_of_another_dtype_are_named() -> None:
    lanes = (block_table(1, "cpu"), int32([-1], "cpu"), int32([0], "cpu"))
    qkv, kv = products(1, "cpu", torch.float32), cache(1, "cpu", torch.float32)
    shift_S = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shift_S must be int32, not torch\.int64"):
        rope_append(qkv, *tables("cpu"), kv, *lanes, **PARAMETERS, shift_S=shift_S)
