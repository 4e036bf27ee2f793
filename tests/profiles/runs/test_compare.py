"""The bootstrap: blocks, coverage on dependent data, verdicts, kernels."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphengine.profiles.report import make_document
from graphengine.profiles.runs.compare import (
    LEAST_BLOCKS,
    block_draws,
    block_length,
    compare,
    differences,
    resampled,
)
from graphengine.profiles.runs.run_file import Floats, Run, gaps_of
from graphengine.profiles.sources import read_run
from graphengine.profiles.tables.percentiles import percentiles
from timelines.nsys_files import Export
from timelines.simulated_run import simulate, write_recording


def recording(folder: Path, name: str, **planted: Any) -> Run:
    return read_run(write_recording(folder / f"{name}.jsonl", simulate(**planted)))


def median(rows: Floats) -> Floats:
    return np.median(rows, axis=-1)


def series(count: int, alike: float, random: np.random.Generator) -> Floats:
    """An autoregression: each value is `alike` times the one before it, and noise."""
    noise = random.normal(size=count + 200)
    for index in range(1, len(noise)):
        noise[index] += alike * noise[index - 1]
    return noise[200:]


def run_of(template: Run, milliseconds: Floats) -> Run:
    """A run with these gaps, one a step."""
    times = np.concatenate([[0.0], np.cumsum(1e6 * milliseconds)])
    found = [
        (begin, end, 0, index, 1)
        for index, (begin, end) in enumerate(itertools.pairwise(times.tolist()))
    ]
    return replace(template, gaps=gaps_of(found))


def test_draws_are_blocks_of_neighbours() -> None:
    random = np.random.default_rng(0)
    length = 10
    drawn = block_draws(1000, length, 50, random)
    assert drawn.shape == (50, 1000)
    steps = np.diff(drawn, axis=1) % 1000
    inside = np.arange(999) % length != length - 1
    assert (steps[:, inside] == 1).all()
    assert (steps[:, ~inside] != 1).mean() > 0.9
    # Every value is drawn about as often as any other, the first and the last too.
    counts = np.bincount(block_draws(100, 5, 4000, random).ravel(), minlength=100)
    assert counts.min() > 0.9 * counts.mean() and counts.max() < 1.1 * counts.mean()


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_few_values_are_drawn_too(count: int) -> None:
    length = block_length(np.arange(count, dtype=np.float64))
    drawn = block_draws(count, length, 20, np.random.default_rng(0))
    assert drawn.shape == (20, count)
    assert set(np.unique(drawn)) <= set(range(count))


def test_blocks_see_the_dependence_that_single_values_hide() -> None:
    """The spread of the median of dependent values: blocks show most of it, single draws do not."""
    random = np.random.default_rng(3)

    def one() -> Floats:
        return series(800, 0.7, random)

    true = np.std([np.median(one()) for _ in range(300)])
    told = np.mean([np.std(resampled(one(), median, 200, random)) for _ in range(20)])
    singly = np.mean([np.std(median(random.choice(one(), size=(200, 800)))) for _ in range(20)])
    assert singly < 0.65 * true < told < 1.2 * true


def test_blocks_are_longer_where_neighbours_are_more_alike() -> None:
    random = np.random.default_rng(5)
    lengths = [block_length(series(1000, alike, random)) for alike in (0.0, 0.7, 0.95, 0.999)]
    assert lengths[:2] == [32, 32] and 60 < lengths[2] < 95
    assert lengths[3] == 1000 // LEAST_BLOCKS
    assert block_length(np.ones(1000)) == 32 and block_length(np.ones(1)) == 1


def test_intervals_hold_their_share_where_neighbours_are_alike(tmp_path: Path) -> None:
    """Two runs of one kind: 95% intervals that miss zero are false alarms.

    Of these pairs 11 are; with blocks of n^(1/3) steps 29 were.
    """
    random = np.random.default_rng(11)
    template = recording(tmp_path, "a", steps=1002)
    pairs = 80

    def false_alarm() -> bool:
        runs = [run_of(template, 1.0 + 0.02 * series(1000, 0.95, random)) for _ in range(2)]
        verdict: str = compare(*runs, draws=100)["itl"][0]["verdict"]
        return verdict != "no change shown"

    assert sum(false_alarm() for _ in range(pairs)) <= 0.18 * pairs


def test_an_interval_needs_two_values_beyond_the_percentile(tmp_path: Path) -> None:
    """If one value lies beyond it, every draw that has it repeats it."""
    template = recording(tmp_path, "a", steps=2002)
    random = np.random.default_rng(1)
    for count, shown in ((199, False), (200, True)):
        runs = [run_of(template, 1.0 + random.random(count)) for _ in range(2)]
        assert (compare(*runs, draws=50)["itl"][2]["low"] is not None) == shown
        assert percentiles(runs[0].gaps.milliseconds)["unsupported"] == ["p99.9"]


def test_a_comparison_tells_the_percentiles_of_the_table(tmp_path: Path) -> None:
    """Requests that share a step have gaps of their own: a few long ones do not represent all."""
    paths = [write_recording(tmp_path / f"{name}.jsonl", simulate(120)) for name in "ab"]
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line.get("lanes"):
                # One of four requests has a token from every other step.
                slow = [[9, 1]] if line["step"] % 2 else []
                line["lanes"] = [[1, 1], [2, 1], [3, 1], *slow]
        path.write_text("\n".join(map(json.dumps, lines)))
    runs = [read_run(path) for path in paths]
    document, found = make_document(runs[1]), compare(*runs)
    rows = {row["name"]: row for row in found["itl"]}
    for name in ("p50", "p90", "p99", "max"):
        assert rows[name]["after"] == pytest.approx(document["itl_ms"][name]), name
    assert rows["p50"]["after"] < 0.5 < rows["p90"]["after"]
    assert rows["p50"]["low"] == pytest.approx(0.0, abs=0.01)
    assert found["n"] == [len(run.gaps) for run in runs] != found["steps"]


def test_what_differs_between_two_runs_is_told(tmp_path: Path) -> None:
    same = recording(tmp_path, "a")
    assert differences(same, recording(tmp_path, "b", seed=1)) == []
    engine = dict(same.engine or {})
    other = replace(
        same,
        engine=engine | {"dtype": "float32", "max_batch": 4, "pdl": False},
        environment={"device": "NVIDIA H100"},
    )
    assert compare(same, other, draws=10)["notes"] == [
        "max_batch: 32 before, 4 after",
        "dtype: bfloat16 before, float32 after",
        "device: NVIDIA H200 before, NVIDIA H100 after",
    ]
    one, two = (replace(same, engine=engine | {"tensor_parallel": ranks}) for ranks in (1, 2))
    assert differences(one, two) == ["tensor_parallel: 1 before, 2 after"]
    export = read_run(Export(tmp_path / "x.sqlite", simulate(), mode="graph").path)
    assert [note.split(":")[0] for note in differences(same, export)] == [
        "source",
        "time between tokens",
    ]


def test_a_change_from_nothing_is_unknown(tmp_path: Path) -> None:
    usual = recording(tmp_path, "a")
    nothing = replace(usual, gaps=replace(usual.gaps, end=usual.gaps.begin))
    for row in compare(nothing, usual, draws=20)["itl"]:
        assert row["change"] is row["low"] is row["high"] is None
        assert row["verdict"] == "too few values"
    assert compare(usual, nothing, draws=20)["itl"][0]["change"] == -1.0
    json.dumps(compare(nothing, nothing, draws=20), allow_nan=False)


def test_equal_runs_show_no_change(tmp_path: Path) -> None:
    found = compare(recording(tmp_path, "a", seed=1), recording(tmp_path, "b", seed=3))
    verdicts = {row["name"]: row["verdict"] for row in found["itl"]}
    assert verdicts == {
        "p50": "no change shown", "p90": "no change shown", "p99": "no change shown",
        "p99.9": "too few values", "max": "too few values",
    }  # fmt: skip
    assert found["kernels"] is None and found["n"] == [398, 398] and found["block"] == [20, 20]


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
