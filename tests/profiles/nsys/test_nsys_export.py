"""The reader of nsys exports: both modes, tables that are missing, files that are broken.

The files are made after the documented schema; no real export was at hand.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from graphengine.profiles.nsys.nsys_export import read_export
from timelines.nsys_files import GLOBAL_PID, GLOBAL_TID, KERNELS, Export
from timelines.simulated_run import simulate

MODES = ("graph", "node")


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


@pytest.fixture
def export(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An export of a run with a prefill, in the mode of the parameter ("graph" without one)."""
    mode = getattr(request, "param", "graph")
    return Export(tmp_path / "run.sqlite", simulate(60, prefills={20}), mode=mode).path


@pytest.mark.parametrize("export", MODES, indirect=True)
def test_replays_have_times_buckets_and_launches(export: Path) -> None:
    timeline, run = simulate(60, prefills={20}), read_export(export)
    replays = run.replays
    assert run.notes == () and len(replays) == 61
    assert replays.device_us.tolist() == pytest.approx([m.device_us for m in timeline.replays])
    assert replays.launched.tolist() == [made.launched for made in timeline.replays]
    assert replays.kind.tolist().count("prefill") == 1
    assert set(replays.bucket.tolist()) == {"decode/1", "prefill/64"}
    assert replays.live[replays.kind == "prefill"].tolist() == [60]
    assert replays.prompt_tokens.sum() == 60
    assert run.environment == {"device": "NVIDIA H200"}


@pytest.mark.parametrize("export", MODES, indirect=True)
def test_tokens_arrive_when_the_host_has_read_them(export: Path) -> None:
    timeline, run = simulate(60, prefills={20}), read_export(export)
    expected = [made.delivered or np.nan for made in timeline.replays]
    np.testing.assert_array_equal(run.replays.arrived, expected)
    assert len(run.gaps) == 58


@pytest.mark.parametrize("export", ["node"], indirect=True)
def test_kernels_are_those_inside_replays(export: Path) -> None:
    kernels = read_export(export).kernels
    assert kernels is not None
    found = {(kernel.bucket, kernel.name): len(kernel.times_us) for kernel in kernels}
    assert found == {
        (bucket, name): count
        for bucket, count in (("decode/1", 60), ("prefill/64", 1))
        for name, _ in KERNELS
    }


def test_graph_mode_has_no_kernels(export: Path) -> None:
    run = read_export(export)
    assert run.kernels is None and run.source == "nsys graph"


def test_ranges_are_those_of_the_engines_domain(export: Path) -> None:
    run = read_export(export)
    assert run.ranges is not None
    assert {name: len(spans) for name, spans in run.ranges.items()} == {
        "step/plan": 60, "step/load": 60, "step/replay": 60, "step/collect": 59, "prefill": 1,
    }  # fmt: skip


def test_ranges_that_never_ended_are_left_out(export: Path) -> None:
    change(export, "UPDATE NVTX_EVENTS SET end = NULL WHERE start > 2000000")
    ranges = read_export(export).ranges
    assert ranges is not None and 0 < len(ranges["step/plan"]) < 60


def test_text_may_stand_in_the_event_itself(export: Path) -> None:
    change(
        export,
        "UPDATE NVTX_EVENTS SET text = (SELECT value FROM StringIds WHERE id = textId), "
        "textId = NULL WHERE textId IS NOT NULL",
        "UPDATE NVTX_EVENTS SET uint64Value = int64Value, int64Value = NULL",
    )
    assert set(read_export(export).replays.bucket.tolist()) == {"decode/1", "prefill/64"}


def test_without_ranges_graphs_have_numbers(tmp_path: Path) -> None:
    path = Export(tmp_path / "x.sqlite", simulate(30, larger={5}), mode="graph", ranges=False).path
    run = read_export(path)
    assert "no range of the domain 'graphengine'" in run.notes[0]
    assert all(name.startswith("graph ") for name in run.replays.bucket)
    assert len(set(run.replays.bucket.tolist())) == 2
    assert run.ranges is None and not run.stages
    # Then there are only the device's times.
    assert "on the device" in run.gap_basis and len(run.gaps) == 29


def test_without_the_table_of_ranges(export: Path) -> None:
    change(export, "DROP TABLE NVTX_EVENTS")
    assert read_export(export).notes == (
        "the export has no NVTX ranges: stages and buckets are not known",
    )


def test_times_that_cupti_could_not_tell(export: Path) -> None:
    change(
        export,
        "UPDATE CUPTI_ACTIVITY_KIND_GRAPH_TRACE SET start = 0, end = 0 WHERE correlationId = 105",
    )
    run = read_export(export)
    assert run.notes == ("CUPTI could not time 1 of 61 replays",)
    assert np.isnan(run.replays.device_us).sum() == 1 and len(run.gaps) == 57


def test_the_busiest_process_is_shown(export: Path) -> None:
    other = GLOBAL_PID + (1 << 24)
    change(
        export,
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES "
        f"(1, 2, 0, 1, NULL, 7, 100, {other}, 1, 1)",
    )
    run = read_export(export)
    assert "2 processes replayed graphs: only 4321" in run.notes[0] and len(run.replays) == 61


