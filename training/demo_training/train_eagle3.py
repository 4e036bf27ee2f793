"""Trains an EAGLE3 head for the demo model, and writes its checkpoint. See the card in the result.

python -m demo_training.train_eagle3 --out DIR [--minutes 4 | --steps N] [--own-text FILE]
"""

from collections.abc import Sequence

from demo_training.draft_training import layer_numbers, run, training_options
from demo_training.eagle3 import HeadConfig


def main(arguments: Sequence[str] | None = None) -> None:
    parser, defaults = training_options("train_eagle3", __doc__), HeadConfig()
    add = parser.add_argument
    add(
        "--layers",
        type=layer_numbers,
        default=defaults.layers,
        help="layers of the target that the drafter reads",
    )
    add("--ffn", type=int, default=defaults.ffn_size)
    add("--depth", type=int, default=defaults.depth, help="number of unrolled runs")
    add("--draft-vocab", type=int, default=defaults.drafted, help="0: the target's lm_head")
    options = parser.parse_args(arguments)
    config = HeadConfig(
        layers=options.layers,
        ffn_size=options.ffn,
        depth=options.depth,
        drafted=options.draft_vocab,
    )
    run(options, config)


if __name__ == "__main__":
    main()
