"""Lines that a user types: with `prompt_toolkit`, where it is installed, they can be edited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

PROMPT = "> "


def typed_lines(quiet: bool) -> Iterator[str]:
    """The lines until the input ends; at a terminal, Ctrl-C drops the line that is being typed.

    quiet  without a prompt, for a program that writes the lines
    """
    at_terminal = not quiet and sys.stdin.isatty() and sys.stdout.isatty()
    read = _reader(editing=at_terminal, prompt="" if quiet else PROMPT)
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            print()
        else:
            yield line


def _reader(*, editing: bool, prompt: str) -> Callable[[], str]:
    if not editing or find_spec("prompt_toolkit") is None:
        return partial(input, prompt)
    from prompt_toolkit import PromptSession

    # It remembers the lines: the arrow keys bring them back.
    session: PromptSession[str] = PromptSession()
    return partial(session.prompt, prompt)
