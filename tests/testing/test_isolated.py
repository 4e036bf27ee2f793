"""run_isolated: a fresh process, and what is told of how it ended."""

from __future__ import annotations

import sys

import pytest
import torch

from graphengine.testing import GraphCheckError, IsolatedRun, run_isolated


def greet() -> None:
    print("hello", __name__)


def test_a_function_of_this_file_runs_in_a_process_of_its_own() -> None:
    assert run_isolated(greet) == IsolatedRun(status=0, stdout="hello isolated\n", stderr="")


def test_source_is_dedented_and_finds_the_same_modules() -> None:
    run = run_isolated(
        """
        import json, sys
        print(json.dumps(sys.path))
        sys.exit(3)
        """,
        status=3,
    )
    assert run.stdout.strip() == str(sys.path).replace("'", '"')


def test_a_failure_shows_what_the_child_wrote() -> None:
    source = "print('so far')\nassert 1 + 1 == 3, 'arithmetic'"
    with pytest.raises(GraphCheckError) as caught:
        run_isolated(source)
    text = str(caught.value)
    assert text.startswith("the program ended with exit status 1, expected exit status 0\nstdout:")
    assert "so far" in text
    assert "line 2" in text and text.endswith("AssertionError: arithmetic")
    assert run_isolated(source, status=None).status == 1


def test_a_child_that_does_not_fail_though_it_should() -> None:
    with pytest.raises(GraphCheckError, match="exit status 0, expected signal 6"):
        run_isolated("pass", status=-6)


def test_only_the_end_of_long_output_is_shown() -> None:
    with pytest.raises(GraphCheckError) as caught:
        run_isolated("print('x' * 10**6); raise ValueError('boom')")
    assert len(str(caught.value)) < 10_000
    assert str(caught.value).endswith("ValueError: boom")


def test_a_child_that_hangs_is_killed_and_its_output_shown() -> None:
    with pytest.raises(GraphCheckError, match=r"within 1 s and was killed\nstdout:\nbegun"):
        run_isolated("import time\nprint('begun', flush=True)\ntime.sleep(60)", timeout=1)


@pytest.mark.parametrize("program", [lambda: None, [].clear, IsolatedRun])
def test_what_the_child_could_not_find_is_refused(program: object) -> None:
    with pytest.raises(ValueError, match="is no function at the top level of a file"):
        run_isolated(program)  # type: ignore[arg-type]


def break_the_context() -> None:
    torch.zeros(8, device="cuda").index_select(0, torch.tensor([8], device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_broken_context_stays_in_the_child_natively() -> None:
    run = run_isolated(break_the_context, status=1)
    assert "device-side assert" in run.stderr
    assert torch.ones(1, device="cuda").item() == 1
