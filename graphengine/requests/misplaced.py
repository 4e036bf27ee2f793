"""Keyword arguments that a call does not have, and where they belong."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields

from graphengine.config import EngineConfig
from graphengine.sampling_params import SamplingParams

QUEUE_OPTIONS = ("priority", "deadline_s", "adapter", "prompt_logprobs_out")
"""Options of a request in the queue; `Engine.submit` documents them."""

_REQUEST = frozenset(field.name for field in fields(SamplingParams))
_ENGINE = frozenset(field.name for field in fields(EngineConfig))


def check_names(method: str, given: Iterable[str], known: Collection[str]) -> None:
    """TypeError, worded like Python's, for a name that `method` does not know; says where it
    belongs.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{_home(name)}")


def _home(name: str) -> str:
    if name == "n":
        return ": submit_many and generate_many take it, for samples of one prompt"
    if name in _REQUEST:
        return f": it is an option of a request, SamplingParams({name}=...)"
    if name in _ENGINE:
        return f": it is an option of the engine, Engine.from_pretrained(..., {name}=...)"
    if name in QUEUE_OPTIONS:
        return ": it is for submit, generate, stream and astream"
    return ""
