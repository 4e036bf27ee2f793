"""What filters leave out, after what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphengine.kernels.draft.defer import defer_filtered, defer_filtered_reference
from graphengine.kernels.draft.trees.top_drafts import top_drafts_reference
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference

ROWS = (
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_n_sigma": 1.0, "top_k": 9},
    {},
    {"top_k": 1},
)


@pytest.mark.parametrize("columns", [40, 1100])
@pytest.mark.parametrize("op", [defer_filtered, defer_filtered_reference])
def test_the_best_is_what_would_be_sampled_and_the_rest_follows(
    device: str, op: Callable[..., None], columns: int
) -> None:
    draw = torch.Generator().manual_seed(columns)
    rows, ahead = len(ROWS), 2
    params = SamplingTensors.neutral(rows, stop_ids=1)
    for row, filters in enumerate(ROWS):
        params.temperature[row], params.seed[row] = 0.7, row
        for name, value in filters.items():
            getattr(params, name)[row] = value
    # Filters are nothing to a greedy request.
    params.temperature[-1] = 0.0
    logits = torch.randn(rows + 1, columns, generator=draw) * 3
    logits[:, 5], logits[1, 7] = -torch.inf, logits[1, 8]
    slot = torch.tensor([*range(rows), -1], dtype=torch.int32)
    position = torch.arange(rows + 1, dtype=torch.int32)
    found = logits.clone().to(device)
    on_device = SamplingTensors(*(field.to(device) for field in params))
    op(found, slot.to(device), position.to(device), on_device, ahead=ahead)
    found = found.cpu()
    drafts = top_drafts_reference(found, slot, position, params, count=6, ahead=ahead)
    expected = sample_reference(logits, slot, position + (ahead - 1), params)
    assert drafts.token[:rows, 0].tolist() == expected[:rows].tolist()
    lowered = (found < logits).sum(dim=1)
    assert lowered[0] == columns - 1 - 3 and lowered[1:4].min() > 0
    assert lowered[4:].tolist() == [0, 0, 0]
    # Among what is left out, as before: of these all that can be seen is left out but for three.
    before = top_drafts_reference(
        logits.index_fill(1, drafts.token[0, :3].long(), -torch.inf), slot, position, params,
        count=3, ahead=ahead,
    )  # fmt: skip
    assert drafts.token[0, 3:].tolist() == before.token[0].tolist()


def test_what_does_not_fit_is_refused(device: str) -> None:
    params = SamplingTensors.neutral(1, device=device)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"slot must be a dense .* \[3\]|slot"):
        defer_filtered(torch.zeros(3, 4, device=device), ints, ints, params, ahead=1)
