"""Logits after the nodes of a tree: those after the path to each, as a chain of drafts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.logits.logits import (
    LogitsTensors,
    process_logits,
    process_logits_reference,
)
from graphengine.kernels.logits.logits_triton import (
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_MASK,
    USES_REPETITION,
)
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    rank_logits,
    token_log_probabilities,
)
from graphengine.kernels.step.state import DecodeLanes
from launches.trees import POISON, Shape, shapes

V, KNOWN = 12, 6
Op = Callable[..., None]


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> tuple[Op, str]:
    if request.param == "reference":
        return process_logits_reference, "cpu"
    return process_logits, request.getfixturevalue("device")


def tensors(seed: int, masks: torch.Tensor, device: str) -> LogitsTensors:
    """One slot that asks for everything, of a vocabulary of a few ids."""
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape: int, most: int = V) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator, dtype=torch.int32)

    bad_words = ints(1, 8, 4, most=3)
    bad_words[0, ::2, :2] = -1
    flags = USES_MASK | USES_BAD_WORDS | USES_BIAS | USES_REPETITION | USES_COUNTS
    found = LogitsTensors(
        flags=torch.tensor([flags], dtype=torch.int32),
        repetition_penalty=torch.tensor([1.3]),
        presence_penalty=torch.tensor([0.5]),
        frequency_penalty=torch.tensor([0.25]),
        bias_ids=torch.tensor([[1, 4]], dtype=torch.int32),
        bias_values=torch.tensor([[0.5, -2.0]]),
        bitmask=masks[None],
        bad_words=bad_words,
        bad_words_start=ints(1, most=KNOWN),
        counts=ints(1, V, most=3),
        history=ints(1, KNOWN + 20, most=3),
    )
    return LogitsTensors(*(tensor.to(device) for tensor in found))


def process(
    twin: tuple[Op, str], logits: torch.Tensor, tokens: list[int], depths: list[int],
    said: LogitsTensors, tree: TreeLanes | None,
) -> torch.Tensor:  # fmt: skip
    """One row of these tokens; the lanes below 0 are padded."""
    op, device = twin
    slots = [0 if token >= 0 else -1 for token in tokens]
    positions = [KNOWN + depth for depth in depths]
    columns = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (tokens, slots, positions)
    )
    result = logits.to(device).clone()
    op(result, DecodeLanes(*columns), said, num_speculative_tokens=len(tokens) - 1, tree=tree)
    return result.cpu()


@given(shape=shapes(), seed=st.integers(0, 999))
@settings(max_examples=extent(8, 40), deadline=None, derandomize=True)
def test_a_node_is_as_a_chain_of_its_path(twin: tuple[Op, str], shape: Shape, seed: int) -> None:
    """With every option at once, beside a node without a draft."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape.width, V, generator=generator)
    masks = torch.randint(2**V, (shape.width, 1), generator=generator, dtype=torch.int32)
    tokens = torch.randint(3, (shape.width,), generator=generator).tolist()
    gone = shape.width - 1 if shape.width > 2 else None
    tree = shape.lanes(1, twin[1])
    fed = list(tokens)
    if gone is not None:
        fed[gone] = -1
        for part in tree:
            part[gone] = POISON
    said = tensors(seed, masks, twin[1])
    actual = process(twin, logits, fed, shape.depths, said, tree)
    for node in range(shape.width):
        if node == gone:
            assert torch.equal(actual[node], logits[node])
            continue
        path = shape.path(node)
        alone = said._replace(bitmask=masks[path][None].to(twin[1]))
        chain = process(
            twin, logits[path], [tokens[each] for each in path], [*range(len(path))], alone, None
        )
        assert torch.equal(actual[node], chain[-1]), f"{node=} of {shape}"


def test_log_probabilities_of_a_path(device: str) -> None:
    """Lanes that have their logits elsewhere get the values of logits that lie in order."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, V, generator=generator).to(device)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wants = LogprobTensors(ints([2, 1]), ints([1, 0]))
    raw = torch.randn(9, V, generator=generator).to(device)
    source, slot, token, count = (
        [0, 2, 5, 6, 6, 6],
        [1, 1, 1, 0, -1, -1],
        [3, 4, 5, 6, 0, 0],
        [3, 1],
    )
    found = []
    for rows, where in (([*range(9)], ints(source)), (source, None)):
        options = {"raw_NV": raw[rows], "source_N": where}
        ranked = rank_logits(logits[rows], ints(slot), wants, **options)
        tokens = token_log_probabilities(
            logits[rows], ints(token), ints(count), ints(slot), wants, ranked, **options
        )
        found.append([part[:4] for part in (*ranked, *tokens)])
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours, plain)
    with pytest.raises(ValueError, match=r"source must be a dense \[6\], not \(4,\)"):
        rank_logits(logits, ints(slot), wants, source_N=ints(source[:4]))
