"""The measurement of a second turn, on short contexts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.small_engine import open_engine
from graphengine.profiles import turns


def test_each_length_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "turns.json"
    sizes = ["--context", "40,72", "--reply", "8", "--question", "5", "--runs", "2"]
    turns.main(["--device", "cpu", *sizes, "--out", str(file)])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["context", "cached"] and len(lines) == 2
    made = json.loads(file.read_text())
    assert made["subject"] == "demo" and made["runs"] == 2 and made["engine"]["device"] == "cpu"
    first, second = made["turns"]
    # Blocks of 16; the last token of a reply has no KV.
    assert (first["prompt"], first["cached_tokens"]) == (45, 32)
    assert (second["prompt"], second["cached_tokens"]) == (77, 64)
    for turn in made["turns"]:
        for name in ("turn_ms", "prefill_ms"):
            assert 0 < turn[name]["least"] <= turn[name]["median"] <= turn[name]["most"]
        assert turn["ratio"] > 0 and turn["snapshot_mib"] > 0


def test_wrong_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with open_engine(device="cpu") as engine:
        with pytest.raises(ValueError, match="runs=0 must be at least 1"):
            turns.measure(engine, 40, reply=8, question=4, runs=0)
        with pytest.raises(ValueError, match="reply=40 tokens are no part of context=40"):
            turns.measure(engine, 40, reply=40, question=4, runs=1)
    with pytest.raises(SystemExit):
        turns.main(["--context", "0"])
    assert "--context='0' must be positive integers" in capsys.readouterr().err
