"""Rules that the launches of every step obey, checked on the list of what a step would launch.

memory   a launch reads nothing that the step has made and nobody has written; nothing is
         written twice without a reader between, so no two results share memory by mistake
PDL      what a launch reads before it waits, no launch writes that may still run: the launch
         before, and if that starts it early, the one before that as well, and so on. It writes
         nothing before it waits, except for one kernel, which no launch may start early. In a
         decode graph every kernel can wait
padding  in a decode graph every launch reads the slots of its lanes, or a list made from them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphengine import EngineConfig
from graphengine.kernels.core.launching import UNINITIALISED
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.kernels.core.pdl import EARLY
from graphengine.models.contract import ModelConfig
from graphengine.opening.adapters import adapter_sizes
from graphengine.opening.budget.memory_plan import MemoryPlan, plan_memory
from graphengine.opening.budget.sketch import sketch_steps
from graphengine.opening.loading import read_checkpoint
from graphengine.profiles.benchmark.engines import random_drafter, rounded_model
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.program.graph_key import GraphKey

# The only kernel that stores before it waits; `kernels/core/pdl.py` has the reason.
STORES_EARLY = "_take_sums_kernel"
# What the next norm needs of a stream: each launch that adds to the stream writes it anew.
_OF_STREAM = ("scaled", "squares")
# Functions that make views, and read nothing.
_VIEWS = {"view", "__getitem__", "__get__", "unsqueeze", "expand", "reshape", "flatten", "t"}


def planned(subject: Subject, options: Mapping[str, Any]) -> tuple[ModelConfig, Any, MemoryPlan]:
    """The model, the drafter and the plan of an engine on the CPU that is not opened."""
    config = EngineConfig(**options)
    if subject.checkpoint is not None:
        found = read_checkpoint(subject.checkpoint, config)
        model, drafter = found.model, found.drafter
    else:
        model, drafter = rounded_model(subject.model, config), random_drafter(subject, config)
    plan = plan_memory(
        model,
        config,
        checkpoint_dtype=torch.bfloat16,
        drafter=drafter,
        adapters=adapter_sizes(config, model),
    )
    return model, drafter, plan


def steps_of(
    subject: Subject, options: Mapping[str, Any]
) -> Mapping[GraphKey, Callable[[], object]]:
    """The steps of such an engine, of tensors without memory; call it inside `assumed`."""
    model, drafter, plan = planned(subject, options)
    return sketch_steps(model, plan, EngineConfig(**options), drafter)


@dataclass
class TorchCall:
    """A function of torch, what it got and what it returned."""

    name: str
    given: list[Tensor]
    result: Tensor

    @property
    def makes(self) -> bool:
        """Whether the result has memory of its own."""
        return _storage(self.result) not in map(_storage, self.given)


class _Calls(TorchFunctionMode):
    def __init__(self, take: Callable[[TorchCall], object]) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.device.type == "meta":
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            name = "empty" if func in UNINITIALISED else func.__name__
            self._take(TorchCall(name, given, result))
        return result


def record(step: Callable[[], object]) -> list[Op | TorchCall]:
    """The launches of a step, and the calls of torch between them."""
    found: list[Op | TorchCall] = []
    with ops_handed_to(found.append), _Calls(found.append):
        step()
    return found


@dataclass
class Checked:
    """The state of a walk over a step's launches.

    made      memory that the step has made; `written` is that which something has written
    unread    what no launch has read since it was written: the view, who wrote it, and for which
              lanes
    latest    what the launch before wrote, and those that may still run beside it
    early     whether the launch before starts this one before it waits
    with_slots  memory that was written by launches that read the slots of lanes
    """

    made: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    unread: dict[Any, tuple[str, Any]] = field(default_factory=dict)
    latest: list[Tensor] = field(default_factory=list)
    early: bool = False
    with_slots: set[int] = field(default_factory=set)


def faults(step: list[Op | TorchCall], *, decode: bool) -> Iterator[str]:
    """Breaches of the rules, in sentences. A decode graph consists of kernels alone."""
    state = Checked()
    for each in step:
        if isinstance(each, TorchCall):
            yield from _call_faults(each, state, decode)
        else:
            yield from _op_faults(each, state, decode)


def _call_faults(call: TorchCall, state: Checked, decode: bool) -> Iterator[str]:
    if call.name == "empty":
        state.made.add(_storage(call.result))
        return
    if call.name not in _VIEWS:
        _forget(state, {_storage(each) for each in call.given})
        state.written.add(_storage(call.result))
        if decode and (call.makes or call.name.endswith("_")):
            yield f"torch computes {call.name} in a decode graph"


def _op_faults(op: Op, state: Checked, decode: bool) -> Iterator[str]:
    reads, writes, early_reads, early_writes = op.accesses
    tensors = dict(op.tensors())
    for name in reads & tensors.keys():
        storage = _storage(tensors[name])
        # What it writes itself its programs pass to each other.
        if storage in state.made - state.written and name not in writes:
            yield f"{op.name} reads {name}, which nothing has written"
    if op.pdl:
        for name in early_reads & tensors.keys():
            if any(_overlap(tensors[name], each) for each in state.latest):
                yield f"{op.name} reads {name} early, which a launch writes that may still run"
        if early_writes and op.name != STORES_EARLY:
            yield f"{op.name} writes {', '.join(sorted(early_writes))} before it waits"
        elif early_writes and state.early:
            yield f"{op.name} writes before it waits, and what is older may still be read"
    if decode and "PDL" not in op.arguments:
        yield f"{op.name} does not wait for the launch before"
    _forget(state, {_storage(tensors[name]) for name in reads & tensors.keys()})
    slots = {name for name in reads & tensors.keys() if "slot" in name}
    lanes = {_view(tensors[name]) for name in slots}
    for name in writes & tensors.keys():
        stream, _, part = name.rpartition(".")
        if part in _OF_STREAM and f"{stream}.x" in reads:
            continue
        view = _view(tensors[name])
        before, of_lanes = state.unread.get(view, ("", lanes))
        # Each of two kinds of lanes has slots of its own, and its own rows.
        if before and of_lanes == lanes and view[0] in state.made:
            yield f"{op.name} writes {name}, which nothing has read since {before}"
    lists = {name for name in reads & tensors.keys() if _storage(tensors[name]) in state.with_slots}
    if decode and not slots and not lists:
        yield f"{op.name} does not know which lanes are padded"
    written = [tensors[name] for name in writes & tensors.keys()]
    state.early = _starts_early(op)
    state.latest = written + (state.latest if state.early else [])
    for tensor in written:
        state.unread[_view(tensor)] = op.name, lanes
        state.written.add(_storage(tensor))
        if slots and tensor.dtype == torch.int32:
            state.with_slots.add(_storage(tensor))


def _starts_early(op: Op) -> bool:
    """Whether a launch starts the next one before it waits."""
    return op.name == STORES_EARLY or op.arguments.get("PDL") == EARLY


def _forget(state: Checked, storages: set[int]) -> None:
    for view in [each for each in state.unread if each[0] in storages]:
        del state.unread[view]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views may have bytes in common; columns of one matrix are told apart."""
    if _storage(one) != _storage(other):
        return False
    if one.dtype != other.dtype:
        return True
    (start, stop), (begin, end) = map(_extent, (one, other))
    if stop <= begin or end <= start:
        return False
    if one.dim() == other.dim() == 2 and one.stride() == other.stride() and one.stride(1) == 1:
        first, second = start % one.stride(0), begin % one.stride(0)
        return first < second + other.shape[1] and second < first + one.shape[1]
    return True


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first element of its memory that a view has, and the end."""
    start = tensor.storage_offset()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + sum((size - 1) * stride for size, stride in sizes) + 1
