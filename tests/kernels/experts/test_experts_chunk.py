"""Products of a chunk's pairs with experts in 16 bits on Hopper: the kernel's code for sm_90 in an
emulation, and natively.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch
from gpus.expert_chunk_times import main

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.grouping import Grouping, group_pairs_reference, most_blocks
from graphengine.kernels.experts.pairs import NO_ACTIVATION, ActivationArgs, PairProduct
from graphengine.kernels.experts.plans import chunk_tile, counted_block, expert_plan
from graphengine.kernels.experts.reference import expert_product_reference
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.norm_rope.activation import ClampedSwiglu, Gating
from launches import emulation, hopper_emulation
from launches.compilation import launches_handed_to

CHUNK = importlib.import_module("graphengine.kernels.experts.prefill.experts_chunk")
GATHERED = importlib.import_module("graphengine.kernels.experts.prefill.gathered")
LAUNCHES = importlib.import_module("graphengine.kernels.experts.launches")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16 = torch.bfloat16, torch.float16
NAN, SENTINEL = float("nan"), 7.0
CLAMPED = ClampedSwiglu(limit=1.5, slope=1.7)


class Case:
    """Operands of some lanes, the second padded; lanes choose among the first `used` experts.

    Padded lanes and experts that no lane has chosen hold NaN.
    """

    def __init__(
        self, dtype: torch.dtype, *, lanes: int, hidden: int, ffn: int, used: int = 3,
        top_k: int = 2, E: int = 4, device: str = "cpu", gated: bool = True, biased: bool = True,
        gating: Gating = CLAMPED,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(lanes)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        expert = torch.stack([torch.randperm(used, generator=random)[:top_k] for _ in range(lanes)])
        slot, share = torch.arange(lanes), torch.rand(lanes, top_k, generator=random)
        x, a = normal(lanes, hidden), normal(lanes, top_k, ffn)
        if lanes > 1:
            slot[1], x[1], a[1], expert[1], share[1] = -1, NAN, NAN, 2**31 - 1, NAN
        rows = 2 * ffn if gated else ffn
        gate_up, down = normal(E, rows, hidden) / hidden**0.5, normal(E, hidden, ffn) / ffn**0.5
        biases = [normal(E, rows), normal(E, hidden)] if biased else [None, None]
        idle = sorted(set(range(E)) - set(expert[slot >= 0].flatten().tolist()))
        for tensor in (gate_up, down, *biases):
            if tensor is not None:
                tensor[idle] = NAN

        def there(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device, dtype)

        self.E, self.dtype, self.gated = E, dtype, gated
        self.slot = slot.to(device, torch.int32)
        self.routes = Routes(expert.to(device, torch.int32), share.to(device))
        self.x, self.a = there(x), there(a.view(-1, ffn))
        self.gate_up, self.down = there(gate_up), there(down)
        self.gate_up_bias, self.down_bias = map(there, biases)
        self.gating: Gating = gating if gated else "silu"

    def grouping(self, size: int, held: range | None = None) -> Grouping:
        pairs, experts = self.routes.expert.numel(), self.E if held is None else len(held)
        blocks = most_blocks(pairs, experts + (held is not None), size)
        slot, expert = self.slot.cpu(), self.routes.expert.cpu()
        # Places that nobody may look at hold huge numbers.
        order, found = slot.new_full((pairs,), 2**30), slot.new_full((3, blocks), 2**30)
        grouping = Grouping(order, found, size)
        group_pairs_reference(expert, slot, experts=experts, held=held, out=grouping)
        return Grouping(order.to(self.slot.device), found.to(self.slot.device), size)

    def product(self, size: int, *, down: bool = False, held: range | None = None) -> PairProduct:
        of_first = (self.x, self.gate_up, self.gate_up_bias)
        operands = (self.a, self.down, self.down_bias) if down else of_first
        return PairProduct(*operands, self.slot, self.routes, self.grouping(size, held), held, True)

    def activation(self, down: bool = False) -> ActivationArgs | None:
        return None if down else ActivationArgs(None, 0.0, self.gating, self.gated)

    def live(self, pairs: torch.Tensor) -> torch.Tensor:
        """Rows of the pairs of live lanes."""
        return pairs.view(*self.routes.expert.shape, -1)[self.slot >= 0]

    def take(self, lane: int) -> Case:
        """A lane alone."""
        one = object.__new__(Case)
        one.__dict__.update(self.__dict__)
        one.slot, one.x = self.slot[[lane]], self.x[[lane]]
        one.a = self.a.view(len(self.slot), -1, self.a.shape[1])[lane]
        one.routes = Routes(*(tensor[[lane]] for tensor in self.routes))
        return one

    def expected(self, *, down: bool = False, **changes: Any) -> torch.Tensor:
        """The reference's products [P, outputs]; SENTINEL where it writes none."""
        activation = "swiglu" if self.gated else "squared_relu"
        given: dict[str, Any] = {"bias_EM": self.gate_up_bias, "activation": activation}
        given["gating"], operands, out = self.gating, (self.x, self.gate_up), self.a
        if down:
            given = {"bias_EM": self.down_bias, "activation": None}
            operands, out = (self.a, self.down), self.a.new_empty(len(self.a), self.down.shape[1])
        weight = changes.pop("weight", operands[1])
        return expert_product_reference(
            operands[0], weight, self.slot, self.routes, squares_TN=None, eps=0.0,
            **given | changes, out=torch.full_like(out, SENTINEL),
        )  # fmt: skip


