"""The benchmark as its tests run it: small, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphengine import Engine
from graphengine.cli import main as cli
from graphengine.profiles.benchmark import eager
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.program.graph_key import GraphKey

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


def corrupt_eager_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every eager step leave another token than its graph."""
    replay = eager.EagerStep.replay

    def corrupt(stand_in: eager.EagerStep) -> None:
        replay(stand_in)
        token = engine.runtime.buffers["next_token"]
        token.copy_((token + 1) % engine.model.config.vocab_size)

    monkeypatch.setattr(eager.EagerStep, "replay", corrupt)


def launch_captured(engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str = "") -> None:
    """Launches graphs whose names begin with `kind` instead of their stand-ins."""
    runtime = engine.runtime
    captured, replay = dict(runtime.graphs), runtime.replay

    def replay_captured(key: GraphKey) -> None:
        stand_in = runtime.graphs[key]
        if key.name.startswith(kind):
            runtime.graphs[key] = captured[key]
        try:
            replay(key)
        finally:
            runtime.graphs[key] = stand_in

    monkeypatch.setattr(runtime, "replay", replay_captured)


def tiny_work(**changes: Any) -> Work:
    return Work(**({"live": 3, "prompt_tokens": 9, "new_tokens": 14, "runs": 2} | changes))
