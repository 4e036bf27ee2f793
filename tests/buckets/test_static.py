"""StaticBuffers: loads against a naive model, checks before changes, staging, addresses."""

import contextlib
import ctypes
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.buckets import Field, LaneUpdate, StaticBuffers, lane_values, static

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LANES, WIDTH = 4, 3

FIELDS = (
    Field(name="rows", shape=(LANES,), dtype=torch.int32, pad=-1, meaning="slot of a row"),
    Field(name="table", shape=(LANES, WIDTH), dtype=torch.int32, meaning="blocks of a slot"),
    Field(name="top_p", shape=(LANES,), dtype=torch.float32, pad=1, meaning="1 is off"),
    Field(name="seed", shape=(LANES,), dtype=torch.int64),
    Field(name="mask", shape=(2, 2, 2), dtype=torch.bool, pad=True),
    Field(name="count", shape=(1,), dtype=torch.int32),
    Field(name="length", shape=(LANES,), dtype=torch.int32, owner="device", pad=7),
    Field(name="state", shape=(2, 5), dtype=torch.bfloat16, owner="device", pad=0.5),
)
HOST = {field.name: field for field in FIELDS if field.owner == "host"}


def make(device: str = "cpu", staging_blocks: int = 3) -> StaticBuffers:
    return StaticBuffers(FIELDS, device, staging_blocks)


def contents(buffers: StaticBuffers) -> dict[str, Any]:
    return {field.name: buffers[field.name].cpu().tolist() for field in FIELDS}


def padded(field: Field) -> Any:
    return torch.full(field.shape, field.pad, dtype=field.dtype).tolist()


# Values of a field as a user would write them.

integers32 = st.integers(-(2**31), 2**31 - 1)
integers64 = st.integers(-(2**63), 2**63 - 1)
floats32 = st.floats(width=32, allow_nan=False)


def lanes_of(item: st.SearchStrategy[Any], lanes: int = LANES) -> st.SearchStrategy[Any]:
    return st.lists(st.none() | item, max_size=lanes)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rows": lanes_of(integers32) | st.lists(integers32, max_size=LANES).map(np.array),
    "table": lanes_of(st.lists(integers32, max_size=WIDTH))
    | st.lists(st.lists(integers32, min_size=2, max_size=2), max_size=LANES)
    | st.integers(0, LANES).map(lambda n: np.arange(n * WIDTH, dtype=np.int64).reshape(n, WIDTH)),
    "top_p": lanes_of(floats32)
    | st.lists(floats32, max_size=LANES).map(lambda items: np.array(items, dtype=np.float32)),
    "seed": lanes_of(integers64),
    "mask": lanes_of(st.lists(st.lists(st.booleans(), max_size=2), max_size=1), lanes=2),
    "count": integers32 | st.lists(integers32, max_size=1),
}


def naive(field: Field, value: Any) -> Any:
    """What a load of `value` leaves in the field, spelled out lane by lane."""
    if isinstance(value, int):
        value = [value]
    expected = padded(field)

    def fill(target: Any, items: Any) -> None:
        for i, item in enumerate(items):
            if item is None:
                continue
            if isinstance(target[i], list):
                fill(target[i], item)
            else:
                target[i] = item

    fill(expected, value.tolist() if isinstance(value, np.ndarray) else value)
    return expected


def poison(buffers: StaticBuffers) -> None:
    for name, field in HOST.items():
        buffers[name].fill_(float("nan") if field.dtype.is_floating_point else 77)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(loads=st.lists(st.fixed_dictionaries({}, optional=VALUES), max_size=6))
def test_loads_against_a_naive_model(device: str, loads: list[dict[str, Any]]) -> None:
    buffers, others = make(device), make(device)
    model = {field.name: padded(field) for field in FIELDS}
    assert contents(buffers) == model
    for sequence, updates in enumerate(loads, start=1):
        poison(buffers)
        poison(others)
        for copied in buffers.load(updates, sequence=sequence):
            others.repeat(copied, bytes(buffers.image(copied)), sequence=sequence)
        for each in (buffers, others):
            each.acknowledge(sequence)
        model |= {name: naive(HOST[name], value) for name, value in updates.items()}
        if device == "cuda":
            torch.cuda.synchronize()
        assert contents(buffers) == model == contents(others)
    buffers.reset()
    assert contents(buffers) == {field.name: padded(field) for field in FIELDS}


