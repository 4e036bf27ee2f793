"""The options of `graphengine bench`: its measurements, and the engines that they need."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graphengine import EngineConfig
from graphengine.options.devices import usual_device
from graphengine.parallel.ranks import rank_devices
from graphengine.profiles.arguments import integers
from graphengine.profiles.benchmark.contexts import Contexts, kernel_work, read_contexts
from graphengine.profiles.benchmark.engines import engine_options
from graphengine.profiles.benchmark.lone_rank import share_of
from graphengine.profiles.benchmark.measure import (
    ADMITTED_NEW_TOKENS,
    CHECKED_FIRST_TOKENS,
    Work,
)
from graphengine.profiles.benchmark.peers import require_peer
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.benchmark.speculation import Sweep, check_sweep, read_sweep
from graphengine.profiles.flags.bench import ENGINE_FLAGS
from graphengine.profiles.shape_configs import DEMO

GPU_DEFAULTS = {"batch": "1,8,32", "new_tokens": 256, "runs": 5, "ttft_tokens": "128,1024"}
CPU_DEFAULTS = {"batch": "1", "new_tokens": 32, "runs": 2, "ttft_tokens": "128"}
"""A CPU takes a hundred times as long: with these it is done within a minute."""
DEFAULT_SLOTS = EngineConfig(device="cpu").max_batch
DEFAULT_SEQ_LEN = 4096
"""`max_seq_len` of an engine by default, for a model with at least as many positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One invocation: its measurements, and the engines that they need.

    options         options of every engine, except the sizes that each measurement chooses
    default_engine  add a row with one live request in an engine of the default sizes
    ttft_tokens     prompt lengths; those that the model cannot hold are left out
    long_tokens     gaps to measure in the sized engines with one live request; 0: none
    record          file for a recording; then there is one row
    admission       length of a prompt that is admitted while seven requests decode; 0: none
    ranks           numbers of ranks for tensor_parallel; each number has its own rows
    lone_rank       whether one rank is measured by itself, as it would be among the others
    sweep           the speculative engines to compare with each row's plain one
    contexts        the tokens before the steps of each batch; None: there are rows instead
    """

    subject: Subject
    options: dict[str, Any]
    works: tuple[Work, ...]
    max_batch: int | None
    max_seq_len: int | None
    default_engine: bool
    ttft_tokens: tuple[int, ...]
    long_tokens: int
    record: Path | None
    admission: int
    kernels: bool
    peers: tuple[str, ...]
    ranks: tuple[int, ...]
    lone_rank: bool
    sweep: Sweep | None
    contexts: Contexts | None

    @property
    def device(self) -> str:
        return str(self.options.get("device", EngineConfig().device))

    @property
    def limit(self) -> int:
        """Prompt and new tokens of a request in the engines of the rows."""
        return _given(self.max_seq_len, self.subject.model.max_positions)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The `ttft_tokens` that the engines of the rows hold."""
        return tuple(tokens for tokens in self.ttft_tokens if tokens < self.limit)

    def rows(self) -> Iterator[tuple[Work, dict[str, Any]]]:
        """The work of each row, and the sizes of its engine."""
        if self.contexts is not None:
            return
        for ranks in self.ranks:
            for work, sizes in self._rows_of_ranks():
                yield work, sizes | {"tensor_parallel": ranks}

    def _rows_of_ranks(self) -> Iterator[tuple[Work, dict[str, Any]]]:
        for work in self.works:
            firsts = (min(n + CHECKED_FIRST_TOKENS, self.limit) for n in self.first_tokens)
            need = max([work.prompt_tokens + work.new_tokens, *firsts])
            sizes = {
                "max_batch": _given(self.max_batch, work.live),
                "max_seq_len": _given(self.max_seq_len, need),
            }
            yield work, sizes
        if self.default_engine:
            yield replace(self.works[0], live=1), {"max_batch": DEFAULT_SLOTS}

    @property
    def admission_sizes(self) -> dict[str, Any]:
        """Sizes of the engine in which a prompt is admitted."""
        return {"max_batch": DEFAULT_SLOTS, "max_seq_len": self.max_seq_len}

    def prefill_sizes(self, tokens: int) -> dict[str, Any]:
        """Sizes of the engine whose prefill kernels are timed with a prompt of `tokens` tokens."""
        return {
            "max_batch": 1,
            "max_seq_len": _given(self.max_seq_len, tokens + 1),
            "lookahead": 0,
        }

    def kernel_sizes(self, work: Work) -> dict[str, Any]:
        """Sizes of the engine whose kernels are timed at this work."""
        return {
            "max_batch": _given(self.max_batch, work.live),
            "max_seq_len": _given(
                self.max_seq_len,
                min(work.prompt_tokens + max(work.new_tokens, 128), self.limit),
            ),
        }


