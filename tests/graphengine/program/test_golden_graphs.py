"""The graphs of the demo model and of small models with other layers as they are on file: an added
kernel or a lost programmatic edge fails here.

Which kernels there are also depends on the GPU and on the versions of torch and triton, so each of
those has its own files, in `__snapshots__/test_golden_graphs/<key>/`. To record a new one, on that
GPU: `pytest -m gpu tests/graphengine/program/test_golden_graphs.py --graph-snapshot-update`; then
commit the folder.

Without a GPU the same steps run with their launches noted, so that kernels, grids and blocks are
compared there too. Only a capture knows the edges, shared memory, and what torch launches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.named_graphs import graph_names
from graphengine import Engine
from graphengine.buckets import GraphStructure
from graphengine.core.recorded_rows import record_rows
from graphengine.kernels.core.op import own_kernels
from graphengine.observe.op_table import align
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import DEMO, SHAPES, Subject
from graphengine.speculative import MTP
from graphengine.testing.snapshots.snapshot import GraphSnapshot, environment_key
from launches.compilation import GraphKernel, graph_kernels

SNAPSHOTS = Path(__file__).parent / "__snapshots__" / Path(__file__).stem
SIZES: dict[str, Any] = {"max_seq_len": 256, "block_size": 16, "prefill_buckets": (16, 64)}
# One row in the `fma` family, a ladder in `dot`, and a step that also verifies and drafts.
ONE_ROW: dict[str, Any] = {"max_batch": 1}
DRAFTS: dict[str, Any] = {"max_batch": 2, "buckets": (2,), "speculative": MTP(k=3)}
ENGINES: dict[str, dict[str, Any]] = {
    "fma": ONE_ROW,
    "dot": {"max_batch": 8, "buckets": (1, 8)},
    "mtp": DRAFTS,
    # Gated delta nets, Mamba2, experts: shapes with random weights.
    "tiny-delta": DRAFTS,
    "tiny-hybrid": ONE_ROW,
    "tiny-moe": {"max_batch": 8, "buckets": (8,)},
}
PREFILL = tuple(f"prefill/{name}" for name in ("16", "16/full", "64", "64/full", "64/note"))
GRAPHS: dict[str, tuple[str, ...]] = {
    "fma": ("decode/1/fast", "decode/1/full", *PREFILL),
    "dot": ("decode/1/fast", "decode/1/full", "decode/8/fast", "decode/8/full", *PREFILL),
    "mtp": ("decode/2/fast", "decode/2/full", "decode/2/k3/fast", "decode/2/k3/full", *PREFILL),
    "tiny-delta": (
        "decode/2/fast", "decode/2/full", "decode/2/k3/fast", "decode/2/k3/full", *PREFILL,
    ),
    "tiny-hybrid": ("decode/1/fast", "decode/1/full", *PREFILL),
    "tiny-moe": ("decode/8/fast", "decode/8/full", *PREFILL),
}  # fmt: skip

OLDER_FILES: dict[str, set[str]] = {"tiny-moe": {name for name in PREFILL if "note" not in name}}
"""Graphs whose files are to be recorded again."""


def open_engine(case: str, device: str) -> Engine:
    """An engine of a case's shape; of the demo model where the case is none."""
    subject = Subject.of_shape(case if case in SHAPES else DEMO)
    options = {"device": device, "dtype": "bfloat16"} | SIZES | ENGINES[case]
    engine, _ = build_engine(subject, options)
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("case", ENGINES)
def test_captured(case: str, graph_snapshot: GraphSnapshot) -> None:
    key = environment_key()
    if key not in recorded_keys() and not graph_snapshot.update:
        pytest.skip(f"no graphs of {key} are on file, but of {recorded_keys()}")
    with open_engine(case, "cuda") as engine:
        layers = engine.model.config.num_layers
        assert sorted(graph_names(engine)) == sorted(GRAPHS[case])
        for graph in engine.runtime.captured:
            name = graph.name
            # Five kernels a layer, and begin, lm_head with its sampler, finish.
            plain = name.startswith("decode/") and name.endswith("/fast") and case in ("fma", "dot")
            budget = 5 * layers + 3 if plain else None
            graph_snapshot(graph, name, key=key, max_nodes=budget)


def file_of(key: str, case: str, name: str) -> Path:
    return GraphSnapshot(SNAPSHOTS, f"test_captured[{case}]", update=False).path(name, key)


def recorded_keys() -> list[str]:
    return sorted(path.name for path in SNAPSHOTS.glob("*") if path.is_dir())


@pytest.mark.parametrize("case", ENGINES)
def test_what_a_capture_would_launch_is_on_file(case: str) -> None:
    """Everything in decode graphs; in others all but the kernels that are torch's."""
    with open_engine(case, "cpu") as engine:
        assert sorted(graph_names(engine)) == sorted(GRAPHS[case])
        found, own = graph_kernels(engine), own_kernels()
    assert sorted(found) == sorted(GRAPHS[case])
    keys = [key for key in recorded_keys() if key.startswith("nvidia-h200_")]
    assert keys, f"no files of an H200, but of {recorded_keys()}"
    for key in keys:
        for name, kernels in found.items():
            nodes = GraphStructure.from_json(file_of(key, case, name).read_text()).nodes
            everything = name.startswith("decode/")
            on_file = [
                GraphKernel(node.name, node.grid, node.block[0])
                for node in nodes
                if everything or node.name in own
            ]
            is_older = name in OLDER_FILES.get(case, ())
            assert (kernels == on_file) != is_older, f"{name} of {case}, on file for {key}"


@pytest.mark.parametrize("case", ENGINES)
def test_the_kernels_on_file_are_those_of_the_rows(case: str) -> None:
    """What `graph dump` and `bench --kernels` say of a GPU's kernels, for those of an H200."""
    with open_engine(case, "cpu") as engine:
        rows = record_rows(engine.runtime, engine.memory, engine.memory.graphs)
        linears = engine.model.config.linears
    for environment in (key for key in recorded_keys() if key.startswith("nvidia-h200_")):
        for graph, launches in rows.items():
            if graph.name in OLDER_FILES.get(case, ()):
                continue
            file = file_of(environment, case, graph.name)
            nodes = GraphStructure.from_json(file.read_text()).nodes
            kernels = [str(node.name) for node in nodes if node.kind == "kernel"]
            found = align(kernels, launches, known=own_kernels())
            assert [row for row in found if row is not None] == launches
            if graph.kind == "decode":
                assert None not in found
                assert {row.part for row in launches} == {*linears, "KV", ""}, graph.name


@pytest.mark.parametrize("key", recorded_keys())
def test_what_is_on_file_is_complete(key: str) -> None:
    """And nothing else is: a graph that has another name leaves no file behind."""
    expected = {file_of(key, case, name) for case, names in GRAPHS.items() for name in names}
    assert {*(SNAPSHOTS / key).iterdir()} == expected


@pytest.mark.parametrize("key", recorded_keys())
@pytest.mark.parametrize("case", ENGINES)
def test_decode_graphs_on_file_are_kernels_with_programmatic_edges(key: str, case: str) -> None:
    files = [file_of(key, case, name) for name in GRAPHS[case] if name.startswith("decode/")]
    assert files
    for file in files:
        graph = GraphStructure.from_json(file.read_text())
        programmatic, edges = graph.programmatic_edges()
        assert graph.count().keys() == {"kernel"}, f"{file}: {json.dumps(graph.count())}"
        assert programmatic == edges > 0, f"{file}: {programmatic} of {edges} programmatic"
