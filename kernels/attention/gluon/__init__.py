"""Attention's kernels in Gluon: decode, and prefill on Hopper."""
