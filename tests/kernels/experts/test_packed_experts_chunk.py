"""Products of a chunk's pairs with packed experts on Hopper: the kernel's code for sm_90 in an
emulation, and natively.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.packed.weights import empty_experts
from graphengine.kernels.experts.pairs import NO_ACTIVATION, ActivationArgs, PairProduct
from graphengine.kernels.experts.plans import chunk_tile
from graphengine.kernels.experts.reference import expert_product_reference
from graphengine.kernels.linear.packed import packed_form
from launches import emulation, hopper_emulation
from launches.compilation import launches_handed_to
from launches.packed_experts import Case, slice_experts
from launches.quantised import COMMON, FORMATS

CHUNK = importlib.import_module("graphengine.kernels.experts.packed.packed_chunk")
GATHERED = importlib.import_module("graphengine.kernels.experts.prefill.gathered")
PACKED = importlib.import_module("graphengine.kernels.linear.prefill.packed_chunk")
LAUNCHES = importlib.import_module("graphengine.kernels.experts.launches")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16 = torch.bfloat16, torch.float16
SENTINEL = 7.0


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a program has several tiles in an emulated launch."""
    of_gpu = CHUNK.processors_of
    monkeypatch.setattr(
        CHUNK, "processors_of", lambda tensor: of_gpu(tensor) if tensor.is_cuda else 3
    )


def product_of(
    case: Case, size: int, *, down: bool = False, held: range | None = None
) -> PairProduct:
    operands = (
        (case.a, case.down, case.down_bias) if down else (case.x, case.gate_up, case.gate_up_bias)
    )
    return PairProduct(*operands, case.slot, case.routes, case.grouping(size, held), held, True)


def run(
    product: PairProduct, out: torch.Tensor, activation: ActivationArgs, *, late: bool = True
) -> None:
    """The launches; without a GPU in an emulation."""
    if out.is_cuda:
        assert CHUNK.takes_chunk(product, activation)
        CHUNK.launch_chunk(product, out, activation)
        return
    ops: list[Any] = []
    with launches_handed_to(ops.append, CHUNK, GATHERED):
        CHUNK.launch_chunk(product, out, activation)
    gather, multiply = ops
    emulation.run_launch(gather)
    hopper_emulation.run_launch(multiply, late=late)


def outputs(case: Case, size: int, *, down: bool = False, late: bool = True) -> torch.Tensor:
    """Of live pairs; asserts that nothing else was written."""
    product = product_of(case, size, down=down)
    activation = NO_ACTIVATION if down else ActivationArgs(None, 0.0, case.gating, case.gated)
    width = case.down.shape[1] if down else case.a.shape[1]
    room = torch.full((len(case.a) + 1, width), SENTINEL).to(case.a)
    out = room[:-1]
    run(product, out, activation, late=late)
    live = case.live(out)
    out.view(*case.routes.expert.shape, -1)[case.slot >= 0] = SENTINEL
    assert bool((room == SENTINEL).all()), "a padded pair was written"
    return live


def expected(case: Case, *, down: bool = False) -> torch.Tensor:
    if down:
        given: dict[str, Any] = {"bias_EM": case.down_bias, "activation": None}
        operands, out = (case.a, case.down), torch.zeros(len(case.a), case.down.shape[1])
    else:
        given, operands = case.first_reference, (case.x, case.gate_up)
        out = torch.zeros(case.a.shape)
    return case.live(
        expert_product_reference(
            *operands, case.slot, case.routes, squares_TN=None, eps=0.0, **given, out=out.to(case.a)
        )
    )


CASES = [
    # Rows that end in a block, columns in a unit; a block of pairs of two experts, and short ones.
    ("mxfp4", BF16, 21, 160, 40, 16, True),
    # Two warp groups, and blocks of fewer pairs than a tile has.
    ("nvfp4", BF16, 20, 96, 72, 96, True),
    ("int4 with zeros", BF16, 9, 136, 40, 24, True),
    ("mxfp4", FP16, 40, 96, 72, 64, True),
    ("e4m3 in blocks", BF16, 9, 136, 40, 16, True),
    ("e4m3", FP16, 9, 72, 40, 16, False),
    ("int8 in groups", BF16, 70, 96, 40, 128, True),
]


@compiles
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("name, dtype, lanes, hidden, ffn, size, gated", extent(CASES[:4], CASES))
def test_matches_the_reference(
    assert_products_close: Any, name: str, dtype: torch.dtype, lanes: int, hidden: int, ffn: int,
    size: int, gated: bool, down: bool,
) -> None:  # fmt: skip
    case = Case(name, dtype, lanes=lanes, hidden=hidden, ffn=ffn, gated=gated)
    found = outputs(case, size, down=down, late=lanes % 2 == 0)
    assert_products_close(found, expected(case, down=down), dtype)


@compiles
@pytest.mark.parametrize("name", extent(["mxfp4"], ["mxfp4", "int4 with zeros", "e4m3"]))
def test_bits_are_the_same_in_blocks_of_every_size(name: str) -> None:
    """Also those of a lane alone."""
    case = Case(name, BF16, lanes=20, hidden=136, ffn=40)
    found = [outputs(case, size) for size in (16, 64)]
    assert torch.equal(*found)
    place = int((case.slot >= 0).nonzero()[-1])
    alone = outputs(case.take(place), 16)
    assert torch.equal(alone[0], found[0][-1])


