"""The benchmark as its tests run it: in small, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphengine import Engine, cli
from graphengine.profiles.engines import build_engine
from graphengine.profiles.shapes import Subject
from graphengine.profiles.workload import Work

SMALL = ("--prompt-tokens", "9", "--new-tokens", "14", "--runs", "2", "--device", "cpu")
CPU = {"device": "cpu", "max_batch": 3, "max_seq_len": 96}

Bench = Callable[..., tuple[int, str, str]]


def bench_command(capsys: pytest.CaptureFixture[str], usual: tuple[str, ...] = SMALL) -> Bench:
    """`run("--shape", "tiny")` -> (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(["bench", *usual, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def tiny_engine() -> Iterator[Engine]:
    """An engine of three slots with random weights, for a fixture."""
    engine, _ = build_engine(Subject.of_shape("tiny"), CPU)
    with engine:
        yield engine


def tiny_work(**changes: Any) -> Work:
    return Work(**({"live": 3, "prompt_tokens": 9, "new_tokens": 14, "runs": 2} | changes))
