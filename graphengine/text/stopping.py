"""Stop strings: found in streamed text, with as little text held back as possible."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of `stops` has appeared in it.

    The match that ends first wins, however the text is split into pieces; of matches that end at
    the same character the first of the list wins. vLLM does the same (`check_stop_strings` of its
    v1 detokenizer: the string that is complete first, ties in the order of the list). Text after
    the stop string is dropped, and so is the string itself unless it is to be included.

    Text is held back only while it may be the beginning of a stop string that will be dropped;
    where stop strings are included, nothing is held back. Each string is tracked with the
    Knuth-Morris-Pratt automaton: amortised O(len(stops)) a character, however long the strings are.
    """

    def __init__(self, stops: str | Sequence[str], *, include: bool = False) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"a stop string must be a string that is not empty, got {stop!r}")
        self._fallbacks = [_fallback_lengths(stop) for stop in self._stops]
        # How many first characters of each stop string the end of the text so far matches.
        self._agreeing = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text that no stop string can claim any more, the stop string if one has matched).

        armed  whether a stop string that ends in `text` counts; one that ends later may begin here
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(character)
            if matched is not None and armed:
                self.matched, self._held = matched, ""
                return pending[: end if self._include else end - len(matched)], matched
        held_from = len(pending) - (0 if self._include else max(self._agreeing))
        self._held = pending[held_from:]
        return pending[:held_from], None

    def flush(self) -> str:
        """The text still held back. Call it once, when no more text can come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """The first stop string of the list that ends with this character, if one does."""
        matched: str | None = None
        for index, stop in enumerate(self._stops):
            agreeing, fallbacks = self._agreeing[index], self._fallbacks[index]
            while agreeing and stop[agreeing] != character:
                agreeing = fallbacks[agreeing]
            agreeing += stop[agreeing] == character
            if agreeing == len(stop):
                matched = matched or stop
                agreeing = fallbacks[agreeing]
            self._agreeing[index] = agreeing
        return matched


def _fallback_lengths(stop: str) -> list[int]:
    """Length of the longest proper prefix of `stop` that is also a suffix of `stop[:n]`, by n."""
    lengths = [0, 0]
    for end in range(1, len(stop)):
        length = lengths[end]
        while length and stop[length] != stop[end]:
            length = lengths[length]
        lengths.append(length + (stop[length] == stop[end]))
    return lengths
