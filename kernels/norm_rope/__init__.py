"""Norms, RoPE, activations and the embedding."""
