"""Engines with packed weights on a GPU: with drafts, in a crowd, paused, in buckets of any size
they say what a plain run of such an engine says, and nearly what a CPU says.
"""

from __future__ import annotations

import functools

import pytest
import torch

from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, sampled
from engines.speculation import Job, Outcome, outcomes
from graphengine.speculative import MTP

pytestmark = pytest.mark.gpu

KINDS = ("fp8", "int8", "int4")
LENGTH = 60
JOBS = [
    Job(PROMPT, greedy(LENGTH, ignore_eos=True)),
    Job(OTHER, sampled(LENGTH, seed=3)),
    Job(LONG, greedy(LENGTH, ignore_eos=True)),
]
ENGINE = {"device": "cuda", "dtype": "bfloat16", "row_family": "dot"}


@functools.cache
def alone(kind: str, head: bool) -> list[Outcome]:
    with open_engine(**ENGINE, quantize=kind, quantize_lm_head=head) as engine:
        return [outcomes(engine, [job])[0] for job in JOBS]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_drafts_and_pauses_change_no_token(kind: str, head: bool) -> None:
    packed = {"quantize": kind, "quantize_lm_head": head}
    pool = {"kv_blocks": 20, "swap_blocks": 60}
    with open_engine(**ENGINE, **packed, **pool, speculative=MTP(k=2)) as engine:
        assert outcomes(engine, JOBS) == alone(kind, head)
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_says_nearly_what_a_cpu_says(kind: str) -> None:
    """Both multiply by the same numbers: greedy tokens agree until two are nearly as good."""
    said = []
    for options in (ENGINE, {"device": "cpu", "dtype": "float32"}):
        with open_engine(**options, quantize=kind) as engine:
            said.append(engine.generate(PROMPT, greedy(24, ignore_eos=True)).token_ids)
    agreed = [one == other for one, other in zip(*said, strict=True)]
    assert all(agreed[:6]), f"{said=}"


# Prefill with activations in e4m3.

FP8 = {"quantize": "fp8", "activations": "fp8"}


def test_rounded_activations_change_no_token_in_a_crowd() -> None:
    with open_engine(**ENGINE, **FP8) as engine:
        alone = [outcomes(engine, [job])[0] for job in JOBS]
        assert outcomes(engine, JOBS) == alone
    pool = {"kv_blocks": 20, "swap_blocks": 60}
    with open_engine(**ENGINE, **FP8, **pool, speculative=MTP(k=2)) as engine:
        assert outcomes(engine, JOBS) == alone
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0


def test_a_gpu_rounds_as_a_cpu_does() -> None:
    """The log-probabilities of a text are near; rounding decides between tokens that are as good.

    Rounding moves them by about 0.3, wrong products by several.
    """
    found = []
    for options in (ENGINE, {"device": "cpu", "dtype": "float32"}):
        with open_engine(**options, **FP8, prompt_logprobs=True) as engine:
            result = engine.generate(LONG, greedy(1, prompt_logprobs=0))
            assert result.prompt_logprobs is not None
            pairs = zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
            found.append([entry[token].logprob for token, entry in pairs if entry is not None])
    differences = torch.tensor(found[0]) - torch.tensor(found[1])
    assert len(differences) > 30 and differences.square().mean().sqrt() < 0.5
