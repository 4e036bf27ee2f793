"""Checkpoints: their files, the names in them, and how weights are read."""
