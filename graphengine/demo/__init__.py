"""A small real model in the package: the checkpoint, held-out text, and the training script.

Nothing here imports torch; the training scripts are `python -m graphengine.demo.train` and, for an
EAGLE3 head beside the model, `python -m graphengine.demo.train_eagle3`.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def checkpoint_path() -> Path:
    """Directory of the demo checkpoint, in Hugging Face layout."""
    return _HERE / "checkpoint"


def eagle3_path() -> Path:
    """Directory of the EAGLE3 head for the demo model, as `Eagle3` and `eagle3:PATH` read it."""
    return _HERE / "eagle3"


def heldout_text() -> str:
    """Whole files of the standard library that the demo model was not trained on."""
    return (_HERE / "heldout.txt").read_text(encoding="utf-8")
