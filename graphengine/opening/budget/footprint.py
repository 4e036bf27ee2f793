"""The memory of an engine's steps, beyond what the engine holds, from the list of their launches.

The list is made before anything is allocated: the steps run once over tensors without memory, with
their launches recorded. An intermediate takes its bytes from its creation until its last reference
is gone, as in torch's allocator, so two intermediates that do not exist at the same time share
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MethodWrapperType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from graphengine.config import EngineConfig
from graphengine.drafters import Drafter
from graphengine.kernels.core.devices import assumed, device_of
from graphengine.kernels.core.launching import UNINITIALISED
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.models.adapters.table import AdapterSizes
from graphengine.models.contract import ModelConfig
from graphengine.models.repeats import Moved, repeats_told
from graphengine.models.splitting.stages import ALONE, Place
from graphengine.opening.budget.memory_plan import UNLIMITED, MemoryPlan, plan_memory
from graphengine.opening.budget.sketch import sketch_steps
from graphengine.opening.budget.torch_results import known_result
from graphengine.opening.budget.workspace import UNLISTED, Footprint
from graphengine.program.graph_key import GraphKey

# A product of the BLAS may take two nodes: one for parts of K, and one that adds them up.
_NODES_OF_TORCH = 2
_PRODUCTS = {"addmm", "bmm", "matmul", "mm", "linear", "_scaled_mm"}
# Most calls read a tensor's property, which arrives as a method wrapper, or make a view.
_QUESTIONS = ("__len__", "data_ptr", "dim", "is_contiguous", "numel", "stride", "storage_offset")
_VIEWS = ("as_strided", "t", "transpose", "unbind", "unsqueeze", "view")
_NO_NODES = frozenset(getattr(Tensor, name) for name in (*_QUESTIONS, *_VIEWS))


def plan_with_footprint(
    model: ModelConfig,
    config: EngineConfig,
    *,
    checkpoint_dtype: torch.dtype,
    drafter: Drafter,
    calibration_tokens: int = 0,
    adapters: AdapterSizes | None = None,
    place: Place = ALONE,
    footprint: Footprint | None = None,
) -> MemoryPlan:
    """`plan_memory` with the steps' traced footprint; on a CPU, with its estimates.

    `model` and `drafter` are those of the rank at `place`. The drafter must be allocated
    afterwards, as for `sketch_steps`.

    footprint  of the steps, from a plan that differs only in the number of blocks; None: it is
               traced
    """
    plan = partial(
        plan_memory,
        model,
        config,
        checkpoint_dtype=checkpoint_dtype,
        drafter=drafter,
        calibration_tokens=calibration_tokens,
        adapters=adapters,
    )
    device = torch.device(config.device)
    gpu = device_of(device)
    if device.type == "cpu" or gpu is None or footprint is not None:
        return plan(footprint=footprint)
    sizes = plan(footprint=UNLISTED, room=UNLIMITED)
    with assumed(gpu):
        steps = sketch_steps(model, sizes, config, drafter, place)
        return plan(footprint=trace_footprint(steps))


def trace_footprint(steps: Mapping[GraphKey, Callable[[], object]]) -> Footprint:
    """Trace the steps over tensors without memory. Call it inside `assumed`, where the steps must
    run.

    Among decode steps of one kind, only the largest is run, as it takes the most of everything. All
    prefill steps are run, as the way attention divides a chunk's keys among programs depends on the
    chunk's length. A graph of n steps has n times the nodes of a single step, and its steps reuse
    the same memory.
    """
    largest: dict[tuple[object, ...], GraphKey] = {}
    counts: dict[tuple[object, ...], int] = {}
    for key in steps:
        kind = (key.kind, key.variant, key.drafts, key.size if key.kind == "prefill" else 0)
        counts[kind] = counts.get(kind, 0) + key.steps
        if kind not in largest or _size(key) > _size(largest[kind]):
            largest[kind] = key
    watch = _Watch()
    with repeats_told(watch):
        found = {kind: watch.watched(steps[key]) for kind, key in largest.items()}
    return Footprint(
        workspace=max(each.workspace for each in found.values()),
        nodes=sum(each.nodes * counts[kind] for kind, each in found.items()),
        counters=max(each.counters for each in found.values()),
        products=any(each.products for each in found.values()),
    )


def _size(key: GraphKey) -> tuple[int, int]:
    return key.size, -key.steps


class _Call(NamedTuple):
    """A call's cost: the most bytes that it added to those in use, and its nodes."""

    most: int
    nodes: int


