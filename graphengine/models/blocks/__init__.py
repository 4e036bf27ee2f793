"""Parts of layers, from which model families are composed.

A block has frozen sizes, weights allocated by them, and the work of both programs: a few fused
kernels for the rows of a decode step, the BLAS and a few kernels for a prompt's chunk.
"""
