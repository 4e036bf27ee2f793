"""Parts of layers, of which families are composed.

A block is frozen sizes, weights allocated by them, and what both programs do with these: a few
fused kernels for the rows of a decode step, the BLAS and a few kernels for a prompt's chunk.
"""
