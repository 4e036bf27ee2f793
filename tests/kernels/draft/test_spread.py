"""Logits of drafts that are drawn through filters: laid out as the target's, and biased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kernels import (
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_MASK,
    USES_REPETITION,
    DecodeLanes,
    LogitsTensors,
    process_logits,
    process_logits_reference,
    spread_logits,
    spread_logits_reference,
)

NAN = float("nan")


@pytest.fixture(params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Any:
    """(spread, process, device) of the plain twins and of the kernels."""
    if request.param == "reference":
        return spread_logits_reference, process_logits_reference, "cpu"
    return spread_logits, process_logits, request.getfixturevalue("device")


@pytest.mark.parametrize(("drafted", "tokens"), [(5, 9), (700, 1500), (9, 9)])
def test_tokens_without_a_column_get_no_logit(twin: Any, drafted: int, tokens: int) -> None:
    spread, _, device = twin
    draw = torch.Generator().manual_seed(drafted)
    ids = torch.randperm(tokens, generator=draw)[:drafted].sort().values
    column = torch.full((tokens,), -1, dtype=torch.int32)
    column[ids] = torch.arange(drafted, dtype=torch.int32)
    # Dense rows of a wider tensor; a padded lane's are poisoned.
    logits = torch.randn(4, drafted + 3, generator=draw)[:, :drafted]
    logits[2] = NAN
    slot = torch.tensor([0, 1, -1, 0], dtype=torch.int32)
    found = spread(logits.to(device), column.to(device), slot.to(device)).cpu()
    assert found.shape == (4, tokens) and found.dtype == torch.float32
    live = slot >= 0
    assert torch.equal(found[live][:, ids], logits[live])
    others = torch.ones(tokens, dtype=torch.bool)
    others[ids] = False
    assert (found[live][:, others] == -torch.inf).all()


def test_a_nan_stays_to_be_seen(twin: Any) -> None:
    spread, _, device = twin
    logits, column = torch.tensor([[1.0, NAN]]), torch.tensor([-1, 1, 0], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    found = spread(logits.to(device), column.to(device), slot.to(device)).cpu()
    assert found[0, 0] == -torch.inf and found[0, 1].isnan() and found[0, 2] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits, column, slot: (logits.half(), column, slot), "float32"),
        (lambda logits, column, slot: (logits, column.long(), slot), "column must be"),
        (lambda logits, column, slot: (logits, column, slot[:1]), "slot must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    change: Callable[..., Any], message: str, device: str
) -> None:
    logits, column = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int32)
    slot = torch.zeros(2, dtype=torch.int32)
    changed = change(logits, column, slot)
    with pytest.raises(ValueError, match=message):
        spread_logits(*(tensor.to(device) for tensor in changed))


def test_only_the_steps_that_are_named_are_done(twin: Any) -> None:
    """With all flags and some steps as with the flags of those alone."""
    _, process, device = twin
    tokens, every = 40, (USES_MASK, USES_BAD_WORDS, USES_BIAS, USES_REPETITION, USES_COUNTS)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(value: Any) -> torch.Tensor:
        return torch.tensor(value, device=device)

    def processed(flags: int, steps: int) -> torch.Tensor:
        tensors = LogitsTensors(
            flags=ints([flags]),
            repetition_penalty=floats([1.5]),
            presence_penalty=floats([0.25]),
            frequency_penalty=floats([0.75]),
            bias_ids=ints([[5, -1]]),
            bias_values=floats([[2.0, 0.0]]),
            bitmask=ints([[[0x7FFFBF, 0x3F]]]),
            bad_words=ints([[[3, 11]]]),
            bad_words_start=ints([0]),
            counts=ints([[2] * 20 + [0] * 20]),
            history=ints([[3] * 8]),
        )
        logits = torch.linspace(-2, 2, tokens, device=device)[None].clone()
        lanes = DecodeLanes(ints([3]), ints([0]), ints([4]))
        process(logits, lanes, tensors, steps=steps)
        return logits.cpu()

    unchanged = processed(0, sum(every))
    for steps in (0, *every, USES_BIAS | USES_COUNTS, sum(every)):
        expected = processed(steps, sum(every))
        assert torch.equal(processed(sum(every), steps), expected), f"{steps=}"
        assert (steps == 0) == torch.equal(expected, unchanged), f"{steps=}"
