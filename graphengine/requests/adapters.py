"""The adapters that are loaded, by name, and the slots that are free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from graphengine.options.adapters import check_adapter_name
from graphengine.options.checks import shown


class LoadedAdapter(NamedTuple):
    """An adapter in a slot.

    name        what requests ask for
    path        the folder that it was loaded from
    slot        its slot on the device
    rank        the highest rank of its matrices
    generation  number of the load, from 1: KV of one load is never used for another
    fingerprint of samples of its matrices
    """

    name: str
    path: str
    slot: int
    rank: int
    generation: int
    fingerprint: str = ""


class Adapters:
    """The names of `slots` adapters at most, which are loaded and unloaded between steps."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.loaded: dict[str, LoadedAdapter] = {}
        self._loads = 0

    def find(self, name: object) -> LoadedAdapter | None:
        """The adapter with this name; None for None. ValueError for a name that is not loaded."""
        return None if name is None else self._named(name)

    def _named(self, name: object) -> LoadedAdapter:
        check_adapter_name(name)
        found = self.loaded.get(str(name))
        if found is None:
            raise ValueError(f"adapter {shown(name)} is not loaded: there are {self._names()}")
        return found

    def _names(self) -> str:
        return ", ".join(map(repr, self.loaded)) or "none"

    def next_slot(self, name: str) -> int:
        """A free slot. ValueError for a name in use, and if there is no slot."""
        check_adapter_name(name)
        if name in self.loaded:
            raise ValueError(f"adapter {name!r} is loaded already, from {self.loaded[name].path}")
        used = {each.slot for each in self.loaded.values()}
        if len(used) == self.slots:
            raise ValueError(
                f"adapter {name!r} has no slot: max_adapters={self.slots}, and {self._names()} are "
                f"loaded"
            )
        return next(slot for slot in range(self.slots) if slot not in used)

    def add(
        self, name: str, path: str, slot: int, rank: int, fingerprint: str = ""
    ) -> LoadedAdapter:
        """Note that an adapter was loaded into a slot."""
        self._loads += 1
        self.loaded[name] = LoadedAdapter(name, path, slot, rank, self._loads, fingerprint)
        return self.loaded[name]

    def remove(self, name: str, uses: Iterable[tuple[int, LoadedAdapter | None, bool]]) -> None:
        """Free an adapter's slot. ValueError, with their ids, while requests use it.

        uses  id and adapter of each unfinished request, and whether it was cancelled
        """
        adapter = self._named(name)
        users = {number: cancelled for number, used, cancelled in uses if used == adapter}
        if users:
            count = sum(users.values())
            ending = f"; {count} of them were cancelled, and the next step() ends those"
            raise ValueError(
                f"adapter {name!r} is in use by {len(users)} requests: "
                f"{', '.join(map(str, [*users][:10]))}{' ...' if len(users) > 10 else ''}"
                f"{ending if count else ''}"
            )
        del self.loaded[name]
