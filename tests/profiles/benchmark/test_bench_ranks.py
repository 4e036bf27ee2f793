"""Benchmarks of several ranks, of one of them by itself, and of what their sums cost."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine import EngineConfig
from graphengine.cli import main as cli
from graphengine.profiles.benchmark.collectives import collective_times
from graphengine.profiles.benchmark.engines import build_engine, freed
from graphengine.profiles.benchmark.lone_rank import LoneRank
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.benchmark.stored_shape import stored_shape
from graphengine.profiles.tables.text import describe_document

SHORT = ("--prompt-tokens", "4", "--new-tokens", "5", "--runs", "1", "--ttft-tokens", "4")
SMALL = ("--shape", "tiny", "--device", "cpu", "--batch", "1", "--max-batch", "1", *SHORT)


def bench(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert cli.main(["bench", *SMALL, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_number_of_ranks_has_its_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks read a shape from a checkpoint, which is gone afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    document = bench(capsys, "--tensor-parallel", "1,2")
    one, two = document["rows"]
    assert document["random_weights"] and document["shape"] == "tiny"
    assert (one["ranks"], two["ranks"]) == (1, 2) and not two["lone_rank"]
    assert one["waited_us"] is None and two["waited_us"] > 0
    # A rank reads half of what is split.
    assert one["step_bytes"] / 2 < two["step_bytes"] < one["step_bytes"]
    assert [each["checked"]["eager_tokens"] for each in (one, two)] == [5, 5]
    assert not list(tmp_path.iterdir())
    lines = describe_document(document).splitlines()
    (heading,) = (line for line in lines if line.lstrip().startswith("live"))
    assert "ranks  waits us" in heading


def test_a_rank_by_itself_has_the_sizes_of_one_of_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = bench(capsys, "--tensor-parallel", "2,4", "--lone-rank")["rows"]
    assert [(row["ranks"], row["lone_rank"]) for row in rows] == [(2, True), (4, True)]
    assert rows[0]["step_bytes"] > rows[1]["step_bytes"]
    # A CPU pushes nothing.
    assert [(row["waited_us"], row["collectives"]) for row in rows] == [(0.0, [])] * 2


def test_the_table_of_sums(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "--tensor-parallel", "2", "--lone-rank")
    sums = {"ranks": 2, "lanes": 1, "M": 64, "K": 96}
    times = {"alone_us": 1.25, "summed_us": 2.5, "apart_us": 3.75}
    document["rows"][0]["collectives"] = [{"linear": "down"} | sums | times]
    text = describe_document(document)
    assert "1 of 2" in text
    line = text[text.index("sums over ranks") :].splitlines()[2]
    assert line.split() == ["down", "2", "1", "64", "96", "1.25", "2.50", "3.75"]


def test_what_a_lone_rank_does_not_push_it_has_itself() -> None:
    group = LoneRank(3, torch.device("cpu"), 1, pdl=False)
    part = torch.randn(2, 4)
    assert group.reduce(part) is part and group.push_lanes(None) is None  # type: ignore[arg-type]
    assert torch.equal(group.gather(part), torch.stack([part] * 3))
    assert group.share == (0, 3) and group.add_own is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lone-rank",), "--lone-rank is one of several ranks of a --shape with random weights"),
        (("--tensor-parallel", "1,2", "--lone-rank"), "give --tensor-parallel of 2 or more"),
        (
            ("--shape", "demo", "--tensor-parallel", "2", "--lone-rank"),
            "--lone-rank is one of several ranks of a --shape",
        ),
        (("--tensor-parallel", "2,x"), "tensor-parallel='2,x' must be positive integers"),
        (("--tensor-parallel", "2", "--kernels"), "--tensor-parallel 2 has rows, no --kernels"),
        (("--tensor-parallel", "2", "--admission"), "--tensor-parallel 2 has rows, no --admission"),
        (("--tensor-parallel", "2", "--context", "64"), "has rows, no --context"),
        (("--tensor-parallel", "2", "--speculative", "ngram:2"), "has rows, no --speculative"),
        (("--tensor-parallel", "2,4", "--record", "x"), "--record takes one number of ranks, not"),
        (("--tensor-parallel", "3"), "tensor_parallel=3"),
    ],
)
def test_what_ranks_do_not_measure_is_an_error(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert cli.main(["bench", *SMALL, *options]) == 2
    assert message in capsys.readouterr().err


def test_ranks_want_a_device_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    options = ("--device", "cuda", "--tensor-parallel", "4")
    assert cli.main(["bench", *SMALL, *options]) == 2
    assert "tensor_parallel=4 from device cuda:0 on takes 4 devices" in capsys.readouterr().err


def test_packed_shapes_are_not_drawn_by_ranks() -> None:
    message = "gpt-oss-20b has 1536 linears in 8 or 4 bits, such as model.layers.0"
    with (
        pytest.raises(ValueError, match=message),
        stored_shape(Subject.of_shape("gpt-oss-20b")),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["fma", "dot"])
def test_a_lone_rank_on_a_gpu_times_its_sums(family: str) -> None:
    options = {"max_batch": 1, "max_seq_len": 64, "tensor_parallel": 2, "row_family": family}
    engine, _ = build_engine(Subject.of_shape("tiny"), options, lone_rank=True)
    with freed(engine):
        assert EngineConfig(**options).ranks == engine.config.ranks == 2
        engine.generate([1, 2, 3])
        assert engine.runtime.group is not None and engine.runtime.group.waited_s > 0
        found = list(collective_times(engine))
        assert [each.linear for each in found] == ["output", "down"]
        assert all(0 < each.alone_us < each.summed_us < 1e3 for each in found)
