"""The benchmark: its measurements, its engines, and its comparisons."""
