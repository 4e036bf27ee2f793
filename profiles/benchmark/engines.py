"""Engines to measure: built, timed while they are built, and described.

Options are `EngineConfig`'s.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from graphengine import Engine, EngineConfig
from graphengine.drafters import Drafter, NoDrafter
from graphengine.drafters.block.drafter import BlockDrafter
from graphengine.drafters.block.layers import DFlashConfig
from graphengine.drafters.eagle3.module import Eagle3Module
from graphengine.drafters.modules.making import module_drafter
from graphengine.drafters.mtp.making import beside_target
from graphengine.drafters.mtp.module import MtpModules
from graphengine.drafters.ngram import NGramDrafter
from graphengine.engine_options import EngineOptions
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.checkpoints.destinations import with_state_dtype
from graphengine.models.checkpoints.random_values import SEED
from graphengine.models.checkpoints.tensor_files import ReorderedTensor
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import WHOLE, Share
from graphengine.models.quantised.forms import rounded_forms
from graphengine.models.splitting.stages import ALONE, Place
from graphengine.observe.tracing import span
from graphengine.opening.budget.footprint import plan_with_footprint
from graphengine.opening.calibration import calibrate, calibration_ids
from graphengine.profiles.benchmark.lone_rank import lone_engine, share_of
from graphengine.profiles.benchmark.shapes import (
    Subject,
    fill_random,
    random_head,
    random_module,
    random_tokens,
)
from graphengine.speculative import MTP, DFlash, Eagle3, NGram, describe

DSPARK_RANK = 256
"""Rank of the sequential head of DeepSpec's drafters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """Seconds and MiB that an engine took to start; figures that only a GPU has are None on a CPU.

    total_s      from nothing to ready, `weights_s` included
    weights_s    weights allocated and drawn, or read
    compile_s    compiling kernels, or reading compiled ones from disk
    compiled     kernels that were compiled: 0 where all were in Triton's cache
    loaded       kernels that were read from that cache on disk
    warm_up_s    sum over the graphs: their first runs
    capture_s    sum over the graphs: recording, instantiation and upload
    capture_mib  device memory that the graphs added: pool_mib + graphs_mib
    pool_mib     of it, the memory that torch reserved for intermediates; the longest prefill needs
                 most
    graphs_mib   of it, the memory that the driver took beyond that, for the graphs themselves
    graphs       how many were captured
    """

    total_s: float
    weights_s: float
    compile_s: float | None
    compiled: int | None
    loaded: int | None
    warm_up_s: float | None
    capture_s: float | None
    capture_mib: float | None
    pool_mib: float | None
    graphs_mib: float | None
    graphs: int


def engine_options(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `wanted` that are not None; the others keep `EngineConfig`'s defaults."""
    return {name: value for name, value in wanted.items() if value is not None}


def build_engine(
    subject: Subject,
    options: Mapping[str, Any],
    *,
    random_vocab: int | None = None,
    lone_rank: bool = False,
) -> tuple[Engine, StartUp]:
    """An engine of `subject` with `EngineConfig(**options)`, and the cost of building it.

    A shape's drafter has random weights, too, and drafts from `random_vocab` random tokens; from
    all tokens if that is None. With `lone_rank` the engine is one rank of a shape by itself.
    """
    started = time.perf_counter()
    loaded = started

    def progress(done: int, total: int) -> None:
        nonlocal loaded
        loaded = time.perf_counter()

    if subject.checkpoint is not None:
        if subject.drawn:
            options = {**options, "load_format": "dummy"}
        engine = Engine.from_pretrained(
            subject.checkpoint, progress=progress, **cast(EngineOptions, options)
        )
    else:
        config = EngineConfig(**options)
        engine = _random_engine(subject, config, random_vocab, progress, lone_rank)
    ready = time.perf_counter()
    return engine, _start_up(engine, total=ready - started, weights=loaded - started)


