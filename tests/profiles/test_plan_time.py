"""The time that it takes to find out what an engine's steps launch."""

from __future__ import annotations

import re

import pytest

from graphengine.profiles import plan_time


def test_it_tells_the_time_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_time.main(["--shape", "tiny", "--max-batch", "2", "--max-seq-len", "128"]) == 0
    told = capsys.readouterr().out
    pattern = r"tiny, 2 rows: \d+ ms, then \d+ ms; [\d,]+ nodes, [\d,]+ bytes of intermediates\n"
    assert re.fullmatch(pattern, told)
