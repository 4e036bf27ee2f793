"""A model divided among ranks: parts of layers, or stages of layers."""
