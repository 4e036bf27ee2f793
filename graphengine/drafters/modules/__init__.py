"""Drafters of modules that read the target's hidden states; chains and trees of one module."""
