"""What products of a prompt's tokens with dense experts cost: Triton's kernel, and Hopper's.

    python tests/support/gpus/expert_chunk_times.py --out experts.jsonl
    python tests/support/gpus/expert_chunk_times.py --shape tiny --device cpu

A line of JSON for each shape, number of tokens, kind of routes and product (`inner`: gates and ups;
`down`: without the sum of a token's experts) has microseconds of a launch in a CUDA graph:

triton   the kernel of `experts_triton.py`, with the blocks and tiles that it had
hopper   the kernel of `experts_chunk.py` with its own blocks and tile, with the gathering of inputs
gather   that gathering alone
SIZExG   Hopper's kernel in blocks of SIZE pairs, with G warp groups (`--tiles`)

`floor` is the time that memory or the tensor cores need at least; `difference` is the largest
difference of the two results, relative to the largest product; `same_bits` says whether all of
Hopper's tiles have the same bits. A line of the product `both` has expert_inner and expert_sum as a
prompt runs them. A case that fails has an `error` instead. On a CPU nothing is timed.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from gpus.packed_prompts import time_of
from graphengine.kernels.experts.experts import expert_inner, expert_sum
from graphengine.kernels.experts.grouping import Grouping, group_pairs
from graphengine.kernels.experts.pairs import ActivationArgs, PairProduct
from graphengine.kernels.experts.plans import ProductTile, chunk_tile, counted_block
from graphengine.kernels.experts.prefill.experts_chunk import ExpertTile, launch_experts_chunk
from graphengine.kernels.experts.prefill.gathered import in_order
from graphengine.kernels.experts.router import Routes
from graphengine.observe.environment import environment

LAUNCHES = importlib.import_module("graphengine.kernels.experts.launches")
# Experts, experts of a token, hidden size and width of an expert.
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "tiny": (4, 2, 64, 32),
}
ROUTES = ("uniform", "skewed")
# Of an H200: bytes and operations in a microsecond.
BYTES, OPERATIONS = 4.8e6, 700e6
ACTIVATION = ActivationArgs()


class Operands(NamedTuple):
    """The weights of a layer's experts."""

    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int

    @classmethod
    def random(cls, shape: str, device: str) -> Operands:
        experts, top_k, hidden, ffn = SHAPES[shape]

        def normal(rows: int, columns: int) -> torch.Tensor:
            size = (experts, rows, columns)
            weight = torch.empty(size, device=device, dtype=torch.bfloat16)
            return weight.normal_(std=columns**-0.5)

        return cls(normal(2 * ffn, hidden), normal(hidden, ffn), top_k)


