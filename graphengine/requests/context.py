"""The KV and states that turns of a session, or samples of one prompt, have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class StateHolder(Protocol):
    """A session's context, or the placement of a request that has made states."""

    states: list[StateCheckpoint]


@dataclass(kw_only=True, slots=True, eq=False)
class StateCheckpoint:
    """The states of all recurrent layers after the first `position` tokens of a sequence, and the
    KV of these tokens. Nothing writes into it.

    position  number of tokens that it was computed from, 1 or more
    place     index of its place among the engine's places for states
    blocks    blocks with the KV of these tokens; the last one may be partly filled
    tokens    the tokens as bytes, and the further tokens that their KV depends on: prompts that
              begin with them may find it. None if no prompt may
    holders   holders that have it in `states`; without holders and `tokens` it is dropped
    """

    position: int
    place: int
    blocks: list[int]
    tokens: bytes | None = None
    holders: list[StateHolder] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, eq=False)
class HeldRing:
    """A ring with KV of layers with a window. It is held by a request, a session, or both a session
    and its turn.

    number   number of the ring
    tokens   number of the sequence's first tokens whose KV has been written into it
    written  positions below this may have been written since a request began it at 0, and so may
             have overwritten older entries
    used     whether a request in a slot holds it
    kept     whether a session holds it
    """

    number: int
    tokens: int = 0
    written: int = 0
    used: bool = True
    kept: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Context:
    """The KV that a session keeps: blocks of its first `len(blocks) * block_size` tokens.

    states   state checkpoints of a model with recurrent layers, by position; their blocks replace
             `blocks`
    ring     the ring with the KV of its turns; if the engine has rings, its blocks are useless
             without one
    evicted  whether its blocks were evicted; a turn that gives it new ones clears this
    closed   whether the session is closed, so that no turn gives it blocks any more
    rank     the data parallel rank that has its blocks; None before its first turn
    """

    blocks: list[int] = field(default_factory=list)
    states: list[StateCheckpoint] = field(default_factory=list)
    ring: HeldRing | None = None
    evicted: bool = False
    closed: bool = False
    rank: int | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class SharedPrompt(Context):
    """The KV of a prompt that several samples begin with: whole blocks, which none of them writes.

    It is closed once all samples have begun. Until then its blocks may be evicted; a sample that
    finds none feeds the prompt again.

    waiting  ids of the samples of which nothing has been launched yet
    """

    waiting: set[int] = field(default_factory=set)
