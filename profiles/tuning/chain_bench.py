"""A captured chain of linears, timed in place with one set of plans after the other."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

from graphengine.buckets import CapturedGraph
from graphengine.kernels.attention.decode import SPLIT_TOKENS
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.experts.experts import residual_arrivals
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import (
    LOGITS,
    STORE,
    AddResidual,
    Epilogue,
    SampleTiles,
    StoreSwiglu,
)
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import token_of_tiles_reference
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import LinearPlans, stream_groups
from graphengine.models.plans.chains import (
    Chain,
    chain_experts,
    chain_experts_reference,
    chain_length,
    chain_linear,
    link_bytes,
    new_chain,
    shared_linears,
)
from graphengine.models.routing import StepRoutes
from graphengine.profiles.benchmark.shapes import fill_random

Times = tuple[float, ...]
"""Microseconds of a chain, for each number of rows."""
CHAIN_BYTES = 1 << 30
"""Weights of a chain: far beyond four times the 60 MB of an L2."""
_REPLAYS = 15
_MAX_PROCESSES = 16
# Error over the size of the outputs, after up to three rounded products.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
Setting = tuple[ModelConfig, torch.dtype, torch.device, tuple[int, ...]]
"""The data from which a compiling process makes the same chain."""


class ChainBench:
    """Runs the linears of `model`, whose layers form the chain; close it after use.

    Plans are compiled in this many `processes` that share Triton's cache on disk; 0: in this one.
    On a CPU `prepare` works, with references in place of kernels; nothing can be timed.
    """

    def __init__(self, model: Chain, rows: tuple[int, ...], *, processes: int = 0) -> None:
        self.model, self.rows, self.device = model, rows, model.weights.embedding.device
        lanes, hidden = max(rows), model.config.hidden_size
        random = torch.Generator(self.device).manual_seed(1)
        self._x = torch.randn((lanes, hidden), generator=random, device=self.device)
        self._slot = torch.arange(lanes, dtype=torch.int32, device=self.device)
        # Greedy, so that the winners are known; without stop ids.
        self._sampling = SamplingTensors.neutral(lanes, stop_ids=16, device=self.device)
        # Two for each tile; no tile has fewer than 16 rows.
        most = max(linear.rows for linear in model.config.linears.values())
        counters = max(2 * triton.cdiv(most, 16), residual_arrivals(lanes, hidden))
        self._arrivals = self._slot.new_zeros(counters)
        self._shared = shared_linears(model)
        self._chosen = _random_experts(model.config, lanes, self.device)
        self._failures: dict[LinearPlans, str | None] = {}
        # A forked process could not use CUDA.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=spawn) if processes else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def prepare(self, variants: Sequence[LinearPlans], *, seconds: float) -> dict[LinearPlans, str]:
        """Compile plans and check their outputs; returns a reason for each that must not be used.

        No compilation begins after `seconds`.
        """
        new = [plans for plans in dict.fromkeys(variants) if plans not in self._failures]
        for plans in self._compile(new, seconds):
            self._failures[plans] = self._failure(plans)
        reasons = {plans: self._failures.get(plans, "not compiled in time") for plans in variants}
        return {plans: reason for plans, reason in reasons.items() if reason is not None}

    def times(self, variants: Sequence[LinearPlans], *, head: bool) -> list[Times]:
        """Time chains that `prepare` accepted, with or without lm_head after them."""
        with _on(self.device):
            columns = [self._times_at(rows, variants, head) for rows in self.rows]
        return list(zip(*columns, strict=True))

    def run(self, plans: LinearPlans, rows: int, *, layers: int, head: bool) -> None:
        for _ in self.launches(plans, rows, layers=layers, head=head):
            pass

    def launches(
        self, plans: LinearPlans | None, rows: int, *, layers: int, head: bool
    ) -> Iterator[tuple[str, Any]]:
        """Launch one linear after the other, as the model's decode does, and yield each result.

        An output is valid until the next launch. With `plans` None: references, and logits.
        """
        x, config = self._x[:rows], self.model.config
        groups = stream_groups(config.linears, plans) if plans else 1
        squares = (x.square().sum(dim=1) / groups).repeat(groups, 1)
        residual = Residual(x.clone(), x.to(self.model.dtype, copy=True), squares)
        for layer in range(layers):
            product = residual.scaled
            for name, of_layer in config.linears.items():
                if of_layer.kind == "sample" or (of_layer.experts and of_layer.kind != "residual"):
                    continue
                if name in self._shared:
                    continue
                if of_layer.experts:
                    residual = self._launch_experts(plans, layer, residual)
                    yield name, residual
                elif of_layer.kind == "residual":
                    part = product[:, : of_layer.columns]
                    residual = self._launch(plans, layer, name, part, residual)
                    yield name, residual
                else:
                    # Latents of queries have a product of their own, which reads the one before.
                    of_stream = of_layer.columns == config.hidden_size
                    part = residual.scaled if of_stream else product[:, : of_layer.columns]
                    product = self._launch(plans, layer, name, part, residual)
                    yield name, product
        if head:
            name = next(n for n, each in config.linears.items() if each.kind == "sample")
            yield name, self._launch(plans, 0, name, residual.scaled, residual)

    def _launch(
        self, plans: LinearPlans | None, layer: int, name: str, x: Tensor, residual: Residual
    ) -> Any:
        config, slot = self.model.config, self._slot[: len(x)]
        kind = config.linears[name].kind
        weight, bias, norm = chain_linear(self.model, layer, name)
        call = LinearCall(x, weight, slot, bias=bias)
        if plans is not None:
            launch = Launch(arrivals=self._arrivals, pdl=True)
            call = call._replace(plan=plans[name], launch=launch)
        epilogue: Epilogue[Any] = StoreSwiglu() if kind == "swiglu" else STORE
        if kind == "residual":
            assert norm is not None, f"{name=}"
            epilogue = AddResidual(residual, norm)
        elif x is residual.scaled:
            call = call._replace(squares_TN=residual.squares, eps=config.norm_eps)
        if kind == "sample":
            # Of logits one can tell how far a token falls short of the best.
            epilogue = LOGITS if plans is None else SampleTiles(slot, self._sampling)
        return (linear_reference if plans is None else linear)(call, epilogue)

    def _launch_experts(
        self, plans: LinearPlans | None, layer: int, residual: Residual
    ) -> Residual:
        """Router, gates and ups, and down of a layer. The chosen experts are given, as kernels and
        references may choose differently between nearly equal scores.
        """
        lanes = len(residual.x)
        slot, chosen = self._slot[:lanes], self._chosen[:lanes]
        if plans is None:
            return chain_experts_reference(self.model, layer, slot, residual, chosen)
        launch = DecodeLaunch(
            plans=plans,
            split_tokens=SPLIT_TOKENS,
            arrivals=self._arrivals,
            pdl=True,
            routes=StepRoutes(chosen[None]),
        )
        return chain_experts(self.model, layer, slot, residual, launch)

    def _compile(self, variants: Sequence[LinearPlans], seconds: float) -> list[LinearPlans]:
        """Plans that were compiled in time, or failed to compile: the failure shows again here."""
        if self._pool is None:
            return list(variants)
        setting = (self.model.config, self.model.dtype, self.device, self.rows)
        futures = {plans: self._pool.submit(_first_launch, setting, plans) for plans in variants}
        _, late = wait(futures.values(), None if seconds == math.inf else max(seconds, 0.0))
        for future in late:
            future.cancel()
        # Some compilations are still running, and nothing may run during a measurement.
        wait(late)
        return [plans for plans, future in futures.items() if not future.cancelled()]

    def _failure(self, plans: LinearPlans) -> str | None:
        """Why a layer and lm_head do not run, or how far they are off the reference; None: fine."""
        allowed = _TOLERANCE[self.model.dtype]
        try:
            with _on(self.device):
                for rows in self.rows:
                    launched = self.launches(plans, rows, layers=1, head=True)
                    for (name, result), expected in zip(launched, self._expected, strict=True):
                        error = _error(result, [part[:rows] for part in expected])
                        if not error <= allowed:
                            return f"{name} of {rows} rows is off by {error:.2g} > {allowed:.2g}"
        except (triton.TritonError, RuntimeError) as error:
            return str(error) or type(error).__name__
        return None

    @functools.cached_property
    def _expected(self) -> list[list[Tensor]]:
        """Reference outputs for the largest number of rows: fewer rows use the first of them."""
        launched = self.launches(None, max(self.rows), layers=1, head=True)
        return [[part.clone() for part in _parts(result)] for _, result in launched]

    def _times_at(self, rows: int, variants: Sequence[LinearPlans], head: bool) -> list[float]:
        """Median microseconds of graphs that are replayed alternately, after a round to warm up."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        event = partial(torch.cuda.Event, enable_timing=True)
        layers, graphs = chain_length(self.model.config), []
        with contextlib.ExitStack() as stack:
            for plans in variants:
                graphs.append(
                    CapturedGraph(
                        partial(self.run, plans, rows, layers=layers, head=head),
                        name=f"tune/{rows}",
                        device=self.device,
                        stream=stream,
                        warmups=1,
                    )
                )
                stack.callback(graphs[-1].close)
                graphs[-1].capture()
            turns = [[(event(), event()) for _ in graphs] for _ in range(1 + _REPLAYS)]
            for turn in turns:
                for graph, (start, end) in zip(graphs, turn, strict=True):
                    start.record(stream)
                    graph.replay()
                    end.record(stream)
            stream.synchronize()
        of_graphs = zip(*turns[1:], strict=True)
        return [1e3 * median(a.elapsed_time(b) for a, b in pairs) for pairs in of_graphs]


