"""Operands of products with packed experts, for tests of their kernels."""

from __future__ import annotations

from typing import Any

import torch

from graphengine.kernels.experts.grouping import Grouping, group_pairs_reference, most_blocks
from graphengine.kernels.experts.packed.weights import PackedExperts, fill_expert
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.quantised import QuantisedWeight
from graphengine.kernels.norm_rope.activation import ClampedSwiglu, Gating
from launches.quantised import random_quantised

NAN = float("nan")


def random_experts(
    name: str, E: int, M: int, K: int, *, swiglu: bool, idle: set[int], device: str
) -> PackedExperts:
    """Random experts [E, M, K]; `idle` ones hold NaN or 255."""
    drawn = (random_quantised(name, M, K, seed=e) for e in range(E))
    packed = [pack(to_device(weight, device), swiglu=swiglu) for weight in drawn]
    one = packed[0]

    def room(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.new_empty((E, *tensor.shape))

    experts = PackedExperts(
        one.format,
        (E, M, K),
        swiglu,
        one.codes.new_empty((E, *one.codes.shape)),
        room(one.scales),
        room(one.zeros),
        room(one.row_scales),
        room(one.factors),
    )
    for index, weight in enumerate(packed):
        fill_expert(experts, index, weight)
    for index in idle:
        for tensor in experts.expert(index).tensors:
            whole = tensor if tensor.dtype.is_floating_point else tensor.view(torch.uint8)
            whole.fill_(NAN if tensor.dtype.is_floating_point else 255)
    return experts


def to_device(weight: QuantisedWeight, device: str) -> QuantisedWeight:
    return QuantisedWeight(*(p.to(device) if isinstance(p, torch.Tensor) else p for p in weight))


CLAMPED = ClampedSwiglu(limit=1.5, slope=1.7)


class Case:
    """Operands of some lanes, the second padded; lanes choose among the first `used` experts, but
    those that are `routed`.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, *, lanes: int, hidden: int, ffn: int,
        used: int = 3, top_k: int = 2, E: int = 4, device: str = "cpu",
        routed: dict[int, list[int]] | None = None, gated: bool = True,
        gating: Gating = CLAMPED,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(lanes)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        chosen = torch.stack([torch.randperm(used, generator=random)[:top_k] for _ in range(lanes)])
        for lane, experts in (routed or {}).items():
            chosen[lane] = torch.tensor(experts)
        share = torch.rand(lanes, top_k, generator=random)
        slot = torch.arange(lanes)
        x = normal(lanes, hidden)
        if lanes > 1:
            slot[1], x[1], chosen[1], share[1] = -1, NAN, 2**31 - 1, NAN
        idle = set(range(E)) - set(chosen[slot >= 0].flatten().tolist())
        self.E, self.gated = E, gated
        rows = 2 * ffn if gated else ffn
        squares = (torch.rand(3, lanes, generator=random) + 0.5) * hidden / 3
        kept: dict[str, Any] = {"idle": idle, "device": device}
        self.gate_up = random_experts(name, E, rows, hidden, swiglu=gated, **kept)
        self.down = random_experts(name, E, hidden, ffn, swiglu=False, **kept)
        live = int(chosen[0, 0])
        sizes = [
            float(each.floats(live).square().mean() * each.shape[2]) ** 0.5
            for each in (self.gate_up, self.down)
        ]
        a = normal(lanes * top_k, ffn) / sizes[1]
        a.view(lanes, top_k, ffn)[slot < 0] = NAN

        def there(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
            return tensor.to(device, to)

        self.device = device
        self.slot, self.squares = there(slot, torch.int32), there(squares, torch.float32)
        self.routes = Routes(there(chosen, torch.int32), there(share, torch.float32))
        self.x, self.a = there(x / sizes[0], dtype), there(a, dtype)
        self.gate_up_bias = there(normal(E, rows), dtype)
        self.down_bias = there(normal(E, hidden), dtype)
        self.stream = there(normal(lanes, hidden), torch.float32)
        self.norm = there(normal(hidden), dtype)
        self.gating: Gating = gating if gated else "silu"

    @property
    def first(self) -> dict[str, Any]:
        """What is done with the first product."""
        return {"bias_EM": self.gate_up_bias, "gating": self.gating, "gated": self.gated}

    @property
    def first_reference(self) -> dict[str, Any]:
        activation = "swiglu" if self.gated else "squared_relu"
        return {
            "bias_EM": self.gate_up_bias, "gating": self.gating, "activation": activation
        }  # fmt: skip

    def grouping(self, size: int, held: range | None = None) -> Grouping | None:
        if not size:
            return None
        pairs, experts = self.routes.expert.numel(), self.E if held is None else len(held)
        blocks = most_blocks(pairs, experts + (held is not None), size)
        slot, expert = self.slot.cpu(), self.routes.expert.cpu()
        # Places that nobody may look at hold huge numbers.
        order, found = slot.new_full((pairs,), 2**30), slot.new_full((3, blocks), 2**30)
        grouping = Grouping(order, found, size)
        group_pairs_reference(expert, slot, experts=experts, held=held, out=grouping)
        return Grouping(order.to(self.slot.device), found.to(self.slot.device), size)

    def take(self, lane: int) -> Case:
        """A lane alone."""
        one = object.__new__(Case)
        one.__dict__.update(self.__dict__)
        one.slot, one.x, one.stream = (t[[lane]] for t in (self.slot, self.x, self.stream))
        one.a = self.a.view(len(self.slot), -1, self.a.shape[1])[lane]
        one.squares = self.squares[:, [lane]].contiguous()
        one.routes = Routes(*(each[[lane]] for each in self.routes))
        return one

    def live(self, of_pairs: torch.Tensor) -> torch.Tensor:
        return of_pairs.view(*self.routes.expert.shape, -1)[self.slot >= 0]


def slice_experts(experts: PackedExperts, held: range) -> PackedExperts:
    """Some of them, in memory of their own."""
    _, *shape = experts.shape
    tensors = (
        None if each is None else each[held.start : held.stop].clone() for each in (*experts[3:],)
    )
    return PackedExperts(experts.format, (len(held), *shape), experts.swiglu, *tensors)
