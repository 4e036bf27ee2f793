"""Plans that share K among splits, each with the K that it is hard for."""

from __future__ import annotations

from graphengine.kernels.linear.plans import LinearPlan

SPLIT_PLANS = [
    (128, LinearPlan("dot", block_m=32, block_k=32, splits=4, stages=3)),
    # Five tiles over four splits: the last split is empty, the last tile masked. For the kernel
    # of `linear_gluon.py` K must be a multiple of 8.
    (130, LinearPlan("dot", block_m=32, block_k=32, splits=4, stages=3)),
    (136, LinearPlan("dot", block_m=32, block_k=32, splits=4, stages=3)),
    # Fewer tiles than splits: two, and one, which needs no other program.
    (20, LinearPlan("dot", block_m=32, block_k=16, splits=4, stages=3)),
    (24, LinearPlan("dot", block_m=32, block_k=16, splits=4, stages=3)),
    (20, LinearPlan("dot", block_m=32, block_k=32, splits=4, stages=3)),
]
