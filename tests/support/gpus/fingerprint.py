"""Digests of what engines launch, to compare two versions of the code.

    python tests/support/gpus/fingerprint.py --out before.json
    python tests/support/gpus/fingerprint.py --compare before.json

An engine has its numerics id, and for each graph the number of launches and a digest of all of
them: kernel, grid, compile-time values, numbers, and each tensor's dtype, shape and strides. They
are the launches that an H200 would be given; no GPU is needed. Exit status 1: something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpus.subjects import SUBJECTS, open_subject
from graphengine import Engine
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.op import Op
from graphengine.opening.allocation import graph_steps
from graphengine.program.launch_lists import record_schedule


def fingerprint(engine: Engine) -> dict[str, Any]:
    steps = graph_steps(engine.runtime.program, engine.memory)
    with assumed(H200):
        schedule = record_schedule(steps)
    engine.runtime.buffers.reset()
    graphs = {key.name: [len(ops), _digest(ops)] for key, ops in schedule.items()}
    return {"numerics_id": engine.numerics_id, "graphs": graphs}


def _digest(ops: Sequence[Op]) -> str:
    told = json.dumps([list(_told(op)) for op in ops])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _told(op: Op) -> Iterator[Any]:
    yield from (op.name, op.grid, op.pdl, sorted((k, str(v)) for k, v in op.options.items()))
    for name, value in op.arguments.items():
        # A kernel is compiled without an operand that is None.
        if value is not None:
            yield name, _shown(value)


def _shown(value: Any) -> Any:
    """An argument without its address."""
    if isinstance(value, TensorDescriptor):
        return [_shown(value.base), list(value.block_shape)]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    if isinstance(value, tuple):
        return [_shown(each) for each in value if each is not None]
    return str(getattr(value, "value", value))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--out", type=Path, help="a file for the digests")
    parser.add_argument("--compare", type=Path, help="a file of digests that must be the same")
    options = parser.parse_args(arguments)
    found = {}
    for name in options.subjects:
        with open_subject(name) as engine:
            found[name] = fingerprint(engine)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    before = found if options.compare is None else json.loads(options.compare.read_text())
    differ = [name for name in found if json.loads(json.dumps(found[name])) != before.get(name)]
    launches = sum(n for each in found.values() for n, _ in each["graphs"].values())
    print(f"{len(found)} engines, {launches} launches; differ: {', '.join(differ) or 'none'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