def test_another_process_is_left_out_with_its_ranges_and_calls(export: Path) -> None:
    """Ids of domains are valid in one process: in another 7 is another library's, and ours is 3."""
    expected = read_export(export)
    theirs = 1 << 24
    change(
        export,
        "INSERT INTO NVTX_EVENTS (start, end, eventType, textId, globalTid, domainId, int64Value) "
        "SELECT start + 150000, end + 150000, eventType, textId, globalTid + "
        f"{theirs}, domainId, 32 << 32 | 2 FROM NVTX_EVENTS WHERE eventType = 59",
        "INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid, domainId) VALUES "
        f"(0, 75, 'NCCL', {GLOBAL_TID + theirs}, 7), "
        f"(0, 75, 'graphengine', {GLOBAL_TID + theirs}, 8)",
        "INSERT INTO StringIds VALUES (900, 'cudaDeviceSynchronize')",
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES "
        f"(100, 200, 0, {GLOBAL_TID + theirs}, 9000, 900, 0, NULL)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES "
        f"(100, 200, 0, 7, 9, {GLOBAL_PID + theirs}, 64, 1, NULL)",
    )
    run = read_export(export)
    assert run.notes == () and run.ranges is not None and expected.ranges is not None
    assert run.ranges.keys() == expected.ranges.keys()
    for name, spans in expected.ranges.items():
        np.testing.assert_array_equal(run.ranges[name], spans)
    assert run.replays.bucket.tolist() == expected.replays.bucket.tolist()
    assert run.activities is not None and not len(run.activities.name)


def test_ranges_are_known_by_their_names_where_no_domain_is(export: Path) -> None:
    expected = read_export(export)
    change(
        export,
        "DELETE FROM NVTX_EVENTS WHERE eventType = 75",
        "INSERT INTO StringIds VALUES (900, 'ncclAllReduce')",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, textId, globalTid, domainId) VALUES "
        f"(9, 10, 59, 900, {GLOBAL_TID}, 7)",
    )
    run = read_export(export)
    assert "taken by their names" in run.notes[0]
    assert run.replays.bucket.tolist() == expected.replays.bucket.tolist()
    assert run.ranges is not None and "ncclAllReduce" not in run.ranges


def test_launches_that_are_not_there(export: Path) -> None:
    change(export, "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId < 110")
    run = read_export(export)
    assert run.notes == ("the launch of 10 of 61 replays is not in the export",)
    assert np.isnan(run.replays.launch).sum() == 10


def test_calls_and_copies_outside_of_graphs_are_activities(export: Path) -> None:
    change(
        export,
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES "
        f"(100, 200, 0, 7, 9, {GLOBAL_PID}, 64, 1, NULL)",
        "CREATE TABLE OSRT_API (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)",
        "INSERT INTO StringIds VALUES (900, 'poll')",
        f"INSERT INTO OSRT_API VALUES (300, 400, {GLOBAL_TID}, 900)",
    )
    seen = read_export(export).activities
    assert seen is not None
    assert seen.name.tolist() == ["memcpy", "host poll"]
    assert seen.device.tolist() == [True, False]


@pytest.mark.parametrize("export", ["node"], indirect=True)
def test_columns_of_other_versions_may_be_missing(export: Path) -> None:
    change(
        export,
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN shortName",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN greenContextId",
        "ALTER TABLE NVTX_EVENTS DROP COLUMN uint64Value",
        "DROP TABLE TARGET_INFO_GPU",
    )
    run = read_export(export)
    assert run.environment is None and run.kernels is not None
    assert run.kernels[0].name == f"void {KERNELS[0][0]}(float*)"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["DROP TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE"], "no replay of a CUDA graph"),
        (["DELETE FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE"], "no replay of a CUDA graph"),
        (
            ["ALTER TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE RENAME COLUMN end TO finish"],
            "table CUPTI_ACTIVITY_KIND_GRAPH_TRACE has no column end",
        ),
        (
            ["UPDATE CUPTI_ACTIVITY_KIND_GRAPH_TRACE SET start = 'soon' WHERE correlationId = 105"],
            "table CUPTI_ACTIVITY_KIND_GRAPH_TRACE: start='soon' is no integer",
        ),
        (
            ["UPDATE CUPTI_ACTIVITY_KIND_GRAPH_TRACE SET correlationId = x'00ff'"],
            "correlationId=b'.*' is no integer",
        ),
        (["UPDATE NVTX_EVENTS SET int64Value = 1.5"], "int64Value=1.5 is no integer"),
        (["UPDATE NVTX_EVENTS SET end = 'x' WHERE end > 0"], "end='x' is no integer"),
        (
            ["DROP TABLE StringIds", "CREATE TABLE StringIds (id INTEGER, text TEXT)"],
            "table StringIds has no column value",
        ),
        (
            ["ALTER TABLE NVTX_EVENTS DROP COLUMN eventType"],
            "table NVTX_EVENTS has no column eventType",
        ),
    ],
)
def test_exports_without_replays_are_refused(
    export: Path, statements: list[str], message: str
) -> None:
    change(export, *statements)
    with pytest.raises(ValueError, match=message) as error:
        read_export(export)
    assert str(error.value).count(str(export)) == 1


def test_another_database_is_refused_with_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    change(path, "CREATE TABLE songs (name TEXT)")
    with pytest.raises(ValueError, match=r"no table of CUDA activity.*its tables: songs"):
        read_export(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_file_that_was_cut_off_is_refused(export: Path, share: float) -> None:
    data = export.read_bytes()
    export.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match="cut off"):
        read_export(export)


def test_a_header_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"SQLite format 3\x00")
    with pytest.raises(ValueError, match="cut off"):
        read_export(path)


def test_damage_in_the_middle_is_refused(export: Path) -> None:
    data = bytearray(export.read_bytes())
    data[4096:-4096] = bytes(len(data) - 8192)
    export.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="damaged or cut off"):
        read_export(export)


def test_reading_changes_nothing(export: Path) -> None:
    before = export.read_bytes()
    read_export(export)
    assert export.read_bytes() == before
    assert [path.name for path in export.parent.iterdir()] == [export.name]
