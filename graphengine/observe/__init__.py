"""Observing an engine: the recorder, ranges for profilers, the environment."""
