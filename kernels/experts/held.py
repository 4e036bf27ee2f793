"""Experts of which one of several ranks has some: where the weights of a router's ids are.

All ranks choose among all experts. The weights of one rank are of consecutive ids; a pair of
another one's adds nothing here. In blocks its expert has the number that is one past the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def check_held(held: range | None, experts: int) -> None:
    """ValueError unless so many experts' weights are of these ids; None: of all ids."""
    if held is None:
        return
    if held.step != 1 or held.start < 0 or len(held) != experts:
        raise ValueError(f"weights of {experts} experts, and ids {held}")


def held_options(held: range | None) -> dict[str, int]:
    """The constexprs of a kernel: FIRST of HELD ids; HELD is 0 where the weights are of all."""
    return {"FIRST": 0, "HELD": 0} if held is None else {"FIRST": held.start, "HELD": len(held)}


def places_of(expert: torch.Tensor, held: range | None) -> torch.Tensor:
    """Where the weights of these ids are; past the last one for those of other ranks."""
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
