"""The lines of a recording, checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphengine.observe.record_lines import SCHEMA
from graphengine.observe.ring import STAMPS
from graphengine.profiles.runs.units import counted

LARGEST = 2**62
"""Above every valid count and time of a run; columns cannot hold more."""
MOST_RANKS = 65536
COUNTS = (
    "recording", "step", "rows", "live", "prompt_tokens", "emitted", "drafted", "accepted",
    "last_rank", "cpu_ns", "preempted", "yielded", "steps", "discarded",
)  # fmt: skip
REQUEST_COUNTS = ("id", "prompt_tokens", "new_tokens", "pauses")
REQUEST_TIMES = ("submitted", "first", "finished")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """The checked lines, with the right types.

    notes    for the reader: a truncated file, dropped replays
    dropped  replays that the recorder's ring had no room for
    """

    header: Mapping[str, Any]
    replays: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    notes: tuple[str, ...]
    dropped: int


def read_lines(lines: Iterable[str]) -> Lines:
    """The header, the replays and the requests. ValueError, with the line, for anything else."""
    notes: list[str] = []
    documents = _documents(lines, notes)
    _, header = next(documents, (0, {}))
    if header.get("kind") != "header":
        raise ValueError("line 1 is not the header of a recording")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"schema {header.get('schema')!r}, but this reads {SCHEMA}")
    recorder = _checked_header(header)
    replays, requests = [], []
    for number, document in documents:
        kind = document.get("kind")
        if kind == "replay":
            replays.append(_checked_replay(document, number))
        elif kind == "request":
            requests.append(_checked_request(document, number))
    if not replays:
        raise ValueError("the recording holds no replay")
    for key, found in (("records", replays), ("requests", requests)):
        told = recorder.get(key)
        if told is not None and told != len(found) and not notes:
            what = counted(told, "replay" if key == "records" else "request")
            here = f"{len(found):,} {'is' if len(found) == 1 else 'are'} here"
            notes.append(f"the header tells of {what} and {here}: cut off?")
    dropped = recorder.get("dropped") or 0
    if dropped:
        lost = "replay is" if dropped == 1 else f"{dropped} replays are"
        notes.append(f"the recorder's ring was full: the first {lost} not here")
    return Lines(
        header=header, replays=replays, requests=requests, notes=tuple(notes), dropped=dropped
    )


def _documents(lines: Iterable[str], notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines as objects, with their numbers, up to the first invalid one; a note says so."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line, parse_constant=_no_number)
        # Numbers of thousands of digits and endless brackets count as damage, too.
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            if number == 1:
                raise ValueError("line 1 is not the header of a recording")
            notes.append(f"line {number} is cut off or damaged: what follows is not read")
            return
        yield number, document


def _no_number(text: str) -> None:
    """Refuses NaN and Infinity, which JSON does not have."""
    raise ValueError(text)


def _checked_header(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The header's part about the recorder; the types of all parts are checked."""
    for key in ("environment", "engine", "recorder", "ranks"):
        if not isinstance(header.get(key), dict | None):
            raise ValueError(f"line 1: {key}={header[key]!r} is no object")
    captures = header.get("captures")
    if not isinstance(captures, list | None):
        raise ValueError(f"line 1: captures={captures!r} is no list")
    for capture in captures or ():
        if not isinstance(capture, dict):
            raise ValueError(f"line 1: {capture!r} in captures is no object")
        _check_counts(capture, ("bytes", "nodes"), 1)
        _check_times(capture, ("seconds",), 1)
    ranks = header.get("ranks")
    if ranks is not None:
        _check_ranks(ranks)
    recorder: Mapping[str, Any] = header.get("recorder") or {}
    _check_counts(recorder, ("records", "requests", "dropped"), 1)
    return recorder


def _check_ranks(ranks: Mapping[str, Any]) -> None:
    count, option = ranks.get("count"), ranks.get("option")
    if not (isinstance(count, int) and 2 <= count <= MOST_RANKS):
        raise ValueError(f"line 1: count={count!r} of ranks is none of 2 to {MOST_RANKS}")
    if not isinstance(option, str):
        raise ValueError(f"line 1: option={option!r} of ranks")
    _check_counts(ranks, ("steps",), 1)
    _check_times(ranks, ("waited_s", "seconds"), 1)


def _checked_replay(document: dict[str, Any], number: int) -> dict[str, Any]:
    for key, kind in (("sequence", int), ("bucket", str), ("type", str)):
        if not isinstance(document.get(key), kind):
            raise ValueError(f"line {number}: {key}={document.get(key)!r} of a replay")
    _check_counts(document, ("sequence", *COUNTS), number)
    _check_times(document, (*STAMPS, "device_us", "skew_us"), number)
    lanes = document.get("lanes")
    if lanes is not None and not (isinstance(lanes, list) and all(map(_is_lane, lanes))):
        raise ValueError(f"line {number}: lanes={lanes!r} are no pairs of request and tokens")
    return document


def _checked_request(document: dict[str, Any], number: int) -> dict[str, Any]:
    _check_counts(document, REQUEST_COUNTS, number)
    _check_times(document, REQUEST_TIMES, number)
    return document


def _is_lane(lane: object) -> bool:
    return isinstance(lane, list) and len(lane) == 2 and all(map(_is_count, lane))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def _check_counts(document: Mapping[str, Any], keys: Iterable[str], number: int) -> None:
    for key in keys:
        value = document.get(key)
        if value is not None and not _is_count(value):
            raise ValueError(f"line {number}: {key}={value!r} is no integer of a run")


def _check_times(document: Mapping[str, Any], keys: Iterable[str], number: int) -> None:
    for key in keys:
        value = document.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN is not below anything.
        if value is not None and not (is_number and abs(value) < LARGEST):
            raise ValueError(f"line {number}: {key}={value!r} is no time")
