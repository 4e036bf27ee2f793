"""What a session keeps of its KV from one turn to the next."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True, eq=False)
class Context:
    """The KV that a session keeps: blocks of its first `len(blocks) * block_size` tokens.

    evicted  whether its blocks were taken away; a turn that gives it new ones clears this
    closed   whether no turn may give it blocks any more
    """

    blocks: list[int] = field(default_factory=list)
    evicted: bool = False
    closed: bool = False
