"""What a session keeps of its KV from one turn to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class StateHolder(Protocol):
    """A session's context, or the placement of a request that has made states."""

    states: list[KeptState]


@dataclass(kw_only=True, slots=True, eq=False)
class KeptState:
    """The states of all recurrent layers after the first `position` tokens of a sequence, and the
    KV of these tokens. Nothing writes into it.

    position  tokens that it follows from, 1 or more
    place     where the states are, among those of the engine
    blocks    of their KV; the last one may be of fewer tokens than the others
    tokens    for prompts that begin with them: as bytes, with those that the KV depends on besides;
              None where none may find it
    holders   who has it in `states`; with neither these nor `tokens` it is gone
    """

    position: int
    place: int
    blocks: list[int]
    tokens: bytes | None = None
    holders: list[StateHolder] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, eq=False)
class HeldRing:
    """A ring with KV of layers with a window. A request has it, or a session, or a session and its
    turn.

    number   of the ring
    tokens   tokens of the sequence, from its first on, whose KV has been written into it
    written  positions up to which entries may have been overwritten, since a request began it at 0
    used     whether a request in a slot has it; `kept` whether a session has
    """

    number: int
    tokens: int = 0
    written: int = 0
    used: bool = True
    kept: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Context:
    """The KV that a session keeps: blocks of its first `len(blocks) * block_size` tokens.

    states   of a model with recurrent layers, by position: their blocks take the place of its own
    ring     what its turns keep in rings; without one its blocks are of no use, where there are
             rings
    evicted  whether its blocks were taken away; a turn that gives it new ones clears this
    closed   whether no turn may give it blocks any more
    rank     whose blocks they are, where ranks have requests of their own; None until a turn
    """

    blocks: list[int] = field(default_factory=list)
    states: list[KeptState] = field(default_factory=list)
    ring: HeldRing | None = None
    evicted: bool = False
    closed: bool = False
    rank: int | None = None
