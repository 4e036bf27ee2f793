"""The one thread at a time that may load static buffers and replay their graphs."""

from __future__ import annotations

import threading


class OwnThread:
    """The thread that uses `what`: the first one that calls, until it has ended.

    what  for errors: "engine"
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._owner: threading.Thread | None = None

    def check(self) -> None:
        """Own it where no living thread does; RuntimeError while another one owns it."""
        owner = self._owner
        if owner is not None and owner.ident == threading.get_ident():
            return
        caller = threading.current_thread()
        if owner is not None and owner.is_alive():
            raise RuntimeError(
                f"called from thread {caller.name!r}, but thread {owner.name!r} uses this "
                f"{self._what}: call all of its methods from one thread, such as through a queue"
            )
        self._owner = caller