def _random_engine(
    subject: Subject,
    config: EngineConfig,
    random_vocab: int | None,
    progress: Callable[[int, int], None],
    lone_rank: bool,
) -> Engine:
    """`Engine.from_pretrained` for a shape: weights are drawn at random, not read.

    Weights that are to be rounded are drawn as codes: they never exist in 16 bits.
    """
    model_config = rounded_model(subject.model, config)
    if lone_rank:
        model_config = share_of(model_config, config)
    drafter = random_drafter(subject, config, random_vocab)
    ids = calibration_ids(config, model_config, None)
    memory = plan_with_footprint(
        model_config,
        config,
        checkpoint_dtype=torch.bfloat16,
        drafter=drafter,
        calibration_tokens=len(ids),
        place=Place(Share(0, config.tensor_parallel), WHOLE) if lone_rank else ALONE,
    )
    with span("load"):
        weights = model_config.allocate(device=config.device, dtype=memory.dtype)
        fill_random(weights.named(), weights.linears())
        # In a call of their own, as a drafter's tensors may have names of the target's.
        drafts = drafter.allocate(memory.device, memory.dtype, config.family, config.chain_family)
        views = {
            name: each.tensor if isinstance(each, ReorderedTensor) else each
            for name, each in drafts.items()
        }
        fill_random(views, drafter.linears(), seed=SEED + 1)
        if memory.device.type == "cuda":
            torch.cuda.synchronize(memory.device)
    progress(0, 0)
    if lone_rank:
        return lone_engine(weights, memory, config)
    model = weights.open(max_seq_len=memory.max_seq_len)
    if ids:
        calibrate(model, memory, config, drafter, ids)
    return Engine(model, memory, config, drafter=drafter)


@contextmanager
def freed(engine: Engine) -> Iterator[Engine]:
    """Close the engine at the end, and free the device's memory for the next one."""
    on_gpu = engine.memory.device.type == "cuda"
    try:
        yield engine
    finally:
        engine.close()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def rounded_model(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model with weights and states as `config` wants them. ValueError for packed ones."""
    model = with_state_dtype(model, config.state_dtype)
    if config.quantize is None:
        return model
    linears = model.allocate(device="meta", dtype=torch.float32).linears()
    packed = [each.weight for each in linears if isinstance(each.weight, PackedWeight)]
    if packed:
        raise ValueError(
            f"quantize={config.quantize!r} is for weights of 16 or 32 bits, and this model has "
            f"{len(packed)} linears in other formats, such as {packed[0].format.label}"
        )
    return model.stored_as(rounded_forms(linears, config.quantize, head=config.quantize_lm_head))


def random_drafter(
    subject: Subject, config: EngineConfig, vocab_size: int | None = None
) -> Drafter:
    """The drafter of `config` for a shape: an MTP module like the shape's layers, an EAGLE3 head
    (`Eagle3("random")`), a block drafter (`DFlash("random")` or `DFlash("random-dspark")`),
    n-grams, or none.

    ValueError for a mode that needs a checkpoint.
    """
    match config.mode:
        case None:
            return NoDrafter()
        case MTP(style="eagle", draft_vocab=None) as mode:
            vocabulary = (
                None if vocab_size is None else random_tokens(subject.model.vocab_size, vocab_size)
            )
            module = beside_target(
                random_module(subject.model), config, rounded_model(subject.model, config)
            )
            modules = MtpModules(module.first(1), vocabulary)
            size = subject.model.vocab_size if vocab_size is None else vocab_size
            return module_drafter(modules, mode, config, subject.model, size)
        case Eagle3(path="random", layers=None) as mode:
            head = random_head(subject.model, vocab_size)
            size = head.config.draft_vocabulary
            module3 = Eagle3Module(head, None, subject.model)
            return module_drafter(module3, mode, config, subject.model, size)
        case DFlash(path="random" | "random-dspark" as kind, k=k, layers=None):
            rank = DSPARK_RANK if kind == "random-dspark" else 0
            block = DFlashConfig.of_target(subject.model, k + (0 if rank else 1), rank=rank)
            return BlockDrafter(block, None, subject.model, k)
        case NGram(k=k, max_n=max_n):
            return NGramDrafter(k, max_n)
        case other:
            raise ValueError(
                f"{describe(other)}: this needs a checkpoint, and {subject.name} has random weights"
            )


def _start_up(engine: Engine, *, total: float, weights: float) -> StartUp:
    report = engine.report()
    captures, compilation = report.captures, report.compilation
    on_gpu = engine.memory.device.type == "cuda"

    def of_gpu(value: float) -> float | None:
        return round(value, 4) if on_gpu else None

    return StartUp(
        total_s=round(total, 4),
        weights_s=round(weights, 4),
        compile_s=None if compilation is None else round(compilation.seconds, 4),
        compiled=None if compilation is None else compilation.compiled,
        loaded=None if compilation is None else compilation.loaded,
        warm_up_s=of_gpu(sum(capture.warm_up_ms for capture in captures) / 1e3),
        capture_s=of_gpu(sum(capture.capture_ms for capture in captures) / 1e3),
        capture_mib=of_gpu(sum(capture.bytes for capture in captures) / 2**20),
        pool_mib=of_gpu(sum(capture.reserved_bytes for capture in captures) / 2**20),
        graphs_mib=of_gpu(
            sum(capture.bytes - capture.reserved_bytes for capture in captures) / 2**20
        ),
        graphs=len(captures),
    )
