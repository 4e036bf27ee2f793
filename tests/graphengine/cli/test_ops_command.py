"""`graphengine ops`: the table of launches, as text and as JSON."""

from __future__ import annotations

import json

import pytest

from graphengine.cli.main import main

ENGINE = ("--device", "cpu", "--max-batch", "1", "--row-family", "dot", "--max-seq-len", "128")


def test_one_graph_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", *ENGINE, "--graph", "decode/1/fast"]) == 0
    note, _, title, head, *rows = capsys.readouterr().out.splitlines()
    assert note == "as an H200 would launch them, with plans for a CPU"
    assert title.startswith(f"decode/1/fast: {len(rows)} launches, ") and len(rows) > 20
    assert head.split() == ["stage", "kernel", "grid", "threads", "weights,", "bytes"]
    assert rows[1].split()[:2] == ["layers.0.self_attn.q_proj", "dot_kernel"]


def test_all_graphs_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", *ENGINE, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert {"decode/1/fast", "decode/1/full"} < tables.keys()
    assert any(name.startswith("prefill/") for name in tables)
    row = tables["decode/1/fast"][1]
    assert row["stage"] == "layers.0.self_attn.q_proj" and row["kernel"] == "dot_kernel"
    assert len(row["grid"]) == 3 and row["weight_bytes"] > 0 and row["pdl"] is False
    assert row["reads"][:3] == ["x_ptr", "squares_ptr", "weight_ptr"]
    assert row["writes"] == ["out_ptr"]


def test_several_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Their sums would wait for ranks that record nothing."""
    assert main(["ops", *ENGINE, "--tensor-parallel", "2"]) == 2
    assert "what one GPU launches, and 2 ranks were asked for" in capsys.readouterr().err


def test_an_unknown_graph_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", *ENGINE, "--graph", "decode/9"]) == 2
    said = capsys.readouterr().err
    assert "--graph decode/9: the graphs are " in said and "decode/1/fast" in said
