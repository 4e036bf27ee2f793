"""The logits of a draw, after filters, temperature and stop ids that wait for min_len."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.op import Op
from graphengine.kernels.logits import sampled_logits as module
from graphengine.kernels.logits.logprobs import LogprobTensors
from graphengine.kernels.logits.sampled_logits import (
    SAMPLED,
    write_sampled_logits,
    write_sampled_logits_reference,
)
from graphengine.kernels.sample import cutoff
from graphengine.kernels.sample.candidates import SamplingTensors
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

ROWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.6, "top_p": 0.6},
    {"temperature": 0.5, "min_p": 0.3},
    {"temperature": 0.7, "top_n_sigma": 1.0, "top_k": 9},
    {"temperature": 0.0, "top_k": 2},
    {"temperature": 2.0, "min_len": 9},
    {"temperature": 0.0, "min_len": 9},
)
STOPS = (6, 11)
UNTOUCHED = 77.0
OPS = [write_sampled_logits, write_sampled_logits_reference]


def parameters(device: str) -> SamplingTensors:
    params = SamplingTensors.neutral(len(ROWS), stop_ids=3)
    params.stop_ids[:, : len(STOPS)] = torch.tensor(STOPS, dtype=torch.int32)
    for row, options in enumerate(ROWS):
        for name, value in options.items():
            getattr(params, name)[row] = value
    return SamplingTensors(*(field.to(device) for field in params))


def expected_row(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """What is documented, with a sort."""
    logits = logits.clone()
    if options.get("min_len"):
        logits[list(STOPS)] = -torch.inf
    temperature = options["temperature"]
    if not temperature:
        return logits
    order = logits.argsort(descending=True, stable=True)
    count = int((logits > -torch.inf).sum())
    if "top_n_sigma" in options:
        there = logits[logits > -torch.inf].double()
        floor = there.max() - options["top_n_sigma"] * there.std(correction=0)
        count = int((logits >= floor).sum())
    count = min(count, options.get("top_k", count))
    scaled = logits / temperature
    mass = (scaled[order] - scaled.max()).double().exp()
    if "top_p" in options:
        share = mass[:count].cumsum(0) / mass[:count].sum()
        count = int((share < options["top_p"]).sum()) + 1
    if "min_p" in options:
        count = min(count, int((mass >= options["min_p"]).sum()))
    scaled[order[count:]] = -torch.inf
    return scaled


@pytest.mark.parametrize("columns", [40, 1100])
@pytest.mark.parametrize("op", OPS)
def test_it_is_what_the_draw_is_from(device: str, op: Callable[..., None], columns: int) -> None:
    lanes = len(ROWS) + 3
    logits = 3 * torch.randn(lanes, columns, generator=torch.Generator().manual_seed(columns))
    logits[:, 5] = -torch.inf
    # The last three lanes want other log-probabilities, or none, or are padded.
    slot = torch.tensor([*range(len(ROWS)), 0, 1, -1], dtype=torch.int32)
    wanted = torch.zeros(len(ROWS), dtype=torch.int32)
    source = torch.full_like(wanted, SAMPLED.value)
    found = torch.full_like(logits, UNTOUCHED).to(device)
    before = logits.to(device)
    position = torch.full((lanes,), 7, dtype=torch.int32, device=device)
    call: list[Any] = [before, slot.to(device), position, parameters(device)]
    op(*call, LogprobTensors(wanted.to(device), source.to(device)), out_NV=found)
    assert torch.equal(before.cpu(), logits)
    for lane, options in enumerate(ROWS):
        torch.testing.assert_close(
            found[lane].cpu(), expected_row(logits[lane], options), rtol=1e-6, atol=0
        )
    # Past min_len the stop ids may be drawn.
    op(*call[:2], position + 1, call[3], LogprobTensors(wanted.to(device), source.to(device)),
       out_NV=found)  # fmt: skip
    assert torch.equal(found[6].cpu(), logits[6])
    wanted[0], source[1] = -1, 1
    found.fill_(UNTOUCHED)
    op(*call, LogprobTensors(wanted.to(device), source.to(device)), out_NV=found)
    untouched = (found == UNTOUCHED).all(dim=1).cpu().tolist()
    assert untouched == [True, True] + [False] * (len(ROWS) - 2) + [True] * 3


@pytest.mark.parametrize("op", OPS)
def test_a_nan_stays(device: str, op: Callable[..., None]) -> None:
    logits = torch.tensor([[1.0, torch.nan, 2.0]], device=device)
    ints = torch.zeros(1, dtype=torch.int32, device=device)
    params = SamplingTensors.neutral(1, device=device)
    params.temperature[0] = 0.5
    found = torch.empty_like(logits)
    op(logits, ints, ints, params, LogprobTensors(ints, ints + SAMPLED.value), out_NV=found)
    assert found[0, 1].isnan() and found[0, [0, 2]].tolist() == [2.0, 4.0]


def test_what_does_not_fit_is_refused(device: str) -> None:
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    params = SamplingTensors.neutral(2, device=device)
    logits = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match=r"raw must be float32 \[2, 4\]"):
        write_sampled_logits(
            logits, ints, ints, params, LogprobTensors(ints, ints), out_NV=logits[:, :3]
        )


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_it_waits_before_it_shows() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    params = SamplingTensors.neutral(2)
    logits = torch.zeros(2, 4000)
    launches: list[Op] = []
    with launches_handed_to(launches.append, module, cutoff):
        wants = LogprobTensors(ints, ints)
        write_sampled_logits(logits, ints, ints, params, wants, out_NV=logits.clone(), pdl=True)
    _, launch = launches
    assert launch.grid == (2, 4)
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"slot_ptr", "wanted_ptr", "wants_raw_ptr", "temperature_ptr"}
