"""Two ranks whose prefills feed several prompts: no token depends on which, and ranks agree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from events import GENEROUS_S

from checkpoints.few_layers import few_layers
from engines.packed_replies import params_of, prompt_of
from extent import extent
from graphengine import Engine
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import MTP, NGram

pytestmark = pytest.mark.usefixtures("forked_ranks")

CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("qwen3-biases", {"quantize": "int8"}),
    ("qwen3-biases", {"prefix_caching": True, "lookahead": 1, "speculative": NGram(k=2)}),
    # Recurrent layers, and experts.
    ("qwen-experts", {}),
    ("nemotron-latents", {}),
    ("granite-experts", {}),
    ("lfm2-biases", {}),
    ("demo", {"speculative": MTP(k=2)}),
]


def packing(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 6, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (8, 32)}
    ranks = {"device": "cpu", "tensor_parallel": 2, "wait_limit_s": GENEROUS_S}
    return Engine.from_pretrained(
        path, prompts_per_prefill=4, dtype="float32", **ranks | sizes | options
    )


@pytest.mark.parametrize(("name", "options"), extent(CASES[:3], CASES), ids=str)
def test_no_token_depends_on_what_a_prompt_is_packed_with(
    checkpoints: dict[str, Any], hybrids: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    known = {key: each.path for key, each in {**checkpoints, **hybrids}.items()}
    path = Path(few_layers()) if name == "demo" else known[name]
    prompts = [prompt_of(length, vocabulary=250) for length in (3, 9, 5, 17, 41, 2)]
    params = [params_of(prompt, tokens=8) for prompt in prompts]
    with packing(path, **options) as engine:
        alone = [
            engine.generate(prompt, own).token_ids
            for prompt, own in zip(prompts, params, strict=True)
        ]
        assert not engine.counters["packed_chunks"]
    with packing(path, **options) as engine:
        together = [result.token_ids for result in engine.generate(prompts, params)]
        assert engine.counters["packed_chunks"] >= 1
        runtime = engine.runtime
        assert isinstance(runtime, DriverRuntime) and len(set(runtime.digests())) == 1
    assert together == alone
