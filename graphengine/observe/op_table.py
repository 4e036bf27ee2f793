"""The launches of a step as a table: what each is for, and what it reads of weights and of KV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from graphengine.kernels import Op


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """One launch.

    stage         names of the weights it reads, such as "layers.3.mlp.down_proj", and "KV 3" for
                  layer 3 of a cache; "" where it reads neither
    kernel        the kernel's name, as profilers show it
    grid          programs, by axis
    threads       threads that a program is launched with
    weight_bytes  bytes of these weights; an embedding's launch reads a row of it for each token
    pdl           whether it may overlap the launch before
    """

    stage: str
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    weight_bytes: int
    pdl: bool


def op_rows(
    ops: Iterable[Op], weights: Mapping[str, Tensor], caches: Sequence[Tensor]
) -> list[OpRow]:
    """A row for each launch.

    weights  by name; several may be views of one tensor, which is then known by its first name
    caches   KV caches, layers first
    """
    names: dict[int, str] = {}
    for name, weight in weights.items():
        names.setdefault(_storage(weight), name.removeprefix("model.").removesuffix(".weight"))
    layers = {_storage(cache): cache for cache in caches}
    return [_row(op, names, layers) for op in ops]


def _row(op: Op, names: Mapping[int, str], layers: Mapping[int, Tensor]) -> OpRow:
    stages: dict[str, int] = {}
    for _, tensor in op.tensors():
        storage = _storage(tensor)
        if (name := names.get(storage)) is not None:
            stages[name] = stages.get(name, 0) + tensor.nbytes
        elif (cache := layers.get(storage)) is not None:
            stages[f"KV {tensor.storage_offset() // cache.stride(0)}"] = 0
    # The weight that takes the longest to read comes first.
    ordered = sorted(stages, key=lambda name: -stages[name])
    return OpRow(
        stage=", ".join(ordered),
        kernel=op.name,
        grid=op.programs,
        threads=op.threads,
        weight_bytes=sum(stages.values()),
        pdl=op.pdl,
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
