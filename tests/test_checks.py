"""`make test`: every target runs, and the last line counts all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import checks
import pytest
from checks import Ended


def test_a_target_that_fails_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {
        "a": Ended("a", 2, 1.0, "x\n1 failed, 3 passed, 2 skipped in 1.00s\nmake: *** Error 1"),
        "b": Ended("b", 0, 2.0, "===== 4 passed, 1 warning in 2.50s (0:00:02) ====="),
        "c": Ended("c", 1, 3.0, "E501 Line too long"),
        "d": Ended("d", 0, 4.0, "2 passed in 1.00s\n5 passed, 1 error in 1.00s"),
    }
    ended = checks.run_all([*outputs], 2, outputs.__getitem__)
    assert ended == [*outputs.values()]
    told = capsys.readouterr().out
    assert all(f"--- {name}\n{each.output}" in told for name, each in outputs.items())
    lines = checks.summary(ended).splitlines()
    assert lines[-1] == "14 passed, 3 failed, 2 skipped"
    assert "a                FAILED, status 2 in 1 s  1 failed, 3 passed, 2 skipped" in lines
    assert "b                passed in 2 s  4 passed" in lines
    assert "c                FAILED, status 1 in 3 s" in lines


@pytest.mark.parametrize(("recipe", "status"), [("true", 0), ("false", 1)])
def test_targets_are_makes(tmp_path: Path, recipe: str, status: int) -> None:
    """The installation that they ask for is not done again."""
    makefile = (
        f"install:\n\t@echo installed\none: install\n\t@echo 1 passed in 1.00s\n\t@{recipe}\n"
    )
    (tmp_path / "Makefile").write_text(makefile + "two:\n\t@echo 2 passed in 1.00s\n")
    done = subprocess.run(
        [sys.executable, checks.__file__, "one", "two"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert "installed" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"3 passed, {status} failed, 0 skipped"
