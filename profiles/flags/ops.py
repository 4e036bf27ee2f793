"""The flags of `graphengine ops`."""

from __future__ import annotations

from graphengine.cli.arguments import add_ops
from graphengine.cli.parser import CommandParser
from graphengine.profiles.shape_configs import NAMES, POLICIES


def add_arguments(parser: CommandParser) -> None:
    """The options of `graphengine ops`."""
    parser.usage = "graphengine ops ... (see --help)"
    parser.add_argument(
        "--shape",
        choices=(*NAMES, *POLICIES),
        metavar="SHAPE",
        help="in place of a checkpoint, a shape that `bench` measures, on an H200",
    )
    add_ops(parser)
