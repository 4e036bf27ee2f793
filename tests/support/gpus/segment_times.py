"""Check segments on a GPU, and time a model's layers with them against one launch a product.

    python tests/support/gpus/segment_times.py check
    python tests/support/gpus/segment_times.py time --shapes llama-1b --rows 1,8
    python tests/support/gpus/segment_times.py trace --shapes llama-1b

`check` compares launches with the reference, the bits of one lane among 1, 3 and 8, and has a wait
end in vain. `time` captures the layers of a decode step twice, without embedding and lm_head: as
the engine launches them, and with a segment from each attention to the next. It replays both in
turn. `trace` shows the median cycles of each part of a segment. Each line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from graphengine.buckets import CapturedGraph
from graphengine.kernels.core.launching import compile_kernels
from graphengine.kernels.core.pdl import EARLY
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.segment.reference import segment_reference
from graphengine.kernels.segment.segment import (
    SegmentMemory,
    SegmentPlan,
    plan_segment,
    segment,
)
from graphengine.kernels.segment.units import Stage
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.composition import attention_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.decoder_layer import LayerWeights, decode_block
from graphengine.models.launches import DecodeLaunch
from graphengine.models.plans.choosing import choose_plans
from graphengine.profiles.benchmark.shapes import Subject

CONTEXT = 128
SLOTS = 8
_BLOCK = 64
_REPLAYS = 30
# More than any launch here takes.
_COUNTERS = 8192
_CHECKED: Mapping[str, tuple[Stage, ...]] = {
    "llama-1b": (
        Stage("residual", 2048, 2048),
        Stage("swiglu", 16384, 2048, normed=True),
        Stage("residual", 2048, 8192),
        Stage("store", 3072, 2048, normed=True),
    ),
    "qwen3-0.6b": (
        Stage("residual", 1024, 2048),
        Stage("swiglu", 6144, 1024, normed=True),
        Stage("residual", 1024, 3072),
        Stage("store", 4096, 1024, normed=True),
    ),
    "llama-8b": (
        Stage("residual", 4096, 4096),
        Stage("swiglu", 28672, 4096, normed=True),
        Stage("residual", 4096, 14336),
        Stage("store", 6144, 4096, normed=True),
    ),
    "odd": (
        Stage("residual", 96, 160),
        Stage("swiglu", 2112, 96, normed=True),
        Stage("residual", 96, 1056),
        Stage("store", 40, 96, normed=True),
    ),
    "two stages": (Stage("swiglu", 512, 256), Stage("residual", 128, 256)),
}
Options = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Operands:
    """Random operands of a segment's launches; `stream` is drawn anew for each."""

    stages: tuple[Stage, ...]
    weights: list[Tensor]
    norms: list[Tensor | None]
    x: Tensor
    stream: Tensor

    @classmethod
    def random(cls, stages: tuple[Stage, ...], rows: int, device: str) -> Operands:
        torch.manual_seed(1)
        hidden = next(stage.rows for stage in stages if stage.kind == "residual")

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        return cls(
            stages,
            [normal(each.rows, each.columns) * each.columns**-0.5 for each in stages],
            [1 + normal(each.rows) / 8 if each.kind == "residual" else None for each in stages],
            normal(rows, stages[0].columns),
            torch.randn((rows, hidden), device=device),
        )

    def run(
        self, plan: SegmentPlan, memory: SegmentMemory, slot: Tensor, number: int, launches: int
    ) -> list[Tensor]:
        """The last product, the stream, and its squares if the last stage adds to it."""
        rows, last = plan.cut.rows, self.stages[-1]
        stream = self.stream[:rows].clone()
        out = stream.new_full((rows, last.outputs), 7, dtype=torch.bfloat16)
        squares = stream.new_zeros(last.units, rows) if last.kind == "residual" else None
        segment(
            self.x[:rows], self.weights, self.norms, plan, memory, slot, stream,
            eps=1e-5, number=number, launches=launches, out=out, squares_TN=squares,
        )  # fmt: skip
        return [out, stream] if squares is None else [out, stream, squares.t()]

    def expected(self, slot: Tensor) -> list[Tensor]:
        rows, last = len(slot), self.stages[-1]
        stream = self.stream[:rows].clone()
        out = stream.new_full((rows, last.outputs), 7, dtype=torch.bfloat16)
        squares = stream.new_zeros(last.units, rows) if last.kind == "residual" else None
        segment_reference(
            self.x[:rows], self.weights, self.norms, self.stages, slot, stream, out, squares,
            eps=1e-5,
        )  # fmt: skip
        return [out, stream] if squares is None else [out, stream, squares.t()]