@pytest.mark.parametrize("device", DEVICES)
def test_access_and_layout(device: str) -> None:
    buffers = make(device)
    assert buffers.rows is buffers["rows"]
    assert buffers["table"].shape == (LANES, WIDTH)
    for field in FIELDS:
        tensor = buffers[field.name]
        assert (tensor.shape, tensor.dtype) == (field.shape, field.dtype)
        assert tensor.device.type == device
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
    storages = {buffers[name].untyped_storage().data_ptr() for name in HOST}
    assert len(storages) == 1
    assert buffers.nbytes == 64 * len(HOST) + buffers["length"].nbytes + buffers["state"].nbytes
    assert buffers.staging_nbytes == 3 * 64 * len(HOST)
    with pytest.raises(KeyError, match="no field 'nothing': the fields are rows, table"):
        buffers["nothing"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = buffers.nothing


def test_a_scalar_fills_a_field_of_one_lane() -> None:
    buffers = make()
    buffers.load({"count": 5}, sequence=1)
    assert buffers["count"].tolist() == [5]
    buffers.load({"count": np.int64(6)}, sequence=2)
    assert buffers["count"].tolist() == [6]
    buffers.load({"count": []}, sequence=3)
    assert buffers["count"].tolist() == [0]


def test_values_are_copied() -> None:
    buffers = make()
    rows = np.array([1, 2], dtype=np.int32)
    buffers.load({"rows": rows}, sequence=1)
    rows[:] = 9
    buffers.load({}, sequence=2)
    assert buffers["rows"].tolist() == [1, 2, -1, -1]


def test_nan_and_infinity_are_values_of_a_float_field() -> None:
    buffers = make()
    buffers.load({"top_p": [float("nan"), float("inf"), 3]}, sequence=1)
    assert str(buffers["top_p"].tolist()) == "[nan, inf, 3.0, 1.0]"


BAD_LOADS = [
    ({"rowz": [1]}, "no field 'rowz': the host owns rows, table"),
    ({"length": [1]}, "field 'length' is device-owned"),
    ({"rows": [1, 2, 3, 4, 5]}, "field 'rows' has 4 lanes, got 5"),
    ({"rows": [None] * 5}, "field 'rows' has 4 lanes, got 5"),
    ({"rows": np.zeros(5, dtype=np.int32)}, "field 'rows' has 4 lanes, got 5"),
    ({"table": [[1]] * 5}, "field 'table' has 4 lanes, got 5"),
    ({"table": [[1], [1, 2]] * 3}, "field 'table' has 4 lanes, got 6"),
    ({"table": [[1, 2, 3, 4]]}, r"field 'table' values of shape \(1, 4\) do not fit in \(4, 3\)"),
    ({"table": [[1, 2, 3, 4], None]}, r"'table' values of shape \(4,\) do not fit in \(3,\)"),
    ({"table": [1, 2]}, r"'table' values of shape \(2,\) do not fit in \(4, 3\)"),
    ({"table": [[[1]], None]}, r"'table' values of shape \(1, 1\) do not fit in \(3,\)"),
    ({"rows": [[1], [2]]}, r"'rows' values of shape \(2, 1\) do not fit in \(4,\)"),
    ({"rows": 3}, "field 'rows' takes a list of up to 4 lanes, got 3"),
    ({"rows": [2**31]}, "field 'rows' takes int32, 2147483648 is outside its range"),
    ({"rows": [1, -(2**31) - 1]}, "field 'rows' takes int32, -2147483649 is outside"),
    ({"table": [[1], [2**31, 0]]}, "field 'table' takes int32, 2147483648 is outside"),
    ({"rows": [2**70]}, "field 'rows'.*1180591620717411303424"),
    ({"seed": [2**63]}, "field 'seed' takes int64, 9223372036854775808 is outside"),
    ({"count": 2**40}, "field 'count' takes int32, 1099511627776 is outside"),
    ({"mask": [[[2]]]}, "field 'mask' takes bool, 2 is outside its range"),
    ({"top_p": [1e39]}, r"field 'top_p' takes float32, 1e\+39 is outside its range"),
    ({"rows": [1.5]}, "field 'rows' takes int32, got float64 such as .*1.5"),
    ({"rows": ["a"]}, "field 'rows' takes int32, got <U1 such as .*'a'"),
    ({"top_p": "high"}, "field 'top_p' takes a list of up to 4 lanes, got 'high'"),
    ({"table": [["a"], None]}, "field 'table' takes int32, got <U1"),
    ({"table": [[[1], [2, 3]], None]}, "field 'table' lane 0 is no array of numbers"),
]


@pytest.mark.parametrize(("updates", "message"), BAD_LOADS)
def test_a_bad_load_changes_nothing(updates: dict[str, Any], message: str) -> None:
    buffers = make(staging_blocks=1)
    buffers.load({"rows": [3, 1], "top_p": [0.5], "seed": [4]}, sequence=1)
    buffers.acknowledge(1)
    before = contents(buffers)
    with pytest.raises(ValueError, match=message):
        buffers.load({"rows": [0, 0], "count": [9]} | updates, sequence=2)
    assert contents(buffers) == before
    # Neither the host's image nor the staging ring was touched.
    buffers.load({}, sequence=2)
    assert contents(buffers) == before


def test_staging_blocks_wait_for_their_replay() -> None:
    buffers = make(staging_blocks=2)
    buffers.load({"count": 1}, sequence=1)
    buffers.load({"count": 2}, sequence=4)
    with pytest.raises(RuntimeError, match=r"all 2 staging blocks .* replay 1, .* up to 0"):
        buffers.load({"count": 3}, sequence=5)
    assert buffers["count"].tolist() == [2]
    buffers.acknowledge(3)
    buffers.load({"count": 3}, sequence=5)
    with pytest.raises(RuntimeError, match="replay 4, acknowledged are those up to 3"):
        buffers.load({"count": 4}, sequence=5)
    buffers.acknowledge(2)  # late news: nothing is taken back
    buffers.acknowledge(4)
    buffers.load({"count": 4}, sequence=5)
    assert buffers["count"].tolist() == [4]


def test_a_repeated_load_is_one() -> None:
    """It copies the same bytes, takes a staging block, and counts replays."""
    buffers, others = make(), make(staging_blocks=1)
    (copied,) = buffers.load({"rows": LaneUpdate(1, [3, 4])}, sequence=2)
    assert copied.stop - copied.start == 8 == len(buffers.image(copied))
    others["table"].fill_(99)
    others.repeat(copied, buffers.image(copied), sequence=2)
    assert others["rows"].tolist() == [-1, 3, 4, -1] and (others["table"] == 99).all()
    with pytest.raises(RuntimeError, match="all 1 staging blocks are in flight"):
        others.repeat(copied, buffers.image(copied), sequence=3)
    others.acknowledge(2)
    with pytest.raises(ValueError, match="sequence=2: the next replay to be launched is 3"):
        others.repeat(copied, buffers.image(copied), sequence=2)


def test_a_sequence_that_goes_back() -> None:
    buffers = make()
    buffers.load({"count": 1}, sequence=5)
    with pytest.raises(ValueError, match="sequence=4: the next replay to be launched is 5"):
        buffers.load({"count": 2}, sequence=4)
    buffers.acknowledge(8)
    with pytest.raises(ValueError, match="sequence=8: the next replay to be launched is 9"):
        buffers.load({"count": 2}, sequence=8)
    buffers.reset()
    buffers.load({"count": 3}, sequence=1)
    assert buffers["count"].tolist() == [3]


def test_an_older_acknowledgement_takes_nothing_back() -> None:
    buffers = make(staging_blocks=1)
    buffers.load({"count": 1}, sequence=4)
    buffers.acknowledge(4)
    buffers.acknowledge(2)
    with pytest.raises(ValueError, match=r"sequence=4: the next replay to be launched is 5 or"):
        buffers.load({"count": 2}, sequence=4)
    buffers.load({"count": 2}, sequence=5)
    assert buffers.count.tolist() == [2]


@pytest.mark.parametrize("acknowledged", [0, 7])
def test_replays_count_from_one_after_a_reset(acknowledged: int) -> None:
    """With every staging block free, whether or not the replays after them had published."""
    buffers = make(staging_blocks=2)
    for sequence in (6, 7):
        buffers.load({"count": sequence}, sequence=sequence)
    buffers.acknowledge(acknowledged)
    buffers.reset()
    for sequence in (1, 2):
        buffers.load({"count": sequence}, sequence=sequence)
    with pytest.raises(RuntimeError, match=r"oldest waits for replay 1, .* to 0$"):
        buffers.load({"count": 3}, sequence=3)
    buffers.acknowledge(1)
    buffers.load({"count": 3}, sequence=3)
    assert buffers.count.tolist() == [3]


def test_addresses() -> None:
    buffers = make()
    with pytest.raises(RuntimeError, match="not recorded yet"):
        buffers.check_addresses()
    buffers.record_addresses()
    buffers.load({"rows": [1]}, sequence=1)
    buffers.reset()
    buffers.check_addresses()
    buffers.record_addresses()
    then = buffers.addresses()["length"]
    moved = torch.zeros(LANES, dtype=torch.int32)
    buffers["length"].data = moved
    message = f"'length' moved from {then:#x} to {moved.data_ptr():#x} after capture"
    with pytest.raises(RuntimeError, match=message):
        buffers.check_addresses()
    with pytest.raises(RuntimeError, match=message):
        buffers.record_addresses()


def test_describe() -> None:
    lines = make().describe().splitlines()
    assert lines[0].split() == ["field", "owner", "type", "pad", "size", "meaning"]
    assert lines[1] == "rows    host    int32[4]        -1    16 B  slot of a row"
    assert lines[-1] == "state   device  bfloat16[2, 5]  0.5   20 B"


def test_use_after_close() -> None:
    buffers = make()
    buffers.record_addresses()
    buffers.close()
    buffers.close()
    for use in (
        buffers.check_addresses,
        buffers.record_addresses,
        buffers.reset,
        lambda: buffers["rows"],
        lambda: buffers.rows,
        lambda: buffers.load({}, sequence=1),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (Field(name="load", shape=(1,), dtype=torch.int32), "'load' cannot name a field"),
        (Field(name="nbytes", shape=(1,), dtype=torch.int32), "'nbytes' cannot name a field"),
        (Field(name="_x", shape=(1,), dtype=torch.int32), "'_x' cannot name a field"),
        (Field(name="a b", shape=(1,), dtype=torch.int32), "'a b' cannot name a field"),
        (Field(name="rows", shape=(1,), dtype=torch.int32), "'rows' is in the table 2 times"),
        (Field(name="x", shape=(), dtype=torch.int32), r"'x': shape \(\) has no lanes"),
        (Field(name="x", shape=(2, 0), dtype=torch.int32), r"'x': shape \(2, 0\) has no lanes"),
        (Field(name="x", shape=(1,), dtype=torch.bfloat16), "cannot write torch.bfloat16"),
        (Field(name="x", shape=(1,), dtype=torch.uint8, pad=-1), "'x' takes uint8, -1 is outside"),
        (Field(name="x", shape=(1,), dtype=torch.int32, pad=0.5), "'x' takes int32, got float64"),
        (
            Field(name="x", shape=(1,), dtype=torch.int32, owner="both"),  # type: ignore[arg-type]
            "owner='both' is neither host nor device",
        ),
    ],
)
def test_a_table_that_cannot_be(field: Field, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticBuffers([FIELDS[0], field], "cpu")


def test_it_takes_a_staging_block() -> None:
    with pytest.raises(ValueError, match="staging_blocks=0"):
        make(staging_blocks=0)


def test_device_owned_fields_alone() -> None:
    buffers = StaticBuffers([field for field in FIELDS if field.owner == "device"], "cpu")
    buffers.load({}, sequence=1)
    assert buffers["length"].tolist() == [7] * LANES


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["runtime", "torch"])
def test_copies_in_flight_are_not_overwritten(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The device runs far behind the host: each snapshot must hold its own load's values.
    if library == "torch":
        monkeypatch.setattr(static, "runtime", lambda: None)
    buffers = make("cuda", staging_blocks=8)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    snapshots = [torch.empty(LANES, dtype=torch.int32, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
    for i, snapshot in enumerate(snapshots):
        buffers.load({"rows": [i, i + 1]}, sequence=i + 1, stream=stream)
        with torch.cuda.stream(stream):
            snapshot.copy_(buffers["rows"])
    with torch.cuda.stream(stream):
        assert not stream.query(), "the copies were meant to be waiting"
        with pytest.raises(RuntimeError, match="all 8 staging blocks are in flight"):
            buffers.load({"rows": []}, sequence=9)
    stream.synchronize()
    assert [s.tolist() for s in snapshots] == [[i, i + 1, -1, -1] for i in range(8)]


# Values in range and out of range, for fields of each kind.
ANYTHING = st.lists(
    st.none()
    | st.booleans()
    | st.integers(-(2**66), 2**66)
    | st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 10**30, np.int32(7), np.float32(0.5), "7"])
    | st.floats()
    | st.sampled_from([1e39, -1e39, 1e38, 3.5e38]),
    max_size=LANES + 1,
)


@given(value=ANYTHING | ANYTHING.map(tuple) | st.lists(ANYTHING, max_size=LANES + 1))
def test_plain_lists_are_taken_and_refused_as_all_others(value: Any) -> None:
    """The fast path of a load agrees with the slow one, which uses arrays."""

    def outcome(name: str) -> Any:
        buffers = make()
        try:
            buffers.load({name: value}, sequence=1)
        except (ValueError, TypeError) as error:
            return type(error)
        return repr(contents(buffers)[name])

    def long_way(self: Any, value: Any) -> None:
        return None

    for name in ("rows", "top_p", "seed", "table"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            quick = outcome(name)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(lane_values.LaneValues, "_plain_numbers", long_way)
            patch.setattr(lane_values.LaneValues, "_plain_lists", long_way)
            assert outcome(name) == quick, name


@pytest.mark.gpu
def test_a_load_neither_synchronises_nor_allocates() -> None:
    buffers = make("cuda")
    buffers.load({"rows": [1]}, sequence=1)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for sequence in range(2, 50):
            buffers.acknowledge(sequence - 1)
            buffers.load({"rows": [1, None, 2], "table": [[1], [2, 3]]}, sequence=sequence)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


class Library:
    """Stands in for CUDA's runtime: a copy takes place at once, or fails with `status`."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[str] = []

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> int:
        self.calls.append(f"copy {size} bytes, kind {kind}, on {stream}")
        if not self.status:
            ctypes.memmove(target, source, size)
        return self.status

    def cudaGetLastError(self) -> int:
        self.calls.append("cleared")
        return self.status


class RawStream:
    cuda_stream = 2**47


@pytest.mark.parametrize("status", [0, 400])
def test_a_copy_to_a_stream_is_one_call_and_a_refused_one_goes_to_torch(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(status)
    monkeypatch.setattr(static, "runtime", lambda: library)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    buffers = make()
    stream: Any = RawStream()
    buffers.load({"count": 5, "rows": [3]}, sequence=1, stream=stream)
    buffers.load({"rows": LaneUpdate(2, [8, 9])}, sequence=2, stream=stream)
    assert buffers["count"].tolist() == [5] and buffers["rows"].tolist() == [3, -1, 8, 9]
    failed = ["cleared"] if status else []
    whole = buffers.staging_nbytes // 3
    assert library.calls == [
        f"copy {whole} bytes, kind 1, on {2**47}",
        *failed,
        f"copy 8 bytes, kind 1, on {2**47}",
        *failed,
    ]


# Parts.


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_changes_its_lanes_and_copies_no_others(device: str) -> None:
    buffers = make(device)
    table = [[lane + 1] * WIDTH for lane in range(LANES)]
    buffers.load({"table": table, "rows": [5, 6]}, sequence=1)
    buffers["table"][0] = 99  # as no one may: shows what is copied
    buffers.load({"table": LaneUpdate(1, [[7, 8, 9], [4]])}, sequence=2)
    found = buffers["table"].cpu().tolist()
    assert found == [[99] * WIDTH, [7, 8, 9], [4, 0, 0], table[3]]
    assert buffers["rows"].cpu().tolist() == [5, 6, -1, -1]
    # The image has them, so a copy of the whole image includes them.
    buffers.load({"count": 1}, sequence=3)
    assert buffers["table"].cpu().tolist() == [table[0], [7, 8, 9], [4, 0, 0], table[3]]
    # With two parts, all between them; with a part and a whole field, the group.
    buffers["table"][:] = 99
    buffers.acknowledge(3)
    parts = {"table": LaneUpdate(0, [[1] * WIDTH]), "rows": LaneUpdate(LANES - 1, [3])}
    buffers.load(parts, sequence=4)
    assert buffers["table"].cpu().tolist()[1:] == [[99] * WIDTH] * (LANES - 1)
    assert buffers["rows"].cpu().tolist() == [5, 6, -1, 3]
    buffers.load({"count": 2, "rows": LaneUpdate(0, [])}, sequence=5)
    assert buffers["table"].cpu().tolist() == [[1] * WIDTH, [7, 8, 9], [4, 0, 0], table[3]]


@pytest.mark.parametrize("names", [("rows", "top_p"), ("top_p", "rows")])
def test_parts_of_several_fields_arrive_in_one_copy(names: tuple[str, str]) -> None:
    buffers = make()
    buffers.load({name: LaneUpdate(1, [3, 4]) for name in names}, sequence=1)
    assert buffers["rows"].tolist() == [-1, 3, 4, -1]
    assert buffers["top_p"].tolist() == [1, 3, 4, 1]


def test_a_part_past_the_lanes_is_refused() -> None:
    buffers = make()
    before = contents(buffers)
    for part in (LaneUpdate(3, [1, 2]), LaneUpdate(-1, [1]), LaneUpdate(5, [])):
        with pytest.raises(ValueError, match=r"'rows' has 4 lanes, got \d from lane -?\d on"):
            buffers.load({"rows": part}, sequence=1)
    assert contents(buffers) == before
