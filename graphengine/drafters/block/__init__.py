"""Block drafters, DFlash and DSpark: their layers, how checkpoints are read, and the drafter."""
