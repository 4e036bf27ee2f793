"""assert_no_dangling_pointers: over a stand-in for torch's allocator, and natively."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.buckets import CapturedGraph, KernelLaunch
from graphengine.testing import GraphCheckError, assert_no_dangling_pointers

START, SIZE = 0x7F00_0000_0000, 512


class Allocator:
    """Blocks of 512 bytes in one segment of the default pool, and one in a graph's pool."""

    def __init__(self) -> None:
        self.states = ["active_allocated"] * 3
        self.sizes = [SIZE] * 3
        self.segments = 2

    def snapshot(self) -> list[dict[str, Any]]:
        pairs = zip(self.sizes, self.states, strict=True)
        blocks = [{"size": size, "state": state} for size, state in pairs]
        temporary = [{"size": SIZE, "state": "inactive"}]
        return [
            segment(START + 2**20, temporary, pool=(0, 3)),
            segment(START, blocks),
            segment(START, blocks, device=1),
        ][: self.segments]


def segment(
    address: int, blocks: list[Any], *, pool: tuple[int, int] = (0, 0), device: int = 0
) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "segment_pool_id": pool,
        "blocks": blocks,
    }


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", allocator.snapshot)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return allocator


def pointer(offset: int) -> bytes:
    return (START + offset).to_bytes(8, "little")


def launch(*parameters: bytes | int, name: str = "attend", path: str = "0") -> KernelLaunch:
    data = (each if isinstance(each, bytes) else each.to_bytes(4, "little") for each in parameters)
    return KernelLaunch(path=path, name=name, parameters=tuple(data))


def test_memory_in_use_passes(allocator: Allocator) -> None:
    with assert_no_dangling_pointers([launch(pointer(0), pointer(600), 3)]) as check:
        check.check()


def test_an_inner_address_belongs_to_its_block(allocator: Allocator) -> None:
    check = assert_no_dangling_pointers([launch(pointer(0)), launch(3, pointer(600), path="4/0/2")])
    allocator.states[1] = "active_awaiting_free"
    message = (
        r"1 of 2 addresses in the graph are of memory that was freed: node 4/0/2 \(attend\), "
        r"parameter 1: 0x7f0000000258 in 512 B at 0x7f0000000200, freed\. Replays go on using it"
    )
    with pytest.raises(GraphCheckError, match=message):
        check.check()


def test_addresses_are_found_in_structs(allocator: Allocator) -> None:
    """Torch hands a kernel the pointers of all its operands in a struct."""
    check = assert_no_dangling_pointers([launch(8, bytes(8) + pointer(512) + pointer(1024))])
    allocator.states[2] = "inactive"
    with pytest.raises(GraphCheckError, match=r"1 of 2 addresses.*parameter 1: 0x7f0000000400"):
        check.check()


def test_a_block_that_was_split_is_another(allocator: Allocator) -> None:
    check = assert_no_dangling_pointers([launch(pointer(512))])
    allocator.sizes = [SIZE, 2 * SIZE]
    allocator.states = ["active_allocated"] * 2
    with pytest.raises(
        GraphCheckError, match=r"now in another block, of 1\.0 KiB at 0x7f0000000200"
    ):
        check.check()


def test_memory_that_the_driver_has_back_is_gone(allocator: Allocator) -> None:
    check = assert_no_dangling_pointers([launch(pointer(0))])
    allocator.segments = 1
    with pytest.raises(GraphCheckError, match="freed and returned to the driver"):
        check.check()


def test_what_is_freed_already_is_told_at_once(allocator: Allocator) -> None:
    allocator.states[0] = "inactive"
    with pytest.raises(GraphCheckError, match=r"1 of 2 addresses.*which is freed already"):
        assert_no_dangling_pointers([launch(pointer(0), pointer(512))])
    # In a struct it may be a number that was left in unused bytes.
    assert_no_dangling_pointers([launch(pointer(0) + pointer(512))])


def test_memory_of_a_graphs_own_pool_is_its_own(allocator: Allocator) -> None:
    assert_no_dangling_pointers([launch(pointer(2**20), pointer(0))]).check()
    message = "nothing to watch: no parameter of 1 kernels is an address of memory"
    with pytest.raises(ValueError, match=message):
        assert_no_dangling_pointers([launch(pointer(2**20))])


