"""Which files can be collected."""

from importlib.util import find_spec

import torch

# They have no test for a GPU, and a machine with one need not have the package that they import.
collect_ignore = []
if torch.cuda.is_available() and find_spec("compressed_tensors") is None:
    collect_ignore = [
        "test_activations.py",
        "test_compressed_tensors.py",
        "test_engines.py",
        "test_kernel_layouts.py",
        "test_loading.py",
    ]
