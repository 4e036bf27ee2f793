"""`graphengine bench --peer`: the same work on another library, in a process of its own."""

from __future__ import annotations

import atexit
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphengine.profiles import bench
from graphengine.profiles.benchmark import peers
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.peers import PeerRun
from graphengine.profiles.benchmark.shapes import SHAPES, Subject
from graphengine.profiles.tables import text
from timelines.small_bench import Bench, bench_command
from timelines.vllm_stand_in import write_vllm

TINY = ("--shape", "tiny", "--ttft-tokens", "5", "--max-seq-len", "32")
SIZES = {"device": "cpu", "dtype": "float32", "prompt_tokens": 4, "new_tokens": 6, "runs": 1}


@pytest.fixture
def run_bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    return bench_command(capsys)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in, in this process and in those it starts; the file that says what it was told."""
    folder = tmp_path / "packages"
    folder.mkdir()
    seen = write_vllm(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return seen


def in_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    """What the peers' own command prints, as JSON; time is given back at the test's end."""
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    monkeypatch.setattr(atexit, "register", print)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    capsys.readouterr()
    try:
        peers.main(["vllm", "--device", "cpu", "--dtype", "float32", *arguments])
    finally:
        sys.modules.pop("vllm", None)
    return peers._answer("vllm", capsys.readouterr().out)


def test_vllm_runs_the_same_work(run_bench: Bench, vllm: Path, tmp_path: Path) -> None:
    """From the option to the ratio; what vLLM prints before and after the figures is passed over.

    Of two rows the second's prompt comes in a step later, which is none of decoding.
    """
    out = tmp_path / "bench.json"
    status, printed, _ = run_bench(*TINY, "--batch", "1,2", "--peer", "vllm", "--out", str(out))
    assert status == 0
    document = json.loads(out.read_text())
    found = document["peers"]["vllm"]
    assert (found["peer"], found["version"], found["weights"]) == ("vllm", "0.stand-in", "dummy")
    first, second = found["rows"]
    assert (first["live"], first["ms_per_step"], first["ttft_ms"]) == (1, 2.0, 100.0)
    assert (second["live"], second["ms_per_step"], second["ttft_ms"]) == (2, 2.0, 100.0)
    # Fourteen steps bring one row a token; two rows share thirteen. The first begins the time.
    assert (first["steps"], second["steps"]) == (13, 12)
    for row, ours in zip(found["rows"], document["rows"], strict=True):
        assert row["ratio"] == pytest.approx(2.0 / ours["ms_per_step"], abs=1e-3)
        assert f"batch {row['live']}: 2.000 ms/step, {row['ratio']:.2f} times ours" in printed
    assert "vllm 0.stand-in, weights: dummy" in printed

    seen = json.loads(vllm.read_text())
    assert seen["options"] == {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 9 + 14,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
    }
    assert seen["config"] == {**SHAPES["tiny"], "dtype": "float32"}
    assert seen["processes"] == "0"


def test_vllm_reads_a_checkpoint(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Subject.of_shape("demo").checkpoint
    arguments = ("--checkpoint", str(path), "--new-tokens", "6", "--runs", "1")
    assert in_this_process(monkeypatch, capsys, *arguments)["weights"] == "the same"
    assert json.loads(vllm.read_text())["options"]["load_format"] == "auto"


@pytest.mark.usefixtures("vllm")
def test_a_peer_that_does_less_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "short")
    with pytest.raises(RuntimeError, match=r"6 tokens were asked for, \{.*: 5\} came"):
        in_this_process(monkeypatch, capsys, "--shape", "tiny", "--new-tokens", "6")


@pytest.mark.usefixtures("vllm")
def test_a_peer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no row with it: `test_what_fails_late_takes_nothing_with_it`."""
    monkeypatch.setenv("FAKE_VLLM", "fail")
    with pytest.raises(RuntimeError, match=r"(?s)peer vllm failed \(1\): .*no kernel image"):
        peers.run_peer("vllm", Subject.of_shape("tiny"), batches=[2], **SIZES)


def test_a_peer_that_is_not_installed_is_an_error_at_once(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "measure_all", None)
    status, _, errors = run_bench("--shape", "tiny", "--peer", "vllm")
    assert status == 2 and "peer 'vllm' cannot be imported here" in errors


def test_a_peer_that_its_own_process_cannot_import_says_so(
    vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this process has been told where to look."""
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(RuntimeError, match=r"(?s)peer vllm failed .*cannot be imported here"):
        peers.run_peer("vllm", Subject.of_shape("tiny"), batches=[1], **SIZES)
    assert not vllm.exists()


def test_a_peer_that_gives_no_answer_is_an_error() -> None:
    assert peers._answer("x", 'INFO\n{"peer": "x", "rows": []}\n{"no": 1}\n')["peer"] == "x"
    with pytest.raises(RuntimeError, match="peer x gave no answer: INFO"):
        peers._answer("x", "INFO: nothing to see\n")


def test_a_step_of_a_peer_is_the_mean_between_the_first_and_the_last() -> None:
    """The median of the runs, as ours."""
    work = Work(live=2, prompt_tokens=4, new_tokens=6, runs=3)
    runs = [
        PeerRun(first=0.5, steps=[1.0, 1.1, 1.4]),
        PeerRun(first=0.7, steps=[2.0, 2.3, 2.6]),
        PeerRun(first=0.6, steps=[1.0, 2.0, 9.0]),
    ]
    row = peers._row(work, runs)
    assert (row["ms_per_step"], row["ttft_ms"]) == (300.0, 600.0)
    assert (row["steps"], row["runs"]) == (2, 3)
    with pytest.raises(RuntimeError, match="1 steps of all 2 rows"):
        peers._row(work, [runs[0], PeerRun(first=0.5, steps=[1.0])])


def test_peers_of_older_results_are_told() -> None:
    peer = {
        "version": "1",
        "weights": "the same",
        "rows": [{"live": 1, "ms_per_step": 2.0, "ttft_ms": 3.0, "ratio": 4.0}],
    }
    assert "batch 1: 2.000 ms/step, 4.00 times ours; TTFT 3.00" in text._peer("x", peer)


@pytest.mark.slow
def test_transformers_runs_the_same_work(run_bench: Bench) -> None:
    arguments = ("--shape", "tiny", "--batch", "1,2", "--peer", "transformers", "--json")
    status, printed, _ = run_bench(*arguments, "--ttft-tokens", "5")
    assert status == 0
    document = json.loads(printed)
    peer = document["peers"]["transformers"]
    assert peer["weights"] == "the same"
    assert [(row["live"], row["steps"]) for row in peer["rows"]] == [(1, 13), (2, 13)]
    for row, ours in zip(peer["rows"], document["rows"], strict=False):
        ratio = row["ms_per_step"] / ours["ms_per_step"]
        assert row["ratio"] == pytest.approx(ratio, abs=1e-3)
