"""The deterministic automaton of a pattern, over the bytes of UTF-8.

A pattern becomes a nondeterministic automaton (K. Thompson, "Regular expression search algorithm",
1968). The latter becomes a deterministic one, whose states are sets of nondeterministic states.
Bytes between which the pattern never tells apart are one class.

Letters: D states, B classes of bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphengine.automata.patterns import (
    Chars,
    Concat,
    Either,
    Pattern,
    Repeat,
    Unsupported,
    utf8_sequences,
)

DEAD = -1
"""Stands for the state from which no text is complete."""

_PARTS_PER_STATE = 24
"""How many nondeterministic states are allowed for each deterministic state that is allowed."""
_MOST_VISITS = 5_000_000
"""Visits to states of the nondeterministic automaton while a deterministic one is made."""


class ByteAutomaton(NamedTuple):
    """Its start is state 0. Every state is reached from it, and reaches a complete text."""

    class_of_byte: NDArray[np.int32]
    """[256]"""
    next_state: NDArray[np.int32]
    """[D, B]: DEAD for none."""
    accepts: NDArray[np.bool_]
    """[D]: whether a text that leads there is complete."""

    def follow(self, state: int, text: bytes) -> int:
        """The state after a text; DEAD if it leads nowhere."""
        for byte in text:
            if state == DEAD:
                break
            state = int(self.next_state[state, self.class_of_byte[byte]])
        return state


def byte_automaton(pattern: Pattern, max_states: int) -> ByteAutomaton:
    """The automaton of a pattern; Unsupported if it has more than `max_states` states, or if a part
    of the pattern matches no text."""
    graph = _Graph(max_states * _PARTS_PER_STATE)
    end = graph.add(pattern, graph.start)
    return _determinized(graph, end, max_states)


class _Graph:
    """A nondeterministic automaton, whose states are numbered from 0.

    empty  the states that each state reaches without a byte
    steps  (number of a set of bytes, state) for each step of each state
    sets   the sets of bytes, as ranges
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.empty: list[list[int]] = []
        self.steps: list[list[tuple[int, int]]] = []
        self.sets: dict[tuple[int, int], int] = {}
        self._visits = 0
        self.start = self._new()

    def _new(self) -> int:
        if len(self.empty) >= self._most:
            raise Unsupported(f"its automaton needs more than {self._most} parts")
        self.empty.append([])
        self.steps.append([])
        return len(self.empty) - 1

    def _step(self, state: int, bytes_: tuple[int, int], target: int) -> None:
        self.steps[state].append((self.sets.setdefault(bytes_, len(self.sets)), target))

    def add(self, pattern: Pattern, start: int) -> int:
        """Add a pattern after the state `start`; returns the state after the pattern."""
        match pattern:
            case Chars(()) | Either(()):
                raise Unsupported("a part of it matches no text")
            case Chars(ranges):
                return self._add_chars(start, utf8_sequences(ranges))
            case Concat(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Either(options):
                end = self._new()
                for option in options:
                    begin = self._new()
                    self.empty[start].append(begin)
                    self.empty[self.add(option, begin)].append(end)
                return end
            case Repeat(part, least, most):
                return self._add_repeat(part, least, most, start)

    def _add_repeat(self, part: Pattern, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self.add(part, start)
        if most is None:
            loop = self._new()
            self.empty[start].append(loop)
            self.empty[self.add(part, loop)].append(loop)
            end = self._new()
            self.empty[loop].append(end)
            return end
        ends = [start]
        for _ in range(most - least):
            # A fresh state, so that a loop inside the part cannot lead back over its own start.
            begin = self._new()
            self.empty[ends[-1]].append(begin)
            ends.append(self.add(part, begin))
        end = self._new()
        for each in ends:
            self.empty[each].append(end)
        return end

    def _add_chars(self, start: int, sequences: list[tuple[tuple[int, int], ...]]) -> int:
        """Add alternatives whose common beginnings share their states."""
        end = self._new()
        known: dict[tuple[tuple[int, int], ...], int] = {(): start}
        for sequence in sequences:
            for length in range(1, len(sequence)):
                begun = sequence[:length]
                if begun not in known:
                    known[begun] = self._new()
                    self._step(known[begun[:-1]], begun[-1], known[begun])
            self._step(known[sequence[:-1]], sequence[-1], end)
        return end

    def visit(self, count: int) -> None:
        """Count visits to states. Unsupported once there are too many."""
        self._visits += count
        if self._visits > _MOST_VISITS:
            raise Unsupported(
                f"its automaton takes more than {_MOST_VISITS} visits to its parts to make"
            )

    def closure(self, state: int) -> frozenset[int]:
        """The states reached from a state without a byte, that have steps or end the pattern."""
        found, left = {state}, [state]
        while left:
            for target in self.empty[left.pop()]:
                if target not in found:
                    found.add(target)
                    left.append(target)
        self.visit(len(found))
        return frozenset(found)


def _byte_classes(sets: dict[tuple[int, int], int]) -> tuple[NDArray[np.int32], list[list[int]]]:
    """The class of each byte, and the classes of which each set of bytes consists."""
    member = np.zeros((256, max(len(sets), 1)), dtype=np.bool_)
    for (first, last), number in sets.items():
        member[first : last + 1, number] = True
    rows, class_of_byte = np.unique(member, axis=0, return_inverse=True)
    class_of_byte = class_of_byte.reshape(-1)
    of_set = [np.flatnonzero(rows[:, number]).tolist() for number in range(len(sets))]
    return class_of_byte.astype(np.int32), of_set


def _determinized(graph: _Graph, end: int, max_states: int) -> ByteAutomaton:
    class_of_byte, classes_of_set = _byte_classes(graph.sets)
    classes = int(class_of_byte.max()) + 1
    closures: dict[int, frozenset[int]] = {}
    united: dict[frozenset[int], frozenset[int]] = {}

    def closed(targets: frozenset[int]) -> frozenset[int]:
        """The relevant states among those reached: states with steps, and the end."""
        if targets not in united:
            found: set[int] = set()
            for target in targets:
                if target not in closures:
                    closures[target] = frozenset(
                        each for each in graph.closure(target) if graph.steps[each] or each == end
                    )
                graph.visit(len(closures[target]))
                found |= closures[target]
            united[targets] = frozenset(found)
        return united[targets]

    first = closed(frozenset((graph.start,)))
    numbers = {first: 0}
    order = [first]
    rows: list[NDArray[np.int32]] = []
    for state in order:
        graph.visit(len(state))
        reached: list[set[int] | None] = [None] * classes
        for member in state:
            for bytes_, target in graph.steps[member]:
                for each in classes_of_set[bytes_]:
                    if (targets := reached[each]) is None:
                        reached[each] = {target}
                    else:
                        targets.add(target)
        row = np.full(classes, DEAD, dtype=np.int32)
        for each, targets in enumerate(reached):
            if targets is None:
                continue
            after = closed(frozenset(targets))
            if after not in numbers:
                if len(order) >= max_states:
                    raise Unsupported(f"its automaton has more than {max_states} states")
                numbers[after] = len(order)
                order.append(after)
            row[each] = numbers[after]
        rows.append(row)
    accepts = np.array([end in state for state in order])
    return ByteAutomaton(class_of_byte, np.stack(rows), accepts)
