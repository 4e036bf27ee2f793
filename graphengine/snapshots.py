"""A session in host memory, or in a file: its tokens, and the blocks of every cache.

A file is safetensors: `token_ids`, int64 [n]; `cache_0`, [layers, blocks, 2, block_size, G, D] of
the target, and `cache_1` of the drafter where it has one; and in the metadata, as JSON under
`session`, what must be equal in the engine that goes on with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphengine.speculative import describe

if TYPE_CHECKING:
    from graphengine.engine import Engine
    from graphengine.models.dense import DenseModel

_SCHEMA = 1
_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What the engine of a session must have in common with one that goes on with it.

    device       "cpu", or the GPU's name: another kind computes other bits
    model        fingerprint of the configuration and of samples of the weights
    caches       of each cache the shape of a block, layers first
    speculative  who drafts, as reports say it: the drafter's cache is its own
    """

    device: str
    dtype: str
    block_size: int
    model: str
    caches: tuple[tuple[int, ...], ...]
    speculative: str
    numerics_id: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SessionSnapshot:
    """A session without an engine; what it holds is its own, and not to be changed.

    token_ids  of the conversation
    caches     of each cache [layers, blocks, ...]: the first blocks of the conversation, on the
               host; no blocks of a session that was evicted
    """

    origin: Origin
    token_ids: tuple[int, ...]
    caches: tuple[Tensor, ...]

    @property
    def blocks(self) -> int:
        """KV blocks that a session made of it takes."""
        return int(self.caches[0].shape[1])

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, which appears whole or not at all; OSError if not."""
        path = Path(path).expanduser()
        tensors = {f"cache_{index}": cache for index, cache in enumerate(self.caches)}
        tensors["token_ids"] = torch.tensor(self.token_ids, dtype=torch.int64)
        about = json.dumps({"schema": _SCHEMA, **asdict(self.origin)})
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            save_file(tensors, unfinished, {"session": about})
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise OSError(f"the session cannot be written to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; ValueError, with the path, for anything else."""
        path = Path(path).expanduser()
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})["session"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            schema = about.pop("schema")
            if schema != _SCHEMA:
                raise ValueError(f"it has schema {schema}, not {_SCHEMA}")
            shapes = tuple(map(tuple, about.pop("caches")))
            origin = Origin(caches=shapes, **about)
            caches = tuple(tensors[f"cache_{index}"] for index in range(len(shapes)))
            token_ids = tuple(tensors["token_ids"].tolist())
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no snapshot of a session: {error!r}") from error
        return cls(origin=origin, token_ids=token_ids, caches=caches)

    def check(self, engine: Engine) -> None:
        """ValueError, with both values, unless the KV is what `engine` would have computed."""
        ours = origin_of(engine)
        for name in (field.name for field in fields(Origin)):
            wanted, found = getattr(ours, name), getattr(self.origin, name)
            if wanted != found:
                raise ValueError(f"the session is of {name}={found!r}, the engine of {wanted!r}")
        most = len(self.token_ids) // ours.block_size
        for index, (cache, shape) in enumerate(zip(self.caches, ours.caches, strict=True)):
            expected = (shape[0], self.blocks, *shape[1:])
            fits = tuple(cache.shape) == expected and cache.dtype == engine.memory.dtype
            if not fits or self.blocks > most:
                raise ValueError(
                    f"cache {index} of the session is {cache.dtype} {tuple(cache.shape)}: it must "
                    f"be {engine.memory.dtype} {expected}, of {most} blocks at most"
                )


def origin_of(engine: Engine) -> Origin:
    """Of a session of this engine. It reads samples of all weights: milliseconds on a GPU."""
    device = engine.memory.device
    on_gpu = device.type == "cuda"
    return Origin(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        dtype=str(engine.memory.dtype).removeprefix("torch."),
        block_size=engine.memory.block_size,
        model=_fingerprint(engine.model),
        caches=tuple((cache.shape[0], *cache.shape[2:]) for cache, _ in engine._caches),
        speculative=describe(engine.config.mode),
        numerics_id=engine.numerics_id,
    )


def copy_out(engine: Engine, token_ids: Sequence[int], blocks: Sequence[int]) -> SessionSnapshot:
    """A session's tokens and blocks, copied to the host behind all that was launched."""
    with engine._on_stream():
        index = torch.tensor(blocks, dtype=torch.int64, device=engine.memory.device)
        # A layer at a time, as what is gathered lies on the device beside the budget.
        caches = tuple(
            torch.stack([layer.index_select(0, index).cpu() for layer in cache])
            for cache, _ in engine._caches
        )
    return SessionSnapshot(origin=origin_of(engine), token_ids=tuple(token_ids), caches=caches)


def copy_in(engine: Engine, snapshot: SessionSnapshot, blocks: Sequence[int]) -> None:
    """A snapshot's KV into these blocks, behind all that was launched."""
    device = engine.memory.device
    with engine._on_stream():
        index = torch.tensor(blocks, dtype=torch.int64, device=device)
        for (cache, _), kept in zip(engine._caches, snapshot.caches, strict=True):
            for layer, part in zip(cache, kept, strict=True):
                layer.index_copy_(0, index, part.to(device))


def _fingerprint(model: DenseModel) -> str:
    """16 hexadecimal digits of the configuration and of up to 1,024 elements of each weight."""
    digest = hashlib.sha256(repr(model.config).encode())
    samples: list[Any] = []
    for name, tensor in sorted(model.weights.named(model.config).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.flatten()
        samples.append(flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
