"""The first and last kernels of a step, and the state of a slot."""
