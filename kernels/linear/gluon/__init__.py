"""Linears' kernels in Gluon: of decode, and of packed weights for chunks on Hopper."""
