"""Kernels for mixtures of experts: the router, (lane, expert) pairs, and the two products."""
