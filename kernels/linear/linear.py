"""Linear layers of decode: a few lanes times a weight matrix that is streamed once.

    linear(LinearCall(x, weight, slot, ...), epilogue)

The order in which a lane's sums are formed follows from the weight, its format and its plan
(`plans.py`), never from N, from the lane's index, or from its neighbours. In the `dot` family each
output is one chain of `mma.sync` over the K tiles in order (one chain a split, splits summed in
order). An `mma.sync` takes 16 lanes, and a program has one or two such tiles; for 64 lanes sm_90
would use `wgmma`, which sums in another order. In the `fma` family each output is a tile's width of
multiply-adds over the K tiles in order, then their sum.

The kernel of packed weights serves both families, each with plans of its own. There a tile's
columns are divided into `streams`, whose number follows from the plan's `block_m` and `warps`; so
both are part of the numerics.

A `LinearCall` (`call.py`) has the operands, and an epilogue (`epilogues.py`) takes the product;
`launches.py` chooses the kernel. On a CPU `reference.py` runs.
"""

from __future__ import annotations

from graphengine.kernels.comm.items import check_part
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Epilogue, Result
from graphengine.kernels.linear.launches import is_launched, launch_linear
from graphengine.kernels.linear.reference import linear_reference


def linear(call: LinearCall, epilogue: Epilogue[Result]) -> Result:
    """Compute the call's product, and apply the epilogue to it.

    One kernel on the current stream, without a host sync, for 1 to 64 lanes; two where an `fma`
    product is added up over ranks. Products and epilogues are computed in float32, and rounded once
    where they are stored. Padded lanes are not written and do not affect others. Split K allocates
    a float32 workspace of [N, M] a split, M rounded up to whole blocks.

    Raises:
        ValueError: a shape, stride or dtype that does not fit, more than 64 lanes (2 in the family
            `fma`), a plan of another family, of splits in `fma`, or that a packed weight does not
            fit; too few arrivals; more outputs than `peers` have memory for, or `peers` where no
            kernel runs; sampling parameters that `sample` would not take.
    """
    call = call.checked(epilogue.kind)
    launched = is_launched(call)
    check_part(epilogue.peers, (call.lanes, call.rows), launched=launched)
    if not launched:
        return linear_reference(call, epilogue)
    outputs = epilogue.outputs(call)
    launch_linear(call, epilogue.targets(outputs))
    return outputs
