"""Ranks that `torchrun` has started: the same program, once for each of them.

The process of rank 0 is the driver. The others never return from `from_pretrained`: they follow the
driver until it closes the engine, and end. They read from torchrun's store where the driver's
folder is and how many blocks it has. Each makes the rest of its plan from the same checkpoint and
options, as the driver does, and compares it with the driver's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.rendezvous import rendezvous

from graphengine.config import EngineConfig
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.inventory import LinkShape
from graphengine.opening.loading import plan_checkpoint, read_checkpoint
from graphengine.parallel.link import LinkMemory
from graphengine.parallel.process_handles import ForeignRank
from graphengine.parallel.worker import RankStart, run_rank

_STARTED = "TORCHELASTIC_RUN_ID"
# Long, as programs may do other things first.
_LIMIT = timedelta(seconds=600)
_LINK, _RENDEZVOUS = "link", "rendezvous"


def launched_share(config: EngineConfig) -> Share | None:
    """This process's share among the ranks that torchrun has started; None without torchrun.

    ValueError where they are not as many ranks as `config` has, or not all on one host.
    """
    if _STARTED not in os.environ:
        return None
    rank, ranks, here = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    if ranks != config.ranks:
        raise ValueError(f"{config.ranks_option}, but torchrun has started {ranks} processes")
    if here != ranks:
        raise ValueError(
            f"{config.ranks_option} takes ranks of one host: torchrun has started {here} here"
        )
    return Share(rank, ranks)


def processes_of_torchrun() -> int | None:
    """How many processes torchrun has started, including this one; None without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if _STARTED in os.environ else None


def lead(
    folder: Path, checkpoint: Checkpoint, memory: MemoryPlan, ranks: int
) -> tuple[LinkMemory, list[ForeignRank]]:
    """The driver's part: call the other ranks to `folder`, and wait until they have answered.

    ValueError for a second engine: the other ranks have ended with the first one.
    """
    store = _store(Share(0, ranks))
    if store.check(["call"]):
        raise ValueError(
            f"torchrun's other processes ({ranks - 1}) have ended with the first engine of this "
            f"program, which can have no second one"
        )
    shape = LinkShape.of_loads(ranks - 1, memory.load_bytes)
    link = LinkMemory.of_file(folder / _LINK, shape)
    call = {
        "driver": os.getpid(),
        "digest": checkpoint.digest,
        "folder": os.fspath(folder),
        "kv_blocks": memory.kv_blocks,
        "swap_blocks": memory.swap_blocks,
        "load_bytes": memory.load_bytes,
        "plan": _described(memory),
    }
    store.set("call", json.dumps(call))
    pids = [int(store.get(f"process/{rank}")) for rank in range(1, ranks)]
    return link, [ForeignRank(pid) for pid in pids]


def follow(
    path: str | Path, config: EngineConfig, share: Share, devices: Sequence[str]
) -> NoReturn:
    """Run another rank, from the driver's call until the driver closes the engine.

    ValueError where this rank's plan differs from the driver's.
    """
    store = _store(share)
    call = json.loads(store.get("call"))
    try:
        start = _start(path, config, share, devices[share.rank], call)
    except BaseException:
        # Torchrun ends the driver, too, before the driver can remove its folder.
        shutil.rmtree(call["folder"], ignore_errors=True)
        raise
    store.set(f"process/{share.rank}", str(os.getpid()))
    # The process ends inside `run_rank`, and buffered output would be lost.
    sys.stdout.flush()
    sys.stderr.flush()
    run_rank(start)


def _start(
    path: str | Path, config: EngineConfig, share: Share, device: str, call: dict[str, Any]
) -> RankStart:
    """This rank's `RankStart`. ValueError where its plan differs from the driver's."""
    config = replace(
        config,
        device=device,
        kv_blocks=call["kv_blocks"],
        swap_blocks=call["swap_blocks"],
    )
    contents = read_checkpoint(path, config, share)
    memory = replace(plan_checkpoint(contents, config), load_bytes=call["load_bytes"])
    _check_plan(_described(memory), call["plan"], share)
    folder = Path(call["folder"])
    shape = LinkShape.of_loads(share.ranks - 1, memory.load_bytes)
    return RankStart(
        share=share,
        path=os.fspath(contents.checkpoint.path),
        digest=call["digest"],
        config=config,
        memory=memory,
        link=LinkMemory.of_file(folder / _LINK, shape),
        rendezvous=os.fspath(folder / _RENDEZVOUS),
        driver=call["driver"],
        threads=torch.get_num_threads(),
        spawned=False,
    )


def _store(share: Share) -> Any:
    """Torchrun's store, with a prefix of graphengine's own for each restart of the ranks."""
    store, _, _ = next(iter(rendezvous("env://", share.rank, share.ranks)))
    store.set_timeout(_LIMIT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(  # type: ignore[attr-defined]
        f"graphengine/{attempt}", store
    )


def _described(memory: MemoryPlan) -> dict[str, str]:
    """The plan without its device and its budget."""
    names = {field.name for field in fields(memory)} - {"device", "budget"}
    return {name: repr(getattr(memory, name)) for name in sorted(names)}


def _check_plan(own: dict[str, str], drivers: dict[str, str], share: Share) -> None:
    differences = [
        f"{name}={value} and not {drivers.get(name)}"
        for name, value in own.items()
        if value != drivers.get(name)
    ]
    if differences:
        raise ValueError(
            f"rank {share.rank} of {share.ranks} has other options or another checkpoint than the "
            f"driver: {', '.join(differences)}"
        )
