"""What is left to read of an engine that is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

FREED = ("program", "model", "_caches", "_masks", "mailbox", "logprobs")


class Closable:
    """Deletes the attributes `FREED` as it closes; who asks for one later gets a ValueError.

    So what it held is freed at once, and while it is open nothing is checked.
    """

    _closed = False

    # Type checkers would take it for a licence to any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if self._closed and name in FREED:
                raise ValueError(f"the engine is closed, and its {name.lstrip('_')} freed")
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    def _free(self) -> None:
        for name in FREED:
            delattr(self, name)
