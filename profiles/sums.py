"""`python -m graphengine.profiles.sums`: the cost of sums over ranks, on several GPUs.

    python -m graphengine.profiles.sums --ranks 2 --shape llama-8b --out sums.json

It first measures the products of a decode step whose parts are summed, as `graphengine bench
--lone-rank` does on one GPU. Then sums by themselves: those of decode steps, and those of chunks by
pushes and by NCCL, which carries them where GPUs cannot map each other's memory. Last a chunk's
sums with the residual and the norm after them: in one kernel, each rank for some lanes, and in two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from graphengine.kernels.comm.push_residual import push_units
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.plans import RowFamily, arrivals_needed
from graphengine.kernels.norm_rope.norm import add_rms_norm
from graphengine.models.launches import Share
from graphengine.models.linears import Linears
from graphengine.models.plans.choosing import choose_plans
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.observe.environment import environment
from graphengine.parallel.collectives.process_group import ProcessGroup
from graphengine.profiles.arguments import check_out, integers, write_out
from graphengine.profiles.benchmark.collectives import (
    CALLS,
    CollectiveTime,
    microseconds_of,
    product_times,
)
from graphengine.profiles.benchmark.shapes import model_shape
from graphengine.profiles.tables.percentiles import rounded
from graphengine.profiles.tables.text import COLLECTIVE_COLUMNS, Column, number, text_table

SCHEMA = 1
CHUNKS = (256, 512, 1024)
"""Lanes of the chunks whose sums are measured."""
_COLUMNS = (
    Column("lanes", lambda each: number(each["lanes"], 0)),
    Column("columns", lambda each: number(each["columns"], 0)),
    Column("dtype", lambda each: each["dtype"]),
    Column("pushed us", lambda each: number(each["pushed_us"], 2)),
    Column("NCCL us", lambda each: number(each["nccl_us"], 2)),
)
_NORM_COLUMNS = (
    *_COLUMNS[:3],
    Column("split us", lambda each: number(each["split_us"], 2)),
    Column("apart us", lambda each: number(each["apart_us"], 2)),
)
DTYPE = torch.bfloat16
_FOUND = "found.json"
_EPS = 1e-5


def measure(ranks: int, shape: str, lanes: Sequence[int]) -> dict[str, Any]:
    """The document. ProcessRaisedException or ProcessExitedException where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="graphengine-sums-") as folder:
        arguments = (ranks, shape, tuple(lanes), folder)
        spawn(_run, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        found = json.loads(Path(folder, _FOUND).read_text())
    names = {"schema": SCHEMA, "environment": environment("cuda"), "shape": shape, "ranks": ranks}
    return names | {kind: [rounded(each) for each in rows] for kind, rows in found.items()}


def _run(rank: int, ranks: int, shape: str, lanes: Sequence[int], folder: str) -> None:
    device, share = torch.device("cuda", rank), Share(rank, ranks)
    torch.cuda.set_device(device)
    model = of_rank(model_shape(shape), share)
    hidden = model.hidden_size
    words = max(CHUNKS) * hidden * DTYPE.itemsize // 4
    units = push_units(MAX_LANES, hidden, torch.float32)
    pushed = ProcessGroup(f"{folder}/pushed", share, device, units=units, summed_words=words)
    nccl = ProcessGroup(f"{folder}/nccl", share, device, stages=True)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    products = [
        each._asdict()
        for count in lanes
        for each in _products(pushed, model.linears, count, stream)
    ]
    found = {
        "products": products,
        "sums": list(_sums((pushed, nccl), lanes, hidden, stream)),
        "norms": list(_norms(pushed, hidden, stream)),
    }
    if rank == 0:
        Path(folder, _FOUND).write_text(json.dumps(found))
    # All ranks are done before any of them frees memory.
    pushed.reduce(torch.zeros(1, 2, device=device))
    torch.cuda.synchronize(device)
    for group in (pushed, nccl):
        group.check()
        group.leave()


def _products(
    group: ProcessGroup, linears: Linears, lanes: int, stream: torch.cuda.Stream
) -> Iterator[CollectiveTime]:
    peers = group.peers
    family: RowFamily = "fma" if lanes == 1 else "dot"
    assert peers is not None, "these GPUs cannot map each other's memory"
    plans, _ = choose_plans(linears, DTYPE, family, stream.device)
    needed = max(arrivals_needed(plans[name], linear.rows) for name, linear in linears.items())
    counters = torch.zeros(needed, dtype=torch.int32, device=stream.device)
    launch = Launch(pdl=True, arrivals=counters)
    return product_times(peers, linears, plans, lanes, DTYPE, stream, launch)


def _sums(
    groups: Sequence[ProcessGroup], lanes: Sequence[int], hidden: int, stream: torch.cuda.Stream
) -> Iterator[dict[str, Any]]:
    sizes = [(count, torch.float32) for count in lanes] + [(count, DTYPE) for count in CHUNKS]
    for count, dtype in sizes:
        part = torch.ones(count, hidden, dtype=dtype, device=stream.device)
        chains = [partial(_repeat, partial(group.reduce, part)) for group in groups]
        pushed, nccl = microseconds_of(stream, *chains)
        yield _chunk(count, hidden, dtype) | {"pushed_us": pushed, "nccl_us": nccl}


def _norms(group: ProcessGroup, hidden: int, stream: torch.cuda.Stream) -> Iterator[dict[str, Any]]:
    """Time chunks with residual and norm; also small ones, which two ranks do not split in use."""
    for count in CHUNKS:
        assert group.pushes is not None, "these GPUs cannot map each other's memory"
        split = group.pushes.pushed_stream(count, hidden, DTYPE)
        if split is None:
            continue
        part = torch.full((count, hidden), 1e-3, dtype=DTYPE, device=stream.device)
        x = torch.zeros(count, hidden, device=stream.device)
        norm = torch.ones(hidden, dtype=DTYPE, device=stream.device)
        slot = torch.zeros(count, dtype=torch.int32, device=stream.device)
        in_one = partial(split.add, part, x, norm, slot, None, _EPS)
        in_two = partial(_add_apart, group.reduce, part, x, norm, slot)
        chains = [partial(_repeat, call) for call in (in_one, in_two)]
        split_us, apart_us = microseconds_of(stream, *chains)
        yield _chunk(count, hidden, DTYPE) | {"split_us": split_us, "apart_us": apart_us}


def _chunk(lanes: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"lanes": lanes, "columns": hidden, "dtype": str(dtype).removeprefix("torch.")}


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _add_apart(
    reduce: Callable[[Tensor], Tensor], part: Tensor, x: Tensor, norm: Tensor, slot: Tensor
) -> None:
    whole = reduce(part)
    add_rms_norm(x, whole, norm, slot, eps=_EPS, out_dtype=DTYPE, out=whole, pdl=True)


def describe(document: dict[str, Any]) -> str:
    where = f"{document['ranks']} ranks of {document['shape']}, {document['environment']['device']}"
    return "\n\n".join(
        [
            f"products, us a call, on {where}",
            text_table(COLLECTIVE_COLUMNS, document["products"]),
            "sums by themselves",
            text_table(_COLUMNS, document["sums"]),
            "sums of chunks, residual and norm",
            text_table(_NORM_COLUMNS, document["norms"]),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks, each with a GPU of its own"
    )
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument(
        "--lanes", default="1,8", help="lanes of the decode steps to measure, comma-separated"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    try:
        lanes = integers(options.lanes, "--lanes")
        if max(lanes) > MAX_LANES:
            raise ValueError(f"--lanes {options.lanes}: a decode step has up to {MAX_LANES}")
        if options.out is not None:
            check_out(options.out)
        gpus = torch.cuda.device_count()
        if not 2 <= options.ranks <= gpus:
            raise ValueError(
                f"--ranks {options.ranks}: there are {gpus} GPUs, and ranks are two or more"
            )
        of_rank(model_shape(options.shape), Share(0, options.ranks))
    except ValueError as error:
        parser.error(str(error))
    document = measure(options.ranks, options.shape, lanes)
    print(describe(document))
    if options.out is not None:
        write_out(options.out, json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
