"""A small real model in the package: the checkpoint, held-out text, and the training script.

Nothing here imports torch; the training script is `python -m graphengine.demo.train`.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def checkpoint_path() -> Path:
    """Directory of the demo checkpoint, in Hugging Face layout."""
    return _HERE / "checkpoint"


def heldout_text() -> str:
    """Whole files of the standard library that the demo model was not trained on."""
    return (_HERE / "heldout.txt").read_text(encoding="utf-8")