def read_options(options: argparse.Namespace) -> Bench:
    """The options, checked as far as can be done before anything is built."""
    _check_alone(options)
    _fill_in(options)
    subject = _subject(options)
    sweep = read_sweep(options, subject)
    batches = _batches(options)
    wanted = {name: getattr(options, name) for name in (*ENGINE_FLAGS, "dtype")}
    wanted["pdl"] = False if options.no_pdl else None
    asked = Bench(
        subject=subject,
        options=engine_options(wanted),
        works=tuple(_work(options, batch) for batch in batches),
        max_batch=options.max_batch,
        max_seq_len=options.max_seq_len,
        default_engine=1 in batches and sweep is None and _fits_default(options),
        contexts=read_contexts(options, subject),
        ttft_tokens=tuple(integers(options.ttft_tokens, "ttft-tokens")),
        long_tokens=options.long,
        record=options.record,
        admission=options.admission,
        kernels=options.kernels,
        peers=tuple(dict.fromkeys(options.peer)),
        ranks=_ranks(options, subject),
        lone_rank=options.lone_rank,
        sweep=sweep,
    )
    _check_engines(asked)
    return asked


def _fill_in(options: argparse.Namespace) -> None:
    """Set the options that were left out, and whose defaults depend on the device."""
    on_cpu = (options.device or usual_device()) == "cpu"
    defaults: dict[str, Any] = {**(CPU_DEFAULTS if on_cpu else GPU_DEFAULTS)}
    if options.record is not None:
        defaults["batch"] = "1"
    elif options.speculative is not None and not on_cpu:
        defaults["batch"] = "1,8"
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _check_alone(options: argparse.Namespace) -> None:
    """ValueError for options that are wrong whatever is measured."""
    if options.shape is not None and options.checkpoint is not None:
        raise ValueError(f"--shape {options.shape} and --checkpoint {options.checkpoint}: give one")
    for peer in options.peer:
        require_peer(peer)
    if options.peer and options.sampler != "fast":
        raise ValueError(f"--peer {options.peer[0]} decodes greedily, not --sampler full")
    for name in ("long", "admission"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name} {getattr(options, name)} must not be negative")


def _subject(options: argparse.Namespace) -> Subject:
    # As everywhere, the checkpoint 'demo' is the packaged model; it is one of the shapes here.
    if options.checkpoint in (None, DEMO):
        return Subject.of_shape(options.shape or DEMO)
    return Subject.of_checkpoint(options.checkpoint)


def _batches(options: argparse.Namespace) -> list[int]:
    """Live requests of each row. ValueError for more than a recording or an engine takes."""
    batches = integers(options.batch, "batch")
    if options.record is not None and len(batches) > 1:
        raise ValueError(f"--record {options.record} takes one batch, not {options.batch}")
    if options.max_batch is not None and options.max_batch < max(batches):
        raise ValueError(f"--max-batch {options.max_batch} is less than a batch of {max(batches)}")
    return batches


