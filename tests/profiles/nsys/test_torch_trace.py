"""Chrome traces: what torch's profiler writes on a GPU, with and without the recorder's lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphengine import Engine, SamplingParams
from graphengine.profiles.benchmark.engines import build_engine, freed
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.nsys.torch_trace import KEY, read_trace, torch_profile
from graphengine.profiles.sources import read_run
from timelines.chrome_traces import chrome_trace
from timelines.nsys_files import KERNELS
from timelines.simulated_run import simulate


def write(path: Path, trace: dict[str, Any]) -> Path:
    path.write_text(json.dumps(trace))
    return path


def test_the_recorders_lines_make_the_run(tmp_path: Path) -> None:
    timeline = simulate(60, prefills={20})
    run = read_run(write(tmp_path / "trace.json", chrome_trace(timeline)))
    assert run.source == "torch" and run.notes == ()
    assert run.replays.bucket.tolist() == [made.bucket for made in timeline.replays]
    # The device's times are CUPTI's.
    took = [made.device_us for made in timeline.replays]
    assert run.replays.device_us.tolist() == pytest.approx(took, rel=1e-5)
    ends = [made.device_end for made in timeline.replays]
    assert run.replays.device_end == pytest.approx(ends, abs=1.0)
    assert run.requests is not None and run.stages["plan"].shape == (60, 2)
    assert run.kernels is not None
    assert {(kernel.bucket, kernel.name) for kernel in run.kernels} == {
        (bucket, name) for bucket in ("decode/1/fast", "prefill/64") for name, _ in KERNELS
    }


def test_a_trace_alone_tells_what_it_can(tmp_path: Path) -> None:
    trace = chrome_trace(simulate(60), recorder=False)
    run = read_trace(write(tmp_path / "trace.json", trace))
    assert "no recorder's lines" in run.notes[0]
    assert set(run.replays.bucket.tolist()) == {f"graph of {len(KERNELS)} nodes"}
    assert run.requests is None and not run.stages
    assert run.environment == {"device": "NVIDIA H200"}
    assert run.kernels is not None and len(run.kernels[0].times_us) == 60
    assert len(run.gaps) == 59


def test_launches_that_do_not_match_the_recorder(tmp_path: Path) -> None:
    run = read_trace(write(tmp_path / "trace.json", chrome_trace(simulate(60), skip=3)))
    assert "57 launches of graphs and the recorder 60" in run.notes[0]
    assert run.kernels is None and len(run.gaps) == 58


def test_a_compressed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(chrome_trace(simulate(9))).encode()))
    assert len(read_run(path).replays) == 9
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="cut off"):
        read_run(path)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"traceEvents": []}, "no replay of a CUDA graph"),
        ({"traceEvents": {}}, "no list of traceEvents"),
        ([], "no list of traceEvents"),
        (
            {"traceEvents": [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1}]},
            "lacks or garbles 'args'",
        ),
        ({"traceEvents": [], "graphengine": 3}, "no recorder's lines"),
        ({"traceEvents": [], "graphengine": {"lines": []}}, "line 1 is not the header"),
        (
            chrome_trace(simulate(9)) | {"graphengine": {"lines": [{"kind": "header"}]}},
            "schema None",
        ),
    ],
)
def test_what_is_no_trace_of_an_engine(tmp_path: Path, trace: Any, message: str) -> None:
    path = write(tmp_path / "trace.json", trace)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert str(error.value).count(str(path)) == 1


@pytest.mark.parametrize("garbled", [{"args": None}, {"args": [1]}, {"args": {}}])
def test_foreign_events_are_passed_over(tmp_path: Path, garbled: dict[str, Any]) -> None:
    trace = chrome_trace(simulate(9), recorder=False)
    event = {"ph": "X", "cat": "kernel", "name": "theirs", "ts": 3.0, "dur": 1.0}
    trace["traceEvents"].append(event | garbled)
    trace["deviceProperties"] = [1]
    run = read_trace(write(tmp_path / "trace.json", trace))
    assert len(run.replays) == 9 and run.environment == {"device": None}


@pytest.mark.parametrize("time", ["x", None, []])
def test_an_event_without_a_time_is_refused(tmp_path: Path, time: Any) -> None:
    trace = chrome_trace(simulate(9), recorder=False)
    trace["traceEvents"][2]["ts"] = time
    path = write(tmp_path / "trace.json", trace)
    with pytest.raises(ValueError) as error:
        read_trace(path)
    assert str(error.value).count(str(path)) == 1


# A real trace, of an engine on a CPU.


@pytest.fixture
def engine() -> Any:
    options = {"max_batch": 2, "max_seq_len": 64, "device": "cpu"}
    made, _ = build_engine(Subject.of_shape("tiny"), options)
    with freed(made):
        yield made


def decode(engine: Engine, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.generate([[1, 2, 3], [4, 5]], params)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_an_engine_is_profiled(engine: Engine, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    decode(engine, 4)
    with torch_profile(engine, path):
        decode(engine, 8)
    assert not engine.recorder.recording
    run = read_run(path)
    assert run.source == "torch" and run.on_host and run.kernels is None
    assert len(run.gaps) == 2 * 7
    assert run.requests is not None and run.requests.new_tokens.tolist() == [8, 8]


def test_a_trace_shows_the_stages_on_the_traces_clock(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    decode(engine, 4)
    with torch_profile(engine, path):
        decode(engine, 6)
    trace = json.loads(path.read_text())
    track = [event for event in trace["traceEvents"] if event.get("cat") == KEY]
    assert {event["name"] for event in track} == {
        "step/plan", "step/load", "step/launch", "step/wait", "step/deliver",
    }  # fmt: skip
    # On a CPU the model's operators run inside the launches.
    launches = [event for event in track if event["name"] == "step/launch"]
    begin = np.array([event["ts"] for event in launches])
    end = begin + [event["dur"] for event in launches]
    operators = [e for e in trace["traceEvents"] if e.get("name") == "aten::matmul"]
    assert operators
    inside = [((begin <= e["ts"]) & (e["ts"] <= end)).any() for e in operators]
    assert np.mean(inside) > 0.95


def test_a_recorder_in_use_is_not_taken_over(engine: Engine, tmp_path: Path) -> None:
    engine.recorder.start()
    path = tmp_path / "trace.json"
    with pytest.raises(ValueError, match="recorder is in use"), torch_profile(engine, path):
        pass
    assert engine.recorder.recording
    engine.recorder.stop()


def test_the_recorder_is_stopped_after_an_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(KeyError), torch_profile(engine, tmp_path / "trace.json"):
        raise KeyError("x")
    assert not engine.recorder.recording
