"""Expert parallel: where a rank has the weights of a router's ids.

All ranks choose among all experts. A rank has the weights of consecutive ids; pairs of other ranks'
experts add nothing here. In blocks other ranks' experts get the number after this rank's last one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def check_held(held: range | None, experts: int) -> None:
    """Raise ValueError unless `held` names consecutive ids of `experts` experts; None: all ids."""
    if held is None:
        return
    if held.step != 1 or held.start < 0 or len(held) != experts:
        raise ValueError(f"weights of {experts} experts, and ids {held}")


def held_options(held: range | None) -> dict[str, int]:
    """Constexprs of a kernel: FIRST of HELD ids; HELD is 0 if the rank has all weights."""
    return {"FIRST": 0, "HELD": 0} if held is None else {"FIRST": held.start, "HELD": len(held)}


def places_of(expert: torch.Tensor, held: range | None) -> torch.Tensor:
    """Index of each id's weight; for ids of other ranks the number after the last index."""
    if held is None:
        return expert
    place = expert - held.start
    return torch.where((place >= 0) & (place < len(held)), place, len(held))


@triton.jit
def place_of_expert(expert, FIRST: tl.constexpr, HELD: tl.constexpr):
    """`places_of` in a kernel."""
    place = expert
    if HELD > 0:
        here = (expert >= FIRST) & (expert < FIRST + HELD)
        place = tl.where(here, expert - FIRST, HELD)
    return place