class _Watch(TorchFunctionMode):
    """Counts the nodes that a step would have, and the bytes of all tensors that exist at once.

    most      the most bytes so far
    counters  the most arrival counters of a launch so far
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.most, self.counters, self.products = 0, 0, 0, False
        self._living: dict[int, tuple[Any, int]] = {}
        self._total = 0
        # At the beginning of each current call: the most bytes so far, the bytes in use, the nodes.
        self._begun: list[tuple[int, int, int]] = []

    def watched(self, step: Callable[[], object]) -> Footprint:
        """The footprint of a step."""
        self.nodes, self.most, self.counters, self.products = 0, 0, 0, False
        self._living.clear()
        self._total = 0
        with ops_handed_to(self.launched), self:
            step()
        return Footprint(self.most, self.nodes, self.counters, self.products)

    def launched(self, op: Op) -> None:
        self.nodes += 1
        self.counters = max(self.counters, op.counters)

    def begin(self) -> None:
        """A call begins that others may repeat."""
        self._forget()
        self._begun.append((self.most, self._total, self.nodes))
        self.most = self._total

    def end(self) -> _Call:
        """The call's cost."""
        most, bytes_then, nodes = self._begun.pop()
        done = _Call(self.most - bytes_then, self.nodes - nodes)
        self.most = max(self.most, most)
        return done

    def repeat(self, done: _Call, moved: Callable[[], Moved]) -> None:
        """Count a call with the same cost, without running it."""
        self.nodes += done.nodes
        self._reach(done.most)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is MethodWrapperType or func in _NO_NODES:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        result = known_result(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        results = [*_stand_ins([result])] if type(result) in (Tensor, tuple, list) else []
        if results:
            given = {*map(_storage, _stand_ins([*args, *kwargs.values()]))}
            made = [each for each in results if _storage(each) not in given]
            for each in made:
                self._make(each)
            if func not in UNINITIALISED and (made or "out" in kwargs or _changes(func)):
                self.nodes += _NODES_OF_TORCH
                self.products |= func.__name__ in _PRODUCTS
        elif func is Tensor.__setitem__:
            self.nodes += _NODES_OF_TORCH
        return result

    def _make(self, tensor: Tensor) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        self._reach(nbytes)
        self._living[_storage(tensor)] = _reference(tensor), nbytes
        self._total += nbytes

    def _reach(self, nbytes: int) -> None:
        """Count bytes that exist for a while in addition to those in use."""
        if self._total + nbytes > self.most:
            self._forget()
            self.most = max(self.most, self._total + nbytes)

    def _forget(self) -> None:
        """Forget tensors that are gone."""
        living = self._living
        for key in [key for key, (reference, _) in living.items() if reference.expired()]:
            self._total -= living.pop(key)[1]


def _changes(func: Any) -> bool:
    """Whether a function of torch changes a tensor in place."""
    name: str = func.__name__
    return name.endswith("_") and not name.startswith("__")


def _stand_ins(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors without memory among these values, and in tuples and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == "meta":
                yield value
        elif isinstance(value, tuple | list):
            yield from _stand_ins(value)


def _storage(tensor: Tensor) -> int:
    identity: int = _reference(tensor).cdata
    return identity


def _reference(tensor: Tensor) -> Any:
    """A weak reference to a tensor's memory, which other tensors may have as well."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
