"""What an engine does where the caller leaves options to the kind of device.

Other tests' engines have a GPU's defaults on a CPU, too (tests/conftest.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from engines.small_engine import OTHER, PROMPT, open_engine, sampled, tokens_of
from graphengine.cli.main import main
from graphengine.config import EngineConfig
from graphengine.speculative import NGram, UserProvided

CASES: list[tuple[dict[str, Any], tuple[int, str], tuple[int, str]]] = [
    # Options, lookahead and family on a CPU, and on a GPU.
    ({"max_batch": 1}, (0, "dot"), (1, "fma")),
    ({"max_batch": 1, "max_seq_len": 8192}, (0, "dot"), (1, "fma")),
    ({"max_batch": 1, "speculative": NGram(k=3)}, (0, "dot"), (1, "dot")),
    ({"max_batch": 8}, (0, "dot"), (1, "dot")),
    ({"max_batch": 8, "speculative": UserProvided(2)}, (0, "dot"), (0, "dot")),
    # Stages work at the same time on each device.
    ({"max_batch": 8, "pipeline_parallel": 2}, (1, "dot"), (1, "dot")),
    ({"max_batch": 8, "pipeline_parallel": 2, "lookahead": 0}, (0, "dot"), (0, "dot")),
    ({"max_batch": 1, "row_family": "fma"}, (0, "fma"), (1, "fma")),
    ({"max_batch": 2, "row_family": "fma", "lookahead": 1}, (1, "fma"), (1, "fma")),
    ({"max_batch": 1, "row_family": "dot", "lookahead": 0}, (0, "dot"), (0, "dot")),
]


@pytest.mark.usefixtures("cpu_defaults")
@pytest.mark.parametrize(("options", "on_cpu", "on_gpu"), CASES)
def test_what_is_left_out_is_the_devices_and_what_is_given_stays(
    options: dict[str, Any],
    on_cpu: tuple[int, str],
    on_gpu: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        config = EngineConfig(device=device, **options)
        assert (config.launched_ahead, config.family) == expected, device
        # A rank's own defaults do not count.
        other = config.of_rank("cpu")
        assert other.device == "cpu"
        assert (other.launched_ahead, other.family) == expected, device
        assert other.mailbox_entries == config.mailbox_entries
        assert other.staging_blocks == config.staging_blocks


@pytest.mark.usefixtures("cpu_defaults")
def test_info_shows_the_devices_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in (
        ((), {"row_family": "dot", "lookahead": 0}),
        (("--row-family", "fma", "--lookahead", "1"), {"row_family": "fma", "lookahead": 1}),
    ):
        assert main(["info", "--device", "cpu", "--max-batch", "1", "--json", *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {name: found[name] for name in expected} == expected


@pytest.mark.usefixtures("cpu_defaults")
def test_on_a_cpu_a_step_that_does_not_wait_returns_what_it_computed() -> None:
    with open_engine(device="cpu", max_batch=1) as engine:
        assert "row family dot (for a CPU), " in str(engine.report())
        request = engine.submit(PROMPT, sampled(seed=3))
        events = engine.step(timeout=0)
        assert tokens_of(events) == tuple(request.token_ids) != ()
        assert not engine.core.in_flight


@pytest.mark.usefixtures("cpu_defaults")
def test_tokens_are_those_of_a_step_launched_ahead() -> None:
    said = []
    for options in ({}, {"lookahead": 1}):
        with open_engine(device="cpu", max_batch=2, **options) as engine:
            results = engine.generate([PROMPT, OTHER], sampled(seed=5))
            said.append([result.token_ids for result in results])
    assert said[0] == said[1]
