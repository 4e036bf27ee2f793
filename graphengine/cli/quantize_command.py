"""`graphengine quantize`: a checkpoint of 16 bits, written with weights of 8 or 4."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphengine.models.checkpoint import Checkpoint
from graphengine.models.quantised.rounding import ROUNDED_KINDS
from graphengine.models.quantised.writer import INT4_GROUPS, write_quantised


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="IN", help="directory or hub id of a checkpoint of 16 bits")
    add("out", metavar="OUT", type=Path, help="a folder that is not there yet")
    add("--kind", choices=ROUNDED_KINDS, default="int4", help="what weights become (%(default)s)")
    add(
        "--group-size",
        type=int,
        choices=INT4_GROUPS,
        default=128,
        metavar="N",
        help="int4: columns that share a scale (%(default)s)",
    )
    add("--lm-head", action="store_true", help="quantise lm_head, too")
    add("--device", default="cpu", help="where weights are rounded, one at a time (%(default)s)")


def quantize(options: argparse.Namespace) -> None:
    """Write a compressed-tensors checkpoint with weights of 8 or 4 bits, rounded to nearest."""
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
