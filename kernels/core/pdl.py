"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

The kernels of a decode graph all follow these rules, so that each may rely on them:

- Every program, even a padded one, calls `wait_for_inputs` before it exits or stores. The wait
  returns when the launch before has completed and its stores are visible. That launch waited for
  its own predecessor, so everything earlier is complete as well.
- The next launch is triggered after the wait, never before it. So when launch k starts, launch
  k - 2 is complete. A few short kernels trigger before their wait, so that the launch after them
  can load its weights while the launch before them still runs (`start_next`): those of adapters,
  segments, launches with `EARLY`, and `_take_sums_kernel`, which also stores before its wait and
  says why it may. After one or more of them in a row, a launch starts while all of these and the
  launch before them may still run: before its own wait it may load nothing that any of them
  writes.
- Before its wait a program loads only data that no kernel of the graph writes (weights, host-owned
  fields), or data that launch k - 2 or an earlier one wrote, bypassing the L1 cache
  (`cache_modifier=".cg"`).

A prefill graph also has ordinary launches of the BLAS and of torch. They begin when everything
before them is complete, and the next wait returns when they are complete. Kernels of a prefill
graph load only weights before their wait.

No wait is inside a loop that Triton pipelines: loads could be hoisted above it.
Source: CUDA C++ Programming Guide, chapter "Programmatic Dependent Launch".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.core.dispatch import INTERPRETED

EARLY = 2
"""A value of `pdl` in place of True: the launch starts the next one before it has waited."""

STARTS_EARLY = tl.constexpr(EARLY)
"""The constexpr PDL of such a kernel."""


def launch_options(pdl: bool | int) -> dict[str, bool | int]:
    """Keyword arguments of a kernel launch: its constexpr `PDL` and Triton's launch attribute.

    PDL is off in Triton's interpreter, where kernels run one after the other.
    """
    if INTERPRETED:
        return {"PDL": False}
    return {"PDL": pdl, "launch_pdl": bool(pdl)}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, OVERLAP: tl.constexpr = True):
    """Wait for the launch before, then let the next one start; nothing without PDL.

    Without OVERLAP the next launch starts as this one's programs exit. It then spreads evenly over
    the SMs, whereas an early start fills the SMs that happen to have room.
    """
    if PDL:
        if PDL == STARTS_EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if OVERLAP and PDL != STARTS_EARLY:
            gdc_launch_dependents()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next launch start before this one has waited; nothing without PDL."""
    if PDL:
        gdc_launch_dependents()
