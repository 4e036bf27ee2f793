"""The bootstrap: blocks, coverage on dependent data, verdicts, kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nsys_files import Export
from simulated import simulate, write_recording

from graphengine.profiles.compare import block_draws, block_length, compare, resampled
from graphengine.profiles.run_file import Floats, Run
from graphengine.profiles.sources import read_run


def recording(folder: Path, name: str, **planted: Any) -> Run:
    return read_run(write_recording(folder / f"{name}.jsonl", simulate(**planted)))


def median(rows: Floats) -> Floats:
    return np.median(rows, axis=-1)


def test_draws_are_blocks_of_neighbours() -> None:
    random = np.random.default_rng(0)
    drawn = block_draws(1000, 50, random)
    length = block_length(1000)
    assert length == 10 and drawn.shape == (50, 1000)
    steps = np.diff(drawn, axis=1) % 1000
    inside = np.arange(999) % length != length - 1
    assert (steps[:, inside] == 1).all()
    assert (steps[:, ~inside] != 1).mean() > 0.9
    # Every value is drawn about as often as any other, the first and the last too.
    counts = np.bincount(block_draws(100, 4000, random).ravel(), minlength=100)
    assert counts.min() > 0.9 * counts.mean() and counts.max() < 1.1 * counts.mean()


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_few_values_are_drawn_too(count: int) -> None:
    drawn = block_draws(count, 20, np.random.default_rng(0))
    assert drawn.shape == (20, count)
    assert set(np.unique(drawn)) <= set(range(count))


def test_blocks_see_the_dependence_that_single_values_hide() -> None:
    """The spread of the median of dependent values: blocks tell most of it, single draws do not."""
    random = np.random.default_rng(3)

    def series(count: int) -> Floats:
        noise = random.normal(size=count)
        for index in range(1, count):
            noise[index] += 0.7 * noise[index - 1]
        return noise

    true = np.std([np.median(series(800)) for _ in range(300)])
    told = np.mean([np.std(resampled(series(800), median, 200, random)) for _ in range(20)])
    singly = np.mean(
        [np.std(median(random.choice(series(800), size=(200, 800)))) for _ in range(20)]
    )
    assert singly < 0.65 * true < told < 1.2 * true


def test_equal_runs_show_no_change(tmp_path: Path) -> None:
    found = compare(recording(tmp_path, "a", seed=1), recording(tmp_path, "b", seed=2))
    verdicts = {row["name"]: row["verdict"] for row in found["itl"]}
    assert verdicts == {
        "p50": "no change shown", "p90": "no change shown", "p99": "no change shown",
        "p99.9": "too few values", "max": "too few values",
    }  # fmt: skip
    assert found["kernels"] is None and found["n"] == [398, 398] and found["block"] == [7, 7]


def test_a_change_is_found_with_its_sign_and_size(tmp_path: Path) -> None:
    usual, slow = recording(tmp_path, "a", seed=1), recording(tmp_path, "b", factor=1.03, seed=2)
    for before, after, verdict, change in (
        (usual, slow, "slower", 0.03),
        (slow, usual, "faster", -0.03),
    ):
        row = compare(before, after)["itl"][0]
        assert row["verdict"] == verdict
        assert row["change"] == pytest.approx(change, abs=0.005)
        assert row["low"] < row["change"] < row["high"]


def test_a_tail_that_grew_leaves_the_median(tmp_path: Path) -> None:
    stalls = dict.fromkeys(range(20, 400, 20), 600.0)
    before, after = recording(tmp_path, "a"), recording(tmp_path, "b", stalls=stalls, seed=1)
    rows = {row["name"]: row for row in compare(before, after)["itl"]}
    assert rows["p50"]["high"] < 0.005 < 0.5 < rows["p99"]["low"]
    assert rows["p99"]["verdict"] == "slower"


def test_few_gaps_have_no_interval(tmp_path: Path) -> None:
    found = compare(recording(tmp_path, "a", steps=15), recording(tmp_path, "b", steps=400))
    assert {row["verdict"] for row in found["itl"]} == {"too few values"}
    assert all(row["low"] is None for row in found["itl"])


def test_the_same_runs_give_the_same_document(tmp_path: Path) -> None:
    before, after = recording(tmp_path, "a"), recording(tmp_path, "b", seed=3)
    assert compare(before, after) == compare(before, after)


def test_kernels_of_one_bucket_are_compared_by_their_time_a_replay(tmp_path: Path) -> None:
    before = Export(tmp_path / "a.sqlite", simulate(seed=1), mode="node").path
    after = Export(tmp_path / "b.sqlite", simulate(factor=1.1, prefills={9}), mode="node").path
    found = compare(read_run(before), read_run(after))
    rows = found["kernels"]
    assert [row["name"] for row in rows] == ["dot_kernel", "attention_kernel", "finish_kernel"]
    for row in rows:
        assert row["bucket"] == "decode/1" and row["verdict"] == "slower"
        assert row["change"] == pytest.approx(0.1, abs=0.01)
    only = [(row["run"], row["bucket"]) for row in found["only"]]
    assert only == [("after", "prefill/64")] * 3
