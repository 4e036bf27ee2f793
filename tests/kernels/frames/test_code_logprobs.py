"""Log-probabilities of codes, and the mailbox that carries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.frames import logprobs as module
from graphengine.kernels.frames.logprobs import (
    code_logprobs,
    code_logprobs_reference,
    publish_code_logprobs,
    publish_code_logprobs_reference,
)
from graphengine.kernels.logits.logprobs import LogprobTensors
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
HUGE = 2**31 - 1
UNTOUCHED = -77.0


@dataclass(frozen=True)
class Twin:
    """The ops, or their plain twins, on one device."""

    logprobs: Callable[..., None]
    publish: Callable[..., None]
    device: str

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@pytest.fixture(params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(code_logprobs_reference, publish_code_logprobs_reference, "cpu")
    return Twin(code_logprobs, publish_code_logprobs, request.getfixturevalue("device"))


def wants_of(twin: Twin) -> LogprobTensors:
    """Slots 0 and 3 want raw ones, 1 none, 2 those that are drawn from."""
    return LogprobTensors(twin.ints(0, -1, 0, 0), twin.ints(0, 2, 2, 1))


@pytest.mark.parametrize("codes", [5, 37, 4099])
def test_they_are_log_softmax_at_the_codes(twin: Twin, codes: int) -> None:
    """Padded lanes, and lanes whose slots want none, are left alone."""
    draw = torch.Generator().manual_seed(codes)
    slot = (3, -1, 2, 1, 0, 3, 0)
    logits = torch.full((len(slot), codes + 3), torch.nan)[:, :codes]
    logits.copy_(3 * torch.randn(len(slot), codes, generator=draw))
    sampled = torch.randn(len(slot), codes, generator=draw)
    sampled[2, : codes // 2] = -torch.inf
    chosen = [codes - 1, HUGE, codes // 2, 1, 0, codes, -1]
    logits[1], sampled[1] = torch.nan, torch.nan
    out = torch.full((len(slot),), UNTOUCHED, device=twin.device)
    given = twin.ints(*chosen), twin.ints(*slot), wants_of(twin), out
    twin.logprobs(logits.to(twin.device), *given, sampled_NV=sampled.to(twin.device))
    raw, drawn = logits.log_softmax(1), sampled.log_softmax(1)
    wanted = [raw[0, -1], UNTOUCHED, drawn[2, codes // 2], UNTOUCHED, raw[4, 0]]
    torch.testing.assert_close(out.cpu()[:5], torch.tensor([float(each) for each in wanted]))
    assert out[5:].tolist() == [-torch.inf, -torch.inf]
    # Without logits that are drawn from, all come from the logits.
    twin.logprobs(logits.to(twin.device), *given)
    torch.testing.assert_close(out.cpu()[2], raw[2, codes // 2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution_have_nan(twin: Twin, bad: float) -> None:
    logits = torch.zeros(2, 9)
    logits[0, 4] = bad
    out = torch.zeros(2, device=twin.device)
    twin.logprobs(logits.to(twin.device), twin.ints(2, 2), twin.ints(0, 3), wants_of(twin), out)
    assert out[0].isnan() and out[1].item() == pytest.approx(-2.1972246)


def test_a_mailbox_gets_those_of_rows_with_a_frame(twin: Twin) -> None:
    """All other items keep their old contents."""
    mailbox = torch.full((3, 6, 5), -1, dtype=torch.int64, device=twin.device)
    slot, count = twin.ints(2, -1, 0, 1, 3), twin.ints(1, HUGE, 0, 1, 1)
    value = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    value[2, 4] = -torch.inf
    sequence = 2**32 + 7
    twin.publish(
        mailbox,
        torch.tensor([sequence], device=twin.device),
        count,
        slot,
        wants_of(twin),
        value.to(twin.device),
    )
    found = mailbox.cpu()
    for row in (0, 4):
        items = found[sequence % 3, row, :4]
        assert (items >> 32).tolist() == [7] * 4
        assert torch.equal(items.to(torch.int32).view(torch.float32), value[:, row])
        found[sequence % 3, row, :4] = -1
    assert (found == -1).all()


def arguments(**changed: Any) -> dict[str, Any]:
    """Arguments of `code_logprobs` that fit each other, but for those that are changed."""
    ints = torch.zeros(2, dtype=torch.int32)
    given = {
        "logits": torch.zeros(2, 9),
        "code": ints,
        "slot": ints,
        "wants": LogprobTensors(ints, ints),
        "out": torch.zeros(2),
    }
    return given | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(2, 9).half()}, r"logits must be float32 \[N, V\]"),
        ({"code": torch.zeros(2)}, "code must be int32"),
        ({"slot": torch.zeros(3, dtype=torch.int32)}, r"slot must be a dense \[2\]"),
        ({"out": torch.zeros(3)}, r"out must be a dense torch.float32 \[2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code_logprobs(*arguments(**changed).values())


def test_mailboxes_that_do_not_fit_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    wants, sequence = LogprobTensors(ints, ints), torch.zeros(1, dtype=torch.int64)
    small = torch.zeros(2, 2, 3, dtype=torch.int64)
    for value, message in (
        (torch.zeros(4, 2), "4 codes do not fit a mailbox of 3 items a lane"),
        (torch.zeros(3, 1), r"value must be a dense float32 \[K, 2\], not torch.float32 \(3, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            publish_code_logprobs(small, sequence, ints, ints, wants, value)


@compiles
def test_the_kernels_wait_before_they_store() -> None:
    """As compiled for sm_90."""
    ints = torch.zeros(2, dtype=torch.int32, device="meta")
    logits, wants = torch.zeros(2, 37, device="meta"), LogprobTensors(ints, ints)
    out = torch.zeros(2, device="meta")
    mailbox = torch.zeros(2, 2, 3, dtype=torch.int64, device="meta")
    value = torch.zeros(3, 2, device="meta")
    sequence = torch.zeros(1, dtype=torch.int64, device="meta")
    calls: list[Callable[[], object]] = [
        lambda: code_logprobs(logits, ints, ints, wants, out, sampled_NV=logits, pdl=True),
        lambda: code_logprobs(logits, ints, ints, wants, out, pdl=True),
        lambda: publish_code_logprobs(mailbox, sequence, ints, ints, wants, value, pdl=True),
    ]
    for call in calls:
        ptx, _ = compile_launch(record_launch(module, call))
        assert_waits_before_it_shows(ptx)
