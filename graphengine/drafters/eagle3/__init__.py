"""EAGLE3 heads: their layer, how checkpoints are read, and the module that a drafter runs."""
