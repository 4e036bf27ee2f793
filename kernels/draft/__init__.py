"""Kernels for drafting: draft modules, n-grams, draft models, trees, relaxed acceptance."""
