"""The flags of the commands that measure, each in a file with its command's name.

Nothing here imports torch, so that `--help` and errors of arguments come at once.
"""

DTYPE_NAMES = ("float32", "bfloat16", "float16")
SAMPLERS = ("fast", "full")
FAMILIES = ("fma", "dot")
"""The arithmetics of decode kernels."""
