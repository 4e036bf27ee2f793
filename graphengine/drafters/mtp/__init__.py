"""MTP modules of the target's checkpoint: their layers, how they are read, and their drafters."""
