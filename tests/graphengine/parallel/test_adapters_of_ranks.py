"""Ranks that split a model split its adapters: A with the columns, B with the rows of a product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from events import GENEROUS_S

from checkpoints.adapters import ATTENTION, FUSED, merged, write_adapter
from engines.small_engine import run
from graphengine import Engine, SamplingParams
from graphengine.speculative import NGram

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def open_engine(base: Any, **options: Any) -> Engine:
    sizes = {"max_batch": 3, "max_seq_len": 128, "block_size": 8, "prefill_buckets": (8, 32)}
    sizes |= {"wait_limit_s": GENEROUS_S, "device": "cpu", "dtype": "float32"}
    return Engine.from_pretrained(base.path, **sizes | options)


@pytest.mark.parametrize("name", ["qwen3-biases", "phi3", "smollm3-marked"])
def test_tokens_are_those_of_the_merged_model(
    checkpoints: dict[str, Any], dense_checkpoints: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Biases, several parts in one linear, and KV heads that ranks share; one adapter is loaded
    later, and reaches all ranks.
    """
    base = (checkpoints | dense_checkpoints)[name]
    targets = {"targets": FUSED} if name == "phi3" else {}
    folders, oracles = {}, {}
    for seed, each in enumerate(("one", "two")):
        folders[each] = write_adapter(
            tmp_path / each, base.model, rank=3 + seed, seed=seed, **targets
        )
        merged(base.model, folders[each]).save_pretrained(tmp_path / f"merged-{each}")
        oracles[each] = type(base)(tmp_path / f"merged-{each}")
    options = {"speculative": NGram(k=2)} if name == "phi3" else {}
    with open_engine(
        base, tensor_parallel=2, adapters={"one": folders["one"]}, max_adapters=2, **options
    ) as engine:
        engine.load_adapter("two", folders["two"])
        prompts = base.prompts((5, 17, 40))
        asked = ["one", None, "two"]
        requests = [
            engine.submit(prompt, GREEDY, adapter=adapter)
            for prompt, adapter in zip(prompts, asked, strict=True)
        ]
        run(engine)
        for request in requests:
            (oracles | {None: base})[request.adapter].assert_greedy(request.result())
        assert len(set(engine.runtime.digests())) == 1


PLACES = {
    "stages": ("qwen3-biases", {"pipeline_parallel": 2}),
    "stages of ranks": ("qwen3-biases", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "ranks with requests": ("moe-even", {"data_parallel": 2}),
}


@pytest.mark.parametrize("place", PLACES)
def test_each_rank_has_the_adapters_of_its_layers_and_requests(
    checkpoints: dict[str, Any], expert_checkpoints: dict[str, Any], tmp_path: Path, place: str
) -> None:
    """Chunks, sessions and decode steps; slots are filled and freed while requests run."""
    name, ranks = PLACES[place]
    base = (checkpoints | expert_checkpoints)[name]
    folders, oracles = {}, {None: base}
    for seed, each in enumerate(("one", "two")):
        folders[each] = write_adapter(tmp_path / each, base.model, ATTENTION, seed=seed)
        merged(base.model, folders[each]).save_pretrained(tmp_path / f"merged-{each}")
        oracles[each] = type(base)(tmp_path / f"merged-{each}")
    with open_engine(base, **ranks, adapters={"one": folders["one"]}, max_adapters=2) as engine:
        prompts = base.prompts((5, 40, 17, 33))
        asked = ["one", "two", None, "one"]
        requests = [engine.submit(prompts[0], GREEDY, adapter="one")]
        engine.step()
        engine.load_adapter("two", folders["two"])
        for prompt, adapter in zip(prompts[1:], asked[1:], strict=True):
            requests.append(engine.submit(prompt, GREEDY, adapter=adapter))
        run(engine)
        for request, adapter in zip(requests, asked, strict=True):
            assert request.adapter == adapter
            oracles[adapter].assert_greedy(request.result())
        with engine.session(adapter="two") as session:
            session.append(prompts[1])
            oracles["two"].assert_greedy(session.generate(GREEDY))
            session.append(prompts[0])
            result = session.generate(GREEDY)
            assert result.cached_tokens > 0
            oracles["two"].assert_greedy(result)
        engine.unload_adapter("one")
        engine.load_adapter("again", folders["two"])
        result = engine.generate(prompts[3], GREEDY, adapter="again")
        oracles["two"].assert_greedy(result)


@pytest.mark.parametrize("ranks", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_an_adapter_is_merged_by_each_rank(
    checkpoints: dict[str, Any], tmp_path: Path, ranks: dict[str, int]
) -> None:
    base = checkpoints["qwen3-biases"]
    folder = write_adapter(tmp_path / "adapter", base.model)
    merged(base.model, folder).save_pretrained(tmp_path / "merged")
    oracle = type(base)(tmp_path / "merged")
    with open_engine(base, **ranks, merge_adapter=folder) as engine:
        for result in engine.generate(base.prompts((5, 40)), GREEDY):
            oracle.assert_greedy(result)
