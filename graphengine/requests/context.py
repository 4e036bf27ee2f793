"""What a session keeps of its KV from one turn to the next."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    ring     what its turns keep in rings; without one its blocks are of no use, where there are
             rings
    evicted  whether its blocks were taken away; a turn that gives it new ones clears this
    closed   whether no turn may give it blocks any more
    """

    blocks: list[int] = field(default_factory=list)
    ring: HeldRing | None = None
    evicted: bool = False
    closed: bool = False
