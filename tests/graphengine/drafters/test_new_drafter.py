"""A drafter that only these tests have: options, needs, two moments, and a row of `MAKERS`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine, run, sampled
from engines.speculation import DOT, Job, open_plain, open_speculating, outcomes
from graphengine import Engine
from graphengine.drafters import (
    Drafter,
    DraftNeeds,
    DraftSetting,
    NoDrafter,
    Prefilled,
    Verified,
    making,
)
from graphengine.options.drafts.mode import Mode, check_drafts
from graphengine.program.graph_key import decode_key
from graphengine.speculative import MODES, GateOptions


@dataclass(frozen=True, slots=True)
class LastToken(Mode):
    """The last token, k times."""

    k: int = 3

    def __post_init__(self) -> None:
        check_drafts(self.k)

    def describe(self) -> str:
        return f"last token, k={self.k}"


class LastTokenDrafter(Drafter):
    def __init__(self, length: int) -> None:
        self.needs = DraftNeeds(length=length)

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        self._draft_tokens = setting.buffers["draft_tokens"]

    def prepare(self, prefilled: Prefilled) -> None:
        self._repeat(prefilled.chunk.slot[:1], prefilled.token, prefilled.final)

    def propose(self, verified: Verified) -> None:
        count, width = verified.step.count_R, 1 + verified.drafts
        last = (count - 1).clamp(min=0).long()[:, None]
        token = verified.step.token_N.view(-1, width).gather(1, last)[:, 0]
        self._repeat(verified.lanes.slot.view(-1, width)[:, 0], token, count)

    def _repeat(self, slot_R: Tensor, token_R: Tensor, live_R: Tensor) -> None:
        table = self._draft_tokens
        slots = torch.arange(table.shape[0], dtype=slot_R.dtype, device=table.device)
        own_RS = (slot_R[:, None] == slots) & (live_R != 0)[:, None]
        token_S = (own_RS * token_R[:, None]).sum(0, dtype=table.dtype)
        torch.where(own_RS.any(0)[:, None], token_S[:, None], table, out=table)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that such a drafter would have."""
    monkeypatch.setitem(making.MAKERS, LastToken, lambda options, _: LastTokenDrafter(options.k))


@pytest.fixture
def repeating(maker: None, device: str) -> Iterator[Engine]:
    with open_speculating(LastToken(3), device=device) as engine:
        yield engine


def test_its_tokens_are_those_of_plain_decoding(repeating: Engine, device: str) -> None:
    jobs = [
        *(Job(prompt, greedy(24)) for prompt in (PROMPT, OTHER, LONG)),
        *(Job(PROMPT, sampled(seed=seed)) for seed in range(3)),
    ]
    with open_plain(device=device) as plain:
        expected = outcomes(plain, jobs)
    assert outcomes(repeating, jobs) == expected
    assert repeating.acceptance.proposed > 0
    assert repeating.report().memory.draft_lengths == (0, 3)
    assert repeating.core.description["speculative"] == "last token, k=3"


def test_its_drafts_are_verified_where_they_are_right(repeating: Engine) -> None:
    """A bias makes each token the same: one from the prompt's last chunk, then four a step."""
    request = repeating.submit(PROMPT, greedy(1 + 5 * 4, ignore_eos=True, logit_bias={7: 1e6}))
    run(repeating)
    assert set(request.token_ids) == {7}
    counts = repeating.acceptance
    assert (counts.steps, counts.proposed, counts.accepted) == (5, 15, 15)
    assert_idle(repeating)


def test_a_gate_goes_with_it(maker: None, device: str) -> None:
    """It is off above one row: the drafter sees steps that verify nothing, too."""
    jobs = [Job(PROMPT, greedy(12)), Job(OTHER, sampled(40))]
    with open_plain(device=device) as plain:
        expected = outcomes(plain, jobs)
    gate = GateOptions(max_live=1, off_below=0.0, on_above=0.0)
    with open_speculating(LastToken(2), device=device, gate=gate) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.acceptance.proposed > 0
        assert all(engine.counters[decode_key(*shape).counter] for shape in ((2, 0), (1, 2)))


def test_every_mode_has_a_maker() -> None:
    assert making.MAKERS.keys() == set(MODES)


def test_options_of_no_drafter_are_refused() -> None:
    with pytest.raises(ValueError, match=r"speculative=LastToken\(k=2\): no drafter is made of"):
        open_engine(device="cpu", speculative=LastToken(2))


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (DraftNeeds(length=2), r"needs\.length=2 of mode=LastToken\(k=3\)"),
        (DraftNeeds(length=3, prompts_only=True), r"needs\.prompts_only=True of mode="),
        (DraftNeeds(length=3, host_drafts=True), r"host_drafts=True.* has no lockstep"),
    ],
)
def test_needs_that_its_options_did_not_announce(
    monkeypatch: pytest.MonkeyPatch, needs: DraftNeeds, said: str
) -> None:
    """The configuration was made without them."""

    def make(options: LastToken, _: Any) -> Drafter:
        drafter = LastTokenDrafter(options.k)
        drafter.needs = needs
        return drafter

    monkeypatch.setitem(making.MAKERS, LastToken, make)
    with pytest.raises(AssertionError, match=said):
        open_engine(device="cpu", speculative=LastToken(3))


def test_options_without_a_length_or_a_description_cannot_be_made() -> None:
    class Silent(Mode):
        k: ClassVar[int] = 2  # type: ignore[misc]

    with pytest.raises(TypeError, match="describe"):
        Silent()  # type: ignore[abstract]


# No drafter.


def test_plain_decoding_has_a_drafter_that_needs_nothing(device: str) -> None:
    with open_engine(device=device, **DOT) as engine:
        assert isinstance(engine.core.drafter, NoDrafter)
        assert engine.core.needs == DraftNeeds()
        names = {line.name for line in engine.report().memory.budget.lines}
        assert not any("drafter" in name for name in names)
        assert "draft_tokens" not in engine.runtime.buffers.addresses()
        assert len(engine.runtime.caches) == 1


def test_needs_are_frozen_and_by_default_nothing() -> None:
    needs = DraftNeeds()
    assert not any(getattr(needs, field.name) for field in fields(needs))
    assert (needs.lanes_of_row, needs.kv_block_shape(16), needs.lockstep) == (1, (0,), False)
    with pytest.raises(FrozenInstanceError):
        needs.length = 1  # type: ignore[misc]
