"""Segments: how they are cut and dealt, what is refused, and their code, compiled and emulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.op import Op
from graphengine.kernels.segment import segment as segments
from graphengine.kernels.segment.reference import segment_reference
from graphengine.kernels.segment.segment import SegmentMemory, plan_segment, segment
from graphengine.kernels.segment.units import Stage, check_stages, deal_units, place_stages
from launches.compilation import compile_kernel, record_launch
from launches.segment_emulation import run_launch

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="an interpreted process has no Gluon")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16 = torch.bfloat16
LLAMA_1B = (
    Stage("residual", 2048, 2048),
    Stage("swiglu", 16384, 2048, normed=True),
    Stage("residual", 2048, 8192),
    Stage("store", 3072, 2048, normed=True),
)
LLAMA_8B = (
    Stage("residual", 4096, 4096),
    Stage("swiglu", 28672, 4096, normed=True),
    Stage("residual", 4096, 14336),
    Stage("store", 6144, 4096, normed=True),
)
SMALL = (
    Stage("residual", 64, 96),
    Stage("swiglu", 128, 64, normed=True),
    Stage("residual", 64, 64),
    Stage("store", 96, 64, normed=True),
)
# Its first stage has a tile and a part of one more.
LONG = (Stage("residual", 32, 1056), Stage("swiglu", 64, 32, True), Stage("residual", 32, 32))


class Operands:
    """Random operands of a launch; of lanes, those of more lanes begin with the same ones."""

    def __init__(self, stages: Sequence[Stage], rows: int, device: str = "cpu") -> None:
        self.stages = tuple(stages)
        drawn = torch.Generator().manual_seed(1)
        hidden = next(stage.rows for stage in stages if stage.kind == "residual")

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=drawn)

        self.weights = [normal(s.rows, s.columns).mul(s.columns**-0.5) for s in stages]
        self.norms = [1 + normal(s.rows) / 8 if s.kind == "residual" else None for s in stages]
        self.weights = [weight.to(device, BF16) for weight in self.weights]
        self.norms = [None if norm is None else norm.to(device, BF16) for norm in self.norms]
        self.x = normal(8, stages[0].columns)[:rows].to(device, BF16)
        self.stream = normal(8, hidden)[:rows].contiguous().to(device)
        self.slot = torch.arange(rows, dtype=torch.int32, device=device)
        self.out = torch.full((rows, stages[-1].outputs), 7, dtype=BF16, device=device)
        self.squares = None
        if stages[-1].kind == "residual":
            self.squares = torch.zeros((stages[-1].units, rows), device=device)

    def pad(self, lane: int) -> None:
        self.slot[lane] = -1
        self.x[lane] = self.stream[lane] = torch.nan

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, stream = self.out.clone(), self.stream.clone()
        squares = None if self.squares is None else self.squares.clone()
        segment_reference(
            self.x, self.weights, self.norms, self.stages, self.slot, stream, out, squares, eps=1e-5
        )
        return out, stream

    def run(self, *, number: int = 0, memory: SegmentMemory | None = None, **sizes: Any) -> None:
        plan = plan_segment(self.stages, len(self.x), self.x.device, **sizes)
        memory = memory or SegmentMemory(plan.cut.words, self.x.device)
        segment(
            self.x,
            self.weights,
            self.norms,
            plan,
            memory,
            self.slot,
            self.stream,
            eps=1e-5,
            number=number,
            out=self.out,
            squares_TN=self.squares,
            pdl=True,
        )

    def launch(self, **sizes: Any) -> Op:
        with assumed(H200):
            return record_launch(segments, lambda: self.run(**sizes))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within the rounding of what is passed on."""
    scale = wanted.float().square().mean().sqrt().item()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0.03 * scale)


@pytest.mark.parametrize("stages", [LLAMA_1B, LLAMA_8B, SMALL], ids=["1b", "8b", "small"])
def test_each_unit_has_one_program_and_all_stream_alike(stages: Sequence[Stage]) -> None:
    table = deal_units(stages, 132)
    streamed = torch.zeros(132, dtype=torch.int64)
    for stage, dealt in zip(stages, table, strict=True):
        units = [unit for first, count in dealt.tolist() for unit in range(first, first + count)]
        assert units == list(range(stage.units))
        streamed += dealt[:, 1] * stage.tiles
    residual = [
        dealt for stage, dealt in zip(stages, table, strict=True) if stage.kind == "residual"
    ]
    assert torch.equal(residual[0], residual[-1])
    # A program that lacks a unit of a stage gets one more of a later one.
    assert streamed.max() - streamed.min() <= sum(stage.tiles for stage in stages)
    assert streamed.max() <= 1.05 * streamed.float().mean() + 2


