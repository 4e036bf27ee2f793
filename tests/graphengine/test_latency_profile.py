"""The latency measurement, on the demo model with tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphengine.profiles import latency


def test_measures_and_writes_what_it_ran_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "latency.json"
    sizes = ["--prompt-tokens", "9", "--new-tokens", "12", "--runs", "2"]
    latency.main(["--device", "cpu", "--batches", "1,3", *sizes, "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["model"] == "demo"
    assert {"torch", "triton", "python", "commit"} <= document["environment"].keys()
    assert [row["batch"] for row in document["rows"]] == [1, 3]
    for row in document["rows"]:
        gaps = row["itl_ms"]
        # 11 gaps a request, the first `batch` of them left out, over 2 runs.
        assert row["itl_n"] == 2 * row["batch"] * (11 - row["batch"])
        assert 0 < gaps["p50"] <= gaps["p90"] <= gaps["p99"] <= gaps["p99.9"] <= gaps["max"]
        assert row["ttft_ms"] > 0
    assert "TTFT ms" in capsys.readouterr().out


def test_runs_that_differ_are_refused() -> None:
    class Result:
        def __init__(self, *tokens: int) -> None:
            self.token_ids = tokens

    latency._require_equal([Result(1, 2), Result(1, 2)])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="differ"):
        latency._require_equal([Result(1, 2), Result(1, 3)])  # type: ignore[list-item]