def _random_experts(config: ModelConfig, lanes: int, device: torch.device) -> Tensor:
    """int32 [lanes, k]: different experts of each lane; k is 0 in a model without experts."""
    routed = config.allocate(device="meta", dtype=torch.float32).routed
    if routed is None:
        return torch.empty((lanes, 0), dtype=torch.int32, device=device)
    random = torch.Generator().manual_seed(1)
    drawn = torch.rand((lanes, routed.experts), generator=random).argsort(dim=1)
    return drawn[:, : routed.chosen].to(device, torch.int32).contiguous()


def _parts(result: Any) -> Sequence[Tensor]:
    """The outputs to compare; rows come first."""
    if isinstance(result, Residual):
        return result.x, result.scaled, result.squares.sum(dim=0)
    return (result,)


def _error(result: Any, expected: Sequence[Tensor]) -> float:
    """The largest error over the size of the outputs; for tokens, the shortfall of their logits."""
    if isinstance(result, tuple) and not isinstance(result, Residual):
        (logits_NV,), token = expected, token_of_tiles_reference(*result).long()[:, None]
        # -1 stands for no token.
        won = logits_NV.gather(1, token.clamp(min=0)).where(token >= 0, math.nan)
        short = logits_NV.amax(dim=1, keepdim=True) - won
        return float((short / logits_NV.square().mean().sqrt()).max())
    errors = []
    for part, right in zip(_parts(result), map(Tensor.float, expected), strict=True):
        size = right.square().mean().sqrt() + right.abs()
        errors.append(((part.float() - right).abs() / size).max())
    return float(torch.stack(errors).max())


