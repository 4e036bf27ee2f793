"""Snapshots: a session in host memory or in a file. It has the tokens and the blocks of every
cache; with recurrent layers, also their states after the tokens that the blocks have.

A file is in safetensors format. It holds `token_ids`, int64 [n]; `cache_0`, [layers, blocks, 2,
block_size, G, D] of the target; `cache_1` of the drafter if it has one; `state_0`, ..., the newest
entries of each recurrent state; and `embeds`, [n, H], if n of the ids are -1, which stands for an
embedding. The metadata hold, as JSON under `session`, the values that must be equal in an engine
that continues the session, the places of grids and images among the embeddings, the adapter that
KV belongs to, and SHA-256 digests of all this. The digests find damage and mix-ups, not tampering:
they can be recomputed for a changed file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphengine.buckets import format_bytes
from graphengine.core.engine_core import EngineCore
from graphengine.models.checkpoints.tensor_files import save_whole
from graphengine.options.checks import is_int
from graphengine.prompt_embeds import (
    EMBEDDED,
    NO_EMBEDS,
    Embeds,
    EmbedsSpec,
    Grid,
    Place,
    embeds_of,
    placed_embeds,
)
from graphengine.requests.adapters import LoadedAdapter
from graphengine.requests.context import Context, StateCheckpoint
from graphengine.speculative import describe

# Schema 3 was the first with digests, and 4 is the first with ranks.
_SCHEMA = 4
# The home of an unknown user raises RuntimeError, and so does JSON that is nested too deep.
_UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Properties of a session's engine that an engine that continues the session must share.

    device       "cpu", or the GPU's name: another kind computes other bits
    dtype        dtype of the model, and of KV if it differs: fp8 and its scales
    model        fingerprint of the configuration and of samples of the weights
    caches       shape of a block of each cache, layers first
    speculative  the drafter, as in reports, but without the path of its own checkpoint; "off" also
                 for a drafter that keeps nothing of its own
    drafter      fingerprint of the drafter's configuration and weights, like the model's; "" if it
                 has none
    ranks        number of ranks that computed the session. Another number may continue it: results
                 then differ only in last bits, so `numerics_id` may differ, too
    """

    device: str
    dtype: str
    block_size: int
    model: str
    caches: tuple[tuple[int, ...], ...]
    speculative: str
    drafter: str
    numerics_id: str
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SessionSnapshot:
    """A session without an engine. It shares nothing with an engine; do not change its contents.

    token_ids  tokens of the conversation
    caches     for each cache [layers, blocks, ...]: the first blocks of the conversation, on the
               host; no blocks if the session was evicted
    states     entries of each recurrent state, of the tokens before `position`, oldest first
    position   number of tokens that the states were computed from, and that have KV; 0 without
               states
    embeds     [n, H] of the positions whose id is -1, on the host; None: there is none
    places     where grids, images and other embeddings lie; none if there is no grid or image
    adapter    name of the adapter that KV belongs to, and a fingerprint of its matrices; None: the
               base model alone
    digests    SHA-256 of "origin", "token_ids", "cache_0", ... when the snapshot was made; with
               states also of "position", "state_0", ..., with embeddings of "embeds", and of
               "places" and "adapter" where there are any
    """

    origin: Origin
    token_ids: tuple[int, ...]
    caches: tuple[Tensor, ...]
    digests: Mapping[str, str]
    states: tuple[Tensor, ...] = ()
    position: int = 0
    embeds: Tensor | None = None
    places: tuple[Place, ...] = ()
    adapter: tuple[str, str] | None = None

    def __repr__(self) -> str:
        size, model = format_bytes(self.nbytes), f"model={self.origin.model!r}"
        return f"<SessionSnapshot of {len(self.token_ids)} tokens, {size}, {model}>"

    @classmethod
    def make(
        cls,
        origin: Origin,
        token_ids: Sequence[int],
        caches: Sequence[Tensor],
        states: Sequence[Tensor] = (),
        position: int = 0,
        embeds: Embeds = NO_EMBEDS,
        adapter: tuple[str, str] | None = None,
    ) -> Self:
        """A snapshot with the digests of its parts."""
        made = cls(
            origin=origin,
            token_ids=tuple(token_ids),
            caches=tuple(caches),
            states=tuple(states),
            position=position,
            embeds=embeds.rows() if embeds else None,
            places=embeds.places(),
            adapter=adapter,
            digests={},
        )
        return replace(made, digests=dict(_digests(made)))

    @property
    def blocks(self) -> int:
        """KV blocks that a session restored from it takes."""
        return int(self.caches[0].shape[1])

    @property
    def nbytes(self) -> int:
        embeds = () if self.embeds is None else (self.embeds,)
        return sum(part.nbytes for part in (*self.caches, *self.states, *embeds))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, which appears whole or not at all; OSError if not.

        ValueError for an invalid path.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"path={path!r} must be that of a file")
        tensors = {f"cache_{index}": cache for index, cache in enumerate(self.caches)}
        tensors |= {f"state_{index}": state for index, state in enumerate(self.states)}
        if self.embeds is not None:
            tensors["embeds"] = self.embeds
        tensors["token_ids"] = torch.tensor(self.token_ids, dtype=torch.int64)
        kept: dict[str, object] = {"position": self.position} if self.states else {}
        if self.places:
            kept["places"] = self.places
        if self.adapter is not None:
            kept["adapter"] = self.adapter
        about = json.dumps(
            {"schema": _SCHEMA, **asdict(self.origin), **kept, "digests": dict(self.digests)}
        )
        try:
            file = Path(path).expanduser()
            if file.is_dir():
                raise OSError("it is a folder")
            if not file.parent.is_dir():
                raise OSError(f"there is no folder {str(file.parent)!r}")
            save_whole(tensors, file, {"session": about})
        # A path without a name, or with a null byte, is a ValueError.
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise OSError(f"the session cannot be written to {path!r}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; ValueError, with the path, for anything else.

        Nothing refers to the file afterwards. The digests are only read here; `check` compares
        them.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"{path!r} is no path of a snapshot")
        path = Path(path)
        try:
            with safe_open(path.expanduser(), "pt") as file:
                about = json.loads((file.metadata() or {})["session"])
                # The tensors read are views of the mapped file, which others may change or
                # truncate.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            places, adapter = _places_in(about), _adapter_in(about)
            origin, digests, position = _origin_in(about)
            caches = tuple(tensors[f"cache_{index}"] for index in range(len(origin.caches)))
            for index, (cache, shape) in enumerate(zip(caches, origin.caches, strict=True)):
                if cache.dim() < 2 or (cache.shape[0], *cache.shape[2:]) != shape:
                    raise ValueError(
                        f"cache {index} is {tuple(cache.shape)}, of blocks of shape {shape}"
                    )
            token_ids = tuple(tensors["token_ids"].tolist())
            count = sum(name.startswith("state_") for name in tensors)
            states = tuple(tensors[f"state_{index}"] for index in range(count))
        except _UNREADABLE as error:
            raise ValueError(f"{path} is no snapshot of a session: {error!r}") from error
        return cls(
            origin=origin,
            token_ids=token_ids,
            caches=caches,
            states=states,
            position=position,
            embeds=tensors.get("embeds"),
            places=places,
            adapter=adapter,
            digests=digests,
        )

    def check(self, core: EngineCore) -> None:
        """ValueError, with both values, unless the KV is what `engine` would have computed.

        It compares the session's origin with the engine, and checks with the digests that token
        ids, KV and origin are as they were when the snapshot was made. This reads them once, at
        about a second per GB.
        """
        ours, ids = origin_of(core), self.token_ids
        for name, kind in (("origin", Origin), ("digests", Mapping)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"the session's {name}={getattr(self, name)!r} must be of type {kind.__name__}"
                )
        apart = {"ranks", *(["numerics_id"] if ours.ranks != self.origin.ranks else [])}
        for name in (field.name for field in fields(Origin) if field.name not in apart):
            wanted, found = getattr(ours, name), getattr(self.origin, name)
            if wanted != found:
                raise ValueError(f"the session is of {name}={found!r}, the engine of {wanted!r}")
        if not isinstance(ids, tuple | list):
            raise ValueError(f"the session's token_ids={ids!r} must be a tuple of token ids")
        if not isinstance(self.caches, tuple | list) or len(self.caches) != len(ours.caches):
            found = len(self.caches) if isinstance(self.caches, tuple | list) else self.caches
            raise ValueError(f"the session has {found!r} caches, the engine {len(ours.caches)}")
        self._check_embeds(core)
        self._check_adapter(core)
        self._check_states(core)
        most, blocks = core.scheduler.home(Context()).reuse.whole_blocks(len(ids)), None
        if core.runtime.state_shapes:
            most = -(-self.position // core.memory.block_size)
            blocks = most or None
        for index, (cache, shape) in enumerate(zip(self.caches, ours.caches, strict=True)):
            if not isinstance(cache, Tensor):
                raise ValueError(f"cache {index} of the session must be a tensor, not {cache!r}")
            if cache.layout != torch.strided or cache.device.type != "cpu" or cache.requires_grad:
                raise ValueError(
                    f"cache {index} of the session must be a dense tensor on the CPU without a "
                    f"gradient, not {cache.layout} on {cache.device}, "
                    f"requires_grad={cache.requires_grad}"
                )
            if blocks is None and cache.dim() > 1:
                blocks = cache.shape[1]
            expected = (shape[0], blocks, *shape[1:])
            fits = tuple(cache.shape) == expected and cache.dtype == core.memory.kv_dtype
            if not fits or blocks is None or blocks > most:
                raise ValueError(
                    f"cache {index} of the session is {cache.dtype} {tuple(cache.shape)}: it must "
                    f"be {core.memory.kv_dtype} {expected}, of {most} blocks at most"
                )
        self._check_digests()

    def _check_embeds(self, core: EngineCore) -> None:
        """ValueError, with both values, unless the engine takes embeddings like these."""
        found, spec = self.embeds, core.intake.embeds
        if found is None:
            return
        if not isinstance(found, Tensor) or found.device.type != "cpu":
            raise ValueError(f"the session's embeds={found!r:.99} must be a tensor on the CPU")
        if spec is None:
            raise ValueError(
                f"the session has embeds of shape {list(found.shape)}: the engine must be opened "
                f"with prompt_embeds=True"
            )
        wanted = (self.token_ids.count(EMBEDDED), spec.width)
        if tuple(found.shape) != wanted or found.dtype != spec.dtype:
            raise ValueError(
                f"the session's embeds are {found.dtype} {list(found.shape)}: they must be "
                f"{spec.dtype} {list(wanted)}"
            )

    def embeddings(self, spec: EmbedsSpec | None) -> Embeds:
        """The embeddings at their places. ValueError for places that the engine does not take."""
        if self.embeds is None or spec is None:
            return NO_EMBEDS
        if not self.places:
            return embeds_of(self.token_ids, self.embeds)
        for place in self.places:
            if place.grid is not None and not spec.grids:
                raise ValueError(
                    f"the session has a grid of embeddings, {place.grid}: this engine takes none"
                )
            most = 0 if spec.images is None else spec.images.tokens(place.start)
            if place.image and place.length > most:
                raise ValueError(
                    f"the session has an image of {place.length} embeddings at position "
                    f"{place.start}: this engine takes at most {most} of one there"
                )
        return placed_embeds(self.places, self.token_ids, self.embeds)

    def _check_adapter(self, core: EngineCore) -> None:
        """ValueError, with both fingerprints, unless the engine has the session's adapter."""
        if self.adapter is None:
            return
        name, wanted = self.adapter
        loaded = core.intake.adapters.find(name)
        if loaded is None or loaded.fingerprint != wanted:
            found = None if loaded is None else loaded.fingerprint
            raise ValueError(
                f"the session's KV belongs to an adapter {name!r} with fingerprint {wanted}, the "
                f"engine's has {found}"
            )

    def _check_states(self, core: EngineCore) -> None:
        """ValueError, with both values, unless the states are like those that the engine keeps.

        They do not depend on the engine's number of drafts: entries are placed anew, by position.
        """
        wanted, dtypes, found = core.runtime.state_shapes, core.runtime.state_dtypes, self.states
        if not isinstance(found, tuple | list) or not is_int(self.position):
            raise ValueError(f"the session's states={found!r:.99} at position={self.position!r}")
        if not found and not self.position:
            return
        if not wanted:
            raise ValueError(
                f"the session has {len(found)} states of recurrent layers: the engine keeps none "
                f"(session_states={core.config.session_states})"
            )
        fits = all(isinstance(part, Tensor) and part.device.type == "cpu" for part in found)
        shapes = tuple(tuple(part.shape) for part in found) if fits else ()
        if shapes != wanted or tuple(part.dtype for part in found) != dtypes:
            raise ValueError(
                f"the session's states are {shapes or found!r:.99}, those of the engine "
                f"{wanted} of {dtypes}"
            )
        most = len(self.token_ids) - core.needs.tokens_after
        if not 1 <= self.position <= most:
            raise ValueError(
                f"position={self.position} of the session's states must be in [1, {most}], of "
                f"{len(self.token_ids)} tokens"
            )

    def _check_digests(self) -> None:
        """ValueError, naming the part, if a part has changed since the snapshot was made."""
        for name, found in _digests(self):
            made = self.digests.get(name)
            if made != found:
                raise ValueError(
                    f"{name} of the session is not what was kept: its SHA-256 is {found}, "
                    f"that of what was kept {made}"
                )


def _digests(session: SessionSnapshot) -> Iterator[tuple[str, str]]:
    """The SHA-256 of each part of a snapshot; a tensor's includes its dtype and shape."""
    texts = {
        "origin": json.dumps(asdict(session.origin), sort_keys=True),
        "token_ids": ",".join(map(str, session.token_ids)),
    }
    if session.states:
        texts["position"] = str(session.position)
    if session.places:
        texts["places"] = json.dumps(session.places)
    if session.adapter is not None:
        texts["adapter"] = json.dumps(session.adapter)
    for name, text in texts.items():
        yield name, hashlib.sha256(text.encode()).hexdigest()
    if session.embeds is not None:
        yield "embeds", _digest(session.embeds)
    for kind, parts in (("cache", session.caches), ("state", session.states)):
        for index, part in enumerate(parts):
            yield f"{kind}_{index}", _digest(part)


def _digest(part: Tensor) -> str:
    digest = hashlib.sha256(f"{part.dtype} {tuple(part.shape)} ".encode())
    digest.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _places_in(about: object) -> tuple[Place, ...]:
    """The places in a file's metadata; an error of reading (`_UNREADABLE`) for anything else."""
    given = about.get("places", ()) if isinstance(about, dict) else ()
    found = []
    for start, length, grid, image in given:
        if not (is_int(start) and is_int(length) and length > 0 and isinstance(image, bool)):
            raise ValueError(f"places={given!r:.99} in its metadata have a wrong type")
        found.append(Place(start, length, None if grid is None else Grid(*grid), image))
    return tuple(found)


def _adapter_in(about: object) -> tuple[str, str] | None:
    """The adapter in a file's metadata; ValueError, with the value, for anything else."""
    given = about.get("adapter") if isinstance(about, dict) else None
    if given is None:
        return None
    if not isinstance(given, list) or [type(each) for each in given] != [str, str]:
        raise ValueError(f"adapter={given!r:.99} in its metadata must be a name and a fingerprint")
    return given[0], given[1]


def _origin_in(about: object) -> tuple[Origin, dict[str, str], int]:
    """Origin, digests and the position of the states from a file's metadata; ValueError, with the
    value, for anything else.
    """
    if not isinstance(about, dict):
        raise ValueError(f"session={about!r:.99} in its metadata must be an object")
    about = dict(about)
    schema, shapes = about.pop("schema", None), about.pop("caches", None)
    if not is_int(schema) or schema != _SCHEMA:
        raise ValueError(
            f"it has schema {schema!r:.99}, not {_SCHEMA}: this version reads no other, and those "
            f"before 3 have no digests of what they hold"
        )
    for name in ("places", "adapter"):
        about.pop(name, None)
    position = about.pop("position", 0)
    if not is_int(position) or position < 0:
        raise ValueError(f"position={position!r:.99} in its metadata must be an integer from 0 up")
    digests = about.pop("digests", None)
    if not isinstance(digests, dict) or not all(
        isinstance(value, str) for value in digests.values()
    ):
        raise ValueError(f"digests={digests!r:.99} in its metadata must be an object of strings")
    if not isinstance(shapes, list) or not shapes:
        raise ValueError(f"caches={shapes!r:.99} in its metadata must be a list of shapes")
    for shape in shapes:
        if not isinstance(shape, list) or not shape or not all(map(is_int, shape)):
            raise ValueError(f"caches={shapes!r:.99} in its metadata must be lists of integers")
    origin = Origin(caches=tuple(map(tuple, shapes)), **about)
    for name, value in asdict(origin).items():
        right = {
            "block_size": is_int(value),
            "ranks": is_int(value),
            "caches": True,
        }.get(name, isinstance(value, str))
        if not right:
            raise ValueError(f"{name}={value!r:.99} in its metadata has the wrong type")
    return origin, digests, position


def origin_of(core: EngineCore) -> Origin:
    """The origin of this engine's sessions. Reads samples of all weights: milliseconds on a GPU."""
    device = core.memory.device
    on_gpu = device.type == "cuda"
    model, drafter = core.runtime.fingerprints()
    mode = core.config.mode if core.needs.states else None
    return Origin(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        dtype=_dtypes(core),
        block_size=core.memory.block_size,
        model=model,
        caches=core.runtime.block_shapes,
        speculative=describe(None) if mode is None else mode.describe_state(),
        drafter=drafter,
        numerics_id=core.runtime.numerics_id,
        ranks=core.config.ranks,
    )


def _dtypes(core: EngineCore) -> str:
    """The dtypes of the model and, if it differs, of KV, which includes its scales."""
    dtypes = core.memory.describe_dtypes()
    if core.memory.kv_dtype == core.memory.dtype:
        return dtypes
    return f"{dtypes} of scales {core.runtime.scales_id()}"


def copy_out(
    core: EngineCore,
    token_ids: Sequence[int],
    embeds: Embeds,
    blocks: Sequence[int],
    state: StateCheckpoint | None,
    adapter: LoadedAdapter | None,
) -> SessionSnapshot:
    """Copy a session to the host, after everything that was launched: tokens and embeddings, with
    its blocks or, if it has one, its state checkpoint and the state's blocks.
    """
    origin, runtime = origin_of(core), core.runtime
    of_adapter = None if adapter is None else (adapter.name, adapter.fingerprint)
    if state is None:
        caches = runtime.read_blocks(blocks)
        return SessionSnapshot.make(origin, token_ids, caches, embeds=embeds, adapter=of_adapter)
    runtime.copy_states(core.scheduler.home(Context()).reuse.states.before)
    parts = runtime.read_states(state.place)
    caches = runtime.read_blocks(state.blocks)
    made = (origin, token_ids, caches, parts, state.position, embeds, of_adapter)
    return SessionSnapshot.make(*made)
