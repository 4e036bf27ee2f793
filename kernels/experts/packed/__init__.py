"""Experts with quantised weights: their layout, and the kernels that decode them."""
