"""The pool on the device that holds the automata of grammars, and who uses them.

An automaton is copied into the pool when the first request with its grammar is queued, in stream
order after all replays so far. Requests with the same grammar share it. It stays for later ones
until its room is wanted. Where there is none, the host makes masks from the same tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.automata.byte_automaton import DEAD
from graphengine.automata.patterns import Unsupported
from graphengine.automata.token_automaton import TokenAutomaton
from graphengine.kernels.logits.automata import region, region_words
from graphengine.requests.result import FinishReason

MAX_GRAMMAR_STATES = 4096
"""Most states of a grammar's automaton over bytes."""


class CompiledGrammar(NamedTuple):
    """A grammar's automaton, or why it has none.

    digest  of the grammar and the vocabulary
    """

    digest: bytes
    outcome: TokenAutomaton | Unsupported


class _Region(NamedTuple):
    start: int
    words: int


class GrammarPool:
    """Regions of `tables`, int32 [P] on the device, each with an automaton.

    stream  the stream of all replays; None on a CPU
    """

    def __init__(self, tables: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._tables, self._stream = tables, stream
        # By digest; the one that was taken last comes last.
        self._regions: dict[bytes, _Region] = {}
        self._users: Counter[bytes] = Counter()

    @property
    def words(self) -> int:
        """P"""
        return len(self._tables)

    @property
    def used_words(self) -> int:
        """Words of the regions that unfinished requests use."""
        return sum(each.words for key, each in self._regions.items() if self._users[key])

    def take(self, digest: bytes, automaton: TokenAutomaton) -> int | None:
        """Where the automaton's region starts, once it is there; None if it does not fit beside
        those in use. Every call that returns a start is matched by a `give_back`.
        """
        found = self._regions.pop(digest, None)
        if found is None:
            found = self._new(automaton)
        if found is None:
            return None
        self._regions[digest] = found
        self._users[digest] += 1
        return found.start

    def give_back(self, digest: bytes) -> None:
        """Note that a request no longer uses the region."""
        assert self._users[digest] > 0, f"{digest.hex()} has no user"
        self._users[digest] -= 1

    def _new(self, automaton: TokenAutomaton) -> _Region | None:
        """Copy an automaton into a free region; regions without users make room, oldest first."""
        states, classes = automaton.next_state.shape
        vocabulary = len(automaton.class_of_token)
        words = region_words(states, classes, len(automaton.masks), vocabulary)
        idle = [digest for digest in self._regions if not self._users[digest]]
        while (start := self._gap(words)) is None:
            if not idle:
                return None
            del self._regions[idle.pop(0)]
        tables = region(
            automaton.class_of_token,
            automaton.next_state,
            automaton.mask_of_state,
            automaton.masks,
            automaton.forced,
        )
        assert len(tables) == words, f"{len(tables)=} of {words}"
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._tables[start : start + words].copy_(torch.from_numpy(tables))
        return _Region(start, words)

    def _gap(self, words: int) -> int | None:
        """Where the first gap of so many words starts; None if there is none."""
        end = 0
        for each in sorted(self._regions.values()):
            if each.start - end >= words:
                return end
            end = each.start + each.words
        return end if self.words - end >= words else None


class _TableGuide:
    """A request's place in its grammar's automaton. Nothing is raised, whatever a model samples."""

    __slots__ = ("_automaton", "_state", "trouble")

    def __init__(self, automaton: TokenAutomaton) -> None:
        self._automaton, self._state = automaton, 0
        self.trouble = ""

    def take(self, tokens: Sequence[int], *, more: bool = True) -> tuple[int, FinishReason | None]:
        """Follow the tokens that a step emitted, as `Guide.take`."""
        automaton = self._automaton
        for index, token in enumerate(tokens):
            after = automaton.follow(self._state, token)
            if after == DEAD:
                self.trouble = f"its automaton does not allow token {token}"
                return index, "error"
            self._state = after
            if automaton.ended[after]:
                return index + 1, "stop"
        return len(tokens), None


class DeviceGuide(_TableGuide):
    """A request whose grammar the device follows; the host goes after it.

    jumps  gets the number of forced tokens that were accepted as drafts and had another token of
           their step after them, as "guided/jumped"; None: forced tokens are no drafts
    """

    __slots__ = ("_digest", "_jumps", "_pool")

    where: ClassVar[str] = "device"
    reason: ClassVar[str] = ""

    def __init__(
        self,
        automaton: TokenAutomaton,
        pool: GrammarPool,
        digest: bytes,
        jumps: Counter[str] | None = None,
    ) -> None:
        super().__init__(automaton)
        self._pool, self._digest, self._jumps = pool, digest, jumps

    def take(self, tokens: Sequence[int], *, more: bool = True) -> tuple[int, FinishReason | None]:
        if len(tokens) > 1 and self._jumps is not None:
            self._jumps["guided/jumped"] += self._forced_of(tokens[:-1])
        return super().take(tokens, more=more)

    def _forced_of(self, drafts: Sequence[int]) -> int:
        """How many of these accepted drafts are forced text, from the first on."""
        automaton, state = self._automaton, self._state
        for index, token in enumerate(drafts):
            if token != automaton.forced[state]:
                return index
            state = automaton.follow(state, token)
        return len(drafts)

    def release(self) -> None:
        """Note that the request has ended."""
        self._pool.give_back(self._digest)


class TableGuide(_TableGuide):
    """A request whose grammar has an automaton that the host follows, as the pool had no room.

    reason  why, for people
    masks   as those of `Guide`, [width, V / 32 rounded up]: the ones that the device would read
    """

    __slots__ = ("masks", "reason")

    where: ClassVar[str] = "host"

    def __init__(self, automaton: TokenAutomaton, width: int, reason: str) -> None:
        super().__init__(automaton)
        self.reason = reason
        self.masks: NDArray[np.int32] = np.zeros((width, automaton.masks.shape[1]), dtype=np.int32)
        self.masks[0] = automaton.mask(0)

    def take(self, tokens: Sequence[int], *, more: bool = True) -> tuple[int, FinishReason | None]:
        taken, ended = super().take(tokens, more=more)
        self.masks[0] = self._automaton.mask(self._state)
        return taken, ended

    def follow(self, drafts: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Make masks 1 .. W - 1, as `Guide.follow`."""
        automaton = self._automaton
        lanes = range(len(drafts)) if parents is None else parents
        children: dict[int, list[int]] = {}
        for lane, parent in enumerate(lanes, start=1):
            children.setdefault(parent, []).append(lane)
        self.masks[1:] = 0
        left = [(0, self._state)]
        while left:
            lane, state = left.pop()
            self.masks[lane] = automaton.mask(state)
            for child in children.get(lane, ()):
                draft = drafts[child - 1]
                if 0 <= draft < len(automaton.class_of_token):
                    after = automaton.follow(state, draft)
                    if after != DEAD:
                        left.append((child, after))

    def release(self) -> None:
        """Called once the request has ended; nothing is shared with others."""
