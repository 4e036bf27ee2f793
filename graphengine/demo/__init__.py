"""A small real model in the package: its checkpoint, its drafters, and held-out text.

Nothing here imports torch. The folder `training/` of the repository trains them.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def checkpoint_path() -> Path:
    """Directory of the demo checkpoint, in Hugging Face layout."""
    return _HERE / "checkpoint"


def eagle3_path() -> Path:
    """Directory of the EAGLE3 head for the demo model, as `Eagle3` and `eagle3:PATH` read it."""
    return _HERE / "eagle3"


def block_path() -> Path:
    """Directory of the block drafter for the demo model, as `DFlash` and `dflash:PATH` read it."""
    return _HERE / "block"


def heldout_text() -> str:
    """Whole files of the standard library that the demo model was not trained on."""
    return (_HERE / "heldout.txt").read_text(encoding="utf-8")
