"""graphengine: a decoding engine for language models in which one step is one CUDA graph replay.

from graphengine import (Engine, SamplingParams)

with Engine.from_pretrained("path/to/checkpoint", max_batch=8) as engine:
    print(engine.generate("def fib(n):", SamplingParams(max_tokens=64)).text)

The names are imported when they are first used: the pytest plugin lies below this package, and
pytest loads it at every start, where torch would take seconds.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphengine.config import EngineConfig
    from graphengine.core.report import StepReport
    from graphengine.core.snapshots import SessionSnapshot
    from graphengine.engine import Engine
    from graphengine.options.code_sampling import CodeSampling
    from graphengine.options.drafts.draft_trees import DynamicTree
    from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
    from graphengine.options.drafts.jump_forward import JumpForward
    from graphengine.options.frames import Feed
    from graphengine.parallel.ranks import RankFailed
    from graphengine.policies.policy import Policy
    from graphengine.prompt_embeds import GridEmbeds, ImageEmbeds
    from graphengine.prompts import Chat, PromptParts
    from graphengine.requests.request import Event, QueueFull, Request
    from graphengine.requests.result import Logprob, Result, Segment, Timings
    from graphengine.sampling_params import SamplingParams
    from graphengine.sessions import Session
    from graphengine.speculative import (
        MTP,
        Auto,
        DFlash,
        DraftModel,
        Eagle3,
        GateOptions,
        NGram,
        RelaxedAcceptance,
        SaveHiddenStates,
        Suffix,
        UserProvided,
    )
    from graphengine.structured_outputs import StructuredOutputsParams

__all__ = [
    "MTP",
    "Auto",
    "Chat",
    "CodeSampling",
    "DFlash",
    "DraftModel",
    "DraftVocabulary",
    "DynamicTree",
    "Eagle3",
    "Engine",
    "EngineConfig",
    "Event",
    "Feed",
    "GateOptions",
    "GridEmbeds",
    "ImageEmbeds",
    "JumpForward",
    "Logprob",
    "NGram",
    "Policy",
    "PromptParts",
    "QueueFull",
    "RankFailed",
    "RelaxedAcceptance",
    "Request",
    "Result",
    "SamplingParams",
    "SaveHiddenStates",
    "Segment",
    "Session",
    "SessionSnapshot",
    "StepReport",
    "StructuredOutputsParams",
    "Suffix",
    "Timings",
    "UserProvided",
]

_HOMES = {
    "MTP": "graphengine.speculative",
    "Auto": "graphengine.speculative",
    "Chat": "graphengine.prompts",
    "DraftModel": "graphengine.speculative",
    "CodeSampling": "graphengine.options.code_sampling",
    "DraftVocabulary": "graphengine.options.drafts.draft_vocabulary",
    "DFlash": "graphengine.speculative",
    "DynamicTree": "graphengine.options.drafts.draft_trees",
    "Eagle3": "graphengine.speculative",
    "Engine": "graphengine.engine",
    "EngineConfig": "graphengine.config",
    "Event": "graphengine.requests.request",
    "Feed": "graphengine.options.frames",
    "GateOptions": "graphengine.speculative",
    "JumpForward": "graphengine.options.drafts.jump_forward",
    "Logprob": "graphengine.requests.result",
    "NGram": "graphengine.speculative",
    "GridEmbeds": "graphengine.prompt_embeds",
    "ImageEmbeds": "graphengine.prompt_embeds",
    "Policy": "graphengine.policies.policy",
    "PromptParts": "graphengine.prompts",
    "QueueFull": "graphengine.requests.request",
    "RankFailed": "graphengine.parallel.ranks",
    "RelaxedAcceptance": "graphengine.speculative",
    "Request": "graphengine.requests.request",
    "Result": "graphengine.requests.result",
    "SamplingParams": "graphengine.sampling_params",
    "SaveHiddenStates": "graphengine.speculative",
    "Segment": "graphengine.requests.result",
    "Session": "graphengine.sessions",
    "SessionSnapshot": "graphengine.core.snapshots",
    "StepReport": "graphengine.core.report",
    "StructuredOutputsParams": "graphengine.structured_outputs",
    "Suffix": "graphengine.speculative",
    "Timings": "graphengine.requests.result",
    "UserProvided": "graphengine.speculative",
}

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
if not (_HERE / "kernels").exists() and (_HERE.parent / "kernels" / "__init__.py").is_file():
    # This is the folder of a checkout, which Python finds first where it runs in the checkout's
    # root; `graphengine.kernels`, `buckets` and `profiles` are its neighbours there.
    __path__.append(str(_HERE.parent))

# Type checkers know the names from above; with this function they would accept any other, too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = import_module(_HOMES[name])
        except ModuleNotFoundError as error:
            if error.name not in (_HOMES[name], _HOMES[name].rpartition(".")[0]):
                raise
            raise ModuleNotFoundError(
                f"graphengine.{name} is part of the distribution graphengine-decode: "
                "pytest-graphengine has graphengine.testing alone",
                name=error.name,
            ) from None
        return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
