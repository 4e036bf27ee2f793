"""graphengine: a decoding engine for language models in which one step is one CUDA graph replay.

from graphengine import Engine, SamplingParams

with Engine.from_pretrained("path/to/checkpoint", max_batch=8) as engine:
    print(engine.generate("def fib(n):", SamplingParams(max_tokens=64)).text)
"""

from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.prompts import Chat
from graphengine.report import StepReport
from graphengine.request import Event, QueueFull, Request
from graphengine.result import Result, Segment, Timings
from graphengine.sampling_params import SamplingParams

__all__ = [
    "Chat",
    "Engine",
    "EngineConfig",
    "Event",
    "QueueFull",
    "Request",
    "Result",
    "SamplingParams",
    "Segment",
    "StepReport",
    "Timings",
]