def _first_launch(setting: Setting, plans: LinearPlans) -> None:
    """Compile in a process of its own, which leaves kernels in Triton's cache on disk.

    A failure shows again where it can be reported; some of Triton's errors cannot be pickled.
    """
    *_, device, rows = setting
    with contextlib.suppress(Exception), _on(device):
        for count in rows:
            _compiling_bench(setting).run(plans, count, layers=1, head=True)


@functools.cache
def _compiling_bench(setting: Setting) -> ChainBench:
    config, dtype, device, rows = setting
    return ChainBench(chain_model(config, dtype, device, layers=1), rows)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def chain_layers(config: ModelConfig, dtype: torch.dtype) -> int:
    """Layers of about `CHAIN_BYTES`; at least two, and otherwise no more than the model has."""
    return max(2, min(config.num_layers, math.ceil(CHAIN_BYTES / link_bytes(config, dtype))))


def chain_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, layers: int
) -> Chain:
    """A chain of this many layers with random weights. ValueError for layers that are not alike."""
    chain = new_chain(config, layers=layers, dtype=dtype, device=device)
    fill_random(chain.weights.named(), chain.weights.linears())
    return chain


def compile_processes(model: Chain) -> int:
    """Number of processes to compile in: one a core, as far as each has GPU memory for a layer and
    lm_head.
    """
    free, _ = torch.cuda.mem_get_info(model.weights.embedding.device)
    at_once = free // (model.weights.nbytes + (1 << 30))
    return max(1, min(_MAX_PROCESSES, os.cpu_count() or 1, at_once))
