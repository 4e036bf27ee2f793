"""Attention's kernels in Triton, which run everywhere."""
