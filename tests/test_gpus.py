"""What engines launch, compiled for GPUs that are not there: a little of what `make gpus` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpus.compiling import DEVICES, Compiled, compiled_for, launched_on
from gpus.subjects import SIZES, SUBJECTS
from gpus.table import main, opens_on, problems

from engines.small_engine import open_engine
from extent import LONG
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
# Of an older GPU and of a newer one with little shared memory.
GPUS = ("sm_86", "sm_120")


@compiles
def test_an_engine_compiles_for_other_gpus() -> None:
    """With packed weights, whose kernels of decode and of prefill differ most between GPUs.

    For sm_90 each kernel's own tests compile it; there its name is enough.
    """
    options = {**SIZES, "max_batch": 1, "row_family": "dot", "quantize": "fp8"}
    engine, _ = build_engine(Subject.of_shape("tiny"), options)
    with engine:
        hopper = launched_on(DEVICES["sm_90"], engine)
        found = {gpu: compiled_for(DEVICES[gpu], engine) for gpu in GPUS}
    assert "packed_kernel" in hopper and "packed_chunk_kernel" in hopper
    for gpu, compiled in found.items():
        assert not problems(gpu, compiled)
        names = {each.kernel for each in compiled}
        assert hopper - names == {"packed_chunk_kernel"}, gpu
        assert names <= hopper, gpu


def test_what_would_not_open_is_not_compiled() -> None:
    with open_engine(device="cpu", max_batch=1, kv_dtype="fp8") as engine:
        opens = {gpu for gpu, device in DEVICES.items() if opens_on(device, engine)}
        assert opens == DEVICES.keys() - {"sm_80", "sm_86", "sm_87"}
    with open_engine(device="cpu", max_batch=1) as engine:
        assert all(opens_on(device, engine) for device in DEVICES.values())


def test_what_does_not_fit_is_told() -> None:
    compiled = [
        Compiled("good_kernel", shared=101_376),
        Compiled("large_kernel", shared=101_377),
        Compiled("bad_kernel", error="PTXASError: needs sm_90"),
    ]
    assert problems("sm_86", compiled) == [
        "large_kernel: 101377 bytes of shared memory, 101376 exist",
        "bad_kernel: PTXASError: needs sm_90",
    ]
    assert problems("sm_90", compiled[:2]) == []


@compiles
@pytest.mark.skipif(not LONG, reason="takes a minute: make test-long")
def test_the_table_names_every_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.md"
    name = "demo, n-grams"
    assert name in SUBJECTS
    assert main(["--gpus", *GPUS, "--subjects", name, "--processes", "1", "--out", str(out)]) == 0
    text = out.read_text()
    assert capsys.readouterr().out == text
    for gpu in GPUS:
        assert re.search(rf"^\| {gpu} \| (\d+) of \1 \| \d+ of 101376 \| ", text, re.MULTILINE)
