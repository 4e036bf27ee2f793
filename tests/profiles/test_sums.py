"""The command that measures sums on several GPUs: what it refuses, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.profiles import sums

PRODUCT = {"linear": "down", "ranks": 2, "lanes": 1, "M": 64, "K": 96}
PRODUCT |= {"alone_us": 1.25, "summed_us": 2.5, "apart_us": 3.75}
SUM = {"lanes": 1024, "columns": 64, "dtype": "bfloat16", "pushed_us": 4.5, "nccl_us": 6.25}
NORM = {"lanes": 1024, "columns": 64, "dtype": "bfloat16", "split_us": 7.5, "apart_us": 8.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "3"), "--ranks 3: there are 2 GPUs, and ranks are two or more"),
        (("--ranks", "1"), "--ranks 1: there are 2 GPUs, and ranks are two or more"),
        (("--lanes", "1,65"), "--lanes 1,65: a decode step has up to 64"),
        (("--lanes", "x"), "--lanes='x' must be positive integers"),
        (("--shape", "nobody"), "unknown shape 'nobody'"),
        (("--out", "/"), "--out / is a folder"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        sums.main(options)
    assert message in capsys.readouterr().err


def test_what_ranks_found_is_printed_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def spawn(run: Any, arguments: tuple[Any, ...], nprocs: int) -> None:
        ranks, shape, lanes, folder = arguments
        assert (ranks, shape, lanes, nprocs) == (2, "tiny", (1, 8), 2)
        found = json.dumps({"products": [PRODUCT], "sums": [SUM], "norms": [NORM]})
        Path(folder, "found.json").write_text(found)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sums, "spawn", spawn)
    monkeypatch.setattr(sums, "environment", lambda device: {"device": "a GPU"})
    out = tmp_path / "sums.json"
    assert sums.main(["--shape", "tiny", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["products"] == [PRODUCT] and document["sums"] == [SUM]
    assert document["norms"] == [NORM]
    assert (document["schema"], document["shape"], document["ranks"]) == (1, "tiny", 2)
    text = capsys.readouterr().out
    assert "products, us a call, on 2 ranks of tiny, a GPU" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["down", "2", "1", "64", "96", "1.25", "2.50", "3.75"] in rows
    assert ["1024", "64", "bfloat16", "4.50", "6.25"] in rows
    assert ["1024", "64", "bfloat16", "7.50", "8.25"] in rows


@pytest.mark.gpu
def test_two_gpus_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks of this command have a GPU each")
    assert sums.main(["--shape", "tiny", "--lanes", "1"]) == 0
    assert "sums by themselves" in capsys.readouterr().out
