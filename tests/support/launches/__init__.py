"""Inputs of kernels, their compilation without a GPU, and the error that sums may have."""
