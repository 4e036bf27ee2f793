"""A package `vllm` that decodes nothing, with the part of the interface that
`profiles/benchmark/peers.py` uses.

It replaces the clock of its process: a step that takes in a prompt, one at a time, is 100 ms long,
any other 2 ms. `FAKE_VLLM` makes it fail when it loads, or return a token too few.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import atexit
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.stand-in"
MODE = os.environ.get("FAKE_VLLM", "")
PROCESSES = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
NOW = [0.0]
time.perf_counter = lambda: NOW[0]


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens


class Engine:
    def __init__(self):
        self.waiting, self.running = [], {}

    def add_request(self, request_id, prompt, params):
        assert all(isinstance(token, int) for token in prompt["prompt_token_ids"])
        assert request_id not in self.running
        self.waiting.append((request_id, params.max_tokens - (MODE == "short")))

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def step(self):
        NOW[0] += 0.1 if self.waiting else 0.002
        if self.waiting:
            request_id, tokens = self.waiting.pop(0)
            self.running[request_id] = (0, tokens)
        outputs = []
        for request_id, (had, tokens) in list(self.running.items()):
            self.running[request_id] = (had + 1, tokens)
            ids = list(range(had + 1))
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(token_ids=ids)])
            )
            if had + 1 == tokens:
                del self.running[request_id]
        return outputs


class LLM:
    def __init__(self, *, model, **options):
        print("INFO: loading", model)
        if MODE == "fail":
            raise RuntimeError("no kernel image is available")
        config = json.loads((Path(model) / "config.json").read_text())
        seen = {"options": options, "config": config, "processes": PROCESSES}
        (Path(__file__).parent / "seen.json").write_text(json.dumps(seen))
        self.llm_engine = Engine()


atexit.register(print, "INFO: bye")
"""


def write_vllm(folder: Path) -> Path:
    """The package under `folder`; returns the file in which it notes how it was called."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    return package / "seen.json"
