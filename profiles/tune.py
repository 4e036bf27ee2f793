"""Measure plans for the decode linears of a model, and keep the fastest: `graphengine tune`.

    graphengine tune --shape llama-1b --family dot --only qkv down

A linear's cost depends on its neighbours: launched with PDL they overlap and compete for room on an
SM, and a plan that wins by itself may lose a fifth in the step. So plans are measured in place. A
captured chain runs [qkv, output, gate_up, down] of a few layers as a decode step does, on more
weights than L2 can hold; lm_head is measured after such a chain. Only attention is left out:
`output` reads the first q_size columns of qkv's result, a strided view. For a hybrid, the chain has
a block of each kind in place of a layer, without recurrences. With `--tensor-parallel` it is one
rank's part, without the sums over ranks.

One linear at a time gets other plans while the others keep theirs: down, gate_up, qkv, output,
lm_head, and once more if that gained anything. Compared plans are replayed alternately, and a
plan's time is the median of its replays. The search minimises its time over that of the plan in
use, averaged over `--rows`: one plan serves them all. A plan whose output does not agree with the
reference is refused.

These were tried on an H200 and were not faster, so plans have no field for them: L2 prefetches of
the program's own or the next weight in bulk (10 to 60 % slower) or of the first tiles line by line
(3 to 5 % slower); first tiles of `dot` in registers before the wait (2 % faster at 8 rows, 20 %
slower at 32; `linear_gluon.py` now has them in shared memory, which is 1 to 4 % faster); triggering
dependents before the wait (`fma` equal, `dot` 20 % slower on the 1B shape) or after the product
(`fma` 8 % slower, `dot` equal).

Letters: N lanes, M weight rows, K input features, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from graphengine.config import EngineConfig
from graphengine.kernels.core.devices import device_of
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.plans import FMA_LANES, RowFamily
from graphengine.models.checkpoints.checkpoint import Checkpoint, stored_dtype
from graphengine.models.contract import ModelConfig
from graphengine.models.linears import LinearPlans
from graphengine.models.plans import choosing as tuning
from graphengine.models.plans import tuning_tables
from graphengine.models.plans.chains import inner_model
from graphengine.models.plans.tuning_tables import TunedPlan
from graphengine.options.devices import DTYPES
from graphengine.profiles.arguments import integers
from graphengine.profiles.benchmark.engines import engine_options, rounded_model
from graphengine.profiles.benchmark.lone_rank import share_of
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.flags.tune import ENGINE_FLAGS
from graphengine.profiles.shape_configs import DEMO
from graphengine.profiles.tuning.candidates import Target, targets_of
from graphengine.profiles.tuning.chain_bench import (
    ChainBench,
    chain_layers,
    chain_model,
    compile_processes,
)
from graphengine.profiles.tuning.search import Step, search

DEFAULT_ROWS: Mapping[RowFamily, tuple[int, ...]] = {"fma": (1,), "dot": (8, 32)}


def tune(options: argparse.Namespace) -> None:
    """Measure plans for a model's decode linears on this GPU and keep the fastest."""
    if not options.seconds > 0:
        raise ValueError(f"--seconds {options.seconds} must be positive")
    for family in options.family:
        family_rows(family, options.rows)
    config, dtype = _model(options)
    device = torch.device(options.device)
    if device.type != "cuda":
        raise ValueError(f"tuning measures on an NVIDIA GPU, and --device is {options.device!r}")
    if not torch.cuda.is_available():
        raise ValueError("tuning measures on an NVIDIA GPU, and torch finds none")
    name = tuning_tables.device_name(device)
    path = options.out or tuning_tables.user_table_path(name)
    # If the table cannot be written, fail before the work, not after it.
    tuning_tables.write_table(path, name, {})
    inner = inner_model(config)
    for what, part in (("", config), ("the inner decoder of ", inner)):
        if part is not None:
            print(f"{what}{config.architecture} on {name} -> {path}", flush=True)
            _tune_decoder(part, dtype, device, options, path)


def _tune_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: argparse.Namespace,
    path: Path,
) -> None:
    """Search plans for the linears of a decoder, and add them to the table."""
    gpu, name = device_of(device), tuning_tables.device_name(device)
    assert gpu is not None, f"{device} is no GPU"
    layers = chain_layers(config, dtype)
    print(f"chains of {layers} layers", flush=True)
    model = chain_model(config, dtype, device, layers=layers)
    for family in options.family:
        rows = family_rows(family, options.rows)
        plans, _ = tuning.choose_plans(config.linears, dtype, family, device)
        targets = targets_of(config, dtype, family, options.only, gpu)
        bench = ChainBench(model, rows, processes=compile_processes(model))
        with contextlib.closing(bench):
            plans = search(targets, plans, bench, seconds=options.seconds, report=_print_step(rows))
            chain, whole = (bench.times([plans], head=head)[0] for head in (False, True))
        layer_us = [us / layers for us in chain]
        head_us = [both - us for both, us in zip(whole, chain, strict=True)]
        for count, us, head in zip(rows, layer_us, head_us, strict=True):
            print(f"\n{family}, {count} rows: {us:.1f} us a layer, {head:.1f} us lm_head")
        tuning_tables.write_table(path, name, entries(targets, plans, layer_us[0], head_us[0]))


def _print_step(rows: Sequence[int]) -> Callable[[Step], None]:
    return lambda step: print(f"\n{step.table(rows)}", flush=True)


def entries(
    targets: Sequence[Target], plans: LinearPlans, layer_us: float, head_us: float
) -> tuning_tables.Table:
    """The part of `plans` that was searched, for a table."""
    date = datetime.now(UTC).date().isoformat()
    table = {}
    for target in targets:
        us = head_us if target.key.kind == "sample" else layer_us
        # A tiny model's time is still a positive number.
        us = max(round(us, 1), 0.1)
        table[target.key] = TunedPlan(
            target.plan(plans), us, torch=torch.__version__, triton=triton.__version__, date=date
        )
    return table


def family_rows(family: RowFamily, text: str | None) -> tuple[int, ...]:
    """Numbers of rows to measure at. ValueError if the family does not serve one of them."""
    if text is None:
        return DEFAULT_ROWS[family]
    rows, most = integers(text, "rows"), FMA_LANES if family == "fma" else MAX_LANES
    if max(rows) > most:
        raise ValueError(f"--rows {text}: {family} serves up to {most}")
    return tuple(dict.fromkeys(rows))


def _model(options: argparse.Namespace) -> tuple[ModelConfig, torch.dtype]:
    if options.shape is not None or options.checkpoint == DEMO:
        subject = Subject.of_shape(options.shape or DEMO)
    else:
        subject = Subject.of_checkpoint(options.checkpoint)
    config = EngineConfig(
        device="cpu", **engine_options({name: getattr(options, name) for name in ENGINE_FLAGS})
    )
    model = share_of(rounded_model(subject.model, config), config)
    if options.dtype is not None:
        return model, DTYPES[options.dtype]
    if subject.checkpoint is None:
        return model, torch.bfloat16
    return model, stored_dtype(Checkpoint.open(subject.checkpoint))