def run(
    product: PairProduct,
    out: torch.Tensor,
    activation: ActivationArgs | None,
    *,
    tile: Any = None,
    late: bool = True,
) -> None:
    """The launches; without a GPU in an emulation, on a few processors, so that a program has
    several tiles.
    """
    if out.is_cuda:
        assert CHUNK.takes_experts_chunk(product, activation or NO_ACTIVATION)
        CHUNK.launch_experts_chunk(product, out, activation, tile=tile)
        return
    ops: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, launches_handed_to(ops.append, CHUNK, GATHERED):
        patch.setattr(CHUNK, "processors_of", lambda tensor: 3)
        CHUNK.launch_experts_chunk(product, out, activation, tile=tile)
    gather, multiply = ops
    emulation.run_launch(gather)
    hopper_emulation.run_launch(multiply, late=late)


def outputs(
    case: Case, size: int, *, down: bool = False, tile: Any = None, late: bool = True
) -> torch.Tensor:
    """Of live pairs; asserts that nothing else was written."""
    width = case.down.shape[1] if down else case.a.shape[1]
    room = torch.full((len(case.a) + 1, width), SENTINEL).to(case.a)
    out = room[:-1]
    run(case.product(size, down=down), out, case.activation(down), tile=tile, late=late)
    live = case.live(out)
    out.view(*case.routes.expert.shape, -1)[case.slot >= 0] = SENTINEL
    assert bool((room == SENTINEL).all()), "a padded pair was written"
    return live


CASES = [
    # Fewer rows than a tile has, columns that end in a step, short blocks of three experts.
    {"lanes": 21, "hidden": 72, "ffn": 40, "size": 16},
    # Two tiles of rows; blocks of 128, 64 and of fewer pairs.
    {"lanes": 140, "hidden": 136, "ffn": 136, "size": 128, "groups": 2},
    {"lanes": 9, "hidden": 64, "ffn": 72, "size": 64, "gated": False, "biased": False},
    {"lanes": 40, "hidden": 264, "ffn": 72, "size": 64, "biased": False, "gating": "silu"},
    {"lanes": 40, "hidden": 72, "ffn": 264, "size": 96, "gating": "gelu_tanh", "groups": 2},
    {"lanes": 30, "hidden": 136, "ffn": 264, "size": 24, "gated": False, "groups": 2},
]


@compiles
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("dtype", extent([BF16], [BF16, FP16]))
@pytest.mark.parametrize("sizes", extent(CASES[:3], CASES), ids=lambda sizes: f"{sizes['lanes']}")
def test_matches_the_reference(
    assert_products_close: Any, sizes: dict[str, Any], dtype: torch.dtype, down: bool
) -> None:
    """With weights that end a tensor, so that boxes reach past it."""
    sizes = {"groups": 1, **sizes}
    size, groups = sizes.pop("size"), sizes.pop("groups")
    case = Case(dtype, used=4, **sizes)
    tile = CHUNK.tile_of(1, True, size, 1, 132)
    tile = CHUNK.ExpertTile(tile.lanes, groups)
    found = outputs(case, size, down=down, tile=tile, late=size != 64)
    assert_products_close(found, case.live(case.expected(down=down)), dtype)


@compiles
def test_bits_are_the_same_in_blocks_of_every_size() -> None:
    """In products of each width, in tiles of one and two warp groups, and of a lane alone."""
    case = Case(BF16, lanes=101, hidden=136, ffn=40, used=2)
    tiles = [(32, 32, 1), (100, 128, 2), *extent([], [(1, 32, 2), (64, 64, 1), (17, 128, 1)])]
    found = []
    for size, lanes, groups in tiles:
        counts = case.grouping(size).blocks[2][case.grouping(size).blocks[0] >= 0]
        assert int(counts.max()) == size
        found.append(outputs(case, size, tile=CHUNK.ExpertTile(lanes, groups)))
    assert all(torch.equal(found[0], other) for other in found[1:])
    alone = outputs(case.take(100), 16)
    assert torch.equal(alone[0], found[0][-1])


