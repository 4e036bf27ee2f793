"""What an engine's steps take besides what it holds, from the list of what they will launch.

The list is made before anything is allocated: the steps run once over tensors without memory, with
their launches recorded. An intermediate takes its bytes from where it is made to where it is let go
of, as torch's allocator sees it, so two that do not exist at the same time share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from graphengine.config import EngineConfig
from graphengine.drafters import Drafter
from graphengine.kernels.core.devices import assumed, device_of
from graphengine.kernels.core.launching import UNINITIALISED
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.models.contract import ModelConfig
from graphengine.opening.budget.memory import MemoryPlan, plan_memory
from graphengine.opening.budget.sketch import sketch_steps
from graphengine.opening.budget.workspace import Footprint
from graphengine.program.graph_key import GraphKey

# A product of the BLAS may take two: one for parts of K, and one that adds them up.
_NODES_OF_TORCH = 2
_PRODUCTS = {"addmm", "bmm", "matmul", "mm", "linear", "_scaled_mm"}


def plan_with_footprint(
    model: ModelConfig,
    config: EngineConfig,
    *,
    checkpoint_dtype: torch.dtype,
    drafter: Drafter,
    calibration_tokens: int = 0,
) -> MemoryPlan:
    """`plan_memory` with what the steps take; where there is not one GPU, with its estimates.

    The drafter must be allocated afterwards, as for `sketch_steps`.
    """
    plan = partial(
        plan_memory,
        model,
        config,
        checkpoint_dtype=checkpoint_dtype,
        drafter=drafter,
        calibration_tokens=calibration_tokens,
    )
    device = torch.device(config.device)
    gpu = device_of(device)
    if device.type == "cpu" or gpu is None or config.ranks > 1:
        return plan()
    sizes = plan(footprint=Footprint(0, 0, products=False))
    with assumed(gpu):
        steps = sketch_steps(model, sizes, config, drafter)
        return plan(footprint=trace_footprint(steps))


def trace_footprint(steps: Mapping[GraphKey, Callable[[], object]]) -> Footprint:
    """Run the largest step of each kind, over tensors without memory; none of its kind takes more.

    Inside `assumed`, like the steps.
    """
    largest: dict[tuple[object, ...], GraphKey] = {}
    counts: dict[tuple[object, ...], int] = {}
    for key in steps:
        kind = (key.kind, key.variant, key.drafts)
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in largest or key.size > largest[kind].size:
            largest[kind] = key
    found = {kind: _trace(steps[key]) for kind, key in largest.items()}
    return Footprint(
        workspace=max(each.workspace for each in found.values()),
        nodes=sum(each.nodes * counts[kind] for kind, each in found.items()),
        products=any(each.products for each in found.values()),
    )


def _trace(step: Callable[[], object]) -> Footprint:
    watch = _Watch()
    with ops_handed_to(watch.launched), watch:
        step()
    return Footprint(watch.most, watch.nodes, watch.products)


class _Watch(TorchFunctionMode):
    """Counts the nodes that a step would have, and the bytes of all tensors that exist at once.

    most  the most bytes so far
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.most, self.products = 0, 0, False
        self._living: dict[int, tuple[Any, int]] = {}

    def launched(self, op: Op) -> None:
        self.nodes += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Most calls ask for a shape, a stride or a dtype.
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
        living, nbytes = self._living, tensor.untyped_storage().nbytes()
        for key in [key for key, (reference, _) in living.items() if reference.expired()]:
            del living[key]
        living[_storage(tensor)] = _reference(tensor), nbytes
        self.most = max(self.most, sum(size for _, size in living.values()))


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
