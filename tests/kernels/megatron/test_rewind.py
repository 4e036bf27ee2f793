"""Blocks and recurrent states back at the last accepted token: both twins against plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.megatron import rewind as ops

HUGE, LOWEST = 2**31 - 1, -(2**31)
POISON = (HUGE, LOWEST, 10**9, -2)
NATIVE = torch.cuda.is_available() and not INTERPRETED
SETTINGS = settings(deadline=None, max_examples=extent(20, 60), derandomize=not NATIVE)
INDEX_DTYPES = (torch.int32, torch.int64)
# The interpreter computes bfloat16 wrongly.
FLOATS = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))


@dataclass(frozen=True)
class Ops:
    """One twin of every op, and the device it runs on."""

    device: str
    rewind: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    copy: Callable[..., None]

    def ints(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


# `public` runs the kernels on a GPU or in the interpreter, and elsewhere the twin it dispatches to.
@pytest.fixture(scope="module", params=["reference", "public"])
def twin(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return Ops("cpu", ops.rewind_kv_cache_reference, ops.mamba_state_selective_copy_reference)
    device = "cuda" if NATIVE else "cpu"
    return Ops(device, ops.rewind_kv_cache, ops.mamba_state_selective_copy)


@pytest.fixture(params=["reference", "kernel"])
def skipping(request: pytest.FixtureRequest) -> Ops:
    """What skips wrong rows: the reference, and the kernels where the host does not check first."""
    if request.param == "reference":
        return Ops("cpu", ops.rewind_kv_cache_reference, ops.mamba_state_selective_copy_reference)
    if NATIVE:
        return Ops("cuda", ops.rewind_kv_cache, ops.mamba_state_selective_copy)
    if INTERPRETED:
        return Ops("cpu", ops._launch_rewind, ops._launch_copy)
    pytest.skip("kernels run natively on a GPU or with TRITON_INTERPRET=1")


@dataclass
class Row:
    """A row of the bookkeeping, in plain Python."""

    accepted: int
    status: int
    offset: int
    length: int
    count: int
    last_id: int
    ids: list[int]

    def rewind(self, drafts: int, block_size: int) -> tuple[int, bool]:
        back = 0 if self.status == 1 else drafts - self.accepted
        release, remove = self.last_id, self.offset - back < 0
        self.offset = (self.offset - back) % block_size
        self.length -= back
        if remove:
            self.count -= 1
            self.last_id = self.ids[max(self.count - 1, 0)]
            self.ids[min(self.count, len(self.ids) - 1)] = -1
        return release, remove


def vectors(rows: Sequence[Row]) -> list[list[int]]:
    """The six vectors, in the order of the arguments."""
    return [
        [getattr(row, name) for row in rows]
        for name in ("accepted", "status", "offset", "length", "count", "last_id")
    ]


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_the_worked_example(twin: Ops, dtype: torch.dtype):
    state = [[1, 0], [0, 0], [2, 1], [11, 14], [4, 5], [53, 64]]
    tensors = [twin.ints(values, dtype) for values in state]
    ids = twin.ints([[50, 51, 52, 53, 9], [60, 61, 62, 63, 64]], dtype)
    release, mask = twin.rewind(*tensors, ids, 3, 4, None, None)
    assert [tensor.tolist() for tensor in tensors[2:]] == [[0, 2], [9, 11], [4, 4], [53, 63]]
    assert ids.tolist() == [[50, 51, 52, 53, 9], [60, 61, 62, 63, -1]]
    assert (release.tolist(), mask.tolist()) == ([53, 64], [False, True])
    assert (release.dtype, mask.dtype) == (dtype, torch.bool)


def test_every_offset_accepted_count_and_block_count(twin: Ops):
    """Crossings at every place, from one block down to none and from a full table included."""
    drafts, block_size, max_blocks = 3, 4, 3
    rows = [
        Row(accepted, status, offset, length, count, 7, [20, 0, 40])
        for accepted in range(drafts + 1)
        for status in (0, 1, 2, -1)
        for offset in range(block_size)
        for count in range(1, max_blocks + 2)
        for length in (0, 9)
    ]
    tensors = [twin.ints(values) for values in vectors(rows)]
    ids = twin.ints([row.ids for row in rows])
    release, mask = twin.rewind(*tensors, ids, drafts, block_size, None, None)
    expected = [row.rewind(drafts, block_size) for row in rows]
    assert [*zip(release.tolist(), mask.tolist(), strict=True)] == expected
    assert [tensor.tolist() for tensor in tensors] == vectors(rows)
    assert ids.tolist() == [row.ids for row in rows]
    assert min(row.length for row in rows) == -3, "lengths are never clamped"


def test_the_only_block_of_a_row(twin: Ops):
    tensors = [twin.ints([value]) for value in (0, 0, 1, 0, 1, 5)]
    ids = twin.ints([[5, 6]])
    release, mask = twin.rewind(*tensors, ids, 3, 4, None, None)
    assert (release.tolist(), mask.tolist()) == ([5], [True])
    assert [tensor.item() for tensor in tensors[2:]] == [2, -3, 0, 5]
    assert ids.tolist() == [[-1, 6]]


@SETTINGS
@given(data=st.data())
def test_rewind_matches_a_plain_loop(twin: Ops, data: st.DataObject):
    drafts = data.draw(st.integers(0, 6))
    block_size = data.draw(st.integers(drafts + 1, drafts + 5))
    max_blocks = data.draw(st.integers(1, 5))
    size = data.draw(st.sampled_from([1, 2, 3, 8, 150]))
    live = data.draw(st.integers(0, size))
    room = data.draw(st.integers(0, 2))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    rows = []
    for _ in range(live):
        ids = [integer(0, 99) for _ in range(max_blocks)]
        # A prefill row's count is not read.
        status = integer(0, 2)
        accepted = POISON[integer(0, 3)] if status == 1 else integer(0, drafts)
        count = integer(1, max_blocks)
        rows.append(
            Row(
                accepted,
                status,
                integer(0, block_size - 1),
                integer(0, 50),
                count,
                ids[count - 1],
                ids,
            )
        )
    padded = [[POISON[integer(0, 3)] for _ in range(6)] for _ in range(size - live + room)]
    poison = [[POISON[integer(0, 3)] for _ in range(max_blocks)] for _ in range(size - live + room)]
    dtypes = [data.draw(st.sampled_from(INDEX_DTYPES)) for _ in range(7)]
    tensors = [
        twin.ints(values + [row[i] for row in padded], dtypes[i])
        for i, values in enumerate(vectors(rows))
    ]
    tensors[0] = tensors[0][:size]
    before = [tensor.clone() for tensor in tensors]
    table = [row.ids for row in rows] + poison
    wide = twin.ints([[-7, -7, *ids, -7] for ids in table], dtypes[6])
    ids = wide[:, 2 : 2 + max_blocks]
    count: Any = data.draw(st.sampled_from([live, *INDEX_DTYPES]))
    if isinstance(count, torch.dtype):
        count = torch.tensor([live], dtype=count, device=twin.device)
    elif live == size and data.draw(st.booleans()):
        count = None

    release, mask = twin.rewind(*tensors, ids, drafts, block_size, count, None)
    expected = [row.rewind(drafts, block_size) for row in rows] + [(0, False)] * (size - live)
    assert [*zip(release.tolist(), mask.tolist(), strict=True)] == expected
    assert release.dtype == dtypes[5]
    for tensor, old, values in zip(tensors, before, vectors(rows), strict=True):
        assert tensor[:live].tolist() == values
        assert torch.equal(tensor[live:], old[live:])
    assert wide.tolist() == [[-7, -7, *ids, -7] for ids in [row.ids for row in rows] + poison]


def test_zero_rows(twin: Ops):
    empty = [twin.ints([], torch.int32)] * 6
    for ids in (twin.ints([[1, 2]]), twin.ints([[]]).reshape(0, 3)):
        release, mask = twin.rewind(*empty, ids, 3, 4, 0, None)
        assert (release.shape, release.dtype) == ((0,), torch.int32)
        assert (mask.shape, mask.dtype) == ((0,), torch.bool)
    states = torch.ones(2, 3, 1, 4, device=twin.device), torch.zeros(2, 3, 4, device=twin.device)
    twin.copy(*states, *empty[:3], 2, None)
    twin.copy(*states, *[twin.ints([0])] * 3, 0, None)
    assert (states[1] == 0).all()


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_rows_that_cannot_be_rewound_are_skipped_and_counted(skipping: Ops, dtype: torch.dtype):
    twin = skipping
    state = [
        [4, -1, 0, 0, 0, HUGE, 9],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 2, 0],
        [8, 8, 8, 8, 8, 8, 8],
        [2, 2, 0, 4, 2, 2, 2],
        [31, 31, 31, 31, 31, 31, 31],
    ]
    tensors = [twin.ints(values) for values in state]
    ids = twin.ints([[30, 31]] * 7)
    errors = twin.ints([5], dtype)
    release, mask = twin.rewind(*tensors, ids, 3, 4, 6, errors)
    # Two counts outside 0..K, no block at all, more than the table holds; the last row is padded.
    assert errors.tolist() == [9]
    assert release.tolist() == [0, 0, 0, 0, 31, 31, 0]
    assert mask.tolist() == [False] * 4 + [True, False, False]
    assert [tensor.tolist() for tensor in tensors[2:]] == [
        [0, 0, 0, 0, 1, 2, 0],
        [8, 8, 8, 8, 5, 8, 8],
        [2, 2, 0, 4, 1, 2, 2],
        [31, 31, 31, 31, 30, 31, 31],
    ]
    assert ids.tolist() == [[30, -1 if row == 4 else 31] for row in range(7)]


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.cpu().contiguous().view(torch.uint8)


@SETTINGS
@given(data=st.data())
def test_states_match_a_plain_loop(twin: Ops, data: st.DataObject):
    drafts, slots = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5))
    layers, more = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 1))
    # One element, more than one program copies, no multiple of anything, no rank at all.
    state = data.draw(st.sampled_from([(1,), (), (3, 5), (1025,), (3, 7, 101), (4099,), (2, 1024)]))
    source_dtype, dtype = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    # Strided in layers, slots and positions.
    source = torch.randn(layers + more, slots + 1, drafts + 2, *state, generator=draw)
    source = source.to(twin.device, source_dtype)[:, 1:, 1:]
    target = torch.randn(layers + more, 2 * slots, *state, generator=draw)
    target = target.to(twin.device, dtype)[:, ::2]

    chosen = data.draw(st.permutations(range(slots)))[: data.draw(st.integers(0, slots))]
    # Whatever is not 1 means decode.
    decode = st.sampled_from([0, 2, -1])
    rows = [(data.draw(decode), slot, data.draw(st.integers(0, drafts))) for slot in chosen]
    rows += [(1, data.draw(st.sampled_from([-9, 0, HUGE])), HUGE), (data.draw(decode), -1, LOWEST)]
    rows = [*data.draw(st.permutations(rows)), (data.draw(decode), -1, HUGE)]
    index_dtypes = [data.draw(st.sampled_from(INDEX_DTYPES)) for _ in range(3)]
    columns = [
        twin.ints(list(values) + [0] * extra, index_dtype)
        for values, extra, index_dtype in zip(
            zip(*rows, strict=True), (0, 2, 1), index_dtypes, strict=True
        )
    ]
    expected = target.clone()
    for status, slot, accepted in rows:
        if status != 1 and slot != -1:
            for layer in range(layers):
                expected[layer, slot] = source[layer, slot, accepted].to(dtype)
    twin.copy(source, target, *columns, layers, None)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn]
)
def test_states_of_one_dtype_are_copied_bit_for_bit(twin: Ops, dtype: torch.dtype):
    draw = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(256, (count * 1500 * dtype.itemsize,), generator=draw, dtype=torch.uint8)
        .view(dtype)
        .to(twin.device)
        for count in (2 * 3 * 3, 2 * 3)
    )
    source, target = source.view(2, 3, 3, 1500), target.view(2, 3, 1500)
    expected = bits(target).view(2, 3, -1).clone()
    expected[:, 2] = bits(source).view(2, 3, 3, -1)[:, 2, 1]
    twin.copy(source, target, twin.ints([0]), twin.ints([2]), twin.ints([1]), 2, None)
    assert torch.equal(bits(target).view(2, 3, -1), expected)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_states_out_of_range_are_skipped_and_counted(skipping: Ops, dtype: torch.dtype):
    twin = skipping
    source = torch.ones(2, 4, 3, 2500, device=twin.device)
    target = torch.zeros(2, 4, 2500, device=twin.device)
    errors = twin.ints([1], dtype)
    slots, accepted = [4, -2, 0, 1, 2, 3, HUGE], [0, 0, 3, -1, 2, HUGE, 0]
    status = [0, 0, 0, 0, 0, 1, 1]
    twin.copy(source, target, *map(twin.ints, (status, slots, accepted)), 2, errors)
    assert errors.tolist() == [5]
    assert target.amax(dim=2).tolist() == [[0, 0, 1, 0]] * 2
    assert target.amin(dim=2).tolist() == [[0, 0, 1, 0]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_of_whole_chunks_are_copied_to_the_last_element(twin: Ops, dtype: torch.dtype):
    """Every status but 1 means decode."""
    source = torch.randn(2, 4, 2, 4, 4096, generator=torch.Generator().manual_seed(7))
    source = source.to(twin.device)
    target = torch.zeros(2, 4, 4, 4096, device=twin.device, dtype=dtype)
    expected = target.clone()
    for slot, accepted in ((3, 1), (0, 0), (2, 1)):
        expected[:, slot] = source[:, slot, accepted].to(dtype)
    status, slots, accepted = [0, 1, 2, -1], [3, 1, 0, 2], [1, 1, 0, 1]
    twin.copy(source, target, *map(twin.ints, (status, slots, accepted)), 2, None)
    assert torch.equal(target, expected)


def test_a_row_without_a_slot_is_no_error(twin: Ops):
    """Whatever its status and its count; the row beside it is copied."""
    source = torch.ones(1, 2, 3, 5, device=twin.device)
    target = torch.zeros(1, 2, 5, device=twin.device)
    errors = twin.ints([4])
    status, slots, accepted = [0, 2, -1, 1, 2], [-1, -1, -1, -1, 1], [0, HUGE, LOWEST, 9, 2]
    twin.copy(source, target, *map(twin.ints, (status, slots, accepted)), 1, errors)
    assert errors.tolist() == [4]
    assert target.amin(dim=2).tolist() == target.amax(dim=2).tolist() == [[0, 1]]


@pytest.mark.skipif(not NATIVE, reason="needs 5 GB on a GPU")
def test_states_beyond_int32_offsets():
    source = torch.zeros(2, 9, 2, 1 << 26, dtype=torch.int8, device="cuda")
    target = torch.zeros(2, 9, 1 << 26, dtype=torch.int8, device="cuda")
    source[1, 8, 1] = 3
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    ops.mamba_state_selective_copy(source, target, 0 * one, 8 * one, one, 2)
    assert (target[1, 8] == 3).all() and not target[1, :8].any() and not target[0].any()


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_no_row_count_compiles_anything():
    kernel = ops._rewind_kernel
    for size in (5, 1, 2, 16, 17, 32, 129):
        tensors = [torch.ones(size, dtype=torch.int32, device="cuda") for _ in range(6)]
        ids = torch.ones(size, 3, dtype=torch.int32, device="cuda")
        for live in (size, 1, 0):
            ops.rewind_kv_cache(*tensors, ids, 1, 4, live)
        compiled = len(kernel.device_caches[torch.cuda.current_device()][0])
        if size == 5:
            first = compiled
    assert compiled == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_live_count():
    twin = Ops("cuda", ops.rewind_kv_cache, ops.mamba_state_selective_copy)
    drafts, block_size, size = 3, 4, 6
    live, errors = twin.ints([0], torch.int32), twin.ints([0])
    tensors = [twin.ints([0] * size) for _ in range(6)]
    ids = twin.ints([[0] * 3] * size)
    slots = twin.ints([-1] * size)
    source = torch.randn(2, size, drafts + 1, 1500, device="cuda")
    target = torch.zeros(2, size, 1500, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        ops.mamba_state_selective_copy(source, target, tensors[1], slots, tensors[0], 2, errors)
        return ops.rewind_kv_cache(*tensors, ids, drafts, block_size, live[0], errors)

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        release, mask = step()
    for count in (6, 2, 0, 5):
        rows = [
            Row(
                row % 4,
                int(row == 4),
                row % 3,
                9 + row,
                2,
                10 * row + 1,
                [10 * row, 10 * row + 1, 9],
            )
            for row in range(count)
        ]
        padding = size - count
        for tensor, values in zip(tensors, vectors(rows), strict=True):
            tensor.copy_(twin.ints(values + [HUGE] * padding))
        ids.copy_(twin.ints([row.ids for row in rows] + [[HUGE] * 3] * padding))
        slots.copy_(twin.ints([size - 1 - row for row in range(count)] + [-1] * padding))
        live.fill_(count)
        target.zero_()
        graph.replay()
        copied = torch.zeros_like(target)
        for number, row in enumerate(rows):
            if row.status != 1:
                slot = size - 1 - number
                copied[:, slot] = source[:, slot, row.accepted]
        assert torch.equal(target, copied)
        expected = [row.rewind(drafts, block_size) for row in rows] + [(0, False)] * padding
        assert [*zip(release.tolist(), mask.tolist(), strict=True)] == expected
        for tensor, values in zip(tensors, vectors(rows), strict=True):
            assert tensor.tolist() == values + [HUGE] * padding
        assert ids.tolist() == [row.ids for row in rows] + [[HUGE] * 3] * padding
    assert errors.tolist() == [0]


def _rewind() -> dict[str, Any]:
    return {
        "accepted_counts": torch.tensor([0, 1]),
        "prefill_status": torch.tensor([0, 0]),
        "last_kv_block_offset": torch.tensor([0, 1]),
        "kv_length_offsets": torch.tensor([9, 9]),
        "kv_block_counts": torch.tensor([2, 2]),
        "last_kv_block_id": torch.tensor([5, 6]),
        "kv_block_ids": torch.tensor([[4, 5], [4, 6]]),
        "num_speculative_tokens": 3,
        "block_size_tokens": 4,
        "num_active_requests": 2,
        "error_count": torch.zeros(1, dtype=torch.int32),
    }


def _copy() -> dict[str, Any]:
    return {
        "intermediate_states": torch.ones(2, 3, 2, 5, 6),
        "current_states": torch.zeros(2, 3, 5, 6),
        "prefill_status": torch.tensor([0, 1]),
        "state_idx": torch.tensor([2, 0]),
        "accepted_counts": torch.tensor([1, 0]),
        "num_layers": 2,
        "error_count": torch.zeros(1, dtype=torch.int32),
    }


def assert_refused(
    op: Callable[..., Any], good: Callable[[], dict[str, Any]], change: dict[str, Any], message: str
) -> None:
    op(**good())
    arguments = good() | change
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ValueError, match=message):
        op(**arguments)
    assert all(map(torch.equal, before, tensors)), "nothing is written before an error"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4 must be less than block_size_to"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 must be 0 or more"),
        ({"num_active_requests": 3}, r"num_active_requests=3 is outside 0\.\.2"),
        ({"num_active_requests": torch.tensor([-1])}, r"num_active_requests=-1 is outside 0\.\.2"),
        ({"num_active_requests": torch.tensor(1.0)}, "num_active_requests must be int32 or int64"),
        ({"num_active_requests": torch.tensor([1, 1])}, r"an int or a scalar, not \(2,\)"),
        (
            {"accepted_counts": torch.tensor([0, 4])},
            r"row 1 .* accepted_counts=4 must be in 0\.\.3",
        ),
        ({"accepted_counts": torch.tensor([-1, 0])}, "row 0 cannot be .* accepted_counts=-1 must"),
        ({"kv_block_counts": torch.tensor([2, 0])}, r"row 1 .* kv_block_counts=0 in 1\.\.3"),
        ({"kv_block_counts": torch.tensor([4, 2])}, r"row 0 .* kv_block_counts=4 in 1\.\.3"),
        ({"prefill_status": torch.tensor([0])}, r"prefill_status must be .* 2 or more, not \(1,\)"),
        ({"last_kv_block_offset": torch.zeros(2)}, "last_kv_block_offset must be int32 or int64"),
        ({"kv_length_offsets": torch.zeros(4).long()[::2]}, r"kv_length_offsets .* strides \(2,\)"),
        ({"kv_block_counts": torch.zeros(2, 1).long()}, r"kv_block_counts .* not \(2, 1\)"),
        ({"last_kv_block_id": torch.zeros(2).long().to("meta")}, "last_kv_block_id is on meta"),
        ({"kv_block_ids": torch.zeros(1, 2).long()}, r"kv_block_ids .* 2 x 1 or more"),
        ({"kv_block_ids": torch.zeros(2, 0).long()}, r"kv_block_ids .* 2 x 1 or more"),
        ({"kv_block_ids": torch.zeros(2).long()}, r"kv_block_ids .* not \(2,\)"),
        ({"kv_block_ids": torch.zeros(2, 2).long().T}, r"dense rows, not .* strides \(1, 2\)"),
        ({"kv_block_ids": torch.zeros(2, 2)}, "kv_block_ids must be int32 or int64"),
        ({"error_count": torch.zeros(2).long()}, r"error_count must be a scalar, not \(2,\)"),
    ],
)
def test_what_cannot_be_rewound_is_named(change: dict[str, Any], message: str):
    assert_refused(ops.rewind_kv_cache, _rewind, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"current_states": torch.zeros(2, 3, 5)}, r"not \(2, 3, 2, 5, 6\) and \(2, 3, 5\)"),
        ({"current_states": torch.zeros(2, 4, 5, 6)}, r"and \(2, 4, 5, 6\)"),
        ({"intermediate_states": torch.zeros(2, 3, 0, 5, 6)}, r"K \+ 1, \*state\] and current"),
        ({"intermediate_states": torch.zeros(2, 3)}, r"not \(2, 3\) and"),
        ({"current_states": torch.zeros(2, 3, 6, 5).mT}, "current_states must be dense within"),
        ({"intermediate_states": torch.zeros(2, 3, 2, 6, 5).mT}, "intermediate_states must be den"),
        ({"current_states": torch.zeros(2, 3, 5, 6).long()}, "float32 cannot be cast to .*int64"),
        ({"current_states": torch.zeros(2, 3, 5, 6).to("meta")}, "current_states is on meta"),
        ({"num_layers": 3}, r"num_layers=3 is outside 0\.\.2"),
        ({"num_layers": -1}, r"num_layers=-1 is outside 0\.\.2"),
        ({"state_idx": torch.tensor([3, 0])}, r"row 0: state_idx=3 must be in -1\.\.2"),
        ({"state_idx": torch.tensor([-2, 0])}, r"row 0: state_idx=-2 must be in -1\.\.2"),
        ({"accepted_counts": torch.tensor([2, 0])}, r"accepted_counts=2 in 0\.\.1"),
        ({"accepted_counts": torch.tensor([-1, 0])}, r"accepted_counts=-1 in 0\.\.1"),
        ({"accepted_counts": torch.tensor([1])}, r"accepted_counts must be .* 2 or more"),
        ({"state_idx": torch.zeros(2)}, "state_idx must be int32 or int64"),
        ({"error_count": torch.zeros(1)}, "error_count must be int32 or int64"),
    ],
)
def test_what_cannot_be_copied_is_named(change: dict[str, Any], message: str):
    assert_refused(ops.mamba_state_selective_copy, _copy, change, message)


def test_states_without_a_dtype_to_copy_in_are_named():
    change = {name: _copy()[name].to(torch.complex128) for name in list(_copy())[:2]}
    assert_refused(ops.mamba_state_selective_copy, _copy, change, "complex128 cannot be copied")
