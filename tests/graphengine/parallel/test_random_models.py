"""Two ranks of families that `AutoModelForCausalLM` opens, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
from events import GENEROUS_S

from extent import some_of
from graphengine import Engine, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.models.launches import Share
from graphengine.models.splitting.rank_sizes import of_rank

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "options"),
    some_of(
        [
            ("glm-lite", {"tensor_parallel": 2}),
            ("glm-lite", {"tensor_parallel": 2, "expert_parallel": True}),
            ("minimax", {"pipeline_parallel": 2}),
            ("exaone", {"pipeline_parallel": 2}),
            ("ernie", {"tensor_parallel": 2}),
            ("hunyuan-moe", {"tensor_parallel": 2}),
            ("stablelm-side-by-side", {"tensor_parallel": 2}),
        ],
        *(1, 2, 4),
    ),
)
def test_two_ranks_compute_what_transformers_does(
    random_oracles: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    oracle = random_oracles[name]
    sizes = {"max_batch": 3, "max_seq_len": 160, "block_size": 8, "prefill_buckets": (8, 32)}
    options = {"device": "cpu", "dtype": "float32", "wait_limit_s": GENEROUS_S} | sizes | options
    with Engine.from_pretrained(oracle.path, **options) as engine:
        for result in engine.generate(oracle.prompts((1, 3, 70)), GREEDY):
            oracle.assert_greedy(result)


def test_norms_of_whole_rows_are_not_split(random_oracles: dict[str, Any]) -> None:
    model = read_model_config(Checkpoint.open(random_oracles["minimax"].path).config)
    with pytest.raises(ValueError, match="tensor_parallel=2 does not split the norms of all 6 he"):
        of_rank(model, Share(0, 2))