def check(device: str, options: Options, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Errors of all shapes, relative to the root mean square; whether bits agree."""
    for name in names:
        operands = Operands.random(_CHECKED[name], 8, device)
        found: dict[int, list[Tensor]] = {}
        for rows in (1, 3, 8):
            slot = torch.arange(rows, dtype=torch.int32, device=device)
            if rows == 3:
                slot[1] = -1
            live = slot >= 0
            plan = plan_segment(operands.stages, rows, device, **options)
            memory = SegmentMemory(plan.cut.words, device)
            began = time.perf_counter()
            results = [operands.run(plan, memory, slot, number, 3) for number in (0, 1, 2, 0)]
            _finish(device)
            wanted = operands.expected(slot)
            errors = [_error(a[live], b[live]) for a, b in zip(results[0], wanted, strict=True)]
            again = all(
                torch.equal(a, b)
                for each in results[1:]
                for a, b in zip(each, results[0], strict=True)
            )
            kept = all(torch.equal(results[0][0][~live], wanted[0][~live]) for _ in (0,))
            found[rows] = [each[:1] for each in results[0]]
            yield {
                "check": name, "rows": rows, "errors": errors, "again": again, "padded": kept,
                "error word": int(memory.error), "s": round(time.perf_counter() - began, 2),
                "same bits": all(map(torch.equal, found[rows], found[1])), **options,
            }  # fmt: skip


def check_late(device: str, options: Options) -> dict[str, Any]:
    """A unit that nobody multiplies: the launch must end, and say so."""
    operands = Operands.random(_CHECKED["odd"], 1, device)
    plan = plan_segment(operands.stages, 1, device, **options)
    memory = SegmentMemory(plan.cut.words, device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    operands.run(plan, memory, slot, 0, 2)
    _finish(device)
    plan.table[1, 0, 1] -= 1
    fresh = SegmentMemory(plan.cut.words, device)
    began = time.perf_counter()
    operands.run(plan, fresh, slot, 0, 2)
    _finish(device)
    seconds = round(time.perf_counter() - began, 3)
    return {"check": "a missing arrival", "error word": int(fresh.error), "s": seconds}


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _error(found: Tensor, wanted: Tensor) -> float:
    size = wanted.float().square().mean().sqrt()
    return round(float((found.float() - wanted.float()).abs().max() / size), 5)


class Layers:
    """A model's layers with random weights, and a step of them for up to `SLOTS` lanes."""

    def __init__(self, name: str, family: RowFamily, device: str, layers: int | None) -> None:
        config = Subject.of_shape(name).model
        assert isinstance(config, DecoderConfig), f"{name=}"
        config = replace(config, layers=config.layers[:layers])
        weights = config.allocate(device=device, dtype=torch.bfloat16)
        torch.manual_seed(1)
        self.layers = weights.layers
        for each in self.layers:
            for tensor in each.tensors():
                tensor.normal_(std=0.02)
                if tensor.ndim == 1:
                    tensor += 1
        self.config, self.device = config, device
        self.norm = torch.ones(config.hidden_size, device=device, dtype=torch.bfloat16)
        self.plans, _ = choose_plans(config.linears, torch.bfloat16, family, device)
        block = attention_of(config)
        self.tables = RopeTables.of(
            config.rope, head_dim=block.table_dim, max_seq_len=512, device=torch.device(device)
        )
        blocks = -(-(CONTEXT + 1) // _BLOCK)
        self.table = torch.arange(SLOTS * blocks, dtype=torch.int32, device=device).view(SLOTS, -1)
        shape = (SLOTS * blocks, 2, _BLOCK, block.num_kv_heads, block.head_dim)
        self.caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in self.layers]
        self.launch = DecodeLaunch(
            plans=self.plans,
            split_tokens=block.split_tokens(family, torch.bfloat16, 512),
            arrivals=self.table.new_zeros(_COUNTERS),
            pdl=True,
        )
        self.x = torch.randn((SLOTS, config.hidden_size), device=device)

    def begin(self, rows: int) -> tuple[DecodeLanes, Residual]:
        slot = torch.arange(rows, dtype=torch.int32, device=self.device)
        lanes = DecodeLanes(slot, slot, torch.full_like(slot, CONTEXT))
        x = self.x[:rows].clone()
        return lanes, Residual(x, x.bfloat16(), x.square().sum(1)[None].contiguous())

    def next_norms(self) -> list[Tensor]:
        """The norm after each layer."""
        return [*(layer.input_norm for layer in self.layers[1:]), self.norm]

    def chain(self, lanes: DecodeLanes, residual: Residual) -> Residual:
        """One launch a product."""
        for layer, norm, kv in zip(self.layers, self.next_norms(), self.caches, strict=True):
            for each, following in layer.followed(norm):
                memory = (kv, self.table)
                residual = decode_block(
                    each.block, following, residual, memory, self.tables, lanes, self.launch
                )
        return residual

    def fused(
        self,
        lanes: DecodeLanes,
        residual: Residual,
        plans: tuple[SegmentPlan, SegmentPlan],
        memory: SegmentMemory,
        traces: Sequence[Tensor] = (),
        early: bool = False,
    ) -> Residual:
        """A segment from each attention to the next.

        early  whether attention starts the segment before it has waited
        """
        launch = replace(self.launch, pdl=EARLY) if early else self.launch
        count = len(self.layers)
        qkv = _attention(self.layers[0]).qkv_product(residual, lanes.slot, self.launch)
        for number, (layer, norm, kv) in enumerate(
            zip(self.layers, self.next_norms(), self.caches, strict=True)
        ):
            last = number + 1 == count
            attended = _attention(layer).attend_rows(
                qkv, lanes, kv, self.table, self.tables, launch
            )
            weights, norms = stage_weights(layer, norm, None if last else self.layers[number + 1])
            plan = plans[last]
            squares = None
            if last:
                squares = residual.x.new_empty(plan.stages[-1].units, len(residual.x))
            qkv = segment(
                attended, weights, norms, plan, memory, lanes.slot, residual.x,
                eps=_attention(layer).block.norm_eps, number=number, launches=count,
                out=residual.scaled if last else None, squares_TN=squares,
                trace=traces[number] if traces else None, pdl=True,
            )  # fmt: skip
        assert squares is not None, f"{count=}"
        return residual._replace(squares=squares)

    def segments(
        self, rows: int, options: Options
    ) -> tuple[tuple[SegmentPlan, SegmentPlan], SegmentMemory]:
        """Plans of the layers' segments and of the last one, and their memory."""
        layer = self.layers[0]
        following = self.layers[min(1, len(self.layers) - 1)]
        stages = stages_of(layer, following)
        plans = tuple(
            plan_segment(each, rows, self.device, **options) for each in (stages, stages[:-1])
        )
        memory = SegmentMemory(max(plan.cut.words for plan in plans), self.device)
        return cast("tuple[SegmentPlan, SegmentPlan]", plans), memory


def _attention(layer: LayerWeights) -> AttentionWeights:
    return cast(AttentionWeights, layer.attention)


def stage_weights(
    layer: LayerWeights, norm: Tensor, following: LayerWeights | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and norms from a layer's attention to the next one's; None: it is the last."""
    mlp = cast(SwigluWeights, layer.mlp)
    weights = [_attention(layer).output, mlp.gate_up, mlp.down]
    norms = [layer.after_attention, None, norm]
    if following is not None:
        weights.append(_attention(following).qkv)
        norms.append(None)
    return cast("list[Tensor]", weights), cast("list[Tensor | None]", norms)


def stages_of(layer: LayerWeights, following: LayerWeights) -> tuple[Stage, ...]:
    weights, _ = stage_weights(layer, following.input_norm, following)
    kinds: Any = ("residual", "swiglu", "residual", "store")
    return tuple(
        Stage(kind, *weight.shape, normed=kind in ("swiglu", "store"))
        for kind, weight in zip(kinds, weights, strict=True)
    )


def time_layers(
    name: str, rows: Sequence[int], device: str, variants: Sequence[Options], layers: int | None
) -> Iterator[dict[str, Any]]:
    """Microseconds of both graphs, for each number of rows, and of the segments' variants."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for count in rows:
        model = Layers(name, "fma" if count == 1 else "dot", device, layers)
        runs = {json.dumps(each): SegmentRun(model, count, each) for each in variants}
        lanes, residual = model.begin(count)
        chain = partial(model.chain, lanes, residual)
        steps: dict[str, Callable[[], object]] = {"chain": chain, **runs}
        began = time.perf_counter()
        compile_kernels(steps)
        compiled = round(time.perf_counter() - began, 1)
        for label, run in runs.items():
            wanted = model.chain(*model.begin(count))
            run.reset()
            errors = [_error(run().x, wanted.x), int(run.memory.error)]
            yield {"shape": name, "rows": count, "variant": label, "error, error word": errors}
        times = _times(steps, device, stream)
        read = sum(t.nbytes for layer in model.layers for t in layer.tensors())
        yield {
            "shape": name, "rows": count, "layers": len(model.layers), "compiled s": compiled,
            "floor at 4.41 TB/s": round(read / 4.41e6, 1), **times,
            "error words": [int(run.memory.error) for run in runs.values()],
        }  # fmt: skip
        del model, runs, steps, chain


class SegmentRun:
    """A step of layers with segments that are cut in one way."""

    def __init__(self, model: Layers, rows: int, options: Options) -> None:
        self.model = model
        cut = {name: value for name, value in options.items() if name != "early"}
        self.plans, self.memory = model.segments(rows, cut)
        self.early = bool(options.get("early"))
        self.traces: list[Tensor] = []
        self.lanes, self.residual = model.begin(rows)
        self._x = self.residual.x.clone()

    def reset(self) -> None:
        self.residual.x.copy_(self._x)

    def __call__(self) -> Residual:
        return self.model.fused(
            self.lanes, self.residual, self.plans, self.memory, self.traces, self.early
        )


def _times(
    steps: Mapping[str, Callable[[], object]], device: str, stream: torch.cuda.Stream
) -> dict[str, float]:
    graphs, times = {}, dict[str, float]()
    for label, step in steps.items():
        graph = CapturedGraph(
            step, name=label, device=torch.device(device), stream=stream, warmups=1
        )
        graph.capture()
        graphs[label] = graph
    events: dict[str, list[tuple[Any, Any]]] = {label: [] for label in graphs}
    for _ in range(_REPLAYS):
        for label, graph in graphs.items():
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record(stream)
            graph.replay()
            pair[1].record(stream)
            events[label].append(cast("tuple[Any, Any]", pair))
    stream.synchronize()
    for label, pairs in events.items():
        times[label] = round(1e3 * median(a.elapsed_time(b) for a, b in pairs[3:]), 1)
        graphs[label].close()
    return times


def trace_layers(
    name: str, rows: int, device: str, options: Options, layers: int | None
) -> Iterator[dict[str, Any]]:
    """Cycles of each part of a segment, and nanoseconds from the end of the one before, in a graph:
    least, median and most of all programs and layers.
    """
    model = Layers(name, "fma" if rows == 1 else "dot", device, layers)
    run = SegmentRun(model, rows, options)
    programs = run.plans[0].programs
    run.traces = [
        torch.zeros((programs, 16), dtype=torch.int32, device=device) for _ in model.layers
    ]
    compile_kernels({"trace": run})
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    _times({"trace": run}, device, stream)
    clocks = torch.stack(run.traces).long().cpu()
    spent = ((clocks[1:-1, :, 1:10] - clocks[1:-1, :, :9]) & 0xFFFFFFFF).float()
    names = (
        "wait",
        *(f"{s} {part}" for s, part in product(range(4), ("inputs", "product"))),
    )
    label = {"shape": name, "rows": rows, "variant": json.dumps(options)}
    for index, part in enumerate(names):
        yield label | {"cycles": part} | _spread(spent[..., index])
    # From the end of the segment before, of its last program.
    end = clocks[:-1, :, 14]
    last = end.amax(dim=1, keepdim=True)
    for index, part in ((12, "start"), (13, "waited")):
        yield label | {"ns after": part} | _spread(_signed(clocks[1:, :, index] - last))
    yield label | {"ns of": "all"} | _spread(_signed(end - clocks[:-1, :, 13]))
    yield label | {"ns before the last": "end"} | _spread(_signed(last - end))


def _signed(difference: Tensor) -> Tensor:
    return (difference + (1 << 31)) % (1 << 32) - (1 << 31)


def _spread(values: Tensor) -> dict[str, int]:
    flat = values.flatten().float()
    return {
        "least": int(flat.min()),
        "median": int(flat.median()),
        "most": int(flat.quantile(0.99)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the lines of one subcommand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("check", "time", "trace"))
    parser.add_argument("--shapes", default="llama-1b,qwen3-0.6b")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--layers", type=int, help="of the model; by default all")
    parser.add_argument(
        "--variants",
        default='{"early": 1}',
        help="options of `plan_segment`, JSON objects by semicolons; early: attention starts the "
        "segment after it before it has waited",
    )
    args = parser.parse_args(argv)
    rows = [int(each) for each in args.rows.split(",")]
    variants: list[Options] = [json.loads(each) for each in args.variants.split(";")]
    for variant in variants if args.what != "time" else variants[:1]:
        if args.what == "check":
            cut = {name: value for name, value in variant.items() if name != "early"}
            _print(check("cuda", cut, list(_CHECKED)))
            _print([check_late("cuda", cut)])
        elif args.what == "trace":
            for name, count in product(args.shapes.split(","), rows):
                _print(trace_layers(name, count, "cuda", variant, args.layers))
        else:
            for name in args.shapes.split(","):
                _print(time_layers(name, rows, "cuda", variants, args.layers))
    return 0


def _print(lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
