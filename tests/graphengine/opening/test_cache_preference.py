"""Which graphs of an engine have kernels that ask for cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.small_engine import open_engine
from graphengine.opening import allocation


@pytest.mark.parametrize(
    ("family", "name", "asks"),
    [
        ("fma", "decode/1/fast", True),
        ("fma", "decode/1/x16/full", True),
        ("fma", "prefill/64", False),
        ("dot", "decode/8/fast", False),
    ],
)
def test_decode_graphs_in_fma_ask_for_cache(
    monkeypatch: pytest.MonkeyPatch, family: Any, name: str, asks: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(allocation, "prefer_cache", lambda *given: asked.append(given))
    graph: Any = object()
    device = torch.device("cuda", 1)
    allocation.ask_for_cache(family, device, name, graph)
    assert asked == [(graph, device)] * asks


@pytest.mark.gpu
@pytest.mark.parametrize("row_family", ["fma", "dot"])
def test_an_engine_asks_as_it_captures(monkeypatch: pytest.MonkeyPatch, row_family: Any) -> None:
    asked: list[int] = []
    prefer = allocation.prefer_cache
    monkeypatch.setattr(allocation, "prefer_cache", lambda *given: asked.append(prefer(*given)))
    with open_engine(device="cuda", max_batch=1, row_family=row_family) as engine:
        decodes = [key for key in engine.runtime.graphs if key.kind == "decode"]
    assert len(asked) == (len(decodes) if row_family == "fma" else 0) and all(asked)
