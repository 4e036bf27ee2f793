"""`graphengine quantize`: a checkpoint of 16 bits, written with weights of 8 or 4."""

from __future__ import annotations

import argparse

from graphengine.kernels.linear.kinds import KINDS
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.quantised.writer import write_quantised


def quantize(options: argparse.Namespace) -> None:
    """Write a compressed-tensors checkpoint with weights of 8 or 4 bits, rounded to nearest."""
    known = sorted({size for kind in KINDS.values() for size in kind.groups})
    if options.group_size not in known:
        sizes = ", ".join(map(str, known))
        raise ValueError(f"--group-size {options.group_size} must be one of {sizes}")
    written = write_quantised(
        Checkpoint.open(options.checkpoint),
        options.out,
        options.kind,
        group_size=options.group_size,
        head=options.lm_head,
        device=options.device,
    )
    print(
        f"{options.out}: {len(written.quantised)} linears in {options.kind}, "
        f"{written.bytes_before / 2**20:,.1f} MiB became {written.bytes_after / 2**20:,.1f}"
    )
