"""Drafts that follow a draft have one lane a row, and kernels for so few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engines.speculation import (
    DRAFTING,
    Job,
    Outcome,
    demo_jobs,
    dtype_of,
    open_plain,
    open_speculating,
    outcomes,
)
from graphengine.config import EngineConfig
from graphengine.drafters.draft_model import DraftModelDrafter
from graphengine.drafters.modules.base import ModuleDrafter
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch
from graphengine.speculative import MTP

CHAINS = ("mtp", "eagle3", "model")


@pytest.mark.parametrize(
    ("options", "families"),
    [
        ({}, ("dot", "fma")),
        ({"max_batch": 2}, ("dot", "dot")),
        ({"row_family": "dot"}, ("dot", "dot")),
        ({"max_seq_len": 4097}, ("dot", "dot")),
        ({"tensor_parallel": 2}, ("dot", "dot")),
        ({"speculative": None}, ("fma", "fma")),
    ],
)
def test_a_single_lane_is_of_fma(options: dict[str, Any], families: tuple[str, str]) -> None:
    """With the defaults of a GPU, which `tests/conftest.py` gives to the CPU."""
    usual: dict[str, Any] = {
        "device": "cpu", "max_batch": 1, "max_seq_len": 4096, "speculative": MTP(k=3)
    }  # fmt: skip
    config = EngineConfig(**(usual | options))
    assert (config.family, config.chain_family) == families


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Prompts of one chunk and of several, greedy and sampled."""
    return demo_jobs()[:3]


@pytest.fixture(scope="module")
def said_plainly(jobs: list[Job]) -> list[Outcome]:
    with open_plain(max_batch=1) as engine:
        return outcomes(engine, jobs)


@pytest.mark.parametrize("name", CHAINS)
def test_only_the_first_run_is_of_the_family_of_several_lanes(
    name: str, jobs: list[Job], said_plainly: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tokens are those of plain decoding."""
    families: list[tuple[int, RowFamily]] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            given = [*arguments, *options.values()]
            lanes = next(each for each in given if isinstance(each, DecodeLanes))
            launch = next(each for each in given if isinstance(each, DecodeLaunch))
            families.append((lanes.slot.numel(), launch.plans.family))
            return function(*arguments, **options)

        return run

    with open_speculating(DRAFTING[name], max_batch=1, row_family=None) as engine:
        drafter = engine.runtime.program.drafter
        if isinstance(drafter, DraftModelDrafter):
            monkeypatch.setattr(drafter._model, "decode", recorded(drafter._model.decode))
        else:
            assert isinstance(drafter, ModuleDrafter)
            monkeypatch.setattr(drafter._opened, "run", recorded(drafter._opened.run))
        head = drafter._drafts._head
        monkeypatch.setattr(head, "tiles", recorded(head.tiles))
        assert outcomes(engine, jobs) == said_plainly
        assert engine.acceptance.accepted > 0
    assert {lanes for lanes, family in families if family == "fma"} == {1}
    assert {family for lanes, family in families if lanes > 1} == {"dot"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHAINS)
def test_an_engine_of_one_row_drafts_as_well(name: str) -> None:
    """Equally many drafts are right where all launches are of one family."""
    accepted = []
    for family in (None, "dot"):
        options = {"device": "cuda", "max_batch": 1, "row_family": family, **dtype_of(name)}
        with open_speculating(DRAFTING[name], **options) as engine:
            assert engine.config.chain_family == ("fma" if family is None else "dot")
            outcomes(engine, demo_jobs())
            accepted.append(engine.acceptance.accepted)
    assert abs(accepted[0] - accepted[1]) <= 0.05 * accepted[1], accepted
    assert accepted[0] > 0
