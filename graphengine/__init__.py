"""graphengine: a decoding engine for language models in which one step is one CUDA graph replay.

from graphengine import Engine, SamplingParams

with Engine.from_pretrained("path/to/checkpoint", max_batch=8) as engine:
    print(engine.generate("def fib(n):", SamplingParams(max_tokens=64)).text)

The names are imported when they are first used: the pytest plugin lies below this package, and
pytest loads it at every start, where torch would take seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphengine.config import EngineConfig
    from graphengine.core.report import StepReport
    from graphengine.core.snapshots import SessionSnapshot
    from graphengine.engine import Engine
    from graphengine.parallel.ranks import RankFailed
    from graphengine.prompts import Chat
    from graphengine.requests.request import Event, QueueFull, Request
    from graphengine.requests.result import Logprob, Result, Segment, Timings
    from graphengine.sampling_params import SamplingParams
    from graphengine.sessions import Session
    from graphengine.structured_outputs import StructuredOutputsParams

__all__ = [
    "Chat",
    "Engine",
    "EngineConfig",
    "Event",
    "Logprob",
    "QueueFull",
    "RankFailed",
    "Request",
    "Result",
    "SamplingParams",
    "Segment",
    "Session",
    "SessionSnapshot",
    "StepReport",
    "StructuredOutputsParams",
    "Timings",
]

_HOMES = {
    "Chat": "graphengine.prompts",
    "Engine": "graphengine.engine",
    "EngineConfig": "graphengine.config",
    "Event": "graphengine.requests.request",
    "Logprob": "graphengine.requests.result",
    "QueueFull": "graphengine.requests.request",
    "RankFailed": "graphengine.parallel.ranks",
    "Request": "graphengine.requests.request",
    "Result": "graphengine.requests.result",
    "SamplingParams": "graphengine.sampling_params",
    "Segment": "graphengine.requests.result",
    "Session": "graphengine.sessions",
    "SessionSnapshot": "graphengine.core.snapshots",
    "StepReport": "graphengine.core.report",
    "StructuredOutputsParams": "graphengine.structured_outputs",
    "Timings": "graphengine.requests.result",
}

# Type checkers know the names from above; to them, this function would allow any other too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
