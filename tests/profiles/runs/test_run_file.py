"""The reader of recordings: columns, gaps, stages, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.profiles.runs.breakdown import covered
from graphengine.profiles.runs.run_file import (
    Run,
    device_ends,
    merged,
    read_recording,
    recording_from_lines,
)
from timelines.simulated_run import recording_lines, simulate, write_recording

HEADER = {"schema": 1, "kind": "header"}


def replay(sequence: int, **values: Any) -> dict[str, Any]:
    base = {"kind": "replay", "sequence": sequence, "bucket": "decode/1/fast", "type": "decode"}
    return {**base, "step": sequence, "rows": 1, "live": 1} | values


def read(*documents: dict[str, Any]) -> Run:
    return recording_from_lines([json.dumps(one) for one in documents], Path("run.jsonl"))


def test_columns_are_those_of_the_lines(tmp_path: Path) -> None:
    timeline = simulate(50, prefills={20})
    run = read_recording(write_recording(tmp_path / "run.jsonl", timeline))
    assert (run.source, run.notes, run.dropped) == ("recorder", (), 0)
    assert len(run.replays) == 51
    assert run.replays.bucket.tolist() == [made.bucket for made in timeline.replays]
    assert run.replays.launched.tolist() == [made.launched for made in timeline.replays]
    assert run.replays.prompt_tokens.sum() == 60
    # The last replay was never collected.
    assert np.isnan(run.replays.arrived).tolist() == [False] * 50 + [True]
    assert run.engine is not None and run.engine["lookahead"] == 1
    assert run.captures is not None and len(run.captures) == 3
    assert run.requests is not None and run.requests.reason.tolist() == ["length"]


def test_gaps_are_between_the_reads_of_each_request() -> None:
    run = read(
        HEADER,
        replay(1, read=1000, lanes=[[7, 1], [8, 1]], live=2),
        replay(2, read=3000, lanes=[[7, 2], [8, 0]], live=2),
        replay(3, read=6000, lanes=[[8, 1]]),
        replay(4, read=None, lanes=[[8, 1]]),
    )
    assert run.gaps.milliseconds.tolist() == [0.002, 0.005]
    assert run.gaps.request.tolist() == [7, 8]
    assert run.gaps.first.tolist() == [0, 0] and run.gaps.last.tolist() == [1, 2]


def test_a_prefill_and_a_decode_of_one_step_come_at_once() -> None:
    prefill = replay(1, type="prefill", bucket="prefill/16", read=1000, lanes=[[7, 1]], step=1)
    decode = replay(2, read=1000, lanes=[[7, 1]], step=1)
    run = read(HEADER, prefill, decode, replay(3, read=2500, lanes=[[7, 1]], step=2))
    assert run.gaps.milliseconds.tolist() == [0.0015]


def test_load_ends_where_the_first_launch_begins() -> None:
    """In a step that launches two graphs the second one's `replay` comes after the first."""
    stamps = {"step": 1, "plan": 0, "load": 10}
    prefill = replay(1, type="prefill", bucket="prefill/16", replay=15, launched=900, **stamps)
    run = read(HEADER, prefill, replay(2, replay=902, launched=905, **stamps))
    assert run.stages["load"].tolist() == [[10, 15]]
    assert run.stages["launch"].tolist() == [[15, 900], [902, 905]]


@pytest.mark.parametrize("told", [{"recording": 2}, {}])
def test_no_gap_reaches_over_what_was_not_recorded(told: dict[str, int]) -> None:
    """In files without a recording number, skipped replays show a new recording."""
    sequence = 3 if told else 9
    run = read(
        HEADER,
        replay(1, read=1000, lanes=[[7, 1]]),
        replay(2, read=2000, lanes=[[7, 1]]),
        replay(sequence, read=8000, lanes=[[7, 1]], **told),
        replay(sequence + 1, read=9000, lanes=[[7, 1]], **told),
    )
    assert run.gaps.begin.tolist() == [1000, 8000] and run.gaps.end.tolist() == [2000, 9000]


def test_what_is_missing_is_not_a_number() -> None:
    run = read(HEADER, replay(1), replay(2, device_us=None, read=5))
    assert np.isnan(run.replays.device_us).all() and np.isnan(run.replays.launch).all()
    assert not len(run.gaps)
    assert all(not len(spans) for spans in run.stages.values())
    assert run.environment is None and run.captures is None


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(50))
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    run = read_recording(path)
    assert 10 < len(run.replays) < 40
    (note,) = run.notes
    assert note.startswith(f"line {len(run.replays) + 2} is cut off")


