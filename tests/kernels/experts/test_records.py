"""Records of experts: published, fetched for replay, and routed by, against plain twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.experts.records import (
    given_routes,
    given_routes_reference,
    publish_routes,
    publish_routes_reference,
    route_items,
)
from graphengine.kernels.experts.router import Router, Routes, route, route_reference

# Triton's interpreter computes padded experts with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SENTINEL = 77
ENTRIES = 4
ROUTERS = {
    "softmax": Router(top_k=3, normalised=True),
    "sigmoid": Router(top_k=3, scores="sigmoid", scale=2.5),
    "softmax_of_chosen": Router(top_k=3, scores="softmax_of_chosen"),
}


def random_ids(layers, lanes, top_k, seed, device="cpu"):
    """Different ids of each lane, of 512."""
    scores = torch.rand(layers, lanes, 512, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(dim=2)[..., :top_k].int().contiguous().to(device)


def unpacked(words, layers, top_k):
    """The ids [L, k] of a token's items."""
    return [
        [int(words[(layer * top_k + k) // 2]) >> 16 * ((layer * top_k + k) % 2) & 0xFFFF
         for k in range(top_k)]
        for layer in range(layers)
    ]  # fmt: skip


@settings(deadline=None, max_examples=extent(15, 60))
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 3),
    layers=st.integers(1, 3) | st.just(48),
    top_k=st.integers(1, 5) | st.just(8),
    sequence=st.sampled_from([1, 7, 2**31 - 1, 2**32 + 5]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_what_was_taken_is_published_and_nothing_else(
    device, rows, width, layers, top_k, sequence, seed, data
):
    lanes = rows * width
    counts = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    padded = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
    slot = torch.arange(rows, dtype=torch.int32)
    slot[padded] = -1
    slot = slot.repeat_interleave(width).to(device)
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    expert = random_ids(layers, lanes, top_k, seed, device)
    expert[:, slot < 0] = 2**31 - 1
    of_token = route_items(layers, top_k)
    shape = (ENTRIES, rows + 1, width * of_token + 1)
    written = []
    for function in (publish_routes, publish_routes_reference):
        mailbox = torch.full(shape, SENTINEL, dtype=torch.int64, device=device)
        arguments = [mailbox, torch.tensor([sequence], device=device), count, slot, expert]
        if function is publish_routes_reference:
            arguments = [each.cpu() for each in arguments]
        function(*arguments)
        written.append(arguments[0].cpu())
    assert torch.equal(*written)
    (mailbox, _), ids = written, expert.cpu()
    entry = mailbox[sequence % ENTRIES]
    for row in range(rows):
        for j in range(width):
            words = entry[row, j * of_token : (j + 1) * of_token]
            if row in padded or j >= counts[row]:
                assert (words == SENTINEL).all()
                continue
            assert ((words >> 32) & 0xFFFFFFFF == sequence & 0xFFFFFFFF).all()
            assert unpacked(words, layers, top_k) == ids[:, row * width + j].tolist()
    entry[:rows, : width * of_token] = SENTINEL
    assert (mailbox == SENTINEL).all()


@settings(deadline=None, max_examples=extent(15, 60))
@given(
    lanes=st.integers(1, 9),
    layers=st.integers(1, 3) | st.just(48),
    top_k=st.integers(1, 5) | st.just(8),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_ids_of_a_record_are_those_of_the_lanes_slot_and_position(
    device, lanes, layers, top_k, seed, data
):
    slots, positions = 3, 6
    table = random_ids(layers, slots * positions, top_k, seed)
    table = table.transpose(0, 1).reshape(slots, positions, layers, top_k).to(torch.int16)
    length = torch.tensor(
        data.draw(st.lists(st.integers(0, positions), min_size=slots, max_size=slots)),
        dtype=torch.int32,
    )
    picks = st.tuples(st.integers(-1, slots - 1), st.integers(0, positions + 3))
    where = data.draw(st.lists(picks, min_size=lanes, max_size=lanes))
    slot, position = (
        torch.tensor(column, dtype=torch.int32) for column in zip(*where, strict=True)
    )
    position[slot < 0] = -(2**31)
    arguments = [each.to(device) for each in (table.contiguous(), length, slot, position)]
    found = given_routes(*arguments).cpu()
    twin = given_routes_reference(
        table, length, slot, position, out=torch.empty(layers, lanes, top_k, dtype=torch.int32)
    )
    assert torch.equal(found, twin)
    for lane, (of, at) in enumerate(where):
        there = of >= 0 and at < length[of]
        expected = table[of, at].int() if there else torch.full((layers, top_k), -1)
        assert torch.equal(found[:, lane], expected)


@pytest.mark.parametrize("function", [route, route_reference])
@pytest.mark.parametrize("name", ROUTERS)
def test_given_experts_have_their_own_scores_and_other_lanes_their_own_choice(
    device, function, name
):
    router = ROUTERS[name]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator).to(device) * 3
    # Far apart: the first of a given lane is not the best.
    logits[1, 2] = 200.0
    slot = torch.tensor([0, 1, -1, 2, 3], dtype=torch.int32, device=device)
    given = torch.tensor(
        [[-1, -1, -1], [5, 2, 0], [6, 6, 6], [-1, -1, -1], [4, 1, 6]],
        dtype=torch.int32,
        device=device,
    )
    expert = torch.full_like(given, SENTINEL)
    if function is route:
        routes = route(logits, slot, router, given_Nk=given, expert_Nk=expert)
        assert routes.expert.data_ptr() == expert.data_ptr()
    else:
        out = Routes(expert, logits.new_zeros(5, 3))
        routes = route_reference(logits, slot, router, given_Nk=given, out=out)
    free = function(logits, slot, router)
    for lane in (0, 3):
        assert torch.equal(routes.expert[lane], free.expert[lane])
        assert torch.equal(routes.weight[lane], free.weight[lane])
    assert (routes.expert[2] == SENTINEL).all()
    for lane in (1, 4):
        assert torch.equal(routes.expert[lane], given[lane])
        scores = logits[lane].double()
        if name == "softmax_of_chosen":
            weights = scores[given[lane].long()].softmax(dim=0)
        else:
            scores = scores.softmax(dim=0) if name == "softmax" else scores.sigmoid()
            weights = scores[given[lane].long()]
            weights = weights / weights.sum() if router.normalised else weights
        torch.testing.assert_close(
            routes.weight[lane].double(), weights * router.scale, atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("name", ROUTERS)
def test_the_routers_own_choice_given_back_has_the_same_bits(device, name):
    router = ROUTERS[name]
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).to(device)
    slot = torch.arange(9, dtype=torch.int32, device=device)
    free = route(logits, slot, router)
    given = route(logits, slot, router, given_Nk=free.expert.clone())
    assert torch.equal(given.expert, free.expert)
    assert torch.equal(given.weight, free.weight)


def good_publishing(**changes):
    arguments = {
        "mailbox_items": torch.zeros(2, 2, 8, dtype=torch.int64),
        "sequence_1": torch.ones(1, dtype=torch.int64),
        "count_R": torch.ones(2, dtype=torch.int32),
        "slot_N": torch.zeros(4, dtype=torch.int32),
        "expert_LNk": torch.zeros(2, 4, 3, dtype=torch.int32),
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count_R": torch.ones(3, dtype=torch.int32)}, "4 lanes of 3 rows"),
        ({"count_R": torch.ones(2)}, "count must be int32"),
        ({"expert_LNk": torch.zeros(2, 4, 3)}, r"dense int32 \[L, 4, k\], not torch.float32"),
        ({"expert_LNk": torch.zeros(2, 3, 3, dtype=torch.int32)}, r"not torch.int32 \(2, 3, 3\)"),
        (
            {"expert_LNk": torch.zeros(3, 4, 3, dtype=torch.int32)},
            "2 tokens of 5 items do not fit a mailbox of 8 items a lane",
        ),
        ({"mailbox_items": torch.zeros(2, 1, 8, dtype=torch.int64)}, "2 rows do not fit"),
    ],
)
def test_what_does_not_fit_is_not_published(changes, message):
    publish_routes(**good_publishing())
    with pytest.raises(ValueError, match=message):
        publish_routes(**good_publishing(**changes))


def test_tables_and_given_ids_of_a_wrong_kind_are_refused():
    slot = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 3, 1, 2, dtype=torch.int16)
    given_routes(table, slot, slot, slot)
    with pytest.raises(ValueError, match=r"dense int16 \[S, P, L, k\], not torch.int32"):
        given_routes(table.int(), slot, slot, slot)
    with pytest.raises(ValueError, match=r"length must be a dense \[2\], not \(3,\)"):
        given_routes(table, torch.zeros(3, dtype=torch.int32), slot, slot)
    wrong = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"given must be a dense torch.int32 \[4\]"):
        route(torch.zeros(2, 5), slot, Router(top_k=2), given_Nk=wrong)
