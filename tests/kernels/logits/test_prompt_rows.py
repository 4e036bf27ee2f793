"""Log-probabilities of the whole vocabulary, written to memory that a field has the address of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.op import Op
from graphengine.kernels.logits import whole_vocabulary as module
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    RankedLogits,
    rank_logits,
    token_log_probabilities,
)
from graphengine.kernels.logits.whole_vocabulary import (
    write_prompt_rows,
    write_prompt_rows_reference,
)
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

UNTOUCHED = 77.0
OPS = [write_prompt_rows, write_prompt_rows_reference]


def ranked_lanes(logits: torch.Tensor, slot: torch.Tensor) -> tuple[LogprobTensors, RankedLogits]:
    wanted = torch.zeros(2, dtype=torch.int32, device=logits.device)
    wants = LogprobTensors(wanted, torch.zeros_like(wanted))
    return wants, rank_logits(logits, slot, wants)


@pytest.mark.parametrize("columns", [1, 40, 4100])
@pytest.mark.parametrize("op", OPS)
def test_rows_are_the_log_softmax(device: str, op: Callable[..., None], columns: int) -> None:
    """In lanes of any order, of which one is padded; between rows nothing is written."""
    if op is write_prompt_rows_reference and device != "cpu":
        pytest.skip("the reference writes memory of the CPU")
    seed = torch.Generator().manual_seed(columns)
    logits = (3 * torch.randn(4, columns + 3, generator=seed)).to(device)[:, :columns]
    if columns > 1:
        logits[0, 1], logits[3, 0] = -torch.inf, torch.nan
    slot = torch.tensor([1, 1, -1, 1], dtype=torch.int32, device=device)
    position = torch.tensor([4, 0, 2**30, 2], dtype=torch.int32, device=device)
    logits[2] = torch.nan
    wants, ranked = ranked_lanes(logits, slot)
    for each in ranked:
        each[2] = -1
    rows = torch.full((6, columns + 5), UNTOUCHED, device=device)
    memory = torch.tensor([rows.data_ptr(), rows.stride(0)], device=device)
    op(logits, slot, position, ranked, memory)
    expected = torch.full_like(rows, UNTOUCHED)
    for lane in (0, 1, 3):
        expected[position[lane], :columns] = logits[lane].log_softmax(0)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=2e-6, equal_nan=True)
    # Bit for bit what is reported for a token.
    token = torch.full((4,), columns - 1, dtype=torch.int32, device=device)
    count = torch.ones_like(token)
    found = token_log_probabilities(logits, token, count, slot, wants, ranked).value
    assert torch.equal(rows[[4, 0], columns - 1], found[:2])


@pytest.mark.parametrize("op", OPS)
def test_without_an_address_nothing_is_written(device: str, op: Callable[..., None]) -> None:
    logits = torch.zeros(2, 8, device=device)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    _, ranked = ranked_lanes(logits, ints)
    op(logits, ints, ints, ranked, torch.zeros(2, dtype=torch.int64, device=device))


def test_what_does_not_fit_is_refused(device: str) -> None:
    logits = torch.zeros(2, 8, device=device)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    _, ranked = ranked_lanes(logits, ints)
    with pytest.raises(ValueError, match=r"memory must be a dense torch.int64 \[2\], not torch.in"):
        write_prompt_rows(logits, ints, ints, ranked, ints)
    memory = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"position must be a dense \[2\], not \(1,\)"):
        write_prompt_rows(logits, ints, ints[:1], ranked, memory)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_it_waits_before_it_shows() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    logits = torch.zeros(2, 5000)
    _, ranked = ranked_lanes(logits, ints)
    launches: list[Op] = []
    with launches_handed_to(launches.append, module):
        memory = torch.zeros(2, dtype=torch.int64)
        write_prompt_rows(logits, ints, ints, ranked, memory, pdl=True)
    (launch,) = launches
    assert launch.grid == (2, 2)
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"slot_ptr", "memory_ptr"}