def test_dropped_replays_are_told(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(9), recorder={"dropped": 12})
    assert "first 12 replays" in read_recording(path).notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is not the header"),
        ("hello", "line 1 is not the header"),
        ("[1, 2]", "line 1 is not the header"),
        ('{"kind": "replay"}', "line 1 is not the header"),
        ('{"kind": "header", "schema": 2}', "schema 2, but this reads 1"),
        ('{"kind": "header", "schema": 1}', "holds no replay"),
        ('{"kind": "header", "schema": 1}\n{"kind": "replay"}', "line 2: sequence=None"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_recording(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"read": "soon"}, "line 2: read='soon' is no time"),
        ({"read": 10**25}, "line 2: read=1000.* is no time"),
        ({"step": [1]}, r"line 2: step=\[1\] is no integer"),
        ({"sequence": 10**30}, "line 2: sequence=1000.* is no integer"),
        ({"rows": "many"}, "line 2: rows='many' is no integer"),
        ({"live": 1.5}, "line 2: live=1.5 is no integer"),
        ({"lanes": 3}, "line 2: lanes=3 are no pairs"),
        ({"lanes": [[1]]}, r"line 2: lanes=\[\[1\]\] are no pairs"),
        ({"lanes": [[1, None]]}, "are no pairs"),
    ],
)
def test_what_a_replay_cannot_hold_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(HEADER, replay(1) | values)


@pytest.mark.parametrize(
    "request_", [{"id": "x"}, {"first": []}, {"new_tokens": {}}, {"pauses": 0.5}]
)
def test_what_a_request_cannot_hold_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"line 3: {next(iter(request_))}="):
        read(HEADER, replay(1), {"kind": "request"} | request_)


@pytest.mark.parametrize(
    "part",
    [
        {"captures": 3}, {"captures": ["x"]}, {"captures": [{"seconds": "long"}]},
        {"captures": [{"bytes": []}]}, {"engine": "cuda"}, {"environment": [1]},
        {"recorder": 7}, {"recorder": {"dropped": "some"}},
        {"ranks": 2}, {"ranks": {"option": "x"}}, {"ranks": {"count": 1, "option": "x"}},
        {"ranks": {"count": 10**9, "option": "x"}}, {"ranks": {"count": 2, "option": 5}},
        {"ranks": {"count": 2, "option": "x", "waited_s": "long"}},
        {"ranks": {"count": 2, "option": "x", "steps": 1.5}},
    ],
)  # fmt: skip
def test_what_a_header_cannot_hold_is_refused(tmp_path: Path, part: dict[str, Any]) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(9), **part)
    with pytest.raises(ValueError, match="line 1: ") as error:
        read_recording(path)
    assert str(error.value).count(str(path)) == 1


def test_a_file_that_was_cut_off_at_a_lines_end_is_told(tmp_path: Path) -> None:
    told = {"recorder": {"records": 50, "requests": 1, "dropped": 0}}
    path = write_recording(tmp_path / "run.jsonl", simulate(50), **told)
    assert read_recording(path).notes == ()
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:31]) + "\n")
    assert read_recording(path).notes == (
        "the header tells of 50 replays and 30 are here: cut off?",
    )
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert read_recording(path).notes == ("the header tells of 1 request and 0 are here: cut off?",)


def test_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read as a recording"):
        read_recording(path)


def test_replays_of_a_stream_run_one_after_another() -> None:
    ends = device_ends(np.array([0.0, 1000.0, 9000.0]), np.array([2.0, 3.0, 1.0]))
    assert ends.tolist() == [2000.0, 5000.0, 10000.0]
    unknown = device_ends(np.array([0.0, 1000.0, 2000.0]), np.array([9.0, np.nan, 1.0]))
    assert unknown[[0, 2]].tolist() == [9000.0, 3000.0] and np.isnan(unknown[1])


INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=8,
)


@given(INTERVALS, INTERVALS)
def test_covered_counts_what_the_union_covers(
    spans: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    union = merged(np.array(spans, dtype=np.float64).reshape(-1, 2))
    assert (union[1:, 0] > union[:-1, 1]).all()
    inside = {place for begin, end in spans for place in range(begin, end)}
    begin = np.array([one[0] for one in asked], dtype=np.float64)
    end = np.array([one[1] for one in asked], dtype=np.float64)
    expected = [len(inside & set(range(*one))) for one in asked]
    assert covered(union, begin, end).tolist() == expected


def test_lines_hold_what_a_simulation_planted() -> None:
    """The fixture itself: stages in order, the device never runs two replays at once."""
    timeline = simulate(60, stalls={5: 900.0}, syncs={9}, prefills={7}, larger={11})
    for made in timeline.replays:
        assert made.plan <= made.load <= made.replay <= made.launched <= made.device_begin
        assert not made.read or made.collect <= made.read <= made.delivered
    pairs = zip(timeline.replays, timeline.replays[1:], strict=False)
    assert all(a.device_end <= b.device_begin for a, b in pairs)
    assert len(recording_lines(timeline)) == 63
