"""Products whose parts are pushed from their own kernel: the bits of a product, a sum and an
addition, in whatever order ranks come.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.sums import sum_parts_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.linear.epilogues import AddResidual, Store, StoreSquares
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.residual import Residual, add_to_residual_reference, new_residual
from launches.push_world import World
from launches.quantised import random_quantised

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="ranks of one process need TRITON_INTERPRET=1"
)
PLANS = [
    LinearPlan("fma", block_m=1, block_k=64),
    LinearPlan("fma", block_m=4, block_k=32),
    LinearPlan("dot", block_m=16, block_k=32),
    LinearPlan("dot", block_m=32, block_k=16, splits=3),
]


class Product:
    """What ranks multiply, each a part of; the last lanes may be padded."""

    def __init__(self, ranks: int, lanes: int, live: int, M: int, K: int, plan: LinearPlan) -> None:
        self.plan = plan
        self.launch = Launch(arrivals=torch.zeros(64, dtype=torch.int32))
        self.x = torch.randn(ranks, lanes, K)
        self.weight = torch.randn(ranks, M, K)
        self.slot = torch.arange(lanes, dtype=torch.int32)
        self.slot[live:] = -1
        self.squares = torch.rand(2, lanes)
        self.bias, self.norm = torch.randn(M), torch.randn(M)
        self.stream = torch.randn(lanes, M)

    def call(self, rank: int, *, normed: bool, bias: bool) -> LinearCall:
        return LinearCall(
            self.x[rank],
            self.weight[rank],
            self.slot,
            squares_TN=self.squares if normed else None,
            eps=1e-5,
            bias=self.bias if bias else None,
            plan=self.plan,
            launch=self.launch,
        )

    def parts(self, rank: int, *, normed: bool) -> torch.Tensor:
        """float32 [lanes, M]: what a rank pushes, with anything in padded lanes."""
        out = torch.full_like(self.stream, float("nan"))
        return linear(self.call(rank, normed=normed, bias=False), Store(out=out))

    def to_stream(self, peers: Peers, *, normed: bool, bias: bool) -> Residual:
        residual = new_residual(*self.stream.shape, 1, dtype=torch.float32, device="cpu")
        residual.x.copy_(self.stream)
        residual.scaled.fill_(7.0)
        call = self.call(peers.rank, normed=normed, bias=bias)
        return linear(call, AddResidual(residual, self.norm, peers))


@interpreted
@settings(deadline=None, max_examples=extent(4, 60))
@given(
    ranks=st.integers(1, 3),
    lanes=st.sampled_from([1, 2, 5, 17, 33]),
    M=st.sampled_from([32, 46, 66]),
    K=st.sampled_from([32, 72]),
    plan=st.sampled_from(PLANS),
    normed=st.booleans(),
    bias=st.booleans(),
    tag=st.sampled_from([0, 2**31 - 1, -2, -1]),
    seed=st.integers(0, 99),
)
def test_the_stream_gets_the_sum_of_all_parts(ranks, lanes, M, K, plan, normed, bias, tag, seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    lanes = min(lanes, 2) if plan.family == "fma" else lanes
    live = dice.randrange(lanes + 1)
    world = World(ranks, -(-lanes * M // 256), tag)
    for _ in range(2):
        product = Product(ranks, lanes, live, M, K, plan)
        parts = [product.parts(rank, normed=normed) for rank in range(ranks)]
        order = dice.sample(range(ranks), ranks)
        found = world.run(
            lambda peers, _, product=product: product.to_stream(peers, normed=normed, bias=bias),
            parts,
            0,
            order,
            lambda rank, part, row: world.store_words(world.items, rank, part.view(torch.int32)),
        )
        y = sum_parts_reference(torch.stack(parts))
        y = y + product.bias if bias else y
        groups = found[0].squares.shape[0]
        expected = new_residual(lanes, M, groups, dtype=torch.float32, device="cpu")
        expected.x.copy_(product.stream)
        expected.scaled.fill_(7.0)
        add_to_residual_reference(y, product.slot, expected, product.norm)
        for each in found:
            assert torch.equal(each.x, expected.x) and torch.equal(each.scaled, expected.scaled)
            sums = each.squares[:, :live].sum(0)
            torch.testing.assert_close(sums, expected.x[:live].square().sum(1))
            assert torch.equal(each.squares[:, :live], found[0].squares[:, :live])
    # The words of padded lanes are used as all others are, and none beside them.
    for peers in world.peers:
        used = (peers.tensors.tags.view(-1) - tag).int()
        assert used[: lanes * M].eq(2).all() and used[lanes * M :].eq(0).all()
        assert not peers.tensors.over.item()


@interpreted
@pytest.mark.parametrize("plan", PLANS)
def test_a_product_with_a_norm_of_its_own_is_of_all_parts(plan: LinearPlan) -> None:
    torch.manual_seed(1)
    product, world = Product(2, 2, 2, 46, 72, plan), World(2, 1)
    parts = [product.parts(rank, normed=False) for rank in range(2)]

    def launch(peers: Peers, _: torch.Tensor):
        call = product.call(peers.rank, normed=False, bias=True)
        return linear(call, StoreSquares(peers=peers))

    def store(rank: int, part: torch.Tensor, row: int) -> None:
        world.store_words(world.items, rank, part.view(torch.int32))

    y = parts[0] + parts[1] + product.bias
    for found in world.run(launch, parts, 0, [1, 0], store):
        assert torch.equal(found.y, y)
        torch.testing.assert_close(found.squares.sum(0), y.square().sum(1))


@interpreted
def test_pushes_and_products_share_the_memory_of_ranks() -> None:
    """Tags are of words, so that launches of any shapes may come after each other."""
    torch.manual_seed(2)
    dice, world, tags = random.Random(2), World(2, 2), torch.zeros(512, dtype=torch.int32)
    for _ in range(12):
        lanes, M = dice.choice([1, 3, 5]), dice.choice([32, 46, 66])
        product = Product(2, lanes, lanes, M, 32, PLANS[2])
        parts = [product.parts(rank, normed=False) for rank in range(2)]
        found = world.run(
            lambda peers, _, product=product: product.to_stream(peers, normed=False, bias=False),
            parts,
            0,
            dice.sample(range(2), 2),
            lambda rank, part, row: world.store_words(world.items, rank, part.view(torch.int32)),
        )
        tags[: lanes * M] += 1
        for each, peers in zip(found, world.peers, strict=True):
            assert torch.equal(each.x, product.stream + (parts[0] + parts[1]))
            assert torch.equal(peers.tensors.tags.view(-1), tags)


@interpreted
def test_a_wait_that_is_over_leaves_indices_valid() -> None:
    """The rank takes its own part for that of its peer, and gives nothing any more."""
    world = World(2, 1)
    world.peers[0].tensors.watch[0] = 1
    product, before = Product(2, 1, 1, 32, 32, PLANS[1]), world.items[1].clone()
    part = product.parts(0, normed=False)
    first = product.to_stream(world.peers[0], normed=False, bias=False)
    assert torch.equal(first.x, product.stream + (part + part))
    assert world.peers[0].tensors.over.item() == 1
    pushed = world.items[1].clone()
    assert not torch.equal(pushed, before)
    product.to_stream(world.peers[0], normed=False, bias=False)
    assert torch.equal(world.items[1], pushed)


def call_with(peers: Peers, weight: AnyWeight, squares: bool) -> None:
    """A product of two lanes."""
    M, K = weight.shape
    call = LinearCall(torch.zeros(2, K), weight, torch.zeros(2, dtype=torch.int32))
    residual = new_residual(2, M, 1, dtype=torch.float32, device="cpu")
    add = AddResidual(residual, torch.ones(M), peers)
    linear(call, StoreSquares(peers=peers) if squares else add)


@interpreted
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(
    ("M", "message"),
    [
        (132, r"a part \[2, 132\] takes 264 words: there are 256 in 1 units"),
        (33, r"a part \[2, 33\] has an odd number of columns: words go in pairs"),
    ],
)
def test_a_part_that_does_not_fit_is_an_error(squares: bool, M: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_with(World(2, 1).peers[0], torch.zeros(M, 16), squares)


@pytest.mark.skipif(INTERPRETED, reason="kernels of plain products run there")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("squares", [False, True])
def test_nothing_is_pushed_without_a_kernel(packed: bool, squares: bool) -> None:
    weight = pack(random_quantised("int8", 32, 64)) if packed else torch.zeros(32, 64)
    message = r"a part \[2, 32\] for 2 ranks is not on a GPU"
    with pytest.raises(ValueError, match=message):
        call_with(World(2, 1).peers[0], weight, squares)
