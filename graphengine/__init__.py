"""graphengine: a decoding engine for language models in which one step is one CUDA graph replay.

from graphengine import Engine, SamplingParams

with Engine.from_pretrained("path/to/checkpoint", max_batch=8) as engine:
    print(engine.generate("def fib(n):", SamplingParams(max_tokens=64)).text)
"""

from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.request import Event, Logprob, Request, Result, Timings
from graphengine.sampling_params import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "Event",
    "Logprob",
    "Request",
    "Result",
    "SamplingParams",
    "Timings",
]
