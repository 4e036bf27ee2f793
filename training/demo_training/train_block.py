"""Trains a block drafter for the demo model, and writes its checkpoint. See the card in the result.

python -m demo_training.train_block --out DIR [--kind dspark] [--minutes 4 | --steps N]
    [--own-text FILE]
"""

from collections.abc import Sequence

from demo_training.block import KINDS, BlockConfig
from demo_training.draft_training import layer_numbers, run, training_options


def main(arguments: Sequence[str] | None = None) -> None:
    parser, defaults = training_options("train_block", __doc__), BlockConfig()
    add = parser.add_argument
    add("--kind", choices=KINDS, default=defaults.kind)
    add(
        "--layers",
        type=layer_numbers,
        default=defaults.layers,
        help="layers of the target that the drafter reads",
    )
    add("--depth", type=int, default=defaults.depth, help="drafts per block")
    add("--count", type=int, default=defaults.count, help="layers of the drafter")
    add("--ffn", type=int, default=defaults.ffn_size)
    add("--rank", type=int, default=defaults.rank, help="rank of DSpark's sequential head")
    options = parser.parse_args(arguments)
    config = BlockConfig(
        kind=options.kind,
        layers=options.layers,
        depth=options.depth,
        count=options.count,
        ffn_size=options.ffn,
        rank=options.rank,
    )
    run(options, config)


if __name__ == "__main__":
    main()