def test_parts_fit_the_memory_for_inputs() -> None:
    placed, cut = place_stages(LLAMA_8B, rows=8, programs=132)
    assert [stage.parts for stage in placed] == [1, 1, 4, 1]
    assert cut.x_bytes * cut.consumers <= 64 * 1024
    assert cut.slots == 6
    alone, cut = place_stages(LLAMA_8B, rows=1, programs=132)
    assert cut.slots == 9
    assert [stage.parts for stage in alone] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "1 to 4 stages, not 0"),
        ((Stage("store", 12, 64),), "12 rows must be a multiple of 8"),
        ((Stage("store", 16, 48),), "48 columns one of 32"),
        ((Stage("swiglu", 64, 32), Stage("residual", 32, 64)), "64 columns, the one before 32"),
        ((Stage("store", 64, 32, normed=True),), "stage 0 is normed"),
        ((Stage("store", 64, 32), Stage("store", 64, 64)), "stage 0 of 2 stores its product"),
        ((Stage("residual", 64, 32), Stage("residual", 32, 64)), "32 rows, the stream has 64"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: Sequence[Stage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_stages(stages)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 rows, not 9"):
        place_stages(SMALL, rows=9, programs=4)
    with pytest.raises(ValueError, match="slots=13, which must be at most 12"):
        place_stages(SMALL, rows=1, programs=4, slots=13)
    with pytest.raises(ValueError, match=r"takes \d+ bytes of shared memory"):
        place_stages(LLAMA_8B, rows=8, programs=132, slots=11)
    with (
        assumed(H200),
        pytest.raises(ValueError, match="133 programs cannot all be resident on 132"),
    ):
        plan_segment(SMALL, 1, "cpu", programs=133)
    with pytest.raises(ValueError, match="two or more segments, not 1"):
        SegmentMemory(4, "cpu").of_launch(0, 1)


@pytest.mark.parametrize("launches", [2, 3, 16, 17])
def test_a_launch_uses_the_set_that_the_one_before_cleared(launches: int) -> None:
    memory = SegmentMemory(4, "cpu")
    used = [memory.of_launch(number, launches) for number in range(launches)]
    for (_, cleared), (taken, _) in zip(used, [*used[1:], used[0]], strict=True):
        assert cleared.data_ptr() == taken.data_ptr()
    assert all(a.data_ptr() != b.data_ptr() for a, b in used)
    assert used[0][0].data_ptr() == memory.sets[0].data_ptr()


def test_operands_that_do_not_fit_the_plan_are_refused() -> None:
    operands = Operands(SMALL, 1)
    operands.x = operands.x.float()
    with pytest.raises(ValueError, match="x must be bfloat16"):
        operands.run()
    operands = Operands(SMALL, 1)
    operands.weights[1] = operands.weights[1][:8]
    with pytest.raises(ValueError, match=r"weight 1 must be a dense .* \[128, 64\]"):
        operands.run()
    operands = Operands(SMALL, 1)
    operands.norms[2] = None
    with pytest.raises(ValueError, match="norm 2 must have 64 weights, not None"):
        operands.run()
    operands = Operands(LONG, 1)
    operands.squares = None
    with pytest.raises(ValueError, match=r"squares must be a dense \[4, 1\], not None"):
        operands.run()
    operands = Operands(SMALL, 1)
    operands.stream = operands.stream.double()
    with pytest.raises(ValueError, match="stream must be dense float32 of 1 lanes"):
        operands.run()


@not_interpreted
@pytest.mark.parametrize("rows", [1, 8])
def test_the_kernel_has_one_piece_of_shared_memory(rows: int) -> None:
    """Its text addresses shared memory from the start."""
    launch = Operands(SMALL, rows).launch(programs=4)
    kernel, _ = compile_kernel(launch)
    assert kernel.metadata.shared == launch.arguments["CUT"].shared_bytes


@not_interpreted
@pytest.mark.parametrize("stages", [SMALL, LONG], ids=["small", "long"])
def test_programs_compute_what_the_reference_does(stages: Sequence[Stage]) -> None:
    alone = Operands(stages, 1)
    out, stream = alone.expected()
    launch = alone.launch(programs=2, consumers=4)
    run_launch(launch)
    close(alone.out, out)
    close(alone.stream, stream)
    assert not launch.arguments["error_ptr"].any()
    assert (launch.arguments["cleared_ptr"] == -1).all()
    # Other lanes, a padded one, another ring and parts of the columns change no bit.
    more = Operands(stages, 3)
    more.pad(1)
    run_launch(more.launch(programs=1, consumers=4, slots=3, flight=2, x_bytes=1), seed=1)
    assert torch.equal(more.out[0], alone.out[0])
    assert torch.equal(more.stream[0], alone.stream[0])
    assert (more.out[1] == 7).all()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("stages", [LLAMA_1B, SMALL, LONG], ids=["1b", "small", "long"])
def test_segments_on_a_gpu(stages: Sequence[Stage]) -> None:
    alone, more = (Operands(stages, rows, "cuda") for rows in (1, 8))
    more.pad(3)
    out, stream = more.expected()
    words = plan_segment(stages, 8, "cuda").cut.words
    memory = SegmentMemory(words, "cuda")
    alone.run(memory=memory, number=0)
    more.run(memory=memory, number=1)
    live = more.slot >= 0
    close(more.out[live], out[live])
    close(more.stream[live], stream[live])
    assert torch.equal(more.out[0], alone.out[0]) and torch.equal(more.stream[0], alone.stream[0])
    assert (more.out[3] == 7).all()
    assert not memory.error.any()


@gpu
@pytest.mark.gpu
def test_a_missing_arrival_ends_as_an_error() -> None:
    operands = Operands(SMALL, 1, "cuda")
    plan = plan_segment(SMALL, 1, "cuda")
    # Not every program has units of so small a weight.
    program = int(plan.table[1, :, 1].argmax())
    plan.table[1, program, 1] -= 1
    memory = SegmentMemory(plan.cut.words, "cuda")
    segment(
        operands.x,
        operands.weights,
        operands.norms,
        plan,
        memory,
        operands.slot,
        operands.stream,
        eps=1e-5,
    )
    assert memory.error.item() == 1
