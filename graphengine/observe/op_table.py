"""The launches of a step as a table: the purpose of each, and the weights and KV that it reads.

The kernels that a GPU runs for the step, as a trace or a captured graph lists them, are matched
with the rows of the table by `align`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphengine.kernels.core.op import Op

KV = "KV"
"""The part of launches that attend: they read the KV of a layer."""

# This kernel reads a cache only to move entries in it; it does not attend.
_KV_MOVER = "_move_path_kernel"
# Parameters whose tensor is a table of embeddings, of which a launch reads a row for each token.
_LOOKUPS = ("embedding_ptr", "table_ptr", "embedding")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """One launch.

    stage         names of the weights it reads, such as "layers.3.mlp.down_proj", and "KV 3" for
                  layer 3 of a cache that it reads or writes; "" where there is neither
    part          the linear that it multiplies by, as plans name it, such as "down" or
                  "gate_up.e4m3-1x0"; "KV" if it attends; "" for other launches
    kernel        the kernel's name, as profilers show it
    grid          programs, by axis
    threads       threads that a program is launched with
    weight_bytes  bytes of the weights in `stage`; an embedding's launch reads a row of it for each
                  token
    part_bytes    bytes of the linear's weight, of all experts where it has some; 0 without a linear
    pdl           whether it may overlap the launch before
    reads         the kernel's arguments whose memory it may read, "*x" for memory whose address x
                  holds; `writes` are those that it may write
    """

    stage: str
    part: str
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    weight_bytes: int
    part_bytes: int
    pdl: bool
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


class Misaligned(RuntimeError):
    """The kernels that ran are not the launches that are recorded of the step."""


def row_maker(
    weights: Mapping[str, Tensor],
    caches: Sequence[Tensor],
    linears: Mapping[str, Iterable[Tensor]] = MappingProxyType({}),
) -> Callable[[Op], OpRow]:
    """Return a function that makes the row of a launch.

    weights  by name; several may be views of one tensor, which is then known by its first name
    caches   KV caches, layers first
    linears  the tensors of each linear, in all layers
    """
    names: dict[int, str] = {}
    for name, weight in weights.items():
        names.setdefault(_storage(weight), name.removeprefix("model.").removesuffix(".weight"))
    layers = {_storage(cache): cache for cache in caches}
    parts = {_storage(each): name for name, tensors in linears.items() for each in tensors}
    return lambda op: _row(op, names, layers, parts)


def align(
    kernels: Sequence[str], rows: Sequence[OpRow], known: Collection[str] = ()
) -> list[OpRow | None]:
    """The row of each of the kernels that ran for a step, which are given by name, in their order.

    It is None for kernels that torch launches between the step's own. A kernel is the step's own if
    a row or `known` has its name. Misaligned, with the first difference, unless these are the
    kernels of the rows, in the same order.
    """
    own = {row.kernel for row in rows}.union(known)
    ran, recorded = [name for name in kernels if name in own], [row.kernel for row in rows]
    for place, (one, other) in enumerate(zip_longest(ran, recorded)):
        if one != other:
            raise Misaligned(
                f"{len(ran)} kernels ran and {len(recorded)} launches are recorded: number {place} "
                f"is {one or 'none'} among the kernels, and {other or 'none'} among the launches"
            )
    remaining = iter(rows)
    return [next(remaining) if name in own else None for name in kernels]


def _row(
    op: Op, names: Mapping[int, str], layers: Mapping[int, Tensor], parts: Mapping[int, str]
) -> OpRow:
    stages: dict[str, int] = {}
    linears: dict[int, int] = {}
    accesses, attends = op.accesses, False
    for parameter, tensor in op.tensors():
        storage, read = _storage(tensor), parameter in accesses.reads
        if (cache := layers.get(storage)) is not None and (read or parameter in accesses.writes):
            stages[f"KV {tensor.storage_offset() // cache.stride(0)}"] = 0
            attends |= read and op.name != _KV_MOVER
        if not read:
            continue
        if (name := names.get(storage)) is not None:
            # Two parameters may have views of one weight, which is read once.
            stages[name] = max(stages.get(name, 0), tensor.nbytes)
        # lm_head may be the embedding, of which another launch looks up rows.
        looked_up = parameter.rpartition(".")[2] in _LOOKUPS
        if storage in parts and not looked_up:
            linears[storage] = max(linears.get(storage, 0), tensor.nbytes)
    # The weight that takes the longest to read comes first.
    ordered = sorted(stages, key=lambda name: -stages[name])
    return OpRow(
        stage=", ".join(ordered),
        part=", ".join([*dict.fromkeys(map(parts.__getitem__, linears)), *[KV] * attends]),
        kernel=op.name,
        grid=op.programs,
        threads=op.threads,
        weight_bytes=sum(stages.values()),
        part_bytes=sum(linears.values()),
        pdl=op.pdl,
        reads=_in_order(op, accesses.reads),
        writes=_in_order(op, accesses.writes),
    )


def _in_order(op: Op, accessed: Collection[str]) -> tuple[str, ...]:
    """Names of arguments as the kernel has them; addresses that it loads come last."""
    names = [name for name, _ in op.tensors() if name in accessed]
    return (*names, *sorted(name for name in accessed if name.startswith("*")))


def _storage(tensor: Tensor) -> int:
    """A number that identifies a tensor's memory, also on the meta device."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or int(StorageWeakRef(storage).cdata)  # type: ignore[no-untyped-call]