@compiles
def test_experts_of_other_ranks_are_left_out(assert_products_close: Any) -> None:
    case, held = Case(BF16, lanes=12, hidden=72, ffn=40), range(1, 3)
    own = slice(held.start, held.stop)
    gate_up, bias = case.gate_up[own].contiguous(), case.gate_up_bias[own].contiguous()
    product = case.product(16, held=held)._replace(weight_EMK=gate_up, bias_EM=bias)
    out = torch.full_like(case.a, SENTINEL)
    run(product, out, case.activation())
    wanted = case.expected(weight=gate_up, bias_EM=bias, held=held)
    assert_products_close(out, wanted, BF16)
    assert bool(((out == SENTINEL) == (wanted == SENTINEL)).all())


def test_a_chunk_goes_to_the_kernel_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not normed, float32, rows that are not aligned and GPUs without `wgmma` go to
    Triton's.
    """
    case = Case(BF16, lanes=5, hidden=72, ffn=40)
    fits, plain = case.product(16), case.activation()
    assert fits.grouping is not None and plain is not None
    monkeypatch.setattr(CHUNK, "use_wgmma", lambda x: True)
    assert CHUNK.takes_experts_chunk(fits, plain) and CHUNK.takes_experts_chunk(fits, NO_ACTIVATION)
    shifted = torch.zeros(case.gate_up.numel() + 1, dtype=BF16)[1:].view(case.gate_up.shape)
    for product, activation in (
        (fits, plain._replace(squares_TN=torch.ones(3, 5))),
        (fits._replace(weight_EMK=case.gate_up.float()), plain),
        (fits._replace(weight_EMK=case.gate_up[:, :, :68].contiguous()), plain),
        (fits._replace(weight_EMK=shifted), plain),
        (fits._replace(grouping=None), plain),
        (fits._replace(grouping=fits.grouping._replace(size=256)), plain),
    ):
        assert not CHUNK.takes_experts_chunk(product, activation)

    taken: list[str] = []
    monkeypatch.setattr(LAUNCHES, "launch_experts_chunk", lambda *_: taken.append("hopper"))
    monkeypatch.setattr(LAUNCHES, "_launch_product", lambda *_: taken.append("triton"))
    plan = expert_plan("swiglu", 80, 72, BF16, "dot")
    for there in (True, False):
        monkeypatch.setattr(CHUNK, "use_wgmma", lambda x, there=there: there)
        for tile in (chunk_tile(None, 2, 4, 72, BF16), plan):
            LAUNCHES.launch_inner(fits, plain, tile, case.a)
    assert taken == ["hopper", "triton", "triton", "triton"]


def test_blocks_hold_several_times_the_average_of_pairs() -> None:
    sizes = [counted_block(lanes, 8, 128) for lanes in (1, 64, 128, 1024, 4096)]
    assert sizes == [32, 32, 64, 128, 128]
    assert counted_block(None, 8, 128) == 128


@pytest.mark.parametrize("size", [1, 16, 32, 64, 128])
def test_tiles_fit_shared_memory(size: int) -> None:
    """A multiprocessor has a ring of at least 80 KiB of weights."""
    for experts in (1, 128):
        tile = CHUNK.tile_of(768, True, size, experts, 132)
        assert tile.warp_groups == (1 if experts == 1 else 2) and tile.lanes >= size
        assert tile.programs * tile.stages * tile.rows * CHUNK.COLUMNS * 2 >= 80 * 1024


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gated", [True, False])
def test_a_gpu_matches_the_reference(
    assert_products_close: Any, dtype: torch.dtype, gated: bool
) -> None:
    for lanes, size in ((300, 32), (300, 128), (3, 16)):
        case = Case(
            dtype, lanes=lanes, hidden=520, ffn=328, used=7, E=8, device="cuda", gated=gated
        )
        for down in (False, True):
            found = outputs(case, size, down=down)
            assert_products_close(found, case.live(case.expected(down=down)), dtype)


@gpu
def test_a_gpu_gives_the_same_bits_in_blocks_of_every_size() -> None:
    case = Case(BF16, lanes=700, hidden=2048, ffn=768, used=30, E=32, device="cuda")
    for down in (False, True):
        first, *others = (
            outputs(case, size, down=down, tile=CHUNK.ExpertTile(max(32, size), groups))
            for size in (1, 16, 32, 64, 128)
            for groups in (1, 2)
        )
        assert all(torch.equal(first, other) for other in others)


@compiles
def test_the_script_that_measures_it_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "tiny", "--tokens", "9", "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 6 and not any("error" in line for line in lines)