class Prompt(NamedTuple):
    """A prompt's tokens, and the experts that they have chosen."""

    x: torch.Tensor
    inner: torch.Tensor
    slot: torch.Tensor
    routes: Routes
    weights: Operands

    @classmethod
    def random(cls, weights: Operands, tokens: int, kind: str) -> Prompt:
        """With routes that are `uniform`, or `skewed`: the popularity of experts is Zipf's."""
        experts, rows, hidden = weights.gate_up.shape
        device, pairs = weights.gate_up.device, tokens * weights.top_k
        random = torch.Generator().manual_seed(tokens)
        scores = -torch.empty(tokens, experts).exponential_(generator=random).log()
        if kind == "skewed":
            scores -= torch.arange(1.0, experts + 1)[
                torch.randperm(experts, generator=random)
            ].log()
        expert = scores.topk(weights.top_k).indices.int()
        share = torch.full(expert.shape, 1 / weights.top_k)
        x = torch.randn(tokens, hidden, generator=random).to(device, torch.bfloat16)
        inner = torch.randn(pairs, rows // 2, generator=random).to(device, torch.bfloat16)
        slot = torch.zeros(tokens, dtype=torch.int32, device=device)
        return cls(x, inner, slot, Routes(expert.to(device), share.to(device)), weights)

    def grouping(self, size: int) -> Grouping:
        experts = len(self.weights.gate_up)
        return group_pairs(self.routes.expert, self.slot, experts=experts, size=size)

    def product(self, down: bool, grouping: Grouping) -> PairProduct:
        x, weight = (self.inner, self.weights.down) if down else (self.x, self.weights.gate_up)
        return PairProduct(x, weight, None, self.slot, self.routes, grouping, None, True)

    def tile(self, columns: int) -> ProductTile:
        """The tile of Triton's kernel."""
        lanes, experts = len(self.x), len(self.weights.gate_up)
        return chunk_tile(lanes, self.weights.top_k, experts, columns, self.x.dtype)

    def block(self) -> int:
        """Pairs of a block of Hopper's kernel."""
        return counted_block(len(self.x), self.weights.top_k, len(self.weights.gate_up))

    def facts(self) -> dict[str, Any]:
        counts = self.routes.expert.flatten().bincount()
        return {"used_experts": int((counts > 0).sum()), "most_pairs": int(counts.max())}

    def floor(self, weight: torch.Tensor) -> float:
        """Least microseconds of a product: of reading the chosen experts, or of multiplying."""
        each = weight.shape[1] * weight.shape[2]
        read = 2 * each * self.facts()["used_experts"] / BYTES
        return max(read, 2 * each * self.routes.expert.numel() / OPERATIONS)


def product_times(prompt: Prompt, down: bool, tiles: Sequence[ExpertTile]) -> dict[str, Any]:
    """Times of a product by both kernels, and whether their results agree."""
    weight = prompt.weights.down if down else prompt.weights.gate_up
    outputs = weight.shape[1] if down else weight.shape[1] // 2
    activation = None if down else ACTIVATION

    def room() -> torch.Tensor:
        return prompt.x.new_zeros(prompt.routes.expert.numel(), outputs)

    wanted, found = room(), [room()]
    tile = prompt.tile(weight.shape[2])
    old = prompt.product(down, prompt.grouping(tile.lanes))
    new = prompt.product(down, prompt.grouping(prompt.block()))
    times = {
        "triton": timed(lambda: LAUNCHES._launch_product(old, tile, wanted, activation)),
        "hopper": timed(lambda: launch_experts_chunk(new, found[0], activation)),
        "gather": timed(lambda: in_order(new)),
    }
    for each in tiles:
        cut, out = prompt.product(down, prompt.grouping(each.lanes)), room()

        def call(cut: PairProduct = cut, out: torch.Tensor = out, each: ExpertTile = each) -> None:
            launch_experts_chunk(cut, out, activation, tile=each)

        times[f"{each.lanes}x{each.warp_groups}"] = timed(call)
        found.append(out)
    difference = (found[0].float() - wanted.float()).abs().max() / wanted.float().abs().max()
    same = all(torch.equal(found[0], other) for other in found[1:])
    checks = {"difference": round(float(difference), 5), "same_bits": same}
    return {"floor": round(prompt.floor(weight), 1), "us": times, **checks}


def layer_times(prompt: Prompt) -> dict[str, Any]:
    """Times of expert_inner and expert_sum in a row, by both kernels."""
    weights, routed = prompt.weights, (prompt.slot, prompt.routes)
    tiles = [prompt.tile(weight.shape[2]) for weight in (weights.gate_up, weights.down)]

    def layer(size: int) -> Callable[[], torch.Tensor]:
        grouping = prompt.grouping(size)
        up, down = (tile._replace(lanes=size) for tile in tiles)
        options: dict[str, Any] = {"grouping": grouping, "pdl": True}

        def call() -> torch.Tensor:
            inner = expert_inner(prompt.x, weights.gate_up, *routed, tile=up, **options)
            return expert_sum(inner, weights.down, *routed, tile=down, **options)

        return call

    new = layer(prompt.block())
    times, found = {"hopper": timed(new)}, new().float()
    with mock.patch.object(LAUNCHES, "takes_experts_chunk", lambda *_: False):
        old = layer(min(tile.lanes for tile in tiles))
        times["triton"], wanted = timed(old), old().float()
    difference = (found - wanted).abs().max() / wanted.abs().max()
    floor = sum(prompt.floor(weight) for weight in (weights.gate_up, weights.down))
    return {"floor": round(floor, 1), "us": times, "difference": round(float(difference), 5)}


def timed(call: Callable[[], object]) -> float:
    return time_of(lambda copy: call(), 1)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The facts of each case."""
    tiles = [ExpertTile(*map(int, each.split("x"))) for each in options.tiles]
    for shape in options.shape:
        weights = Operands.random(shape, options.device)
        for tokens in options.tokens:
            for kind in options.routes:
                prompt = Prompt.random(weights, tokens, kind)
                case = {"shape": shape, "tokens": tokens, "routes": kind, **prompt.facts()}
                for product in ("inner", "down", "both"):
                    try:
                        found = case_times(prompt, product, tiles)
                    except Exception as error:
                        found = {"error": f"{type(error).__name__}: {error}"[:500]}
                    yield {**case, "product": product, **found}


def case_times(prompt: Prompt, product: str, tiles: Sequence[ExpertTile]) -> dict[str, Any]:
    if not prompt.x.is_cuda:
        return {"blocks": [int((prompt.grouping(size).blocks[0] >= 0).sum()) for size in (32, 128)]}
    return (
        layer_times(prompt)
        if product == "both"
        else product_times(prompt, product == "down", tiles)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", nargs="+", default=[*SHAPES][:2], choices=[*SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 128])
    parser.add_argument("--routes", nargs="+", default=[*ROUTES], choices=[*ROUTES])
    tiles = "more tiles of Hopper's kernel: 32, 64 or 128 pairs, x, 1 or 2 warp groups"
    parser.add_argument("--tiles", nargs="*", default=["128x1"], help=tiles)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=240, help="seconds until it gives up")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each case")
    options = parser.parse_args(arguments)
    # A kernel that waits for ever would hold the GPU.
    faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
    try:
        for row in rows(options):
            print(json.dumps(row), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    line = row | {"environment": environment(options.device)}
                    file.write(json.dumps(line) + "\n")
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
