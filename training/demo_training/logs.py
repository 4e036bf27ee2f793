"""Printing of the training scripts."""

import time

START = time.monotonic()


def log(text: str) -> None:
    """Print a line, after the seconds that have passed."""
    print(f"{time.monotonic() - START:7.1f} s  {text}", flush=True)