@compiles
def test_blocks_take_as_many_boxes_as_their_pairs_need(
    assert_products_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program's blocks of 3 boxes of pairs, which are multiplied as 4, of 1 and of 2; stages
    are used again.
    """
    monkeypatch.setattr(CHUNK, "processors_of", lambda tensor: 1)
    chosen = [0] * 71 + [1] * 12 + [2] * 33
    routed = {lane: [expert] for lane, expert in enumerate(chosen)}
    case = Case("mxfp4", BF16, lanes=len(chosen), hidden=136, ffn=8, top_k=1, routed=routed)
    found = outputs(case, 128)
    assert_products_close(found, expected(case), BF16)
    assert torch.equal(outputs(case.take(70), 16)[0], found[69]), "the second lane is padded"


@compiles
def test_inputs_of_one_group_of_columns_are_put_in_order(assert_products_close: Any) -> None:
    """Fewer columns than the 16 that are put in order together."""
    case = Case("e4m3", BF16, lanes=3, hidden=8, ffn=24)
    assert_products_close(outputs(case, 16), expected(case), BF16)


@compiles
def test_experts_of_other_ranks_are_left_out(assert_products_close: Any) -> None:
    case, held = Case("mxfp4", BF16, lanes=12, hidden=96, ffn=40), range(1, 3)
    gate_up = slice_experts(case.gate_up, held)
    bias = case.gate_up_bias[held.start : held.stop].contiguous()
    product = product_of(case, 16, held=held)._replace(weight_EMK=gate_up, bias_EM=bias)
    out = torch.full_like(case.a, SENTINEL)
    run(product, out, ActivationArgs(None, 0.0, case.gating, case.gated))
    wanted = expert_product_reference(
        case.x, gate_up, case.slot, case.routes, **case.first_reference | {"bias_EM": bias},
        held=held, out=torch.full_like(case.a, SENTINEL),
    )  # fmt: skip
    assert_products_close(out, wanted, BF16)
    assert bool(((out == SENTINEL) == (wanted == SENTINEL)).all())


@compiles
def test_a_chunk_goes_to_the_kernel_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not normed, k-quants, float32 and GPUs without `wgmma` go to Triton's."""
    case = Case("mxfp4", BF16, lanes=5, hidden=96, ffn=40)
    fits = product_of(case, 16)
    assert fits.grouping is not None
    monkeypatch.setattr(CHUNK, "use_wgmma", lambda x: True)
    plain = ActivationArgs(None, 0.0, case.gating, True)
    assert CHUNK.takes_chunk(fits, plain) and CHUNK.takes_chunk(fits, NO_ACTIVATION)
    quants = Case("q4_k", BF16, lanes=5, hidden=256, ffn=256)
    for product, activation in (
        (fits, plain._replace(squares_TN=case.squares)),
        (product_of(quants, 16), plain),
        (fits._replace(x=fits.x.float()), plain),
        (fits._replace(grouping=None), plain),
        (fits._replace(grouping=fits.grouping._replace(size=256)), plain),
        (fits._replace(weight_EMK=torch.zeros(1)), plain),
    ):
        assert not CHUNK.takes_chunk(product, activation)
    assert CHUNK.fits_packed_chunk(case.gate_up, FP16)
    assert not CHUNK.fits_packed_chunk(case.gate_up, torch.float32)
    minimums = Case("int4 with minimums", BF16, lanes=5, hidden=128, ffn=128)
    for weight in (minimums.gate_up, torch.zeros(4, 80, 96, dtype=BF16)):
        assert not CHUNK.fits_packed_chunk(weight, BF16)
    monkeypatch.setattr(CHUNK, "use_wgmma", lambda x: False)
    assert not CHUNK.takes_chunk(fits, plain)

    taken: list[str] = []
    monkeypatch.setattr(LAUNCHES, "launch_chunk", lambda *_: taken.append("hopper"))
    monkeypatch.setattr(LAUNCHES, "_launch_product", lambda *_: taken.append("triton"))
    tile = chunk_tile(None, 2, 4, 96, BF16, case.gate_up.format)
    for there in (True, False):
        monkeypatch.setattr(CHUNK, "use_wgmma", lambda x, there=there: there)
        LAUNCHES.launch_inner(fits, plain, tile, case.a)
    assert taken == ["hopper", "triton"]


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_tiles_fit_shared_memory(name: str, size: int) -> None:
    """Of every block of pairs, at the widths of gpt-oss."""
    form = packed_form(*FORMATS[name])
    experts = empty_experts(form, (2, 5760, 2880), swiglu=True, device="meta")
    cut = CHUNK.chunk_form(experts.expert(0), BF16)
    tile = CHUNK.tile_of(cut, experts.format.bits, size)
    assert tile.lanes >= size and PACKED.stages_of(cut, experts.format.bits, tile) >= 3


@gpu
@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_gpu_matches_the_reference(
    assert_products_close: Any, name: str, dtype: torch.dtype
) -> None:
    case = Case(name, dtype, lanes=300, hidden=512, ffn=192, used=7, E=8, device="cuda")
    for size in (16, 128):
        for down in (False, True):
            found = outputs(case, size, down=down)
            assert_products_close(found, expected(case, down=down), dtype)


@gpu
def test_a_gpu_gives_the_same_bits_in_blocks_of_every_size() -> None:
    case = Case("mxfp4", BF16, lanes=700, hidden=2880, ffn=2880, used=30, E=32, device="cuda")
    first, *others = (outputs(case, size) for size in (16, 32, 64, 128))
    assert all(torch.equal(first, other) for other in others)
