"""Logits of drafts that are drawn through filters: laid out as the target's, and biased."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.kernels.draft.spread import spread_logits, spread_logits_reference
from graphengine.kernels.logits.logits import (
    LogitsTensors,
    process_logits,
    process_logits_reference,
)
from graphengine.kernels.logits.logits_triton import (
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_GRAMMAR,
    USES_MASK,
    USES_REPETITION,
)
from graphengine.kernels.step.state import DecodeLanes

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
    # Dense rows of a wider tensor; a padded lane's are poisoned.
    logits = torch.randn(4, drafted + 3, generator=draw)[:, :drafted]
    logits[2] = NAN
    logits[1, 3] = NAN
    slot = torch.tensor([0, 1, -1, 0], dtype=torch.int32)
    arguments = (tensor.to(device) for tensor in (logits, ids.int(), slot))
    found = spread(*arguments, vocabulary=tokens).cpu()
    assert found.shape == (4, tokens) and found.dtype == torch.float32
    live, others = slot >= 0, torch.ones(tokens, dtype=torch.bool)
    torch.testing.assert_close(found[live][:, ids], logits[live], rtol=0, atol=0, equal_nan=True)
    others[ids] = False
    assert (found[live][:, others] == -torch.inf).all()


@pytest.mark.parametrize("tokens", [4, 8])
def test_vocabularies_of_other_sizes_agree_on_what_both_have(twin: Any, tokens: int) -> None:
    spread, _, device = twin
    logits, slot = torch.arange(6.0)[None], torch.zeros(1, dtype=torch.int32)
    found = spread(logits.to(device), None, slot.to(device), vocabulary=tokens).cpu()
    assert found[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -torch.inf, -torch.inf][:tokens]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(2, 3).half()}, "float32"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "token_ids must be"),
        ({"ids": torch.zeros(4, dtype=torch.int32)}, "token_ids must be"),
        ({"slot": torch.zeros(1, dtype=torch.int32)}, "slot must be"),
        ({"vocabulary": 0}, "vocabulary=0 must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    logits, slot = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)
    ids = torch.zeros(3, dtype=torch.int32)
    given = {"logits": logits, "ids": ids, "slot": slot, "vocabulary": 4} | changed
    with pytest.raises(ValueError, match=message):
        spread_logits(given["logits"], given["ids"], given["slot"], vocabulary=given["vocabulary"])


def test_only_the_steps_that_are_named_are_done(twin: Any) -> None:
    """With all flags and some steps as with the flags of those alone."""
    _, process, device = twin
    tokens = 40
    every = (USES_MASK, USES_BAD_WORDS, USES_BIAS, USES_REPETITION, USES_COUNTS, USES_GRAMMAR)

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
