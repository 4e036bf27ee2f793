"""Parsers whose `--help` is a screenful, and whose lines fit the terminal."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_MODELS = ("--checkpoint", "--shape")
"""Options that a user may have meant by a single word."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose `--help` lists only common options, once `show_first` has named them.

    `--help` has the first part of their texts, up to a semicolon; `--help-all` lists every option
    with its whole text. Without `show_first`, `--help` lists every option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": WholeWords, **options})
        self._common: set[str] = set()

    def show_first(self, flags: Iterable[str]) -> None:
        """Name the common options, as they are typed."""
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="list every option and exit")
        self._common = {"--help", "--help-all", *flags}
        known = {name for action in self._actions for name in action.option_strings}
        assert known >= self._common, f"{self._common - known=}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report an unknown option before a missing one, which it may be a misspelling of."""
        if self._subparsers is None:
            known = self._option_string_actions
            for given in itertools.takewhile(lambda each: each != "--", args or ()):
                name = given.partition("=")[0]
                unknown = name.startswith("--") and " " not in name
                if unknown and not any(each.startswith(name) for each in known):
                    close = difflib.get_close_matches(name, known, 1, cutoff=0.75)
                    meant = f": did you mean {close[0]}?" if close else ""
                    self.error(f"unrecognized argument {name}{meant}")
        namespace, left = super().parse_known_args(args, namespace)
        if self._subparsers is None and left and not left[0].startswith("-"):
            self.error(f"unrecognized argument {left[0]}{self._instead_of(left[0])}")
        return namespace, left

    def _instead_of(self, word: str) -> str:
        """A hint at what to type in place of a word that no option takes."""
        models = [each for each in _MODELS if each in self._option_string_actions]
        meant = " or ".join(f"{each} {shlex.quote(word)}" for each in models)
        return f": did you mean {meant}?" if meant else ""

    def format_help(self) -> str:
        if not self._common:
            return super().format_help()
        rare = [each for each in self._actions if self._is_rare(each)]
        with _replaced_help(self._actions, lambda each: _short(each, rare)):
            text = super().format_help()
        return f"{text}\n{len(rare)} more options, and more about these: --help-all\n"

    def format_help_all(self) -> str:
        """The help with every option."""
        return super().format_help()

    def _is_rare(self, action: argparse.Action) -> bool:
        names = action.option_strings
        return bool(names) and self._common.isdisjoint(names)


class WholeWords(argparse.HelpFormatter):
    """Breaks lines at spaces alone: not in the middle of a word, nor of a flag at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in _wrap(text, width - len(indent)))


def _wrap(text: str, width: int) -> list[str]:
    whole = " ".join(text.split())
    return textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)


class _HelpAll(argparse.Action):
    """Prints every option and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser), f"{parser=}"
        print(parser.format_help_all(), end="")
        parser.exit()


def _short(action: argparse.Action, rare: Sequence[argparse.Action]) -> str | None:
    """The text that `--help` shows for an option."""
    text = action.help
    if action in rare:
        return argparse.SUPPRESS
    if text is None:
        return None
    default = re.search(r" \(default: [^()]*\)$", text)
    begin = text if default is None else text[: default.start()]
    return begin.partition(";")[0] + (default[0] if default else "")


@contextmanager
def _replaced_help(
    actions: Sequence[argparse.Action], help_of: Callable[[argparse.Action], str | None]
) -> Iterator[None]:
    """Give each option another text inside the block."""
    texts = [action.help for action in actions]
    for action in actions:
        action.help = help_of(action)
    try:
        yield
    finally:
        for action, text in zip(actions, texts, strict=True):
            action.help = text
