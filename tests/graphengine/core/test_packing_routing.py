"""Prefills that feed several prompts and record their experts: no record depends on which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.family_models import FamilyModel
from checkpoints.random_models import make
from engines.packed_replies import assert_alike, chunks_of, params_of, prompt_of, replies, same
from engines.small_engine import open_engine, run, sampled, step_until
from extent import extent
from graphengine import Engine
from graphengine.routing_record import Ids

LENGTHS = (5, 20, 1, 40, 9)
OPTIONS = {"device": "cpu", "dtype": "float32", "prompts_per_prefill": 4, "max_batch": 5}
EXPERTS = 6
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": SIZES | {"moe_intermediate_size": 32, "num_experts": EXPERTS},
    "GptOss": SIZES | {"num_local_experts": EXPERTS, "sliding_window": 19},
    # The last layer has no experts, so that its last lanes are routed once.
    "Qwen3Moe, dense last": SIZES
    | {"moe_intermediate_size": 32, "num_experts": EXPERTS, "mlp_only_layers": [1]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, sizes in FAMILIES.items():
        found[name] = tmp_path_factory.mktemp("model")
        family = name.partition(",")[0]
        FamilyModel(lambda family=family, sizes=sizes: make(family, **sizes)).write(found[name], 0)
    return found


def recording(path: Path, **options: Any) -> Engine:
    return open_engine(path, **OPTIONS | {"record_routing": True} | options)


def prompts() -> list[list[int]]:
    made = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    made[-1] = made[1] + made[-1]
    return made


def others(tokens: int, layers: int) -> Ids:
    """Random experts of so many tokens."""
    drawn = np.random.default_rng(tokens).random((tokens, layers, EXPERTS))
    return np.argsort(drawn, axis=2)[..., :2].astype(np.int16)


def routing_of(found: Sequence[tuple[Any, Any]]) -> list[Ids]:
    return [bits[-1].numpy() for _, bits in found]


@pytest.mark.parametrize(
    ("family", "caching", "lookahead"),
    [("Qwen3Moe", True, 1), ("Qwen3Moe, dense last", False, 0), ("GptOss", False, 2)],
)
def test_no_record_depends_on_what_a_prompt_is_packed_with(
    models: dict[str, Path], family: str, caching: bool, lookahead: int
) -> None:
    """Some replay a record themselves: of a part of their prompt, of all of it, or of more."""
    path = models[family]
    layers = 1 if "dense" in family else 2
    options: list[dict[str, Any]] = [{} for _ in LENGTHS]
    for index, tokens in ((0, 7), (1, 12), (3, 40)):
        options[index] = {"routing": others(tokens, layers)}
    opened = {"prefix_caching": caching, "lookahead": lookahead}
    assert_alike(lambda: recording(path, **opened), prompts(), options=options, packed=2)
    with recording(path, **opened) as engine:
        found = routing_of(replies(engine, prompts(), options))
    for record, own, prompt in zip(found, options, prompts(), strict=True):
        assert record.shape == (len(prompt) + 5, layers, 2) and (record >= 0).all()
        if own:
            assert (record[: len(own["routing"])] == own["routing"][: len(record)]).all()


def test_packed_records_can_be_replayed_packed(models: dict[str, Path]) -> None:
    with recording(models["Qwen3Moe"]) as engine:
        free = replies(engine, prompts())
        replayed = replies(engine, prompts(), [{"routing": each} for each in routing_of(free)])
        assert engine.counters["packed_chunks"] >= 4
    assert all(map(same, free, replayed))


def test_a_prompt_has_the_experts_of_blocks_that_another_fills_in_the_same_replay(
    models: dict[str, Path],
) -> None:
    beginning = prompt_of(16, vocabulary=250)
    made = [beginning + prompt_of(length, vocabulary=250) for length in (3, 5)]
    with recording(models["Qwen3Moe"]) as engine:
        expected = [engine.generate(each, params_of(each)).routing for each in made]
    with recording(models["Qwen3Moe"], prefix_caching=True) as engine:
        requests = [engine.submit(each, params_of(each)) for each in made]
        assert chunks_of(engine) == [[(0, 0, 19), (1, 16, 5)]]
        found = [request.result() for request in requests]
    assert [result.cached_tokens for result in found] == [0, 16]
    for result, record in zip(found, expected, strict=True):
        assert torch.equal(torch.tensor(result.routing), torch.tensor(record))


@pytest.mark.parametrize("lost", range(extent(2, 3)))
def test_one_of_several_may_be_cancelled_while_its_prompt_is_fed(
    models: dict[str, Path], lost: int
) -> None:
    made = [prompt_of(length, vocabulary=250) for length in (12, 9, 8)]
    with recording(models["Qwen3Moe"], lookahead=2) as engine:
        expected = [engine.generate(each, sampled(4, seed=1)).routing for each in made]
        requests = [engine.submit(each, sampled(4, seed=1)) for each in made]
        step_until(engine, lambda: engine.counters["packed_chunks"] == 2)
        requests[lost].cancel()
        run(engine)
        found = [request.result().routing for request in requests]
    for index, (record, wanted) in enumerate(zip(found, expected, strict=True)):
        assert record is not None and wanted is not None
        count = len(record)
        assert (record == wanted[:count]).all()
        assert index == lost or count == len(wanted)