def test_tensors_are_named(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 4)
    address = x.data_ptr()
    blocks = [{"size": SIZE, "state": "active_allocated"}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment(address, blocks)])
    check = assert_no_dangling_pointers(
        [launch((address + 8).to_bytes(8, "little"))], buffers={"x": x}
    )
    blocks[0]["state"] = "inactive"
    with pytest.raises(GraphCheckError, match=r"freed: x \(float32 \[4, 4\]\): node 0 \(attend\)"):
        check.check()


def test_a_long_list_is_cut(allocator: Allocator) -> None:
    check = assert_no_dangling_pointers([launch(pointer(n), path=str(n)) for n in range(12)])
    allocator.states[0] = "inactive"
    with pytest.raises(GraphCheckError, match=r"12 of 12.*; and 2 more. Replays"):
        check.check()


def test_an_error_of_the_block_passes(allocator: Allocator) -> None:
    with pytest.raises(KeyError), assert_no_dangling_pointers([launch(pointer(0))]):
        allocator.states[0] = "inactive"
        raise KeyError


def test_frees_are_recorded_in_the_block(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of memory that another tensor of the same size has taken since."""
    events: list[dict[str, Any]] = []
    modes: list[Any] = []
    here = {"filename": "/project/serve.py", "line": 31, "name": "refresh"}
    torchs = {"filename": "/site-packages/torch/_tensor.py", "line": 1, "name": "set_"}

    def free(offset: int, frames: list[Any]) -> None:
        event = {"addr": START + offset, "frames": frames}
        events.extend({"action": f"free_{what}", **event} for what in ("requested", "completed"))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda mode, **options: modes.append(mode)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [list(events)]})
    launches = [launch(pointer(0), pointer(512))]
    free(0, [here])
    with assert_no_dangling_pointers(launches):
        free(1024, [here])
    assert modes == ["all", None]
    message = r"1 of 2 .* 0x7f0000000000, freed at /project/serve\.py:31 in refresh\. Replays"
    with pytest.raises(GraphCheckError, match=message), assert_no_dangling_pointers(launches):
        free(0, [torchs, here])
    with (
        pytest.raises(GraphCheckError, match=r"0x7f0000000200, freed\. Replays"),
        assert_no_dangling_pointers(launches),
    ):
        free(512, [torchs])


def test_what_cannot_be_read_is_told(allocator: Allocator) -> None:
    unknown = KernelLaunch(path="3", name="norm", parameters=None)
    message = r"cannot be told: the driver does not show the parameters of 1 of 2 kernels, first "
    with pytest.raises(GraphCheckError, match=message + r"node 3 \(norm\)"):
        assert_no_dangling_pointers([launch(pointer(0)), unknown])
    with pytest.raises(ValueError, match=r"is of type int: give a torch.cuda.CUDAGraph"):
        assert_no_dangling_pointers(7)  # type: ignore[arg-type]
    captured = CapturedGraph(lambda: None, name="decode/8", device="cpu")
    with pytest.raises(ValueError, match="bucket 'decode/8' on cpu has no captured graph"):
        assert_no_dangling_pointers(captured)


@pytest.mark.gpu
def test_memory_that_another_tensor_took_is_seen_while_recording_natively() -> None:
    """Blocks alone look the same as before; the place where the memory was freed is named."""
    held = {"x": torch.zeros(1024, device="cuda")}
    y = torch.zeros(1024, device="cuda")
    captured = CapturedGraph(lambda: torch.add(held["x"], 1, out=y), name="b", device="cuda")
    captured.capture()
    check = assert_no_dangling_pointers(captured, buffers=dict(held))
    with check:
        captured.replay()
    message = r"freed: x \(float32 \[1024\]\): node 0 .*freed at .*test_dangling\.py:\d+ in test_"
    with pytest.raises(GraphCheckError, match=message), check:
        address = held["x"].data_ptr()
        del held["x"]
        # Free blocks of earlier tests may be given out before it.
        others = [torch.ones(1024, device="cuda") for _ in range(1000)]
        assert address in {other.data_ptr() for other in others}, "the block is given out again"
    captured.close()
