"""The benchmark: what it measures, on which engines, against what."""
