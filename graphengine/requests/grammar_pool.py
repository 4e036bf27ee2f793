"""The pool on the device that holds the automata of grammars, and who uses them.

An automaton is copied into the pool when the first request with its grammar is queued, in stream
order after all replays so far. Requests with the same grammar share it. It stays for later ones
until its room is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, NamedTuple

import torch

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


class DeviceGuide:
    """A request's place in its grammar, where the device follows it; the host goes after it.

    Nothing is raised, whatever a model samples.
    """

    __slots__ = ("_automaton", "_digest", "_pool", "_state", "trouble")

    where: ClassVar[str] = "device"
    reason: ClassVar[str] = ""

    def __init__(self, compiled: TokenAutomaton, pool: GrammarPool, digest: bytes) -> None:
        self._automaton, self._pool, self._digest = compiled, pool, digest
        self._state = 0
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

    def release(self) -> None:
        """Note that the request has ended."""
        self._pool.give_back(self._digest)
