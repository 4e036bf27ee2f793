"""Triton kernels, each with a plain PyTorch reference.

One convention holds for all of them. A launch has N lanes, decode rows or tokens of a prefill
chunk; the device tensor `slot_N` says which request each lane belongs to, -1 if it is padded.
Padded lanes are neither read nor written, and no lane's bits depend on another lane, on its own
index or on N. On a GPU the Triton kernel runs, elsewhere its `*_reference` twin.

A folder holds the operations of one kind, and callers import an operation from its module. The
module has its contract: the function to call, its checks, and how its work is divided. Kernel and
twin are in the same file, or, if they are long, in files of their own: `x_triton.py`, `x_gluon.py`,
and `reference.py` for the folder.
"""

import importlib.util
import pkgutil

from graphengine.kernels.core import stand_in


def import_all() -> None:
    """Import every module of the kernels. The error of the first one that fails is raised."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)


# Without Triton the modules can only be imported while its stand-in is in place.
if _names := stand_in.put_in_place():
    import_all()
    stand_in.remove(_names)