def _work(options: argparse.Namespace, batch: int) -> Work:
    return Work(
        live=batch,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        runs=options.runs,
        sampler=options.sampler,
    )


def _fits_default(options: argparse.Namespace) -> bool:
    """Whether an engine of default sizes can have a row: not if sizes are given, if it would be too
    short, or if a row is recorded.
    """
    sized = (options.max_batch, options.max_seq_len) != (None, None) or options.record is not None
    too_long = options.prompt_tokens + options.new_tokens > DEFAULT_SEQ_LEN
    return not (sized or too_long or options.row_family == "fma")


def _ranks(options: argparse.Namespace, subject: Subject) -> tuple[int, ...]:
    """Numbers of ranks to measure. ValueError for options that take one number only, or none."""
    found = tuple(integers(options.tensor_parallel or "1", "tensor-parallel"))
    if options.lone_rank and (subject.checkpoint is not None or min(found) == 1):
        raise ValueError(
            "--lone-rank is one of several ranks of a --shape with random weights: give "
            "--tensor-parallel of 2 or more"
        )
    for name in ("context", "admission", "kernels", "speculative"):
        if found != (1,) and getattr(options, name):
            raise ValueError(f"--tensor-parallel {options.tensor_parallel} has rows, no --{name}")
    if options.record is not None and len(found) > 1:
        raise ValueError(
            f"--record takes one number of ranks, not --tensor-parallel {options.tensor_parallel}"
        )
    return found


def _check_engines(bench: Bench) -> None:
    """ValueError unless the config of each engine of `bench` is large enough for its work."""
    sizes = [sizes for _, sizes in bench.rows()]
    contexts = bench.contexts
    if contexts is not None:
        kernels = map(kernel_work, bench.works) if bench.kernels else ()
        contexts.check([*bench.works, *kernels], bench.subject)
        longest = contexts.lengths[-1]
        sizes = [contexts.options(work, longest) for work in bench.works]
    rows = tuple(sizes)
    if bench.admission:
        sizes.append(bench.admission_sizes)
    if bench.kernels and contexts is None:
        sizes += [bench.kernel_sizes(work) for work in bench.works]
    for chosen in sizes:
        EngineConfig(**bench.options | engine_options(chosen))
    if bench.sweep is not None:
        for chosen in rows:
            check_sweep(bench.sweep, bench.subject, bench.options | engine_options(chosen))
    _check_device(bench.device)
    _check_ranks(bench)
    most, limit = bench.subject.model.max_positions, bench.limit
    if limit > most:
        raise ValueError(f"--max-seq-len {limit} exceeds the {most} positions of the model")
    work = bench.works[0]
    tokens = work.prompt_tokens + work.new_tokens
    if tokens > limit and contexts is None:
        raise ValueError(
            f"{work.prompt_tokens} prompt and {work.new_tokens} new tokens exceed "
            f"max_seq_len={limit}"
        )
    limit = _given(bench.max_seq_len, min(most, DEFAULT_SEQ_LEN))
    if bench.admission and max(tokens, bench.admission + ADMITTED_NEW_TOKENS) > limit:
        raise ValueError(
            f"--admission {bench.admission}: that prompt with {ADMITTED_NEW_TOKENS} new tokens, "
            f"and {tokens} tokens of each other request, must fit into max_seq_len={limit}"
        )


def _check_ranks(bench: Bench) -> None:
    """ValueError for a model that these ranks cannot split, or for too few devices."""
    for ranks in bench.ranks:
        if ranks > 1:
            config = EngineConfig(**bench.options, tensor_parallel=ranks)
            share_of(bench.subject.model, config)
            if not bench.lone_rank:
                rank_devices(config)


def _check_device(name: str) -> None:
    """ValueError unless torch has this device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: must be 'cpu', 'cuda' or 'cuda:N'") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device={name!r}, but torch finds {count} CUDA devices")


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
